"""Softmax attention of blocks of queries to their keys, and its lse.

A `Partial` is the result of attention over a subset of the keys: the normalized output and the log of the total weight.
The partials of two disjoint subsets merge into the partial of their union. This is the online softmax of Milakov &
Gimelshein (2018), which FlashAttention (Dao et al. 2022) applies to blocks. Attention in this package is built on two
functions, `attend` and `merge`. Only exact attention also calls PyTorch's `scaled_dot_product_attention`, where that
takes the call.

`hf_efficient_attn.ops.backends` lists the kernels that `attend` chooses from.

On the CPU a product of bfloat16 tensors is summed in float32, but its result is rounded to bfloat16. So a sum over many
tokens is computed in parts, which are added in float32. Scores stay in float32 up to the exponential.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.ops.backends import BACKENDS, BLOCK_BACKENDS
from hf_efficient_attn.ops.backends.backend import AttendCall, Backend, BlockBackend, BlockCall
from hf_efficient_attn.ops.backends.backend import BlockKeys as BlockKeys
from hf_efficient_attn.ops.backends.backend import Partial as Partial
from hf_efficient_attn.ops.backends.backend import safe_row_max as safe_row_max
from hf_efficient_attn.ops.backends.devices import runs_block_kernels
from hf_efficient_attn.ops.tracing import exporting_to_onnx, kept_results

# exp(x) = 2^(x LOG2_E): on the CPU exp2 takes a fraction of the time of exp.
LOG2_E = 1.0 / math.log(2.0)


def merge(*partials: Partial) -> Partial:
    """Merge the partials of disjoint subsets into the partial of their union. Subsets may be empty.

    The merge is associative and exact. Its output is the mean of the outputs, weighted by the softmax of the `lse`. It
    is differentiable in every `out` and `lse`.
    """
    if len(partials) == 1:
        return partials[0]
    outs, lses = zip(*partials, strict=True)  # (..., Nq, Dv), (..., Nq)
    row_max = safe_row_max(functools.reduce(torch.maximum, [lse.detach() for lse in lses]))
    weights = [torch.exp(lse - row_max) for lse in lses]  # (..., Nq) each
    total = functools.reduce(torch.add, weights)
    empty = total == 0  # (..., Nq)
    total = total.masked_fill(empty, 1.0)
    out = outs[0] * (weights[0] / total).unsqueeze(-1)  # (..., Nq, Dv)
    for part, weight in zip(outs[1:], weights[1:], strict=True):
        out.addcmul_(part.to(out.dtype), (weight / total).unsqueeze(-1))
    return Partial(out.to(outs[0].dtype), (total.log() + row_max).masked_fill(empty, -torch.inf))


def output_of(partial: Partial, with_lse: bool) -> Tensor:
    """Return the output (..., Nq, Dv), and `with_lse` the lse as one more column, all in the dtype of the lse."""
    out, lse = partial
    return torch.cat((out.to(lse.dtype), lse.unsqueeze(-1)), -1) if with_lse else out


def with_sinks(columns: Tensor, sinks: Tensor) -> Tensor:
    """Add sinks to the denominators of outputs.

    Args:
        columns: (B, H, Nq, Dv + 1), outputs and their lse as `output_of` returns them.
        sinks: (H,), the score of one more key of each head, whose value is 0.

    Returns:
        (B, H, Nq, Dv) in the dtype of `columns`.
    """
    sinks = sinks.to(columns.dtype).clamp(min=torch.finfo(columns.dtype).min)  # the lse may be -inf as well
    return columns[..., :-1] * torch.sigmoid(columns[..., -1:] - sinks[:, None, None])


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *, scale: float, dropout_p: float = 0.0
) -> Partial:
    """Compute softmax(scale * query key^T + bias) value and its lse for blocks of queries and their blocks of keys.

    Args:
        query: (BH, T, Nq, D), where T is the number of blocks and Nq the number of queries of a block.
        key: (BH, T, Nk, D), or (BH, 1, Nk, D) if all blocks share the keys. Overlapping views are not copied.
        value: (BH, T, Nk, Dv), or (BH, 1, Nk, Dv) if all blocks share the keys.
        bias: broadcastable to (BH, T, Nq, Nk), in the accumulation dtype, or None. -inf excludes a pair.
            Differentiable. A bias of pairs without a gradient may have the dtype of `query`, if its numbers are exact
            in it, as those of a mask: then half precision need not be computed in float32.
        scale: factor of the scores.
        dropout_p: probability of dropping a normalized weight; the others are divided by 1 - dropout_p. Drawn from the
            global generator.

    Returns:
        Partial with out (BH, T, Nq, Dv) in the dtype of `value` and lse (BH, T, Nq). A query whose pairs are all
        excluded has out 0 and lse -inf.
    """
    call = AttendCall(query, key, value, bias, float(scale), dropout_p, exporting_to_onnx())
    backend = _backend_of(call)
    tensors = (query, key, value) if bias is None else (query, key, value, bias)
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if not needs_grad or backend.backward is None:
        return backend.forward(call)
    options: tuple[Any, ...] = call[4:]

    def call_of(*tensors: Any) -> AttendCall:
        return AttendCall(*tensors, *options)

    return Partial(*_Kernel.apply(backend, call_of, *call[:4]))  # type: ignore[no-untyped-call]


def _backend_of(call: AttendCall) -> Backend:
    """Return the first backend of the table that applies. The last one takes every call."""
    return next(backend for backend in BACKENDS if backend.applies(call))


def keeps_pairs(query: Tensor, key: Tensor, bias: Tensor | None, scale: float, dropout_p: float) -> bool:
    """Whether `attend` holds the weights of all pairs of some queries and keys, because no kernel computes them."""
    return _backend_of(AttendCall(query, key, key, bias, scale, dropout_p, exporting_to_onnx())).backward is None


class _Kernel(torch.autograd.Function):
    """Output and lse of a call by a backend that has a backward of its own.

    `call_of` makes the call from its tensors: query, key, value, the bias or the log-weights, and others, which have no
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, backend: Backend | BlockBackend, call_of: Callable[..., Any], *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = kept_results(lambda: tuple(backend.forward(call_of(*tensors))))
        ctx.save_for_backward(*tensors, out, lse)
        ctx.backend = backend
        ctx.call_of = call_of
        ctx.set_materialize_grads(False)  # the backward computes less without a gradient of the lse
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        call = ctx.call_of(*tensors)
        gradients = ctx.backend.backward(call, Partial(out, lse), grad_out, grad_lse, ctx.needs_input_grad[5])
        return None, None, *gradients, *[None] * len(tensors[4:])


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, keys: BlockKeys, *, scale: float, dropout_p: float = 0.0
) -> Partial | None:
    """Compute attention of blocks of queries to their keys by a kernel that reads the keys where they are.

    Returns:
        Partial of out (BH, Nq, Dv) and lse (BH, Nq), by position of the queries. None if no backend applies: then the
        caller computes the same by `attend`.
    """
    backend = _block_backend_of(BlockCall(query, key, value, keys, float(scale), dropout_p))
    if backend is None:
        return None
    given: dict[str, Any] = keys._asdict()
    tensors: dict[str, Any] = {"log_weight": given.pop("log_weight")}
    tensors |= {name: x for name, x in given.items() if isinstance(x, Tensor)}
    names = tuple(tensors)
    others = {name: x for name, x in given.items() if name not in names}

    def call_of(query: Tensor, key: Tensor, value: Tensor, *tensors: Any) -> BlockCall:
        keys = BlockKeys(**others, **dict(zip(names, tensors, strict=True)))
        return BlockCall(query, key, value, keys, float(scale), dropout_p)

    return Partial(*_Kernel.apply(backend, call_of, query, key, value, *tensors.values()))  # type: ignore[no-untyped-call]


def _block_backend_of(call: BlockCall) -> BlockBackend | None:
    """Return the first backend of block attention that applies, or None."""
    if not runs_block_kernels(call.query.device):
        return None
    return next((backend for backend in BLOCK_BACKENDS if backend.applies(call)), None)


def takes_blocks(query: Tensor, key: Tensor, value: Tensor, keys: BlockKeys, dropout_p: float) -> bool:
    """Whether `block_attention` computes a call, and so holds nothing large besides its results."""
    return _block_backend_of(BlockCall(query, key, value, keys, 1.0, dropout_p)) is not None
