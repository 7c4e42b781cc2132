"""The values that the template of a card uses. All of the card's text is in the template, `card.md.jinja`."""

import dataclasses
import inspect
import re
import shlex
from collections.abc import Iterable
from typing import Any, NamedTuple

import transformers

from hf_efficient_attn.hub.facts import TASKS, Distillation, Facts, clean
from hf_efficient_attn.integration.layers import ranges
from hf_efficient_attn.methods import MethodConfig, method_info
from hf_efficient_attn.models import auto_class, model_type

# The repository's name in the examples, until the checkpoint is pushed.
PLACEHOLDER = "ORG/NAME"
# The original model in the command, if its id on the hub is not known.
SOURCE = "SOURCE"


class Pipeline(NamedTuple):
    """A pipeline of Transformers that takes the model: its task, and an example of a call."""

    task: str
    call: str


# By the end of the architecture's name. The first that fits counts.
_PIPELINES = {
    "ForMaskedLM": Pipeline("fill-mask", 'pipe(f"Paris is the {pipe.tokenizer.mask_token} of France.")'),
    "ForCausalLM": Pipeline("text-generation", 'pipe("Once upon a time", max_new_tokens=20)'),
    "LMHeadModel": Pipeline("text-generation", 'pipe("Once upon a time", max_new_tokens=20)'),
    "ForImageClassification": Pipeline("image-classification", 'pipe("image.jpg")'),
    "ForSequenceClassification": Pipeline("text-classification", 'pipe("A sentence.")'),
    "ForTokenClassification": Pipeline("token-classification", 'pipe("A sentence.")'),
    "WhisperForConditionalGeneration": Pipeline("automatic-speech-recognition", 'pipe("speech.wav")'),
    "ForQuestionAnswering": Pipeline("question-answering", 'pipe(question="Who wrote it?", context="She wrote it.")'),
}
_IMAGE_MODELS = ("ViT", "T2TViT", "DeiT", "Beit", "Swin", "Dinov2")


def pipeline_of(facts: Facts) -> Pipeline | None:
    """The pipeline that fits the architecture, or None if its name does not tell."""
    name = facts.architecture or ""
    for ending, pipeline in _PIPELINES.items():
        if name.endswith(ending):
            return pipeline
    if not name.endswith("Model") or name in ("BigGANModel", "WhisperModel"):
        return None
    if name.startswith(_IMAGE_MODELS):
        return Pipeline("image-feature-extraction", 'pipe("image.jpg")')
    return Pipeline("feature-extraction", 'pipe("A text.")')


def escape(value: object) -> str:
    """Write a value as plain text on one line of Markdown, also inside a table: the template's filter `text`."""
    return re.sub(r"[\\`*_{}\[\]<>|~$#&]", r"\\\g<0>", clean(str(value), 1000))


def context(facts: Facts, name: str) -> dict[str, Any]:
    """The variables of the template; `name` is the title of the card."""
    architecture = facts.architecture or ""
    own_type = model_type(architecture)
    # A model of this package also has attention outside its numbered layers.
    num_layers = None if own_type else facts.layers
    configs = [entry.config for _, choice in facts.choices for entry in choice.entries]
    exact = {config.method: config.exact_length for config in sorted(configs, key=lambda c: -c.exact_length)}
    own_files = find_own_files(facts)
    return {
        "facts": facts,
        "benchmark": facts.benchmark,
        "calibrated": [choice.calibrated_length for _, choice in facts.choices if choice.calibrated_length],
        "command": _command(facts, own_files),
        "import_options": "".join(f" {word}" for word in import_options(own_files)),
        "distillation": facts.distillation,
        "install": facts.install and shlex.quote(facts.install),
        "limits": [(method_info(method), exact[method]) for method in facts.methods],
        "methods": _methods(facts, num_layers),
        "model_class": auto_class(architecture) or architecture or "AutoModel",
        "num_layers": num_layers,
        "other_sizes": _takes_other_sizes(architecture),
        "own_files": own_files,
        "own_type": own_type,
        "pipeline": pipeline_of(facts),
        "repository": PLACEHOLDER,
        "task": facts.benchmark and TASKS[facts.benchmark.task],
        "title": name,
    }


def _takes_other_sizes(architecture: str) -> bool:
    """Whether a model of Transformers interpolates its positions for pictures of another size."""
    forward = getattr(getattr(transformers, architecture, None), "forward", None)
    return forward is not None and "interpolate_pos_encoding" in inspect.signature(forward).parameters


def _methods(facts: Facts, num_layers: int | None) -> list[dict[str, Any]]:
    """Every method of the checkpoint with its layers and hyperparameters."""
    found = []
    for part, settings in facts.choices:
        for entry in settings.entries:
            exact = [layer for layer in range(num_layers or 0) if settings.for_layer(layer) is None]
            fields = dataclasses.fields(entry.config)
            layers = entry.layers
            if layers is None and num_layers and facts.windowed and not part:
                layers = tuple(layer for layer in range(num_layers) if layer not in facts.windowed)
            found.append(
                {
                    "info": method_info(entry.config.method),
                    "part": part,
                    "layers": None if layers is None else ranges(layers),
                    "numbered": any(isinstance(layer, int) for layer in layers or ()),
                    "exact": ranges(exact) if len(settings.entries) > 1 else "",
                    "hyperparameters": [
                        (spec.name, getattr(entry.config, spec.name), spec.default, spec.metadata.get("help") or "")
                        for spec in fields
                        if getattr(entry.config, spec.name) != spec.default
                    ],
                }
            )
    return found


def _distillation_words(distilled: Distillation) -> list[str]:
    """The options of `distill` that say how it trains."""
    options: dict[str, object] = {
        "--data": distilled.data,
        "--steps": distilled.steps,
        "--loss": distilled.loss,
        "--learning-rate": distilled.learning_rate,
        "--length": distilled.tokens,
        "--batch-size": distilled.batch_size,
        "--seed": distilled.seed,
    }
    second = distilled.finetuning
    if second is not None:
        options["--finetune-steps"] = second.steps
        options["--finetune-target"] = second.target
        options["--finetune-learning-rate"] = second.learning_rate
        if second.lora_rank is not None:
            options["--lora-rank"] = second.lora_rank
    return [str(word) for pair in options.items() for word in pair]


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
    if len(facts.choices) != 1:
        return None
    part, settings = facts.choices[0]
    if part or len(settings.entries) != 1:
        return None
    config, layers = settings.entries[0].config, settings.entries[0].layers
    distilled = facts.distillation
    words = ["convert" if distilled is None else "distill", facts.base_model or SOURCE, "--method", config.method]
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        if value != spec.default:
            words += ["--set", f"{spec.name}={value}"]
    if layers is not None:
        words += ["--layers", ranges(layers)]
    if facts.max_length is not None:
        words += ["--max-length", str(facts.max_length)]
    if distilled is not None:
        words += _distillation_words(distilled)
    return shlex.join(["hf-efficient-attn", *words, "-o", "OUT", *import_options(own_files)])
