"""Linear attention by Triton kernels, which compute features in registers.

A forward launches two kernels and a backward three, besides the sums of the states of segments: float32
(BH, segments, F (Dv + 1)), sums of features times values and of features. Without causality these become the state of
all tokens, and in the causal form the state before each segment.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.ops.backends import launches
from hf_efficient_attn.ops.backends.backend import LinearBackend, LinearCall, Partial
from hf_efficient_attn.ops.backends.launches import Tile

# Maps the precision of products and the larger one of F and Dv, padded, to the tiles of each kernel. Other calls do not
# fit into the registers and the 99 KiB of shared memory that all devices of compute capability 8.0 and later have.
_KERNELS = ("linear_state", "linear_output", "linear_query_gradient", "linear_key_gradient")
_TILES = {
    ("bf16", 64): (Tile(64, 64, 4, 2), Tile(128, 64, 8, 2), Tile(128, 64, 8, 2), Tile(64, 32, 8, 1)),
    ("bf16", 128): (Tile(64, 32, 8, 2), Tile(32, 32, 4, 2), Tile(32, 32, 8, 2), Tile(32, 16, 4, 1)),
    ("tf32", 64): (Tile(64, 32, 4, 2), Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(32, 32, 4, 1)),
    ("tf32x3", 64): (Tile(64, 32, 8, 2), Tile(32, 32, 4, 2), Tile(32, 16, 4, 1), Tile(16, 16, 4, 1)),
}
# Tokens of a segment of the causal scan. Without causality there are about `_PROGRAMS` segments of at least as many.
_SEGMENT = 256
_PROGRAMS = 1024
# Tokens of a check: more than a segment.
_CHECKED = 300
_FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: x.relu() + (x - x.relu()).exp(),
    "t2r": torch.relu,
    "hedgehog": lambda x: x.softmax(-1),
    "exp": torch.exp,
}


def _kernels() -> ModuleType:
    from hf_efficient_attn.ops.backends import triton_linear_attention  # Triton is no dependency

    return triton_linear_attention


def _precision(value: Tensor) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "tf32"}.get(value.dtype, "tf32x3")


def _width(call: LinearCall) -> int:
    return max(64, launches.padded(max(call.features.num_features, call.value.shape[2])))


def _applies(call: LinearCall) -> bool:
    query, key, value = tensors = call[:3]
    if not launches.takes(*tensors) or (_precision(value), _width(call)) not in _TILES:
        return False
    if (call.is_causal and query.shape[1] != key.shape[1]) or min(x.numel() for x in tensors) == 0:
        return False
    if max(query.shape[1], key.shape[1]) * _width(call) >= 1 << 31:  # offsets within a head
        return False
    with_backward = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    direction = call.is_causal, call.is_reversed, call.distance > 0, call.key_mask is not None
    form = *(x.dtype for x in tensors), *call.features[:2], value.shape[2], *direction, with_backward
    return launches.passes_check("linear attention", query.device, form, functools.partial(_check, call, with_backward))


def _attend(call: LinearCall) -> Partial:
    tensors = call.features.of_query(call.query), call.features.of_key(call.key), call.value  # (BH, N, F or Dv)
    mask = None if call.key_mask is None else call.key_mask.expand(len(call.key), -1).contiguous().view(torch.uint8)
    return Partial(*_LinearAttention.apply(*(x.contiguous() for x in tensors), mask, *call[4:]))  # type: ignore[no-untyped-call]


class _LinearAttention(torch.autograd.Function):
    """Output and lse, from contiguous tensors with the numbers that features are computed from."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        call = LinearCall(*given)
        out, lse, state = _forward(call)
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
    query, key, value = call[:3]
    state = _state(call, call.is_reversed, token=key, vector=value, key_mask=call.key_mask, lse=None, weight=None)
    out = torch.empty(*query.shape[:2], value.shape[2], dtype=value.dtype, device=value.device)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=value.device)
    _launch("linear_output", call, query, call.is_reversed, **_tensors(call), state=state, out=out, lse=lse)
    return out, lse, state


