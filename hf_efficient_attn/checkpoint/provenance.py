"""The origin of a checkpoint, as its own files state it. Conversions carry it on in `efficient_attention.json`."""

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from huggingface_hub import metadata_load
from huggingface_hub.utils import HFValidationError, validate_repo_id

from hf_efficient_attn.checkpoint.files import read_object, refusing, regular_file, short
from hf_efficient_attn.checkpoint.source import CheckedSource
from hf_efficient_attn.errors import UnsupportedAttentionError

FILE = "efficient_attention.json"
INSTALL, TRAINED = "install", "trained_positions"  # keys
_MAX_CARD = 2**20  # bytes
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+!-]{0,49}")


def provenance(checked: CheckedSource, version: str) -> dict[str, Any]:
    """Where a checkpoint comes from: the contents of `efficient_attention.json` for its conversion.

    The base model is the one that was converted first; licence, tags, task and languages are those of its card. Values
    of the card that are not plain text are left out. `max_length` is the number of tokens that a conversion was told to
    take, `trained_positions` those that the model took before it, `install` what pip takes to install this package, and
    `version` the version of this package.

    Raises:
        UnsupportedAttentionError: The source's card or `efficient_attention.json` cannot be read.
    """
    origin = read_origin(checked.folder / FILE, checked.inside)
    if origin is None:
        card = {key: value for key, value in _front_matter(checked).items() if key not in ("max_length", INSTALL)}
        origin = plain_origin({**card, TRAINED: None, "base_model": checked.hub_id})
    return {**origin, "base_name": origin["base_name"] or checked.name, "format": 1, "hf_efficient_attn": version}


def read_origin(path: pathlib.Path, inside: pathlib.Path) -> dict[str, Any] | None:
    """The contents of an `efficient_attention.json`, with None for keys that it does not have; None without the file.

    Raises:
        UnsupportedAttentionError: The file leads out of the folder `inside`, or a value is not of the right form.
    """
    if not os.path.lexists(path):
        return None
    values = read_object(path, inside)
    origin = plain_origin(values)
    for key, value in origin.items():
        if values.get(key) not in (None, value):
            raise UnsupportedAttentionError(
                f"{FILE}: {key} cannot be {short(values[key])}: correct it, or delete it from the file"
            )
    if origin["base_model"] is not None:
        check_hub_id(origin["base_model"], f"{FILE}: base_model")
    return origin


def check_hub_id(name: str, what: str) -> None:
    """Check that a name can be the id of a model on the hub; `what` begins the message if it cannot."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UnsupportedAttentionError(f"{what} {name!r} cannot be the id of a model: {error}") from error


def plain_origin(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all known keys, with None for each that is missing or not of the right form."""
    language = values.get("language")
    return {
        "format": 1,
        **{key: _text(values.get(key)) for key in ("base_model", "base_name", "license")},
        "tags": _texts(values.get("tags")),
        "pipeline_tag": _text(values.get("pipeline_tag")),
        "language": _texts([language] if isinstance(language, str) else language) or None,
        **{key: _count(values.get(key)) for key in ("max_length", TRAINED)},
        INSTALL: _text(values.get(INSTALL), 500),
        "hf_efficient_attn": _text(values.get("hf_efficient_attn"), form=_VERSION),
    }


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


def _text(value: Any, limit: int = 200, form: re.Pattern[str] | None = None) -> str | None:
    """The value if it is a printable text of at most `limit` characters, and of a form if one is given; else None."""
    is_text = isinstance(value, str) and 0 < len(value) <= limit and value.isprintable()
    return value if is_text and (form is None or form.fullmatch(value)) else None


def _count(value: Any) -> int | None:
    """The value if it is a positive integer, else None."""
    return value if type(value) is int and value > 0 else None


def _texts(value: Any) -> list[str]:
    """The short printable texts of a list."""
    listed = value if isinstance(value, list) else []
    return [text for text in map(_text, listed) if text is not None]
