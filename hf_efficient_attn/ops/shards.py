"""The heads of a layer and the tokens of a sequence that a process holds, and sums and exchanges over processes.

Engines that split a layer's heads over processes call attention with some of the heads (`HeadSlice`). The draws for a
head depend on its number among all heads of the layer, and not on the number of processes. The seed of such a call is a
`HeadSeed`, which knows these numbers.

If processes share a sequence, every process holds a contiguous shard of the tokens. `Shards` says which. All processes
must call the same collectives in the same order, forward and backward. So autograd must reach a collective even in a
process that has no use for its result. Such a process uses the result with a weight of 0. The collectives and their
gradients are PyTorch's functional ones.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from hf_efficient_attn.ops.attend import Partial


class HeadSlice(NamedTuple):
    """The consecutive heads of a layer that a process holds."""

    first: int  # the number of the first head
    total: int  # the number of heads of the layer in all processes together


class HeadSeed(NamedTuple):
    """The seed of a call that has some heads of a layer."""

    value: int | Tensor  # the seed of the layer
    heads: HeadSlice  # the heads of the call


# A call with all heads of a layer has a plain seed.
Seed: TypeAlias = int | Tensor | HeadSeed


def head_slice(seed: Seed, num_heads: int) -> HeadSlice:
    """Return the numbers of the `num_heads` heads of a call with this seed."""
    return seed.heads if isinstance(seed, HeadSeed) else HeadSlice(0, num_heads)


@dataclass(frozen=True)
class Shards:
    """The shards of a batch of sequences over the processes of a group."""

    group: "dist.ProcessGroup"  # the process group
    lengths: tuple[int, ...]  # the number of tokens of each process, in the order of the sequence
    rank: int  # the rank of this process
    key_mask: Tensor | None = None  # bool (B, N) of all tokens of all processes; None if there is no padding
    seed: int | None = None  # seed of the draws in training, the same in all processes; None in eval

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self.lengths)

    @property
    def total(self) -> int:
        """The number of tokens of a sequence."""
        return sum(self.lengths)

    @property
    def first(self) -> int:
        """The position of the first token of this process."""
        return sum(self.lengths[: self.rank])

    @property
    def own(self) -> slice:
        """The positions of the tokens of this process."""
        return slice(self.first, self.first + self.lengths[self.rank])

    @property
    def own_mask(self) -> Tensor | None:
        """The mask of the tokens of this process, bool (B, n)."""
        return None if self.key_mask is None else self.key_mask[:, self.own]


@contextmanager
def _explained(name: str, group: "dist.ProcessGroup") -> Iterator[None]:
    """Explain an error of a collective in its message."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{name} of a sequence that {group.size()} processes share failed in process {group.rank()}: another "
            "process has ended, or it did not arrive before the timeout of the process group. The first error is in "
            "the output of that process"
        ) from error


def gather(x: Tensor, group: "dist.ProcessGroup") -> Tensor:
    """Gather the tensors of all processes, which have one shape: (...) -> (processes, ...)."""
    # Newer versions of PyTorch warn about the older name. A copy waits for the result of a collective.
    gathered: Any = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
    with _explained("all_gather", group):
        out: Tensor = gathered(x.contiguous().view(-1), 0, group).clone()
    return out.view(group.size(), *x.shape)


def total(tensors: Sequence[Tensor], group: "dist.ProcessGroup") -> list[Tensor]:
    """Sum each of several tensors of one dtype over all processes, in one collective."""
    with _explained("all_reduce", group):
        flat = collectives.all_reduce(torch.cat([x.flatten() for x in tensors]), "sum", group).clone()
    return [part.view(x.shape) for part, x in zip(flat.split([x.numel() for x in tensors]), tensors, strict=True)]


def gather_partials(partial: Partial, group: "dist.ProcessGroup") -> list[Partial]:
    """Gather the partials of all processes in one collective."""
    both = torch.cat((partial.out, partial.lse.to(partial.out.dtype).unsqueeze(-1)), -1)  # (..., N, Dv + 1)
    return [Partial(x[..., :-1], x[..., -1].to(partial.lse.dtype)) for x in gather(both, group).unbind(0)]


def exchange(parts: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Sequence[int]]], group: Any) -> list[Any]:
    """Send tensors of one dtype to every process, in one collective.

    Args:
        parts: the tensors to send to each process, the same number for each. They may be empty.
        shapes: the shapes of the tensors that each process sends to this one.
        group: the process group.

    Returns:
        The tensors that came from each process.
    """
    sent = [sum(x.numel() for x in some) for some in parts]
    sizes = [[math.prod(shape) for shape in some] for some in shapes]
    flat = torch.cat([x.reshape(-1) for some in parts for x in some])
    with _explained("all_to_all", group):
        out = collectives.all_to_all_single_autograd(flat, [sum(some) for some in sizes], sent, group).clone()
    pieces = iter(out.split([n for some in sizes for n in some]))
    return [[next(pieces).view(tuple(shape)) for shape in some] for some in shapes]


