"""Tokens of sequences that processes share, by their rank among the valid tokens of all processes.

The valid tokens of a process have consecutive ranks, wherever the padding is. Every process knows the mask of all
tokens, so all of them compute which process holds which rank, and only tokens travel.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.blocks import inverse, valid_first
from hf_efficient_attn.ops.coreset_landmarks import take_alike
from hf_efficient_attn.ops.shards import Shards, exchange, gather


class Ranks(NamedTuple):
    """Which process holds which valid tokens. B' is the batch size, or 1 without padding.

    Attributes:
        shards: the shards of the sequences.
        first: int64 (processes, B') on the CPU, the rank of the first valid token of each process.
        num_valid: int64 (processes, B') on the CPU, how many valid tokens each process holds.
        order: int64 (B, n), which puts the valid tokens of this process first, or None without padding.
    """

    shards: Shards
    first: Tensor
    num_valid: Tensor
    order: Tensor | None

    @property
    def num_tokens(self) -> Tensor:
        """The valid tokens of all processes together, int64 (B', 1) on the CPU."""
        return self.num_valid.sum(0).unsqueeze(1)


class _Holders(NamedTuple):
    """Who holds the tokens at some ranks, int64 (B', C) each, on the CPU.

    Attributes:
        owner: the process.
        slot: the number of the token among those of its process here.
        exists: bool, whether there is a token.
        held: (processes, B', K), the tokens that each process holds, counted among its own valid tokens, in the order
            of their slots; 0 beyond them.
        sizes: the largest number of slots of each process.
    """

    owner: Tensor
    slot: Tensor
    exists: Tensor
    held: Tensor
    sizes: list[int]


def ranks_of(shards: Shards) -> Ranks:
    """The ranks of the tokens of sequences."""
    if shards.key_mask is None:
        count, order = torch.tensor(shards.lengths)[:, None], None
    else:
        count = torch.stack([mask.sum(1) for mask in shards.key_mask.split(list(shards.lengths), 1)]).cpu()
        order = valid_first(shards.key_mask[:, shards.own])
    return Ranks(shards, count.cumsum(0) - count, count, order)


def valid_tokens_first(x: Tensor, ranks: Ranks) -> Tensor:
    """The tokens of this process (B, H, n, F), of each sequence the valid ones first."""
    if ranks.order is None:
        return x
    return take_alike(x.flatten(0, 1), of_heads(ranks.order, x.shape[1])).view(x.shape)


def in_sequence(x: Tensor, ranks: Ranks) -> Tensor:
    """Inverse of `valid_tokens_first`, with 0 for padding."""
    mask = ranks.shards.own_mask
    if ranks.order is None or mask is None:
        return x
    index = of_heads(inverse(ranks.order), x.shape[1])
    return take_alike(x.flatten(0, 1), index).view(x.shape).masked_fill(~mask[:, None, :, None], 0.0)


def of_heads(x: Tensor, num_heads: int) -> Tensor:
    """Repeat what belongs to sequences, (B', ...), for each head: (B * H, ...); (1, ...) stays, for all heads."""
    return x if len(x) == 1 else x.repeat_interleave(num_heads, 0)


def own_position(rank: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Where tokens are among the valid ones of this process, int64 (B', ...) like the ranks, and whether it has them.

    The position of a token of another process is 0.
    """
    first, count = (x[ranks.shards.rank].view(-1, *[1] * (rank.ndim - 1)) for x in (ranks.first, ranks.num_valid))
    position = rank - first.to(rank.device)
    is_own = (position >= 0) & (position < count.to(rank.device))
    return torch.where(is_own, position, 0), is_own


def gather_at(given: Sequence[tuple[Tensor, Tensor]], ranks: Ranks) -> list[Tensor]:
    """Give all processes the tokens at some ranks, in one collective.

    Args:
        given: tensors (B, H, n, F) of one dtype of the tokens of this process, valid ones first, each with the wanted
            ranks, int64 (B', C) on the CPU. Ranks that do not exist are allowed.
        ranks: the ranks of the tokens.

    Returns:
        (B, H, C, F) for each; 0 at ranks that do not exist.
    """
    shards, parts, found = ranks.shards, [], []
    for x, wanted in given:
        holders = _holders(wanted, ranks)
        parts.append(_tokens(x, holders.held[shards.rank]))
        found.append(holders)
    received = gather(torch.cat([x.flatten() for x in parts]), shards.group).split([x.numel() for x in parts], 1)
    outs = []
    for piece, part, (x, _), holders in zip(received, parts, given, found, strict=True):
        tokens = piece.view(shards.size, *part.shape).transpose(0, 1).flatten(1, 2)
        index = of_heads(holders.owner * part.shape[1] + holders.slot, x.shape[1]).to(x.device)
        out = take_alike(tokens, index)
        if not holders.exists.all():
            out = out.masked_fill(~of_heads(holders.exists, x.shape[1]).to(x.device).unsqueeze(2), 0.0)
        outs.append(out.unflatten(0, x.shape[:2]))
    return outs


def with_near_tokens(tensors: Sequence[Tensor], reach: int, ranks: Ranks) -> tuple[list[Tensor], Tensor]:
    """Add the valid tokens of other processes within `reach` ranks of those of this process.

    Args:
        tensors: (B, H, n, F) each, of one dtype, the valid tokens first.
        reach: how many ranks on each side, at least 1.
        ranks: the ranks of the tokens.

    Returns:
        The tensors (B, H, n + m, F) with the m tokens of the others last; and where the tokens with the ranks before
        and after those of this process are in them, int64 (B', 2 * reach), see `near_position`.
    """
    shards = ranks.shards
    wanted = [_holders(_ranks_around(r, reach, ranks), ranks) for r in range(shards.size)]
    parts = [
        [_tokens(x, holders.held[shards.rank][:, : holders.sizes[shards.rank]]) for x in tensors] for holders in wanted
    ]
    own, length = wanted[shards.rank], tensors[0].shape[2]
    shapes = [[(x.shape[0] * x.shape[1], size, x.shape[3]) for x in tensors] for size in own.sizes]
    received = exchange(parts, shapes, shards.group)
    outs = [torch.cat((x, *(of[i].unflatten(0, x.shape[:2]) for of in received)), 2) for i, x in enumerate(tensors)]
    sizes = torch.tensor(own.sizes)
    position = length + (sizes.cumsum(0) - sizes)[own.owner] + own.slot
    return outs, torch.where(own.exists, position, 0)


def near_position(rank: Tensor, around: Tensor, ranks: Ranks) -> Tensor:
    """Where the tokens of these ranks, int64 (B', ...), are in the tensors of `with_near_tokens`.

    The position of a token that is not in them is arbitrary.
    """
    position, is_own = own_position(rank, ranks)
    shape, reach = [-1, *[1] * (rank.ndim - 1)], around.shape[1] // 2
    first, count = (x[ranks.shards.rank].view(shape).to(rank.device) for x in (ranks.first, ranks.num_valid))
    column = torch.where(rank < first, rank - first, rank - first - count) + reach
    column = column.clamp(0, 2 * reach - 1).flatten(1)
    other = around.to(rank.device).expand(len(column), -1).gather(1, column).view_as(rank)
    return torch.where(is_own, position, other)


def _ranks_around(process: int, reach: int, ranks: Ranks) -> Tensor:
    """The ranks before and after those of a process, int64 (B', 2 * reach); -1 if it has no token."""
    first, count = ranks.first[process, :, None], ranks.num_valid[process, :, None]
    step = torch.arange(-reach, reach)
    return torch.where(count > 0, first + torch.where(step < 0, step, count + step), -1)


def _holders(wanted: Tensor, ranks: Ranks) -> _Holders:
    """Who holds the tokens at these ranks, int64 (B', C); those that do not exist have slot 0 of any process."""
    size, last = ranks.shards.size, (ranks.first + ranks.num_valid)[:, :, None]
    exists = (wanted >= 0) & (wanted < ranks.num_tokens)
    owner = (wanted >= last).sum(0).clamp(max=size - 1)
    is_owner = (owner == torch.arange(size)[:, None, None]) & exists
    slots = is_owner.cumsum(2) - 1
    sizes = is_owner.sum(2).amax(1)
    count, position = max(1, int(sizes.max())), wanted - ranks.first.mT.expand(len(wanted), -1).gather(1, owner)
    index = torch.zeros(size, len(wanted), count + 1, dtype=torch.int64)
    index.scatter_(2, torch.where(is_owner, slots, count), torch.where(is_owner, position, 0))
    slot = torch.where(exists, slots.gather(0, owner[None])[0], 0)
    return _Holders(torch.where(exists, owner, 0), slot, exists, index[:, :, :count], sizes.tolist())


def _tokens(x: Tensor, index: Tensor) -> Tensor:
    """The tokens of (B, H, n, F) at int64 (B', K) on the CPU: (B * H, K, F)."""
    return take_alike(x.flatten(0, 1), of_heads(index, x.shape[1]).to(x.device))
