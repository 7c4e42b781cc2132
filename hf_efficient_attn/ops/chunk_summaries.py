"""Attention to a few keys exactly and to one summary of each chunk of the other keys, in one softmax (EVA).

The method and its departures from the paper are described in `hf_efficient_attn.methods.eva`, and windows, groups and
chunks in `hf_efficient_attn.ops.chunk_windows`. Shapes: BH is B * H.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.bias_columns import padded_dim, with_last
from hf_efficient_attn.ops.blocks import pad_to_blocks, take
from hf_efficient_attn.ops.chunk_windows import WindowPlan, WindowSizes, first_query, plan_windows
from hf_efficient_attn.ops.constants import constant
from hf_efficient_attn.ops.fused_attention import bias_columns, column_unit
from hf_efficient_attn.ops.gather import GatheredKeys, gathered_attention
from hf_efficient_attn.ops.partial import accumulation_dtype, partial_attention

# The logit of padding. It is finite, so that the softmax over a part that is all padding is defined.
_NO_TOKEN = -1e30


class Heads(NamedTuple):
    """Query (BH, Nq, D), key (BH, Nk, D), value (BH, Nk, Dv), and the proposal's W_q and W_k (BH, D, D) or None."""

    query: Tensor
    key: Tensor
    value: Tensor
    query_map: Tensor | None
    key_map: Tensor | None


class Chunks(NamedTuple):
    """The tokens of chunks, cut out of the sequence.

    Attributes:
        query: (BH, C, P, D), the queries of each chunk, or (BH, C, D), their means.
        key: (BH, C, P, D).
        value: (BH, C, P, Dv).
        valid: bool (BH or 1, C, P), False for padding; None if there is no padding.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    valid: Tensor | None


def summarize(chunks: Chunks, heads: Heads, noise: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The mean key and the estimated value beta_c(omega_c) of each chunk.

    Args:
        chunks: the tokens of C chunks.
        heads: gives the maps of the mean query and the mean key in mu.
        noise: (BH, C, D), standard normal, or None for omega = mu.
        scale: factor of the scores.

    Returns:
        (BH, C, D) and (BH, C, Dv) in the accumulation dtype; 0 for an empty chunk.
    """
    valid, acc_dtype, root = chunks.valid, accumulation_dtype(chunks.key.dtype), abs(scale) ** 0.5
    query, key, value = (x.to(acc_dtype) for x in chunks[:3])
    mean_query, mean_key = query if query.ndim == 3 else _mean(query, valid), _mean(key, valid)
    mu_query = mean_query if heads.query_map is None else mean_query @ heads.query_map.mT
    mu_key = mean_key if heads.key_map is None else mean_key @ heads.key_map.mT
    omega = ((-mu_query if scale < 0 else mu_query) + mu_key) * root
    omega = omega if noise is None else omega + noise.to(acc_dtype)
    # log xi(sqrt(scale) k, omega), both terms in one product.
    logits = (key * (omega.unsqueeze(2) * root - key * (0.5 * root * root))).sum(-1)
    if valid is not None:
        # The bias of an empty chunk is -inf. Equal logits keep its softmax and the gradient finite.
        logits = logits.masked_fill(~valid, torch.finfo(acc_dtype).min)
        value = value.masked_fill(~valid.unsqueeze(-1), 0.0)
    return mean_key, (logits.softmax(-1).unsqueeze(2) @ value).squeeze(2)


def _mean(x: Tensor, valid: Tensor | None) -> Tensor:
    """Means over the valid tokens of chunks: (BH, C, P, D) -> (BH, C, D)."""
    if valid is None:
        return x.mean(2)
    return x.masked_fill(~valid.unsqueeze(-1), 0.0).sum(2) / valid.sum(2).clamp(min=1).unsqueeze(-1)


