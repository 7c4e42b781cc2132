"""Building blocks of the forms: slices, kept tensors, random numbers, and tokens in blocks or by index.

`sliced` calls a form for some heads or blocks at a time. On a CPU such a slice is so small that its temporaries stay in
the caches, and the next slice reuses their memory. On an accelerator it is as large as a limit of memory allows, so
that there is usually one. The size of a slice changes rounding only. With a gradient each slice is computed again in
the backward pass (`torch.utils.checkpoint`). So a training step holds the temporaries of one slice, besides the inputs,
the results, and what the kernels keep.

`constant` keeps tensors that depend on nothing but numbers, such as an index, for the next call, so they must not be
modified. It also keeps the random numbers of an integer seed (`uniform`, `normal`). These are hashes of a counter
instead of draws from a generator: a seed gives the same numbers on every device, inside `torch.compile` and in any
order of calls, and the global random state is never touched. The hash is the finalizer of MurmurHash3 (Appleby, public
domain), applied twice.
"""

import functools
import inspect
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.ops.attend import attend, keeps_pairs, triton_applies
from hf_efficient_attn.ops.shards import HeadSeed, Seed, head_slice
from hf_efficient_attn.ops.tracing import exporting_to_onnx, keeping_results, replaced_in_graphs, unrecorded
from hf_efficient_attn.ops.wide import from_float64

# The largest temporary of a slice has this many numbers: 4 MiB of float32 on a CPU, 1 GiB on an accelerator.
CPU_NUMEL, ACCELERATOR_NUMEL = 1 << 20, 1 << 28

# glibc returns large blocks of freed memory to the system, so that every call would pay for new pages. It raises its
# limit for "large" to the largest block freed so far, up to 32 MiB. One block of nearly 32 MiB makes it keep the
# temporaries of a slice: without this kdeformer takes up to 1.3 times as long (AMD EPYC, 1,024 tokens, forward).
torch.empty(31 << 20, dtype=torch.uint8)


