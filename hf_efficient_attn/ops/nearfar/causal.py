"""Near keys exactly, and landmarks for all other keys: the strictly causal form of `nearfar`.

The positions after the first `num_exact` are cut into epochs, whose lengths grow with the position. The prefix of an
epoch is all keys up to one block before its start. The prefix alone determines the center of the keys, the landmarks,
and groups of similar queries, which all queries of the epoch use. So no choice depends on later tokens, and the output
does not even depend on the length of the sequence. A query attends to

- its own block and the block before it, exactly;
- the near keys exactly: the keys with the largest scores for the group of queries that is most similar to the query.
  They are found again a few times in an epoch, among all keys before the last two blocks. The queries of a group are
  cut into blocks, in their order. All queries of a block have the near keys that its first query knows;
- all other keys through landmarks. As in the bidirectional form (`hf_efficient_attn.ops.nearfar.bidirectional`), the
  nearest landmark represents a key, and what landmarks count for near keys is subtracted. Each block adds its own keys
  to the sums of the landmarks.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.attend import Partial, attend, merge
from hf_efficient_attn.ops.backends.devices import accumulation_dtype
from hf_efficient_attn.ops.clusters import even_positions, nearest
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.exact import dense_softmax, exact_attention, mask_bias
from hf_efficient_attn.ops.index import ceil_div, constant, integers, inverse, pad_to_blocks, take
from hf_efficient_attn.ops.nearfar.groups import (
    LEAST_SHARE,
    CountedKeys,
    Groups,
    directions,
    group_queries,
    near_attention,
    output_around,
    replace_counted,
)
from hf_efficient_attn.ops.nearfar.landmarks import (
    NearFarOptions,
    choose_landmarks,
    landmarks_naive,
    means_and_logs,
    represent,
    scores_naive,
)
from hf_efficient_attn.ops.slices import slice_size, sliced

# The numbers of evenly spaced keys of the prefix that landmarks are made from, and of queries that groups are made
# from.
_CANDIDATES = 2048
_QUERIES = 512
# Near keys are found again when the position has grown by 1 / `_REFRESH`. A block has `_BLOCK_Q` queries of one group.
# An epoch has half as many groups as it has full blocks, but at least `_FEW_GROUPS` and at most `_GROUPS`.
_REFRESH = 8
_BLOCK_Q = 16
_FEW_GROUPS = 16
_GROUPS = 128


class CausalNearFarOptions(NamedTuple):
    """Options of `causal_nearfar_attention`."""

    # The first positions, which are computed exactly in sequences of any length; at least as many as near keys, and
    # more than `block_size`.
    num_exact: int
    block_size: int  # tokens of a block. A query attends to its own block and the block before it exactly.
    of_prefix: NearFarOptions  # options for the landmarks and near keys of a long prefix


def split_columns(columns: int, scale: float, draws: Draws, dropout_p: float = 0.0) -> CausalNearFarOptions:
    """Distribute a budget of keys per query: on average 1.5 blocks, and as many near keys by content as landmarks.

    Larger blocks have a smaller error on activations of GPT-2, and a larger error on activations of MiniLM.
    """
    block_size = max(1, 9 * columns // 32)
    near = (columns - 3 * block_size // 2) // 2
    of_prefix = NearFarOptions(max(1, near), _CANDIDATES, 1, 0, near, _GROUPS, 0.0, scale, draws, dropout_p)
    return CausalNearFarOptions(max(3 * columns // 2, block_size + 1), block_size, of_prefix)


class Epoch(NamedTuple):
    """Positions `start` to `end` - 1. Near keys are found at each of the positions `spans`, of which `start` is one."""

    start: int
    end: int
    spans: tuple[int, ...]


def epochs(length: int, options: CausalNearFarOptions) -> Iterator[Epoch]:
    """Yield the epochs of a sequence.

    After `num_exact` positions the first three epochs are about 1/3, 2/3 and 2/3 times as long. The later ones double
    the position.
    """
    start = options.num_exact
    size = options.block_size
    for step in itertools.chain((start // 3, 2 * start // 3, 2 * start // 3), itertools.repeat(0)):
        if start >= length:
            return
        end = start + max(1, (step or start) // size) * size
        spans = range(start, min(end, length), max(1, start // _REFRESH // size) * size)
        yield Epoch(start, min(end, length), tuple(spans))
        start = end


def causal_nearfar_attention(query: Tensor, key: Tensor, value: Tensor, options: CausalNearFarOptions) -> Tensor:
    """Compute causal attention to near keys exactly, and to all other keys through landmarks.

    Gradients flow through keys, values and weights, with all choices fixed.

    Args:
        query: (BH, N, D), valid tokens first.
        key: (BH, N, D).
        value: (BH, N, Dv).
        options: see `CausalNearFarOptions`.

    Returns:
        (BH, N, Dv or Dv + 1).
    """
    scale = options.of_prefix.scale
    dropout_p = options.of_prefix.dropout_p
    with torch.autocast(query.device.type, enabled=False):
        first = (x[:, : options.num_exact] for x in (query, key, value))
        with_lse = options.of_prefix.with_lse
        outs = [exact_attention(*first, is_causal=True, scale=scale, dropout_p=dropout_p, with_lse=with_lse)]
        for epoch in epochs(query.shape[1], options):

            def some_heads(query: Tensor, key: Tensor, value: Tensor, epoch: Epoch = epoch) -> Tensor:
                return _epoch(query, key, value, epoch, options)

            tensors = (x[:, : epoch.end].to(accumulation_dtype(x.dtype)) for x in (query, key, value))
            size = slice_size(epoch.end * max(options.of_prefix.num_samples, query.shape[2]) // 2, query.device)
            outs.append(sliced(some_heads, *tensors, size=size, draws=dropout_p > 0.0).to(outs[0].dtype))
        return torch.cat(outs, 1)


def _nearfar_options(epoch: Epoch, options: CausalNearFarOptions) -> NearFarOptions:
    prefix = epoch.start - options.block_size
    num_groups = min(
        options.of_prefix.num_groups, max((epoch.end - epoch.start) // (2 * _BLOCK_Q), _FEW_GROUPS), prefix
    )
    return options.of_prefix._replace(
        num_samples=min(options.of_prefix.num_samples, prefix),
        num_candidates=min(options.of_prefix.num_candidates, prefix),
        num_groups=num_groups,
    )


def _epoch(query: Tensor, key: Tensor, value: Tensor, epoch: Epoch, options: CausalNearFarOptions) -> Tensor:
    """Compute the output (BH, L, .) of an epoch's L queries from all tokens up to its end (accumulation dtype)."""
    start = epoch.start
    size = options.block_size
    length = epoch.end - epoch.start
    chosen = _nearfar_options(epoch, options)
    prefix = start - size
    call: dict[str, Any] = {"scale": chosen.scale, "dropout_p": chosen.dropout_p}
    num_blocks = ceil_div(length, size)
    mean = key[:, :prefix].mean(1, keepdim=True)
    key = key - mean
    landmarks = choose_landmarks(query[:, :prefix], key[:, :prefix], chosen)
    # For queries of block t, landmarks represent the keys of the prefix and of the t blocks after the prefix.
    last = prefix + (num_blocks - 1) * size
    # Segment 0 is the prefix, and 1, 2, ... are the blocks after it.
    segment = ((integers(last, key.device) - prefix).div(size, rounding_mode="floor") + 1).clamp(min=0)  # (last,)
    keys = represent(key[:, :last], value[:, :last], landmarks, segment, num_blocks)
    # (BH, T, m, Dv), (BH, T, m)
    values, bias = means_and_logs(*(x.unflatten(1, (num_blocks, -1)).cumsum(1) for x in (keys.sums, keys.total)))
    blocks = pad_to_blocks(query[:, start:], size)  # (BH, T, size, D)
    centers = landmarks.key.unsqueeze(1).expand(-1, num_blocks, -1, -1)  # (BH, T, m, D)
    far = _flat(attend(blocks, centers, values, bias.unsqueeze(2), **call), length)  # out (BH, L, Dv), lse (BH, L)

    own = (pad_to_blocks(x[:, prefix:], size).flatten(1, 2) for x in (key, value))  # (BH, (T + 1) size, .)
    own_key, own_value = (x.unfold(1, 2 * size, size).mT for x in own)  # (BH, T, 2 size, .)
    block = torch.ones(size, size, dtype=torch.bool, device=query.device)  # (size, size)
    causal = mask_bias(torch.cat((block, block.tril()), 1), query.dtype)[None, None]  # (1, 1, size, 2 size)
    window = _flat(attend(blocks, own_key, own_value, causal, **call), length)

    if not chosen.block_size:
        return output_around(mean, merge(window, far), query[:, start:], chosen)
    groups, near = _near_keys(query, key, epoch, prefix, chosen)
    counts = CountedKeys(key, value, landmarks.key, keys.landmark, keys.key_bias)
    in_groups = near_attention(take(query[:, start:], groups.query), near, counts, **call)  # (BH, T, block_q, .)
    columns = torch.cat([y for x in in_groups for y in (x.out, x.lse.unsqueeze(3))], 3).flatten(1, 2)
    out, lse, *counted = take(columns, groups.slot).split((value.shape[2], 1) * 2, 2)  # (BH, L, .) each
    near_field = merge(window, Partial(out, lse.squeeze(2)))
    found = replace_counted(
        *(Partial(x.out, x.lse.view(*x.out.shape[:2], 1)) for x in (far, Partial(*counted), near_field))
    )
    return output_around(mean, found, query[:, start:], chosen)


