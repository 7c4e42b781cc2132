"""Results of operators in tensors that exist."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hf_efficient_attn.ops.export import is_compiling


def compute_into(out: Tensor, operator: Callable[..., Tensor], *arguments: Any, **options: Any) -> None:
    """Store operator(*arguments, **options) in `out`, which may be a view with gaps, by one kernel.

    torch.compile, which merges kernels itself, knows no output with gaps.
    """
    if is_compiling():
        out.copy_(operator(*arguments, **options))
    else:
        operator(*arguments, **options, out=out)
