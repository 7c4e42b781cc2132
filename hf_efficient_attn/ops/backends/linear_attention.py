"""Linear attention by Triton kernels, which compute features in registers.

A forward launches two kernels and a backward three, besides the sums of the states of segments: float32
(BH, segments, F (Dv + 1)), sums of features times values and of features.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.ops.backends import launches
from hf_efficient_attn.ops.backends.backend import LinearBackend, LinearCall, Partial
from hf_efficient_attn.ops.backends.launches import Launch, Tile

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
    "favor": torch.exp,
    "elu": lambda x: x.relu() + (x - x.relu()).exp(),
    "t2r": torch.relu,
    "hedgehog": lambda x: x.softmax(-1),
    "exp": torch.exp,
}


def precision(value: Tensor) -> str:
    """Return the precision of products for a dtype of values."""
    return {torch.bfloat16: "bf16", torch.float16: "tf32"}.get(value.dtype, "tf32x3")


def _width(call: LinearCall) -> int:
    return launches.width(call.features.num_features, call.value.shape[2])


def suits(call: LinearCall, width: int) -> bool:
    """Whether kernels that hold `width` numbers of a token may compute a call."""
    if not launches.takes(*call[:3]) or min(x.numel() for x in call[:3]) == 0:
        return False
    return max(call.query.shape[1], call.key.shape[1]) * width < 1 << 31  # offsets within a head


def passes_check(name: str, call: LinearCall, attend: Callable[[LinearCall], Partial]) -> bool:
    """Whether the kernels of `attend` agree with the readable form on a small input."""
    tensors = call[:3]
    with_backward = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    direction = call.is_causal, call.is_reversed, call.distance > 0, call.key_mask is not None
    form = *((x.dtype, x.shape[2]) for x in tensors), *call.features[:2], *direction, with_backward
    check = functools.partial(check_attend, call, attend, with_backward)
    return launches.passes_check(name, call.query.device, form, check)


def _applies(call: LinearCall) -> bool:
    if call.features.directions is not None or (precision(call.value), _width(call)) not in _TILES:
        return False
    if call.is_causal and call.query.shape[1] != call.key.shape[1]:
        return False
    return suits(call, _width(call)) and passes_check("linear attention", call, _attend)


def _attend(call: LinearCall) -> Partial:
    query, key = call.features.of_query(call.query), call.features.of_key(call.key)  # (BH, N, F)
    return run(_forward, _backward, call._replace(query=query, key=key))


def run(
    forward: Callable[[LinearCall], tuple[Tensor, ...]], backward: Callable[..., tuple[Tensor, ...]], call: LinearCall
) -> Partial:
    """Compute a call whose gradients are those of `backward`, with contiguous tensors."""
    mask = None if call.key_mask is None else call.key_mask.expand(len(call.key), -1).contiguous().view(torch.uint8)
    return Partial(*_Kernels.apply(forward, backward, *(x.contiguous() for x in call[:3]), mask, *call[4:]))  # type: ignore[no-untyped-call]


class _Kernels(torch.autograd.Function):
    """Output and lse. forward(call) returns them with other tensors, and backward(call, *all, *grads) gradients."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *given: Any) -> tuple[Tensor, Tensor]:
        call = LinearCall(*given)
        out, lse, *more = forward(call)
        ctx.save_for_backward(*call[:4], out, lse, *more)
        ctx.backward_of_call = backward
        ctx.others = call[4:]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, *more = ctx.saved_tensors
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out.contiguous()
        call = LinearCall(query, key, value, mask, *ctx.others)
        grads = ctx.backward_of_call(call, out, *more, grad_out, grad_lse)
        return None, None, *grads, *[None] * (1 + len(ctx.others))


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
    given = {**_tensors(call), "lse": lse, "weight": weight, "grad_out": grad_out}
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
    tile = _TILES[precision(call.value), _width(call)][_KERNELS.index(name)]
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
        "PRECISION": precision(call.value),
        **launches.sizes(dim, call.value.shape[2], tile),
    }
    launches.launch(Launch(name, "triton_linear_attention", len(tokens) * segments, tile, arguments, constants))


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


def check_attend(call: LinearCall, attend: Callable[[LinearCall], Partial], with_backward: bool) -> None:
    """Compare the kernels that compute a call with the readable form, on a small input."""
    features = call.features
    dims = [x.shape[2] for x in call[:3]]
    if features.directions is None:  # begin with the numbers of the features
        dims[:2] = [features.num_features] * 2
        features = features._replace(of_query=lambda query: query, of_key=lambda key: key)
    tokens = zip(dims, call[:3], (1.0, 2.0, 3.0), strict=True)
    leaves = [
        launches.numbers((2, _CHECKED, dim), x.device, x.dtype, phase).requires_grad_() for dim, x, phase in tokens
    ]
    mask = None  # (2, N)
    if call.key_mask is not None:
        mask = (torch.arange(_CHECKED, device=call.value.device) % 7 != 1).repeat(2, 1)
    distance = min(call.distance, _CHECKED // 3)
    query, key, value = leaves
    call = LinearCall(query, key, value, mask, features, call.is_causal, distance, call.is_reversed)
    count = 2 if features.directions is None else 1
    found, wanted = attend(call)[:count], linear_attention_naive(call)[:count]
    if with_backward:
        grads = [launches.numbers(tuple(x.shape), x.device, x.dtype, 5.0) for x in found]
        found += torch.autograd.grad(found, leaves, grads)
        wanted += torch.autograd.grad(wanted, leaves, [x.double() for x in grads])
    for x, y in zip(found, wanted, strict=True):
        launches.check_close(x, y, 3e-2 if call.value.dtype == torch.bfloat16 else 4e-3)


BACKEND = LinearBackend("linear_attention", _applies, _attend)
