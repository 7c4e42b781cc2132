"""Attention through approximate products with a Gaussian kernel matrix (ApproxKMV), numerator and denominator.

"Improved algorithms for kernel matrix-vector multiplication under sparsity assumptions". Its section 4: A = exp(Q K^T /
sqrt d) is a Gaussian kernel matrix but for a factor of each row (Lemma 4.1, `kernel.attention_to_gaussian`), which
cancels in D^-1 A V. So A V and A 1 are products for its Algorithm 3 with x the columns of V and of ones: the columns of
heavy coordinates of x and the keys that share a bucket of a Euclidean hash exactly, uniform draws for the rest, as many
as the error allowed needs (`kernel.plan_product` says which line is which, and where it departs from the paper).

Departures of this use of it:

- Numerator and denominator are computed from the same keys with the same weights, so that an output is a convex
  combination of values and the errors cancel in part; the mean of the draws takes the place of the median of their
  means, which has neither property.
- The promise |K x - y| <= eps |x| is one about all rows together, with a kernel that is at most 1: a row whose
  denominator is less than 2 eps says little of its output, and is computed exactly.
- `num_samples` > 0 sets the cost of a query instead of the error: half of it are keys that share most buckets with it,
  the rest is drawn. No error is promised then. Sequences up to it are computed exactly.

What is computed depends on the data, so that there is no graph for torch.compile; each head of each row of a batch is
a problem of its own, solved one after the other, on the tokens that are there.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_efficient_attn import kernel
from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.registry import AttentionOptions, register_method
from hf_efficient_attn.ops import kde
from hf_efficient_attn.ops.exact import exact_attention
from hf_efficient_attn.ops.near_far import dense_attention
from hf_efficient_attn.ops.partial import accumulation_dtype, partial_attention
from hf_efficient_attn.ops.random import uniform

_TABLES, _DEPTH = 8, 4
_DELTA = 0.01
_PAIRS = 1 << 17
_SAMPLE, _HASH, _DRAWS = 40_000, 70, 50_001


@dataclass(frozen=True, kw_only=True)
class ApproxKMVConfig(MethodConfig):
    """Hyperparameters of attention through ApproxKMV."""

    method = "approx_kmv"
    title = "ApproxKMV"
    paper = "Improved Algorithms for Kernel Matrix-Vector Multiplication Under Sparsity Assumptions, ICLR 2025"
    year = 2025
    causal = False
    rectangular = True
    summary = "products with a Gaussian kernel: near keys by hashing, as many draws of the rest as eps needs"

    error_percent: int = option(
        30, "Error eps of the kernel's products in percent of |x|, with num_samples 0.", minimum=1
    )
    num_samples: int = option(
        0, "Keys that a query computes. 0: as many as the error needs, which may be all.", minimum=0
    )
    seed: int = option(0, "Seed of the hash and of the sampling.", minimum=0)

    def with_budget(self, columns: int) -> "ApproxKMVConfig":
        """`num_samples` is the number of columns."""
        return dataclasses.replace(self, num_samples=self.check_budget(columns))


# What a head computes: for some of its queries (R,) the keys (R, M) and what is added to their scores (R, M).
_Rows = tuple[Tensor, Tensor, Tensor]


def _rows(
    config: ApproxKMVConfig, query: Tensor, key: Tensor, value: Tensor, scale: float, seed
) -> "Iterator[_Rows] | None":
    """What one head computes, query (Nq, D), key (Nk, D), value (Nk, Dv); None where that is everything."""
    if scale == 0.0 or 0 < len(key) <= config.num_samples:
        return None
    wide = accumulation_dtype(query.dtype)
    query, key, value = (x.detach().to(wide) for x in (query, key, value))
    queries, keys, bandwidth, _ = kernel.attention_to_gaussian(query, key, scale=scale)
    queries, keys = queries / bandwidth, keys / bandwidth
    if config.num_samples:
        return _budget_rows(config.num_samples, queries, keys, seed)
    x = torch.cat((value, value.new_ones(len(value), 1)), 1)
    # Of each column of the product by itself, not of all of them together.
    delta = min(0.5, _DELTA * x.shape[1])
    plan = kernel.plan_product(queries, keys, x, eps=config.error_percent / 100, delta=delta, seed=seed, sums=False)
    return None if isinstance(plan, int) else _plan_rows(plan, seed)


def _plan_rows(plan: kernel.Plan, seed) -> Iterator[_Rows]:
    """The rows of a plan that are not computed exactly."""
    count = len(plan.light)
    for here, found, _ in kde.shared_buckets(plan.tables, _PAIRS):
        some = torch.arange(here.start, here.stop, device=found.device)
        some = some[~plan.whole[some]]
        for part in some.split(max(1, _PAIRS // max(1, int(plan.draws[some].max()) if len(some) else 1))):
            own = found[(found // count >= part[0]) & (found // count <= part[-1])]
            own = own[torch.isin(own // count, part)]
            column, used = kernel.draw_columns(plan.draws[part], part, found, count, seed, _DRAWS)
            weight = (count / plan.draws[part]).log()[:, None].expand(column.shape).masked_fill(~used, -torch.inf)
            near, bias = _padded(torch.searchsorted(part, own // count), own % count, len(part))
            index = torch.cat((plan.heavy.expand(len(part), -1), plan.light[near], plan.light[column]), 1)
            yield part, index, torch.cat((bias.new_zeros(len(part), len(plan.heavy)), bias, weight.to(bias.dtype)), 1)


def _budget_rows(columns: int, queries: Tensor, keys: Tensor, seed) -> Iterator[_Rows]:
    """Half of the columns by shared buckets, the rest by draws."""
    rows, count, device = len(queries), len(keys), keys.device
    pairs = uniform((2, 4096), seed, _SAMPLE, device)
    row, column = ((u * n).to(torch.int64).clamp(max=n - 1) for u, n in zip(pairs, (rows, count), strict=True))
    distances = (queries[row] - keys[column]).norm(dim=1).double()
    widths = distances.median().clamp(min=1e-9) * 2.0 ** (0.25 * torch.arange(-16, 9, device=device))
    # The widest cells in which a query meets about as many keys as it may have.
    met = kde.collision_chance(distances[None] / widths[:, None]).pow(_DEPTH).mean(1) * _TABLES * count
    width = widths[int((met <= columns // 2).sum().clamp(min=1)) - 1].item()
    tables = kde.hash_tables(queries, keys, kde.Hash(width, _DEPTH, _TABLES), seed, _HASH)
    for here, found, times in kde.shared_buckets(tables, _PAIRS):
        # Of each query's keys those that it meets in most tables.
        order = (found // count * (_TABLES + 1) + _TABLES - times).argsort(stable=True)
        row = found[order] // count - here.start
        sizes = torch.bincount(row, minlength=here.stop - here.start)
        rank = torch.arange(len(row), device=device) - (sizes.cumsum(0) - sizes)[row]
        kept = found[order[rank < columns // 2]].sort().values
        for part in torch.arange(here.start, here.stop, device=device).split(max(1, _PAIRS // columns)):
            own = kept[(kept // count >= part[0]) & (kept // count <= part[-1])]
            near, bias = _padded(own // count - part[0], own % count, len(part))
            draws = columns - (bias == 0).sum(1)
            column, used = kernel.draw_columns(draws, part, own, count, seed, _DRAWS)
            weight = (count / draws).log()[:, None].expand(column.shape).masked_fill(~used, -torch.inf)
            yield part, torch.cat((near, column), 1), torch.cat((bias, weight.to(bias.dtype)), 1)


def _padded(row: Tensor, column: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Pairs in the order of their rows as (rows, M) columns, with 0 where there is one and -inf in what fills up."""
    sizes = torch.bincount(row, minlength=rows)
    rank = torch.arange(len(row), device=row.device) - (sizes.cumsum(0) - sizes)[row]
    shape = (rows, int(sizes.max()) if len(row) else 0)
    index = row.new_zeros(shape)
    index[row, rank] = column
    bias = torch.full(shape, -torch.inf, dtype=torch.float64, device=row.device)
    bias[row, rank] = 0.0
    return index, bias


