"""Some heads or blocks at a time.

A slice is as large as the device is served best by: on a CPU its temporaries stay in the caches, and their memory is
reused by the next slice instead of being returned to the system; on an accelerator it is as large as a limit of memory
allows, so that there is usually one. The size of a slice changes rounding only.

With a gradient a slice is computed again in the backward pass (`torch.utils.checkpoint`), so that the memory of a
training step is that of one slice, plus inputs and results.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Numbers of the largest temporary of a slice: 4 MiB of float32 on a CPU, 1 GiB on an accelerator.
CPU_NUMEL, ACCELERATOR_NUMEL = 1 << 20, 1 << 28


def slice_size(numel: int, device: torch.device) -> int:
    """How many heads or blocks to process at a time, whose largest temporaries have `numel` numbers each."""
    return max(1, (CPU_NUMEL if device.type == "cpu" else ACCELERATOR_NUMEL) // max(1, numel))


def sliced(
    function: Callable[..., Tensor], *tensors: Tensor | None, size: int, dim: int = 0, draws: bool = False
) -> Tensor:
    """Call `function` with slices of the tensors and concatenate the results along `dim`.

    Args:
        function: takes the tensors and returns a tensor. It may close over others, with a gradient too.
        *tensors: of the same size along `dim`, at least 1; or None, which is passed on.
        size: of a slice along `dim`, for example by `slice_size`.
        dim: 0 for heads, 1 for blocks.
        draws: whether the function draws from the global generator, so that the backward pass must draw the same.

    Returns:
        The result of all slices, as one call with the whole tensors would give it.
    """
    given = [x for x in tensors if x is not None]
    total = given[0].shape[dim]
    if size >= total:
        return _recomputed(function, tensors, draws)
    # `split` instead of slices: its gradient is one concatenation, that of a slice a whole tensor of zeros.
    splits = [[None] * -(-total // size) if x is None else x.split(size, dim) for x in tensors]
    parts = zip(*splits, strict=True)
    if torch.is_grad_enabled():
        return torch.cat([_recomputed(function, part, draws) for part in parts], dim)
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
        function, *tensors, use_reentrant=False, preserve_rng_state=draws, determinism_check="none"
    )
    return out
