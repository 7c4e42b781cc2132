"""Whether a call is traced: by `torch.compile`, `torch.export` or the exporter to ONNX."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])


def is_compiling() -> bool:
    """Whether this call is traced into a graph.

    `torch.compiler.is_compiling` is a state of the whole process: it also holds for ordinary calls of other threads
    while one thread compiles. Those compute with tensors that have numbers.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    return torch.compiler.is_compiling() and type(torch.empty(0)) is not Tensor


def in_graph() -> bool:
    """Whether this call is recorded into a graph that contains calls of methods as operators: not one for ONNX."""
    return is_compiling() and not exporting_to_onnx()


def replaced_in_graphs(replacement: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Decorate a function in whose place graphs contain another one, with the same arguments."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return replacement(*args, **kwargs) if is_compiling() else function(*args, **kwargs)

        return cast(_Function, call)

    return decorate


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing. With `replaced_in_graphs`, a graph leaves out a check of values or a warning."""


def exporting_to_onnx() -> bool:
    """Whether this call is traced by `torch.onnx.export`.

    The graph must then consist of PyTorch's standard operators, and must not depend on the lengths of the example: the
    exporter drops the guards with which `torch.export` and `torch.compile` check the lengths of later calls.
    """
    is_exporting = is_compiling() and torch.compiler.is_exporting()
    return bool(is_exporting or torch.jit.is_tracing()) and in_onnx_export()


def in_onnx_export() -> bool:
    """Whether `torch.onnx.export` runs. `integration` marks the result as a constant for Dynamo."""
    return bool(torch.onnx.is_in_onnx_export())
