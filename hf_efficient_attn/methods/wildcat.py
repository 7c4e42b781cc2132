"""WildCat (Schroeder, Mackey, ICML 2026): all queries attend to one weighted coreset of keys.

How the paper's quantities correspond to the code, with beta the scale of the scores:

- The keys are centered, which changes no softmax.
- The coreset S is chosen by randomly pivoted Cholesky on the kernel exp(beta / tau^2 <k, k'>)
  (`hf_efficient_attn.ops.coreset`).
- Nystrom weights, the best approximation of every key's feature by those of the coreset:
  W = exp(beta / tau^2 K_S K_S^T)^-1 exp(beta / tau^2 K_S K^T), applied to the values and to ones.
- Output: exp(beta Q K_S^T) (W V) / exp(beta Q K_S^T) (W 1), clipped to the range of each feature of the values. Where
  the denominator is not positive, the output is the middle of this range (0 in the authors' code).
- The temperature tau balances how well a coreset approximates the kernel against the growth of the error at large
  queries: tau^2 = rho R_K / R_Q for the largest norms of a centered key and of a query, and rho = 3.94582. This is the
  limit of the paper's formula for large beta R_K R_Q, which the authors' code uses for all sizes.

Departures from the paper:

- Pivots are drawn in blocks, and from `num_candidates` evenly spaced keys. All keys have weights. The paper limits the
  cost of the pivots by bins of keys, each with a coreset of its own, instead.
- R_K is the largest norm of a candidate. It has no influence on the temperature if beta R_K R_Q is below 1e-3.
- The inverse has a ridge of 1e-3, for kernels that are scaled to a unit diagonal.
- With up to `num_samples` keys the output is exact attention.
- On accelerators there are two draws (`hf_efficient_attn.ops.pivots`), and without dropout another order of the
  operations (`hf_efficient_attn.ops.nystrom`).

There is no causal form, because the coreset contains keys of the future. Dropout acts on the weights of the coreset in
the numerator.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, threshold

from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.heads import FlatHeads, flatten_heads, unflatten_heads
from hf_efficient_attn.methods._shared.registry import AttentionOptions, register_method
from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.blocks import ceil_div, chunked_over_heads, pad_to_blocks, take
from hf_efficient_attn.ops.coreset import candidate_positions, choose_pivots, regularized_solve
from hf_efficient_attn.ops.exact import exact_attention, mask_bias
from hf_efficient_attn.ops.nystrom import LEAST_DENOMINATOR, LEAST_LOGIT, NO_KEY, RHO
from hf_efficient_attn.ops.nystrom_graph import Request, nystrom_attention
from hf_efficient_attn.ops.partial import accumulation_dtype, partial_attention

_RIDGE = 1e-3
# Scores of a head that are computed at a time: 4 MiB of float32.
_SCORES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class WildCatConfig(MethodConfig):
    """Hyperparameters of WildCat. With up to num_samples keys the output is exact."""

    method = "wildcat"
    title = "WildCat"
    paper = "Schroeder and Mackey, ICML 2026"
    year = 2026
    causal = False
    rectangular = True
    summary = "attention to a coreset of keys whose weights make up for all other keys"
    paper_url = "https://arxiv.org/abs/2602.10056"
    near = "none"
    far = "a coreset of keys with Nystrom weights"

    num_samples: int = option(256, "Keys in the coreset.", minimum=1)
    num_candidates: int = option(
        1024, "Evenly spaced keys from which the coreset is chosen, at least num_samples.", minimum=1
    )
    seed: int = option(0, "Seed of the choice of the coreset.", minimum=0)

    @property
    def exact_length(self) -> int:
        """The size of the coreset."""
        return self.num_samples

    def with_budget(self, columns: int) -> "WildCatConfig":
        """As many keys in the coreset as the budget has exact keys, and four times as many candidates.

        The coreset itself is not counted. With as many queries as keys, its weights cost as much as the queries.
        """
        return replace(self, num_samples=self.check_budget(columns), num_candidates=min(4 * columns, 2**31 - 1))


class _Coreset(NamedTuple):
    """A weighted coreset: exp(scale q . key + bias) @ [values, ones] are numerator and denominator of the output.

    Attributes:
        key: (BH, m, D).
        bias: (BH, m).
        weighted: (BH, m, Dv + 1), the weights applied to the values, as multiples of `half` around `middle`, and to 1.
        middle: (BH, 1, Dv), the middle of the range of each feature of the values.
        half: (BH, 1, Dv), half of the size of the range.
    """

    key: Tensor
    bias: Tensor
    weighted: Tensor
    middle: Tensor
    half: Tensor


def forward(config: WildCatConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Fast form; see `register_method`."""
    flat = flatten_heads(query, key, value, options.key_mask)
    if key.shape[2] <= config.num_samples:
        out = exact_attention(*flat, is_causal=False, scale=options.scale, dropout_p=options.dropout_p)
    elif backend(query) != "cpu" and options.scale != 0.0 and not options.dropout_p:
        candidates, batch = max(config.num_samples, config.num_candidates), key.shape[0]
        request = Request(config.num_samples, candidates, options.seed, batch, options.scale, _RIDGE)
        out = nystrom_attention(*flat[:3], options.key_mask, request)
    else:
        with torch.autocast(query.device.type, enabled=False):
            coreset = _make_coreset(config, flat, key.shape[0], options)
        result = (query.shape[2], value.shape[3], value.dtype)

        def some_heads(query: Tensor, *coreset: Tensor, out: Tensor | None = None) -> Tensor:
            part = _attend(query, _Coreset(*coreset), options.scale, options.dropout_p)
            return part.to(value.dtype) if out is None else out.copy_(part)

        out = chunked_over_heads(some_heads, flat.query, *coreset, result=result)
    return unflatten_heads(out, query.shape)


