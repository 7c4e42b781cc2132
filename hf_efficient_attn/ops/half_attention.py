"""Attention over blocks in bfloat16 on CPUs with bfloat16 products, by a few batched products.

The fused kernel of PyTorch is no faster in bfloat16 than in float32 on CPUs with AVX512-BF16 alone. `bmm` is: 400
billion operations per second on one core of a Zen 5, against 85 in float32. But its result is bfloat16 (its sums are
float32), which rounds a score of 16 by up to 0.06. So the scores are computed twice. The first product finds the
maximum of a row. The second computes the scores relative to it, by one more dimension in which all keys are 1. Then the
larger a weight, the smaller the rounding of its score, and the error of an output is less than twice that of the fused
kernel, at half of its time. A bias is in two more dimensions, see `bias_columns`.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from hf_efficient_attn.ops.fused_attention import bias_columns, is_shared
from hf_efficient_attn.ops.precision import LOG2_E, product_dtype

# Scores that are computed at a time: 1 MiB of bfloat16, but no fewer rows than fill the units of a product. With more
# keys these leave the cache.
_SCORES_NUMEL, _LEAST_ROWS, _MAX_KEYS = 1 << 19, 64, 1 << 15
# Fewer scores of a block, or of all blocks, are not worth the calls.
_LEAST_OF_BLOCK, _LEAST_NUMEL = 1 << 12, 1 << 16
# A head, and slices of its blocks and of the queries of each.
_Index = tuple[int, slice, slice]


# Exponents of two above this are rounded to bfloat16 by more than 8, and may be far from the maximum of their row. The
# second is the maximum of a row without keys.
_MAX_ROUNDED, _NO_KEY = 2.0**12, -1e30


def use_half(tensors: tuple[Tensor, Tensor, Tensor, Tensor | None], scale: float, with_bias: bool = False) -> bool:
    """Whether `half_attention` takes query, key, value and bias: bfloat16 products, and enough scores.

    A bias of single pairs may only exclude some, and it gets no gradient.
    """
    query, key, value, bias = tensors
    if not all(x.dtype == torch.bfloat16 and x.device.type == "cpu" for x in (query, key, value)):
        return False
    numel = query.shape[2] * key.shape[2]
    if numel < _LEAST_OF_BLOCK or numel * query.shape[0] * query.shape[1] < _LEAST_NUMEL or key.shape[2] > _MAX_KEYS:
        return False
    if scale <= 0.0 or product_dtype(query) != torch.bfloat16:
        return False
    return bias is None or bias.shape[2] == 1 or (not with_bias and bool(((bias == 0.0) | (bias == -torch.inf)).all()))


class _Pieces:
    """Products of rows with keys, a few blocks or rows at a time, in buffers that stay in a cache.

    Iterating gives the index of each piece. Both factors have four more dimensions: the first and the last, for which
    keys are 1, and two for the columns of the keys.
    """

    def __init__(
        self, query: Tensor, key: Tensor, columns: Tensor | None, constants: tuple[float, float, float]
    ) -> None:
        """Query (BH, T, Nq, D), key (BH, T or 1, Nk, D), columns (., ., Nk, 2) and three of the numbers of queries."""
        self._shape, self._key, self._columns = query.shape, key, columns
        (_, num_blocks, block_q, self._dim), block_k = query.shape, key.shape[2]
        self._step = min(num_blocks, max(1, _SCORES_NUMEL // (block_q * block_k)))
        self._rows = min(block_q, max(_LEAST_ROWS, _SCORES_NUMEL // block_k))
        width = self._dim + 4 + -(self._dim + 4) % 8
        self.numel = self._step * self._rows * block_k
        self._scores = query.new_empty(self.numel)
        self._wide_queries = query.new_zeros(self._step * self._rows, width)
        self._wide_keys = query.new_zeros(self._step * block_k, width)
        self._wide_keys[:, self._dim] = self._wide_keys[:, self._dim + 3] = 1.0
        for i, constant in enumerate(constants):
            self._wide_queries[:, self._dim + i] = constant
        self._filled: tuple[int, slice] | None = None

    def __iter__(self) -> Iterator[_Index]:
        batch_heads, num_blocks, block_q, _ = self._shape
        for head in range(batch_heads):
            for t in range(0, num_blocks, self._step):
                for i in range(0, block_q, self._rows):
                    yield head, slice(t, min(t + self._step, num_blocks)), slice(i, min(i + self._rows, block_q))

    def queries(self, own: Tensor) -> Tensor:
        """The rows (t, m, D) of a piece with their further dimensions."""
        wide = self._wide_queries[: own.shape[0] * own.shape[1]].view(*own.shape[:2], -1)
        wide[..., : self._dim] = own
        wide[..., self._dim] = wide[..., self._dim + 3] = 0.0
        return wide

    def keys(self, some: _Index) -> Tensor:
        """The keys (t, Nk, D) of the blocks of a piece with their further dimensions."""
        head, blocks, _ = some
        num_blocks, block_k = blocks.stop - blocks.start, self._key.shape[2]
        wide = self._wide_keys[: num_blocks * block_k].view(num_blocks, block_k, -1)
        if self._filled != (head, blocks):
            self._filled = head, blocks
            wide[..., : self._dim] = _blocks_of(self._key, some)
            if self._columns is not None:
                wide[..., self._dim + 1 : self._dim + 3] = _blocks_of(self._columns, some)
        return wide

    def product(self, queries: Tensor, keys: Tensor, factor: float) -> Tensor:
        """The product factor * queries keys^T: (t, m, Nk), in a buffer that the next one overwrites."""
        shape = queries.shape[0], queries.shape[1], keys.shape[1]
        scores = self._scores[: shape[0] * shape[1] * shape[2]].view(shape)
        return torch.baddbmm(scores, queries, keys.mT, beta=0, alpha=factor, out=scores)


def _blocks_of(x: Tensor, some: _Index) -> Tensor:
    """The blocks of a piece in a tensor (BH or 1, T or 1, ., .): (t or 1, ., .)."""
    own = x[some[0] if x.shape[0] > 1 else 0]
    return own[some[1]] if own.shape[0] > 1 else own


def _add(whole: Tensor, some: _Index, part: Tensor, factor: float) -> None:
    """Add factor * part to the blocks of a piece, or its sum if all blocks share them."""
    own = _blocks_of(whole, some)
    own.add_(part if part.shape == own.shape else part.float().sum_to_size(own.shape), alpha=factor)


def _split_bias(bias: Tensor | None, query: Tensor, scale: float) -> tuple[Tensor | None, Tensor | None, float]:
    """A bias of keys as columns and the factor of these in the queries, or a bias of pairs in the queries' dtype."""
    if bias is None:
        return None, None, 0.0
    if bias.shape[2] > 1:
        return None, bias.to(query.dtype), 0.0
    columns, unit = bias_columns(bias[:, :, 0], query.dtype, scale)
    return columns, None, unit


