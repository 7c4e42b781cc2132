"""What the Triton kernels of the package read, write and multiply, by formulas, for the model of the time on a GPU."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from hf_efficient_attn.ops.backends.launches import Launch


class KernelCost(NamedTuple):
    """The cost of a launch.

    Attributes:
        moved: bytes that all programs read and write.
        flops: floating-point operations of the products, those of masked pairs included.
        gathers: whether the kernel reads keys by index.
        atomics: numbers that are added atomically.
    """

    moved: float
    flops: float
    gathers: bool
    atomics: float = 0.0


def _blocks(call: Launch, *, grad: bool) -> KernelCost:
    """A kernel of block attention with programs of some queries of a block.

    Where `num_listed` is given, half of the entries of a list are used, as in the causal form of sampled keys.
    """
    given = call.arguments
    constants = call.constants
    block_m = constants["BLOCK_M"]
    dims = constants["HEAD_DIM"] + constants["VALUE_DIM"]
    padded = constants["PADDED_HEAD_DIM"] + constants["PADDED_VALUE_DIM"]
    itemsize = given["key"].element_size()
    in_range = _keys_of_ranges(call) * given["query"].shape[0]  # of all programs
    listed = call.grid * given["list_size"] * (0.5 if given["num_listed"] is not None else 1.0)
    in_order = 8.0 * (given["key_order"] is not None) + 1.0 * (given["key_mask"] is not None)
    rows = given["query"].shape[0] * given["q_len"]
    moved = (in_range + listed) * dims * itemsize + in_range * in_order + listed * 12.0
    moved += rows * (dims * itemsize * (2 if grad else 1) + 8.0 + 8.0 * (given["order"] is not None))
    products = 2.0 * block_m * (_padded(call, in_range) + _padded(call, listed)) * padded
    gathers = listed + (in_range if given["key_order"] is not None else 0.0) > 0.5 * (in_range + listed)
    if not grad:
        return KernelCost(moved, products, gathers)
    # A range has three products instead of two, and a list five.
    more = _padded(call, in_range) * 0.5 + _padded(call, listed) * 1.5
    return KernelCost(moved, products + 2.0 * block_m * more * padded, gathers, listed * (dims + 1.0))


def _padded(call: Launch, keys: float) -> float:
    """Keys of all programs, where every program computes whole tiles."""
    size = call.constants["BLOCK_N"]
    return math.ceil(keys / call.grid / size) * size * call.grid


def _keys_of_ranges(call: Launch) -> float:
    """The keys of the ranges or windows of all programs of a head."""
    given = call.arguments
    if given["start"] is not None:
        return given["num_blocks"] * given["chunks"] * min(given["range_len"], given["kv_len"])
    if given["left"] is None:
        return 0.0
    block_q = given["block_q"]
    firsts = (
        (block + chunk, min(block + chunk + call.constants["BLOCK_M"], block + block_q, given["q_len"]))
        for block in range(0, given["num_blocks"] * block_q, block_q)
        for chunk in range(0, given["chunks"] * call.constants["BLOCK_M"], call.constants["BLOCK_M"])
    )
    windows = (min(last + given["right"], given["kv_len"]) - max(first - given["left"], 0) for first, last in firsts)
    return float(sum(max(0, x) for x in windows))


def _keys(call: Launch) -> KernelCost:
    """The kernel of block attention with programs of some keys. Ranges begin evenly distributed."""
    given = call.arguments
    constants = call.constants
    block_n = constants["BLOCK_N"]
    heads = given["key"].shape[0]
    if given["start"] is not None:
        of_head = given["num_blocks"] * given["block_q"] * (given["range_len"] / block_n + 1.0)
    else:
        bounds = ((max(x - given["right"], 0), x + block_n + given["left"]) for x in range(0, given["kv_len"], block_n))
        of_head = sum(max(0, min(last, given["q_len"]) - first) for first, last in bounds)
    queries = heads * of_head  # of all programs
    dims = constants["HEAD_DIM"] + constants["VALUE_DIM"]
    padded = constants["PADDED_HEAD_DIM"] + constants["PADDED_VALUE_DIM"]
    itemsize = given["key"].element_size()
    rows = heads * given["kv_len"] * dims
    moved = queries * (dims * itemsize + 8.0 + 8.0 * (given["order"] is not None)) + 2.0 * rows * itemsize
    moved += 4.0 * rows * (given["listed_grad_key"] is not None)
    return KernelCost(moved, 4.0 * block_n * queries * padded, given["order"] is not None)


# Maps the name of a kernel to a function of its launch, whose tensors may be on "meta".
COSTS: dict[str, Callable[[Launch], KernelCost]] = {
    "block_forward": functools.partial(_blocks, grad=False),
    "block_query_gradients": functools.partial(_blocks, grad=True),
    "block_key_gradients": _keys,
}
