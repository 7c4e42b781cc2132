"""Reading what others wrote: files that may be no files, JSON that may be anything, names that may lead elsewhere."""

import contextlib
import json
import os
import pathlib
import re
import reprlib
import stat
from collections.abc import Iterator
from typing import Any

from hf_efficient_attn.errors import UnsupportedAttentionError

DEEPEST = 64
_MESSAGE = 400

_shortener = reprlib.Repr()
_shortener.maxstring = _shortener.maxother = 80
_shortener.maxlong = 40


def short(value: object) -> str:
    """A value for a message: escaped, on one line, never longer than a line."""
    try:
        text = _shortener.repr(value)
    except ValueError:  # Python prints no integers of more than 4,300 digits
        text = f"<{type(value).__name__}>"
    return text.encode("ascii", "backslashreplace").decode() if not text.isprintable() else text


@contextlib.contextmanager
def refusing(what: str, *also: type[BaseException]) -> Iterator[None]:
    """Whatever goes wrong inside, because of what others wrote, becomes a refusal of `what` in one short line.

    Exceptions of the types `also` pass as they are; so do `UnsupportedAttentionError`s, once shortened.
    """
    try:
        yield
    except also:
        raise
    except Exception as error:  # what others wrote can raise anything
        text = " ".join(str(error).split()) or type(error).__name__
        text = text.encode("utf-8", "backslashreplace").decode()
        if len(text) > _MESSAGE:
            text = text[:_MESSAGE] + " ..."
        named = isinstance(error, UnsupportedAttentionError) and text.startswith(what)
        raise UnsupportedAttentionError(text if named else f"{what}: {text}") from error


def regular_file(path: pathlib.Path, inside: pathlib.Path, what: str) -> os.stat_result:
    """The status of a file that is to be read; one that is no file, or lies outside the folder `inside`, is refused.

    Links that stay inside are followed.
    """
    try:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            target = path.resolve(strict=True)
            if not target.is_relative_to(inside.resolve()):
                raise UnsupportedAttentionError(
                    f"{what} is a symbolic link that leads out of its folder: put the file itself there"
                )
            status = target.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "cannot be followed"
        raise UnsupportedAttentionError(f"{what} cannot be read: {reason}") from error
    if not stat.S_ISREG(status.st_mode):
        raise UnsupportedAttentionError(f"{what} is no regular file")
    return status


def plain_name(name: Any, what: str) -> str:
    """A name of a file in the same folder, which leads nowhere else on any system."""
    good = isinstance(name, str) and 0 < len(name) <= 200 and name.isprintable() and name not in (".", "..")
    if not good or any(sign in name for sign in '/\\:*?"<>|') or name != name.strip():
        raise UnsupportedAttentionError(f"{what} names {short(name)}, which is no plain name of a file in its folder")
    return name


def parse_json(raw: bytes, what: str) -> Any:
    """JSON as the standard has it, no key twice, no NaN, no nesting deeper than `DEEPEST`, no half characters."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_each_once, parse_constant=_no_nan)
    except UnicodeDecodeError as error:
        raise UnsupportedAttentionError(f"{what} is not text in UTF-8") from error
    except RecursionError as error:
        raise UnsupportedAttentionError(f"{what} is nested too deeply") from error
    except UnsupportedAttentionError as error:
        raise UnsupportedAttentionError(f"{what} {error}") from error
    except ValueError as error:
        raise UnsupportedAttentionError(f"{what} is not valid JSON: {error}") from error
    for key, part, depth in walk(value):
        if depth > DEEPEST:
            raise UnsupportedAttentionError(f"{what} is nested too deeply")
        if any(isinstance(text, str) and re.search("[\ud800-\udfff]", text) for text in (key, part)):
            raise UnsupportedAttentionError(f"{what} holds half a character (a lone surrogate) at {short(key)}")
    return value


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise UnsupportedAttentionError(f"names {short(twice)} twice")
    return found


def _no_nan(constant: str) -> float:
    # Transformers writes infinite time limits of some recurrent layers in this form; NaN is nobody's setting.
    if constant == "NaN":
        raise UnsupportedAttentionError("holds NaN, which is no number and no JSON")
    return float(constant)


def walk(value: Any) -> Iterator[tuple[str, Any, int]]:
    """(key, value, depth) of everything inside a JSON value, itself included; what stands in a list has its key."""
    waiting = [("", value, 0)]
    while waiting:
        key, part, depth = waiting.pop()
        yield key, part, depth
        if isinstance(part, dict):
            waiting += [(name, inner, depth + 1) for name, inner in part.items()]
        elif isinstance(part, list):
            waiting += [(key, inner, depth + 1) for inner in part]


def read_json(path: pathlib.Path, inside: pathlib.Path, largest: int, kind: type = dict) -> Any:
    """The JSON object (or `kind`) in a regular file of at most `largest` bytes.

    Raises:
        UnsupportedAttentionError: it is no such file, or not that.
    """
    what = short_name(path, inside)
    size = regular_file(path, inside, what).st_size
    if size > largest:
        raise UnsupportedAttentionError(f"{what} has {size} bytes; nothing of its kind has more than {largest}")
    try:
        with path.open("rb") as file:
            raw = file.read(largest + 1)
    except OSError as error:
        raise UnsupportedAttentionError(f"{what} cannot be read: {error.strerror}") from error
    value = parse_json(raw[:largest], what)
    if not isinstance(value, kind):
        wanted = "object" if kind is dict else "list"
        raise UnsupportedAttentionError(f"{what} holds a {type(value).__name__} where a JSON {wanted} must be")
    return value


def short_name(path: pathlib.Path, inside: pathlib.Path) -> str:
    """The file as messages name it: from its folder on, escaped where a terminal could not show it."""
    name = path.relative_to(inside).as_posix()
    return name if name.isprintable() and len(name) <= 120 else short(name)
