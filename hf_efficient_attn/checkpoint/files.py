"""Checks of files from untrusted sources, and error messages about them that fit on one line."""

import contextlib
import os
import pathlib
import re
import reprlib
import stat
import sys
from collections.abc import Iterator
from typing import Any

from safetensors import SafetensorError

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.io.json import read_json_object

_MAX_MESSAGE = 400

_shortener = reprlib.Repr()
_shortener.maxstring = _shortener.maxother = 80
_shortener.maxlong = 40


def short(value: object) -> str:
    """Represent a value in at most about 80 printable characters, for error messages."""
    return _shortener.repr(value).encode("ascii", "backslashreplace").decode()


def short_name(path: pathlib.Path, inside: pathlib.Path) -> str:
    """Name a file for error messages: its path relative to the folder `inside`, escaped if it is not printable."""
    name = path.relative_to(inside).as_posix()
    return name if name.isprintable() and len(name) <= 120 else short(name)


def check_encoding(path: pathlib.Path, what: str) -> None:
    """Refuse a path without a form in UTF-8, which safetensors needs, or with another one in the system's encoding."""
    try:
        is_possible = os.fsencode(path) == str(path).encode("utf-8")
    except UnicodeEncodeError:
        is_possible = False
    if not is_possible:
        raise UnsupportedAttentionError(
            f"{what} is a name that cannot be used here: files of weights need names in UTF-8, and the encoding of "
            f"this system is {sys.getfilesystemencoding()}; give a name of ASCII letters"
        )


@contextlib.contextmanager
def writing(path: pathlib.Path) -> Iterator[None]:
    """Turn errors of safetensors while it writes a file into the errors of the system that they contain."""
    try:
        yield
    except SafetensorError as error:
        code = re.search(r"os error (\d+)|code: (\d+)", str(error))
        if code is None:
            raise
        number = int(code[1] or code[2])
        raise OSError(number, os.strerror(number), str(path)) from error


@contextlib.contextmanager
def refusing(what: str, *passing: type[BaseException]) -> Iterator[None]:
    """Turn every error inside the `with` block into an `UnsupportedAttentionError` of one short line.

    The message begins with `what`. Errors of the types in `passing` are not changed.
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


def regular_file(path: pathlib.Path, inside: pathlib.Path) -> os.stat_result:
    """Check that a path is a regular file inside a folder, or a symbolic link to one; return its status.

    Raises:
        UnsupportedAttentionError: The path does not exist, is not a regular file, or is a link that leads out of the
            folder `inside`.
    """
    name = short_name(path, inside)
    try:
        target = path.resolve(strict=True)
        status = target.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "links in a circle"
        raise UnsupportedAttentionError(f"{name} cannot be read: {reason}") from error
    if not target.is_relative_to(inside.resolve()):
        raise UnsupportedAttentionError(
            f"{name} is a symbolic link that leads out of its folder: put the file itself there"
        )
    if not stat.S_ISREG(status.st_mode):
        raise UnsupportedAttentionError(f"{name} is not a regular file")
    return status


def plain_name(name: Any, what: str) -> str:
    """Return a value that the file `what` contains if it is a name without a path, on every system; else refuse it."""
    if not isinstance(name, str) or name in ("", ".", "..") or any(sign in name for sign in "/\\:\0"):
        raise UnsupportedAttentionError(f"{what} names {short(name)}, which is not a plain name of a file beside it")
    return name


def read_object(path: pathlib.Path, inside: pathlib.Path) -> dict[str, Any]:
    """Read the JSON object in a regular file inside the folder `inside`; see `regular_file` and `read_json_object`."""
    regular_file(path, inside)
    return read_json_object(path, name=short_name(path, inside))