def slice_size(numel: int, device: torch.device) -> int:
    """Return how many heads or blocks to process at a time if the largest temporary of each has `numel` numbers."""
    return max(1, (CPU_NUMEL if device.type == "cpu" else ACCELERATOR_NUMEL) // max(1, numel))


def sliced(
    function: Callable[..., Tensor],
    *tensors: Tensor | None,
    size: int,
    dim: int = 0,
    draws: bool = False,
    recompute: bool = True,
) -> Tensor:
    """Call `function` with slices of the tensors and concatenate the results along `dim`.

    Args:
        function: takes the tensors and returns a tensor. It may close over other tensors, with a gradient too.
        *tensors: of the same size along `dim`, at least 1; or None, which is passed on.
        size: the size of a slice along `dim`, for example from `slice_size`.
        dim: 0 for heads, 1 for blocks.
        draws: whether the function draws from the global generator, so that the backward pass must draw the same.
        recompute: False if autograd keeps no more of the function than its arguments and results take.

    Returns:
        The same result as one call with the whole tensors.
    """
    if exporting_to_onnx():  # the same graph for every length and batch
        return function(*tensors)
    given = [x for x in tensors if x is not None]
    total = given[0].shape[dim]
    if size >= total:
        # On a CPU slices are small, and so is what autograd keeps of a whole call.
        recompute = recompute and given[0].device.type != "cpu"
        return _recomputed(function, tensors, draws) if recompute else function(*tensors)
    # The gradient of `split` is one concatenation. The gradient of each slice would be a whole tensor of zeros.
    splits = [[None] * -(-total // size) if x is None else x.split(size, dim) for x in tensors]
    parts = zip(*splits, strict=True)
    if torch.is_grad_enabled():
        return torch.cat([_recomputed(function, p, draws) if recompute else function(*p) for p in parts], dim)
    whole, start = None, 0
    for part in parts:
        out = function(*part)
        if whole is None:
            whole = out.new_empty(*out.shape[:dim], total, *out.shape[dim + 1 :])
        whole.narrow(dim, start, out.shape[dim]).copy_(out)
        start += out.shape[dim]
    assert whole is not None
    return whole


def _recomputed(function: Callable[..., Tensor], tensors: tuple[Tensor | None, ...], draws: bool) -> Tensor:
    if not torch.is_grad_enabled():
        return function(*tensors)
    out: Tensor = checkpoint(
        keeping_results(function), *tensors, use_reentrant=False, preserve_rng_state=draws, determinism_check="none"
    )
    return out


def with_zero_gradients(out: Tensor, *tensors: Tensor | None) -> Tensor:
    """Return `out`. Each of the tensors then has a gradient, of zeros if `out` does not depend on it.

    Parameters without a gradient stop DistributedDataParallel. With FSDP the processes wait for one another forever if
    a parameter has a gradient in some of them only.
    """
    if exporting_to_onnx() or not torch.is_grad_enabled():
        return out
    # Sums of no numbers are 0 whatever the tensors contain.
    zeros = [x.unsqueeze(-1)[..., :0].sum() for x in tensors if x is not None and x.requires_grad]
    return out + sum(zeros) if zeros else out


# At most so many results are kept, with at most so many bytes together. Larger results than `_LARGEST_KEPT` are not.
_KEPT, _KEPT_BYTES, _LARGEST_KEPT = 512, 1 << 25, 1 << 21


_Make = TypeVar("_Make", bound=Callable[..., Tensor])


def constant(make: _Make) -> _Make:
    """Decorate a function that makes a tensor, so that a result is kept for the next call with the same arguments.

    The last 512 results of up to 2 MiB are kept, of at most 32 MiB together. A result is not kept if the arguments
    contain a tensor, such as the seed of a call in training, or if it has no memory of its own: tensors of a graph that
    is recorded and of `torch.func` transforms have no meaning afterwards.

    The function has no side effects, and takes hashable arguments, the device among them. A result has no gradient and
    must not be modified.
    """

    def in_graph(*arguments: Any, **named: Any) -> Tensor:
        if named:
            arguments = inspect.signature(make).bind(*arguments, **named).args
        if not _contain_tensor(arguments):
            return unrecorded(make, *arguments)
        if exporting_to_onnx():
            raise UnsupportedAttentionError(
                "in training mode each call draws its own random numbers, for which ONNX has no form: call eval() on "
                "the module that you export"
            )
        return make(*arguments)

    @replaced_in_graphs(in_graph)
    @functools.wraps(make)
    def call(*arguments: Any, **named: Any) -> Tensor:
        if named:
            arguments = inspect.signature(make).bind(*arguments, **named).args
        is_fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if is_fake or _contain_tensor(arguments):
            return make(*arguments)
        key = make, arguments
        with _lock:
            if key in _results:
                _results.move_to_end(key)
                return _results[key]
        # An inference tensor could not be used in a later call with gradients.
        with torch.inference_mode(False), torch.no_grad():
            result = make(*arguments)
        if not _has_memory(result) or result.untyped_storage().nbytes() > _LARGEST_KEPT:
            return result
        with _lock:
            _results[key] = result
            size = sum(x.untyped_storage().nbytes() for x in _results.values())
            while size > _KEPT_BYTES or len(_results) > _KEPT:
                size -= _results.popitem(last=False)[1].untyped_storage().nbytes()
        return result

    return cast(_Make, call)


_results: OrderedDict[Hashable, Tensor] = OrderedDict()
_lock = threading.Lock()


def _contain_tensor(arguments: tuple[Any, ...]) -> bool:
    return any(isinstance(x, Tensor) or (isinstance(x, tuple) and _contain_tensor(x)) for x in arguments)


def _has_memory(x: Tensor) -> bool:
    """Whether a tensor is a plain one. A tensor that a `torch.func` transform has wrapped has no storage to be read."""
    try:
        return type(x) is Tensor and x.untyped_storage().nbytes() >= 0
    except (NotImplementedError, RuntimeError):
        return False


@constant
def integers(count: int, device: torch.device) -> Tensor:
    """Return 0, 1, ..., count - 1 as int64 (count,)."""
    return torch.arange(count, device=device)


_MASK = 0xFFFFFFFF
_Bits = TypeVar("_Bits", int, Tensor)


def seed_value(seed: Seed) -> int | Tensor:
    """Return the seed of the layer."""
    return seed.value if isinstance(seed, HeadSeed) else seed


def draw_sizes(count: int, first: int, factor: int, largest: int) -> list[int]:
    """Return the number of points of each draw: `first`, then `factor` times all before it, at most `largest`."""
    sizes: list[int] = []
    while sum(sizes) < count:
        sizes.append(min(largest, max(first, factor * sum(sizes)), count - sum(sizes)))
    return sizes


@constant
@from_float64
def uniform(shape: tuple[int, ...], seed: Seed, stream: int, device: torch.device) -> Tensor:
    """Draw numbers of `wide_dtype`, uniform in the open interval (0, 1). `stream` tells the uses of one seed apart."""
    return _uniform(shape, seed, stream, device)


def _uniform(shape: tuple[int, ...], seed: Seed, stream: int, device: torch.device) -> Tensor:
    start: Any = seed_value(seed) * 0x9E3779B1 + stream * 0x7F4A7C15  # an integer is mixed on the host
    bits = _mix(_mix(integers(math.prod(shape), device) + 1) + _mix(_mix(start) + stream + 1))
    numbers: Tensor = (bits.to(torch.float64) + 0.5) / 2.0**32
    return numbers.reshape(shape)


def _mix(x: _Bits) -> _Bits:
    """Mix the bits of an integer, or of every int64 number of a tensor, into 32 bits."""
    x = x & _MASK
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 16)


@constant
@from_float64
def normal(shape: tuple[int, ...], seed: Seed, stream: int, device: torch.device) -> Tensor:
    """Draw independent standard normal numbers of `wide_dtype` (Box-Muller)."""
    radius = (-2.0 * _uniform(shape, seed, 2 * stream + 101, device).log()).sqrt()
    return radius * (2.0 * math.pi * _uniform(shape, seed, 2 * stream + 102, device)).cos()


@constant
@from_float64
def offsets(num_heads: int, seed: Seed, stream: int, device: torch.device) -> Tensor:
    """Draw an offset in (0, 1) of `wide_dtype` for each head, (H,). All sequences of a batch use the same offsets.

    The offsets are multiples of the golden ratio modulo 1, so that no two heads sample alike.
    """
    head = torch.arange(num_heads, device=device, dtype=torch.float64) + head_slice(seed, num_heads).first  # (H,)
    return (uniform((1,), seed, stream, device) + head * 0.6180339887498949).frac()


def uniform_of_heads(count: int, num_heads: int, seed: Seed, stream: int, device: torch.device) -> Tensor:
    """Draw `uniform` numbers (count, H). A head gets the same numbers whichever heads a process holds."""
    first, total = head_slice(seed, num_heads)
    return uniform((count, total), seed, stream, device)[:, first : first + num_heads]


def ceil_div(number: int, divisor: int) -> int:
    """Compute the quotient of a number >= 0 and a divisor > 0, rounded up."""
    return (number + divisor - 1) // divisor  # ONNX rounds quotients of negative numbers towards 0


def count_blocks(length: int, size: int) -> int:
    """Return the number of blocks of `size` tokens that hold `length` tokens.

    In a graph for ONNX there is one more, which is empty: PyTorch's exporter takes a dimension that is 1 in the example
    for one that is always 1.
    """
    return ceil_div(length, size) + (1 if exporting_to_onnx() else 0)


def pad_to_blocks(x: Tensor, size: int) -> Tensor:
    """Split (BH, N, D) into T = `count_blocks` blocks (BH, T, size, D), the last of which ends with zeros."""
    missing = count_blocks(x.shape[1], size) * size - x.shape[1]
    if missing:
        x = pad(x, (0, 0, 0, missing))
    return x.reshape(x.shape[0], -1, size, x.shape[2])


def take(x: Tensor, index: Tensor) -> Tensor:
    """Gather the tokens of each head by index.

    Args:
        x: (BH, N, D).
        index: int64 (BH, ...), each below N.

    Returns:
        (BH, ..., D).
    """
    if x.requires_grad and torch.is_grad_enabled():
        # Gathering along the first dimension with an expanded index processes whole tokens, forward and backward.
        flat = flat_index(index, x.shape[1]).view(-1, 1).expand(-1, x.shape[2])  # (BH * ..., D)
        return x.flatten(0, 1).gather(0, flat).view(*index.shape, x.shape[2])
    # `embedding` copies a whole token at a time and is five times as fast as `gather`. With a gradient `gather` is
    # faster, because of its backward.
    return torch.embedding(x.reshape(-1, x.shape[2]), flat_index(index, x.shape[1]))


def flat_index(index: Tensor, length: int) -> Tensor:
    """Turn an index (BH, ...) into the tokens of each head into one into the tokens of all heads in turn: (BH, ...)."""
    flat: Tensor = index + _first_tokens(index.shape[0], length, index.ndim, index.device)
    return flat


@constant
def _first_tokens(batch_heads: int, length: int, ndim: int, device: torch.device) -> Tensor:
    """Return the index of each head's first token if the tokens of all heads follow one another: (BH, 1, ...)."""
    return (torch.arange(batch_heads, device=device) * length).view(-1, *[1] * (ndim - 1))


def inverse(order: Tensor) -> Tensor:
    """Invert the permutation of each head: order (BH, N) -> (BH, N) with inverse[order[i]] = i."""
    ranks = integers(order.shape[1], order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, ranks)


def valid_first(key_mask: Tensor) -> Tensor:
    """Return the stable order (BH, N) that puts valid tokens before masked ones, for a bool mask (BH, N)."""
    return (~key_mask).to(torch.int8).argsort(dim=1, stable=True)


@constant
def even_positions(kv_len: int, count: int, device: torch.device) -> Tensor:
    """Return `count` evenly spaced positions, int64 (count,)."""
    return torch.arange(count, device=device) * kv_len // count


class GatheredKeys(NamedTuple):
    """The indices of the keys of each of T blocks of queries.

    Attributes:
        key_index: int64 (BH, T, K).
        bias: (BH, T, 1 or block_q, K), added to the scores.
        block_q: the number of queries of a block.
        query_order: int64 (BH, Nq), the order in which the queries are cut into blocks, or None.
    """

    key_index: Tensor
    bias: Tensor
    block_q: int
    query_order: Tensor | None = None


def gathered_attention(
    query: Tensor, key: Tensor, value: Tensor, gathered: GatheredKeys, *, scale: float, dropout_p: float = 0.0
) -> Tensor:
    """Compute attention of blocks of queries to keys that are gathered by index.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        value: (BH, Nk, Dv).
        gathered: the keys of each block.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        (BH, Nq, Dv), in the order of the query positions.
    """
    index, bias, block_q, order = gathered
    if bias.shape[2] == 1 and not dropout_p and triton_applies(query, key, value):
        from hf_efficient_attn.ops.triton_gather import gather_attend  # Triton is no dependency

        return gather_attend(query, key, value, index, bias.squeeze(2).float(), order, block_q, scale)[0]

    def some_heads(blocks: Tensor, key: Tensor, value: Tensor, index: Tensor, bias: Tensor) -> Tensor:
        # (BH, T, block_q, Dv)
        return attend(blocks, take(key, index), take(value, index), bias, scale=scale, dropout_p=dropout_p).out

    blocks = pad_to_blocks(query if order is None else take(query, order), block_q)  # (BH, T, block_q, D)
    pairs = block_q if keeps_pairs(blocks, key[:, None], bias, scale, dropout_p) else 0
    size = slice_size(index[0].numel() * max(key.shape[2], value.shape[2], pairs), query.device)
    # (BH, T * block_q, Dv)
    out = sliced(some_heads, blocks, key, value, index, bias, size=size, draws=dropout_p > 0.0).flatten(1, 2)
    return out[:, : query.shape[1]] if order is None else take(out, inverse(order))
