"""The model card of a converted checkpoint, made from the files in its folder only.

The card's own part is between two markers in README.md. When the card is written again, the text before and after the
markers is kept, as are the keys of the front matter that the card does not set.
"""

import functools
import importlib.resources
import logging
import os
import pathlib
import re
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import yaml_dump

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.hub.context import PLACEHOLDER, context, escape, pipeline_of
from hf_efficient_attn.hub.facts import TASKS, Facts, Measurement, read_facts
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
    "cosine": ("exact_attention_cosine", "Cosine similarity with exact attention"),
    "perplexity_ratio": ("exact_attention_perplexity_ratio", "Perplexity divided by that of exact attention"),
    "top1": ("exact_attention_top1", "Same first answer as exact attention"),
}
_ERROR = ("exact_attention_relative_error", "Relative error of attention, mean over layers")
# The form of the hub's licence identifiers, which https://hf.co/docs/hub/repositories-licenses lists.
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,49}")
_LANGUAGE = re.compile(r"[a-z]{2,3}|code|multilingual")
_SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+-]{0,59}")
# Tags that need not be true of a converted checkpoint.
_OTHER_TAGS = ("endpoints_compatible", "autotrain_compatible", "text-embeddings-inference", "text-generation-inference")


def write_card(folder: "str | pathlib.Path", *, name: str | None = None) -> pathlib.Path:
    """Write README.md of a converted checkpoint, from its config.json and the result files of commands in its folder.

    The other files are efficient_attention.json, benchmark.json and distillation.json. The same files give the same
    card, byte for byte. In a README.md that contains a card of this package, the part between the markers is replaced,
    and in the front matter the card's own keys; tags and results of others are kept. Another README.md is kept as
    README.md.bak (or .bak2, ...), and a warning is logged. Licence, languages, task and tags of the original are left
    out if the hub would not accept them; a licence without an identifier on the hub becomes "other", with its name. The
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
    old = path.read_text(encoding="utf-8", errors="replace") if path.exists() else None
    text = update_card(old, facts, name)
    if old is not None and _split(old) is None:
        backup = _unused_backup(path)
        os.replace(path, backup)
        logger.warning("%s was not written by hf_efficient_attn: it is kept as %s", path, backup.name)
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8", newline="\n")
    return path


def update_card(text: str | None, facts: Facts, name: str | None = None) -> str:
    """The text of a card made from facts.

    Args:
        text: The text of an earlier card, of which everything is kept that the card does not set. A text that is not a
            card of this package counts as none.
        facts: What the card says.
        name: The title, by default the name of the folder.
    """
    before, after, front = (None if text is None else _split(text)) or ("", "\n", {})
    data = _merge(front, front_matter(facts, name))
    return _join(data, f"{before}{START}\n{render(facts, name)}{END}{after}")


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
    """The text of a card with the repository's name as its title, in its examples and with its results."""
    name = repo_id.rpartition("/")[2]

    def rename(part: re.Match[str]) -> str:
        titled = re.sub(r"^# .*$", lambda _: f"# {escape(name)}", part[0], count=1, flags=re.M)
        return titled.replace(f'"{PLACEHOLDER}"', f'"{repo_id}"')

    def rename_results(block: re.Match[str]) -> str:
        # Only this line changes: the rest of the front matter can be the user's.
        entry = f"- {yaml_dump({'name': name}).strip()}"
        return re.sub(r"^(model-index:\n)- name: .*$", lambda found: found[1] + entry, block[0], count=1, flags=re.M)

    return REGEX_YAML_BLOCK.sub(rename_results, OWN_PART.sub(rename, text, count=1), count=1)


def front_matter(facts: Facts, name: str | None = None) -> dict[str, Any]:
    """The card's own keys of the front matter, as ModelCardData writes them; `name` as for `render`."""
    tags = [tag for tag in facts.tags if _TAG.fullmatch(tag) and tag not in _OTHER_TAGS]
    task, pipeline = facts.pipeline_tag, pipeline_of(facts)
    if task is None or not _SLUG.fullmatch(task):
        task = pipeline.task if pipeline else None
    languages: list[str] = [language for language in facts.languages if _LANGUAGE.fullmatch(language)]
    license_id, results = facts.license, eval_results(facts)
    data = ModelCardData(
        library_name="transformers",
        base_model=facts.base_model,
        license=license_id if license_id is None or _LICENSE.fullmatch(license_id) else "other",
        language=languages or None,
        pipeline_tag=task,
        tags=[*(_TAGS if facts.methods else ()), *facts.methods, *tags],
        model_name=_title(facts, name) if results else None,
        eval_results=results or None,
    )
    if license_id is not None and not _LICENSE.fullmatch(license_id):
        data["license_name"] = re.sub(r"[^a-z0-9.]+", "-", license_id.lower()).strip("-.") or "unnamed"
    return data.to_dict()


