"""ApproxKMV: attention through approximate products with a Gaussian kernel matrix, numerator and denominator.

"Improved algorithms for kernel matrix-vector multiplication under sparsity assumptions", section 4. A = exp(Q K^T /
sqrt d) equals a Gaussian kernel matrix up to a factor of each row (Lemma 4.1, `products.attention_to_gaussian`), and
this factor cancels in D^-1 A V. So A V and A 1 are products for the paper's Algorithm 3, where x is each column of V
and the vector of ones. It computes exactly the keys that share a bucket of a Euclidean hash with the query and the keys
at the heavy coordinates of x, and estimates the rest from uniform draws, as many as the allowed error requires.
`products.plan_product` states which line of the algorithm is which, and where it departs from the paper.

Departures of this method from the paper:

- Numerator and denominator are computed from the same keys with the same weights. An output is therefore a convex
  combination of values, and the errors partly cancel. For the same reason the mean of the draws replaces the median of
  their means, which has neither property.
- The guarantee |K x - y| <= eps |x| holds for all rows together, for a kernel that is at most 1. It says little about a
  row whose denominator is less than 2 eps, so such a row is computed exactly.
- `num_samples` > 0 sets the cost of a query instead of the error. Half of these keys are those that share most buckets
  with the query, and the rest is drawn. In this case there is no guarantee for the error. Sequences of up to
  `num_samples` keys are computed exactly.

The amount of work depends on the data, and on an accelerator every head waits for the device several times. This follows from the definition. The number of draws is the one that the error of this data
requires, and rows with a small denominator are computed exactly. The keys that share a bucket with a query may be none
or all, also with `num_samples`, which keeps those that share most buckets: to find them, all pairs in a bucket are
counted. A bound by shape would be that of all pairs, or would cut off buckets and lose the guarantee. Each head of each
sequence is a separate problem on its valid tokens, and they are solved one after the other.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from hf_efficient_attn.kernel import products
from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.exact import exact_form
from hf_efficient_attn.methods._shared.registration import register_method
from hf_efficient_attn.methods._shared.registry import AttentionOptions
from hf_efficient_attn.ops import kde
from hf_efficient_attn.ops.attend import attend
from hf_efficient_attn.ops.exact import exact_attention
from hf_efficient_attn.ops.near_far import dense_attention
from hf_efficient_attn.ops.partial import accumulation_dtype
from hf_efficient_attn.ops.random import head_slice, seed_value, uniform
from hf_efficient_attn.ops.slices import sliced

# Hash tables, and hashes that make up a bucket of one table, with a budget.
_TABLES, _DEPTH = 8, 4
# The probability with which one column of the product may exceed the error.
_DELTA = 0.01
# Pairs of queries and keys that are processed at a time.
_PAIRS = 1 << 17
# Streams of random numbers.
_SAMPLE, _HASH, _DRAWS = 40_000, 70, 50_001
# The seeds of consecutive heads differ by this number.
_SEED_STEP = 1_000_003


@dataclass(frozen=True, kw_only=True)
class ApproxKMVConfig(MethodConfig):
    """Hyperparameters of attention through ApproxKMV."""

    method = "approx_kmv"
    title = "ApproxKMV"
    paper = "Indyk, Kapralov, Sheth, Wagner, ICLR 2025"
    year = 2025
    causal = False
    rectangular = True
    summary = "products with a Gaussian kernel: near keys by hashing, as many draws of the rest as eps needs"
    paper_url = "https://arxiv.org/abs/2507.23539"
    near = "keys found by hashing"
    far = "samples of the rest, as many as the error bound needs"

    error_percent: int = option(
        30, "Error eps of the products with the kernel, in percent of |x|. Used if num_samples is 0.", minimum=1
    )
    num_samples: int = option(
        0, "Keys that are computed for a query. 0: as many as the error requires, possibly all.", minimum=0
    )
    seed: int = option(0, "Seed of the hash and of the sampling.", minimum=0)

    @property
    def exact_length(self) -> int:
        """`num_samples`. With an allowed error instead, that error is possible at every length."""
        return self.num_samples

    def with_budget(self, columns: int) -> "ApproxKMVConfig":
        """Spend the whole budget on `num_samples`."""
        return replace(self, num_samples=self.check_budget(columns))


class _Part(NamedTuple):
    """Some queries of one head with the keys that are computed for them.

    Attributes:
        queries: int64 (R,), the queries, ascending.
        keys: int64 (R, M), the keys of each query.
        bias: float64 (R, M), the log-weights of the keys, which are added to the scores; -inf for an unused entry.
    """

    queries: Tensor
    keys: Tensor
    bias: Tensor


class _Head(NamedTuple):
    """The inputs of one head, query (Nq, D), key (Nk, D) and value (Nk, Dv), and the arguments of the call."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    dropout_p: float
    seed: int | Tensor

    def exact(self, queries: Tensor) -> Tensor:
        """Exact attention of the queries at some indices (R,): (R, Dv)."""
        tensors = (x[None] for x in (self.query[queries], self.key, self.value))
        return exact_attention(*tensors, is_causal=False, scale=self.scale, dropout_p=self.dropout_p)[0]

    def attend(self, part: _Part) -> tuple[Tensor, Tensor]:
        """Attention of a part: the output (R, Dv) and its lse (R,)."""

        def forward(query: Tensor, keys: Tensor, bias: Tensor) -> Tensor:
            own = query[None, :, None], self.key[keys][None], self.value[keys][None], bias[None, :, None]
            out, lse = (x[0, :, 0] for x in attend(*own, scale=self.scale, dropout_p=self.dropout_p))
            return torch.cat((out.to(lse.dtype), lse.unsqueeze(1)), 1)

        # Computed again in the backward pass, because autograd would keep a copy of the keys of every query.
        rows = self.query[part.queries], part.keys, part.bias.to(accumulation_dtype(self.query.dtype))
        both = sliced(forward, *rows, size=len(part.queries), draws=self.dropout_p > 0.0)
        return both[:, :-1].to(self.value.dtype), both[:, -1]

    def gaussian(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys in units of the bandwidth, and the log of the ratio of each row of A to that of its kernel.

        Without a gradient: (Nq, D), (Nk, D) and (Nq,).
        """
        query, key = (x.detach().to(accumulation_dtype(x.dtype)) for x in (self.query, self.key))
        queries, keys, bandwidth, log_factor = products.attention_to_gaussian(query, key, scale=self.scale)
        return queries / bandwidth, keys / bandwidth, log_factor


_Form: TypeAlias = Callable[[ApproxKMVConfig, _Head], Tensor]


@torch.no_grad()
def _parts(config: ApproxKMVConfig, head: _Head) -> Iterator[_Part]:
    """The keys that are computed for queries of one head. All keys are computed for the other queries."""
    if head.scale == 0.0 or 0 < len(head.key) <= config.num_samples:
        return
    queries, keys, _ = head.gaussian()
    if config.num_samples:
        yield from _parts_by_budget(config.num_samples, queries, keys, head.seed)
        return
    value = head.value.detach().to(keys.dtype)
    x = torch.cat((value, value.new_ones(len(value), 1)), 1)
    # `delta` is for all columns of the product together.
    delta, eps = min(0.5, _DELTA * x.shape[1]), config.error_percent / 100
    plan = products.plan_product(queries, keys, x, eps=eps, delta=delta, seed=head.seed, sums=False)
    if isinstance(plan, int):  # the exact product is cheaper
        return
    for block, found, _ in kde.shared_buckets(plan.tables, _PAIRS):
        own = torch.arange(block.start, block.stop, device=found.device)
        own = own[~plan.whole[own]]
        most_draws = max(1, int(plan.draws[own].max()) if len(own) else 1)
        for some in own.split(max(1, _PAIRS // most_draws)) if len(own) else ():
            yield _part(some, found, plan.draws[some], plan.light, plan.heavy, head.seed)


def _parts_by_budget(budget: int, queries: Tensor, keys: Tensor, seed: int | Tensor) -> Iterator[_Part]:
    """All queries with `budget` keys each: half of them by shared buckets, the rest drawn.

    Args:
        budget: the number of keys for each query.
        queries: (Nq, D), in units of the bandwidth.
        keys: (Nk, D), in units of the bandwidth.
        seed: of the hash and of the draws.
    """
    num_queries, num_keys, device = len(queries), len(keys), keys.device
    numbers = uniform((2, 4096), seed, _SAMPLE, device)
    query, key = (
        (u * n).to(torch.int64).clamp(max=n - 1) for u, n in zip(numbers, (num_queries, num_keys), strict=True)
    )
    distances = (queries[query] - keys[key]).norm(dim=1).double()
    widths = distances.median().clamp(min=1e-9) * 2.0 ** (0.25 * torch.arange(-16, 9, device=device))
    # The largest width of a bucket at which a query is expected to meet at most half of its budget.
    met = kde.collision_chance(distances[None] / widths[:, None]).pow(_DEPTH).mean(1) * _TABLES * num_keys
    width = widths[int((met <= budget // 2).sum().clamp(min=1)) - 1].item()
    tables = kde.hash_tables(queries, keys, kde.Hash(width, _DEPTH, _TABLES), seed, _HASH)
    light, heavy = torch.arange(num_keys, device=device), torch.arange(0, device=device)
    for block, found, times in kde.shared_buckets(tables, _PAIRS):
        # Of the keys of each query keep those that it meets in most tables.
        order = (found // num_keys * (_TABLES + 1) + _TABLES - times).argsort(stable=True)
        row = found[order] // num_keys - block.start
        kept = found[order[_rank_in_group(row, block.stop - block.start) < budget // 2]].sort().values
        for some in torch.arange(block.start, block.stop, device=device).split(max(1, _PAIRS // budget)):
            yield _part(some, kept, budget, light, heavy, seed)


def _part(
    queries: Tensor, found: Tensor, draws: Tensor | int, light: Tensor, heavy: Tensor, seed: int | Tensor
) -> _Part:
    """The part of some queries: the heavy keys, the light keys that share a bucket, and light keys that are drawn.

    Args:
        queries: int64 (R,), ascending.
        found: the pairs of queries and keys that share a bucket, as sorted numbers query * L + index of the light key.
        draws: the number of draws of each query (R,), or that of its keys of both kinds.
        light: int64 (L,).
        heavy: int64 (n,).
        seed: of the draws.
    """
    num_light = len(light)
    row = torch.searchsorted(queries, found // num_light).clamp(max=len(queries) - 1)
    is_own = queries[row] == found // num_light
    row, own = row[is_own], found[is_own]
    # The pairs as keys (R, m), with -inf as bias where a query has less than m.
    rank, width = _rank_in_group(row, len(queries)), int(torch.bincount(row).max()) if len(row) else 0
    near = row.new_zeros(len(queries), width)
    bias = torch.full(near.shape, -torch.inf, dtype=torch.float64, device=row.device)
    near[row, rank], bias[row, rank] = own % num_light, 0.0
    draws = draws if isinstance(draws, Tensor) else draws - (bias == 0).sum(1)
    drawn, used = products.draw_columns(draws, queries, own, num_light, seed, _DRAWS)
    log_weight = (num_light / draws).log().double()[:, None].expand(drawn.shape).masked_fill(~used, -torch.inf)
    keys = torch.cat((heavy.expand(len(queries), -1), light[near], light[drawn]), 1)
    return _Part(queries, keys, torch.cat((bias.new_zeros(len(queries), len(heavy)), bias, log_weight), 1))


def _rank_in_group(group: Tensor, num_groups: int) -> Tensor:
    """The rank of each element among the elements of its group, for a sorted `group` (P,): (P,)."""
    sizes = torch.bincount(group, minlength=num_groups)
    return torch.arange(len(group), device=group.device) - (sizes.cumsum(0) - sizes)[group]


def _log_min_denominator(config: ApproxKMVConfig) -> float:
    """The log of the smallest denominator, in units of the kernel, of a query that is not computed exactly."""
    return math.log(2 * config.error_percent / 100)


def _forward_head(config: ApproxKMVConfig, head: _Head) -> Tensor:
    """The output (Nq, Dv) of one head."""
    outs, indices = [], []
    log_factor = None if config.num_samples or head.scale == 0.0 else head.gaussian()[2]
    is_open = torch.ones(len(head.query), dtype=torch.bool, device=head.query.device)
    for part in _parts(config, head):
        (out, lse), queries = head.attend(part), part.queries
        if log_factor is not None:
            is_accurate = lse.detach() - log_factor[queries] >= _log_min_denominator(config)
            out, queries = out[is_accurate], queries[is_accurate]
        is_open[queries] = False
        outs.append(out)
        indices.append(queries)
    rest = is_open.nonzero().squeeze(1)
    if len(rest):
        outs.append(head.exact(rest))
        indices.append(rest)
    return torch.cat(outs)[torch.cat(indices).argsort()]


def _naive_head(config: ApproxKMVConfig, head: _Head) -> Tensor:
    """The output (Nq, Dv) of one head, by a dense matrix of weights."""
    query, key, value = head[:3]
    weights = torch.ones(len(query), len(key), dtype=torch.float64, device=query.device)
    scores = (query.double() @ key.double().t() * head.scale).detach()
    for queries, keys, bias in _parts(config, head):
        own = torch.zeros(len(queries), len(key), dtype=torch.float64, device=query.device)
        own.scatter_add_(1, keys, bias.exp())
        if not config.num_samples:
            lse = (scores[queries] + own.log()).logsumexp(1) - head.gaussian()[2][queries]
            own[lse < _log_min_denominator(config)] = 1.0
        weights[queries] = own
    return dense_attention(query[None], key[None], value[None], weights.log()[None], scale=head.scale)[0]


def _by_head(
    form: _Form, config: ApproxKMVConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """Compute one form for each head of each sequence on its valid tokens: (B, H, Nq, Dv)."""
    key_mask, scale, dropout_p = options.key_mask, options.scale, options.dropout_p
    (batch, num_heads, q_len, _), kv_len = query.shape, key.shape[2]
    seed, first = seed_value(options.seed), head_slice(options.seed, num_heads).first
    every, out = torch.arange(max(q_len, kv_len), device=query.device), []
    for b in range(batch):
        own = every[:kv_len] if key_mask is None else key_mask[b].nonzero().squeeze(1)
        # In self-attention a masked token has no query either, and its output is 0.
        rows = own if q_len == kv_len else every[:q_len]
        for h in range(num_heads):
            tensors = query[b, h, rows], key[b, h, own], value[b, h, own]
            of_head = value.new_zeros(q_len, value.shape[3]) + 0.0 * tensors[2].sum()
            if len(own) and len(rows):
                head = _Head(*tensors, scale, dropout_p, seed + _SEED_STEP * (first + h))
                of_head = of_head.index_copy(0, rows, form(config, head))
            out.append(of_head)
    result: Tensor = torch.stack(out).unflatten(0, (batch, num_heads))
    return result


def forward(config: ApproxKMVConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Compute the fast form; see `register_method` for the arguments."""
    if key.shape[2] <= config.num_samples:
        return exact_form(query, key, value, options)
    return _by_head(_forward_head, config, query, key, value, options)


def naive(config: ApproxKMVConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Compute the readable form: the draws of `forward` as a dense matrix of log-weights added to the scores."""
    return _by_head(_naive_head, config, query, key, value, options)


register_method(ApproxKMVConfig, forward=forward, naive=naive)
