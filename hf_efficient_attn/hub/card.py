"""The model card of a converted checkpoint: every word and number of it comes from the files in the folder.

The card's own part stands between two markers in README.md. What a user writes before or after them, and keys of the
front matter that are not the card's, survive when the card is written again.
"""

import functools
import importlib.resources
import logging
import os
import pathlib
import re
from typing import Any

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.hub.facts import TASKS, Facts, Measurement, read_facts
from hf_efficient_attn.hub.sections import PLACEHOLDER, context, pipeline_task

logger = logging.getLogger(__name__)

NAME = "README.md"
START, END = "<!-- hf_efficient_attn -->", "<!-- /hf_efficient_attn -->"
# Each on a line of its own, which a value in the front matter or in a command never is.
OWN_PART = re.compile(rf"^{START}$(.*?)^{END}$", re.S | re.M)
TAGS = ("efficient-attention", "hf_efficient_attn")
# Keys of the front matter that the card sets; others are the user's.
OWN_KEYS = ("library_name", "base_model", "license", "license_name", "pipeline_tag", "language", "tags", "model-index")
OWN_METRICS = "exact_attention_"
METRICS = {
    "cosine": ("exact_attention_cosine", "Cosine with exact attention"),
    "perplexity_ratio": ("exact_attention_perplexity_ratio", "Perplexity over that of exact attention"),
    "top1": ("exact_attention_top1", "Same first answer as exact attention"),
}
ERROR = ("exact_attention_relative_error", "Relative error of attention, mean over layers")
# The hub's identifiers of licences are of this form (its list is https://hf.co/docs/hub/repositories-licenses).
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,49}")
LANGUAGE = re.compile(r"[a-z]{2,3}|code|multilingual")
SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._+-]{0,59}")
# Tags that say of the original what need not hold here.
OTHERS_TAGS = ("endpoints_compatible", "autotrain_compatible", "text-embeddings-inference", "text-generation-inference")


def write_card(folder: "str | pathlib.Path") -> pathlib.Path:
    """Write README.md of a converted checkpoint, from its config.json, efficient_attention.json and benchmark.json.

    The same files give the same card, to the byte. In a README.md that holds a card of this package, what stands
    between the markers is replaced, and in the front matter the card's own keys; tags and results of others stay. A
    README.md without the markers, or whose front matter cannot be read, is kept as README.md.bak (or .bak2, ...), and a
    line is logged that says so. Of licence, languages, task and tags of the original, what the hub would not take is
    left out (a licence that is none of its identifiers becomes "other", with its name). `base_model_relation` is left
    to the hub, since none of its four kinds (adapter, merge, quantized, finetune) says what a conversion is.

    Args:
        folder: of a checkpoint whose config names a method of this package, or that was converted back to exact
            attention (and has an efficient_attention.json), whose card then says so and asks for nothing to install.

    Returns:
        the path of README.md.

    Raises:
        UnsupportedAttentionError: before anything is written, if the folder is no converted checkpoint or one of the
            files is broken.
    """
    facts = read_facts(folder, may_be_exact=True)
    path, before, after, front = facts.folder / NAME, "", "\n", {}
    old = None
    if path.exists():
        old = path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")
        kept = _taken_apart(old)
        if kept is None:
            backup = _unused(path)
            os.replace(path, backup)
            logger.warning("%s was not written by hf_efficient_attn: it is kept as %s", path, backup.name)
        else:
            before, after, front = kept
    data = _merged(front, front_matter(facts))
    text = _whole(data, f"{before}{START}\n{render(facts)}{END}{after}")
    draft = path.with_name(f".{NAME}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8", newline="\n")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def render(facts: Facts) -> str:
    """The card's own part, without markers and front matter."""
    return re.sub(r"\n{3,}", "\n\n", _template().render(**context(facts))).strip() + "\n"


@functools.cache
def _template():
    import jinja2

    from hf_efficient_attn.hub.markdown import escape

    text = importlib.resources.files("hf_efficient_attn.hub").joinpath("card.md.jinja").read_text(encoding="utf-8")
    # Not ModelCard.from_template: it knows no `finalize`, which sees to it that no value escapes being escaped.
    options = {"undefined": jinja2.StrictUndefined, "keep_trailing_newline": True, "autoescape": False}
    return jinja2.Environment(finalize=escape, **options).from_string(text)


def for_repository(text: str, repo_id: str) -> str:
    """A card's text with the repository's name in its examples."""
    return OWN_PART.sub(lambda part: part[0].replace(f'"{PLACEHOLDER}"', f'"{repo_id}"'), text, count=1)


def front_matter(facts: Facts) -> dict[str, Any]:
    """The card's own keys, as ModelCardData writes them."""
    from huggingface_hub import ModelCardData

    name = "-".join([facts.base_name or facts.architecture or "model", *facts.methods])
    tags = [tag for tag in facts.tags if TAG.fullmatch(tag) and tag not in OTHERS_TAGS]
    task = facts.pipeline_tag if facts.pipeline_tag and SLUG.fullmatch(facts.pipeline_tag) else pipeline_task(facts)
    languages = [language for language in facts.languages if LANGUAGE.fullmatch(language)]
    extra, license, results = {}, facts.license, eval_results(facts)
    if license is not None and not LICENSE.fullmatch(license):
        extra["license_name"] = re.sub(r"[^a-z0-9.]+", "-", license.lower()).strip("-.") or "unnamed"
        license = "other"
    return ModelCardData(
        library_name="transformers",
        base_model=facts.base_model,
        license=license,
        language=languages or None,
        pipeline_tag=task,
        tags=[*(TAGS if facts.methods else ()), *facts.methods, *tags],
        model_name=name if results else None,
        eval_results=results or None,
        **extra,
    ).to_dict()