def _flat(blocks: Partial, length: int) -> Partial:
    return Partial(blocks.out.flatten(1, 2)[:, :length], blocks.lse.flatten(1, 2)[:, :length])


@torch.no_grad()
def _near_keys(query: Tensor, key: Tensor, epoch: Epoch, prefix: int, options: NearFarOptions) -> tuple[Groups, Tensor]:
    """Put the L queries of an epoch in T blocks of groups, and find each block's near keys: int64 (BH, T, w)."""
    factor = directions(key[:, :prefix])  # (BH, D, F)
    some = query.index_select(1, even_positions(prefix, min(prefix, _QUERIES), key.device))  # (BH, n, D)
    groups = group_queries(some @ factor, options.num_groups)
    mean = take(some, groups.query).mean(2)  # (BH, G, D)
    blocks, group = _in_blocks(nearest(query[:, epoch.start :] @ factor, mean @ factor), mean.shape[1])

    # The near keys of each span and group, (BH, S, G, w), lie before the last two blocks.
    ends = [start - (epoch.start - prefix) for start in epoch.spans]
    scores = torch.bmm(mean if options.scale > 0.0 else -mean, key[:, : ends[-1]].mT)  # (BH, G, Nk)
    near = [scores[..., :prefix].topk(options.block_size, dim=2, sorted=False)[1]]  # (BH, G, w)
    for before, end in itertools.pairwise(ends):
        new = torch.arange(before, end, device=key.device).expand(*near[0].shape[:2], -1)
        known = torch.cat((near[-1], new), 2)
        best = scores.gather(2, known).topk(options.block_size, dim=2, sorted=False)[1]
        near.append(known.gather(2, best))
    span = _spans(epoch, key.device)[blocks.query[:, :, 0]]  # (BH, T)
    return blocks, take(torch.stack(near, 1).flatten(1, 2), span * mean.shape[1] + group)


