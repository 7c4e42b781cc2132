"""What tables, pictures and results call a checkpoint."""

import re

from huggingface_hub.repocard import REGEX_YAML_BLOCK

from hf_efficient_attn.checkpoint import CheckedSource
from hf_efficient_attn.checkpoint.files import regular_file
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.hub.facts import clean

# Markup, what templates of cards leave to be filled in, and long titles.
_NO_NAME = re.compile(r"[\[\]<>{}*`$]|Model ID|.{61}")


def name_of(checked: CheckedSource) -> str:
    """The hub id of a checkpoint, the title of its model card if that is short plain text, or the end of its path.

    The name of its folder alone is often "model" or "checkpoint-500".
    """
    card, path = checked.folder / "README.md", "/".join(checked.folder.parts[1:][-2:])
    try:
        regular_file(card, checked.inside)
        with card.open(encoding="utf-8", errors="replace") as file:
            text = file.read(1 << 16)
    except (OSError, UnsupportedAttentionError):  # no card, or one that should not be read
        text = ""
    title = re.search(r"^# +(.+?)[ #]*$", REGEX_YAML_BLOCK.sub("", text, count=1), re.M)
    name = clean(re.sub(r"\\(?=[\W_])", "", title[1])) if title else path  # without Markdown's escapes
    return checked.hub_id or (path if _NO_NAME.search(name) else name)
