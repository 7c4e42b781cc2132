"""What the Triton kernels of the package read, write and multiply, by formulas, for the model of the time on a GPU."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from hf_efficient_attn.ops.backends.launches import Launch
from hf_efficient_attn.ops.nearfar.chunks import BASE, CausalNearFarOptions, levels_of

# So many clusters are chosen by some of 64 queries of the causal form of `nearfar`, on activations of GPT-2 and MiniLM,
# in the second half of 2,048 to 8,192 tokens.
_CHOSEN = 38


class KernelCost(NamedTuple):
    """The cost of a launch.

    Attributes:
        moved: bytes that all programs read and write.
        flops: floating-point operations of the products, those of masked pairs included.
        gathered: the share of the products with keys that are read by index.
        atomics: numbers that are added atomically.
    """

    moved: float
    flops: float
    gathered: float
    atomics: float = 0.0


def _blocks(call: Launch, *, grad: bool) -> KernelCost:
    """A kernel of block attention with programs of some queries of a block.

    Where `num_listed` is given, half of the entries of a list are used, as in the causal form of sampled keys.
    """
    given = call.arguments
    constants = call.constants
    block_m = constants["BLOCK_M"]
    dims = constants["DIM"] + constants["VALUE_DIM"]
    padded = constants["PADDED"] + constants["PADDED_V"]
    itemsize = given["key"].element_size()
    in_range = _keys_of_ranges(call) * given["query"].shape[0]  # of all programs
    listed = call.grid * given["list_size"] * (0.5 if given["num_listed"] is not None else 1.0)
    in_order = 8.0 * (given["key_order"] is not None) + 1.0 * (given["key_mask"] is not None)
    rows = given["query"].shape[0] * given["q_len"]
    moved = (in_range + listed) * dims * itemsize + in_range * in_order + listed * 12.0
    moved += rows * (dims * itemsize * (2 if grad else 1) + 8.0 + 8.0 * (given["order"] is not None))
    products = 2.0 * block_m * (_padded(call, in_range) + _padded(call, listed)) * padded
    gathered = (listed + in_range * (given["key_order"] is not None)) / max(1.0, in_range + listed)
    if not grad:
        return KernelCost(moved, products, gathered)
    # A range has three products instead of two, and a list five.
    more = _padded(call, in_range) * 0.5 + _padded(call, listed) * 1.5
    return KernelCost(moved, products + 2.0 * block_m * more * padded, gathered, listed * (dims + 1.0))


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
    dims = constants["DIM"] + constants["VALUE_DIM"]
    padded = constants["PADDED"] + constants["PADDED_V"]
    itemsize = given["key"].element_size()
    rows = heads * given["kv_len"] * dims
    moved = queries * (dims * itemsize + 8.0 + 8.0 * (given["order"] is not None)) + 2.0 * rows * itemsize
    moved += 4.0 * rows * (given["listed_grad_key"] is not None)
    return KernelCost(moved, 4.0 * block_n * queries * padded, float(given["order"] is not None))


def _linear_pairs(launch: Launch) -> tuple[float, float]:
    """Count, for a head of a causal kernel, the tokens of segments that all tiles read, and the pairs they compute."""
    length, segment = launch.arguments["length"], launch.arguments["segment"]
    block_m, block_n = launch.constants["BLOCK_M"], launch.constants["BLOCK_N"]
    read = pairs = 0
    for first in range(0, length, segment):
        end = min(first + segment, length)
        for start in range(first, end, block_m):
            loaded = min(start + block_m, end) - first
            read += min(-(-loaded // block_n) * block_n, length - first)
            pairs += -(-loaded // block_n) * block_n * block_m
    return read, pairs


def _bytes(launch: Launch, *names: str) -> float:
    """Count the bytes of some tensors, per token of all heads."""
    tensors = [launch.arguments[name] for name in names]
    return sum(x.element_size() * (x.shape[2] if x.ndim == 3 else 1) for x in tensors if isinstance(x, Tensor))


def linear_state(launch: Launch) -> KernelCost:
    """A program reads its segment once and writes its state. The last segment of the causal scan is not read."""
    arguments, constants = launch.arguments, launch.constants
    length, segment, segments = (arguments[x] for x in ("length", "segment", "segments"))
    heads, state = launch.grid // segments, arguments["state"]
    tokens = min(length, (segments - 1) * segment) if constants["IS_CAUSAL"] else length
    products = -(-tokens // constants["BLOCK_N"]) * constants["BLOCK_N"] * constants["PADDED"] * constants["PADDED_V"]
    moved = heads * tokens * _bytes(launch, "token", "vector", "key_mask", "lse", "weight") + 4 * math.prod(state.shape)
    return KernelCost(moved, 2.0 * heads * products, gathered=0.0)


def _linear(launch: Launch, own: tuple[str, ...], sources: tuple[str, ...], of_state: int, of_pairs: str) -> KernelCost:
    """Count what programs read and write of their `own` tokens and of `sources`, the tokens of their segments.

    `of_state` is the number of products with the state. `of_pairs` has a letter for each product with pairs: the
    dimension of the features (f) or of the values (v).
    """
    arguments, constants = launch.arguments, launch.constants
    length, segment, segments = (arguments[x] for x in ("length", "segment", "segments"))
    heads, dims = launch.grid // segments, {"f": constants["PADDED"], "v": constants["PADDED_V"]}
    tiles = sum(-(-min(segment, length - x) // constants["BLOCK_M"]) for x in range(0, length, segment))
    flops = 2.0 * heads * tiles * constants["BLOCK_M"] * of_state * dims["f"] * dims["v"]
    moved = heads * length * _bytes(launch, *own) + launch.grid * constants["DIM"] * (constants["VALUE_DIM"] + 1) * 4
    if constants["IS_CAUSAL"]:
        read, pairs = _linear_pairs(launch)
        moved += heads * read * _bytes(launch, *sources)
        flops += 2.0 * heads * pairs * sum(dims[x] for x in of_pairs)
    return KernelCost(moved, flops, gathered=0.0)


def linear_output(launch: Launch) -> KernelCost:
    """A causal tile reads the keys of its segment up to its last query."""
    return _linear(launch, ("query", "out", "lse"), ("key", "value", "key_mask"), 1, "fv")


def linear_query_gradient(launch: Launch) -> KernelCost:
    """The same keys as in the forward. Only the causal form reads the outputs."""
    own = ("query", "grad_out", "lse", "grad_lse", "weight", "grad_query", *["out"] * launch.constants["IS_CAUSAL"])
    return _linear(launch, own, ("key", "value", "key_mask"), 1, "vf")


def linear_key_gradient(launch: Launch) -> KernelCost:
    """A causal tile reads the queries of its segment from its first key on."""
    own = ("key", "value", "key_mask", "grad_key", "grad_value")
    return _linear(launch, own, ("query", "grad_out", "lse", "weight"), 2, "vffv")


def _directions(
    launch: Launch, of_tokens: tuple[str, ...], of_directions: tuple[str, ...], products: str
) -> KernelCost:
    """Count what programs of some tokens, or of a segment and some directions, read, write and multiply.

    `products` has a letter for each product: the dimension of the tokens (d) or of the values (v).
    """
    arguments, constants = launch.arguments, launch.constants
    length, count, block_m, block_n = arguments["length"], *(constants[x] for x in ("COUNT", "BLOCK_M", "BLOCK_N"))
    heads, dims = arguments["token"].shape[0], {"d": constants["PADDED"], "v": constants["PADDED_V"]}
    directions = arguments["directions"]
    if launch.name == "direction_sums":
        blocks = -(-count // block_m)
        pairs, passes = heads * blocks * block_m * -(-length // block_n) * block_n, launch.grid / blocks
    else:
        blocks, passes = 1, launch.grid
        pairs = launch.grid * block_m * -(-count // block_n) * block_n
    moved = heads * length * blocks * _bytes(launch, *of_tokens)
    moved += passes * (count * _bytes(launch, *of_directions) + directions.numel() * directions.element_size())
    parts = directions.ndim - 1  # of the directions, each with a product
    return KernelCost(moved, 2.0 * pairs * (parts * dims["d"] + sum(dims[x] for x in products)), gathered=0.0)


def direction_sums(launch: Launch) -> KernelCost:
    """Programs of a segment read its tokens for each block of directions, and write sums."""
    of_tokens = ("token", "vector", "key_mask", "lse", "weight")
    cost = _directions(launch, of_tokens, (), "v")
    return cost._replace(moved=cost.moved + 4 * sum(launch.arguments[x].numel() for x in ("sums", "norm", "largest")))


def direction_output(launch: Launch) -> KernelCost:
    """Programs of some queries read all directions."""
    return _directions(launch, ("token", "out", "lse"), ("values", "log"), "v")


def direction_gradient(launch: Launch) -> KernelCost:
    """Programs of some queries or keys read all directions. Keys have one more product."""
    of_tokens = ("token", "vector", "key_mask", "lse", "out", "weight", "grad_token", "grad_vector")
    products = "vd" if launch.arguments["grad_vector"] is None else "vdv"
    return _directions(launch, of_tokens, ("values", "log", "offset"), products)


def cluster_landmarks(launch: Launch) -> KernelCost:
    """A program reads the keys and values of a cluster, and writes a landmark. It has no products of matrices."""
    arguments = launch.arguments
    heads, members = arguments["members"].shape
    moved = heads * members * (_bytes(launch, "key", "value") + arguments["members"].element_size())
    moved += launch.grid * (_bytes(launch, "key", "center", "mean", "block_mean", "block_root") + 16.0)
    return KernelCost(moved, 0.0, gathered=1.0)


def cluster_attention(launch: Launch) -> KernelCost:
    """Programs of a block read near keys, all landmarks that they see twice, and clusters that a query has chosen."""
    arguments, constants = launch.arguments, launch.constants
    length, block = arguments["length"], arguments["block_size"]
    levels = levels_of(length, CausalNearFarOptions(block, block // 4, 1.0))
    block_m, dim, value_dim = (constants[x] for x in ("BLOCK_M", "PADDED", "PADDED_V"))
    # Of the programs of a head: near keys and landmarks, without and with the padding of tiles, and keys of clusters
    near = landmarks = near_padded = landmarks_padded = chosen = 0.0
    for first in range(arguments["first_block"] * block, length, block):
        past = max(0, first - block)
        ended = [past // chunk % BASE * (chunk // leaf) for chunk, leaf in levels]  # clusters
        found = 0.0
        if seen := sum(ended):
            mean = sum(x * leaf for x, (_, leaf) in zip(ended, levels, strict=True)) / seen
            found = min(_CHOSEN, seen) * mean
        for start in range(first, first + block, block_m):
            own = max(0, min(start + block_m, length) - past)
            near += own
            near_padded += _in_tiles(own, constants["BLOCK_N"])
            landmarks += seen
            chosen += found
            landmarks_padded += sum(_in_tiles(x, constants["BLOCK_C"]) for x in ended)
    heads, itemsize = arguments["query"].shape[0], arguments["key"].element_size()
    flops = (near_padded + chosen + landmarks_padded) * (dim + value_dim) + landmarks_padded * dim
    flops *= 2.0 * block_m
    moved = (near + chosen + landmarks) * _bytes(launch, "key", "value") + length * _bytes(
        launch, "query", "out", "lse"
    )
    moved += landmarks * (constants["DIM"] * itemsize + 16.0)
    gathered = 2.0 * block_m * chosen * (dim + value_dim) / flops
    return KernelCost(heads * moved, heads * flops, gathered)


def _in_tiles(number: int, size: int) -> int:
    return math.ceil(number / size) * size


# Maps the name of a kernel to a function of its launch, whose tensors may be on "meta".
COSTS: dict[str, Callable[[Launch], KernelCost]] = {
    "block_forward": functools.partial(_blocks, grad=False),
    "block_query_gradients": functools.partial(_blocks, grad=True),
    "block_key_gradients": _keys,
    "linear_state": linear_state,
    "linear_output": linear_output,
    "linear_query_gradient": linear_query_gradient,
    "linear_key_gradient": linear_key_gradient,
    "direction_sums": direction_sums,
    "direction_output": direction_output,
    "direction_gradient": direction_gradient,
    "cluster_landmarks": cluster_landmarks,
    "cluster_attention": cluster_attention,
}