def eval_results(facts: Facts) -> list[EvalResult]:
    """Agreement and error of the checkpoint's own methods at each measured length."""
    benchmark = facts.benchmark
    if benchmark is None:
        return []
    data, task = benchmark.data, TASKS[benchmark.task]

    def result(entry: Measurement, metric: tuple[str, str], value: float) -> EvalResult:
        return EvalResult(
            task_type=task,
            dataset_type=re.sub(r"[^a-z0-9]+", "-", data.lower()).strip("-") or "unnamed",
            dataset_name=data,
            metric_type=metric[0],
            metric_value=float(f"{value:.6g}"),
            metric_name=f"{metric[1]}, {entry.length} tokens",
            metric_args={"length": entry.length, "batch": entry.batch},
        )

    found = []
    for entry in benchmark.measurements:
        if entry.own and entry.agreement is not None:
            found.append(result(entry, _METRICS[benchmark.agreement], entry.agreement))
        if entry.own and entry.error is not None:
            found.append(result(entry, _ERROR, entry.error))
    return found


def read_front_matter(text: str) -> dict[str, Any]:
    """Read the front matter of a card as huggingface_hub does; raise ValueError if that fails."""
    try:
        return ModelCard(text).data.to_dict() if text.lstrip().startswith("---") else {}
    except Exception as error:  # those of the YAML library among others
        raise ValueError(f"the front matter cannot be read: {' '.join(str(error).split())}") from error


def card_problems(text: str) -> list[str]:
    """What the hub's own check of a card's front matter would report, as far as that is known without the hub."""
    try:
        data = read_front_matter(text)
    except ValueError as error:
        return [str(error)]
    if not data:
        return ["there is no front matter"]
    found = []
    if "license" not in data:
        found.append("no license: users cannot know what they may do; add 'license:' to the front matter")
    elif not isinstance(data["license"], str) or not _LICENSE.fullmatch(data["license"]):
        found.append("license is not one of the hub's identifiers")
    found += [
        f"no {key}: {why} add '{key}:' to the front matter"
        for key, why in (
            ("base_model", "readers cannot find the original; convert again with --base-model ORG/NAME, or"),
            ("pipeline_tag", "the hub does not know the task;"),
        )
        if key not in data
    ]
    tag = data.get("pipeline_tag")
    if tag is not None and not (isinstance(tag, str) and _SLUG.fullmatch(tag)):
        found.append("pipeline_tag is not one of the hub's tasks")
    tags = data.get("tags") or []
    if not isinstance(tags, list) or not all(isinstance(item, str) for item in tags):
        found.append("tags is not a list of texts")
    return found


def _split(text: str) -> tuple[str, str, dict[str, Any]] | None:
    """(text before the card's part, text after it, front matter); None if the text is not a card of this package."""
    text = text.replace("\r\n", "\n")
    try:
        front = read_front_matter(text)
    except ValueError:
        return None
    block = REGEX_YAML_BLOCK.search(text)
    body = text[block.end() :] if block else text
    part, lines = OWN_PART.search(body), body.split("\n")
    if part is None or lines.count(START) != 1 or lines.count(END) != 1:
        return None
    return body[: part.start()], body[part.end() :], front


def _merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The user's keys, replaced by the card's. A licence, task or language is kept if the card has none."""
    tags = [tag for tag in old.get("tags") or () if tag not in (*_TAGS, *available_methods())]
    merged = {key: value for key, value in {**old, **new}.items() if key not in ("tags", "model-index")}
    if tags := list(dict.fromkeys([*new.get("tags", ()), *tags])):
        merged["tags"] = tags
    results = [*_results_of_others(old), *new.get("model-index", ())]
    if results:
        name = (new.get("model-index") or results)[0]["name"]
        merged["model-index"] = [{"name": name, "results": [r for entry in results for r in entry["results"]]}]
    return merged


def _results_of_others(old: dict[str, Any]) -> list[dict[str, Any]]:
    """The key model-index without the results of an earlier card of this package."""
    kept = []
    for entry in old.get("model-index") or ():
        results = []
        for result in entry["results"]:
            metrics = [m for m in result["metrics"] if not str(m["type"]).startswith(_OWN_METRICS)]
            if metrics:
                results.append({**result, "metrics": metrics})
        if results:
            kept.append({**entry, "results": results})
    return kept


def _join(data: dict[str, Any], body: str) -> str:
    """Front matter and body, after a check that huggingface_hub reads the same values from them."""
    text = f"---\n{ModelCardData(**data).to_yaml()}\n---\n{body}"
    card = ModelCard(text)
    if card.data.to_dict() != ModelCardData(**data).to_dict() or card.text != body:
        raise UnsupportedAttentionError("huggingface_hub reads other values from the card than were written")
    return text


def _unused_backup(path: pathlib.Path) -> pathlib.Path:
    """README.md.bak, or the first of .bak2, .bak3, ... that does not exist."""
    number = 1
    while (backup := path.with_name(f"{path.name}.bak{number if number > 1 else ''}")).exists():
        number += 1
    return backup
