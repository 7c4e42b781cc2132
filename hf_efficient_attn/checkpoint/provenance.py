"""The origin of a checkpoint, as its own files state it. Conversions carry it on in `efficient_attention.json`."""

import os
import re
from typing import Any

from huggingface_hub import metadata_load
from huggingface_hub.utils import HFValidationError, validate_repo_id

from hf_efficient_attn.checkpoint.files import read_object, refusing, regular_file
from hf_efficient_attn.checkpoint.source import CheckedSource
from hf_efficient_attn.errors import UnsupportedAttentionError

FILE = "efficient_attention.json"
INSTALL, TRAINED = "install", "trained_positions"  # keys
_MAX_CARD = 2**20  # bytes
_HUB_ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")


def provenance(checked: CheckedSource, version: str) -> dict[str, Any]:
    """Read where a checkpoint comes from: the contents of `efficient_attention.json`.

    The base model is the one that was converted first; licence, tags, task and languages are those of its card. Values
    that are not plain text are left out. `max_length` is the number of tokens that a conversion was told to take,
    `trained_positions` those that the model took before it, `install` what pip takes to install this package.

    Args:
        checked: The checkpoint.
        version: The version of this package, for the result.

    Raises:
        UnsupportedAttentionError: The source's card or `efficient_attention.json` cannot be read.
    """
    origin = checked.folder / FILE
    if os.path.lexists(origin):
        values = read_object(origin, checked.inside)
        base_model, base_name = _text(values.get("base_model")), _text(values.get("base_name")) or checked.name
        if base_model is not None and not _HUB_ID.fullmatch(base_model):
            base_model = None
    else:
        values, base_model, base_name = _front_matter(checked), checked.hub_id, checked.name
        values = {key: value for key, value in values.items() if key not in ("max_length", TRAINED, INSTALL)}
    language = values.get("language")
    return {
        "format": 1,
        "base_model": base_model,
        "base_name": base_name,
        "license": _text(values.get("license")),
        "tags": _texts(values.get("tags")),
        "pipeline_tag": _text(values.get("pipeline_tag")),
        "language": _texts([language] if isinstance(language, str) else language) or None,
        "max_length": _count(values.get("max_length")),
        TRAINED: _count(values.get(TRAINED)),
        INSTALL: _text(values.get(INSTALL), 500),
        "hf_efficient_attn": version,
    }


def check_hub_id(name: str, what: str) -> None:
    """Check that a name can be the id of a model on the hub; `what` begins the message if it cannot."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UnsupportedAttentionError(f"{what} {name!r} cannot be the id of a model: {error}") from error


def _front_matter(checked: CheckedSource) -> dict[str, Any]:
    """The metadata of the source's model card."""
    path = checked.folder / "README.md"
    if not os.path.lexists(path):
        return {}
    if regular_file(path, checked.inside).st_size > _MAX_CARD:
        raise UnsupportedAttentionError(f"README.md is larger than {_MAX_CARD} bytes, the limit for a model card")
    with refusing("README.md: its front matter cannot be read"):
        values = metadata_load(path)
    return values if isinstance(values, dict) else {}


def _text(value: Any, limit: int = 200) -> str | None:
    """The value if it is a printable text of at most `limit` characters, else None."""
    return value if isinstance(value, str) and 0 < len(value) <= limit and value.isprintable() else None


def _count(value: Any) -> int | None:
    """The value if it is a positive integer, else None."""
    return value if type(value) is int and value > 0 else None


def _texts(value: Any) -> list[str]:
    """The short printable texts of a list."""
    listed = value if isinstance(value, list) else []
    return [text for text in map(_text, listed) if text is not None]
