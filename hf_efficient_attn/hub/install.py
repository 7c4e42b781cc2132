"""What the reader of a model card gives to `pip install`, so that nobody installs another package of the same name."""

import importlib.metadata
import json
import re
from typing import Any
from urllib.parse import urlsplit

from hf_efficient_attn.errors import UnsupportedAttentionError

_PACKAGE = "hf_efficient_attn"
_NAME = r"hf[-_.]efficient[-_.]attn(\[[a-z,]+\])?"
_PINNED = re.compile(rf"{_NAME} ?== ?[0-9][0-9A-Za-z.+!-]{{0,49}}")
_URL = re.compile(rf"({_NAME} ?@ ?)?(?P<url>(git\+)?https://[A-Za-z0-9._~:/?#@!+,=%&-]{{1,400}})")
_SOURCES = ("repository", "source", "source code", "code", "github", "homepage", "home")
_FORGES = ("github.com", "gitlab.com", "bitbucket.org", "codeberg.org", "huggingface.co")


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
    """Where this installation of the package comes from, if its metadata name a public place; None if not.

    That is the URL that pip recorded (PEP 610), or else the repository that the package names. Paths are never used.
    """
    try:
        package = importlib.metadata.distribution(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return None
    candidates = [_recorded_url(package.read_text("direct_url.json"))]
    urls = [text.partition(",")[::2] for text in package.metadata.get_all("Project-URL") or ()]
    urls += [("home", url) for url in package.metadata.get_all("Home-page") or ()]
    for label, url in urls:
        parts = urlsplit(url.strip())
        if label.strip().lower() in _SOURCES and parts.scheme == "https" and parts.netloc in _FORGES:
            candidates.append(f"git+{url.strip().removesuffix('/')}")
    for candidate in candidates:
        if candidate:
            try:
                return check_install(candidate)
            except UnsupportedAttentionError:
                continue
    return None


def _recorded_url(text: str | None) -> str | None:
    """The URL in a direct_url.json, with the commit of a version control system."""
    try:
        recorded: Any = json.loads(text or "null")
    except ValueError:
        return None
    if not isinstance(recorded, dict) or not isinstance(recorded.get("url"), str) or "dir_info" in recorded:
        return None
    system = recorded.get("vcs_info")
    if not isinstance(system, dict):
        return recorded["url"]
    return f"{system.get('vcs')}+{recorded['url']}@{system.get('commit_id')}"
