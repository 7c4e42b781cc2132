"""Linear transformer (Katharopoulos, Vyas, Pappas, Fleuret, ICML 2020): phi(q) . phi(k) with phi(x) = elu(x) + 1.

Bidirectional: Eq. 4-6, out_i = phi(q_i)^T S / phi(q_i)^T Z with S = sum_j phi(k_j) v_j^T and Z = sum_j phi(k_j).
Causal: Eq. 9-12 in chunks: S and Z of the completed chunks, and the triangle of the own chunk. The paper knows no
scale; another one than 1/sqrt(D) multiplies the queries by scale * sqrt(D) before phi. Dropout acts on phi(q_i) /
phi(q_i)^T Z.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout, elu

from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.registry import AttentionOptions, Recurrence, register_method
from hf_efficient_attn.ops.blocks import can_reuse_buffers, chunked_over_heads, pad_to_blocks
from hf_efficient_attn.ops.partial import accumulation_dtype, exp_
from hf_efficient_attn.ops.scan import exclusive_prefix_sum, running_sum

_CHUNK = 64
# Numbers at a time, of 8 heads, where nothing is kept for a gradient: their features then stay in the cache.
_TILE, _HEADS = 1 << 20, 8


@dataclass(frozen=True, kw_only=True)
class LinearConfig(MethodConfig):
    """The linear transformer has no hyperparameters."""

    method = "linear"
    title = "Linear transformer"
    paper = "Katharopoulos, Vyas, Pappas, Fleuret, ICML 2020"
    year = 2020
    causal = True
    rectangular = True
    mixes_queries = False
    summary = "elu(x) + 1 features in place of the exponential; an attention of its own, for training"

    seed: int = option(0, "Without effect: nothing is drawn. There since every method has one.", minimum=0)

    def with_budget(self, columns: int) -> "LinearConfig":
        """Itself: its cost per query is that of about D / 2 columns, whatever the budget."""
        self.check_budget(columns)
        return self


def elu_features(x: Tensor) -> Tensor:
    """phi(x) = elu(x) + 1 (Eq. 7), positive: also the larger of 1 + x and exp(min(x, 0)), faster but for a gradient."""
    if x.requires_grad:
        return elu(x) + 1.0
    return torch.maximum(x + 1.0, exp_(x.clamp(max=0.0)))


def _features(query, key, mask, scale) -> tuple[Tensor, Tensor]:
    """Phi of queries and keys (A, N, D) in the accumulator's type, 0 for keys that are not there."""
    return _query_features(query, scale), _key_features(key, mask)


def _query_features(query: Tensor, scale: float) -> Tensor:
    wide = accumulation_dtype(query.dtype)
    stretch = scale * query.shape[-1] ** 0.5
    return elu_features(query.to(wide) if abs(stretch - 1.0) < 1e-12 else query.to(wide) * stretch)


def _key_features(key: Tensor, mask: Tensor | None) -> Tensor:
    phi = elu_features(key.to(accumulation_dtype(key.dtype)))
    return phi if mask is None else phi * mask.unsqueeze(-1)


