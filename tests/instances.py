"""The one list of method instances that feeds every parametrised test.

A new method adds its instances here, and every promise, every comparison of the fast with the readable form and every
check of its config runs on it. Budgets are so small that sequences of 30 to 300 tokens go through the approximation.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import hf_efficient_attn as hea

# The tests run in several processes, and what they compute is small: one thread each.
torch.set_num_threads(1)


@dataclass(frozen=True)
class Instance:
    """One method with the hyperparameters under test.

    budget: the longest sequence that is computed exactly; 0 where the method never switches by length.
    small: the same with a budget so small that gradients of 13 tokens go through the approximation.
    limit: "exact" where `with_budget` of the whole sequence gives exact attention, "expectation" where the error falls
        with the budget without an end, "none" where the method is an attention of its own.
    random: whether the seed matters.
    reads_positions: whether a hole in the middle of a mask is more than the absence of its tokens.
    averages: whether the weights of a row are positive and sum to 1.
    exact_steps: whether a step of decoding attends to all keys exactly, rather than as the whole sequence does.
    data_dependent: whether its work depends on the data by definition, so that it is not compiled.
    """

    method: str
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    budget: int = 0
    small: dict[str, Any] = field(default_factory=dict)
    limit: str = "none"
    random: bool = False
    reads_positions: bool = False
    averages: bool = True
    exact_steps: bool = False
    data_dependent: bool = False

    def __str__(self) -> str:
        values = ",".join(str(v) for v in self.hyperparameters.values())
        return f"{self.method}({values})" if values else self.method

    @property
    def info(self):
        return hea.method_info(self.method)

    @property
    def forms(self) -> tuple[bool, ...]:
        """The values of `is_causal` that the method has a form for."""
        return (False, True) if self.info.causal else (False,)

    def config(self, **changes):
        return self.info.config_class(**{**self.hyperparameters, **changes})

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options) -> Tensor:
        return hea.attention(self.config(), query, key, value, attention_mask=mask, **options)


def _near_far(method: str, data_dependent: bool = False, **options) -> Instance:
    """The default near field, "auto", is that of "lsh" but for the causal form, which is that of "window"."""
    return Instance(
        method,
        {"block_size": 16, "num_samples": 24, **options},
        budget=40,
        small={"block_size": 4, "num_samples": 5},
        limit="exact",
        random=True,
        exact_steps=True,
        data_dependent=data_dependent,
    )


def _eva(**options) -> Instance:
    return Instance(
        "eva",
        {"window_size": 8, "num_landmarks": 8, **options},
        small={"window_size": 4, "num_landmarks": 2},
        limit="exact",
        random=options.get("proposal") != "mean",
        exact_steps=True,
    )


def _scatterbrain(**options) -> Instance:
    hyperparameters = {"block_size": 16, "num_features": 24, **options}
    return Instance(
        "scatterbrain",
        hyperparameters,
        budget=hyperparameters["block_size"],
        small={"block_size": 4, "num_features": 5},
        limit="exact",
        random=True,
    )


def _flurka(method: str, **options) -> Instance:
    """Ten tokens a row, and tables as long as the longest sequence of the tests."""
    small = {"projection_dim": 100, "max_length": 300}
    small |= {key: min(7, options[key]) for key in ("num_features", "window_size", "num_landmarks") if key in options}
    sizes = {"projection_dim": 512, "max_length": 5000, **options}
    return Instance(method, sizes, small=small, random=bool(options) and options.get("proposal") != "mean")


INSTANCES = [
    Instance(
        "approx_kmv",
        {"num_samples": 24},
        budget=24,
        small={"num_samples": 5},
        limit="exact",
        random=True,
        data_dependent=True,
    ),
    _flurka("flurka_eva", window_size=3, num_landmarks=4),
    _flurka("flurka_eva", window_size=2, num_landmarks=7, proposal="mean"),
    _flurka("flurka_linear"),
    _flurka("flurka_performer", num_features=32),
    _near_far("kdeformer"),
    _near_far("kdeformer", near_field="lsh"),
    _near_far("kdeformer", near_field="window"),
    _near_far("kdeformer", columns="all", draw="independent"),
    _near_far("kdeformer", score_groups=2, num_probes=3),
    _near_far("kdeformer", column_scores="value_norm"),
    _near_far("kdeformer", column_scores="kde", data_dependent=True),
    _near_far("hyperattention"),
    _near_far("hyperattention", near_field="lsh"),
    _near_far("hyperattention", near_field="window"),
    _near_far("hyperattention", draw="independent"),
    _eva(),
    _eva(proposal="mean"),
    _eva(proposal="learned"),
    _eva(window_size=6, num_landmarks=5),
    Instance(
        "longformer",
        {"window_size": 8},
        budget=9,
        small={"window_size": 2},
        limit="exact",
        reads_positions=True,
    ),
    Instance(
        "longformer",
        {"window_size": 8, "global_tokens": 3},
        budget=9,
        small={"window_size": 2, "global_tokens": 2},
        limit="exact",
        reads_positions=True,
    ),
    Instance("linear"),
    # Ten tokens a segment, and room for the longest sequence of the tests.
    Instance(
        "linformer",
        {"projection_dim": 512, "max_length": 5000},
        small={"projection_dim": 100, "max_length": 300},
    ),
    *(
        Instance(
            "nystromformer",
            {"num_landmarks": 16, "pinv": pinv},
            budget=16,
            small={"num_landmarks": 4},
            limit="exact",
            averages=False,
        )
        for pinv in ("iterative", "solve")
    ),
    Instance("performer", {"num_features": 32}, small={"num_features": 7}, limit="expectation", random=True),
    _scatterbrain(),
    _scatterbrain(near_field="lsh"),
    _scatterbrain(block_size=17, num_features=9),
    Instance(
        "reformer",
        {"block_size": 8},
        budget=32,
        small={"block_size": 2},
        limit="exact",
        random=True,
    ),
    Instance(
        "reformer",
        {"block_size": 5, "num_hashes": 3},
        budget=30,
        small={"block_size": 1, "num_hashes": 3},
        limit="exact",
        random=True,
    ),
]

# One per method, at the method's own default hyperparameters.
DEFAULTS = [Instance(name) for name in hea.available_methods()]

# For tests at tens of thousands of tokens, where work that is set by an error to be kept takes minutes.
AT_LENGTH = {"approx_kmv": {"num_samples": 256}}


def forms() -> list[tuple[Instance, bool]]:
    """Every instance with every value of `is_causal`, but for those that are another instance's."""
    same = [(i, i.hyperparameters.get("near_field") == "lsh") for i in INSTANCES]
    return [(i, is_causal) for i, hashed in same for is_causal in i.forms if is_causal or not hashed]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers, the same in every type up to its rounding."""
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Query (B, H, Nq, D), key (B, H_kv, Nk, D) and value (B, H_kv, Nk, Dv), standard normal numbers times `spread`."""
    generator = torch.Generator().manual_seed(seed)
    kv_len = q_len if kv_len is None else kv_len
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    shapes = (
        (batch, num_heads, q_len, head_dim),
        (batch, num_kv_heads, kv_len, head_dim),
        (batch, num_kv_heads, kv_len, head_dim if value_dim is None else value_dim),
    )
    return tuple((torch.randn(s, generator=generator, dtype=torch.float64) * spread).to(dtype) for s in shapes)


def padding_mask(kind: str, batch: int, kv_len: int, seed: int = 0) -> Tensor | None:
    """A bool mask (B, Nk), True = attend.

    Args:
        kind: "none" gives None. "left" and "right" have padding on one side, and each sequence of the batch has its own
            number of valid tokens, at least one. "holes" masks random keys. "empty" also masks all keys of the first
            sequence.
    """
    if kind == "none":
        return None
    generator = torch.Generator().manual_seed(seed)
    if kind in ("left", "right"):
        num_valid = torch.randint(1, kv_len + 1, (batch, 1), generator=generator)
        mask = torch.arange(kv_len) < num_valid
        return mask.flip(1) if kind == "left" else mask
    mask = torch.rand(batch, kv_len, generator=generator) < 0.7
    if kind == "empty":
        mask[0] = False
    return mask


def relative_error(approximate: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the difference over that of the exact."""
    return ((approximate - exact).double().norm() / exact.double().norm()).item()
