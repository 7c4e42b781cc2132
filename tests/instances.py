"""The list of method instances for all parametrised tests.

A new method adds its instances here. Every promise, every comparison of the fast form with the readable form and every
check of a config then runs on them. Their budgets are so small that sequences of 30 to 300 tokens are approximated.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partialmethod
from typing import Any

import torch
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.methods._shared import registry
from hf_efficient_attn.ops.features.maps import LEARNED
from hf_efficient_attn.ops.nearfar import attempts

# The tests run in several processes and their tensors are small, so each process uses one thread.
torch.set_num_threads(1)
# With as many rows as users have, to bound the error of a head would cost more than exact attention at most lengths of
# the tests, so that all heads would be exact.
attempts.NUM_PROBES = attempts.NUM_ROWS = 8


_COST = dict.fromkeys(
    ("block_size", "window_size", "global_tokens", "num_samples", "num_features", "num_landmarks", "projection_dim"), 1
)


@dataclass(frozen=True, repr=False)
class Instance:
    """One method with the hyperparameters under test.

    Attributes:
        method: the name of the method.
        hyperparameters: those that differ from the defaults.
        small: hyperparameters of `reduced` that differ from what `with_budget` sets.
        limit: "exact" if `with_budget` of the whole sequence gives exact attention, "bounded" if in addition a head is
            exact whose error would exceed a bound, "expectation" if the error only decreases with the budget, "none" if
            the method defines its own attention.
        random: whether the seed has an effect; None if that is unknown.
        draws_causally: whether it has one in the causal form as well.
        reads_positions: whether masked tokens inside the sequence still count in the distances between the others.
        averages: whether the weights of a query are positive and sum to 1.
        skips_masked_queries: whether the outputs of masked tokens are 0 when queries and keys are the same tokens.
        square: whether it needs as many queries as keys, although the method has a rectangular form.
        call_seed: whether the seed of a call has the same effect as that of the config.
        data_dependent: whether the amount of work depends on the data.
        switches: whether the causal form is exact up to a length at which it is not exact in longer sequences. Then a
            sequence has another output alone than in a batch with longer ones.
        splits_scale: whether queries and keys are both multiplied by sqrt(scale), so that draws depend on both.
        core: whether the core suite has the row although it is not the first of its method.
        cost: hyperparameter -> how many keys one unit of it costs a query, for those that `with_budget` sets.
        facts: config -> those of the values above that depend on hyperparameters.
        adapt: (query, key, value, mask) -> the tensors and options of the call, for `VARIANTS`.
    """

    method: str
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    small: dict[str, Any] = field(default_factory=dict)
    limit: str = "none"
    random: bool | None = False
    draws_causally: bool = True
    reads_positions: bool = False
    averages: bool = True
    skips_masked_queries: bool = False
    square: bool = False
    call_seed: bool = True
    data_dependent: bool = False
    switches: bool = False
    splits_scale: bool = False
    core: bool = False
    cost: dict[str, int] = field(default_factory=lambda: dict(_COST))
    facts: Callable[[Any], dict[str, Any]] = lambda config: {}
    adapt: Callable[..., tuple] = lambda query, key, value, mask: ((query, key, value), {})

    def __str__(self) -> str:
        values = ",".join(str(v) for v in self.hyperparameters.values())
        return f"{self.method}({values})" if values else self.method

    def __repr__(self) -> str:
        return f"FIRST[{self.method!r}].vary({self.hyperparameters})"

    @property
    def info(self):
        return hea.method_info(self.method)

    @property
    def budget(self) -> int:
        """The length of the longest sequence that is computed exactly; 0 if the method never switches by length."""
        return self.config().exact_length

    @property
    def exact_steps(self) -> bool:
        """Whether decoding attends to all keys exactly instead of approximating as on the whole sequence."""
        return self.config().decodes_exactly

    @property
    def reduced(self) -> "Instance":
        """The method with so small a budget that even 13 tokens are approximated, for tests of gradients."""
        config = self.config()
        values = dataclasses.asdict(config.with_budget(9 + getattr(config, "global_tokens", 0))) | self.small
        return dataclasses.replace(self, hyperparameters=values)

    @property
    def rectangular(self) -> bool:
        """Whether the number of keys may differ from that of queries."""
        return self.info.rectangular and not self.square

    @property
    def forms(self) -> tuple[bool, ...]:
        """The values of `is_causal` that the method supports."""
        return (False, True) if self.info.causal and not self.switches else (False,)

    def config(self, **changes):
        return self.info.config_class(**{**self.hyperparameters, **changes})

    def row(self, **hyperparameters: Any) -> "Instance":
        """The method with more hyperparameters, and what is known about it with these."""
        hyperparameters = {**self.hyperparameters, **hyperparameters}
        facts = self.facts(self.info.config_class(**hyperparameters))
        return dataclasses.replace(self, hyperparameters=hyperparameters, **facts)

    def vary(self, hyperparameters: dict[str, Any]) -> "Instance":
        """The method with these hyperparameters, which may be any: whether the seed has an effect is unknown."""
        varied = dataclasses.replace(self, hyperparameters={}, small={}).row(**hyperparameters)
        return dataclasses.replace(varied, random=None)

    def __call__(self, query, key, value, mask=None, *, form=hea.attention, **options) -> Tensor:
        tensors, more = self.adapt(query, key, value, mask)
        return form(self.config(), *tensors, attention_mask=mask, **more, **options)

    naive = partialmethod(__call__, form=hea.naive_attention)


# About ten tokens for each projection, and tables as long as most of the sequences of the tests.
_TABLES = {"projection_dim": 240, "max_length": 2400}
_SMALL_TABLES = {"projection_dim": 100, "max_length": 300}


def _auto_facts(config) -> dict[str, Any]:
    bounded = config.max_error > 0
    facts = {"limit": "bounded" if bounded else "exact", "data_dependent": bounded, "core": bounded}
    return {**facts, "switches": config.exact_length > config.columns}


def _projection_facts(config) -> dict[str, Any]:
    """Gaussian tables have weights of both signs. They and learned maps depend on the seed of the config alone."""
    is_learned, is_gaussian = getattr(config, "feature_map", "") in LEARNED, config.init != "means"
    is_random = hasattr(config, "num_features") or getattr(config, "proposal", "mean") != "mean"
    is_random = is_random and config.method != "flurka_linear"
    return {
        "averages": not is_gaussian,
        "call_seed": not is_gaussian and not is_learned,
        "random": None if is_gaussian or is_learned else is_random,
        "splits_scale": config.method not in ("flurka_linear", "linformer") and not is_learned,
    }


def _feature_facts(config) -> dict[str, Any]:
    """Learned features are another attention. Their initial maps depend on the seed of the config."""
    facts, window = {}, getattr(config, "window_size", 0)
    cost = {} if config.feature_map == "elu" else {"num_features": 1 if config.feature_map in ("t2r", "favor") else 2}
    if config.feature_map in LEARNED:
        is_hedgehog = config.feature_map == "hedgehog"
        facts = {"limit": "none", "random": None, "call_seed": False, "splits_scale": False, "core": is_hedgehog}
    return {**facts, "cost": {**cost, "window_size": 2}, "reads_positions": window > 0, "square": window > 0}


def _exact(method: str, *, random: bool = True, **facts: Any) -> Instance:
    """A method that is exact within its budget and with the budget of the whole sequence."""
    return Instance(method, limit="exact", random=random, **facts)


def _projected(method: str, **facts: Any) -> Instance:
    return Instance(method, _TABLES, small=_SMALL_TABLES, facts=_projection_facts, **facts)


_AUTO = _exact(
    "auto", small={"crossover": 9}, averages=False, splits_scale=True, cost={"columns": 1}, draws_causally=False,
    facts=_auto_facts,
)  # fmt: skip
_KDEFORMER, _HYPERATTENTION = (
    _exact(method, facts=lambda c: {"data_dependent": c.column_scores == "kde"})
    for method in ("kdeformer", "hyperattention")
)
_EVA = _exact(
    "eva", splits_scale=True, skips_masked_queries=True,
    facts=lambda c: {"random": c.proposal != "mean"},
)  # fmt: skip
_FLURKA_EVA, _FLURKA_LINEAR = (
    _projected(method, cost={**_COST, "num_features": 0}) for method in ("flurka_eva", "flurka_linear")
)
_FLURKA_PERFORMER, _LINFORMER = _projected("flurka_performer"), _projected("linformer")
_LINEAR = Instance("linear", facts=_feature_facts)
_LONGFORMER = _exact("longformer", random=False, reads_positions=True, cost=_COST | {"window_size": 2})
_NEARFAR = _exact(
    "nearfar", averages=False, splits_scale=True, draws_causally=False,
    cost=_COST | {"num_candidates": 0, "num_groups": 0, "near_share": 0},
)  # fmt: skip
_NYSTROMFORMER = _exact(
    "nystromformer", random=False, averages=False, cost=_COST | {"num_landmarks": 2},
    facts=lambda c: {"square": True, "limit": "none"} if c.conv_kernel_size else {},
)  # fmt: skip
_PERFORMER = Instance("performer", limit="expectation", random=True, splits_scale=True, facts=_feature_facts)
# Shared queries and keys are another attention.
_REFORMER = _exact("reformer", facts=lambda c: {"limit": "none", "square": True} if c.shared_query_key else {})
_SCATTERBRAIN = _exact("scatterbrain", splits_scale=True)
_WILDCAT = _exact("wildcat", cost=_COST | {"num_candidates": 0})
_NEAR = {"block_size": 16, "num_samples": 24}

INSTANCES = [
    # Without `crossover` it would be exact at the lengths of the tests.
    *(_AUTO.row(columns=24, crossover=24, max_error=error) for error in (0.0, 0.5)),
    _exact("approx_kmv", data_dependent=True, splits_scale=True).row(num_samples=24),
    _FLURKA_EVA.row(window_size=3, num_landmarks=4),
    _FLURKA_EVA.row(window_size=2, num_landmarks=7, proposal="mean"),
    _FLURKA_LINEAR.row(),
    _FLURKA_LINEAR.row(feature_map="hedgehog", num_features=20),
    _FLURKA_PERFORMER.row(num_features=32),
    _FLURKA_PERFORMER.row(feature_map="exp", num_features=9),
    # The default near field, "auto", means "window" in the causal form and a choice by head otherwise.
    _KDEFORMER.row(**_NEAR),
    _KDEFORMER.row(**_NEAR, near_field="lsh"),
    _KDEFORMER.row(**_NEAR, near_field="window"),
    _KDEFORMER.row(**_NEAR, columns="all", draw="independent"),
    _KDEFORMER.row(**_NEAR, score_groups=2, num_probes=3),
    _KDEFORMER.row(**_NEAR, column_scores="value_norm"),
    _KDEFORMER.row(**_NEAR, column_scores="kde"),
    _HYPERATTENTION.row(**_NEAR),
    _HYPERATTENTION.row(**_NEAR, near_field="lsh"),
    _HYPERATTENTION.row(**_NEAR, near_field="window"),
    _HYPERATTENTION.row(**_NEAR, draw="independent"),
    _EVA.row(window_size=8, num_landmarks=8),
    _EVA.row(window_size=8, num_landmarks=8, proposal="mean"),
    _EVA.row(window_size=8, num_landmarks=8, proposal="learned"),
    _EVA.row(window_size=6, num_landmarks=5),
    _LONGFORMER.row(window_size=8),
    _LONGFORMER.row(window_size=8, global_tokens=3),
    _LINEAR.row(),
    _LINEAR.row(feature_map="hedgehog", num_features=20),
    _LINEAR.row(feature_map="t2r", num_features=9),
    _LINEAR.row(feature_map="exp", num_features=16),
    _LINEAR.row(window_size=12),
    _LINEAR.row(window_size=8, feature_map="hedgehog", num_features=20),
    _LINEAR.row(window_size=5, feature_map="exp", num_features=9),
    _LINFORMER.row(),
    _NYSTROMFORMER.row(num_landmarks=16, pinv="iterative"),
    _NYSTROMFORMER.row(num_landmarks=16, pinv="solve"),
    _PERFORMER.row(num_features=32),
    _PERFORMER.row(feature_map="hedgehog", num_features=20),
    _SCATTERBRAIN.row(block_size=16, num_features=24),
    _SCATTERBRAIN.row(block_size=16, num_features=24, near_field="lsh"),
    _SCATTERBRAIN.row(block_size=17, num_features=9),
    dataclasses.replace(_NEARFAR, small={"num_samples": 3, "block_size": 2, "num_probes": 4, "near_share": 0.11}).row(
        num_probes=9, num_samples=18, block_size=6, near_share=0.11
    ),
    dataclasses.replace(_NEARFAR, small={"num_probes": 0, "num_candidates": 6}).row(
        num_probes=9, num_samples=20, block_size=4, near_share=0.0, num_candidates=30
    ),
    _REFORMER.row(block_size=8),
    _REFORMER.row(block_size=5, num_hashes=3),
    _exact("thinformer", splits_scale=True).row(num_samples=24),
    _WILDCAT.row(num_samples=24),
    _WILDCAT.row(num_samples=24, num_candidates=30),
]


def _convolution(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple:
    """Kernels that are not 0, as those of the start are."""
    kernel = torch.linspace(-1.0, 1.5, 5 * query.shape[1], dtype=query.dtype).view(-1, 5)
    return (query, key, value), {"conv_weight": kernel}


def _shared(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple:
    """The sum of query and key is the query that is also the key, so that the checks can vary both."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    both = query + (key if mask is None else key.masked_fill(~mask[:, None, :, None], 0.0))
    return (both, both, value), {}


