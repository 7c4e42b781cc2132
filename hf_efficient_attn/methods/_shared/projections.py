"""Learned tables that contract a sequence to P tokens, for the Linformer and the FLuRKA methods.

FLuRKA (Gupta et al. 2023) contracts the tokens and then computes kernel attention.
Eq. 2: phi(Q W_Q) (phi((E1 K) W_K)^T ((E2 V) W_V)), normalised as in the method of the kernel, which computes attention
to the P contracted keys. E1 and E2 are P x M, for sequences of up to M tokens, and the same for all heads. `forward`
gets projected keys and values, and applies E1 and E2 to them: (E1 K) W_K = E1 (K W_K), and a bias b_K of the projection
becomes (E1 1) b_K^T. FLuRKA defines its own attention and never switches by length.

Departures from the paper: `hf_efficient_attn.ops.projections` applies the tables to padded and to shorter input, and
contracted keys without a weight are left out of the kernel's sums. Conversion starts from means of P segments. There is
no causal form, because a contracted key contains tokens of the future.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.config import AttentionOptions, HiddenProjections, MethodConfig, option, refuse
from hf_efficient_attn.methods._shared.registry import get_method, make_config, register_method
from hf_efficient_attn.ops.backends.devices import rounded, sum_dtype
from hf_efficient_attn.ops.projections import (
    contract_hidden_states,
    contractions,
    naive_contraction,
    projected_key_mask,
    start_tables,
)
from hf_efficient_attn.ops.slices import with_zero_gradients

# Names of the tables of keys and of values as learned parameters.
NAMES = ("key_projection", "value_projection")
# If a checkpoint shares one table, the table of the keys also becomes the table of the values.
STARTS_FROM = {NAMES[1]: NAMES[0]}


@dataclass(frozen=True, kw_only=True)
class ProjectionConfig(MethodConfig):
    """Hyperparameters of the tables; `streams` are the streams of random numbers of the two Gaussian tables."""

    streams = (0, 0)
    # With as many queries as keys, contracting keys and values costs as much again, without an exponential.
    budget: ClassVar[tuple[tuple[str, int], ...]] = (("projection_dim", 1),)
    causal = False
    rectangular = True
    learned_parameters: ClassVar[tuple[str, ...]] = NAMES
    trains_on_weights = False

    projection_dim: int = option(256, "Contracted keys that each query attends to, P.", minimum=1, carried=True)
    max_length: int = option(
        0,
        "The longest sequence that the tables are made for, M. 0: that of the model or of the input.",
        minimum=0,
        carried=True,
    )
    share: str = option(
        "none", "'none': one table for keys and one for values. 'kv': one for both.", choices=("none", "kv"),
        carried=True,
    )  # fmt: skip
    init: str = option(
        "means",
        "Initial tables. 'means': means of segments. 'gaussian': normal numbers of variance 1/P.",
        choices=("means", "gaussian"),
        carried=True,
    )
    seed: int = option(0, "Seed of the Gaussian tables. The seed of a call does not affect them.", minimum=0)


def initial_parameters(config: ProjectionConfig, *, max_length: int, **_: int) -> dict[str, Tensor]:
    """Make `key_projection` (P, M) and, unless it is shared, `value_projection` (P, M)."""
    streams = config.streams if config.share == "none" else config.streams[:1]
    own = start_tables(config.projection_dim, config.max_length or max_length, config.init, config.seed, streams)
    return dict(zip(NAMES, own, strict=False))


def tables(config: ProjectionConfig, kv_len: int, options: AttentionOptions) -> list[Tensor]:
    """Return the tables (P, M) of keys and of values for `kv_len` tokens, the same one if only the first is given.

    Raises:
        UnsupportedAttentionError: a table has another shape, or M is less than `kv_len`.
    """
    if NAMES[0] not in options.parameters:
        refuse(f"{NAMES[0]} is missing; give a tensor (projection_dim, max_length)", config)
    first = options.parameters[NAMES[0]]  # (P, M)
    both = {NAMES[0]: first, NAMES[1]: options.parameters.get(NAMES[1], first)}
    for name, table in both.items():
        if table.ndim != 2 or table.shape[0] != config.projection_dim:
            problem = f"{name} {tuple(table.shape)} does not suit projection_dim={config.projection_dim}"
            refuse(f"{problem}; give a tensor (projection_dim, max_length)", config)
        if table.shape[1] < kv_len:
            problem = f"{kv_len} keys are more than the {table.shape[1]} that {name} has columns for"
            refuse(f"{problem}; make the tables with max_length={kv_len} or more, or cut the input", config)
    return list(both.values())


@dataclass(frozen=True, kw_only=True)
class FlurkaConfig(ProjectionConfig):
    """Hyperparameters of the contraction.

    `kernel` is the method that attends to the contracted keys, with the hyperparameters that both have.
    `averages_queries` tells whether it needs the mask of the queries.
    """

    paper = "Gupta, Guo, Yuan, Zhou, Mendis 2023"
    paper_url = "https://arxiv.org/abs/2306.15799"
    year = 2023
    near = "none"
    streams = (51, 52)
    kernel = ""
    averages_queries = False

    def kernel_config(self) -> MethodConfig:
        """Return the config of the kernel's method."""
        names = get_method(self.kernel).default.hyperparameters()
        return make_config(self.kernel, **{name: getattr(self, name) for name in names if hasattr(self, name)})