def _backward(
    call: LinearCall, out: Tensor, lse: Tensor, state: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    query, key, value = call[:3]
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    weight = torch.empty_like(lse)
    given = {**_tensors(call), "lse": lse, "weight": weight, "grad_out": grad_out.contiguous()}
    of_lse = None if grad_lse is None else grad_lse.contiguous()
    more = {"state": state, "out": out, "grad_lse": of_lse, "grad_query": grads[0]}
    _launch("linear_query_gradient", call, query, call.is_reversed, **given, **more)
    backward = not call.is_reversed  # the direction of the scan of queries
    state = _state(call, backward, token=query, vector=given["grad_out"], key_mask=None, lse=lse, weight=weight)
    more = {"state": state, "grad_key": grads[1], "grad_value": grads[2]}
    _launch("linear_key_gradient", call, key, backward, **given, **more)
    return grads


def _tensors(call: LinearCall) -> dict[str, Tensor | None]:
    return {"query": call.query, "key": call.key, "value": call.value, "key_mask": call.key_mask}


def _segment(call: LinearCall, length: int) -> int:
    """Return the number of tokens of a program, a power of two."""
    return max(_SEGMENT, launches.padded(1 if call.is_causal else -(-len(call.value) * length // _PROGRAMS)))


def _state(call: LinearCall, is_reversed: bool, **tensors: Any) -> Tensor:
    """Compute the state before each segment, or that of all tokens."""
    tokens = tensors["token"]
    segments = -(-tokens.shape[1] // _segment(call, tokens.shape[1]))
    shape = len(tokens), segments, tokens.shape[2] * (call.value.shape[2] + 1)
    state = torch.empty(shape, dtype=torch.float32, device=tokens.device)
    _launch("linear_state", call, tokens, is_reversed, **tensors, state=state)
    return state.cumsum_(1) if call.is_causal else state.sum(1)


def _launch(name: str, call: LinearCall, tokens: Tensor, is_reversed: bool, **tensors: Any) -> None:
    """Run a kernel whose programs have a segment of the tokens each."""
    length, dim = tokens.shape[1:]
    segment = _segment(call, length)
    segments = -(-length // segment)
    tile = _TILES[_precision(call.value), _width(call)][_KERNELS.index(name)]
    arguments = {
        **tensors,
        "factor": call.features.factor,
        "length": length,
        "segment": segment,
        "segments": segments,
        "distance": call.distance,
    }
    constants = {
        "IS_CAUSAL": call.is_causal,
        "IS_REVERSED": is_reversed,
        "FEATURES": call.features.name,
        "PRECISION": _precision(call.value),
        "DIM": dim,
        "VALUE_DIM": call.value.shape[2],
        "PADDED": launches.padded(dim),
        "PADDED_V": launches.padded(call.value.shape[2]),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }
    grid = len(tokens) * segments
    launches.launch(launches.Launch(name, _kernels, grid, arguments, constants, tile.num_warps, tile.num_stages))


def linear_attention_naive(call: LinearCall) -> Partial:
    """Compute linear attention in float64 with the weights of all pairs: the readable form. Differentiable."""
    query, key = call.features.of_query(call.query.double()), call.features.of_key(call.key.double())
    phi = _FORMULAS[call.features.name]
    weights = phi(query * call.features.factor) @ phi(key).mT  # (BH, Nq, Nk)
    if call.is_causal:
        ones = torch.ones(weights.shape[1:], dtype=torch.bool, device=weights.device)
        weights = weights * (ones.triu(call.distance) if call.is_reversed else ones.tril(-call.distance))
    if call.key_mask is not None:
        weights = weights * call.key_mask.unsqueeze(1)  # (BH, 1, Nk)
    total = weights.sum(2)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    return Partial(weights @ call.value.double() / total.unsqueeze(2), total.log().masked_fill(empty, -torch.inf))


def _check(call: LinearCall, with_backward: bool) -> None:
    """Compare the kernels that compute a call with the readable form, on a small input."""
    dims = call.features.num_features, call.features.num_features, call.value.shape[2]
    tokens = zip(dims, call[:3], (1.0, 2.0, 3.0), strict=True)
    small = [launches.numbers((2, _CHECKED, dim), x.device, x.dtype, phase) for dim, x, phase in tokens]
    features = call.features._replace(of_query=lambda query: query, of_key=lambda key: key)
    mask = None  # (2, N)
    if call.key_mask is not None:
        mask = (torch.arange(_CHECKED, device=call.value.device) % 7 != 1).repeat(2, 1).view(torch.uint8)
    distance = min(call.distance, _CHECKED // 3)
    query, key, value = small
    call = LinearCall(query, key, value, mask, features, call.is_causal, distance, call.is_reversed)
    out, lse, state = _forward(call)
    query, key, value = leaves = [x.double().requires_grad_() for x in small]
    expected = linear_attention_naive(call._replace(query=query, key=key, value=value))
    tolerance = 3e-2 if call.value.dtype == torch.bfloat16 else 4e-3
    empty = expected.lse == -torch.inf
    launches.check_close(out, expected.out, tolerance)
    launches.check_close(lse.masked_fill(empty, 0.0), expected.lse.masked_fill(empty, 0.0), tolerance)
    if with_backward:
        grads = [launches.numbers(tuple(x.shape), x.device, x.dtype, 5.0) for x in (out, lse)]
        wanted = torch.autograd.grad(tuple(expected), leaves, [x.double() for x in grads])
        for found, x in zip(_backward(call, out, lse, state, *grads), wanted, strict=True):
            launches.check_close(found, x, tolerance)


BACKEND = LinearBackend("linear_attention", _applies, _attend)
