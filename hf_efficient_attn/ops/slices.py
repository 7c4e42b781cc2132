"""Slices: a form is called for some heads or blocks at a time.

On a CPU a slice is so small that its temporaries stay in the caches, and the next slice reuses their memory. On an
accelerator it is as large as a limit of memory allows, so that there is usually one. The size of a slice changes
rounding only. With a gradient each slice is computed again in the backward pass (`torch.utils.checkpoint`). So a
training step holds the temporaries of one slice, besides the inputs, the results, and what the kernels keep.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_efficient_attn.ops.tracing import exporting_to_onnx, keeping_results

# The largest temporary of a slice has this many numbers: 4 MiB of float32 on a CPU, 1 GiB on an accelerator.
CPU_NUMEL = 1 << 20
ACCELERATOR_NUMEL = 1 << 28
# A causal scan processes this many chunks together. More take fewer kernels, and more products of sums of chunks.
_CPU_CHUNKS = 32
_ACCELERATOR_CHUNKS = 128
# Allocate 31 MiB and free them. glibc gives a freed block above a limit back to the system, and then the next call pays
# for new pages. The limit rises to the size of the largest block that was freed, up to 32 MiB, so glibc keeps slices.
torch.empty(31 << 20, dtype=torch.uint8)


def slice_size(numel: int, device: torch.device) -> int:
    """Return how many heads or blocks to process at a time if the largest temporary of each has `numel` numbers."""
    return max(1, (CPU_NUMEL if device.type == "cpu" else ACCELERATOR_NUMEL) // max(1, numel))


def scan_chunks(device: torch.device) -> int:
    """Return how many chunks of a causal scan to process at a time."""
    return _CPU_CHUNKS if device.type == "cpu" else _ACCELERATOR_CHUNKS


def spans_together(numel: int, device: torch.device) -> int:
    """Return how many spans of queries to process at a time if the largest temporary of each has `numel` numbers.

    Each span sees more of the past. On a CPU one at a time takes the least work.
    """
    return 1 if device.type == "cpu" else slice_size(numel, device)


def selects_heads(device: torch.device) -> bool:
    """Whether to find the heads that need a computation. On an accelerator this would wait, and all heads need less."""
    return device.type == "cpu"


def sliced(
    function: Callable[..., Tensor],
    *arguments: Any,
    size: int,
    dim: int = 0,
    draws: bool = False,
    recompute: bool = True,
) -> Tensor:
    """Call `function` with slices of the tensors in its arguments and concatenate the results along `dim`.

    Args:
        function: takes the arguments and returns a tensor. It may close over other tensors, with a gradient too.
        *arguments: tensors of the same size along `dim`, at least 1; tuples and named tuples, whose tensors are sliced
            as well; and anything else, such as None, which is passed on.
        size: the size of a slice along `dim`, for example from `slice_size`.
        dim: 0 for heads, 1 for blocks.
        draws: whether the function draws from the global generator, so that the backward pass must draw the same.
        recompute: False if autograd keeps no more of the function than its arguments and results take.

    Returns:
        The same result as one call with the whole tensors.
    """
    if exporting_to_onnx():  # the same graph for every length and batch
        return function(*arguments)
    first: Tensor = next(_tensors(arguments))
    total = first.shape[dim]
    if size >= total:
        # On a CPU slices are small, and so is what autograd keeps of a whole call.
        recompute = recompute and first.device.type != "cpu"
        return _recomputed(function, arguments, draws) if recompute else function(*arguments)
    parts = _split(arguments, size, dim, -(-total // size))
    if torch.is_grad_enabled():
        return torch.cat([_recomputed(function, p, draws) if recompute else function(*p) for p in parts], dim)
    start = 0
    for part in parts:
        out = function(*part)
        if start == 0:
            whole = out.new_empty(*out.shape[:dim], total, *out.shape[dim + 1 :])
        whole.narrow(dim, start, out.shape[dim]).copy_(out)
        start += out.shape[dim]
    return whole


def _tensors(x: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, tuple):
        for part in x:
            yield from _tensors(part)


def _split(x: Any, size: int, dim: int, count: int) -> Sequence[Any]:
    """Split the tensors in nested tuples into `count` slices: as many tuples of the same types."""
    if isinstance(x, Tensor):
        # The gradient of `split` is one concatenation. The gradient of each slice would be a whole tensor of zeros.
        slices: Sequence[Tensor] = x.split(size, dim)
        return slices
    if not isinstance(x, tuple):
        return [x] * count
    parts = zip(*(_split(part, size, dim, count) for part in x), strict=True)
    named: Any = getattr(type(x), "_make", tuple)
    return [named(part) for part in parts] if x else [x] * count


def _recomputed(function: Callable[..., Tensor], arguments: tuple[Any, ...], draws: bool) -> Tensor:
    if not torch.is_grad_enabled():
        return function(*arguments)
    out: Tensor = checkpoint(
        keeping_results(function), *arguments, use_reentrant=False, preserve_rng_state=draws, determinism_check="none"
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
