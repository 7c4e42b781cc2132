"""The model card of a converted checkpoint, made from the files in its folder only.

The card's own part is between two markers in README.md. When the card is written again, the text before and after the
markers is kept, as are the keys of the front matter that the card does not set. All text of the own part is in the
template, `card.md.jinja`.
"""

import pathlib
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import jinja2
import torch
from huggingface_hub import ModelCard, ModelCardData
from transformers.modelcard import TASK_MAPPING
from transformers.models.auto import modeling_auto

from hf_efficient_attn.checkpoint.source import FILE, TRAINED, read_origin
from hf_efficient_attn.errors import UnsupportedAttentionError, clean, refusing
from hf_efficient_attn.integration.layers import ranges
from hf_efficient_attn.integration.settings import EfficientAttentionConfig, Entry
from hf_efficient_attn.io.json import read_json_object
from hf_efficient_attn.io.reading import read_text
from hf_efficient_attn.io.writing import replacing
from hf_efficient_attn.methods import MethodConfig, available_methods, method_info, parameter_shapes
from hf_efficient_attn.models import auto_class, model_type
from hf_efficient_attn.standalone.export import MODULE

NAME = "README.md"
START, END = "<!-- hf_efficient_attn -->", "<!-- /hf_efficient_attn -->"
# The markers have lines of their own. Values in the front matter or in a command never fill a whole line.
OWN_PART = re.compile(rf"^{START}$(.*?)^{END}$", re.S | re.M)
# The repository's name in the examples, until the checkpoint is pushed.
_PLACEHOLDER = "ORG/NAME"
_TAGS = ("efficient-attention", "hf_efficient_attn")
# The form of the hub's licence identifiers, which https://hf.co/docs/hub/repositories-licenses lists.
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,49}")
# Tags of the original that need not be true of a converted checkpoint.
_OTHER_TAGS = ("endpoints_compatible", "autotrain_compatible", "text-embeddings-inference", "text-generation-inference")
# The class names of Transformers' models for each task of its pipelines.
_PIPELINES: dict[str, Any] = {
    **TASK_MAPPING,
    "feature-extraction": modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
    "image-feature-extraction": modeling_auto.MODEL_FOR_IMAGE_MAPPING_NAMES,
}


class OwnFile(NamedTuple):
    """A method that is not part of this package, and the file that registers it; None for a program or notebook."""

    method: str
    name: str | None

    @property
    def line(self) -> str:
        """The line of Python that registers the method."""
        if self.name is None:
            return f"# first run the code that registers {self.method}"
        return f"import {self.name.removesuffix('.py').replace('/', '.')}  # registers {self.method}"


class Facts:
    """Everything that a card is made of, read from the files of a converted checkpoint.

    With `may_be_exact` the checkpoint can also be one that was converted back to exact attention.

    Attributes:
        folder: The folder of the checkpoint.
        architecture: The name of the model's class, or None.
        layers: The number of layers, or None.
        windowed: The layers that have a sliding window of the model's own.
        parts: Pairs of the name of a part of a composite model ("" for the model itself) and its settings.
        origin: The contents of `efficient_attention.json`, with None for keys that it does not have.
        kernel: The kernel repository that computes the attention, as ORG/NAME:METHOD; None without one.
        code: The auto class that loads the model with the code in the checkpoint (`trust_remote_code=True`); None if
            there is no such code.
        benchmark: The contents of `benchmark.json`, or None.
        distillation: The contents of `distillation.json`, or None.

    Raises:
        UnsupportedAttentionError: There is no `config.json`, it names no method of this package, or a file is damaged.
            The message names the file.
    """

    def __init__(self, folder: "str | pathlib.Path", *, may_be_exact: bool = False) -> None:
        self.folder = folder = pathlib.Path(folder)
        config, self.origin = read_json_object(folder / "config.json"), read_origin(folder / FILE, folder)
        self.parts = tuple(_settings_of_parts(config))
        if not self.parts and not (may_be_exact and self.has(FILE)):
            raise UnsupportedAttentionError(
                f"{folder / 'config.json'} names no attention method of hf_efficient_attn: make a converted checkpoint "
                "of it with 'hf-efficient-attn convert', or model.save_pretrained(folder) after hea.convert(model, "
                "method)"
            )
        with refusing(f"{folder / 'config.json'} cannot be understood"):
            name = (config.get("architectures") or [None])[0]
            is_name = isinstance(name, str) and name.isascii() and name.isidentifier()
            self.architecture: str | None = name if is_name else None
            count = next((config[key] for key in ("num_hidden_layers", "n_layer", "n_layers") if key in config), None)
            self.layers: int | None = count if type(count) is int and count > 0 else None
            self.windowed = [i for i, kind in enumerate(config.get("layer_types") or ()) if "sliding" in kind]
            implementation, autos = config.get("attn_implementation"), config.get("auto_map") or {}
            self.kernel = implementation if isinstance(implementation, str) and "/" in implementation else None
            codes = [auto for auto in autos if auto.isidentifier() and autos[auto] == f"{MODULE}.{name}"]
            self.code: str | None = codes[-1] if codes else None
        results = (folder / f"{name}.json" for name in ("benchmark", "distillation"))
        self.benchmark, self.distillation = (read_json_object(x) if x.exists() else None for x in results)

    @property
    def configs(self) -> list[MethodConfig]:
        """The configs of all methods in the model, in the order of the config."""
        return [entry.config for _, settings in self.parts for entry in settings.entries]

    @property
    def methods(self) -> list[str]:
        """The names of all methods in the model."""
        return list(dict.fromkeys(config.method for config in self.configs))

    @property
    def learned(self) -> list[str]:
        """The names of the parameters that the methods learn."""
        with torch.device("meta"):
            return sorted({name for config in self.configs for name in parameter_shapes(config)})

    @property
    def own_files(self) -> list[OwnFile]:
        """The methods that are registered outside of this package, sorted by module."""
        return [
            OwnFile(method, None if module == "__main__" else f"{module.replace('.', '/')}.py")
            for module, method in sorted({(type(config).__module__, config.method) for config in self.configs})
            if not module.startswith("hf_efficient_attn.")
        ]

    @property
    def is_extended(self) -> bool:
        """Whether the position table is longer than the trained one."""
        return (self.origin["max_length"] or 0) > (self.origin[TRAINED] or 0)

    def has(self, name: str) -> bool:
        """Whether there is a file of this name in the folder."""
        return (self.folder / name).is_file()


