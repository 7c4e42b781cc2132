"""The error for everything that this package refuses to do, and its warnings."""

import contextlib
import difflib
import math
import sys
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class UnsupportedAttentionError(ValueError):
    """A request that cannot be carried out. The message states what was refused, why, and what to do instead."""


def clean(text: str, limit: int = 200) -> str:
    """Bring text to one line of at most `limit` characters, without control characters and lone surrogates."""
    plain = "".join(" " if unicodedata.category(c)[0] == "C" or c in "\u2028\u2029" else c for c in text[: 4 * limit])
    plain = " ".join(plain.split())
    return plain if len(plain) <= limit else plain[: limit - 1].rstrip() + "…"


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
        raise UnsupportedAttentionError(f"{what}: {clean(str(error), 400) or type(error).__name__}") from error


def warn(message: str) -> None:
    """Warn at the line outside of this package, Transformers and PyTorch that led here."""
    frame, level = sys._getframe(1), 2
    inside = tuple(f"{name}." for name in (__package__, "transformers", "torch"))
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(inside):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


# Characters of a value in a message.
_LONGEST = 100


def shown(value: object) -> str:
    """A value for a message, in one line: a tensor or a model is named by its type."""
    text = " ".join(repr(value).split())
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}..." if isinstance(value, (str, list, tuple, dict)) else f"<{type(value).__name__}>"


def as_dict(value: object, what: str) -> dict[str, Any]:
    """A copy of a mapping as a dictionary; `what` is what needs it, for the refusal of anything else."""
    if not isinstance(value, Mapping):
        raise UnsupportedAttentionError(f"{what} must be a dictionary, not {shown(value)}")
    return dict(value)


def check_positive(name: str, value: object, *, is_count: bool = True, least: int = 1, advice: str = "") -> None:
    """Refuse a number of something that is no integer of `least` or more, or another number that is not above 0."""
    types = int if is_count else (int, float)
    smallest = least if is_count else math.ulp(0.0)
    if isinstance(value, bool) or not isinstance(value, types) or not smallest <= value < math.inf:
        what = f"{least} or more, an integer" if is_count else "a number above 0"
        raise UnsupportedAttentionError(f"{name}={shown(value)} must be {what}{advice and f': {advice}'}")


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """The sentence that suggests the most similar of the known names, whatever their case; empty if none is similar."""
    names = {str(k).lower(): str(k) for k in known}
    similar = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.5) if isinstance(name, str) else []
    return f" Did you mean {names[similar[0]]!r}?" if similar else ""


def unknown_name(kind: str, name: object, known: Iterable[object]) -> str:
    """A sentence about an unknown name that suggests the most similar known name and lists all known names.

    `kind` is what the name stands for, for example "hyperparameter".
    """
    names = [str(k) for k in known]
    return f"unknown {kind} {shown(name)}.{did_you_mean(name, names)} Known: {', '.join(names)}."


class KnownFields:
    """Base of dataclasses that refuse an unknown field with a sentence, where Python raises a TypeError."""

    def __new__(cls: type[T], *args: object, **values: object) -> T:
        """Check the names only; the dataclass sets the values."""
        known = [name for name, field in getattr(cls, "__dataclass_fields__", {}).items() if field.init]
        for name in values:
            if name not in known:
                raise UnsupportedAttentionError(f"{cls.__name__}: {unknown_name('field', name, known)}")
        return object.__new__(cls)


# What an unknown name can also mean.
OWN_FILE = "If a file of your own registers it, import that file first (--import FILE of the commands)."


def unknown_method(name: object, known: Iterable[object]) -> str:
    """`unknown_name` for an attention method, which a file of the user's own may register."""
    return f"{unknown_name('attention method', name, known)} {OWN_FILE}"
