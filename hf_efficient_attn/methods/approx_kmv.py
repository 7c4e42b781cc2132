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

The amount of work depends on the data, so torch.compile does not support it, and on an accelerator every head waits for
the device several times. This follows from the definition. The number of draws is the one that the error of this data
requires, and rows with a small denominator are computed exactly. The keys that share a bucket with a query may be none
or all, also with `num_samples`, which keeps those that share most buckets: to find them, all pairs in a bucket are
counted. A bound by shape would be that of all pairs, or would cut off buckets and lose the guarantee. Each head of each
sequence is a separate problem on its valid tokens, and they are solved one after the other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_efficient_attn.kernel import products
from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.heads import flatten_heads, unflatten_heads
from hf_efficient_attn.methods._shared.registry import AttentionOptions, register_method
from hf_efficient_attn.ops import kde
from hf_efficient_attn.ops.exact import exact_attention
from hf_efficient_attn.ops.near_far import dense_attention
from hf_efficient_attn.ops.partial import accumulation_dtype, partial_attention
from hf_efficient_attn.ops.random import head_slice, seed_value, uniform

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
        queries: int64 (R,), the queries.
        keys: int64 (R, M), the keys of each query.
        bias: (R, M), the log-weights of the keys, which are added to the scores; -inf for an unused entry.
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

    def exact(self, queries: Tensor | None = None) -> Tensor:
        """Exact attention of all queries, or of those at the indices `queries` (R,): (R, Dv)."""
        query = self.query if queries is None else self.query[queries]
        tensors = (x[None] for x in (query, self.key, self.value))
        return exact_attention(*tensors, is_causal=False, scale=self.scale, dropout_p=self.dropout_p)[0]

    def log_factor(self) -> Tensor:
        """The log of the ratio of each row of A to the row of its Gaussian kernel: (Nq,)."""
        acc_dtype = accumulation_dtype(self.query.dtype)
        query, key = self.query.detach().to(acc_dtype), self.key.detach().to(acc_dtype)
        _, _, _, log_factor = products.attention_to_gaussian(query, key, scale=self.scale)
        return log_factor


_Form: TypeAlias = Callable[[ApproxKMVConfig, _Head], Tensor]


def _parts(config: ApproxKMVConfig, head: _Head) -> Iterator[_Part] | None:
    """The keys that are computed for the queries of one head; None if all keys are computed for all queries."""
    if head.scale == 0.0 or 0 < len(head.key) <= config.num_samples:
        return None
    acc_dtype = accumulation_dtype(head.query.dtype)
    query, key, value = (x.detach().to(acc_dtype) for x in head[:3])
    queries, keys, bandwidth, _ = products.attention_to_gaussian(query, key, scale=head.scale)
    queries, keys = queries / bandwidth, keys / bandwidth
    if config.num_samples:
        return _parts_by_budget(config.num_samples, queries, keys, head.seed)
    x = torch.cat((value, value.new_ones(len(value), 1)), 1)
    # `delta` is for all columns of the product together.
    delta, eps = min(0.5, _DELTA * x.shape[1]), config.error_percent / 100
    plan = products.plan_product(queries, keys, x, eps=eps, delta=delta, seed=head.seed, sums=False)
    return None if isinstance(plan, int) else _parts_by_error(plan, head.seed)