def _settings_of_parts(
    config: Mapping[str, Any], part: str = "", depth: int = 0
) -> Iterator[tuple[str, EfficientAttentionConfig]]:
    """(name of the part, its settings) of every part of a config that names a method."""
    method, stored = config.get("attn_implementation"), config.get("efficient_attention")
    if isinstance(method, dict):  # a composite model; "" is the model itself, and the parts repeat their own
        method = method.get("")
    elif depth and method is None and isinstance(stored, dict):  # a part of a composite model
        method = stored.get("method")
    method = str(method).rpartition(":")[2]  # of a kernel repository, ORG/NAME:METHOD
    if method in available_methods():
        settings = EfficientAttentionConfig.from_dict(stored or {}, method)
        yield part, settings if settings.method == method else EfficientAttentionConfig(method)
    if depth < 2:
        for key, value in config.items():
            if isinstance(value, dict) and key not in ("efficient_attention", "attn_implementation"):
                yield from _settings_of_parts(value, f"{part}.{clean(key)}".lstrip("."), depth + 1)


def write_card(folder: "str | pathlib.Path", *, name: str | None = None) -> pathlib.Path:
    """Write README.md of a converted checkpoint, from its config.json and the result files of commands in its folder.

    The other files are efficient_attention.json, benchmark.json and distillation.json. The same files give the same
    card, byte for byte. Of a README.md that exists, the part between the markers is replaced, and in the front matter
    the card's own keys. All other text, tags and keys are kept, also those of a README.md without markers. The
    key `base_model_relation` is not set, because none of its four values describes a conversion.

    Args:
        folder: The folder of a checkpoint whose config names a method of this package; or that was converted back to
            exact attention, has an efficient_attention.json, and gets a card that says so.
        name: The title of the card; by default the name of the folder. `push` replaces it by that of the repository.

    Returns:
        The path of README.md.

    Raises:
        UnsupportedAttentionError: The folder does not contain a converted checkpoint, or one of the files is damaged.
            Nothing has been written.
    """
    text, path = make_card(folder, name), pathlib.Path(folder) / NAME
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8", newline="\n")
    return path


def make_card(folder: "str | pathlib.Path", name: str | None = None) -> str:
    """The text that `write_card` writes, which has its arguments and refusals."""
    facts = Facts(folder, may_be_exact=True)
    path = facts.folder / NAME
    return update_card(read_text(path) if path.exists() else "", facts, name)


