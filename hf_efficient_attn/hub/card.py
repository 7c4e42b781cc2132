"""The model card of a converted checkpoint, made from the files in its folder only.

The card's own part is between two markers in README.md. When the card is written again, the text before and after the
markers is kept, as are the keys of the front matter that the card does not set. All text of the own part is in the
template, `card.md.jinja`.
"""

import functools
import importlib.resources
import inspect
import pathlib
import re
import shlex
from dataclasses import fields
from typing import Any

import jinja2
import transformers
from huggingface_hub import ModelCard, ModelCardData
from transformers.modelcard import TASK_MAPPING
from transformers.models.auto import modeling_auto

from hf_efficient_attn.checkpoint.files import refusing
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.hub.facts import Facts, clean, read_facts
from hf_efficient_attn.integration.layers import ranges
from hf_efficient_attn.integration.settings import EfficientAttentionConfig, Entry
from hf_efficient_attn.io.writing import replacing
from hf_efficient_attn.methods import available_methods, method_info
from hf_efficient_attn.models import auto_class, model_type

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
_PIPELINES = {
    **TASK_MAPPING,
    "feature-extraction": modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
    "image-feature-extraction": modeling_auto.MODEL_FOR_IMAGE_MAPPING_NAMES,
}


def write_card(folder: "str | pathlib.Path", *, name: str | None = None) -> pathlib.Path:
    """Write README.md of a converted checkpoint, from its config.json and the result files of commands in its folder.

    The other files are efficient_attention.json, benchmark.json and distillation.json. The same files give the same
    card, byte for byte. Of a README.md that exists, the part between the markers is replaced, and in the front matter
    the card's own keys. All other text, tags and keys are kept, also those of a README.md without markers. The
    key `base_model_relation` is not set, because none of its four values (adapter, merge, quantized, finetune)
    describes a conversion.

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
    facts = read_facts(folder, may_be_exact=True)
    path = facts.folder / NAME
    text = update_card(path.read_text(encoding="utf-8", errors="replace") if path.exists() else "", facts, name)
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8", newline="\n")
    return path


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
        body = re.sub(r"\n{3,}", "\n\n", _template().render(_context(facts, title))).strip()
    old, new = card.data.to_dict(), front_matter(facts).to_dict()
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


def front_matter(facts: Facts) -> ModelCardData:
    """The card's own keys of the front matter."""
    origin = facts.origin
    tags = [tag for tag in origin["tags"] or () if tag not in _OTHER_TAGS]
    return ModelCardData(
        library_name="transformers",
        base_model=origin["base_model"],
        license=origin["license"] if _LICENSE.fullmatch(origin["license"] or "") else None,
        language=origin["language"],
        pipeline_tag=origin["pipeline_tag"] or pipeline_of(facts),
        tags=[*(_TAGS if facts.methods else ()), *facts.methods, *tags],
    )


def read_card(text: str) -> ModelCard:
    """A card as huggingface_hub reads it.

    Raises:
        UnsupportedAttentionError: Its front matter cannot be read.
    """
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


@functools.cache
def _template() -> jinja2.Template:
    text = importlib.resources.files("hf_efficient_attn.hub").joinpath("card.md.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)  # Markdown, not HTML
    environment.filters |= {"text": escape, "quote": shlex.quote}
    return environment.from_string(text)


def _context(facts: Facts, title: str) -> dict[str, Any]:
    """The variables of the template."""
    architecture = facts.architecture or ""
    own_type = model_type(architecture)
    exact = {c.method: c.exact_length for c in sorted(facts.configs, key=lambda config: -config.exact_length)}
    # Whether a model of Transformers interpolates its positions for pictures of another size.
    forward = getattr(getattr(transformers, architecture, None), "forward", None)
    return {
        "facts": facts,
        "limits": [(method_info(method), exact[method]) for method in facts.methods],
        "methods": [_method(facts, part, choice, entry) for part, choice in facts.choices for entry in choice.entries],
        "model_class": auto_class(architecture) or architecture or "AutoModel",
        # A model of this package also has attention outside its numbered layers.
        "num_layers": None if own_type else facts.layers,
        "other_sizes": forward is not None and "interpolate_pos_encoding" in inspect.signature(forward).parameters,
        "own_type": own_type,
        "pipeline": pipeline_of(facts),
        "repository": _PLACEHOLDER,
        "title": title,
    }


def _method(facts: Facts, part: str, choice: EfficientAttentionConfig, entry: Entry) -> dict[str, Any]:
    """A method of the checkpoint with its layers and hyperparameters."""
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
        "exact": ranges(n for n in numbers if choice.for_layer(n) is None) if len(choice.entries) > 1 else "",
        "hyperparameters": [row for row in rows if row[1] != row[2]],
    }
