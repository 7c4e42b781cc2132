"""Causal attention to near keys, landmarks and chosen clusters by two Triton kernels. They have no gradients."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.ops.backends import launches
from hf_efficient_attn.ops.backends.backend import ClusterBackend, ClusterCall, Partial
from hf_efficient_attn.ops.backends.launches import Launch, Tile

# Maps the bytes of a number and the larger one of D and Dv, padded, to the tile of queries and near keys.
_TILES = {
    (2, 64): Tile(64, 64, 4, 1),
    (2, 128): Tile(64, 32, 4, 1),
    (2, 256): Tile(32, 16, 8, 1),
    (4, 64): Tile(32, 32, 4, 1),
    (4, 128): Tile(16, 32, 8, 1),
    (4, 256): Tile(16, 16, 8, 1),
}
_KERNELS = "triton_cluster_attention"
# Landmarks and keys of a cluster are processed so many at a time.
_LANDMARKS = 32
_KEYS = 64


def _applies(call: ClusterCall, plain: Callable[[ClusterCall], Partial]) -> bool:
    tensors = call[:3]
    if not launches.takes(*tensors) or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return False
    form = *(x.dtype for x in tensors), call.query.shape[2], call.value.shape[2], call.block_size, call.levels[0]
    return launches.passes_check("clusters", call.query.device, form, lambda: check(call, plain))


def check(call: ClusterCall, plain: Callable[[ClusterCall], Partial]) -> None:
    """Compare the kernels that compute a call with `plain` in float64, on a small input."""
    block = call.block_size
    device = call.query.device
    leaf = call.levels[0][1]
    levels = call.levels[0], (call.rule.base * block, leaf // math.gcd(leaf, 4))
    length = (call.rule.base + 2) * block + block // 2
    # Scores are between -2 and 2. The clusters of the first level are chosen, and smaller ones are not.
    query, key, value = (
        launches.numbers((2, length, x.shape[2]), device, x.dtype, phase)
        for x, phase in zip(call[:3], (1.0, 1.0, 2.0), strict=True)
    )
    scale = 4.0 / query.shape[2]
    members = torch.cat([torch.arange(length // chunk * chunk, device=device).flip(0) for chunk, _ in levels])
    sizes = torch.tensor(levels, dtype=torch.int32, device=device)
    blocks = query[:, : length // block * block].double().unflatten(1, (-1, block))
    means = blocks.mean(2).float() * scale, blocks.square().mean(2).sqrt().float() * scale
    small = ClusterCall(query, key, value, members.repeat(2, 1), *means, sizes, block, levels, call.rule, scale)
    exact: list[Any] = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in small]
    for x, y in zip(_attend(small), plain(ClusterCall(*exact)), strict=True):
        # A rounded score may change a choice, which is no fault. So the error is that of all queries together.
        error = torch.linalg.vector_norm(x.double() - y) / torch.linalg.vector_norm(y)
        launches.check_close(error, torch.zeros_like(error), 3e-2 if call.value.dtype == torch.bfloat16 else 1e-2)


def _attend(call: ClusterCall) -> Partial:
    query, key, value = (x.contiguous() for x in call[:3])
    (heads, length, head_dim), value_dim = query.shape, value.shape[2]
    clusters = sum(length // chunk * (chunk // leaf) for chunk, leaf in call.levels)
    landmarks = {
        "center": key.new_empty(heads, clusters, head_dim),
        "mean": value.new_empty(heads, clusters, value_dim),
    }
    landmarks |= {x: key.new_empty(heads, clusters, dtype=torch.float32) for x in ("log_weight", "margin")}
    block_n = min(_KEYS, launches.padded(call.levels[0][1]))
    shared: dict[str, Any] = {
        "key": key, "value": value, "members": call.members.contiguous(), **landmarks, "length": length,
        "clusters": clusters, "num_members": call.members.shape[1], "block_size": call.block_size,
        "levels": call.sizes, "num_levels": len(call.levels),
    }  # fmt: skip
    rule = call.rule._asdict()
    dims: dict[str, Any] = launches.sizes(head_dim, value_dim) | {"BLOCK_L": block_n}
    width = launches.width(head_dim, value_dim)
    arguments = shared | {name: rule[name] for name in ("weighted", "growth", "least_spread", "largest_spread")}
    of_blocks = {"block_mean": call.block_mean.contiguous(), "block_root": call.block_root.contiguous()}
    arguments |= of_blocks | {"num_blocks": call.block_mean.shape[1]}
    tile = Tile(1, block_n, width // 32, 1)
    launches.launch(Launch("cluster_landmarks", _KERNELS, heads * clusters, tile, arguments, dims))
    tile = _TILES[max(2, key.element_size(), value.element_size()), width]
    tile = tile._replace(block_m=min(tile.block_m, launches.padded(call.block_size)))
    first_block = call.first_query // call.block_size
    num_blocks = -(-length // call.block_size)
    chunks = -(-call.block_size // tile.block_m)
    new = torch.zeros if first_block else torch.empty
    out = new(heads, length, value_dim, dtype=value.dtype, device=value.device)
    lse = new(heads, length, dtype=torch.float32, device=value.device)
    arguments = shared | {name: rule[name] for name in ("base", "most", "least")} | {
        "query": query, "out": out, "lse": lse, "num_blocks": num_blocks, "first_block": first_block, "chunks": chunks,
        "scale": call.scale,
    }  # fmt: skip
    constants = dims | launches.sizes(head_dim, value_dim, tile)
    constants |= {"BLOCK_C": _LANDMARKS, "PRECISION": launches.float32_precision()}
    grid = heads * (num_blocks - first_block) * chunks
    launches.launch(Launch("cluster_attention", _KERNELS, grid, tile, arguments, constants))
    return Partial(out, lse)


BACKEND = ClusterBackend("cluster_attention", _applies, _attend)