def _weights(scores: Tensor, pairs: Tensor | None, some: _Index) -> Tensor:
    """2 to the power of the scores, and 0 for excluded pairs, in place."""
    return (scores if pairs is None else scores.add_(_blocks_of(pairs, some)[:, some[2]])).exp2_()


def _as_one_sequence(x: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
    """View a tensor (BH, T, Nq, ...) as one block (BH, 1, T * Nq, ...) if all blocks have the same keys and bias."""
    if not is_shared(key, value, bias):
        return x
    return x.reshape(x.shape[0], 1, -1, *x.shape[3:])


def half_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and lse of `partial_attention`, with the same arguments, without a gradient."""
    shape = query.shape[:3]
    query = _as_one_sequence(query, key, value, bias)
    columns, pairs, unit = _split_bias(bias, query, scale)
    pieces = _Pieces(query, key, columns, (0.0, unit, unit))
    numbers = torch.empty(pieces.numel)
    out, lse = value.new_empty(*query.shape[:3], value.shape[3]), value.new_empty(query.shape[:3], dtype=torch.float32)
    for some in pieces:
        queries, keys, values = pieces.queries(query[some]), pieces.keys(some), _blocks_of(value, some)
        scores = pieces.product(queries, keys, scale * LOG2_E)
        # `amax` takes a quarter of the time in float32, and `sum` would convert into new memory.
        in_float32 = numbers[: scores.numel()].view(scores.shape)
        in_float32.copy_(scores)
        if pairs is not None:
            in_float32.add_(_blocks_of(pairs, some)[:, some[2]])
        row_max = in_float32.amax(-1).clamp_(min=_NO_KEY)
        shift = (row_max / (scale * LOG2_E)).to(query.dtype)
        queries[..., query.shape[3]] = -shift
        scores, rest = pieces.product(queries, keys, scale * LOG2_E), torch.zeros_like(shift)
        # Of a very large maximum the rounding is large, too. What it leaves is known from the second product.
        is_large = (row_max.abs() > _MAX_ROUNDED) & (row_max > _NO_KEY)
        if bool(is_large.any()):
            in_float32.copy_(scores)
            if pairs is not None:
                in_float32.add_(_blocks_of(pairs, some)[:, some[2]])
            rest = (in_float32.amax(-1) / (scale * LOG2_E)).masked_fill_(~is_large, 0.0).to(query.dtype)
            queries[..., query.shape[3] + 3] = -rest
            scores = pieces.product(queries, keys, scale * LOG2_E)
        weights = _weights(scores, pairs, some)
        total = in_float32.copy_(weights).sum(-1)
        torch.div(torch.bmm(weights, values.expand(len(weights), -1, -1)), total.unsqueeze(-1), out=out[some])
        lse[some] = total.log_().add_(shift.float() + rest.float(), alpha=scale)
    out, lse = out.view(*shape, -1), lse.view(shape)
    empty = None if bias is None else bias.amax(-1) == -torch.inf
    if empty is not None and bool(empty.any()):
        out.masked_fill_(empty.unsqueeze(-1), 0.0)
        lse.masked_fill_(empty, -torch.inf)
    return out, lse


def half_attention_backward(
    grads: tuple[Tensor, Tensor | None],
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    results: tuple[Tensor, Tensor],
    scale: float,
    with_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of query, key, value and bias of `half_attention`.

    The weights are relative to a number between the lse and the largest score, which are at most log(Nk) apart, so that
    the rounding of their scores is small. The gradients of the rows are divided by the sum of these weights instead.
    `grads` are those of out and of lse (None if it was not used), `tensors` query, key, value and bias, `results` out
    and lse. The last gradient is None unless `with_bias`.
    """
    (query, key, value, bias), (out, lse), (grad_out, grad_lse) = tensors, results, grads
    shape = query.shape
    delta = (grad_out.float() * out.float()).sum(-1)
    delta = delta if grad_lse is None else delta - grad_lse
    empty = lse == -torch.inf
    lse = lse.masked_fill(empty, 0.0)
    exact_shift = (lse - math.log(key.shape[2]) / 2) / scale
    shift = exact_shift.to(query.dtype)
    rest = (exact_shift - shift).to(query.dtype)
    inverse = torch.exp((shift.float() + rest.float()) * scale - lse).masked_fill_(empty, 0.0)
    grad_out = (grad_out * inverse.unsqueeze(-1)).to(query.dtype)
    query, grad_out, shift, rest, delta = (
        _as_one_sequence(x, key, value, bias) for x in (query, grad_out, shift, rest, delta * inverse)
    )
    columns, pairs, unit = _split_bias(bias, query, scale)
    of_scores = _Pieces(query, key, columns, (0.0, unit, unit))
    of_values = _Pieces(grad_out, value, delta.new_ones(1, 1, 1, 2), (0.0, 0.0, 0.0))
    grad_query, grad_key, grad_value = (x.new_zeros(x.shape, dtype=torch.float32) for x in (query, key, value))
    grad_bias = None if bias is None or not with_bias else torch.zeros(bias.shape)
    for some in of_scores:
        queries = of_scores.queries(query[some])
        queries[..., shape[3]], queries[..., shape[3] + 3] = -shift[some], -rest[some]
        weights = _weights(of_scores.product(queries, of_scores.keys(some), scale * LOG2_E), pairs, some)
        rows = of_values.queries(grad_out[some])
        rows[..., value.shape[3] + 1] = high = -delta[some].to(query.dtype)
        rows[..., value.shape[3] + 2] = -delta[some] - high
        grad_scores = of_values.product(rows, of_values.keys(some), 1.0).mul_(weights)
        _add(grad_value, some, torch.bmm(weights.mT, grad_out[some]), 1.0)
        _add(grad_key, some, torch.bmm(grad_scores.mT, query[some]), scale)
        torch.mul(
            torch.bmm(grad_scores, _blocks_of(key, some).expand(len(weights), -1, -1)), scale, out=grad_query[some]
        )
        if grad_bias is not None:
            _add(grad_bias, some, grad_scores.sum(1, keepdim=True, dtype=torch.float32), 1.0)
    return (
        grad_query.view(shape).to(query.dtype),
        grad_key.to(key.dtype),
        grad_value.to(value.dtype),
        None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )
