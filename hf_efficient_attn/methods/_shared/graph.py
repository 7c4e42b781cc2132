"""A call of a method as one operator of a graph of `torch.compile`.

The operator runs the eager form. So a graph gives the outputs and gradients of an ordinary call, a form may branch on
values and loop over slices, and nothing else in the package has to know that it is compiled. For its gradient the
operator computes the form again. Graphs for ONNX contain the form itself, of methods that allow this.
"""

import ast
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.config import AttentionOptions, MethodConfig
from hf_efficient_attn.methods._shared.registry import get_method, make_config
from hf_efficient_attn.ops.random import HeadSeed, HeadSlice, Seed, draw_seed, seed_value, with_draws_of


class _Call(NamedTuple):
    """The arguments of the operator after query, key and value.

    Attributes:
        key_mask: bool (B, Nk), or None.
        bias: the bias by distance, or None.
        seed: int64, a scalar.
        draws: int64, the seed of dropout, a scalar; None without dropout.
        learned: the learned parameters.
        text: form, config, names of the learned parameters and `HeadSlice` of the seed, as Python code.
        is_causal: see `AttentionOptions`.
        numbers: scale and dropout_p.
        needs_grad: whether a gradient may be wanted, which a form may decide by.
    """

    key_mask: Tensor | None
    bias: Tensor | None
    seed: Tensor
    draws: Tensor | None
    learned: list[Tensor]
    text: str
    is_causal: bool
    numbers: list[float]
    needs_grad: bool = True


def call_in_graph(
    form: str, config: MethodConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """The form "forward" or "decode" of the config's method by the operator, with the arguments of the form."""
    mask, is_causal, scale, dropout_p, seed, parameters, bias = options
    tensors = (query, key, value, *parameters.values(), *([] if bias is None else [bias]))
    call = _Call(
        mask,
        bias,
        torch.as_tensor(seed_value(seed), device=query.device),
        draw_seed(query.device) if dropout_p else None,
        list(parameters.values()),
        _as_text(form, config, parameters, seed),
        is_causal,
        [float(scale), float(dropout_p)],
        torch.is_grad_enabled() and any(x.requires_grad for x in tensors),
    )
    out: Tensor = torch.ops.hf_efficient_attn.attention(query, key, value, *call)
    return out


def _as_text(form: str, config: MethodConfig, names: Iterable[str], seed: Seed) -> str:
    """Python code, formed in a way that all versions of PyTorch can trace."""
    values = "".join([f"{name!r}: {_constant(value)!r}, " for name, value in config.to_dict().items()])
    heads = [int(x) for x in seed.heads] if isinstance(seed, HeadSeed) else []
    return f"({form!r}, {{{values}}}, {list(names)!r}, {heads!r})"


def _constant(value: Any) -> Any:
    """The value. A number that differs between calls, which is a symbol in the graph, becomes a constant again."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    return float(value) if isinstance(value, float) else value


def _run(query: Tensor, key: Tensor, value: Tensor, call: _Call) -> Tensor:
    """The eager form."""
    form, values, names, heads = ast.literal_eval(call.text)
    method, seed = get_method(values.pop("method")), int(call.seed)
    seed_of_heads: Seed = HeadSeed(seed, HeadSlice(*heads)) if heads else seed
    parameters = dict(zip(names, call.learned, strict=True))
    scale, dropout_p = call.numbers
    options = AttentionOptions(call.key_mask, call.is_causal, scale, dropout_p, seed_of_heads, parameters, call.bias)
    with torch.autocast(query.device.type, enabled=False), with_draws_of(call.draws, query.device):
        out: Tensor = getattr(method, form)(make_config(method.info.name, **values), query, key, value, options)
    return out


def _leaves(query: Tensor, key: Tensor, value: Tensor, call: _Call) -> tuple[Tensor, Tensor, Tensor, _Call]:
    """The arguments, detached, with a gradient."""
    query, key, value, *learned = (x.detach().requires_grad_() for x in (query, key, value, *call.learned))
    bias = None if call.bias is None else call.bias.detach().requires_grad_()
    return query, key, value, call._replace(learned=learned, bias=bias)


@contextlib.contextmanager
def _autograd() -> Iterator[None]:
    """Within this context autograd records, also in an operator, where PyTorch has switched it off."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.AutogradOther):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


@torch.library.custom_op("hf_efficient_attn::attention", mutates_args=())
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    bias: Tensor | None,
    seed: Tensor,
    draws: Tensor | None,
    learned: list[Tensor],
    text: str,
    is_causal: bool,
    numbers: list[float],
    needs_grad: bool,
) -> Tensor:
    """Attention (B, H, Nq, Dv) of a method."""
    call = _Call(key_mask, bias, seed, draws, learned, text, is_causal, numbers, needs_grad)
    if not needs_grad:
        out = _run(query, key, value, call).contiguous()
        return out.clone() if any(out.data_ptr() == x.data_ptr() for x in (query, key, value)) else out
    with _autograd():  # the form that the gradient is of
        return _run(*_leaves(query, key, value, call)).detach().contiguous()


@_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return value.new_empty(*query.shape[:3], value.shape[3])


@torch.library.custom_op("hf_efficient_attn::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    bias: Tensor | None,
    seed: Tensor,
    draws: Tensor | None,
    learned: list[Tensor],
    text: str,
    is_causal: bool,
    numbers: list[float],
) -> list[Tensor]:
    """The gradients of query, key, value, the learned parameters and the bias."""
    call = _Call(key_mask, bias, seed, draws, learned, text, is_causal, numbers)
    with _autograd():
        leaves = _leaves(query, key, value, call)
        out = _run(*leaves)
        wanted = _differentiable(*leaves)
        grads = torch.autograd.grad(out, wanted, grad, allow_unused=True, materialize_grads=True)
    return [x.contiguous() for x in grads]


@_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> list[Tensor]:
    call = _Call(*others)
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in _differentiable(query, key, value, call)]


def _differentiable(query: Tensor, key: Tensor, value: Tensor, call: _Call) -> list[Tensor]:
    return [query, key, value, *call.learned, *([] if call.bias is None else [call.bias])]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, mask, bias, seed, draws, learned, *ctx.rest = inputs
    ctx.save_for_backward(query, key, value, mask, bias, seed, draws, *learned)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    query, key, value, mask, bias, seed, draws, *learned = ctx.saved_tensors
    tensors = query, key, value, mask, bias, seed, draws, learned
    found = torch.ops.hf_efficient_attn.attention_backward(grad, *tensors, *ctx.rest[:-1])
    of_bias = found.pop() if bias is not None else None
    return *found[:3], None, of_bias, None, None, found[3:], *[None] * len(ctx.rest)


_attention.register_autograd(_backward, setup_context=_save)