def eval_results(facts: Facts) -> list:
    """Agreement and error of the checkpoint's own method by length, as EvalResults; none where it was not measured."""
    from huggingface_hub import EvalResult

    benchmark = facts.benchmark
    if benchmark is None:
        return []
    data = re.sub(r"[^a-z0-9]+", "-", benchmark.data.lower()).strip("-") or "unnamed"

    def result(row: Measurement, kind: tuple[str, str], value: float) -> EvalResult:
        return EvalResult(
            task_type=TASKS[benchmark.task],
            dataset_type=data,
            dataset_name=benchmark.data,
            metric_type=kind[0],
            metric_value=float(f"{value:.6g}"),
            metric_name=f"{kind[1]}, {row.length} tokens",
            metric_args={"length": row.length, "batch": row.batch},
        )

    found = []
    for row in benchmark.measurements:
        if row.own and row.agreement is not None:
            found.append(result(row, METRICS[benchmark.agreement], row.agreement))
        if row.own and row.error is not None:
            found.append(result(row, ERROR, row.error))
    return found


def read_front_matter(text: str) -> dict[str, Any]:
    """Front matter of a card as huggingface_hub reads it; raises ValueError where it cannot."""
    import yaml
    from huggingface_hub import ModelCard

    try:
        return ModelCard(text).data.to_dict() if text.lstrip().startswith("---") else {}
    except (yaml.YAMLError, TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"the front matter cannot be read: {' '.join(str(error).split())}") from error


def card_problems(text: str) -> list[str]:
    """What the hub's own check would find in a card's front matter, as far as it can be told without it."""
    try:
        data = read_front_matter(text)
    except ValueError as error:
        return [str(error)]
    found = []
    if not data:
        return ["there is no front matter"]
    if "license" not in data:
        found.append("no license: strangers cannot know what they may do; add 'license:' to the front matter")
    elif not isinstance(data["license"], str) or not LICENSE.fullmatch(data["license"]):
        found.append("license is none of the hub's identifiers")
    found += [f"no {key}" for key in ("base_model", "pipeline_tag") if key not in data]
    tag = data.get("pipeline_tag")
    if tag is not None and not (isinstance(tag, str) and SLUG.fullmatch(tag)):
        found.append("pipeline_tag is none of the hub's")
    if not isinstance(data.get("tags", []), list) or not all(isinstance(item, str) for item in data.get("tags") or []):
        found.append("tags is no list of texts")
    return found


def _taken_apart(text: str) -> tuple[str, str, dict[str, Any]] | None:
    """(text before the card's part, text after it, front matter); None for what is no card of ours."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

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


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The user's keys, then the card's; a licence, task or language that the user gave and we do not know stays."""
    from hf_efficient_attn.methods import available_methods

    tags = [tag for tag in old.get("tags") or () if tag not in (*TAGS, *available_methods())]
    merged = {key: value for key, value in old.items() if key not in ("tags", "model-index")}
    merged |= {key: value for key, value in new.items() if key not in ("tags", "model-index")}
    if tags := list(dict.fromkeys([*new.get("tags", ()), *tags])):
        merged["tags"] = tags
    results = [*_foreign_results(old), *new.get("model-index", ())]
    if results:
        name = (new.get("model-index") or results)[0]["name"]
        merged["model-index"] = [{"name": name, "results": [r for entry in results for r in entry["results"]]}]
    return merged


def _foreign_results(old: dict[str, Any]) -> list[dict[str, Any]]:
    """model-index without what an earlier card of ours put there."""
    kept = []
    for entry in old.get("model-index") or ():
        results = []
        for result in entry["results"]:
            metrics = [m for m in result["metrics"] if not str(m["type"]).startswith(OWN_METRICS)]
            if metrics:
                results.append({**result, "metrics": metrics})
        if results:
            kept.append({**entry, "results": results})
    return kept


def _whole(data: dict[str, Any], body: str) -> str:
    """Front matter and body, after huggingface_hub has read back what it was given."""
    from huggingface_hub import ModelCard, ModelCardData

    text = f"---\n{ModelCardData(**data).to_yaml()}\n---\n{body}"
    read = ModelCard(text)
    if read.data.to_dict() != ModelCardData(**data).to_dict() or read.text != body:
        raise UnsupportedAttentionError("the card's front matter does not survive being read by huggingface_hub")
    return text


def _unused(path: pathlib.Path) -> pathlib.Path:
    """README.md.bak, or the first of .bak2, .bak3, ... that is not there."""
    number = 1
    while (backup := path.with_name(f"{path.name}.bak{number if number > 1 else ''}")).exists():
        number += 1
    return backup
