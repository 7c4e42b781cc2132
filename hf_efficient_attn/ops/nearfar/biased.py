"""nearfar with a bias by distance: a window exactly, and landmarks, whose bias is a mean, for all other keys.

`hf_efficient_attn.ops.nearfar.bidirectional` explains landmarks. With a bias b(distance) the weight of a key is

    exp(scale <q, k> + b)  ~  exp(scale <q, c> - g(c)) exp(g(k) - |x - y|^2 / 2) exp(B)

Here exp(B) is the mean of exp(b) over the keys of the landmark c, with their weights on it, and over the queries of one
part of the sequence. Short distances do not count in the mean, because a window has these keys: each block of queries
attends to the keys around it exactly, and what landmarks count for them is subtracted. There is a B for each landmark
and each of at most `_PARTS` equal parts of the sequence, so the cost is linear in the sequence.
The exact rows of some queries correct the output, as they do without a bias.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.attend import Partial, attend
from hf_efficient_attn.ops.backends.devices import accumulation_dtype
from hf_efficient_attn.ops.distance import Bias, pair_means
from hf_efficient_attn.ops.exact import bias_between, bias_of
from hf_efficient_attn.ops.index import ceil_div, integers, pad_to_blocks
from hf_efficient_attn.ops.nearfar.bidirectional import (
    Keys,
    compute_probes,
    correct_by_probes,
    correct_by_probes_naive,
    near_attention,
)
from hf_efficient_attn.ops.nearfar.groups import LEAST_SHARE, replace_counted
from hf_efficient_attn.ops.nearfar.landmarks import (
    NearFarOptions,
    choose_landmarks,
    landmarks_naive,
    means_and_logs,
    represent,
    scores_naive,
)
from hf_efficient_attn.ops.slices import slice_size, sliced

# The most parts of the sequence with a mean bias of their own.
_PARTS = 256


class _Window(NamedTuple):
    """T blocks of queries, and the keys that each attends to exactly."""

    block_q: int  # the number of queries of a block
    middle: Tensor  # int64 (T,), the query in the middle of each block
    key_index: Tensor  # int64 (1 or BH, T, w), the keys of each block
    reach: int  # at this distance or less every key is in the window of a query


def _window(bias: Bias, size: int) -> _Window:
    """Center blocks of `size` keys on blocks of a quarter as many queries, and move them inwards at the ends."""
    (q_len, kv_len), device = (x.shape[1] for x in bias[1:]), bias.table.device
    block_q = max(1, size // 4)
    before = (size - block_q) // 2
    first = integers(ceil_div(q_len, block_q), device) * block_q
    # Without padding a rank is a position. With as many queries as keys both have the same gaps, and else only keys.
    rank = torch.searchsorted(bias.key_position.contiguous(), bias.query_position[:, first])  # (1 or BH, T)
    index = (rank - before).clamp(0, kv_len - size).unsqueeze(2) + integers(size, device)  # (1 or BH, T, w)
    return _Window(block_q, (first + block_q // 2).clamp(max=q_len - 1), index, before if size else -1)


def _mean_bias(weight: Tensor, cluster: Tensor, count: int, bias: Bias, reach: int) -> tuple[Tensor, int]:
    """Compute the mean bias (BH, P, m) of each landmark for the queries of each part, and the tokens of a part.

    Keys have weights (BH, Nk) on their landmarks, int64 (BH, Nk), one of m = `count`. Only distances above `reach`
    count in the mean.
    """
    # Parts have equal numbers of tokens, so that padding before a sequence and other sequences change nothing.
    length = max(bias.query_position.shape[1], bias.key_position.shape[1])
    kv_len = weight.shape[1]
    size = ceil_div(length, _PARTS)
    distance = bias.distances(size, ceil_div(length, size))  # (1 or BH, P, P)
    end = int(distance.abs().amax()) + size
    span = torch.arange(-end, end + 1, device=weight.device)
    far = (span.abs() > reach).to(weight.dtype).expand(len(bias.table), -1)  # (BH, 2 end + 1)
    largest = bias.table.detach().amax(1, keepdim=True)  # (BH, 1)
    terms = torch.cat((bias_of((bias.table - largest).exp(), span) * far, far))  # (2 BH, 2 end + 1)
    means = pair_means(terms, distance.repeat(2 if len(distance) > 1 else 1, 1, 1), size)  # (2 BH, P, P)
    place = integers(kv_len, weight.device) // size * count + cluster
    sums = weight.new_zeros(len(weight), distance.shape[2] * count).scatter_add(1, place, weight)  # (BH, P * m)
    sums = sums.unflatten(1, (-1, count))  # (BH, P, m)
    total, number = torch.bmm(means, sums.repeat(2, 1, 1)).chunk(2)  # (BH, P, m) each
    is_near = number <= 0  # all keys of the landmark are in the window
    mean = total.masked_fill(is_near, 1.0).clamp(min=torch.finfo(total.dtype).tiny) / number.masked_fill(is_near, 1.0)
    return mean.log() + largest.unsqueeze(2), size


def biased_nearfar_attention(query: Tensor, key: Tensor, value: Tensor, bias: Bias, options: NearFarOptions) -> Tensor:
    """Compute bidirectional attention with a bias by distance.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D), more keys than landmarks and keys of a window together, without padding.
        value: (BH, Nk, Dv).
        bias: the bias.
        options: `num_samples` landmarks, and windows of `block_size` keys.

    Returns:
        (BH, Nq, Dv) in the accumulation dtype.
    """
    query, key, value = (x.to(accumulation_dtype(key.dtype)) for x in (query, key, value))
    bias = bias._replace(table=bias.table.to(key.dtype))
    key = key - key.mean(1, keepdim=True)
    window = _window(bias, options.block_size)
    landmarks = choose_landmarks(query, key, options)
    keys = Keys(key, value, landmarks.key, *represent(key, value, landmarks))
    mean, size = _mean_bias(_weights(keys.key_bias), keys.landmark, options.num_samples, bias, window.reach)
    call: dict[str, Any] = {"scale": options.scale, "dropout_p": options.dropout_p}

    def some_heads(query: Tensor, keys: Keys, mean: Tensor, bias: Bias, near: Tensor) -> Tensor:
        blocks = pad_to_blocks(query, window.block_q)  # (BH, T, block_q, D)
        position = pad_to_blocks(bias.query_position.unsqueeze(2), window.block_q).squeeze(3)  # (BH, T, block_q)
        own = mean.index_select(1, window.middle // size)  # (BH, T, m)
        means, log_weight = means_and_logs(keys.sums, keys.total)  # (BH, m, .)
        far_bias = (log_weight[:, None] + own).unsqueeze(2)  # (BH, T, 1, m)
        far = attend(blocks, keys.center[:, None], means[:, None], far_bias, **call)
        near_position = bias.key_position.gather(1, near.flatten(1)).view_as(near)  # (BH, T, w)
        near_bias = bias_between(bias.table, position, near_position)  # (BH, T, block_q, w)
        exact, counted = near_attention(blocks, near, keys, near_bias, own, **call)
        parts = (Partial(x.out, x.lse.unsqueeze(3)) for x in (far, counted, exact))
        return replace_counted(*parts).out.flatten(1, 2)[:, : query.shape[1]]  # (BH, Nq, Dv)

    columns = window.key_index.shape[1] * options.block_size * max(2 * key.shape[2], value.shape[2], window.block_q)
    draws = options.dropout_p > 0.0
    rows = slice_size(columns // 4, key.device)
    # Only here each head has its own positions: all heads together look up a bias in less time if they share them.
    own_bias = bias.expanded(len(query), key.dtype)
    near = window.key_index.expand(len(query), -1, -1)  # (BH, T, w)
    out = sliced(some_heads, query, keys, mean, own_bias, near, size=rows, draws=draws)
    if not options.num_probes:
        return out

    def bias_of_rows(probe: Tensor) -> Tensor:
        return Bias(bias.table, bias.query_position[:, probe], bias.key_position).of_pairs()[:, None]

    return correct_by_probes(query, out, compute_probes(query, key, value, options, bias_of_rows))


def _weights(key_bias: Tensor) -> Tensor:
    """Weights of keys, relative to the largest one of the head."""
    return (key_bias - key_bias.detach().amax(1, keepdim=True)).exp()


def biased_nearfar_naive(query: Tensor, key: Tensor, value: Tensor, bias: Bias, options: NearFarOptions) -> Tensor:
    """Compute the readable form, by dense matrices of one head after another, with the landmarks of the fast form."""
    window = _window(bias, options.block_size)
    with torch.no_grad():
        q, k, v = (x.to(accumulation_dtype(x.dtype)) for x in (query, key, value))
        k = k - k.mean(1, keepdim=True)
        landmarks = choose_landmarks(q, k, options)
        landmark = represent(k, v, landmarks).landmark
    block = torch.arange(query.shape[1], device=query.device) // window.block_q
    near = torch.zeros(*window.key_index.shape[:2], key.shape[1], dtype=torch.bool, device=key.device)
    every_near = near.scatter(2, window.key_index, True)[:, block]  # (1 or BH, Nq, Nk)
    outs = []
    for head, (q, k, v) in enumerate(zip(query.double(), key.double(), value.double(), strict=True)):
        k = k - k.mean(0)
        own = Bias(*(x[head % len(x), None] for x in bias))._replace(table=bias.table[head, None].double())
        c, tilt = landmarks_naive(q, k, landmarks.choice[head], options)  # (m, D), (D,)
        exact, of_landmarks = scores_naive(q, k, c[landmark[head]], tilt, options)  # (Nq, Nk) each
        exact = exact + own.of_pairs()[0]
        x = k - c[landmark[head]]
        key_bias = (x * (tilt + options.root**2 * c[landmark[head]])).sum(1)  # (Nk,)
        mean, size = _mean_bias(_weights(key_bias[None]), landmark[head, None], options.num_samples, own, window.reach)
        of_landmarks = of_landmarks + mean[0][window.middle[block] // size][:, landmark[head]]
        near = every_near[head % len(every_near)]
        scores = torch.where(near, exact, of_landmarks)
        is_rounding = scores.logsumexp(1) - of_landmarks.logsumexp(1) <= torch.tensor(LEAST_SHARE).log()
        only_near = exact.masked_fill(~near & near.any(), -torch.inf).softmax(1) @ v
        out = torch.where(is_rounding[:, None], only_near, scores.softmax(1) @ v)
        outs.append(correct_by_probes_naive(q, out, exact, v, options))
    return torch.stack(outs)