def _parts_by_error(plan: products.Plan, seed: int | Tensor) -> Iterator[_Part]:
    """The queries of a plan that are not computed exactly, with the keys that the plan chooses."""
    num_light = len(plan.light)
    for block, found, _ in kde.shared_buckets(plan.tables, _PAIRS):
        queries = torch.arange(block.start, block.stop, device=found.device)
        queries = queries[~plan.whole[queries]]
        most_draws = max(1, int(plan.draws[queries].max()) if len(queries) else 1)
        for part in queries.split(max(1, _PAIRS // most_draws)):
            # `found` holds each pair of a query and a light key as query * num_light + key.
            own = found[(found // num_light >= part[0]) & (found // num_light <= part[-1])]
            own = own[torch.isin(own // num_light, part)]
            drawn, used = products.draw_columns(plan.draws[part], part, found, num_light, seed, _DRAWS)
            log_weight = (num_light / plan.draws[part]).log()[:, None].expand(drawn.shape)
            log_weight = log_weight.masked_fill(~used, -torch.inf)
            near, bias = _pad(torch.searchsorted(part, own // num_light), own % num_light, len(part))
            keys = torch.cat((plan.heavy.expand(len(part), -1), plan.light[near], plan.light[drawn]), 1)
            heavy_bias = bias.new_zeros(len(part), len(plan.heavy))
            yield _Part(part, keys, torch.cat((heavy_bias, bias, log_weight.to(bias.dtype)), 1))


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
    for block, found, times in kde.shared_buckets(tables, _PAIRS):
        # Of the keys of each query keep those that it meets in most tables.
        order = (found // num_keys * (_TABLES + 1) + _TABLES - times).argsort(stable=True)
        row = found[order] // num_keys - block.start
        kept = found[order[_rank_in_group(row, block.stop - block.start) < budget // 2]].sort().values
        for part in torch.arange(block.start, block.stop, device=device).split(max(1, _PAIRS // budget)):
            own = kept[(kept // num_keys >= part[0]) & (kept // num_keys <= part[-1])]
            near, bias = _pad(own // num_keys - part[0], own % num_keys, len(part))
            draws = budget - (bias == 0).sum(1)
            drawn, used = products.draw_columns(draws, part, own, num_keys, seed, _DRAWS)
            log_weight = (num_keys / draws).log()[:, None].expand(drawn.shape).masked_fill(~used, -torch.inf)
            yield _Part(part, torch.cat((near, drawn), 1), torch.cat((bias, log_weight.to(bias.dtype)), 1))


def _rank_in_group(group: Tensor, num_groups: int) -> Tensor:
    """The rank of each element among the elements of its group, for a sorted `group` (P,): (P,)."""
    sizes = torch.bincount(group, minlength=num_groups)
    return torch.arange(len(group), device=group.device) - (sizes.cumsum(0) - sizes)[group]


def _pad(row: Tensor, key: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Turn pairs (P,) of a row and a key, sorted by row, into keys (R, M) and a bias (R, M): 0, or -inf for padding."""
    shape = (num_rows, int(torch.bincount(row, minlength=num_rows).max()) if len(row) else 0)
    rank = _rank_in_group(row, num_rows)
    keys = row.new_zeros(shape)
    keys[row, rank] = key
    bias = torch.full(shape, -torch.inf, dtype=torch.float64, device=row.device)
    bias[row, rank] = 0.0
    return keys, bias


def _attend_part(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, bias: Tensor, scale: float, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Attention of queries (R, D) to the keys at the indices `keys` (R, M): the output (R, Dv) and its lse (R,)."""
    bias = bias.to(accumulation_dtype(query.dtype))[None, :, None]
    part = partial_attention(
        query[None, :, None], key[keys][None], value[keys][None], bias, scale=scale, dropout_p=dropout_p
    )
    return part.out[0, :, 0], part.lse[0, :, 0]


def _fast_head(config: ApproxKMVConfig, head: _Head) -> Tensor:
    """The output (Nq, Dv) of one head."""
    query, key, value = head[:3]
    with torch.no_grad():
        parts = _parts(config, head)
    if parts is None:
        return head.exact()
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    log_factor = None if config.num_samples else head.log_factor()
    outs, indices = [], []
    is_open = torch.ones(len(query), dtype=torch.bool, device=query.device)
    while True:
        with torch.no_grad():
            part = next(parts, None)
        if part is None:
            break
        queries = part.queries
        arguments = (query[queries], key, value, part.keys, part.bias, head.scale, head.dropout_p)
        # Checkpointing, because autograd would otherwise keep a copy of the keys of every query.
        out, lse = checkpoint(_attend_part, *arguments, use_reentrant=False) if needs_grad else _attend_part(*arguments)
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


def _log_min_denominator(config: ApproxKMVConfig) -> float:
    """The log of the smallest denominator, in units of the kernel, of a query that is not computed exactly."""
    return torch.tensor(2 * config.error_percent / 100, device="cpu").log().item()


def _naive_head(config: ApproxKMVConfig, head: _Head) -> Tensor:
    """The output (Nq, Dv) of one head, by a dense matrix of weights."""
    query, key, value = head[:3]
    weights = torch.ones(len(query), len(key), dtype=torch.float64, device=query.device)
    with torch.no_grad():
        scores = query.double() @ key.double().t() * head.scale
        for queries, keys, bias in _parts(config, head) or ():
            own = torch.zeros(len(queries), len(key), dtype=torch.float64, device=query.device)
            own.scatter_add_(1, keys, bias.exp())
            if not config.num_samples:
                lse = (scores[queries] + own.log()).logsumexp(1) - head.log_factor()[queries]
                own[lse < _log_min_denominator(config)] = 1.0
            weights[queries] = own
    return dense_attention(query[None], key[None], value[None], weights.log()[None], scale=head.scale)[0]


def _by_head(
    form: _Form, config: ApproxKMVConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """Compute one form for each head of each sequence on its valid tokens: (B, H, Nq, Dv)."""
    key_mask, scale, dropout_p = options.key_mask, options.scale, options.dropout_p
    shape, q_len, kv_len = query.shape, query.shape[2], key.shape[2]
    if kv_len <= config.num_samples:
        query, key, value, key_mask = flatten_heads(query, key, value, key_mask)
        out = exact_attention(query, key, value, key_mask, is_causal=False, scale=scale, dropout_p=dropout_p)
        return unflatten_heads(out, shape)
    outs, seed, first = [], seed_value(options.seed), head_slice(options.seed, shape[1]).first
    for b in range(shape[0]):
        valid = None if key_mask is None else key_mask[b].nonzero().squeeze(1)
        # In self-attention a masked token has no query either, and its output is 0.
        valid_queries = valid if q_len == kv_len else None
        for h in range(shape[1]):
            q, k, v = query[b, h], key[b, h], value[b, h]
            if valid is not None:
                q, k, v = q if valid_queries is None else q[valid_queries], k[valid], v[valid]
            if len(k) and len(q):
                out = form(config, _Head(q, k, v, scale, dropout_p, seed + _SEED_STEP * (first + h)))
            else:
                out = v.new_zeros(len(q), v.shape[1]) + 0.0 * v.sum()
            if valid_queries is not None:
                out = out.new_zeros(q_len, v.shape[1]).index_copy(0, valid_queries, out)
            outs.append(out)
    return unflatten_heads(torch.stack(outs), shape)


def forward(config: ApproxKMVConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Compute the fast form; see `register_method` for the arguments."""
    return _by_head(_fast_head, config, query, key, value, options)


def naive(config: ApproxKMVConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Compute the readable form: the draws of `forward` as a dense matrix of log-weights added to the scores."""
    return _by_head(_naive_head, config, query, key, value, options)


register_method(ApproxKMVConfig, forward=forward, naive=naive)
