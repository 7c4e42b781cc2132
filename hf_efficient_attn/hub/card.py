"""The model card of a converted checkpoint, made from the files in its folder only.

The card's own part is between two markers in README.md. When the card is written again, the text before and after the
markers is kept, as are the keys of the front matter that the card does not set.
"""

import functools
import importlib.resources
import itertools
import logging
import pathlib
import re
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hf_efficient_attn.checkpoint.files import refusing
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.hub.context import PLACEHOLDER, context, escape, pipeline_of
from hf_efficient_attn.hub.facts import TASKS, Facts, read_facts
from hf_efficient_attn.io.writing import replacing
from hf_efficient_attn.methods import available_methods

logger = logging.getLogger(__name__)

NAME = "README.md"
START, END = "<!-- hf_efficient_attn -->", "<!-- /hf_efficient_attn -->"
# The markers have lines of their own. Values in the front matter or in a command never fill a whole line.
OWN_PART = re.compile(rf"^{START}$(.*?)^{END}$", re.S | re.M)
_TAGS = ("efficient-attention", "hf_efficient_attn")
_OWN_METRICS = "exact_attention_"
_METRICS = {
    "cosine": (f"{_OWN_METRICS}cosine", "Cosine similarity with exact attention"),
    "perplexity_ratio": (f"{_OWN_METRICS}perplexity_ratio", "Perplexity divided by that of exact attention"),
    "top1": (f"{_OWN_METRICS}top1", "Same first answer as exact attention"),
}
_ERROR = (f"{_OWN_METRICS}relative_error", "Relative error of attention, mean over layers")
# The form of the hub's licence identifiers, which https://hf.co/docs/hub/repositories-licenses lists.
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,49}")
# Tags of the original that need not be true of a converted checkpoint.
_OTHER_TAGS = ("endpoints_compatible", "autotrain_compatible", "text-embeddings-inference", "text-generation-inference")


def write_card(folder: "str | pathlib.Path", *, name: str | None = None) -> pathlib.Path:
    """Write README.md of a converted checkpoint, from its config.json and the result files of commands in its folder.

    The other files are efficient_attention.json, benchmark.json and distillation.json. The same files give the same
    card, byte for byte. In a README.md that contains a card of this package, the part between the markers is replaced,
    and in the front matter the card's own keys; tags and results of others are kept. Another README.md is kept as
    README.md.bak (or .bak2, ...), and a warning is logged. A licence without an identifier on the hub becomes "other",
    with its name. The key `base_model_relation` is not set, because none of
    its four values (adapter, merge, quantized, finetune) describes a conversion.

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
    old = path.read_text(encoding="utf-8", errors="replace") if path.exists() else None
    text = update_card(old, facts, name)
    if old is not None and _split(old) is None:
        backups = (path.with_name(f"{NAME}.bak{number if number > 1 else ''}") for number in itertools.count(1))
        backup = path.rename(next(free for free in backups if not free.exists()))
        logger.warning("%s was not written by hf_efficient_attn: it is kept as %s", path, backup.name)
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8", newline="\n")
    return path


def update_card(text: str | None, facts: Facts, name: str | None = None) -> str:
    """The text of a card made from facts; `name` is its title, by default the name of the folder.

    Of `text`, an earlier card, everything is kept that the card does not set. Another text counts as none.
    """
    before, after, old = (None if text is None else _split(text)) or ("", "\n", ModelCardData())
    with refusing(f"no card can be made of benchmark.json and distillation.json in {facts.folder}"):
        data = _merge(old, front_matter(facts, name))
        return f"---\n{data.to_yaml()}\n---\n{before}{START}\n{render(facts, name)}{END}{after}"


def _title(facts: Facts, name: str | None) -> str:
    return name or facts.folder.resolve().name or "Model"


def render(facts: Facts, name: str | None = None) -> str:
    """The card's own part, without markers and front matter; `name` is its title, by default that of the folder."""
    return re.sub(r"\n{3,}", "\n\n", _template().render(**context(facts, _title(facts, name)))).strip() + "\n"


