"""Bidirectional attention through random features by Triton kernels.

A forward launches two kernels and a backward three. Between them are the sums of keys or queries for each direction,
float32 (BH, segments, F, Dv) with their norms and largest logs (BH, segments, F).
"""

import math
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.ops.backends import launches, linear_attention
from hf_efficient_attn.ops.backends.backend import LinearBackend, LinearCall, Partial
from hf_efficient_attn.ops.backends.launches import Launch, Tile

# Maps the precision of products and the larger one of D and Dv, padded, to the tiles of each kernel.
_KERNELS = ("direction_sums", "direction_output", "direction_gradient")
_TILES = {
    ("bf16", 64): (Tile(64, 64, 8, 2), Tile(128, 64, 8, 2), Tile(128, 32, 8, 2)),
    ("bf16", 128): (Tile(64, 32, 8, 2), Tile(128, 32, 8, 2), Tile(32, 32, 8, 1)),
    ("tf32", 64): (Tile(64, 32, 8, 2), Tile(64, 32, 8, 2), Tile(64, 16, 8, 1)),
    ("tf32x3", 64): (Tile(32, 32, 8, 1), Tile(64, 32, 8, 2), Tile(32, 32, 8, 1)),
}
# There are about `_PROGRAMS` programs with a segment of at least `_SEGMENT` tokens.
_SEGMENT = 256
_PROGRAMS = 1024
_LOG2_E = math.log2(math.e)


def _width(call: LinearCall) -> int:
    return launches.width(call.query.shape[2], call.value.shape[2])


def _applies(call: LinearCall) -> bool:
    if call.features.directions is None or call.is_causal:
        return False
    if not call.query.dtype == call.key.dtype == call.value.dtype:
        return False
    if (linear_attention.precision(call.value), _width(call)) not in _TILES:
        return False
    suits = linear_attention.suits(call, _width(call))
    return suits and linear_attention.passes_check("random features", call, _attend)


def _attend(call: LinearCall) -> Partial:
    exact = call.features.directions
    assert exact is not None
    directions = exact.to(call.key.dtype)  # (F, D)
    if call.key.dtype != torch.float32:
        directions = torch.stack((directions, (exact - directions).to(call.key.dtype)))  # (2, F, D)
    call = call._replace(features=call.features._replace(directions=directions))
    out, lse = linear_attention.run(_forward, _backward, call)
    return Partial(out, lse.new_empty(0))


def _forward(call: LinearCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out (BH, Nq, Dv), the lse of queries (BH, Nq), and values (BH, F, Dv) and logs (BH, F) of directions."""
    query, key, value = call[:3]
    sums, norm, log = _sums(call, key, vector=value, key_mask=call.key_mask, lse=None, weight=None)
    values = _rounded(sums / norm.clamp(min=1e-30).unsqueeze(2), value)
    log = log + norm.log2()
    out = torch.empty(*query.shape[:2], value.shape[2], dtype=value.dtype, device=value.device)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=value.device)
    _launch("direction_output", call, query, lse, values=values, log=log, out=out)
    return out, lse, values, log


def _backward(
    call: LinearCall, out: Tensor, lse: Tensor, values: Tensor, log: Tensor, grad_out: Tensor, _: None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    query, key, value = call[:3]
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    given: dict[str, Any] = {"vector": grad_out, "key_mask": None, "weight": torch.empty_like(lse)}
    more: dict[str, Any] = {
        "out": out,
        "values": values,
        "log": log,
        "offset": None,
        "grad_token": grads[0],
        "grad_vector": None,
    }
    _launch("direction_gradient", call, query, lse, **given, **more)
    sums, norm, largest = _sums(call, query, lse=lse, **given)
    factor = torch.exp2(largest + log)  # (BH, F)
    more = {"out": None, "weight": None, "grad_token": grads[1], "grad_vector": grads[2]}
    more |= {"values": _rounded(sums * factor.unsqueeze(2), value), "log": -log, "offset": norm * factor}
    _launch("direction_gradient", call, key, None, vector=value, key_mask=call.key_mask, **more)
    return grads


def _rounded(x: Tensor, value: Tensor) -> Tensor:
    """Round operands of products, except for float16, whose range they can exceed."""
    return x.to(value.dtype if value.dtype == torch.bfloat16 else torch.float32)


def _sums(call: LinearCall, tokens: Tensor, **given: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums of vectors (BH, F, Dv) and of weights (BH, F), relative to powers of two, and their logs (BH, F)."""
    heads, length, _ = tokens.shape
    count = call.features.num_features
    block = _tile(call, "direction_sums").block_m
    segment = max(_SEGMENT, launches.padded(-(-heads * -(-count // block) * length // _PROGRAMS)))
    segments = -(-length // segment)
    sums = torch.empty(heads, segments, count, call.value.shape[2], dtype=torch.float32, device=tokens.device)
    norm, largest = torch.empty_like(sums[..., 0]), torch.empty_like(sums[..., 0])
    more: dict[str, Any] = {"sums": sums, "norm": norm, "largest": largest, "segment": segment, "segments": segments}
    _launch("direction_sums", call, tokens, **given, **more)
    log = largest.amax(1)
    factor = torch.exp2(largest - log.unsqueeze(1))  # (BH, segments, F)
    return (sums * factor.unsqueeze(3)).sum(1), (norm * factor).sum(1), log


def _tile(call: LinearCall, name: str) -> Tile:
    return _TILES[linear_attention.precision(call.value), _width(call)][_KERNELS.index(name)]


def _launch(name: str, call: LinearCall, token: Tensor, lse: Tensor | None, **given: Any) -> None:
    """Run a kernel for queries, which have an lse, or for keys."""
    heads, length, dim = token.shape
    scale = call.features.scale
    arguments = {"token": token, "lse": lse, "directions": call.features.directions, "length": length, **given}
    arguments["factor"] = math.copysign(_LOG2_E, 1.0 if lse is None else scale)
    tile = _tile(call, name)
    programs = -(-length // tile.block_m)
    if name == "direction_sums":
        programs = given["segments"] * -(-call.features.num_features // tile.block_m)
    if name != "direction_output":
        arguments["half"] = 0.5 * abs(scale) * _LOG2_E if lse is None else 0.0
    constants = {
        "PRECISION": linear_attention.precision(token),
        "COUNT": call.features.num_features,
        **launches.sizes(dim, call.value.shape[2], tile),
    }
    launches.launch(Launch(name, "triton_random_features", heads * programs, tile, arguments, constants))


BACKEND = LinearBackend("random_features", _applies, _attend)