def _biased(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple:
    """A bias by distance that differs between the sides and the heads."""
    angle = torch.linspace(-3.0, 4.0, 25 * query.shape[1], dtype=torch.float64, device=query.device)
    return (query, key, value), {"distance_bias": (2.0 * angle.sin()).to(query.dtype).view(-1, 25)}


def _with_sinks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple:
    return (query, key, value), {"sinks": torch.linspace(-1.0, 2.0, query.shape[1], device=query.device).to(query)}


_GAUSSIAN = {"projection_dim": 16, "init": "gaussian", "share": "none", "max_length": 300}
# What needs other tensors, parameters or initial values than the functional form has. Only the promises run on these.
VARIANTS = [
    _LINFORMER.row(**_GAUSSIAN),
    _FLURKA_LINEAR.row(**_GAUSSIAN),
    _FLURKA_PERFORMER.row(**_GAUSSIAN, num_features=24),
    _FLURKA_EVA.row(**_GAUSSIAN, window_size=3, num_landmarks=5),
    dataclasses.replace(_NYSTROMFORMER, adapt=_convolution).row(num_landmarks=16, conv_kernel_size=5),
    dataclasses.replace(_REFORMER, adapt=_shared).row(block_size=8, shared_query_key=True),
    *(
        dataclasses.replace(one, adapt=_biased, limit="none", reads_positions=True).row(**values)
        for one, values in (
            (_NEARFAR, {"block_size": 17, "num_samples": 12, "num_probes": 24}),
            (_NEARFAR, {"block_size": 0, "num_samples": 12, "num_probes": 0}),
            (_KDEFORMER, {"block_size": 17, "num_samples": 12}),
            (_KDEFORMER, {"block_size": 12, "num_samples": 12, "near_field": "lsh", "draw": "independent"}),
            (_HYPERATTENTION, {"block_size": 17, "num_samples": 12}),
            (_SCATTERBRAIN, {"block_size": 17, "num_features": 12}),
            (_LONGFORMER, {"window_size": 17}),
        )
    ),
]

# Methods that know their lse, with attention sinks. The promises run on all of their forms.
WITH_SINKS = [
    dataclasses.replace(one, adapt=_with_sinks, averages=False, limit="none").row(**values)
    for one, values in (
        (_AUTO, {"columns": 23, "crossover": 23, "max_error": 0.5}),
        (_NEARFAR, {"block_size": 14, "num_samples": 12, "num_probes": 9, "near_share": 0.11}),
        (_KDEFORMER, {"block_size": 15, "num_samples": 24}),
        (_HYPERATTENTION, {"block_size": 15, "num_samples": 24, "near_field": "lsh"}),
        (_LONGFORMER, {"window_size": 7, "global_tokens": 3}),
        (_SCATTERBRAIN, {"block_size": 15, "num_features": 24}),
        (_WILDCAT, {"num_samples": 23}),
    )
]

# The first row of every method.
FIRST = {instance.method: instance for instance in reversed(INSTANCES)}

# One instance per method, with the default hyperparameters.
DEFAULTS = [Instance(name) for name in hea.available_methods()]

# Hyperparameters with which a method approximates short sequences, too.
APPROXIMATE = {"auto": {"crossover": 1, "max_error": 0.0}}


def forms() -> list[tuple[Instance, bool]]:
    """Every instance with every supported value of `is_causal`, without those that equal another instance."""
    # The causal form with a window is that of the default.
    return [(i, c) for i in INSTANCES for c in i.forms if not c or i.hyperparameters.get("near_field") != "window"]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers, the same in every dtype up to rounding."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(
    batch: int = 1,
    num_heads: int = 2,
    q_len: int = 64,
    head_dim: int = 8,
    *,
    kv_len: int | None = None,
    num_kv_heads: int | None = None,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    spread: float = 1.0,
    content: str = "normal",
) -> tuple[Tensor, Tensor, Tensor]:
    """Query (B, H, Nq, D), key (B, H_kv, Nk, D) and value (B, H_kv, Nk, Dv): numbers of a kind, times `spread`.

    `content` is "normal" for standard normal numbers, or one of `CONTENTS`.
    """
    generator = torch.Generator().manual_seed(seed)
    kv_len = q_len if kv_len is None else kv_len
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    of_keys, value_dim = (batch, num_kv_heads, kv_len), head_dim if value_dim is None else value_dim
    shapes = ((batch, num_heads, q_len, head_dim), (*of_keys, head_dim), (*of_keys, value_dim))
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    if content != "normal":
        tensors = CONTENTS[content](*tensors, generator)
    return tuple((x * spread).to(dtype) for x in tensors)


