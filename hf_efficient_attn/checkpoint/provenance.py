"""The origin of a checkpoint, as its own files state it. Conversions carry it on in `efficient_attention.json`."""

import os
import pathlib
import re
from typing import Any

from huggingface_hub import metadata_load
from huggingface_hub.utils import HFValidationError, validate_repo_id

from hf_efficient_attn.checkpoint.files import read_object, refusing, regular_file
from hf_efficient_attn.checkpoint.source import CheckedSource
from hf_efficient_attn.errors import UnsupportedAttentionError, shown
from hf_efficient_attn.version import __version__

FILE = "efficient_attention.json"
INSTALL, TRAINED, VERSION = "install", "trained_positions", "hf_efficient_attn"  # keys
_MAX_CARD = 2**20  # bytes
_NAME = r"hf[-_.]efficient[-_.]attn(\[[a-z,]+\])?"
_PINNED = re.compile(rf"{_NAME} ?== ?[0-9][0-9A-Za-z.+!-]{{0,49}}")
_URL = re.compile(rf"({_NAME} ?@ ?)?(git\+)?https://[A-Za-z0-9.:-]+/[A-Za-z0-9._~:/?#@!+,=%&-]{{1,400}}")


# The keys of the file, by the form of their values: lists of texts, numbers above 0, texts.
_LISTS, _COUNTS = ("tags", "language"), ("max_length", TRAINED)
_KEYS = ("base_model", "license", "pipeline_tag", INSTALL, VERSION, *_LISTS, *_COUNTS)
_FROM_CARD = ("license", "pipeline_tag", *_LISTS)


def _is_fit(key: str, value: Any) -> bool:
    """Whether a value has the form that a key requires."""
    if key in _COUNTS:
        return type(value) is int and value > 0
    texts = value if isinstance(value, list) and key in _LISTS else [value]
    are_texts = all(isinstance(x, str) and 0 < len(x) <= 500 and x.isprintable() for x in texts)
    return are_texts and isinstance(value, list) == (key in _LISTS)


def provenance(checked: CheckedSource) -> dict[str, Any]:
    """Where a checkpoint comes from: the contents of `efficient_attention.json` for its conversion.

    The base model is the one that was converted first; licence, tags, task and languages are those of its card. Values
    of the card that are not plain text are left out, and a card that cannot be read is refused. `max_length` is the
    number of tokens that a conversion was told to take, `trained_positions` those that the model took before it,
    `install` what pip takes to install this package, and `hf_efficient_attn` the version of this package.
    """
    origin = read_origin(checked.folder / FILE, checked.inside)
    if not os.path.lexists(checked.folder / FILE):
        path, card = checked.folder / "README.md", dict[str, Any]()
        if os.path.lexists(path):
            regular_file(path, checked.inside, _MAX_CARD)
            with refusing("README.md: its front matter cannot be read"):
                card = metadata_load(path) or {}
        language = card.get("language")
        card["language"] = [language] if isinstance(language, str) else language
        origin |= {key: card[key] for key in _FROM_CARD if _is_fit(key, card.get(key))}
        origin["base_model"] = checked.hub_id
    return {**origin, VERSION: __version__}


def read_origin(path: pathlib.Path, inside: pathlib.Path) -> dict[str, Any]:
    """The contents of an `efficient_attention.json`, with None for keys that it does not have, also without the file.

    A file that leads out of the folder `inside`, or has a value of another form, is refused.
    """
    values = read_object(path, inside) if os.path.lexists(path) else {}
    origin: dict[str, Any] = {key: values.get(key) for key in _KEYS}
    for key, value in origin.items():
        if value is not None and not _is_fit(key, value):
            raise UnsupportedAttentionError(f"{FILE}: {key} cannot be {shown(value)}: correct or delete it")
    if origin["base_model"] is not None:
        check_hub_id(origin["base_model"], f"{FILE}: base_model")
    if origin[INSTALL] is not None:
        check_install(origin[INSTALL], f"{FILE}: {INSTALL}")
    return origin


def check_hub_id(name: str, what: str) -> None:
    """Check that a name can be the id of a model on the hub; `what` begins the message if it cannot."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UnsupportedAttentionError(f"{what} {name!r} cannot be the id of a model: {error}") from error


def check_install(text: str, where: str = "--install") -> None:
    """Check what a card is to tell its readers to install; the message begins with `where`.

    That is a URL that pip takes (https://... or git+https://...), or a requirement with a version, such as
    hf_efficient_attn==0.2.0. Refused are a path on this machine, a name without a version, and a URL with a password or
    token.
    """
    if not _URL.fullmatch(text) and not _PINNED.fullmatch(text):
        raise UnsupportedAttentionError(
            f"{where}: give what others can install, a URL (https://... or git+https://...) without a password or "
            "token, or a version (hf_efficient_attn==0.2.0): a name alone could be another package"
        )