@constant
def _spans(epoch: Epoch, device: torch.device) -> Tensor:
    """Return the span of each query of an epoch, int64 (L,)."""
    first = torch.tensor(epoch.spans, device=device)  # (S,)
    return torch.searchsorted(first, torch.arange(epoch.start, epoch.end, device=device), right=True) - 1


def _in_blocks(group: Tensor, num_groups: int) -> tuple[Groups, Tensor]:
    """Put queries in blocks of one group each, in the order of the queries.

    Args:
        group: int64 (BH, L), the group of each query.
        num_groups: the number of groups.

    Returns:
        The blocks, and the group of each block, int64 (BH, T). Places without a query have the first one.
    """
    batch_heads, length = group.shape
    device = group.device
    count = torch.zeros(batch_heads, num_groups, dtype=torch.int64, device=device)  # (BH, G)
    count.scatter_add_(1, group, torch.ones_like(group))
    ends = ((count + _BLOCK_Q - 1) // _BLOCK_Q).cumsum(1)  # (BH, G)
    rank = inverse(group.sort(dim=1, stable=True)[1]) - (count.cumsum(1) - count).gather(1, group)  # (BH, L)
    slot = torch.cat((torch.zeros_like(ends[:, :1]), ends[:, :-1]), 1).gather(1, group) * _BLOCK_Q + rank  # (BH, L)
    num_blocks = length // _BLOCK_Q + num_groups  # at most
    query = torch.zeros(batch_heads, num_blocks * _BLOCK_Q, dtype=torch.int64, device=device)
    query.scatter_(1, slot, integers(length, device).expand_as(slot))
    of_block = torch.searchsorted(ends, integers(num_blocks, device).repeat(batch_heads, 1), right=True)  # (BH, T)
    return Groups(query.unflatten(1, (num_blocks, _BLOCK_Q)), slot), of_block.clamp_(max=num_groups - 1)


def causal_nearfar_naive(query: Tensor, key: Tensor, value: Tensor, options: CausalNearFarOptions) -> Tensor:
    """Compute `causal_nearfar_attention` in the readable form, by dense float64 matrices of one head after another.

    It makes the same choices: (BH, N, D), (BH, N, D), (BH, N, Dv) -> float64 (BH, N, Dv).
    """
    future = torch.ones(query.shape[1], query.shape[1], dtype=torch.bool, device=query.device).triu(1)
    scores = (options.of_prefix.scale * query.double() @ key.double().mT).masked_fill(future, -torch.inf)
    out = dense_softmax(scores, value.double(), with_lse=options.of_prefix.with_lse)
    for epoch in epochs(query.shape[1], options):
        for head in range(len(query)):
            q, k, v = (x[head, : epoch.end] for x in (query, key, value))
            out[head, epoch.start : epoch.end] = _naive_epoch(q, k, v, epoch, options)
    return out


def _naive_epoch(query: Tensor, key: Tensor, value: Tensor, epoch: Epoch, options: CausalNearFarOptions) -> Tensor:
    """Compute the output (L, Dv) of the queries of an epoch from all tokens up to its end."""
    start, end, _ = epoch
    size = options.block_size
    chosen = _nearfar_options(epoch, options)
    prefix = start - size
    position = torch.arange(end, device=key.device)
    first_near = start + ((position[start:] - start) // size - 1) * size
    is_far = position < first_near[:, None]  # (L, Nk)
    is_later = position > position[start:, None]

    with torch.no_grad():
        q, k = (x[None].to(accumulation_dtype(x.dtype)) for x in (query, key))
        k = k - k[:, :prefix].mean(1, keepdim=True)
        landmarks = choose_landmarks(q[:, :prefix], k[:, :prefix], chosen)
        landmark = nearest(k, landmarks.key)[0]
        is_near = ~is_far
        if chosen.block_size:
            blocks, near = _near_keys(q, k, epoch, prefix, chosen)
            is_near = is_near.scatter(1, near[0][blocks.slot[0] // _BLOCK_Q], True)

    query = query.double()
    key = key.double()
    value = value.double()
    mean = key[:prefix].mean(0)
    key = key - mean
    c, tilt = landmarks_naive(query[:prefix], key[:prefix], landmarks.choice[0], chosen)
    exact, of_landmarks = scores_naive(query[start:], key, c[landmark], tilt, chosen)  # (L, Nk) each
    scores = torch.where(is_near, exact, of_landmarks).masked_fill(is_later, -torch.inf)
    far = of_landmarks.masked_fill(~is_far, -torch.inf).logsumexp(1, keepdim=True)
    is_rounding = scores.logsumexp(1, keepdim=True) - far <= math.log(LEAST_SHARE)
    only_near = exact.masked_fill(~is_near | is_later, -torch.inf)
    scores = torch.where(is_rounding, only_near, scores) + chosen.scale * (query[start:] @ mean)[:, None]
    return dense_softmax(scores, value, with_lse=chosen.with_lse)
