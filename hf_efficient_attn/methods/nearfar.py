"""nearfar (this package): near keys exactly, and landmarks for all other keys.

`hf_efficient_attn.ops.nearfar.bidirectional` describes the bidirectional form. Landmarks, which are means of clusters
of keys, stand for all keys. In heads for which this is not enough, groups of similar queries attend exactly to the keys
with the largest scores. On activations of BERT (MiniLM) with 512 tokens and 128 columns, the error is .024 (`python -m
recipes.benchmarks.error`).

`hf_efficient_attn.ops.nearfar.causal` describes the causal form, in which no choice, mean or fit depends on later
tokens. It takes the budget, block_size + num_samples, as a whole. Up to so many keys it is exact. Beyond them a query
attends to one to two blocks of half the budget, to landmarks, of which it sees more the longer the sequence is, and to
clusters of an eighth of the budget that it chooses. All other hyperparameters are of the bidirectional form.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from hf_efficient_attn.methods._shared.config import AttentionOptions, MethodConfig, option, refuse
from hf_efficient_attn.methods._shared.heads import by_heads, decode_exactly, without_padding
from hf_efficient_attn.methods._shared.registry import register_method
from hf_efficient_attn.ops.distance import Bias
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.exact import dense_softmax
from hf_efficient_attn.ops.nearfar.biased import biased_nearfar_attention, biased_nearfar_naive
from hf_efficient_attn.ops.nearfar.bidirectional import nearfar_attention, nearfar_naive
from hf_efficient_attn.ops.nearfar.causal import causal_nearfar_attention, causal_nearfar_naive
from hf_efficient_attn.ops.nearfar.chunks import split_columns
from hf_efficient_attn.ops.nearfar.landmarks import NearFarOptions

# The default of `near_share`, all heads, and none.
_SHARES = (0.25, 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class NearFarConfig(MethodConfig):
    """Hyperparameters of nearfar. Up to block_size + num_samples keys the output is exact."""

    method = "nearfar"
    title = "nearfar"
    paper = "this package"
    year = 2026
    causal = True
    rectangular = True
    exact_budget = ("block_size", "num_samples")
    decodes_exactly = True
    knows_lse = True
    adds_distance_bias = True
    summary = "the keys with the largest scores exactly, and landmarks for all other keys"
    near = "keys with the largest scores"
    far = "landmarks of clusters"
    default_rank = 5
    default_for = ("compare", "demo", "calibrate")

    block_size: int = option(160, "Keys that a group of queries attends to exactly.", minimum=0)
    num_samples: int = option(96, "Landmarks that stand for all keys.", minimum=1)
    num_groups: int = option(128, "Groups of queries, rounded down to a power of two.", minimum=1)
    num_candidates: int = option(
        2048, "Evenly spaced keys from which landmarks are made, at least as many as landmarks.", minimum=1
    )
    num_refinements: int = option(1, "Steps of Lloyd's algorithm for the landmarks.", minimum=0)
    num_probes: int = option(192, "Queries whose exact rows correct the output.", minimum=0)
    near_share: float = option(
        _SHARES[0],
        "A head has near keys if landmarks alone miss more than this share of its output, measured on a few queries. "
        "0: all heads; 1: no head.",
        minimum=0,
    )
    seed: int = option(0, "Seed of the landmarks.", minimum=0)

    def check_causal(self) -> None:
        """The causal form has the budget as its only hyperparameter."""
        usual = NearFarConfig()
        # `with_budget` sets a `near_share` of 0, and may enlarge the groups and the candidates.
        allowed = {
            "num_groups": self.num_groups >= usual.num_groups,
            "num_candidates": self.num_candidates >= usual.num_candidates,
            "num_refinements": self.num_refinements == usual.num_refinements,
            "num_probes": self.num_probes in (0, usual.num_probes),
            "near_share": self.near_share in (0, usual.near_share),
        }
        for name, is_allowed in allowed.items():
            value = getattr(self, name)
            if not is_allowed:
                refuse(
                    f"{name}={value!r} has no effect in the causal form: leave it at its default, or give the layers "
                    "of a decoder hyperparameters of their own",
                    self,
                )

    def with_budget(self, columns: int) -> "NearFarConfig":
        """Spend five eighths of the budget on near keys (`block_size`) and the rest on landmarks (`num_samples`).

        `near_share` becomes 0, because a head without near keys costs less than the budget. So the copy for 256 has the
        sizes of the default config, but near keys in all heads: a smaller error in more time. `num_groups` and
        `num_candidates` grow with the budget if they are smaller.

        The causal form attends to more than the budget: to half of it up to all of it in its window, to landmarks
        whose number grows with the length, and to up to 47 clusters, but to 5 to 10 on activations of GPT-2
        and MiniLM, of an eighth of the budget each.
        """
        near = 5 * self.check_budget(columns) // 8
        groups = max(self.num_groups, columns // 2)
        candidates = max(self.num_candidates, 8 * columns)
        config = dataclasses.replace(self, block_size=near, num_samples=columns - near, num_groups=groups)
        return dataclasses.replace(config, num_candidates=candidates, near_share=0.0)

    def variants(self) -> tuple[Mapping[str, float], ...]:
        """Shares of heads with near keys, unless another share than the default is given."""
        shares = _SHARES if self.near_share == _SHARES[0] else (self.near_share,)
        return tuple({"near_share": share} for share in shares)


def _nearfar_options(config: NearFarConfig, query: Tensor, options: AttentionOptions) -> NearFarOptions:
    own = {x: getattr(config, x) for x in NearFarOptions._fields if hasattr(config, x)}
    own |= {"num_candidates": max(config.exact_length, config.num_candidates)}
    own["draws"] = Draws(options.seed, query.device)
    return NearFarOptions(**own, scale=options.scale, dropout_p=options.dropout_p, with_lse=options.with_lse)


def forward(config: NearFarConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Fast form; see `register_method`."""
    if not options.is_causal:
        form = nearfar_attention if options.distance_bias is None else biased_nearfar_attention
        form = functools.partial(form, options=_nearfar_options(config, query, options))
        return without_padding(form, query, key, value, options, config.exact_length)  # (B, H, Nq, Dv)
    chosen = split_columns(config.exact_length, options.scale, options.dropout_p, options.with_lse)
    if options.key_mask is None:  # otherwise tokens move to the front
        chosen = chosen._replace(first_query=options.first_query)
    form = functools.partial(causal_nearfar_attention, options=chosen)
    return by_heads(form, query, key, value, options, config.exact_length, moves_valid_first=True)  # (B, H, N, Dv)


def naive(config: NearFarConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form."""
    scale = options.scale
    chosen = _nearfar_options(config, query, options)
    if options.is_causal:
        sizes = split_columns(config.exact_length, scale, with_lse=options.with_lse)
        form = functools.partial(causal_nearfar_naive, options=sizes)
        return by_heads(form, query, key, value, options, moves_valid_first=True)

    def of_one_length(query: Tensor, key: Tensor, value: Tensor, *bias: Bias) -> Tensor:  # (BH, N, .)
        if key.shape[1] > config.exact_length:
            if bias:
                return biased_nearfar_naive(query, key, value, bias[0], chosen)
            return nearfar_naive(query, key, value, chosen)
        scores = scale * query.double() @ key.double().mT + (bias[0].of_pairs() if bias else 0.0)  # (BH, Nq, Nk)
        return dense_softmax(scores, value.double(), with_lse=options.with_lse)  # (BH, Nq, Dv)

    return without_padding(of_one_length, query, key, value, options)  # (B, H, Nq, Dv)


register_method(NearFarConfig, forward=forward, naive=naive, decode=decode_exactly)