def _some(query: Tensor, key: Tensor, value: Tensor, index: Tensor, bias: Tensor, scale: float, dropout_p: float):
    """Attention of (R, D) queries to the keys at index (R, M), and the lse (R,)."""
    bias = bias.to(accumulation_dtype(query.dtype))[None, :, None]
    part = partial_attention(
        query[None, :, None], key[index][None], value[index][None], bias, scale=scale, dropout_p=dropout_p
    )
    return part.out[0, :, 0], part.lse[0, :, 0]


def _log_factor(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Logarithm of what a row of A is to that of its Gaussian kernel."""
    wide = accumulation_dtype(query.dtype)
    return kernel.attention_to_gaussian(query.detach().to(wide), key.detach().to(wide), scale=scale)[3]


def _exact_rows(query, key, value, scale, dropout_p) -> Tensor:
    return exact_attention(query[None], key[None], value[None], is_causal=False, scale=scale, dropout_p=dropout_p)[0]


def _head(config: ApproxKMVConfig, query, key, value, scale: float, dropout_p: float, seed) -> Tensor:
    """One head on tokens that are all there: (Nq, D), (Nk, D), (Nk, Dv) -> (Nq, Dv)."""
    with torch.no_grad():
        rows = _rows(config, query, key, value, scale, seed)
    if rows is None:
        return _exact_rows(query, key, value, scale, dropout_p)
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    factor = None if config.num_samples else _log_factor(query, key, scale)
    outs, places = [], []
    open_ = torch.ones(len(query), dtype=torch.bool, device=query.device)
    while True:
        with torch.no_grad():
            given = next(rows, None)
        if given is None:
            break
        some, index, bias = given
        arguments = (query[some], key, value, index, bias, scale, dropout_p)
        # The keys of every query would be kept for the gradient.
        out, lse = checkpoint(_some, *arguments, use_reentrant=False) if keep else _some(*arguments)
        if factor is not None:
            sure = lse.detach() - factor[some] >= _least(config)
            out, some = out[sure], some[sure]
        open_[some] = False
        outs.append(out)
        places.append(some)
    rest = open_.nonzero().squeeze(1)
    if len(rest):
        outs.append(_exact_rows(query[rest], key, value, scale, dropout_p))
        places.append(rest)
    return torch.cat(outs)[torch.cat(places).argsort()]


def _least(config: ApproxKMVConfig) -> float:
    """Logarithm of the smallest denominator, in units of the kernel, of a row that is not computed exactly."""
    return torch.tensor(2 * config.error_percent / 100).log().item()


def _dense_head(config: ApproxKMVConfig, query, key, value, scale: float, dropout_p: float, seed) -> Tensor:
    """The same with a dense matrix of log-weights."""
    weights = torch.ones(len(query), len(key), dtype=torch.float64, device=query.device)
    with torch.no_grad():
        scores = query.double() @ key.double().t() * scale
        for some, index, bias in _rows(config, query, key, value, scale, seed) or ():
            own = torch.zeros(len(some), len(key), dtype=torch.float64, device=query.device)
            own.scatter_add_(1, index, bias.exp())
            if not config.num_samples:
                lse = (scores[some] + own.log()).logsumexp(1) - _log_factor(query, key, scale)[some]
                own[lse < _least(config)] = 1.0
            weights[some] = own
    return dense_attention(query[None], key[None], value[None], weights.log()[None], scale=scale)[0]


def _attend(head, config: ApproxKMVConfig, query, key, value, mask, scale: float, dropout_p: float, seed) -> Tensor:
    """Every head of every row by itself, on the tokens that are there."""
    if key.shape[2] <= config.num_samples:
        flat = [x.flatten(0, 1) for x in (query, key, value)]
        own = None if mask is None else mask.repeat_interleave(query.shape[1], 0)
        return exact_attention(*flat, own, is_causal=False, scale=scale, dropout_p=dropout_p).unflatten(
            0, query.shape[:2]
        )
    outs = []
    for b in range(query.shape[0]):
        there = None if mask is None else mask[b].nonzero().squeeze(1)
        # In self-attention what is not there has no queries either; its outputs are 0.
        asked = there if query.shape[2] == key.shape[2] else None
        for h in range(query.shape[1]):
            q, k, v = query[b, h], key[b, h], value[b, h]
            if there is not None:
                q, k, v = q if asked is None else q[asked], k[there], v[there]
            if len(k) and len(q):
                out = head(config, q, k, v, scale, dropout_p, seed + 1_000_003 * h)
            else:
                out = v.new_zeros(len(q), v.shape[1]) + 0.0 * v.sum()
            if there is not None and asked is not None:
                out = out.new_zeros(query.shape[2], v.shape[1]).index_copy(0, asked, out)
            outs.append(out)
    return torch.stack(outs).unflatten(0, query.shape[:2])


def forward(config: ApproxKMVConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Fast form; arguments as in `hf_efficient_attn.methods._shared.registry.register_method`."""
    mask, scale, dropout_p, seed = options.key_mask, options.scale, options.dropout_p, options.seed
    return _attend(_head, config, query, key, value, mask, scale, dropout_p, seed)


def naive(config: ApproxKMVConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form: the same draws as a dense matrix of log-weights beside the dense scores."""
    mask, scale, dropout_p, seed = options.key_mask, options.scale, options.dropout_p, options.seed
    return _attend(_dense_head, config, query, key, value, mask, scale, dropout_p, seed)


register_method(ApproxKMVConfig, forward=forward, naive=naive)
