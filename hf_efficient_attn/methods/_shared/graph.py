"""A call of a method as one operator of a graph of `torch.compile`.

The operator runs the eager form. So a graph gives the outputs and gradients of an ordinary call, a form may branch on
values and loop over slices, and no other code of the package has to know that it is compiled. The operator computes the
form again for its gradient. Graphs for ONNX contain the form itself, if the method allows it.

Arguments of the operator:

- tensors: query, key, value, the learned parameters and, if there are any, the bias by distance or the sinks. They have
  gradients.
- others: the seed, an int64 scalar; the key mask, bool (B, Nk), if there is one; the seed of dropout, if there is any.
- text: form, config, names of the learned parameters, `HeadSlice` of the seed, whether there is a mask, whether there
  are sinks, and is_causal, as Python code.
- scale, dropout_p.
- needs_grad: whether a gradient may be needed, on which a form may depend. Also True if the seed is drawn, as in
training.
"""

import ast
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.config import AttentionOptions, MethodConfig
from hf_efficient_attn.methods._shared.registry import get_method, make_config
from hf_efficient_attn.ops.draws import seed_value
from hf_efficient_attn.ops.shards import HeadSeed, HeadSlice, Seed
from hf_efficient_attn.ops.tracing import draw_seed, with_draws_of

# The namespace of the operators. Copies of this module in kernel repositories have other top packages.
_NAMESPACE = __name__.partition(".")[0]
_OPERATORS = getattr(torch.ops, _NAMESPACE)


def call_in_graph(
    form: str, config: MethodConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """Call the form "forward" or "decode" of the config's method by the operator, with the form's arguments."""
    mask, is_causal, scale, dropout_p, seed, parameters, bias, sinks, *_ = options
    tensors = [query, key, value, *parameters.values(), *[x for x in (bias, sinks) if x is not None]]
    heads = [int(x) for x in seed.heads] if isinstance(seed, HeadSeed) else []
    more = f"{list(parameters)!r}, {heads!r}, {mask is not None!r}, {sinks is not None!r}, {is_causal!r}"
    others = [torch.as_tensor(seed_value(seed), device=query.device), *([] if mask is None else [mask])]
    if dropout_p:
        others.append(draw_seed(query.device))
    wanted = isinstance(seed_value(seed), Tensor) or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
    text = f"({form!r}, {config.text}, {more})"
    out: Tensor = _OPERATORS.attention(tensors, others, text, scale, dropout_p, wanted)
    return out


def _run(tensors: list[Tensor], others: list[Tensor], text: str, scale: float, dropout_p: float) -> Tensor:
    form, values, names, heads, has_mask, has_sinks, is_causal = ast.literal_eval(text)
    seed = others[0]
    mask = others[1] if has_mask else None
    draws = others[-1] if dropout_p else None
    query, key, value, *learned = tensors  # (B, H, Nq, D), (B, H, Nk, D), (B, H, Nk, Dv)
    method = get_method(values.pop("method"))
    number = int(seed)
    seed_of_heads: Seed = HeadSeed(number, HeadSlice(*heads)) if heads else number
    last = learned.pop() if len(learned) > len(names) else None
    bias, sinks = (None, last) if has_sinks else (last, None)  # (H, 2R + 1) or (H,)
    parameters = dict(zip(names, learned, strict=True))
    options = AttentionOptions(
        mask, is_causal, scale, dropout_p, seed_of_heads, parameters, bias, sinks, with_lse=sinks is not None
    )
    with torch.autocast(query.device.type, enabled=False), with_draws_of(draws, query.device):
        return method.compute(form, make_config(method.info.name, **values), query, key, value, options)


@contextlib.contextmanager
def _autograd() -> Iterator[None]:
    """Let autograd record within this context, also in an operator, where PyTorch has switched it off."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.AutogradOther):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


@torch.library.custom_op(f"{_NAMESPACE}::attention", mutates_args=())
def _attention(
    tensors: list[Tensor], others: list[Tensor], text: str, scale: float, dropout_p: float, needs_grad: bool
) -> Tensor:
    """Compute attention (B, H, Nq, Dv) of a method."""
    if not needs_grad:
        out = _run(tensors, others, text, scale, dropout_p).contiguous()
        return out.clone() if any(out.data_ptr() == x.data_ptr() for x in tensors) else out
    with _autograd():  # use the form of a call with a gradient
        leaves = [x.detach().requires_grad_() for x in tensors]
        return _run(leaves, others, text, scale, dropout_p).detach().contiguous()


@_attention.register_fake
def _(tensors: list[Tensor], *_: object) -> Tensor:
    return tensors[2].new_empty(*tensors[0].shape[:3], tensors[2].shape[3])  # (B, H, Nq, Dv)


@torch.library.custom_op(f"{_NAMESPACE}::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor, tensors: list[Tensor], others: list[Tensor], text: str, scale: float, dropout_p: float
) -> list[Tensor]:
    with _autograd():
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = _run(leaves, others, text, scale, dropout_p)
        grads = torch.autograd.grad(out, leaves, grad, allow_unused=True, materialize_grads=True)
    return [x.contiguous() for x in grads]


@_attention_backward.register_fake
def _(grad: Tensor, tensors: list[Tensor], *_: object) -> list[Tensor]:
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, others, *ctx.rest, _ = inputs  # text, scale, dropout_p
    ctx.count = len(tensors)
    ctx.save_for_backward(*tensors, *others)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors[: ctx.count]
    others = ctx.saved_tensors[ctx.count :]
    found = _OPERATORS.attention_backward(grad, tensors, others, *ctx.rest)
    return found, [None] * len(others), None, None, None, None


_attention.register_autograd(_backward, setup_context=_save)