def _few_tokens(query: Tensor, key: Tensor, value: Tensor, generator: torch.Generator) -> list[Tensor]:
    """At most three different tokens."""
    return [x[:, :, torch.randint(min(3, x.shape[2]), (x.shape[2],), generator=generator)] for x in (query, key, value)]


def _outlier(query: Tensor, key: Tensor, value: Tensor, generator: torch.Generator) -> list[Tensor]:
    """One key, with its value, is 30 times as large as the others."""
    at = torch.randint(key.shape[2], (1,), generator=generator)
    factor = torch.ones(key.shape[2], 1, dtype=key.dtype).index_fill(0, at, 30.0)
    return [query, key * factor, value * factor]


def _aligned(query: Tensor, key: Tensor, value: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Each key is three times a query, so that most of a query's weight is on few keys."""
    heads = torch.arange(key.shape[1]) * (query.shape[1] // key.shape[1])
    return [query, 3.0 * query[:, heads][:, :, torch.arange(key.shape[2]) % query.shape[2]], value]


def _scales(query: Tensor, key: Tensor, value: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Each feature has a scale from 0.01 to 10."""
    return [x * 10.0 ** (3.0 * torch.rand(x.shape[3], generator=generator) - 2.0) for x in (query, key, value)]


# Numbers that are not standard normal: name -> f(query, key, value, generator), of standard normal ones.
CONTENTS: dict[str, Callable[..., list[Tensor]]] = {
    "zeros": lambda *tensors: [torch.zeros_like(x) for x in tensors[:3]],
    "constant": lambda *tensors: [x[:, :, :1].expand_as(x) for x in tensors[:3]],
    "few": _few_tokens,
    "outlier": _outlier,
    "large": lambda q, k, v, _: [12.0 * q, 12.0 * k, v],
    "tiny": lambda *tensors: [1e-6 * x for x in tensors[:3]],
    "aligned": _aligned,
    "smooth": lambda *tensors: [x.cumsum(2) / x.shape[2] ** 0.5 for x in tensors[:3]],
    "sparse": lambda *tensors: [x * (x > 1.0) for x in tensors[:3]],
    "signs": lambda *tensors: [x.sign() for x in tensors[:3]],
    "scales": _scales,
}


def padding_mask(kind: str, batch: int, kv_len: int, seed: int = 0) -> Tensor | None:
    """A bool mask (B, Nk), True = attend.

    Args:
        kind: "none" gives None. "left" and "right" have padding on one side, and each sequence of the batch has its own
            number of valid tokens, at least one. "holes" masks random keys. "empty" also masks all keys of the first
            sequence. "one" leaves one key of each sequence, and "all" masks every key.
    """
    if kind == "none":
        return None
    generator = torch.Generator().manual_seed(seed)
    if kind in ("left", "right"):
        mask = torch.arange(kv_len) < torch.randint(1, kv_len + 1, (batch, 1), generator=generator)
        return mask.flip(1) if kind == "left" else mask
    if kind in ("one", "all"):
        mask = torch.zeros(batch, kv_len, dtype=torch.bool)
        return mask if kind == "all" else mask.scatter(1, torch.randint(kv_len, (batch, 1), generator=generator), True)
    mask = torch.rand(batch, kv_len, generator=generator) < 0.7
    if kind == "empty":
        mask[0] = False
    return mask


# The heads of calls with learned parameters, which share key heads.
HEADS, KV_HEADS = 4, 2


def parameters_of(config: Any, value: Tensor, num_kv_heads: int = KV_HEADS) -> dict[str, Tensor]:
    """Learned parameters by name, which differ between the heads: initial values plus noise."""
    sizes = {"num_heads": HEADS, "num_kv_heads": num_kv_heads, "head_dim": 8, "value_dim": 8}
    start = registry.get_method(config.method).initial_parameters(config, **sizes, max_length=value.shape[2])
    noise = {name: 0.3 * numbers(*x.shape, seed=3, dtype=x.dtype) for name, x in start.items()}
    return {name: x + noise[name] * x.abs().mean().clamp(min=0.1) for name, x in start.items()}


def relative_error(approximate: Tensor, exact: Tensor) -> float:
    """The Frobenius norm of the difference divided by that of the exact result."""
    return ((approximate - exact).double().norm() / exact.double().norm()).item()


def unregister(name: str) -> None:
    """Remove a method that a test has registered."""
    del registry.METHODS[name]
