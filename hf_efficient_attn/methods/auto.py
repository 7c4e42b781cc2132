"""auto (this package): exact attention where approximation does not pay or is not accurate enough, else nearfar.

- Up to a length, attention is exact. The length follows from the crossover of nearfar on this machine
  (`hf-efficient-attn crossover`). It is greater, because more landmarks, small heads and failed attempts cost time.
- In longer sequences the error of each head is bounded from the exact rows of some queries. The output is not corrected
  by these queries. A head whose bound exceeds `max_error` gets more columns or stays exact (`ops.nearfar.attempts`).
  Fewer than 448 queries are too few for a bound, so that all heads are exact.
- These decisions depend on the data of a call. In training, and in the causal form, in which later tokens would decide
  about earlier ones, every head has `columns` columns, or all heads are exact (`static_form`).

The crossover applies to one sequence, so each sequence of a padded batch is judged by its own number of tokens. The
causal form uses the padded length, because the number of later tokens must not matter.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.config import AttentionOptions, MethodConfig, option
from hf_efficient_attn.methods._shared.crossover import LARGE_DIM, crossover_length
from hf_efficient_attn.methods._shared.heads import decode_exactly, exactly, is_training, without_padding
from hf_efficient_attn.methods._shared.registry import get_method, make_config, register_method
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.nearfar import attempts
from hf_efficient_attn.ops.nearfar.within_bound import Forms, Heads, attend_within_bound
from hf_efficient_attn.ops.shards import head_slice

# Lengths are measured for this head_dim. With 32 approximation costs 1.07 times as much of exact attention.
_HEAD_DIM = 64
_HEAD_POWER = 0.1
_COST = 1.15 / 256  # of each column of `_approximation`, relative to nearfar with its default hyperparameters
# Queries of a group, in at least 16 groups. Few groups with many near keys each cost less at the same error.
_GROUP = 256
# What a head may miss without near keys (`near_share`, in the Frobenius norm), relative to the bound in the operator
# norm. With .5 the last hidden states of MiniLM with 8,192 tokens are off by .041, with .8 by .049 in .96 of the time.
_NEAR_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class AutoAttentionConfig(MethodConfig):
    """Hyperparameters of auto. Sequences in which approximation does not pay are computed exactly."""

    method = "auto"
    title = "auto"
    paper = "this package"
    year = 2026
    causal = True
    rectangular = True
    budget = (("columns", 1),)  # heads above the error bound get more
    decodes_exactly = True
    knows_lse = True
    summary = "exact attention where it is faster or an error bound asks for it, else nearfar"
    near = "as `nearfar`, or all keys"
    far = "as `nearfar`, or none"
    default_rank = 1
    default_for = ("compare", "demo")
    switches_to = "nearfar"

    columns: int = option(256, "Near keys and landmarks of each query, before a head gets more.", minimum=1)
    max_error: float = option(
        0.1, "Bound of each head's relative error in the operator norm. 0: no bound, `columns` for all.", minimum=0
    )
    crossover: int = option(
        0,
        "Number of keys up to which attention is exact. In longer sequences a head is approximated only if the bound "
        "is expected to hold and to save time: few heads are in sequences that are hardly longer. 0: a number that "
        "follows from the crossover of nearfar on this machine and is greater. `crossover` prints both.",
        minimum=0,
    )
    static_form: str = option(
        "columns",
        "Attention in longer sequences where the data must not decide, in training and in the causal form: exact, or "
        "`columns` for all heads.",
        choices=("columns", "exact"),
    )
    seed: int = option(0, "Seed of the landmarks and of the queries that bound the error.", minimum=0)

    @property
    def exact_length(self) -> int:
        """The number of keys up to which every call is exact, on this machine's processor and in float32."""
        return self.exact_up_to(LARGE_DIM // _HEAD_DIM, _HEAD_DIM, torch.float32, False, torch.device("cpu"))

    def exact_up_to(
        self, num_heads: int, head_dim: int, dtype: torch.dtype, is_causal: bool, device: torch.device
    ) -> int:
        """Return the number of keys up to which calls of this size, dtype and device are exact."""
        if self.crossover:
            return max(self.crossover, self.columns)
        cost = _COST * self.columns * (_HEAD_DIM / head_dim) ** _HEAD_POWER
        length = crossover_length(
            self.switches_to, num_heads * head_dim, dtype=dtype, is_causal=is_causal, device=device, relative_cost=cost
        )
        if self.max_error and not is_causal:
            length = attempts.worthwhile_length(length)
        return max(length, self.columns)

    def to_measure(self) -> "AutoAttentionConfig":
        """Return a copy with `columns` columns for all heads at every length."""
        return dataclasses.replace(self, max_error=0.0, crossover=1, static_form="columns")

    def calibrated(self, max_error: float, accepted: bool) -> "AutoAttentionConfig":
        """Return a copy with the bound `max_error`, exact in the static form if `columns` were not accepted."""
        return dataclasses.replace(self, max_error=max_error, static_form="columns" if accepted else "exact")


def _approximation(config: AutoAttentionConfig, columns: int, q_len: int, kv_len: int) -> MethodConfig:
    """Make a nearfar config: a budget of `columns`, or with a bound `columns` landmarks and more near keys."""
    if not config.max_error:
        return _with_budget(columns)
    sizes = {"num_samples": columns, "num_groups": max(16, q_len // _GROUP), "num_probes": attempts.NUM_PROBES}
    sizes["block_size"] = min(4 * columns, max(5 * columns // 4, kv_len // 4))
    share = min(1.0, _NEAR_SHARE * config.max_error)
    return make_config(_with_budget(columns), **sizes, num_candidates=max(4096, 8 * columns), near_share=share)


def _with_budget(columns: int) -> MethodConfig:
    return make_config(AutoAttentionConfig.switches_to).with_budget(columns)


def _exact_length(
    config: AutoAttentionConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> tuple[int, bool]:
    """Return the number of keys up to which a call is exact, and whether the data must not decide."""
    kv_len = key.shape[2]
    is_static = options.is_causal or not config.max_error or is_training(query, key, value, options)
    if kv_len <= config.columns or (is_static and config.max_error and config.static_form == "exact"):
        return kv_len, is_static
    num_heads = head_slice(options.seed, query.shape[1]).total
    return config.exact_up_to(num_heads, query.shape[3], query.dtype, options.is_causal, query.device), is_static


def _forms(config: AutoAttentionConfig, length: int, options: AttentionOptions, device: torch.device) -> Forms:
    """Make the two forms of heads (BH, N, .). Heads are passed as sequences, so all have the same random numbers."""
    options = options._replace(key_mask=None)

    def approximate(query: Tensor, key: Tensor, value: Tensor, columns: int) -> Tensor:
        form = get_method(config.switches_to).forward
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))  # (BH, 1, N, .)
        chosen = _approximation(config, columns, query.shape[2], key.shape[2])
        return form(chosen, query, key, value, options)[:, 0]  # (BH, Nq, Dv)

    def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return exactly(query[None], key[None], value[None], options)[0]  # (BH, Nq, Dv)

    length = attempts.worthwhile_length(length) if config.crossover else length  # attempts are cheap from here on
    draws = Draws(options.seed, device)
    return Forms(approximate, exact, config.max_error, config.columns, length, draws, options.with_lse)


def forward(
    config: AutoAttentionConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """Fast form; see `register_method`."""
    length, is_static = _exact_length(config, query, key, value, options)
    num_heads = query.shape[1]
    if key.shape[2] <= length:
        return exactly(query, key, value, options)
    if options.is_causal:  # the number of later tokens must not matter
        return get_method(config.switches_to).forward(_with_budget(config.columns), query, key, value, options)
    forms = _forms(config, length, options, query.device)

    def of_one_length(query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # (BH, N, .)
        if key.shape[1] <= length:
            return forms.exact(query, key, value)
        if is_static:
            return forms.approximate(query, key, value, config.columns)
        return attend_within_bound(Heads(query, key, value), forms, num_heads, options.scale)[0]  # (BH, Nq, Dv)

    return without_padding(of_one_length, query, key, value, options)  # (B, H, Nq, Dv)


def naive(config: AutoAttentionConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form: dense matrices, with the decisions of `forward` about each sequence and head."""
    length, is_static = _exact_length(config, query, key, value, options)
    num_heads = query.shape[1]
    dense = get_method(config.switches_to).naive
    forms = _forms(config, length, options, query.device)
    if options.is_causal:
        count = key.shape[2] if key.shape[2] <= length else config.columns  # as many columns as keys are exact
        return dense(_with_budget(count), query, key, value, options)

    def of_one_length(query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # (BH, N, .)
        heads = Heads(query, key, value)
        counts = [config.columns if key.shape[1] > length else 0] * len(query)
        if key.shape[1] > length and not is_static:
            counts = attend_within_bound(heads, forms, num_heads, options.scale)[1].tolist()
        own = [_approximation(config, count or key.shape[1], query.shape[1], key.shape[1]) for count in counts]
        every = zip(own, *(x[:, None, None] for x in heads), strict=True)  # (1, 1, N, .) each
        return torch.cat([dense(c, q, k, v, options._replace(key_mask=None)) for c, q, k, v in every], 1)[0]

    return without_padding(of_one_length, query, key, value, options)  # (B, H, Nq, Dv)


register_method(AutoAttentionConfig, forward=forward, naive=naive, decode=decode_exactly)
