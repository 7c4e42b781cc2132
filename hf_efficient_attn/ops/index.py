"""Tensors that are kept for the next call (`constant`), and tokens in blocks and by index."""

import functools
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.ops.backends.devices import adds_by_index
from hf_efficient_attn.ops.tracing import exporting_to_onnx, replaced_in_graphs, unrecorded

# At most so many results are kept, with at most so many bytes together. Larger results than `_LARGEST_KEPT` are not.
_KEPT = 512
_KEPT_BYTES = 1 << 25
_LARGEST_KEPT = 1 << 21
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
    return x.reshape(x.shape[0], -1, size, x.shape[2])  # (BH, T, size, D)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Gather the tokens of each head by index: x (BH, N, D), int64 (BH, ...) below N -> (BH, ..., D)."""
    if x.requires_grad and torch.is_grad_enabled() and adds_by_index(x.device):
        # Gathering along the first dimension with an expanded index processes whole tokens, forward and backward.
        flat = flat_index(index, x.shape[1]).view(-1, 1).expand(-1, x.shape[2])  # (BH * ..., D)
        return x.flatten(0, 1).gather(0, flat).view(*index.shape, x.shape[2])
    # `embedding` copies a whole token at a time and is five times as fast as `gather`. Its backward sorts the index
    # instead of adding to tokens atomically; on a CPU that of `gather` is faster.
    return torch.embedding(x.reshape(-1, x.shape[2]), flat_index(index, x.shape[1]))


def flat_index(index: Tensor, length: int) -> Tensor:
    """Turn an index (BH, ...) into the tokens of each head into one into the tokens of all heads in turn: (BH, ...)."""
    flat: Tensor = index + _first_tokens(index.shape[0], length, index.ndim, index.device)
    return flat


@constant
def _first_tokens(batch_heads: int, length: int, ndim: int, device: torch.device) -> Tensor:
    """Return the index of each head's first token if the tokens of all heads follow one another: (BH, 1, ...)."""
    return (torch.arange(batch_heads, device=device) * length).view(-1, *[1] * (ndim - 1))


def clamp_index(index: Tensor, last: Tensor | int) -> Tensor:
    """Clamp indices in place to 0 .. last, and to 0 where `last` is negative."""
    if isinstance(last, int):  # one operation
        return index.clamp_(0, max(0, last))
    return index.clamp_(max=last).clamp_(min=0)


def inverse(order: Tensor) -> Tensor:
    """Invert the permutation of each head: order (BH, N) -> (BH, N) with inverse[order[i]] = i."""
    return torch.empty_like(order).scatter_(1, order, integers(order.shape[1], order.device).expand_as(order))


def valid_first(key_mask: Tensor) -> Tensor:
    """Return the stable order (BH, N) that puts valid tokens before masked ones, for a bool mask (BH, N)."""
    return (~key_mask).to(torch.int8).argsort(dim=1, stable=True)
