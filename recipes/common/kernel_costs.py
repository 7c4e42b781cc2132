"""What the Triton kernels of the package read, write and multiply, by formulas, for the model of the time on a GPU."""

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


# Maps the name of a kernel to a function of its launch, whose tensors may be on "meta".
COSTS: dict[str, Callable[[Launch], KernelCost]] = {}
