"""Tensors that depend on nothing but numbers, such as an index, are kept for the next call (`constant`)."""

import functools
import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.ops.tracing import exporting_to_onnx, replaced_in_graphs, unrecorded

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
