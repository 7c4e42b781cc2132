"""A call of a method as one operator of a graph of `torch.compile`.

The operator runs the eager form. So a graph gives the outputs and gradients of an ordinary call, a form may branch on
values and loop over slices, and nothing else in the package has to know that it is compiled. For its gradient the
operator computes the form again. Graphs for ONNX contain the form itself, of methods that allow this.

Arguments of the operator:

- tensors: query, key, value, the learned parameters and, if there is one, the bias by distance. They have gradients.
- key_mask: bool (B, Nk), or None.
- seed: int64, a scalar.
- draws: int64, the seed of dropout, a scalar; None without dropout.
- text: form, config, names of the learned parameters, `HeadSlice` of the seed and is_causal, as Python code.
- numbers: scale and dropout_p.
- needs_grad: whether a gradient may be wanted, which a form may decide by.
"""

import ast
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.config import AttentionOptions, MethodConfig
from hf_efficient_attn.methods._shared.registry import get_method, make_config
from hf_efficient_attn.ops.random import HeadSeed, HeadSlice, Seed, draw_seed, seed_value, with_draws_of


def call_in_graph(
    form: str, config: MethodConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """The form "forward" or "decode" of the config's method by the operator, with the arguments of the form."""
    mask, is_causal, scale, dropout_p, seed, parameters, bias = options
    tensors = [query, key, value, *parameters.values(), *([] if bias is None else [bias])]
    # Python code, formed in a way that all versions of PyTorch can trace.
    values = "".join([f"{name!r}: {_constant(value)!r}, " for name, value in config.to_dict().items()])
    heads = [int(x) for x in seed.heads] if isinstance(seed, HeadSeed) else []
    out: Tensor = torch.ops.hf_efficient_attn.attention(
        tensors,
        mask,
        torch.as_tensor(seed_value(seed), device=query.device),
        draw_seed(query.device) if dropout_p else None,
        f"({form!r}, {{{values}}}, {list(parameters)!r}, {heads!r}, {is_causal!r})",
        [float(scale), float(dropout_p)],
        torch.is_grad_enabled() and any(x.requires_grad for x in tensors),
    )
    return out


def _constant(value: Any) -> Any:
    """The value. A number that differs between calls, which is a symbol in the graph, becomes a constant again."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    return float(value) if isinstance(value, float) else value


def _run(
    tensors: list[Tensor], mask: Tensor | None, seed: Tensor, draws: Tensor | None, text: str, numbers: list[float]
) -> Tensor:
    """The eager form."""
    form, values, names, heads, is_causal = ast.literal_eval(text)
    query, key, value, *learned = tensors
    method, number = get_method(values.pop("method")), int(seed)
    seed_of_heads: Seed = HeadSeed(number, HeadSlice(*heads)) if heads else number
    bias = learned.pop() if len(learned) > len(names) else None
    (scale, dropout_p), parameters = numbers, dict(zip(names, learned, strict=True))
    options = AttentionOptions(mask, is_causal, scale, dropout_p, seed_of_heads, parameters, bias)
    with torch.autocast(query.device.type, enabled=False), with_draws_of(draws, query.device):
        out: Tensor = getattr(method, form)(make_config(method.info.name, **values), query, key, value, options)
    return out


@contextlib.contextmanager
def _autograd() -> Iterator[None]:
    """Within this context autograd records, also in an operator, where PyTorch has switched it off."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.AutogradOther):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def _leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [x.detach().requires_grad_() for x in tensors]


@torch.library.custom_op("hf_efficient_attn::attention", mutates_args=())
def _attention(
    tensors: list[Tensor],
    key_mask: Tensor | None,
    seed: Tensor,
    draws: Tensor | None,
    text: str,
    numbers: list[float],
    needs_grad: bool,
) -> Tensor:
    """Attention (B, H, Nq, Dv) of a method."""
    if not needs_grad:
        out = _run(tensors, key_mask, seed, draws, text, numbers).contiguous()
        return out.clone() if any(out.data_ptr() == x.data_ptr() for x in tensors) else out
    with _autograd():  # the form that the gradient is of
        return _run(_leaves(tensors), key_mask, seed, draws, text, numbers).detach().contiguous()


@_attention.register_fake
def _(tensors: list[Tensor], *_: object) -> Tensor:
    return tensors[2].new_empty(*tensors[0].shape[:3], tensors[2].shape[3])


@torch.library.custom_op("hf_efficient_attn::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor,
    tensors: list[Tensor],
    key_mask: Tensor | None,
    seed: Tensor,
    draws: Tensor | None,
    text: str,
    numbers: list[float],
) -> list[Tensor]:
    """The gradients of the tensors."""
    with _autograd():
        leaves = _leaves(tensors)
        out = _run(leaves, key_mask, seed, draws, text, numbers)
        grads = torch.autograd.grad(out, leaves, grad, allow_unused=True, materialize_grads=True)
    return [x.contiguous() for x in grads]


@_attention_backward.register_fake
def _(grad: Tensor, tensors: list[Tensor], *_: object) -> list[Tensor]:
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, *others, ctx.text, ctx.numbers, _ = inputs
    ctx.save_for_backward(*others, *tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    mask, seed, draws, *tensors = ctx.saved_tensors
    found = torch.ops.hf_efficient_attn.attention_backward(grad, tensors, mask, seed, draws, ctx.text, ctx.numbers)
    return found, *[None] * 6


_attention.register_autograd(_backward, setup_context=_save)
