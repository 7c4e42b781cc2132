"""Which form of an operation runs: for the CPU, by the kernels of PyTorch's libraries, or by our own Triton kernels.

An operation with several forms asks `backend` and calls one of them; methods do not know which. Triton is no
dependency: only the modules `ops.triton_*` import it, and only the "triton" forms import these.
"""

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

Backend = Literal["cpu", "library", "triton"]

_HAS_TRITON = importlib.util.find_spec("triton") is not None
# A plain global: autograd's threads of a device see no context variable of the thread that called them.
_override: Backend | None = None


def backend(*tensors: Tensor) -> Backend:
    """The form of an operation on these tensors, by the device of the first.

    Returns:
        "cpu" for tensors on the CPU: loops over chunks that stay in its caches. "triton" for CUDA tensors if Triton can
        be imported and the device has bfloat16 products, else "library": few launches of PyTorch's own kernels. Meta
        tensors take the "library" form. `use_backend` overrides all of this.
    """
    if _override is not None:
        return _override
    device = tensors[0].device
    if device.type == "cpu":
        return "cpu"
    return "triton" if device.type == "cuda" and _HAS_TRITON and _computes_bfloat16(device.index) else "library"


@contextlib.contextmanager
def use_backend(name: Backend) -> Iterator[None]:
    """Within this context every operation takes the given form, whatever the device of its tensors.

    For tests. On the CPU the "library" form replaces PyTorch's CUDA kernels by plain products, and the "triton" form
    needs Triton's interpreter.

    Raises:
        ValueError: if there is no form of this name.
    """
    global _override
    if name not in get_args(Backend):
        raise ValueError(f"there is no backend {name!r}: choose one of {', '.join(get_args(Backend))}")
    previous, _override = _override, name
    try:
        yield
    finally:
        _override = previous


@functools.cache
def _computes_bfloat16(device_index: int) -> bool:
    """Whether the tensor cores of a CUDA device multiply bfloat16: those of Ampere and later do."""
    return torch.cuda.get_device_capability(device_index) >= (8, 0)


# A graph contains the result. This is `torch.compiler.assume_constant_result`, which would import the compiler here.
vars(_computes_bfloat16)["_dynamo_marked_constant"] = True