def _attend(
    config: FlurkaConfig, form: str, tensors: Sequence[Tensor], options: AttentionOptions, key_mask: Tensor | None
) -> Tensor:
    """Call a form of the kernel's method with queries and contracted keys and values.

    `options` has the mask of the tokens, which also masks as many queries, as in self-attention. `key_mask` (B, P)
    masks contracted keys.
    """
    query = tensors[0]
    parameters = {name: x for name, x in options.parameters.items() if name not in NAMES}
    masks = []
    if config.averages_queries:
        is_masked = options.key_mask is not None and query.shape[2] == options.key_mask.shape[1]
        masks.append(options.key_mask if is_masked else torch.ones_like(query[:, 0, :, 0], dtype=torch.bool))
    options = options._replace(key_mask=key_mask, is_causal=False, parameters=parameters)
    out: Tensor = getattr(get_method(config.kernel), form)(config.kernel_config(), *tensors, options, *masks)
    return out


def forward(config: FlurkaConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Fast form; see `register_method`."""
    kv_len = key.shape[2]
    both = contractions(tables(config, kv_len, options), options.key_mask, kv_len, sum_dtype(query))
    keys = both[0].project(key)  # (B, H, P, D)
    values = both[1].project(value)  # (B, H, P, Dv)
    key_mask = projected_key_mask(both, key.shape[0])  # (B, P)
    out = _attend(config, "forward", (query, keys, values), options, key_mask)
    return rounded(out, value.dtype)  # (B, H, Nq, Dv)


def forward_hidden_states(
    config: FlurkaConfig,
    query: Tensor,
    hidden_states: Tensor,
    projections: HiddenProjections,
    options: AttentionOptions,
) -> Tensor:
    """Compute Eq. 2 as in the paper: contract the hidden states, then project them to keys and values.

    The output (B, H, N, D) equals, up to rounding, `forward` of the projected hidden states, but this projects only P
    tokens and not N. `query` is (B, H, N, D), of the same tokens; `hidden_states` (B, N, W), the input of the
    projections, are 0 for masked tokens; `projections` are affine maps (B, P, W) -> (B, P, H * D).
    """
    kv_len = hidden_states.shape[1]
    if query.numel() == 0:
        projected = (project(hidden_states) for project in projections)
        return with_zero_gradients(query.new_zeros(query.shape), query, *projected, *options.parameters.values())
    with torch.autocast(query.device.type, enabled=False):
        both = contractions(tables(config, kv_len, options), options.key_mask, kv_len, sum_dtype(hidden_states))
    keys, values = contract_hidden_states(both, hidden_states, projections, query.shape[1])  # (B, H, P, D) each
    key_mask = projected_key_mask(both, hidden_states.shape[0])  # (B, P)
    with torch.autocast(query.device.type, enabled=False):
        return rounded(_attend(config, "forward", (query, keys, values), options, key_mask), query.dtype)


def naive(config: FlurkaConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form: one batch row at a time without its padding, by the kernel's readable form."""
    mask = options.key_mask
    outs = []
    for b, (keys, values) in enumerate(naive_contraction(tables(config, key.shape[2], options), key, value, mask)):
        given = options._replace(key_mask=None if mask is None else mask[b : b + 1])
        own = query[b : b + 1].double(), keys[None], values[None]  # (1, H, Nq, D), (1, H, p, D), (1, H, p, Dv)
        outs.append(_attend(config, "naive", own, given, None))
    return torch.cat(outs).to(value.dtype)  # (B, H, Nq, Dv)


def _initial_parameters(config: FlurkaConfig, **sizes: int) -> dict[str, Tensor]:
    """Make the tables and the learned parameters of the kernel."""
    of_kernel = get_method(config.kernel).initial_parameters(config.kernel_config(), **sizes)
    return initial_parameters(config, **sizes) | of_kernel


def register_flurka(config_class: type[FlurkaConfig]) -> None:
    """Register the FLuRKA method with these hyperparameters."""
    register_method(
        config_class,
        forward=forward,
        naive=naive,
        initial_parameters=_initial_parameters,
        starts_from=STARTS_FROM,
        forward_hidden_states=forward_hidden_states,
    )
