"""What the FLuRKA methods share (Gupta et al. 2023): low-rank contraction of the tokens, then kernel attention.

Eq. 2: phi(Q W_Q) (phi((E1 K) W_K)^T ((E2 V) W_V)), normalised as in the kernel's own method, which is called for the
attention to the P contracted keys. E1 and E2 are P x M, for sequences of up to M tokens, the same for all heads. In
`forward`, keys and values are projected already, and E1 and E2 are applied to them: (E1 K) W_K = E1 (K W_K), and a bias
b_K of the projection becomes (E1 1) b_K^T. FLuRKA defines its own attention and never switches by length.

Departures from the paper, in which all sequences have M tokens:

- `hf_efficient_attn.ops.projections` describes how the tables are applied to padded and to shorter input.
- A contracted key that has no weight at any valid token, in E1 or in E2, is left out of the kernel's sums.
- Conversion starts from means of P segments and not from a Gaussian, as for the Linformer, so a checkpoint that is not
  trained further attends to averages of keys and values.

There is no causal form, because a contracted key contains tokens of the future.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.config import MethodConfig
from hf_efficient_attn.methods._shared.projections import (
    ProjectionConfig,
    initial_parameters,
    naive_contraction,
    tables,
)
from hf_efficient_attn.methods._shared.registration import register_method
from hf_efficient_attn.methods._shared.registry import AttentionOptions, HiddenProjections, get_method, make_config
from hf_efficient_attn.ops.attend import sum_dtype
from hf_efficient_attn.ops.partial import accumulation_dtype
from hf_efficient_attn.ops.projections import NAMES as TABLES
from hf_efficient_attn.ops.projections import STARTS_FROM, Contraction, contractions, projected_key_mask


@dataclass(frozen=True, kw_only=True)
class FlurkaConfig(ProjectionConfig):
    """Hyperparameters of the contraction; `kernel` is the method that attends to the contracted keys."""

    paper = "Gupta, Guo, Yuan, Zhou, Mendis 2023"
    paper_url = "https://arxiv.org/abs/2306.15799"
    year = 2023
    near = "none"
    streams = (51, 52)
    kernel = ""

    def kernel_config(self) -> MethodConfig:
        """The config of the kernel's method."""
        return make_config(self.kernel)

    def kernel_arguments(self, query_mask: Tensor | None) -> dict[str, Tensor | None]:
        """Further arguments of the kernel's `forward` and `naive`; `query_mask` is bool (B, Nq) or None."""
        return {}


def _query_mask(query: Tensor, key: Tensor, options: AttentionOptions) -> Tensor | None:
    """With as many queries as keys, as in self-attention, the key mask (B, Nk) is also the mask of the queries."""
    return options.key_mask if query.shape[2] == key.shape[2] else None


def _of_kernel(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The learned parameters of the kernel: all but the tables."""
    return {name: x for name, x in parameters.items() if name not in TABLES}


def _kernel_options(both: list[Contraction], batch: int, options: AttentionOptions) -> AttentionOptions:
    """The options of the call to the kernel, with a mask of the contracted keys (B, P)."""
    key_mask, parameters = projected_key_mask(both, batch), _of_kernel(options.parameters)
    return options._replace(key_mask=key_mask, is_causal=False, parameters=parameters)


def forward(config: FlurkaConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Fast form; see `register_method`."""
    kv_len, kernel = key.shape[2], get_method(config.kernel).forward
    both = contractions(tables(config, kv_len, options), options.key_mask, kv_len, sum_dtype(query))
    arguments = config.kernel_arguments(_query_mask(query, key, options))
    options = _kernel_options(both, key.shape[0], options)
    keys, values = both[0].project(key), both[1].project(value)  # (B, H, P, .)
    return kernel(config.kernel_config(), query, keys, values, options, **arguments).to(value.dtype)


def forward_hidden_states(
    config: FlurkaConfig,
    query: Tensor,
    hidden_states: Tensor,
    projections: HiddenProjections,
    options: AttentionOptions,
) -> Tensor:
    """Eq. 2 as in the paper: the hidden states are contracted before they are projected to keys and values.

    The output is, up to rounding, that of `forward` for the projected hidden states, but only P tokens are projected
    and not N.

    Args:
        config: the hyperparameters.
        query: (B, H, N, D), of the same tokens.
        hidden_states: (B, N, W), the input of the projections, 0 for masked tokens.
        projections: affine maps (B, P, W) -> (B, P, H * D).
        options: as for `forward`.

    Returns:
        (B, H, N, D) in the dtype of `query`.
    """
    device, dtype, kv_len = query.device.type, hidden_states.dtype, hidden_states.shape[1]
    with torch.autocast(device, enabled=False):
        both = contractions(tables(config, kv_len, options), options.key_mask, kv_len, sum_dtype(hidden_states))
        contracted = [both[0].project(hidden_states[:, None])[:, 0].to(dtype)]  # (B, P, W)
        same = both[1] is both[0]
        contracted.append(contracted[0] if same else both[1].project(hidden_states[:, None])[:, 0].to(dtype))
    keys_and_values = []
    for table, x, project in zip(both, contracted, projections, strict=True):
        # The projection adds its bias once. The contraction of projected tokens would contain it E 1 times.
        bias, excess = project(x.new_zeros(1, 1, x.shape[2])), (table.sums() - 1.0).unsqueeze(2)
        x = project(x)
        x = (x + (excess * bias).to(x.dtype)).unflatten(2, (query.shape[1], -1)).transpose(1, 2)  # (B, H, P, D)
        keys_and_values.append(x.to(accumulation_dtype(x.dtype)))
    keys, values = keys_and_values
    arguments = config.kernel_arguments(options.key_mask)
    options = _kernel_options(both, hidden_states.shape[0], options)
    with torch.autocast(device, enabled=False):
        kernel = get_method(config.kernel).forward
        return kernel(config.kernel_config(), query, keys, values, options, **arguments).to(query.dtype)


def naive(config: FlurkaConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form: one batch row at a time without its padding, by the kernel's readable form."""
    kernel, query_mask, outs = get_method(config.kernel).naive, _query_mask(query, key, options), []
    kernel_options = options._replace(key_mask=None, is_causal=False, parameters=_of_kernel(options.parameters))
    for b, (keys, values) in enumerate(naive_contraction(config, key, value, options)):
        row = slice(b, b + 1)
        arguments = config.kernel_arguments(None if query_mask is None else query_mask[row])
        outs.append(
            kernel(config.kernel_config(), query[row].double(), keys[None], values[None], kernel_options, **arguments)
        )
    return torch.cat(outs).to(value.dtype)


def _initial_parameters(config: FlurkaConfig, *, num_heads: int, num_kv_heads: int, **sizes: int) -> dict[str, Tensor]:
    """The tables, and the learned parameters of the kernel."""
    parameters = initial_parameters(config, num_heads=num_heads, **sizes)
    of_kernel = get_method(config.kernel).initial_parameters
    if of_kernel is not None:
        parameters |= of_kernel(config.kernel_config(), num_heads=num_heads, num_kv_heads=num_kv_heads, **sizes)
    return parameters


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
