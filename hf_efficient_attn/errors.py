"""The one error that this package raises for what it does not do."""

import difflib


class UnsupportedAttentionError(ValueError):
    """What was asked cannot be done; the message says what, why, and what to use instead."""


def unknown_name(kind: str, name: object, known) -> str:
    """Sentence for a name that is not known: names the nearest known one first, then all of them."""
    known = [str(k) for k in known]
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {name!r}.{hint} Known: {', '.join(known)}."
