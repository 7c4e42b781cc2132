"""Linear attention by Triton kernels, which compute features in registers: two launches, and four for the gradients."""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import elu

from hf_efficient_attn.ops.backends import launches
from hf_efficient_attn.ops.backends.backend import LinearBackend, LinearCall, Partial
from hf_efficient_attn.ops.tracing import kept_results

# The largest numbers of features and of dimensions of a value in half precision and in float32. With more the kernels
# spill registers.
_LARGEST_DIM = {2: 128, 4: 64}
# Tokens of a segment of the causal scan. Without causality there are about `_PROGRAMS` segments of at least as many.
_SEGMENT = 256
_PROGRAMS = 1024
# Tokens of a check: more than a segment.
_CHECKED = 300
_FORMULAS = {"elu": lambda x: elu(x) + 1.0, "t2r": torch.relu, "hedgehog": lambda x: x.softmax(-1), "exp": torch.exp}


def _kernels() -> ModuleType:
    from hf_efficient_attn.ops.backends import triton_linear_attention  # Triton is no dependency

    return triton_linear_attention


def _applies(call: LinearCall) -> bool:
    query, key, value = call[:3]
    tensors = query, key, value
    if not launches.takes(*tensors) or (call.is_causal and query.shape[1] != key.shape[1]):
        return False
    if launches.padded(max(call.features.count, value.shape[2])) > _LARGEST_DIM[value.element_size()]:
        return False
    with_backward = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    form = *(x.dtype for x in tensors), *call.features[:2], value.shape[2], call.is_causal, with_backward
    check = functools.partial(_check, call, with_backward)
    return launches.passes_check("linear attention", query.device, form, check)


def _attend(call: LinearCall) -> Partial:
    features = call.features
    query, key = features.of_query(call.query), features.of_key(call.key)  # (BH, N, F)
    mask = call.key_mask
    mask = None if mask is None else mask.expand(len(key), -1).contiguous().view(torch.uint8)
    tensors = (x.contiguous() for x in (query, key, call.value))
    return Partial(*_LinearAttention.apply(*tensors, mask, *call[4:]))  # type: ignore[no-untyped-call]


class _LinearAttention(torch.autograd.Function):
    """Output and lse, from contiguous tensors with the numbers that features are computed from."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        call = LinearCall(*given)
        out, lse, state = kept_results(lambda: _forward(call))
        ctx.save_for_backward(*call[:4], out, lse, state)
        ctx.others = call[4:]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, out, lse, state = ctx.saved_tensors
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        grads = _backward(LinearCall(*tensors, *ctx.others), out, lse, state, grad_out, grad_lse)
        return *grads, *[None] * (1 + len(ctx.others))


def _forward(call: LinearCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return out (BH, Nq, Dv) in the dtype of the values, lse float32 (BH, Nq), and the state of the keys."""
    query, key, value, key_mask = call[:4]
    out = torch.empty(*query.shape[:2], value.shape[2], dtype=value.dtype, device=value.device)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=value.device)
    given = {"token": key, "vector": value, "key_mask": key_mask, "lse": None, "weight": None}
    state = _state(call, given, call.is_reversed)
    given = {"query": query, "key": key, "value": value, "key_mask": key_mask, "state": state, "out": out, "lse": lse}
    _launch("linear_output", call, query, given, call.is_reversed)
    return out, lse, state


