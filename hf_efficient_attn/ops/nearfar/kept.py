"""The causal form of `nearfar` for tokens that come in several calls, as into a cache.

All keys and values are kept, and the hierarchy of `hf_efficient_attn.ops.nearfar.chunks`. The clusters of a chunk are
made once, when it ends. A query sees at most three chunks of each level, so that later chunks take their place. It does
what it does in `hf_efficient_attn.ops.nearfar.causal`: it reads its window, the landmarks that it sees, and the keys of
the clusters that it chooses. So the output is that of one call with all tokens, up to rounding.

The sequences of a batch may have different numbers of tokens, which are kept one after another, without padding.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.attend import Partial, attend, output_of
from hf_efficient_attn.ops.backends.devices import accumulation_dtype, at_most, coarse_dtype
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.index import ceil_div, constant, integers, take
from hf_efficient_attn.ops.nearfar.causal import COMPARED, MOST, attend_to_landmarks
from hf_efficient_attn.ops.nearfar.chunks import (
    BASE,
    CausalNearFarOptions,
    Columns,
    Level,
    level_at,
    make_clusters,
    query_blocks,
)
from hf_efficient_attn.ops.nearfar.groups import directions, halve
from hf_efficient_attn.ops.slices import slice_size, sliced

# Enough levels for any machine: with blocks of 4 tokens there are so many at 16 million tokens.
_LEVELS = 12
# Room for new keys grows by so many keys, or by one part in `_SHARE` of all keys if that is more.
_ROOM = 64
_SHARE = 16
# Queries are processed so many at a time, or as many as a slice allows.
_QUERIES = 64


class Kept(NamedTuple):
    """What is kept of B sequences."""

    key: Tensor  # (B, H_kv, L, D), the keys of a row, and then room for more
    value: Tensor  # (B, H_kv, L, Dv)
    query: Tensor  # (B, H, block, D), the queries of the block that has not ended
    spaced: Tensor  # (B, H, block, D), evenly spaced queries of the first chunk of the next level
    directions: Tensor  # (B, H, D, F), of the last level with a chunk that has ended
    landmarks: Tensor  # (B, H, G, D + 1 + Dv + 1), the three tensors of `Columns`
    members: Tensor  # int32 (B, H, S), the keys of the clusters of the landmarks, one cluster after another


class _Place(NamedTuple):
    """Where the clusters of a chunk are.

    The chunks 0, 1 and 2 of each four of a level have a place. The fourth is never seen, because a chunk of the next
    level ends with it.
    """

    chunk: int  # tokens of the chunk
    leaf: int  # keys of a cluster
    column: int  # the first landmark
    member: int  # the first key

    @property
    def columns(self) -> slice:
        return slice(self.column, self.column + self.chunk // self.leaf)


@functools.cache
def _places(options: CausalNearFarOptions) -> tuple[_Place, ...]:
    """Return the places of chunks, three for each level."""
    places = [_Place(*level_at(0, options), 0, 0)]
    for index in range(1, (BASE - 1) * _LEVELS):
        last = places[-1]
        level = level_at(index // (BASE - 1), options)
        places.append(_Place(*level, last.columns.stop, last.member + last.chunk))
    return tuple(places)


def nothing_kept(query: Tensor, key: Tensor, value: Tensor, options: CausalNearFarOptions) -> Kept:
    """Return what is kept of sequences without tokens, for (B, H, N, D), (B, H_kv, N, D) and (B, H_kv, N, Dv)."""
    block, spaced = (query.new_zeros(*query.shape[:2], options.block_size, query.shape[3]) for _ in range(2))
    none = block[:, :, :0].to(accumulation_dtype(query.dtype))
    landmarks = none.new_zeros(*query.shape[:2], 0, query.shape[3] + value.shape[3] + 2)
    return Kept(key[:, :, :0], value[:, :, :0], block, spaced, none.mT, landmarks, none[..., 0].int())


def add_tokens(
    kept: Kept,
    tensors: tuple[Tensor, Tensor, Tensor],
    counts: Sequence[int],
    added: Sequence[int],
    options: CausalNearFarOptions,
    *,
    attends: bool,
) -> tuple[Kept, Tensor]:
    """Add tokens to sequences, and compute attention of each to its sequence up to itself.

    Args:
        kept: what is kept. Without gradients its tensors are changed in place.
        tensors: query (B, H, N, D), key (B, H_kv, N, D) and value (B, H_kv, N, Dv), the valid tokens of a row first.
        counts: the number of earlier tokens of each sequence.
        added: the number of its new tokens.
        options: those of the causal form.
        attends: whether to compute attention.

    Returns:
        What is kept then, and outputs and their lse, (B, H, N, Dv + 1) in the accumulation dtype, or without tokens.
    """
    query, key, value = tensors
    size = options.block_size
    kept = kept._replace(key=_extended(kept.key, key, counts, added), value=_extended(kept.value, value, counts, added))
    out = kept.landmarks.new_zeros(*query.shape[:2], query.shape[2] if attends else 0, value.shape[3] + 1)
    done = [0] * len(added)
    while done != [*added]:  # some queries of each row, which are in one block
        first = [count + number for count, number in zip(counts, done, strict=True)]
        numel = query.shape[0] * query.shape[1] * (kept.landmarks.shape[2] + MOST * value.shape[3])
        most = max(_QUERIES, slice_size(numel, query.device)) if attends else size
        left = [total - number for total, number in zip(added, done, strict=True)]
        number = [min(n, size - start % size, most) for n, start in zip(left, first, strict=True)]
        end = [start + n for start, n in zip(first, number, strict=True)]
        own = _tokens(query, done, max(number))
        kept = kept._replace(query=_written(kept.query, own, [start % size for start in first], number))
        if attends:
            out = _written(out, _attend(kept, own, first, max(end), options), done, number)
        for last in {x for x, n in zip(end, number, strict=True) if n and x % size == 0}:
            rows = [row for row, x in enumerate(end) if x == last and number[row]]
            # Without attention only what is seen after the call is needed.
            seen = last if attends else min(counts[row] + added[row] for row in rows)
            kept = _end_block(kept, torch.tensor(rows, device=query.device), last // size - 1, seen // size, options)
        done = [count + n for count, n in zip(done, number, strict=True)]
    return kept, out


def _put(x: Tensor, rows: Tensor | slice, tokens: Tensor | slice, new: Tensor) -> Tensor:
    """Put new tokens into x (B, H, N, .), in place unless gradients may need x, or inference mode has made it."""
    if torch.is_grad_enabled() or (x.is_inference() and not torch.is_inference_mode_enabled()):
        x = x.clone()
    x[rows, :, tokens] = new.to(x.dtype)
    return x


def _written(x: Tensor, new: Tensor, starts: Sequence[int], number: Sequence[int]) -> Tensor:
    """Put a number of tokens of each row of new (B, H, n, .) into x (B, H, N, .), from the indices `starts` on."""
    if len({*starts}) == len({*number}) == 1:
        return _put(x, slice(None), slice(starts[0], starts[0] + number[0]), new[:, :, : number[0]])
    first, count = torch.tensor((starts, number), device=x.device)
    row, token = (integers(new.shape[2], x.device) < count[:, None]).nonzero().unbind(1)
    return _put(x, row, first[row] + token, new[row, :, token])


def _extended(x: Tensor, new: Tensor, counts: Sequence[int], added: Sequence[int]) -> Tensor:
    """Append new tokens to x, and make room for them."""
    missing = max(count + number for count, number in zip(counts, added, strict=True)) - x.shape[2]
    if missing > 0:
        x = pad(x, (0, 0, 0, max(missing, min(_ROOM, x.shape[2]), x.shape[2] // _SHARE)))
    return _written(x, new, counts, added)


def _tokens(x: Tensor, starts: Sequence[int], count: int) -> Tensor:
    """Return `count` tokens of each row of x (B, H, N, .) from `starts` on. What follows the last one means nothing."""
    if len({*starts}) == 1:
        return x[:, :, starts[0] : starts[0] + count]
    index = torch.tensor(starts, device=x.device)[:, None] + integers(count, x.device)
    index = index.clamp_(max=x.shape[2] - 1)  # (B, count)
    found: Tensor = take(x.flatten(0, 1), index.repeat_interleave(x.shape[1], 0)).unflatten(0, x.shape[:2])
    return found


def _end_block(kept: Kept, rows: Tensor, block: int, last: int, options: CausalNearFarOptions) -> Kept:
    """Keep what a block tells that has ended in some rows. Later queries are in the block `last` or after it."""
    size = options.block_size
    query = kept.query[rows].to(kept.landmarks.dtype)  # (R, H, block, D)
    level = 0  # the first one of which no chunk has ended before
    while BASE**level <= block:
        level += 1
    step = BASE**level
    first = ceil_div(block * size, step)
    new = query[:, :, first * step - block * size :: step]
    kept = kept._replace(spaced=_put(kept.spaced, rows, slice(first, first + new.shape[2]), new))
    if block + 1 == step:
        spaced = kept.spaced[rows]
        thinned = _put(kept.spaced, rows, slice(ceil_div(size, BASE)), spaced[:, :, ::BASE])
        spaced = spaced.to(query.dtype)
        found = directions((spaced - spaced.mean(2, keepdim=True)).flatten(0, 1)).unflatten(0, spaced.shape[:2])
        room = pad(kept.directions, (0, found.shape[3] - kept.directions.shape[3]))
        kept = kept._replace(spaced=thinned, directions=_put(room, rows, slice(None), found))
    for index in range(level + 1):
        chunk = (block + 1) // BASE**index - 1
        is_seen = chunk % BASE < BASE - 1 and (last - 1) // BASE**index < chunk // BASE * BASE + BASE
        if (block + 1) % BASE**index == 0 and is_seen:
            kept = _end_chunk(
                kept, rows, chunk, _places(options)[(BASE - 1) * index + chunk % BASE], query, options.scale
            )
    return kept


def _end_chunk(kept: Kept, rows: Tensor, chunk: int, place: _Place, query: Tensor, scale: float) -> Kept:
    """Make the clusters of a chunk that has ended in some rows, for the queries (R, H, block, D) of its last block."""
    start = chunk * place.chunk
    groups = query.shape[1] // kept.key.shape[1]
    own = (x[rows, :, start : start + place.chunk] for x in (kept.key, kept.value))
    key, value = (x.repeat_interleave(groups, 1).flatten(0, 1) for x in own)  # (R H, chunk, .)
    coarse = key.detach().to(coarse_dtype(key))
    points = coarse @ kept.directions[rows].flatten(0, 1).to(coarse.dtype)
    members = halve(points, (place.chunk // place.leaf).bit_length() - 1)  # (R H, chunk)

    def some_heads(key: Tensor, value: Tensor, members: Tensor, query: Tensor) -> Tensor:
        index = [members.unflatten(1, (-1, place.leaf))]
        blocks = query_blocks(query, query.shape[1], scale)
        clusters = make_clusters(key, value, (Level(place.chunk, place.leaf),), index, blocks, place.chunk)
        return torch.cat(clusters.columns, 2)

    heads = slice_size(place.chunk * max(key.shape[2], value.shape[2]), key.device)
    new = sliced(some_heads, key, value, members, query.flatten(0, 1), size=heads).unflatten(0, query.shape[:2])
    landmarks, all_members = kept.landmarks, kept.members
    missing = place.member + place.chunk - all_members.shape[2]
    if missing > 0:  # the last column belongs to the window
        width = ceil_div(place.columns.stop + 1, COMPARED) * COMPARED
        landmarks = pad(landmarks, (0, 0, 0, width - landmarks.shape[2]))
        all_members = pad(all_members, (0, missing))
    to = slice(place.member, place.member + place.chunk)
    all_members = _put(all_members, rows, to, members.unflatten(0, query.shape[:2]) + start)
    return kept._replace(landmarks=_put(landmarks, rows, place.columns, new), members=all_members)


def _attend(kept: Kept, query: Tensor, first: Sequence[int], end: int, options: CausalNearFarOptions) -> Tensor:
    """Compute the attention of queries (B, H, n, D), which in each row follow `first` in one block.

    No sequence is longer than `end`. The result is (B, H, n, Dv + 1), outputs and their lse.
    """
    dim = query.shape[3]
    near = _window(kept, query, first, end, options)
    blocks = tuple(start // options.block_size for start in first)
    if max(blocks) < 2:
        return near
    center, bias, mean = kept.landmarks.split((dim, 1, kept.landmarks.shape[3] - dim - 1), 3)
    bias = bias.masked_fill(_hidden(blocks, bias.shape[2], options, bias.device), -torch.inf)
    columns = Columns(*(x.flatten(0, 1) for x in (center, bias, mean)))
    near = near.flatten(0, 1)
    far, (row, token, column) = attend_to_landmarks(
        query.flatten(0, 1).to(near.dtype) * options.scale, near[..., -1:], columns, None, options.dropout_p
    )
    found = torch.stack((near, far), 2).flatten(0, 1)  # (B H n, 2, Dv + 1)
    if len(row):
        of_query = row * query.shape[2] + token  # in ascending order
        place = integers(len(row), row.device) - torch.searchsorted(of_query, of_query)
        chosen = found.new_zeros(len(found), at_most(place.amax() + 1, MOST), found.shape[2])
        chosen[..., -1] = -torch.inf
        of_pairs = _clusters(kept, query.flatten(0, 2)[of_query], row, column, options)
        found = torch.cat((found, chosen.index_put((of_query, place), of_pairs)), 1)
    lse = found[..., -1:]
    out = torch.cat(((lse.softmax(1) * found[..., :-1]).sum(1), lse.logsumexp(1)), 1)
    return out.view(*query.shape[:3], -1)


@constant
def _hidden(blocks: tuple[int, ...], width: int, options: CausalNearFarOptions, device: torch.device) -> Tensor:
    """Return the landmarks that queries of a block of each row do not see, bool (B, 1, width, 1)."""
    hidden = torch.ones(len(blocks), 1, width, 1, dtype=torch.bool, device=device)
    for row, block in enumerate(blocks):
        for index, place in enumerate(_places(options)):
            level, chunk = divmod(index, BASE - 1)
            if block and place.column < width and chunk < (block - 1) // BASE**level % BASE:
                hidden[row, :, place.columns] = False
    return hidden


def _window(kept: Kept, query: Tensor, first: Sequence[int], end: int, options: CausalNearFarOptions) -> Tensor:
    """Compute attention to the keys of the own block and the block before it: (B, H, n, Dv + 1)."""
    (batch, num_heads, number, _), num_kv_heads = query.shape, kept.key.shape[1]
    starts = [max(0, start // options.block_size - 1) * options.block_size for start in first]
    width = min(end - min(starts), 2 * options.block_size)
    key, value = (_tokens(x, starts, width).flatten(0, 1)[:, None] for x in (kept.key, kept.value))
    groups = num_heads // num_kv_heads
    last = [start - begin for start, begin in zip(first, starts, strict=True)]  # the last key of the first query
    bias = None
    if min(last) < width - 1:
        later = integers(width, query.device) - integers(number, query.device)[:, None]  # (n, Nk)
        bias = mask_bias(later <= torch.tensor(last, device=query.device)[:, None, None], query.dtype)
        bias = bias.repeat(1, groups, 1).repeat_interleave(num_kv_heads, 0)[:, None]
    # The query heads of a group are passed as if they were several queries of one head.
    flat = query.reshape(batch * num_kv_heads, 1, groups * number, -1)
    found = attend(flat, key, value, bias, scale=options.scale, dropout_p=options.dropout_p)
    return output_of(found, True).reshape(batch, num_heads, number, -1)


def _clusters(kept: Kept, query: Tensor, row: Tensor, column: Tensor, options: CausalNearFarOptions) -> Tensor:
    """Compute attention of queries (P, D) to one cluster each: (P, Dv + 1), outputs and their lse.

    A cluster is that of a landmark, int64 (P,), of a row, int64 (P,), of the heads of all sequences.
    """
    keys, values = (x.flatten(0, 2)[None] for x in (kept.key, kept.value))  # (1, B H_kv L, .)
    members = kept.members.flatten()
    groups = kept.query.shape[1] // kept.key.shape[1]
    start = row.div(groups, rounding_mode="floor") * kept.key.shape[2]

    def some_pairs(query: Tensor, member: Tensor, start: Tensor) -> Tensor:
        index = (members[member] + start)[None]  # (1, P, leaf)
        found = attend(
            query[None, :, None],
            take(keys, index),
            take(values, index),
            scale=options.scale,
            dropout_p=options.dropout_p,
        )
        return output_of(Partial(*(x[0, :, 0] for x in found)), True)

    found = kept.landmarks.new_zeros(len(query), values.shape[2] + 1)
    places = [place for place in _places(options) if place.member < kept.members.shape[2]]
    for leaf in sorted({place.leaf for place in places}):
        equal = [place for place in places if place.leaf == leaf]
        own = ((column >= equal[0].column) & (column < equal[-1].columns.stop)).nonzero()
        if len(own):
            first = row[own] * kept.members.shape[2] + equal[0].member + (column[own] - equal[0].column) * leaf
            size = slice_size(leaf * max(keys.shape[2], values.shape[2]), query.device)
            arguments = query[own[:, 0]], first + integers(leaf, own.device), start[own]
            out = sliced(some_pairs, *arguments, size=size, draws=options.dropout_p > 0.0)
            found = found.index_put((own[:, 0],), out)
    return found
