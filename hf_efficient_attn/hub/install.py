"""What the reader of a model card gives to `pip install`, so that nobody installs another package of the same name."""

import importlib.metadata
import json
import re
from urllib.parse import urlsplit

from hf_efficient_attn.errors import UnsupportedAttentionError

_PACKAGE = "hf_efficient_attn"
_NAME = r"hf[-_.]efficient[-_.]attn(\[[a-z,]+\])?"
_PINNED = re.compile(rf"{_NAME} ?== ?[0-9][0-9A-Za-z.+!-]{{0,49}}")
_URL = re.compile(rf"({_NAME} ?@ ?)?(?P<url>(git\+)?https://[A-Za-z0-9._~:/?#@!+,=%&-]{{1,400}})")


def check_install(text: str, where: str = "--install") -> str:
    """Check what a card is to tell its readers to install; the message begins with `where`.

    Returns:
        The text: a URL that pip takes (https://... or git+https://...), or a requirement with a version, such as
        hf_efficient_attn==0.2.0.

    Raises:
        UnsupportedAttentionError: It is a path on this machine, a name without a version, a URL with a password or
            token, or something else.
    """
    text = text.strip()
    url = _URL.fullmatch(text)
    if url is not None and "@" in urlsplit(url["url"].removeprefix("git+")).netloc:
        raise UnsupportedAttentionError(
            f"{where}: the URL contains a user, password or token, which everybody could read: leave it out"
        )
    if url is None and not _PINNED.fullmatch(text):
        raise UnsupportedAttentionError(
            f"{where} {text!r}: give what others can install, a URL (https://... or git+https://...) or a version "
            f"({_PACKAGE}==0.2.0); a path exists only on this machine, and a name alone could be another package"
        )
    return text


def known_source() -> str | None:
    """The public URL that pip recorded when it installed this package (PEP 610); None if there is none."""
    try:
        recorded = json.loads(importlib.metadata.distribution(_PACKAGE).read_text("direct_url.json") or "{}")
        if "vcs_info" in recorded:
            system = recorded["vcs_info"]
            return check_install(f"{system['vcs']}+{recorded['url']}@{system['commit_id']}")
        return check_install(recorded["url"])
    except (importlib.metadata.PackageNotFoundError, KeyError, TypeError, ValueError):  # or a path on this machine
        return None