def _backward(
    call: LinearCall, out: Tensor, lse: Tensor, state: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    query, key, value, key_mask = call[:4]
    weight = torch.empty_like(lse)
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    given = {"query": query, "key": key, "value": value, "key_mask": key_mask, "lse": lse, "weight": weight}
    given["grad_out"] = grad_out.contiguous()
    of_lse = None if grad_lse is None else grad_lse.contiguous()
    of_queries = {**given, "state": state, "out": out, "grad_lse": of_lse, "grad_query": grads[0]}
    _launch("linear_query_gradient", call, query, of_queries, call.is_reversed)
    # The scan of queries runs the other way.
    tokens = {"token": query, "vector": given["grad_out"], "key_mask": None, "lse": lse, "weight": weight}
    of_keys = {**given, "state": _state(call, tokens, not call.is_reversed)}
    of_keys |= {"grad_key": grads[1], "grad_value": grads[2]}
    _launch("linear_key_gradient", call, key, of_keys, not call.is_reversed)
    return grads


def _state(call: LinearCall, tensors: dict[str, Tensor | None], is_reversed: bool) -> Tensor:
    """Add up features: float32 (BH, segments, F (Dv + 1)), the state before each segment, or (BH, F (Dv + 1))."""
    tokens = tensors["token"]
    assert tokens is not None
    batch_heads, length, dim = tokens.shape
    shape = batch_heads, -(-length // _segment(call, length)), dim * (call.value.shape[2] + 1)
    state = torch.empty(shape, dtype=torch.float32, device=tokens.device)
    _launch("linear_state", call, tokens, {**tensors, "state": state}, is_reversed)
    return state.cumsum_(1) if call.is_causal else state.sum(1)


def _segment(call: LinearCall, length: int) -> int:
    """Return the number of tokens of a program, a power of two."""
    many = 1 if call.is_causal else -(-call.value.shape[0] * length // _PROGRAMS)
    return max(_SEGMENT, launches.padded(many))


def _launch(
    name: str, call: LinearCall, tokens: Tensor, tensors: dict[str, Tensor | None], is_reversed: bool
) -> None:
    """Run a kernel whose programs have a segment of the tokens each."""
    length, dim = tokens.shape[1:]
    value_dim = call.value.shape[2]
    segment = _segment(call, length)
    segments = -(-length // segment)
    arguments = {
        **tensors,
        "factor": call.features.factor,
        "length": length,
        "segment": segment,
        "segments": segments,
        "distance": call.distance,
    }
    precision = {torch.bfloat16: "bf16", torch.float16: "tf32"}.get(call.value.dtype, "tf32x3")
    block_m, block_n, num_warps = _tile(name, call.is_causal, precision, max(dim, value_dim))
    constants = {
        "IS_CAUSAL": call.is_causal,
        "IS_REVERSED": is_reversed,
        "FEATURES": call.features.name,
        "PRECISION": precision,
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "PADDED": launches.padded(dim),
        "PADDED_V": launches.padded(value_dim),
        "BLOCK_N": block_n,
    }
    if name != "linear_state":
        constants["BLOCK_M"] = block_m
    grid = tokens.shape[0] * segments
    launches.launch(launches.Launch(name, _kernels, grid, arguments, constants, num_warps, 2))


def _tile(name: str, is_causal: bool, precision: str, dim: int) -> tuple[int, int, int]:
    return (64, 64, 4)


def linear_attention_naive(call: LinearCall) -> Partial:
    """Compute linear attention in float64 with the weights of all pairs: the readable form. Differentiable."""
    query, key = call.features.of_query(call.query.double()), call.features.of_key(call.key.double())
    phi = _FORMULAS[call.features.name]
    weights = phi(query * call.features.factor) @ phi(key).mT  # (BH, Nq, Nk)
    if call.is_causal:
        ones = torch.ones(weights.shape[1:], dtype=torch.bool, device=weights.device)
        weights = weights * (ones.triu(call.distance) if call.is_reversed else ones.tril(-call.distance))
    if call.key_mask is not None:
        weights = weights * call.key_mask.unsqueeze(1)
    total = weights.sum(2)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    return Partial(weights @ call.value.double() / total.unsqueeze(2), total.log().masked_fill(empty, -torch.inf))


def _check(call: LinearCall, with_backward: bool) -> None:
    """Compare the kernels that compute a call with the readable form, on a small input."""
    features = call.features._replace(of_query=_same, of_key=_same)
    dims = features.count, features.count, call.value.shape[2]
    tokens = zip(dims, call[:3], (1.0, 2.0, 3.0), strict=True)
    small = [launches.numbers((2, _CHECKED, dim), x.device, x.dtype, phase) for dim, x, phase in tokens]
    call = LinearCall(*small, None, features, call.is_causal, call.distance, call.is_reversed)
    out, lse, state = _forward(call)
    leaves = [x.double().requires_grad_() for x in small]
    expected = linear_attention_naive(LinearCall(*leaves, *call[3:]))
    tolerance = 3e-2 if call.value.dtype == torch.bfloat16 else 4e-3
    empty = expected.lse == -torch.inf
    launches.check_close(out, expected.out, tolerance)
    launches.check_close(*(x.masked_fill(empty, 0.0) for x in (lse, expected.lse)), tolerance)
    if with_backward:
        grads = [launches.numbers(tuple(x.shape), x.device, x.dtype, 5.0) for x in (out, lse)]
        wanted = torch.autograd.grad(tuple(expected), leaves, [x.double() for x in grads])
        for found, x in zip(_backward(call, out, lse, state, *grads), wanted, strict=True):
            launches.check_close(found, x, tolerance)


def _same(x: Tensor) -> Tensor:
    return x


BACKEND = LinearBackend("linear_attention", _applies, _attend)
