"""Checks of files from untrusted sources, and error messages about them that fit on one line."""

import contextlib
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import Any

from hf_efficient_attn.errors import UnsupportedAttentionError, shown
from hf_efficient_attn.io.json import read_json_object

_MAX_MESSAGE = 400


def short_name(path: pathlib.Path, inside: pathlib.Path) -> str:
    """Name a file for error messages: its path relative to the folder `inside`, escaped if it is not printable."""
    name = path.relative_to(inside).as_posix()
    return name if name.isprintable() and len(name) <= 120 else shown(name)


@contextlib.contextmanager
def refusing(what: str, *passing: type[BaseException]) -> Iterator[None]:
    """Turn errors inside the `with` block into an `UnsupportedAttentionError` of one line that begins with `what`.

    Errors of the types in `passing` are not changed.
    """
    try:
        yield
    except passing:
        raise
    except Exception as error:  # libraries raise errors of any type for files that they do not understand
        text = " ".join(str(error).split()) or type(error).__name__
        text = text.encode("utf-8", "backslashreplace").decode()
        if len(text) > _MAX_MESSAGE:
            text = text[:_MAX_MESSAGE] + " ..."
        raise UnsupportedAttentionError(f"{what}: {text}") from error


def regular_file(path: pathlib.Path, inside: pathlib.Path, max_bytes: int | None = None) -> os.stat_result:
    """Return the status of a regular file, or of a link to one, inside the folder `inside`.

    A path that does not exist, is no such file, is larger than `max_bytes` or leads out of the folder is refused.
    """
    name = short_name(path, inside)
    with refusing(f"{name} cannot be read"):
        target = path.resolve(strict=True)
        status = target.stat()
    if not target.is_relative_to(inside.resolve()):
        raise UnsupportedAttentionError(f"{name} is a symbolic link that leads out of its folder: put the file there")
    if not stat.S_ISREG(status.st_mode):
        raise UnsupportedAttentionError(f"{name} is not a regular file")
    if max_bytes is not None and status.st_size > max_bytes:
        raise UnsupportedAttentionError(f"{name} is larger than {max_bytes} bytes, the limit for such a file")
    return status


def plain_name(name: Any, what: str) -> str:
    """Return a value that the file `what` contains if it is a name without a path, on every system; else refuse it."""
    if not isinstance(name, str) or name in ("", ".", "..") or any(sign in name for sign in "/\\:\0"):
        raise UnsupportedAttentionError(f"{what} names {shown(name)}, which is not a plain name of a file beside it")
    return name


def read_object(path: pathlib.Path, inside: pathlib.Path) -> dict[str, Any]:
    """Read the JSON object in a regular file inside the folder `inside`; see `regular_file` and `read_json_object`."""
    regular_file(path, inside)
    return read_json_object(path, name=short_name(path, inside))
