"""What the FLuRKA methods share (Gupta et al. 2023): low-rank contraction of the tokens, then kernel attention.

Eq. 2: phi(Q W_Q) (phi((E1 K) W_K)^T ((E2 V) W_V)), with the normalisation of the kernel's own method, of which the
attention to the P contracted rows is a call. E1 and E2 are P x M, for sequences of up to M tokens, the same for all
heads. Here keys and values are projected already, and E1 and E2 stand before them: (E1 K) W_K = E1 (K W_K), and a bias
b_K of the projection comes out as (E1 1) b_K^T. An attention of its own: it never switches by length.

Departures from the paper, whose sequences all have M tokens: those of `hf_efficient_attn.ops.projections` for padding
and shorter input; a row without weight at any token that is there (in E1 or E2) is left out of the kernel's sums; and
conversion starts from means of P segments rather than a Gaussian, as the Linformer's does here, so that a checkpoint
that was not trained further attends to averages of keys and values.

There is no causal form: a row holds tokens of the future.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.registry import AttentionOptions, HiddenProjections, get_method
from hf_efficient_attn.ops.partial import accumulation_dtype
from hf_efficient_attn.ops.projections import (
    NAMES,
    contractions,
    naive_projection,
    projected_key_mask,
    projection_tables,
    start_tables,
)

# Streams of random numbers of the Gaussian tables.
_STREAMS = (51, 52)
LEARNED = NAMES


@dataclass(frozen=True, kw_only=True)
class FlurkaConfig(MethodConfig):
    """Hyperparameters of the contraction; `kernel` is the method whose attention follows it."""

    kernel = ""

    projection_dim: int = option(256, "Rows that the tokens are contracted to, P.", minimum=1, carried=True)
    max_length: int = option(
        0,
        "Tokens that the tables have columns for, M. 0: as many as there are when they are made.",
        minimum=0,
        carried=True,
    )
    share: str = option("none", "'none': one table for keys and one for values. 'kv': one for both.",
                        choices=("none", "kv"), carried=True)  # fmt: skip
    init: str = option(
        "means",
        "Where the tables start. 'means': averages of segments. 'gaussian': normal numbers of variance 1/P.",
        choices=("means", "gaussian"),
        carried=True,
    )
    seed: int = option(0, "Seed of the Gaussian tables, and of what the kernel draws.", minimum=0)

    def with_budget(self, columns: int) -> "FlurkaConfig":
        """As many rows as columns.

        To contract keys and values takes as many multiplications for every token as to attend to P columns.
        """
        return replace(self, projection_dim=self.check_budget(columns))

    def kernel_config(self) -> MethodConfig:
        """The config of the kernel's method."""
        return get_method(self.kernel).info.config_class()

    def kernel_options(self, query_mask: Tensor | None) -> dict:
        """What the kernel's method is told of the queries beside themselves: bool (B, Nq), which are there, or None."""
        return {}


def initial_parameters(
    config: FlurkaConfig, *, num_heads: int, head_dim: int, value_dim: int, max_length: int
) -> dict[str, Tensor]:
    """`key_projection` (P, M) and, unless it is shared, `value_projection`."""
    streams = _STREAMS[:1] if config.share == "kv" else _STREAMS
    return start_tables(config.projection_dim, config.max_length or max_length, config.init, config.seed, streams)


def _tables(config: FlurkaConfig, columns: int, parameters: dict[str, Tensor]) -> list[Tensor]:
    """E1 and E2 (P, M)."""
    return projection_tables(config.method, config.projection_dim, columns, parameters)