def forward(config: LinearConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Fast form; arguments as in `hf_efficient_attn.methods._shared.registry.register_method`."""
    mask, is_causal, scale, dropout_p = options.key_mask, options.is_causal, options.scale, options.dropout_p

    def some_heads(query, key, value, mask, out=None):
        dtype = value.dtype
        phi_q, phi_k = _features(query, key, mask, scale)
        value = value.to(phi_k.dtype)
        if is_causal:
            got = _causal(phi_q, phi_k, value, dropout_p).to(dtype)
            return got if out is None else out.copy_(got)
        total = phi_q @ phi_k.sum(1).unsqueeze(-1)
        phi_q = dropout(phi_q, dropout_p) if dropout_p else phi_q
        state = phi_k.transpose(1, 2) @ value
        if out is None or out.dtype != state.dtype:
            got = _divide(phi_q @ state, total).to(dtype)
            return got if out is None else out.copy_(got)
        return _divide(torch.bmm(phi_q, state, out=out), total)

    flat = (x.flatten(0, 1) for x in (query, key, value))
    flat_mask = None if mask is None else mask.repeat_interleave(query.shape[1], 0)
    options = {"result": (query.shape[2], value.shape[3], value.dtype)}
    if not dropout_p and can_reuse_buffers(query, key, value):
        some_heads, options["step"] = functools.partial(_causal_walk if is_causal else _tiled, scale=scale), _HEADS
    return chunked_over_heads(some_heads, *flat, flat_mask, **options).unflatten(0, query.shape[:2])


def _tiled(query, key, value, mask, out=None, *, scale) -> Tensor:
    """The bidirectional form in two walks over the tokens of (A, N, D) heads, with two buffers of one tile each.

    The features of a tile never leave the cache, and no memory is touched for the first time but that of the output.
    """
    (heads, length, width), columns, wide = query.shape, key.shape[1], accumulation_dtype(query.dtype)
    out = value.new_empty(heads, length, value.shape[2]) if out is None else out
    tile = max(1, min(_TILE // (heads * width), max(length, columns)))
    first, second = (query.new_empty(heads, tile, width, dtype=wide) for _ in range(2))
    stretch = scale * width**0.5

    def features(x: Tensor) -> Tensor:
        """`elu_features`, in the first buffer."""
        phi, linear = first[:, : x.shape[1]], second[:, : x.shape[1]]
        exp_(torch.clamp(x, max=0.0, out=phi))
        return torch.maximum(phi, torch.add(x, 1.0, out=linear), out=phi)

    state, norm = first.new_zeros(heads, width, value.shape[2]), first.new_zeros(heads, 1, width)
    for at in range(0, columns, tile):
        here = slice(at, at + tile)
        phi = features(key[:, here].to(wide))
        phi = phi if mask is None else phi.mul_(mask[:, here, None])
        state.baddbmm_(phi.transpose(1, 2), value[:, here].to(wide))
        norm += phi.sum(1, keepdim=True)
    for at in range(0, length, tile):
        here = slice(at, at + tile)
        rows = query[:, here].to(wide)
        phi = features(rows if abs(stretch - 1.0) < 1e-12 else rows * stretch)
        # A product with one column takes half the time of one with 64.
        total = torch.mul(phi, norm, out=second[:, : rows.shape[1]]).sum(2, keepdim=True)
        if out.dtype == wide:
            _divide(torch.bmm(phi, state, out=out[:, here]), total)
        else:
            out[:, here] = _divide(phi @ state, total)
    return out


def _causal(phi_q, phi_k, value, dropout_p: float, before: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Chunked prefix sums: (A, N, D), (A, N, D), (A, N, Dv) -> (A, N, Dv), from S (A, D, Dv) and Z (A, D) `before`."""
    heads, length = phi_q.shape[:2]
    size = min(_CHUNK, length)
    blocks = [pad_to_blocks(x, size) for x in (phi_q, phi_k, value)]
    state, norm = exclusive_prefix_sum(blocks[1].transpose(2, 3) @ blocks[2]), exclusive_prefix_sum(blocks[1].sum(2))
    if before is not None:
        state, norm = state + before[0][:, None], norm + before[1][:, None]
    state, norm = state.flatten(0, 1), norm.flatten(0, 1).unsqueeze(-1)
    phi_q, phi_k, value = (x.flatten(0, 1) for x in blocks)
    own = (phi_q @ phi_k.transpose(1, 2)).tril()
    total = torch.baddbmm(own.sum(-1, keepdim=True), phi_q, norm)
    if dropout_p:
        # Dropout falls on the same features in the own chunk and before it.
        phi_q = dropout(phi_q, dropout_p)
        own = (phi_q @ phi_k.transpose(1, 2)).tril()
    out = _divide(torch.baddbmm(own @ value, phi_q, state), total)
    return out.view(heads, -1, out.shape[-1])[:, :length]


def _causal_walk(query, key, value, mask, before: tuple[Tensor, Tensor] | None = None, out=None, *, scale) -> Tensor:
    """`_causal` of (A, N, .) without gradient or dropout: one walk over tiles of chunks, in memory that stays warm."""
    (heads, length, width), wide = query.shape, accumulation_dtype(query.dtype)
    size = min(_CHUNK, length)
    tile = max(1, _TILE // (4 * heads * size * max(size, width))) * size
    out = value.new_empty(heads, length, value.shape[2]) if out is None else out
    if before is None:
        before = query.new_zeros(heads, width, value.shape[2], dtype=wide), query.new_zeros(heads, width, dtype=wide)
    state, norm = before[0][:, None], before[1][:, None, None]
    for at in range(0, length, tile):
        here = slice(at, min(at + tile, length))
        phi_q, phi_k = _features(query[:, here], key[:, here], None if mask is None else mask[:, here], scale)
        phi_q, phi_k, values = (pad_to_blocks(x, size) for x in (phi_q, phi_k, value[:, here].to(wide)))
        columns = phi_k.transpose(2, 3)
        state = running_sum(columns @ values, None, state[:, -1])
        norm = running_sum(phi_k.sum(2, keepdim=True), None, norm[:, -1])
        own = (phi_q @ columns).tril_()
        total = own.sum(3, keepdim=True).add_((phi_q * norm[:, :-1]).sum(3, keepdim=True))
        got = _divide((own @ values).add_(phi_q @ state[:, :-1]), total)
        out[:, here] = got.flatten(1, 2)[:, : here.stop - at]
    return out


def _divide(out: Tensor, total: Tensor) -> Tensor:
    """Out / total, and 0 where the weights sum to 0: nothing to attend to, or features that all underflow."""
    total = total.masked_fill(total == 0, 1.0)
    return out / total if out.requires_grad else out.div_(total)


class LinearState(NamedTuple):
    """Eq. 16-19 after some tokens: `products` (B, H, D, Dv) is S, `norm` (B, H, D) is Z."""

    products: Tensor
    norm: Tensor


def recurrence_update(
    config: LinearConfig, state: LinearState | None, key: Tensor, value: Tensor, options: AttentionOptions
) -> LinearState:
    """See `Recurrence`."""
    mask = options.key_mask
    phi = _key_features(key, None if mask is None else mask[:, None])
    products, norm = phi.transpose(2, 3) @ value.to(phi.dtype), phi.sum(2)
    return LinearState(products, norm) if state is None else LinearState(state.products + products, state.norm + norm)


def recurrence_query(config: LinearConfig, state: LinearState, query: Tensor, options: AttentionOptions) -> Tensor:
    """See `Recurrence`; Eq. 20."""
    scale, dropout_p = options.scale, options.dropout_p
    phi = _query_features(query, scale)
    total = phi @ state.norm.unsqueeze(-1)
    phi = dropout(phi, dropout_p) if dropout_p else phi
    return _divide(phi @ state.products, total)


def recurrence_forward(
    config: LinearConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    initial_state: LinearState,
) -> Tensor:
    """See `Recurrence`; `_causal` with sums that do not begin at 0."""
    mask, scale, dropout_p = options.key_mask, options.scale, options.dropout_p
    state = initial_state

    def some_heads(query, key, value, mask, products, norm):
        if not dropout_p and can_reuse_buffers(query, key, value, products, norm):
            return _causal_walk(query, key, value, mask, (products, norm), scale=scale)
        phi_q, phi_k = _features(query, key, mask, scale)
        return _causal(phi_q, phi_k, value.to(phi_k.dtype), dropout_p, (products, norm))

    flat = [x.flatten(0, 1) for x in (query, key, value)]
    flat_mask = None if mask is None else mask.repeat_interleave(query.shape[1], 0)
    return chunked_over_heads(some_heads, *flat, flat_mask, *(x.flatten(0, 1) for x in state)).unflatten(
        0, query.shape[:2]
    )


def naive(config: LinearConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form: the dense matrix of phi(q_i) . phi(k_j)."""
    mask, is_causal, scale = options.key_mask, options.is_causal, options.scale
    flat = [x.flatten(0, 1).double() for x in (query, key, value)]
    phi_q, phi_k = _features(*flat[:2], None if mask is None else mask.repeat_interleave(query.shape[1], 0), scale)
    weights = phi_q @ phi_k.transpose(1, 2)
    if is_causal:
        weights = weights.tril()
    out = _divide(weights @ flat[2], weights.sum(-1, keepdim=True))
    return out.to(value.dtype).unflatten(0, query.shape[:2])


register_method(
    LinearConfig, forward=forward, naive=naive, recurrence=Recurrence(recurrence_update, recurrence_query, recurrence_forward)
)
