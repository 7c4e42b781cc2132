"""What tables, pictures and results call a checkpoint."""

import pathlib
import re

from huggingface_hub.repocard import REGEX_YAML_BLOCK

from hf_efficient_attn.checkpoint import CheckedSource
from hf_efficient_attn.checkpoint.files import regular_file
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.hub.facts import clean

_CARD = "README.md"
_MAX_CHARACTERS = 1 << 16
_LONGEST = 60
# Markup, and what templates of cards leave to be filled in.
_NO_TITLE = re.compile(r"[\[\]<>{}*`$]|Model ID")


def name_of(checked: CheckedSource) -> str:
    """The hub id of a checkpoint, the title of its model card, or the end of its path.

    The name of its folder alone is often "model" or "checkpoint-500".
    """
    if checked.hub_id is not None:
        return checked.hub_id
    return _title(checked.folder / _CARD, checked.inside) or "/".join(checked.folder.parts[1:][-2:])


def _title(card: pathlib.Path, inside: pathlib.Path) -> str | None:
    """The title of a model card; None if there is none, or none in plain text."""
    try:
        regular_file(card, inside)
        with card.open(encoding="utf-8", errors="replace") as file:
            text = file.read(_MAX_CHARACTERS)
    except (OSError, UnsupportedAttentionError):  # no card, or one that should not be read
        return None
    found = re.search(r"^# +(.+?)[ #]*$", REGEX_YAML_BLOCK.sub("", text, count=1), re.M)
    if found is None:
        return None
    title = clean(re.sub(r"\\(?=[\W_])", "", found[1]))  # Markdown's escapes
    return None if _NO_TITLE.search(title) or len(title) > _LONGEST else title