def forward(config: FlurkaConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Fast form; arguments as in `hf_efficient_attn.methods._shared.registry.register_method`."""
    mask, scale, dropout_p, seed, parameters = (
        options.key_mask,
        options.scale,
        options.dropout_p,
        options.seed,
        options.parameters,
    )
    columns, wide = key.shape[2], accumulation_dtype(query.dtype)
    both = contractions(_tables(config, columns, parameters), mask, columns, wide)
    options = AttentionOptions(projected_key_mask(both, key.shape[0]), False, scale, dropout_p, seed, {})
    extra = config.kernel_options(_mask_of_queries(query, key, mask))
    rows = both[0].rows(key), both[1].rows(value)
    kernel = get_method(config.kernel)
    return kernel.forward(config.kernel_config(), query, *rows, options, **extra).to(value.dtype)


def forward_hidden_states(
    config: FlurkaConfig,
    query: Tensor,
    hidden_states: Tensor,
    projections: HiddenProjections,
    options: AttentionOptions,
) -> Tensor:
    """Eq. 2 as it stands: the hidden states are contracted before they are projected to keys and values.

    The same as `forward` with key = to_key(hidden_states), value = to_value(hidden_states) to rounding, but P rows are projected in
    place of N.

    Args:
        query: (B, H, N, D), of the same tokens.
        hidden_states: (B, N, W), which keys and values come from, 0 at tokens that are not there.
        projections: affine maps, (B, P, W) -> (B, P, H * D).
        options: as `forward` takes them.

    Returns:
        (B, H, N, D) in the type of `query`.
    """
    mask, scale, dropout_p, seed, parameters = (
        options.key_mask,
        options.scale,
        options.dropout_p,
        options.seed,
        options.parameters,
    )
    hidden = hidden_states
    device, columns, heads = query.device.type, hidden.shape[1], query.shape[1]
    with torch.autocast(device, enabled=False):
        wide = accumulation_dtype(hidden.dtype)
        both = first, second = contractions(_tables(config, columns, parameters), mask, columns, wide)
        contracted = [first.rows(hidden[:, None])[:, 0].to(hidden.dtype)]
        contracted.append(contracted[0] if second is first else second.rows(hidden[:, None])[:, 0].to(hidden.dtype))
    rows = []
    for part, x, project in zip((first, second), contracted, projections, strict=True):
        # An affine map of a row holds its bias once, where that of a sum of tokens holds it E 1 times.
        bias, excess = project(x.new_zeros(1, 1, x.shape[2])), (part.sums() - 1.0).unsqueeze(2)
        x = project(x)
        rows.append((x + (excess * bias).to(x.dtype)).unflatten(2, (heads, -1)).transpose(1, 2))
    options = AttentionOptions(projected_key_mask(both, hidden.shape[0]), False, scale, dropout_p, seed, {})
    extra = config.kernel_options(mask)
    kernel = get_method(config.kernel)
    with torch.autocast(device, enabled=False):
        rows = (x.to(accumulation_dtype(x.dtype)) for x in rows)
        return kernel.forward(config.kernel_config(), query, *rows, options, **extra).to(query.dtype)


def _mask_of_queries(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor | None:
    """With as many queries as keys, as in self-attention, a mask is one of the queries as well."""
    return mask if query.shape[2] == key.shape[2] else None


def naive(config: FlurkaConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form: row by row with the tokens that are not there taken out, and the kernel's readable form."""
    mask, scale, dropout_p, seed, parameters = (
        options.key_mask,
        options.scale,
        options.dropout_p,
        options.seed,
        options.parameters,
    )
    both, outs = [x.double() for x in _tables(config, key.shape[2], parameters)], []
    query_mask = _mask_of_queries(query, key, mask)
    options = AttentionOptions(None, False, scale, dropout_p, seed, {})
    kernel = get_method(config.kernel)
    for b in range(key.shape[0]):
        there = slice(None) if mask is None else mask[b]
        tokens = (x[b, :, there].double() for x in (key, value))
        (keys, first), (values, second) = (naive_projection(table, x) for table, x in zip(both, tokens, strict=True))
        rows = (x[None, :, first & second] for x in (keys, values))
        extra = config.kernel_options(None if query_mask is None else query_mask[b : b + 1])
        outs.append(kernel.naive(config.kernel_config(), query[b : b + 1].double(), *rows, options, **extra))
    return torch.cat(outs).to(value.dtype)
