"""The values that the template of a card uses. All of the card's text is in the template, `card.md.jinja`."""

import inspect
import re
import shlex
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, NamedTuple

import transformers

from hf_efficient_attn.checkpoint.provenance import INSTALL
from hf_efficient_attn.hub.facts import TASKS, Facts, clean
from hf_efficient_attn.integration.layers import ranges
from hf_efficient_attn.integration.settings import EfficientAttentionConfig, Entry, changed_hyperparameters
from hf_efficient_attn.methods import MethodConfig, method_info
from hf_efficient_attn.models import auto_class, model_type

# The repository's name in the examples, until the checkpoint is pushed.
PLACEHOLDER = "ORG/NAME"
# The original model in the command, if its id on the hub is not known.
SOURCE = "SOURCE"
# The options of `distill` that say how it trains.
_DISTILLATION_OPTIONS = (
    "data", "steps", "loss", "learning_rate", "length", "batch_size", "seed", "finetune_steps", "finetune_target",
    "finetune_learning_rate", "lora_rank",
)  # fmt: skip
# Tasks of pipelines of Transformers by the end of the architecture's name. The first that fits counts.
_TASKS = {
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForImageClassification": "image-classification",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "WhisperForConditionalGeneration": "automatic-speech-recognition",
    "ForQuestionAnswering": "question-answering",
    "BigGANModel": None,
    "WhisperModel": None,
    "Model": "feature-extraction",
}
_IMAGE_MODELS = ("ViT", "T2TViT", "DeiT", "Beit", "Swin", "Dinov2")


def pipeline_of(facts: Facts) -> str | None:
    """The task of the pipeline that fits the architecture, or None if its name does not tell."""
    name = facts.architecture or ""
    task = next((task for ending, task in _TASKS.items() if name.endswith(ending)), None)
    return "image-feature-extraction" if task == "feature-extraction" and name.startswith(_IMAGE_MODELS) else task


def escape(value: object) -> str:
    """Write a value as plain text on one line of Markdown, also inside a table: the template's filter `text`."""
    return re.sub(r"[\\`*_{}\[\]<>|~$#&]", r"\\\g<0>", clean(str(value), 1000))


def context(facts: Facts, name: str) -> dict[str, Any]:
    """The variables of the template; `name` is the title of the card."""
    architecture = facts.architecture or ""
    own_type = model_type(architecture)
    configs = [entry.config for _, choice in facts.choices for entry in choice.entries]
    exact = {config.method: config.exact_length for config in sorted(configs, key=lambda c: -c.exact_length)}
    own_files, install = find_own_files(facts), facts.origin[INSTALL]
    # Whether a model of Transformers interpolates its positions for pictures of another size.
    forward = getattr(getattr(transformers, architecture, None), "forward", None)
    return {
        "facts": facts,
        "command": _command(facts, own_files),
        "import_options": import_options(own_files),
        "install": install and shlex.quote(install),
        "limits": [(method_info(method), exact[method]) for method in facts.methods],
        "methods": [_method(facts, part, choice, entry) for part, choice in facts.choices for entry in choice.entries],
        "model_class": auto_class(architecture) or architecture or "AutoModel",
        # A model of this package also has attention outside its numbered layers.
        "num_layers": None if own_type else facts.layers,
        "other_sizes": forward is not None and "interpolate_pos_encoding" in inspect.signature(forward).parameters,
        "own_files": own_files,
        "own_type": own_type,
        "pipeline": pipeline_of(facts),
        "repository": PLACEHOLDER,
        "tasks": TASKS,
        "title": name,
    }


def _method(facts: Facts, part: str, choice: EfficientAttentionConfig, entry: Entry) -> dict[str, Any]:
    """A method of the checkpoint with its layers and hyperparameters."""
    config, layers = entry.config, entry.layers
    numbers = range(0 if model_type(facts.architecture or "") else facts.layers or 0)
    if layers is None and facts.windowed and not part:
        layers = tuple(layer for layer in numbers if layer not in facts.windowed)
    rows = [(x.name, getattr(config, x.name), x.default, x.metadata.get("help", "")) for x in fields(entry.config)]
    return {
        "info": method_info(config.method),
        "part": part,
        "layers": None if layers is None else ranges(layers),
        "numbered": any(isinstance(layer, int) for layer in layers or ()),
        "exact": ranges(n for n in numbers if choice.for_layer(n) is None) if len(choice.entries) > 1 else "",
        "hyperparameters": [row for row in rows if row[1] != row[2]],
    }


class OwnFile(NamedTuple):
    """A method that is not part of this package, and the file that registers it.

    `name` is the path of the file, and None for a method that was registered in a notebook or in the program itself.
    """

    method: str
    module: str
    name: str | None

    @property
    def line(self) -> str:
        """The line of Python that registers the method."""
        if self.name is None:
            return f"# first run the code that registers {self.method}"
        return f"import {self.module}  # registers {self.method}"


def find_own_files(facts: Facts) -> list[OwnFile]:
    """The methods of a checkpoint that are registered by files outside of this package."""
    return own_files_of(type(entry.config) for _, choice in facts.choices for entry in choice.entries)


def own_files_of(config_classes: Iterable[type[MethodConfig]]) -> list[OwnFile]:
    """Those of some methods that are registered by files outside of this package, in the order of their modules."""
    found = {(one.__module__, one.method) for one in config_classes}
    return [
        OwnFile(method, module, None if module == "__main__" else f"{module.replace('.', '/')}.py")
        for module, method in sorted(found)
        if not module.startswith("hf_efficient_attn.")
    ]


def import_options(own_files: Iterable[OwnFile]) -> list[str]:
    """The options of a command of this package for files that it does not know."""
    names = dict.fromkeys(file.name for file in own_files if file.name)
    return [word for name in names for word in ("--import", name)]


def _command(facts: Facts, own_files: Iterable[OwnFile]) -> str | None:
    """The command that makes this checkpoint; None for mixes and composite models, which need more."""
    if len(facts.choices) != 1 or facts.choices[0][0] or len(facts.choices[0][1].entries) != 1:
        return None
    entry, distilled = facts.choices[0][1].entries[0], facts.distillation
    words = ["convert" if distilled is None else "distill", facts.origin["base_model"] or SOURCE]
    words += ["--method", entry.config.method]
    for key, value in changed_hyperparameters(entry.config).items():
        words += ["--set", f"{key}={value}"]
    options = {
        "layers": None if entry.layers is None else ranges(entry.layers),
        "max_length": facts.origin["max_length"],
    }
    if distilled is not None:
        plan = {**distilled["plan"], "data": distilled["data"]["name"], "length": distilled["tokens"]}
        options |= {key: plan.get(key) for key in _DISTILLATION_OPTIONS}
    for key, value in options.items():
        words += [] if value is None else [f"--{key.replace('_', '-')}", str(value)]
    return shlex.join(["hf-efficient-attn", *words, "-o", "OUT", *import_options(own_files)])
