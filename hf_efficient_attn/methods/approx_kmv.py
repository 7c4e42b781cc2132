"""ApproxKMV: attention whose numerator and denominator are approximate products with a Gaussian kernel matrix.

"Improved algorithms for kernel matrix-vector multiplication under sparsity assumptions", section 4. A = exp(Q K^T /
sqrt d) equals a Gaussian kernel matrix up to a factor of each row (Lemma 4.1, `products.attention_to_gaussian`), and
this factor cancels in D^-1 A V. So A V and A 1 are products for the paper's Algorithm 3, where x is each column of V
and the vector of ones. It computes exactly the keys that share a bucket of a Euclidean hash with the query and the keys
at the heavy coordinates of x. It estimates the rest from as many uniform draws as the allowed error requires.
`products.plan_product` states which line of the algorithm is which, and where it departs from the paper.

Departures of this method from the paper:

- Numerator and denominator are computed from the same keys with the same weights. An output is therefore a convex
  combination of values, and the errors partly cancel. For the same reason the mean of the draws replaces the median of
  their means, which has neither property.
- The guarantee |K x - y| <= eps |x| holds for all rows together, for a kernel that is at most 1. It says little about a
  row whose denominator is less than 2 eps, so such a row is computed exactly.
- `num_samples` > 0 sets the cost of a query instead of the error, without a guarantee. Half of these keys share the
  most buckets with the query, and the rest is drawn. Up to `num_samples` keys are computed exactly.

The amount of work depends on the data: the error determines the number of draws, rows with a small denominator are
computed exactly, and none or all keys may share a bucket with a query. A bound by shape would count all pairs, or would
cut off buckets and lose the guarantee. Each head of each sequence is a separate problem on its valid tokens, and these
problems are solved one after the other.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.kernel import products
from hf_efficient_attn.methods._shared.config import AttentionOptions, MethodConfig, option
from hf_efficient_attn.methods._shared.heads import without_padding
from hf_efficient_attn.methods._shared.registry import register_method
from hf_efficient_attn.ops import kde
from hf_efficient_attn.ops.backends.devices import accumulation_dtype, in_float64
from hf_efficient_attn.ops.draws import seed_value
from hf_efficient_attn.ops.exact import dense_softmax, exact_attention
from hf_efficient_attn.ops.shards import head_slice

# The probability with which one column of the product may exceed the error.
_DELTA = 0.01
# This many pairs of queries and keys are processed at a time.
_PAIRS = 1 << 17
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
    budget = (("num_samples", 1),)
    exact_budget = ("num_samples",)  # with an allowed error instead, no length is exact
    summary = "products with a Gaussian kernel: near keys by hashing, as many draws of the rest as eps needs"
    paper_url = "https://arxiv.org/abs/2507.23539"
    near = "keys found by hashing"
    far = "samples of the rest, as many as the error bound needs"
    cost = 3.0

    error_percent: int = option(
        30, "Error eps of the products with the kernel, in percent of |x|. Used if num_samples is 0.", minimum=1
    )
    num_samples: int = option(
        0, "Keys that are computed for a query. 0: as many as the error requires, possibly all.", minimum=0
    )
    seed: int = option(0, "Seed of the hash and of the sampling.", minimum=0)


class _Head(NamedTuple):
    """The inputs of one head, query (Nq, D), key (Nk, D) and value (Nk, Dv), and the arguments of the call."""

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    dropout_p: float
    seed: int | Tensor


def _gaussian(head: _Head) -> tuple[Tensor, Tensor, Tensor]:
    """Scale queries and keys to units of the bandwidth, and find the log of the factor of each row of A: (Nq,)."""
    query, key = (x.detach().to(accumulation_dtype(x.dtype)) for x in head[:2])
    queries, keys, bandwidth, log_factor = products.attention_to_gaussian(query, key, scale=head.scale)
    return queries / bandwidth, keys / bandwidth, log_factor  # (Nq, D + 1), (Nk, D + 1), (Nq,)


@in_float64
@torch.no_grad()
def _parts(config: ApproxKMVConfig, head: _Head) -> Iterator[kde.Part]:
    """Yield the keys that are computed for queries of one head. All keys are computed for all other queries."""
    if head.scale == 0.0 or len(head.key) <= config.num_samples:
        return
    queries, keys, _ = _gaussian(head)
    if config.num_samples:
        yield from kde.parts_by_budget(config.num_samples, queries, keys, head.seed)
        return
    x = pad(head.value.detach().to(keys.dtype), (0, 1), value=1.0)  # (Nk, Dv + 1)
    # `delta` is for all columns of the product together.
    delta = min(0.5, _DELTA * x.shape[1])
    plan = products.plan_product(queries, keys, x, eps=config.error_percent / 100, delta=delta, seed=head.seed)
    if isinstance(plan, int):  # the exact product is cheaper
        return
    for block, found, _ in kde.shared_buckets(plan.tables, _PAIRS):
        own = (~plan.whole[block]).nonzero().squeeze(1) + block.start
        most_draws = int(plan.draws[own].max()) if len(own) else 0
        for some in own.split(max(1, _PAIRS // max(1, most_draws))) if len(own) else ():
            yield kde.part_of(some, found, plan.draws[some], plan.light, plan.heavy, head.seed)


def _least_lse(config: ApproxKMVConfig, head: _Head) -> Tensor:
    """Compute the least lse (Nq,) at which the error bound says something about a query: -inf with a budget."""
    if config.num_samples or head.scale == 0.0:
        return head.query.new_full((len(head.query),), -torch.inf)
    return _gaussian(head)[2] + math.log(2 * config.error_percent / 100)


def _forward_head(config: ApproxKMVConfig, head: _Head) -> Tensor:
    """Compute the output (Nq, Dv) of one head."""
    query, key, value, scale, dropout_p, _ = head
    least = _least_lse(config, head)  # (Nq,)
    outs = []
    indices = []
    is_open = torch.ones_like(least, dtype=torch.bool)
    for part in _parts(config, head):
        out, lse = kde.attend_part(query, key, value, part, scale=scale, dropout_p=dropout_p)  # (R, Dv), (R,)
        is_accurate = lse.detach() >= least[part.queries]  # (R,)
        outs.append(out[is_accurate])
        indices.append(part.queries[is_accurate])
        is_open[indices[-1]] = False
    rest = is_open.nonzero().squeeze(1)
    if len(rest):
        rows = query[rest][None]  # (1, R, D)
        outs.append(exact_attention(rows, key[None], value[None], is_causal=False, scale=scale, dropout_p=dropout_p)[0])
        indices.append(rest)
    return torch.cat(outs)[torch.cat(indices).argsort()]  # (Nq, Dv)


def _naive_head(config: ApproxKMVConfig, head: _Head) -> Tensor:
    """Compute the output (Nq, Dv) of one head, with the draws of `_forward_head` as a dense matrix of weights."""
    query, key, value = head[:3]
    least = _least_lse(config, head)
    weights = torch.ones(len(query), len(key), dtype=torch.float64, device=query.device)
    scores = (query.double() @ key.double().t() * head.scale).detach()  # (Nq, D) @ (D, Nk) -> (Nq, Nk)
    for queries, keys, bias in _parts(config, head):  # (R,), (R, M), (R, M)
        own = torch.zeros(len(queries), len(key), dtype=torch.float64, device=query.device)
        own.scatter_add_(1, keys, bias.exp())  # (R, Nk)
        own[(scores[queries] + own.log()).logsumexp(1) < least[queries]] = 1.0
        weights[queries] = own
    return dense_softmax(query.double() @ key.double().t() * head.scale + weights.log(), value)  # (Nq, Dv)


def _each_head(
    form: Callable[[ApproxKMVConfig, _Head], Tensor], config: ApproxKMVConfig, num_heads: int, options: AttentionOptions
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a function that calls a form for each head, for sequences without padding: (BH, ., .) -> (BH, Nq, Dv)."""
    seed = seed_value(options.seed)
    first = head_slice(options.seed, num_heads).first

    def of_one_length(query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # (BH, N, .)
        seeds = (seed + _SEED_STEP * (first + h % num_heads) for h in range(len(query)))
        heads = zip(query, key, value, seeds, strict=True)
        given = options.scale, options.dropout_p
        return torch.stack([form(config, _Head(q, k, v, *given, own)) for q, k, v, own in heads])  # (BH, Nq, Dv)

    return of_one_length


def forward(config: ApproxKMVConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Fast form; see `register_method`."""
    form = _each_head(_forward_head, config, query.shape[1], options)
    return without_padding(form, query, key, value, options, config.num_samples)  # (B, H, Nq, Dv)


def naive(config: ApproxKMVConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form: the draws of `forward` as a dense matrix of weights."""
    return without_padding(_each_head(_naive_head, config, query.shape[1], options), query, key, value, options)


register_method(ApproxKMVConfig, forward=forward, naive=naive)
