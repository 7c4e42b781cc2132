"""Values of strangers inside a card: Markdown and HTML in which they stand for themselves only."""

import shlex
from collections.abc import Iterable, Sequence

from hf_efficient_attn.hub.facts import clean


class Raw(str):
    """Markdown that this package wrote itself, which the template takes as it is."""

    __slots__ = ()


_MARKS = {mark: f"\\{mark}" for mark in "\\`*_{}[]|~$"} | {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"}
_ESCAPES = str.maketrans(_MARKS | {"@": "&#64;", "#": "&#35;"})


def escape(value: object) -> str:
    """What the template writes for a value: `Raw` as it is, anything else as plain text on one line.

    Markdown's marks get a backslash and HTML's become entities, as does what would become a link or a heading.
    """
    if isinstance(value, Raw):
        return value
    text = clean(str(value), 1000).translate(_ESCAPES)
    return text.replace("://", "&#58;//").replace("www.", "www&#46;").replace("WWW.", "WWW&#46;")


def code(text: str) -> Raw:
    """A name of this package or of Transformers as code."""
    return Raw(f"`{text}`")


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> Raw:
    """A Markdown table; cells are escaped as the template would."""
    lines = [[escape(cell) for cell in row] for row in rows]
    head = [f"| {' | '.join(headers)} |", f"|{'---|' * len(headers)}"]
    return Raw("\n".join([*head, *(f"| {' | '.join(line)} |" for line in lines)]))


def words(items: Sequence[str]) -> Raw:
    """`a`, `b` and `c`."""
    marked = [str(code(item)) for item in items]
    return Raw(" and ".join([", ".join(marked[:-1]), marked[-1]]) if len(marked) > 1 else "".join(marked))


def shell(*parts: str) -> Raw:
    """A command line for a fenced block: each part as one word of a shell, whatever is in it."""
    return Raw(" ".join(shlex.quote(clean(part, 1000)) for part in parts))
