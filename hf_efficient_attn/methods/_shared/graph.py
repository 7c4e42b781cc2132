"""A method as one operator of a graph of `torch.compile`, on the CPU.

A graph contains no loop over chunks of heads or blocks, which in eager mode keeps intermediate results in the caches of
the CPU and reuses their memory. For a method that gains more by that than by the fusion of its elementwise operations,
the graph calls the eager form. The operator has no gradient: with one, the graph contains the method itself.
"""

import ast
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.config import MethodConfig
from hf_efficient_attn.methods._shared.registry import AttentionOptions, get_method, make_config
from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.export import exporting_to_onnx, is_compiling
from hf_efficient_attn.ops.random import HeadSeed, seed_value


def is_operator(config: MethodConfig, tensors: tuple[Tensor, Tensor, Tensor], options: AttentionOptions) -> bool:
    """Whether a call of the method, with prepared tensors, is one operator of the graph that is being traced."""
    if options.distance_bias is not None:
        return False
    form = "causal" if options.is_causal else "bidirectional"
    if not (is_compiling() and form in config.runs_in_chunks) or backend(*tensors) != "cpu":
        return False
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, *options.parameters.values()))
    # The operator takes the plain seed of a call with all heads of a layer.
    return not (needs_grad or options.dropout_p or isinstance(options.seed, HeadSeed) or exporting_to_onnx())


def operator_forward(
    config: MethodConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """The forward function of the config's method by the operator, with the same arguments and result."""
    seed = torch.as_tensor(seed_value(options.seed), device=query.device)
    operator = torch.ops.hf_efficient_attn.method
    learned, call = list(options.parameters.values()), (options.is_causal, float(options.scale))
    names = ",".join(options.parameters)
    out: Tensor = operator(query, key, value, options.key_mask, seed, learned, names, _as_text(config), *call)
    return out


def _as_text(config: MethodConfig) -> str:
    """The method's name and hyperparameters as Python code, formed in a way that all versions of PyTorch can trace."""
    return "".join([f"{name!r}: {_constant(value)!r}, " for name, value in config.to_dict().items()])


def _constant(value: Any) -> Any:
    """The value. A number that differs between calls, which is a symbol in the graph, becomes a constant again."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    return float(value) if isinstance(value, float) else value


@torch.library.custom_op("hf_efficient_attn::method", mutates_args=())
def _method(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    seed: Tensor,
    learned: list[Tensor],
    names: str,
    config: str,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """Attention (B, H, Nq, Dv) of a method in eager mode."""
    values = ast.literal_eval(f"{{{config}}}")
    method = values.pop("method")
    parameters = dict(zip(names.split(","), learned, strict=True)) if learned else {}
    options = AttentionOptions(key_mask, is_causal, scale, 0.0, int(seed), parameters)
    with torch.autocast(query.device.type, enabled=False):
        return get_method(method).forward(make_config(method, **values), query, key, value, options).contiguous()


@_method.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return value.new_empty(*query.shape[:3], value.shape[3])