def window_attention(
    heads: Heads,
    tensors: Sequence[Tensor | None],
    *,
    sizes: WindowSizes,
    block_q: int,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """The bidirectional form: (BH, Nq, Dv).

    Args:
        heads: BH heads.
        tensors: the `WindowPlan` of these heads, then for each of `sizes.summaries` the standard normal numbers
            (BH, C, D), or None.
        sizes: the sizes of windows and chunks.
        block_q: queries of a block.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.
    """
    size = len(WindowPlan._fields)
    plan, noises = WindowPlan._make(tensors[:size]), tensors[size:]
    query, key, value = heads[:3]
    prefix = None
    if plan.num_queries is not None:
        # Sums of queries in float64, because the sum over a short chunk is a small difference of two long sums.
        prefix = pad(query.cumsum(1, dtype=torch.float64), (0, 0, 1, 0))

    def summary(
        cut: Callable[[Tensor], Tensor], start: Tensor, stop: Tensor, valid: Tensor, noise: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if prefix is None or plan.num_queries is None:
            queries = cut(query)
        else:
            first = first_query(start, plan.num_keys, plan.num_queries, up=False)
            last = first_query(stop, plan.num_keys, plan.num_queries, up=True)
            queries = (take(prefix, last) - take(prefix, first)) / (last - first).clamp(min=1).unsqueeze(2)
        return summarize(Chunks(queries, cut(key), cut(value), valid), heads, noise, scale)

    def summary_of_equal_parts(count: int, size: int, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        position = torch.arange(count * size, device=query.device).view(count, size)
        start, stop = (torch.minimum(x, plan.num_keys) for x in (position[:, 0], position[:, -1] + 1))
        return summary(lambda x: _equal_parts(x, count, size), start, stop, position < plan.num_keys[..., None], noise)

    has_equal_parts = not sizes.masked and sizes.window % sizes.per_window == 0
    by_window = has_equal_parts and prefix is None and backend(query) != "cpu"
    if by_window:
        summaries = [_summaries_by_window(heads, noises, sizes, scale)]
    else:
        if has_equal_parts:
            chunk_size = sizes.window // sizes.per_window << sizes.level
            summaries = [summary_of_equal_parts(sizes.num_chunks, chunk_size, noises[0])]
        else:
            summaries = [summary(lambda x: take(x, plan.token), plan.start, plan.stop, plan.valid, noises[0])]
        for level in range(sizes.level):
            summaries.append(summary_of_equal_parts(sizes.num_groups(level), sizes.window << level, noises[level + 1]))
    mean_keys, betas = zip(*summaries, strict=True)
    if by_window and backend(query) == "library" and scale != 0.0:
        return _attend_by_columns(heads, mean_keys[0], betas[0], sizes, scale, dropout_p)
    key = torch.cat((key, *(x.to(key.dtype) for x in mean_keys)), 1)
    value = torch.cat((value, *(x.to(value.dtype) for x in betas)), 1)
    bias = plan.bias[:, :, None].to(accumulation_dtype(key.dtype))
    gathered = GatheredKeys(plan.visible, bias, block_q)
    if plan.query is not None:
        # The keys that FLuRKA contracts have the accumulation dtype, whatever the dtype of the queries.
        query = take(query, plan.query).to(key.dtype)
    out = gathered_attention(query, key, value, gathered, scale=scale, dropout_p=dropout_p)
    return out if plan.slot is None else take(out, plan.slot)


def _attend_by_columns(
    heads: Heads, mean_key: Tensor, beta: Tensor, sizes: WindowSizes, scale: float, dropout_p: float
) -> Tensor:
    """Attention of each window to its own keys and to summaries (BH, C, .), with the bias in columns of the keys.

    What a window does not see is replaced by a key that has no weight, so that the bias of a key is the same for all.
    """
    query, key, value = heads[:3]
    dim = padded_dim(query.shape[2], value.shape[2], 2)
    index = constant(_seen_or_nothing, sizes, device=key.device).expand(len(query), -1, -1)
    columns = constant(_summary_columns, sizes, query.shape[2], dim, key.dtype, scale, device=key.device)
    more = pad(mean_key, (0, dim - mean_key.shape[2], 0, 1)) + columns
    keys = take(with_last(key, more, dim), index)
    values = take(with_last(value, pad(beta, (0, dim - beta.shape[2], 0, 1)), dim), index)
    blocks = pad(pad_to_blocks(query, sizes.window), (0, dim - query.shape[2]), value=column_unit(key.dtype, scale))
    out = partial_attention(blocks, keys, values, scale=scale, dropout_p=dropout_p).out
    return out.flatten(1, 2)[:, : query.shape[1], : value.shape[2]]


def _seen_or_nothing(sizes: WindowSizes, device: torch.device) -> Tensor:
    """`visible` of the plan without masks, where what has no weight is the index after the last summary: (1, S, K)."""
    plan = plan_windows(sizes, torch.full((1, 1), sizes.kv_len, device=device), None)
    return plan.visible.masked_fill(plan.bias == -torch.inf, sizes.kv_len + sum(sizes.summaries))


def _summary_columns(
    sizes: WindowSizes, head_dim: int, dim: int, dtype: torch.dtype, scale: float, device: torch.device
) -> Tensor:
    """The log of the number of keys of each summary, and the bias of a key that has no weight: (1, C + 1, `dim`)."""
    bias = pad(_counts(sizes, device).to(accumulation_dtype(dtype)).log(), (0, 1), value=-torch.inf)
    columns = bias_columns(bias[None], dtype, scale)[0].to(bias.dtype)
    return pad(columns, (head_dim, dim - head_dim - 2))


def _equal_parts(x: Tensor, count: int, size: int) -> Tensor:
    """(BH, N, D) -> (BH, count, size, D), padded with zeros."""
    missing = count * size - x.shape[1]
    return (pad(x, (0, 0, 0, missing)) if missing else x).reshape(x.shape[0], count, size, -1)


def _summaries_by_window(
    heads: Heads, noises: Sequence[Tensor | None], sizes: WindowSizes, scale: float
) -> tuple[Tensor, Tensor]:
    """`summarize` for the chunks and the groups of all levels, in an order like `sizes.summaries`, in few operations.

    The keys are read once. The xi of a group is the merge of those of its windows, each relative to omega of the group.
    """
    acc_dtype, root, level = accumulation_dtype(heads.key.dtype), abs(scale) ** 0.5, sizes.level
    count, size = sizes.num_windows * sizes.per_window, sizes.window // sizes.per_window
    query, key, value = (_equal_parts(x, count, size) for x in heads[:3])
    sums = [torch.cat((query.sum(2, dtype=acc_dtype), key.sum(2, dtype=acc_dtype)))]
    for _ in range(level):
        sums.append(_groups(sums[-1], 2, 0.0).sum(2))
    share, of_part, padding = (
        constant(make, sizes, acc_dtype, device=key.device)
        for make in (_shares_of_means, _summaries_of_parts, _padding)
    )
    mean_query, mean_key = (torch.cat((sums[level], *sums[:level]), 1) * share).chunk(2)
    mu_query = mean_query if heads.query_map is None else mean_query @ heads.query_map.mT
    mu_key = mean_key if heads.key_map is None else mean_key @ heads.key_map.mT
    mu = mu_key - mu_query if scale < 0 else mu_key + mu_query
    noise = [x.to(acc_dtype) for x in noises if x is not None]
    omega = torch.add(torch.cat(noise, 1) if level else noise[0], mu, alpha=root) if noise else mu * root
    own = omega.index_select(1, of_part) if level else omega
    key = key.to(acc_dtype).flatten(0, 1)
    squares = torch.linalg.vector_norm(key, dim=2).square()
    if count * size > sizes.kv_len:
        squares = (squares.view(-1, count, size) + padding).flatten(0, 1)
    omega = own.reshape(len(key), level + 1, -1)
    logits = torch.baddbmm(squares.unsqueeze(1), omega, key.mT, beta=-0.5 * abs(scale), alpha=root)
    out = torch.bmm(logits.softmax(2).to(value.dtype), value.flatten(0, 1))
    if not level:
        return mean_key, out.view(-1, count, value.shape[3])
    lse, out = (x.unflatten(0, (-1, count)) for x in (logits.logsumexp(2), out))
    betas = [out[:, :, 0]]
    for i in range(1, level + 1):
        weights = _groups(lse[:, :, i, None], 1 << i, _NO_TOKEN).softmax(2)
        betas.append((weights * _groups(out[:, :, i], 1 << i, 0.0)).sum(2))
    return mean_key, torch.cat((betas[level], *betas[:level]), 1)


def _groups(x: Tensor, size: int, fill: float) -> Tensor:
    """(BH, T, D) -> (BH, G, size, D), padded with `fill`."""
    missing = -x.shape[1] % size
    x = pad(x, (0, 0, 0, missing), value=fill) if missing else x
    groups: Tensor = x.unflatten(1, (-1, size))
    return groups


def _counts(sizes: WindowSizes, device: torch.device) -> Tensor:
    """The number of tokens of the chunks and of the groups of each level, at least 1: (C,)."""
    size = sizes.window // sizes.per_window
    counts = []
    for number, tokens in [(sizes.num_chunks, size << sizes.level)] + [
        (sizes.num_groups(i), sizes.window << i) for i in range(sizes.level)
    ]:
        counts.append((sizes.kv_len - torch.arange(number, device=device) * tokens).clamp(1, tokens))
    return torch.cat(counts)


def _shares_of_means(sizes: WindowSizes, dtype: torch.dtype, device: torch.device) -> Tensor:
    """1 / (number of tokens) of the chunks and of the groups of each level: (C, 1)."""
    return 1.0 / _counts(sizes, device).to(dtype).unsqueeze(1)


def _summaries_of_parts(sizes: WindowSizes, dtype: torch.dtype, device: torch.device) -> Tensor:
    """For each window its group of level 0, 1, ..., as an index of all summaries: int64 (T * levels,)."""
    window = torch.arange(sizes.num_windows * sizes.per_window, device=device)
    first, index = sizes.num_chunks, []
    for level in range(sizes.level):
        index.append(first + (window >> level))
        first += sizes.num_groups(level)
    return torch.stack([*index, window >> sizes.level], 1).flatten()


def _padding(sizes: WindowSizes, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What is added to the squared norms of tokens: 0, or a very large number for padding: (T, P)."""
    count, size = sizes.num_windows * sizes.per_window, sizes.window // sizes.per_window
    padded = torch.arange(count * size, device=device).view(count, size) >= sizes.kv_len
    return torch.zeros(count, size, dtype=dtype, device=device).masked_fill_(padded, -_NO_TOKEN)