@functools.cache
def _template() -> jinja2.Template:
    text = importlib.resources.files("hf_efficient_attn.hub").joinpath("card.md.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)  # Markdown, not HTML
    environment.filters["text"] = escape
    return environment.from_string(text)


def for_repository(text: str, repo_id: str) -> str:
    """The text of a card with the repository's name as its title and in its examples."""

    def rename(part: re.Match[str]) -> str:
        title = f"# {escape(repo_id.rpartition('/')[2])}"
        titled = re.sub(r"^# .*$", lambda _: title, part[0], count=1, flags=re.M)
        return titled.replace(f'"{PLACEHOLDER}"', f'"{repo_id}"')

    return OWN_PART.sub(rename, text, count=1)


def front_matter(facts: Facts, name: str | None = None) -> ModelCardData:
    """The card's own keys of the front matter; `name` as for `render`."""
    origin, results, license_name = facts.origin, eval_results(facts), None
    if origin["license"] and not _LICENSE.fullmatch(origin["license"]):
        license_name = re.sub(r"[^a-z0-9.]+", "-", origin["license"].lower()).strip("-.") or "unnamed"
    tags = [tag for tag in origin["tags"] if tag not in _OTHER_TAGS]
    return ModelCardData(
        library_name="transformers",
        base_model=origin["base_model"],
        license=origin["license"] if license_name is None else "other",
        license_name=license_name,
        language=origin["language"],
        pipeline_tag=origin["pipeline_tag"] or pipeline_of(facts),
        tags=[*(_TAGS if facts.methods else ()), *facts.methods, *tags],
        model_name=_title(facts, name) if results else None,
        eval_results=results or None,
    )


def eval_results(facts: Facts) -> list[EvalResult]:
    """Agreement and error of the checkpoint's own methods at each measured length."""
    benchmark = facts.benchmark
    if benchmark is None:
        return []
    data, task = benchmark["data"]["name"], TASKS[benchmark["task"]]
    return [
        EvalResult(
            task_type=task,
            dataset_type=re.sub(r"[^a-z0-9]+", "-", data.lower()).strip("-") or "unnamed",
            dataset_name=data,
            metric_type=metric,
            metric_value=float(f"{row[key]:.6g}"),
            metric_name=f"{title}, {row['length']} tokens",
            metric_args={"length": row["length"], "batch": row["batch"]},
        )
        for row in benchmark["measurements"]
        for key, (metric, title) in (("agreement", _METRICS[benchmark["agreement"]]), ("error", _ERROR))
        if row["own"] and row[key] is not None
    ]


def read_card(text: str) -> ModelCard:
    """A card as huggingface_hub reads it.

    Raises:
        UnsupportedAttentionError: Its front matter cannot be read.
    """
    text = text.replace("\r\n", "\n")
    with refusing("the front matter cannot be read"):  # errors of the YAML library among others
        return ModelCard(text if text.lstrip().startswith("---") else f"---\n\n---\n{text}")


def card_problems(text: str) -> list[str]:
    """What the hub's own check of a card's front matter would report, as far as that is known without the hub."""
    data: dict[str, Any] = read_card(text).data.to_dict()
    if not data:
        return ["there is no front matter"]
    missing = {
        "license": "users cannot know what they may do;",
        "base_model": "readers cannot find the original; convert again with --base-model ORG/NAME, or",
        "pipeline_tag": "the hub does not know the task;",
    }
    return [f"no {key}: {why} add '{key}:' to the front matter" for key, why in missing.items() if key not in data]


def _split(text: str) -> tuple[str, str, ModelCardData] | None:
    """(text before the card's part, text after it, front matter); None if the text is not a card of this package."""
    try:
        card = read_card(text)
    except UnsupportedAttentionError:
        return None
    body, part, lines = card.text, OWN_PART.search(card.text), card.text.split("\n")
    if part is None or lines.count(START) != 1 or lines.count(END) != 1:
        return None
    assert isinstance(card.data, ModelCardData)
    return body[: part.start()], body[part.end() :], card.data


def _merge(old: ModelCardData, new: ModelCardData) -> ModelCardData:
    """The user's keys, replaced by the card's. A licence, task or language is kept if the card has none."""
    others = [result for result in old.eval_results or () if not str(result.metric_type).startswith(_OWN_METRICS)]
    results = [*others, *(new.eval_results or ())]
    tags = [tag for tag in old.tags or () if tag not in (*_TAGS, *available_methods())]
    values = {**old.to_dict(), **new.to_dict(), "tags": [*(new.tags or ()), *tags] or None}
    values.pop("model-index", None)
    if results:
        values |= {"model_name": new.model_name or old.model_name, "eval_results": results}
    return ModelCardData(**values)
