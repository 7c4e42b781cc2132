"""The error for everything that this package refuses to do."""

import difflib
from collections.abc import Iterable


class UnsupportedAttentionError(ValueError):
    """A request that cannot be carried out. The message states what was refused, why, and what to do instead."""


def unknown_name(kind: str, name: object, known: Iterable[object]) -> str:
    """A sentence about an unknown name that suggests the most similar known name and lists all known names.

    Args:
        kind: what the name stands for, for example "hyperparameter".
        name: the unknown name.
        known: the known names.
    """
    names = [str(k) for k in known]
    similar = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f" Did you mean {similar[0]!r}?" if similar else ""
    return f"unknown {kind} {name!r}.{hint} Known: {', '.join(names)}."


# What an unknown name can also mean.
OWN_FILE = "If a file of your own registers it, import that file first."


def unknown_method(name: object, known: Iterable[object]) -> str:
    """`unknown_name` for an attention method, which a file of the user's own may register."""
    return f"{unknown_name('attention method', name, known)} {OWN_FILE}"
