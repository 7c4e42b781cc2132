"""Block attention by Triton kernels, which read the keys of a range, a window and a list where they are."""

import functools
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.ops.backends import launches
from hf_efficient_attn.ops.backends.backend import BlockBackend, BlockCall, BlockKeys, Gradients, Partial
from hf_efficient_attn.ops.backends.launches import Launch, Tile

_KERNELS = "block_forward", "block_query_gradients", "block_key_gradients"
# Maps the bytes of a number and the larger one of D and Dv, padded, to the tiles of these kernels. They fit into the
# 99 KiB of shared memory that all devices of compute capability 8.0 and later have, and in half precision into the
# registers. Gradients in float32 of more than 128 dimensions do not fit.
_TILES: dict[tuple[int, int], tuple[Tile, ...]] = {
    (2, 64): (Tile(64, 64, 4, 3), Tile(64, 32, 8, 2), Tile(64, 32, 4, 2)),
    (2, 128): (Tile(64, 64, 8, 2), Tile(64, 16, 8, 1), Tile(32, 64, 8, 2)),
    (2, 256): (Tile(64, 16, 8, 1), Tile(32, 16, 8, 1), Tile(32, 32, 8, 1)),
    (4, 64): (Tile(32, 32, 4, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    (4, 128): (Tile(32, 32, 8, 1), Tile(16, 32, 8, 1), Tile(16, 32, 8, 1)),
    (4, 256): (Tile(16, 32, 8, 1),),
}
# A check has two blocks of at most this many queries, the most of a tile, and so many keys.
_CHECKED_Q = 64
_CHECKED_K = 100


def _applies(call: BlockCall) -> bool:
    query, key, value, keys, _, dropout_p = call
    is_sorted_window = keys.window is not None and keys.start is None and keys.query_order is not None
    if dropout_p > 0.0 or is_sorted_window or not launches.takes(query, key, value):
        return False
    with_backward = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (query, key, value, keys.log_weight)
    )
    if with_backward and len(_tiles(call)) < len(_KERNELS):
        return False
    # What the kernels are compiled for
    given = tuple(name for name, x in zip(keys._fields, keys, strict=True) if isinstance(x, (Tensor, tuple)))
    sizes = query.shape[2], value.shape[2], min(_CHECKED_Q, launches.padded(keys.block_q))
    form = query.dtype, key.dtype, value.dtype, *sizes, keys.is_causal, *given, with_backward
    check = functools.partial(_check, call, given, with_backward)
    return launches.passes_check("block attention", query.device, form, check)


def _forward(call: BlockCall) -> Partial:
    query = call.query
    out = torch.empty(*query.shape[:2], call.value.shape[2], dtype=call.value.dtype, device=query.device)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    _launch("block_forward", call, {"out": out, "lse": lse})
    return Partial(out, lse)


def _backward(
    call: BlockCall, partial: Partial, grad_out: Tensor, grad_lse: Tensor | None, with_log_weight: bool
) -> Gradients:
    _, key, value, keys, *_ = call
    grad_query, grad_key, grad_value = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in call[:3])
    delta = torch.empty_like(partial.lse)
    sums: list[Tensor | None] = [None, None, None]
    if keys.listed is not None:  # the programs add to these
        shapes = key.shape, value.shape, keys.listed.shape
        sums = [torch.zeros(x, dtype=torch.float32, device=key.device) for x in shapes]
        sums[2] = sums[2] if with_log_weight else None
    others = {"lse": partial.lse, "grad_out": grad_out, "delta": delta}
    of_queries = {"out": partial.out, "grad_lse": grad_lse, "grad_query": grad_query}
    of_list = dict(zip(("grad_key", "grad_value", "grad_log_weight"), sums, strict=True))
    _launch("block_query_gradients", call, others | of_queries | of_list)
    if keys.start is None and keys.window is None:
        assert sums[0] is not None and sums[1] is not None
        return Gradients(grad_query, sums[0].to(key.dtype), sums[1].to(value.dtype), sums[2])
    of_list = {"listed_grad_key": sums[0], "listed_grad_value": sums[1]}
    _launch("block_key_gradients", call, others | of_list | {"grad_key": grad_key, "grad_value": grad_value})
    return Gradients(grad_query, grad_key, grad_value, sums[2])


def _tiles(call: BlockCall) -> tuple[Tile, ...]:
    """Return the tiles of the forward and, where they fit, of the gradients."""
    itemsize = max(2, call.key.element_size(), call.value.element_size())
    return _TILES[itemsize, launches.width(call.query.shape[2], call.value.shape[2])]


