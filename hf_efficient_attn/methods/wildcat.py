"""WildCat (Schroeder, Mackey, ICML 2026): all queries attend to one weighted coreset of keys.

How the paper's quantities correspond to the code, with beta the scale of the scores:

- The keys are centered, which changes no softmax.
- The coreset S is chosen by randomly pivoted Cholesky on the kernel exp(beta / tau^2 <k, k'>)
  (`hf_efficient_attn.ops.wildcat`).
- Nystrom weights, which best approximate the feature of every key by the features of the coreset:
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
- The inverse has a ridge of 1e-3, for kernels that are scaled to a unit diagonal. The columns of W for the coreset's
  own keys are those of the identity, as without a ridge.
- With up to `num_samples` keys the output is exact attention.

There is no causal form, because the coreset contains keys of the future. Dropout acts on the weights of the coreset in
the numerator.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hf_efficient_attn.methods._shared.config import AttentionOptions, MethodConfig, option
from hf_efficient_attn.methods._shared.heads import without_padding
from hf_efficient_attn.methods._shared.registry import register_method
from hf_efficient_attn.ops.backends.devices import accumulation_dtype
from hf_efficient_attn.ops.clusters import even_positions
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.exact import dense_softmax
from hf_efficient_attn.ops.index import take
from hf_efficient_attn.ops.thinning import choose_pivots
from hf_efficient_attn.ops.wildcat import Coreset, attend_to_coreset, coreset_naive, kernel_scale_of


@dataclass(frozen=True, kw_only=True)
class WildCatConfig(MethodConfig):
    """Hyperparameters of WildCat. With up to num_samples keys the output is exact."""

    method = "wildcat"
    title = "WildCat"
    paper = "Schroeder and Mackey, ICML 2026"
    year = 2026
    causal = False
    rectangular = True
    exact_budget = ("num_samples",)
    knows_lse = True
    summary = "attention to a coreset of keys whose weights make up for all other keys"
    paper_url = "https://arxiv.org/abs/2602.10056"
    near = "none"
    far = "a coreset of keys with Nystrom weights"
    cost = 0.75

    num_samples: int = option(256, "Keys in the coreset.", minimum=1)
    num_candidates: int = option(
        1024, "Evenly spaced keys from which the coreset is chosen, at least num_samples.", minimum=1
    )
    seed: int = option(0, "Seed of the choice of the coreset.", minimum=0)

    def with_budget(self, columns: int) -> "WildCatConfig":
        """Return a copy with as many keys in the coreset as the budget has, and four times as many candidates.

        These are `num_samples` and `num_candidates`. The choice of the coreset itself is not counted. With as many
        queries as keys, its weights cost as much as the queries.
        """
        return replace(self, num_samples=self.check_budget(columns), num_candidates=min(4 * columns, 2**31 - 1))


def _choose(config: WildCatConfig, query: Tensor, key: Tensor, num_heads: int, options: AttentionOptions) -> Coreset:
    """Choose the coreset of keys (BH, n, D) for queries (BH, Nq, D)."""
    mean = key.mean(1, keepdim=True, dtype=accumulation_dtype(key.dtype))
    num_candidates = min(key.shape[1], max(config.num_samples, config.num_candidates))
    positions = even_positions(key.shape[1], num_candidates, key.device)  # (C,)
    candidates = key.index_select(1, positions) - mean  # (BH, C, D)
    factor = kernel_scale_of(query, candidates, options.scale)  # (BH, 1, 1)
    batch = len(key) // num_heads
    draws = Draws(options.seed, key.device)
    pivot, _ = choose_pivots(candidates * factor.sqrt(), None, config.num_samples, draws=draws, batch=batch)  # (BH, m)
    return Coreset(positions[pivot], take(candidates, pivot), factor, mean)


def forward(config: WildCatConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Fast form; see `register_method`."""
    num_heads = query.shape[1]
    call: dict[str, Any] = {"scale": options.scale, "dropout_p": options.dropout_p, "with_lse": options.with_lse}

    def form(query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # (BH, N, .)
        coreset = _choose(config, query, key, num_heads, options)
        return attend_to_coreset(query, key, value, coreset, **call)  # (BH, Nq, Dv)

    return without_padding(form, query, key, value, options, config.num_samples)  # (B, H, Nq, Dv)


def naive(config: WildCatConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form, with dense weights of all keys."""
    num_heads = query.shape[1]

    def form(query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # (BH, N, .)
        query, key, value = (x.double() for x in (query, key, value))
        if key.shape[1] <= config.num_samples:
            return dense_softmax(options.scale * query @ key.mT, value, with_lse=options.with_lse)  # (BH, Nq, Dv)
        coreset = _choose(config, query, key, num_heads, options)
        return coreset_naive(query, key, value, coreset, scale=options.scale, with_lse=options.with_lse)  # (BH, Nq, Dv)

    return without_padding(form, query, key, value, options)  # (B, H, Nq, Dv)


register_method(WildCatConfig, forward=forward, naive=naive)