def update_card(text: str, facts: Facts, name: str | None = None) -> str:
    """The text of a card made from facts, with what it does not set of an earlier text; `name` as for `write_card`."""
    card = read_card(text)
    part, lines = OWN_PART.search(card.text), card.text.split("\n")
    if (lines.count(START), lines.count(END)) != ((1, 1) if part else (0, 0)):
        raise UnsupportedAttentionError(
            f"{facts.folder / NAME} must contain the lines {START} and {END} once and in this order, or not at all"
        )
    before, after = (card.text[: part.start()], card.text[part.end() :]) if part else ("", f"\n{card.text}")
    title = name or facts.folder.resolve().name or "Model"
    with refusing(f"no card can be made of benchmark.json and distillation.json in {facts.folder}"):
        loader = jinja2.PackageLoader("hf_efficient_attn.hub", "")
        environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined)  # Markdown: no escapes
        environment.filters |= {"text": escape, "quote": shlex.quote}
        body = environment.get_template("card.md.jinja").render(_context(facts, title))
        body = re.sub(r"\n{3,}", "\n\n", body).strip()
    origin = facts.origin
    tags = [tag for tag in origin["tags"] or () if tag not in _OTHER_TAGS]
    # The card's own keys of the front matter.
    new = ModelCardData(
        library_name="transformers",
        base_model=origin["base_model"],
        license=origin["license"] if _LICENSE.fullmatch(origin["license"] or "") else None,
        language=origin["language"],
        pipeline_tag=origin["pipeline_tag"] or pipeline_of(facts),
        tags=[*(_TAGS if facts.methods else ()), *facts.methods, *tags],
    ).to_dict()
    old = card.data.to_dict()
    kept = [tag for tag in old.get("tags") or () if tag not in (*_TAGS, *available_methods(), *new.get("tags", ()))]
    data = ModelCardData(**{**old, **new, "tags": [*new.get("tags", ()), *kept] or None})
    return f"---\n{data.to_yaml()}\n---\n{before}{START}\n{body}\n{END}{after}"


def for_repository(text: str, repo_id: str) -> str:
    """The text of a card with the repository's name as its title and in its examples."""

    def rename(part: re.Match[str]) -> str:
        title = f"# {escape(repo_id.rpartition('/')[2])}"
        titled = re.sub(r"^# .*$", lambda _: title, part[0], count=1, flags=re.M)
        return titled.replace(f'"{_PLACEHOLDER}"', f'"{repo_id}"')

    return OWN_PART.sub(rename, text, count=1)


def read_card(text: str) -> ModelCard:
    """A card as huggingface_hub reads it. One with a front matter that cannot be read is refused."""
    text = text.replace("\r\n", "\n")
    with refusing(f"the front matter of {NAME} cannot be read"):  # errors of the YAML library among others
        return ModelCard(text if text.lstrip().startswith("---") else f"---\n\n---\n{text}")


def card_problems(text: str) -> list[str]:
    """What the hub's own check of a card's front matter would report, as far as that is known without the hub."""
    data: dict[str, Any] = read_card(text).data.to_dict()
    missing = {
        "license": "users cannot know what they may do;",
        "base_model": "readers cannot find the original; convert again with --base-model ORG/NAME, or",
        "pipeline_tag": "the hub does not know the task;",
    }
    return [f"no {key}: {why} add '{key}:' to the front matter" for key, why in missing.items() if key not in data]


def pipeline_of(facts: Facts) -> str | None:
    """The task of the pipeline that fits the architecture, or None if its name does not tell."""
    return next((task for task, names in _PIPELINES.items() if facts.architecture in names.values()), None)


def escape(value: object) -> str:
    """Write a value as plain text on one line of Markdown, also inside a table: the template's filter `text`."""
    return re.sub(r"[\\`*_{}\[\]<>|~$#&]", r"\\\g<0>", clean(str(value), 1000))


def _context(facts: Facts, title: str) -> dict[str, Any]:
    """The variables of the template."""
    architecture = facts.architecture or ""
    own_type = model_type(architecture)
    exact = {c.method: c.exact_length for c in sorted(facts.configs, key=lambda config: -config.exact_length)}
    return {
        "facts": facts,
        "limits": [(method_info(method), exact[method]) for method in facts.methods],
        "methods": [
            _method(facts, part, settings, entry) for part, settings in facts.parts for entry in settings.entries
        ],
        "model_class": auto_class(architecture) or architecture or "AutoModel",
        # A model of this package also has attention outside its numbered layers.
        "num_layers": None if own_type else facts.layers,
        "own_type": own_type,
        "pipeline": pipeline_of(facts),
        "repository": _PLACEHOLDER,
        "title": title,
    }


def _method(facts: Facts, part: str, settings: EfficientAttentionConfig, entry: Entry) -> dict[str, Any]:
    config, layers = entry.config, entry.layers
    numbers = range(0 if model_type(facts.architecture or "") else facts.layers or 0)
    if layers is None and facts.windowed and not part:
        layers = tuple(layer for layer in numbers if layer not in facts.windowed)
    rows = [(x.name, getattr(config, x.name), x.default, x.metadata.get("help", "")) for x in fields(config)]
    return {
        "info": method_info(config.method),
        "part": part,
        "layers": None if layers is None else ranges(layers),
        "numbered": any(isinstance(layer, int) for layer in layers or ()),
        "exact": ranges(n for n in numbers if settings.for_layer(n) is None) if len(settings.entries) > 1 else "",
        "hyperparameters": [row for row in rows if row[1] != row[2]],
    }