def _kernel_scale(query: Tensor, points: Tensor, query_mask: Tensor | None, scale: float) -> Tensor:
    """Beta / tau^2 of every head, (BH, 1, 1), for queries (BH, Nq, D) and centered keys (BH, C, D)."""
    norms = torch.linalg.vector_norm(query, dim=2, dtype=points.dtype)
    if query_mask is not None:
        norms = norms.masked_fill(~query_mask, 0.0)
    # With x = beta R_Q / rho this is x^2 / (x R_K) = x / R_K.
    x = norms.amax(1)[:, None, None] * (abs(scale) / RHO)
    logit = x * torch.linalg.vector_norm(points, dim=2).amax(1)[:, None, None]
    kernel_scale = x.square() / logit.clamp(min=LEAST_LOGIT / RHO)
    clamped: Tensor = kernel_scale.clamp(min=torch.finfo(points.dtype).tiny ** 0.5)
    return clamped


def _make_coreset(config: WildCatConfig, heads: FlatHeads, batch: int, options: AttentionOptions) -> _Coreset:
    """Choose the coreset of every head and compute its weights."""
    acc_dtype, count, mask = accumulation_dtype(heads.key.dtype), config.num_samples, options.key_mask
    num_heads, kv_len = heads.key.shape[0] // batch, heads.key.shape[1]
    position, valid = candidate_positions(mask, kv_len, max(count, config.num_candidates), heads.key.device)
    if mask is None or valid is None:
        num_keys, bias, position = None, None, position.expand(heads.key.shape[0], -1)
        mean = heads.key.mean(1, keepdim=True, dtype=acc_dtype)
    else:
        position, valid = (x.repeat_interleave(num_heads, 0) for x in (position, valid))
        num_keys = mask.sum(1).repeat_interleave(num_heads)[:, None, None].to(acc_dtype)
        bias = mask_bias(mask, acc_dtype).repeat_interleave(num_heads, 0)[:, None, None]
        mean = heads.key.sum(1, keepdim=True, dtype=acc_dtype) / num_keys.clamp(min=1)
    candidates = take(heads.key, position) - mean
    if valid is not None:
        candidates = candidates.masked_fill(~valid.unsqueeze(2), 0.0)
    query_mask = heads.key_mask if heads.query.shape[1] == kv_len else None
    kernel_scale = _kernel_scale(heads.query, candidates, query_mask, options.scale)
    root = kernel_scale.sqrt()
    pivot, selected = choose_pivots(candidates * root, valid, count, seed=options.seed, batch=batch)
    keys = take(candidates, pivot)

    # Sums over all keys, of one row of the kernel for each key of the coreset: exp(lse) [out, 1].
    rows, key, value = keys * kernel_scale, heads.key.to(acc_dtype), heads.value.to(acc_dtype)
    out, lse = (x[:, 0] for x in partial_attention(rows[:, None], key[:, None], value[:, None], bias, scale=1.0))
    lse = torch.baddbmm(lse.unsqueeze(2), rows, mean.mT, alpha=-1.0)
    middle, half = _value_range(heads.value, None if bias is None else bias[:, 0].mT, options.dropout_p, acc_dtype)
    # The range of a feature that is constant is rounding.
    finfo = torch.finfo(acc_dtype)
    unit = torch.add(half, middle.abs(), alpha=8 * finfo.eps).clamp(min=finfo.tiny)
    sums = pad((out - middle) / unit, (0, 1), value=1.0)

    # In float64, because a kernel matrix is nearly singular, and sums of exponentials differ by orders of magnitude.
    points = keys * root.double()
    kernel = points @ points.mT
    log_size = -0.5 * kernel.diagonal(dim1=1, dim2=2).unsqueeze(2)
    kernel = (kernel + log_size + log_size.mT).clamp(max=0.0).exp()
    if num_keys is not None:
        # With n keys in a coreset for more than n, each is its own coreset.
        few = num_keys <= count
        lse = lse.masked_fill(few, 0.0)
    weights = (lse + log_size).softmax(1)  # up to a factor of all
    weighted = regularized_solve(kernel, sums * weights, _RIDGE)
    if num_keys is not None:
        own = pad((take(value, position.gather(1, pivot)) - middle) / unit, (0, 1), value=1.0)
        weighted, log_size = torch.where(few, own, weighted), log_size.masked_fill(few, 0.0)
    # Sums of exponentials differ by many orders of magnitude, so their size goes into the exponent of the query.
    size = torch.linalg.vector_norm(weighted.detach(), torch.inf, 2, keepdim=True)
    size = size.clamp(min=torch.finfo(torch.float64).tiny)
    log_size = (size.log() + log_size).squeeze(2)
    if valid is not None:
        log_size = log_size.masked_fill(~selected, NO_KEY)
    return _Coreset(keys, log_size.to(acc_dtype), (weighted / size).to(acc_dtype), middle, half)