def _launch(name: str, call: BlockCall, others: dict[str, Any]) -> None:
    query, key, value, keys, scale, _ = call
    tile = _tiles(call)[_KERNELS.index(name)]
    num_blocks = -(-query.shape[1] // keys.block_q)
    if name == "block_key_gradients":
        chunks = -(-key.shape[1] // tile.block_n)
        grid = len(query) * chunks
    else:
        tile = tile._replace(block_m=min(tile.block_m, launches.padded(keys.block_q)))
        chunks = -(-keys.block_q // tile.block_m)
        grid = len(query) * num_blocks * chunks
    mask = keys.key_mask
    left, right = keys.window or (None, None)
    log_weight = None if keys.log_weight is None else keys.log_weight.float()
    arguments = {
        "query": query, "key": key, "value": value, "order": keys.query_order, "start": keys.start,
        "key_order": keys.key_order, "key_mask": None if mask is None else mask.view(torch.uint8),
        "listed": keys.listed, "log_weight": log_weight, "num_listed": keys.num_listed, **others, "scale": scale,
        "q_len": query.shape[1], "kv_len": key.shape[1], "block_q": keys.block_q, "num_blocks": num_blocks,
        "chunks": chunks, "range_len": keys.range_len, "list_size": 0 if log_weight is None else log_weight.shape[2],
        "mask_stride": 0 if mask is None or len(mask) < len(key) else key.shape[1], "left": left, "right": right,
    }  # fmt: skip
    arguments = {name: x.contiguous() if isinstance(x, Tensor) else x for name, x in arguments.items()}
    constants: dict[str, Any] = {"IS_CAUSAL": keys.is_causal, "PRECISION": launches.float32_precision()}
    constants |= launches.sizes(query.shape[2], value.shape[2], tile)
    launches.launch(Launch(name, "triton_block_attention", grid, tile, arguments, constants))


def block_attention_naive(call: BlockCall) -> Partial:
    """Compute block attention in float64 with the weights of all pairs: the readable form. Differentiable."""
    query, key, value, keys, scale, _ = call
    order, window, start = keys.query_order, keys.window, keys.start
    q_position, k_position = (torch.arange(x.shape[1], device=x.device).expand(len(x), -1) for x in (query, key))
    block = (q_position if order is None else order.argsort(1)) // keys.block_q  # (BH, Nq)
    rank = k_position if keys.key_order is None else keys.key_order.argsort(1)  # (BH, Nk)
    distance = k_position[:, None] - q_position[:, :, None]  # (BH, Nq, Nk)
    near = torch.full_like(distance, window is not None or start is not None, dtype=torch.bool)
    if start is not None:
        behind = rank[:, None] - start.gather(1, block).unsqueeze(2)
        near = near & (behind >= 0) & (behind < keys.range_len)
    if window is not None:
        near = near & (distance >= -window[0]) & (distance <= window[1])
    valid = near if keys.key_mask is None else near & keys.key_mask.expand(len(key), -1).gather(1, rank)[:, None]
    weights = valid.double()
    if keys.listed is not None and keys.log_weight is not None:
        listed = keys.log_weight.double().exp()  # (BH, T, M)
        if keys.num_listed is not None:
            unused = torch.arange(listed.shape[2], device=listed.device) >= keys.num_listed.unsqueeze(2)
            listed = listed.masked_fill(unused, 0.0)
        of_blocks = listed.new_zeros(*listed.shape[:2], key.shape[1]).scatter_add(2, keys.listed, listed)  # (BH, T, Nk)
        of_queries = of_blocks.gather(1, block.unsqueeze(2).expand(-1, -1, key.shape[1]))  # (BH, Nq, Nk)
        if start is None:
            of_queries = of_queries * ~near
        weights = weights + (of_queries * (distance <= 0) if keys.is_causal else of_queries)
    weights = (query.double() @ key.double().mT * scale).exp() * weights
    total = weights.sum(2)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    return Partial(weights @ value.double() / total.unsqueeze(2), total.log().masked_fill(empty, -torch.inf))


def _check(call: BlockCall, given: tuple[str, ...], with_backward: bool) -> None:
    """Compare the kernels that compute a call with the readable form, on a small input with the same arguments."""
    small = _small(call, given)
    found = _forward(small)
    tensors = (*small[:3], small.keys.log_weight)
    leaves = [x.double().requires_grad_() for x in tensors if x is not None]
    keys = small.keys._replace(log_weight=leaves[3] if len(leaves) > 3 else None)
    query, key, value = leaves[:3]
    expected = block_attention_naive(BlockCall(query, key, value, keys, call.scale, 0.0))
    pairs: list[Any] = [*zip(found, expected, strict=True)]
    if with_backward:
        grad_out, grad_lse = (launches.numbers(tuple(x.shape), x.device, x.dtype, 5.0) for x in found)
        wanted = torch.autograd.grad(tuple(expected), leaves, (grad_out.double(), grad_lse.double()))
        grads = _backward(small, found, grad_out, grad_lse, with_log_weight=len(leaves) > 3)
        pairs += zip(grads[: len(leaves)], wanted, strict=True)
    for x, y in pairs:
        launches.check_close(x, y, 3e-2 if torch.bfloat16 in (call.key.dtype, call.value.dtype) else 4e-3)


def _small(call: BlockCall, given: tuple[str, ...]) -> BlockCall:
    """Make a small call for the same compiled kernels, in which the same fields are given."""
    device = call.query.device
    block_q = min(_CHECKED_Q, call.keys.block_q)
    q_len = 2 * block_q - block_q // 4
    sizes = zip((q_len, _CHECKED_K, _CHECKED_K), call[:3], strict=True)
    rows = [launches.numbers((2, n, x.shape[2]), device, x.dtype, i / 4) for i, (n, x) in enumerate(sizes)]
    index = torch.arange(_CHECKED_K, device=device)
    log_weight = launches.numbers((2, 2, 24), device, torch.float32, 4.0)
    made = {
        "query_order": torch.arange(q_len, device=device).flip(0).repeat(2, 1),
        "window": (30, 9),
        "start": (index[:2] * 40 + 3).repeat(2, 1),
        "key_order": index.flip(0).repeat(2, 1),
        "key_mask": (index % 7 != 1).repeat(2, 1),
        "listed": (index[:24] * 4).repeat(2, 2, 1),
        "log_weight": log_weight.masked_fill(log_weight > 0.8, -torch.inf),
        "num_listed": torch.full((2, 2), 20, device=device),
    }
    fields = {name: made[name] for name in given}
    keys = BlockKeys(block_q, range_len=40, is_causal=call.keys.is_causal, **fields)  # type: ignore[arg-type]
    query, key, value = rows
    return BlockCall(query, key, value, keys, call.scale, 0.0)


BACKEND = BlockBackend("block_attention", _applies, _forward, _backward)
