"""Which heads of a layer a process holds, so that what is drawn for a head does not depend on the number of processes.

Engines that split a layer's heads over processes (all-to-all over heads, tensor parallelism) call attention with some
of the heads. What is drawn for a head depends on its number among all heads of the layer. `numbered_heads` states the
numbers once for a whole call, and everything that draws for heads asks `head_slice`.
"""

from types import TracebackType
from typing import NamedTuple

from hf_efficient_attn.errors import UnsupportedAttentionError


class HeadSlice(NamedTuple):
    """The heads of a layer that a process holds: consecutive ones.

    Attributes:
        first: the number of the first of them.
        total: how many heads the layer has in all processes together.
    """

    first: int
    total: int

    def check(self, num_heads: int) -> None:
        """Check that `num_heads` heads from the first one on exist.

        Raises:
            UnsupportedAttentionError: they do not.
        """
        if self.first < 0 or self.first + num_heads > self.total:
            raise UnsupportedAttentionError(
                f"{num_heads} heads from head {self.first} on are not among the {self.total} heads of the layer: give "
                "the number of the first head, and of all heads in all processes"
            )


_current: HeadSlice | None = None


def current_slice() -> HeadSlice | None:
    """The heads of the call that is being computed; None for all heads."""
    return _current


def head_slice(num_heads: int) -> HeadSlice:
    """The numbers of the `num_heads` heads of the call that is being computed."""
    return HeadSlice(0, num_heads) if _current is None else _current


class numbered_heads:  # noqa: N801  # used like a function
    """While this context is entered, the heads of a call have the numbers of a slice; None for all heads."""

    def __init__(self, heads: HeadSlice | None) -> None:
        self.heads, self.before = heads, None  # type: tuple[HeadSlice | None, HeadSlice | None]

    def __enter__(self) -> None:
        global _current
        self.before, _current = _current, self.heads

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _current
        _current = self.before