def _value_range(value: Tensor, bias: Tensor | None, dropout_p: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The middle and half of the size of the range of every feature, (BH, 1, Dv), without the keys with a bias of -inf.

    With dropout, outputs are between 0 and multiples of the values, so the middle is 0.
    """
    if bias is None:
        ends = torch.stack((value.amin(1, keepdim=True), value.amax(1, keepdim=True))).to(dtype)
    else:
        ends = torch.stack(((value - bias).amin(1, keepdim=True), (value + bias).amax(1, keepdim=True)))
        ends = ends.masked_fill(ends.isinf(), 0.0)
    if dropout_p > 0.0:
        return torch.zeros_like(ends[0]), ends.abs().amax(0)
    low, high = (0.5 * ends).unbind()
    return low + high, high - low


def _attend(query: Tensor, coreset: _Coreset, scale: float, dropout_p: float) -> Tensor:
    """Attention of queries (BH, Nq, D) to the coreset: (BH, Nq, Dv) in the accumulation dtype."""
    q_len, acc_dtype, value_dim = query.shape[1], coreset.key.dtype, coreset.middle.shape[2]
    block_q = ceil_div(q_len, ceil_div(q_len * coreset.key.shape[1], _SCORES))
    blocks = pad_to_blocks(query.to(acc_dtype), block_q)
    keys, weighted, bias = coreset.key[:, None], coreset.weighted[:, None], coreset.bias[:, None, None]
    sums = partial_attention(blocks, keys, weighted, bias, scale=scale).out.flatten(1, 2)[:, :q_len]
    numerator, denominator = sums[..., :value_dim], sums[..., value_dim:]
    if dropout_p > 0.0:
        values = weighted[..., :value_dim]
        dropped = partial_attention(blocks, keys, values, bias, scale=scale, dropout_p=dropout_p).out
        numerator = dropped.flatten(1, 2)[:, :q_len]
    # Where the denominator is not positive, this divides by infinity.
    ratio = numerator / threshold(denominator, LEAST_DENOMINATOR, torch.inf)
    limit = 1.0 / (1.0 - dropout_p)
    return torch.addcmul(coreset.middle, ratio.clamp_(-limit, limit), coreset.half)


def naive(config: WildCatConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form: one batch row at a time without its padding, with dense weights of all keys."""
    outs, count, scale = [], config.num_samples, options.scale
    for b in range(query.shape[0]):
        valid = key.new_ones(key.shape[2], dtype=torch.bool) if options.key_mask is None else options.key_mask[b]
        queries, keys, values = query[b].double(), key[b, :, valid].double(), value[b, :, valid].double()
        num_keys = keys.shape[1]
        if num_keys <= count:
            outs.append((scale * queries @ keys.mT).softmax(-1) @ values)
            continue
        keys = keys - keys.mean(1, keepdim=True)
        position, _ = candidate_positions(None, num_keys, max(count, config.num_candidates), key.device)
        candidates = keys[:, position[0]]
        own_queries = queries[:, valid] if query.shape[2] == key.shape[2] else queries
        root = _kernel_scale(own_queries, candidates, None, scale).sqrt()
        pivot = choose_pivots(candidates * root, None, count, seed=options.seed, batch=1).candidate
        coreset = take(keys, position[0][pivot])
        points, half_norm = root * coreset, 0.5 * (root * coreset).square().sum(2, keepdim=True)
        # exp(<x, y> - |x|^2 / 2), as multiples of the largest one. The missing factors are part of the logits below.
        exponents = points @ (root * keys).mT - half_norm
        kernel_rows = (exponents - exponents.amax((1, 2), keepdim=True)).exp()
        kernel = (points @ points.mT - half_norm - half_norm.mT).exp()
        weights = torch.linalg.solve(
            kernel + _RIDGE * torch.eye(count, dtype=kernel.dtype, device=kernel.device), kernel_rows
        )
        low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
        middle, half = (low + high) / 2, (high - low) / 2
        # Relative to the middle of the range, which is the output if the denominator is not positive.
        numerators, ones = weights @ (values - middle), weights.sum(2, keepdim=True)
        size = torch.maximum((numerators / half.clamp(min=1e-300)).abs().amax(2), ones[..., 0].abs())
        logits = scale * queries @ coreset.mT - half_norm.mT
        basis = (logits - (logits + size.log()[:, None]).amax(2, keepdim=True)).exp()
        denominator = basis @ ones
        positive = denominator > LEAST_DENOMINATOR * (basis @ size.unsqueeze(2))
        ratio = (basis @ numerators / torch.where(positive, denominator, 1.0)).masked_fill(~positive, 0.0)
        outs.append(middle + torch.maximum(torch.minimum(ratio, half), -half))
    return torch.stack(outs).to(value.dtype)


register_method(WildCatConfig, forward=forward, naive=naive)
