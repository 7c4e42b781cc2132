"""Where a checkpoint comes from, as far as its own files say: what a model card carries on."""

import re
from typing import Any

from hf_efficient_attn.checkpoint.source import CheckedSource
from hf_efficient_attn.checkpoint.values import read_json, refusing, regular_file
from hf_efficient_attn.errors import UnsupportedAttentionError

FILE = "efficient_attention.json"
_LARGEST_CARD = 2**20
_HUB_ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")
_MOST = 50


def provenance(checked: CheckedSource, version: str) -> dict[str, Any]:
    """What `efficient_attention.json` holds.

    {"format": 1, "base_model": hub id or None, "base_name", "license", "tags", "pipeline_tag", "language",
    "max_length": tokens to which the position table was extended or None, "hf_efficient_attn": version}: the base model
    is the one that was converted first, its licence, tags, task and languages are those of its card. What a card says
    in another form than plain text is left out.

    Raises:
        UnsupportedAttentionError: the source's card or `efficient_attention.json` cannot be read.
    """
    # In the hub's cache links lead two folders up, to the blobs.
    inside = checked.folder if checked.hub_id is None else checked.folder.parent.parent
    origin = checked.folder / FILE
    if origin.exists() or origin.is_symlink():
        said = read_json(origin, inside, _LARGEST_CARD)
        base, name = _text(said.get("base_model"), _HUB_ID), _text(said.get("base_name")) or checked.name
    else:
        said = _front_matter(checked, inside)
        base, name = checked.hub_id, checked.name
    language = said.get("language")
    return {
        "format": 1,
        "base_model": base,
        "base_name": name,
        "license": _text(said.get("license")),
        "tags": _texts(said.get("tags")),
        "pipeline_tag": _text(said.get("pipeline_tag")),
        "language": _texts([language] if isinstance(language, str) else language) or None,
        "max_length": _length(said.get("max_length")),
        "hf_efficient_attn": version,
    }


def check_hub_id(name: str) -> str:
    """`name`, if a model on the hub can be called so; raises `UnsupportedAttentionError` if not."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UnsupportedAttentionError(f"--base-model {name!r} is no id of a model on the hub: {error}") from error
    return name


def _front_matter(checked: CheckedSource, inside) -> dict:
    from huggingface_hub import metadata_load

    path = checked.folder / "README.md"
    if not path.exists() and not path.is_symlink():
        return {}
    if regular_file(path, inside, "README.md").st_size > _LARGEST_CARD:
        raise UnsupportedAttentionError("README.md is larger than any model card")
    with refusing("README.md: its front matter cannot be read"):
        found = metadata_load(path)
    return found if isinstance(found, dict) else {}


def _text(value: Any, form: re.Pattern | None = None) -> str | None:
    good = isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable()
    return value if good and (form is None or form.fullmatch(value)) else None


def _length(value: Any) -> int | None:
    return value if type(value) is int and 0 < value < 2**31 else None


def _texts(value: Any) -> list[str]:
    listed = value[:_MOST] if isinstance(value, list) else []
    return [text for text in map(_text, listed) if text is not None]