def heads_of(rank: int, size: int, num_heads: int) -> slice:
    """Return the heads of a process: an equal share of the layer's, one more in the first processes if needed."""
    each, more = divmod(num_heads, size)
    first = rank * each + min(rank, more)
    return slice(first, first + each + (rank < more))


def over_heads(
    function: Callable[[Tensor, Tensor, Tensor, HeadSlice], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shards: Shards,
) -> Tensor:
    """Compute attention such that each process computes some heads for all tokens.

    Args:
        function: computes attention (B, h, N, Dv) of query (B, h, N, D), key (B, h_kv, N, D) and value
            (B, h_kv, N, Dv) of some heads. Its last argument is the numbers of the heads.
        query: (B, H, n, D), the queries of this process.
        key: (B, H_kv, n, D).
        value: (B, H_kv, n, Dv).
        shards: the shards of the sequences.

    Returns:
        (B, H, n, Dv).
    """
    num_heads = query.shape[1]
    num_kv_heads = key.shape[1]
    size = shards.size
    if num_kv_heads % size:
        # Each process needs the key heads of its query heads, so copies of the key heads are sent.
        fits = num_heads % size == 0 and size % num_kv_heads == 0
        repeats = (size if fits else num_heads) // num_kv_heads
        key = key.repeat_interleave(repeats, 1)
        value = value.repeat_interleave(repeats, 1)
    # Exchange the tokens of all heads for all tokens of some heads: (B, h, N, .) each.
    tensors = (query, key, value)
    rank = shards.rank
    heads = [[heads_of(r, size, x.shape[1]) for x in tensors] for r in range(size)]
    counts = [[some.stop - some.start for some in of_rank] for of_rank in heads]
    parts = [[x[:, some] for x, some in zip(tensors, of_rank, strict=True)] for of_rank in heads]
    shapes = [
        [(x.shape[0], count, length, x.shape[3]) for x, count in zip(tensors, counts[rank], strict=True)]
        for length in shards.lengths
    ]
    received = exchange(parts, shapes, shards.group)
    query, key, value = (torch.cat(pieces, 2) for pieces in zip(*received, strict=True))  # (B, h, N, .) each
    if query.shape[1]:
        out = function(query, key, value, HeadSlice(heads[rank][0].start, num_heads))
    else:  # nothing to compute, but the other processes wait for the gradients
        out = value + (query.sum() + key.sum())
    # And back: (B, H, n, Dv).
    parts = [[piece] for piece in out.split(list(shards.lengths), 2)]
    shapes = [[(len(out), of_rank[0], shards.lengths[rank], out.shape[3])] for of_rank in counts]
    return torch.cat([piece for (piece,) in exchange(parts, shapes, shards.group)], 1)


def with_neighbors(tensors: Sequence[Tensor], left: int, right: int, shards: Shards) -> tuple[list[Tensor], int, int]:
    """Add the last `left` tokens before a shard and the first `right` tokens after it: each (B, H, n, .).

    Returns:
        The tensors (B, H, before + n + after, .), and the numbers of tokens before and after.
    """
    firsts = [sum(shards.lengths[:rank]) for rank in range(shards.size)]

    def bounds(rank: int) -> tuple[int, int]:
        first = firsts[rank]
        return max(0, first - left), min(shards.total, first + shards.lengths[rank] + right)

    def overlap(sender: int, receiver: int) -> slice:
        """Return the tokens of a sender, counted in its shard, that a receiver needs and does not hold."""
        start, stop = (min(max(x - firsts[sender], 0), shards.lengths[sender]) for x in bounds(receiver))
        return slice(start, start if sender == receiver else max(start, stop))

    parts = [[x[:, :, overlap(shards.rank, r)] for x in tensors] for r in range(shards.size)]
    counts = [overlap(r, shards.rank) for r in range(shards.size)]
    shapes = [[(*x.shape[:2], some.stop - some.start, x.shape[3]) for x in tensors] for some in counts]
    received = exchange(parts, shapes, shards.group)
    out = []
    for i, x in enumerate(tensors):
        pieces = [x if r == shards.rank else some[i] for r, some in enumerate(received)]
        out.append(torch.cat(pieces, 2))  # (B, H, before + n + after, .)
    low, high = bounds(shards.rank)
    return out, shards.first - low, high - shards.own.stop
