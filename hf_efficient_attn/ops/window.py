"""Attention to a sliding window over the positions, in blocks of queries over overlapping views of the keys."""

import functools
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.blocks import can_reuse_buffers, ceil_div, count_blocks, pad_to_blocks
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.export import exporting_to_onnx
from hf_efficient_attn.ops.partial import Partial, accumulation_dtype, partial_attention, safe_row_max
from hf_efficient_attn.ops.precision import LOG2_E, has_matrix_units, product_dtype

# Queries of a block: few, so that few keys of a block are outside the window of its queries, and fewer for a small
# window. With a gradient there are more, because the gradient of a key is summed over all blocks that contain it, and
# for matrix units, because the fused kernel rearranges the keys of a block for them.
_BLOCK_Q, _SMALL_BLOCK_Q, _SMALL_WINDOW, _LARGE_BLOCK_Q = 64, 32, 96, 128
# Scores that are computed at a time in reused buffers: 4 MiB of float32.
_SCORES_NUMEL = 1 << 20
# Numbers of the queries that are processed at a time with a gradient.
_HEADS_NUMEL = 1 << 18
_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FUSED_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# FlashAttention counts the numbers of a tensor in 32 bits and takes tokens of at most so many.
_MAX_NUMEL, _MAX_HEAD_DIM = 1 << 31, 256


class _Blocks(NamedTuple):
    """The blocks of a window.

    Attributes:
        in_window: bool (block_q, block_k), the pairs of a block that are within the window.
        valid: bool (1, T, block_k), the valid keys of each block.
        inner: the blocks whose keys are all valid, as first and last + 1. Their bias is `in_window` alone.
        all_have_keys: whether every query has a valid key in its window.
        left: keys of a block before its first query.
        right: keys of a block after its last query.
    """

    in_window: Tensor
    valid: Tensor
    inner: tuple[int, int]
    all_have_keys: bool
    left: int
    right: int


def has_window_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether `window_by_kernel` takes queries (B, H, N, D) and values (B, H, N, Dv) and is faster than blocks.

    It needs half precision, NVIDIA's tensor cores of Ampere or later, and a PyTorch whose kernel has windows. Meta
    tensors count as tensors of such a device.
    """
    device, dim = query.device, query.shape[3]
    if backend(query) == "cpu" or query.dtype not in (torch.float16, torch.bfloat16) or not _kernel_has_windows():
        return False
    if dim != value.shape[3] or dim % 8 or dim > _MAX_HEAD_DIM or query.numel() >= _MAX_NUMEL:
        return False
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "meta"


@functools.cache
def _kernel_has_windows() -> bool:
    # Here, because the module imports PyTorch's compiler, which takes seconds.
    from torch.nn.attention.varlen import varlen_attn

    return "window_size" in inspect.signature(varlen_attn).parameters


def window_by_kernel(query: Tensor, key: Tensor, value: Tensor, *, left: int, right: int, scale: float) -> Tensor:
    """Attention of each query i to the keys i - left .. i + right, by one launch of FlashAttention.

    The kernel takes sequences of different lengths, one after the other, with the heads of a token next to each other.
    In models the tokens lie like this in memory, so that nothing is copied.

    Args:
        query: (B, H, N, D), in half precision.
        key: (B, H, N, D).
        value: (B, H, N, D).
        left: keys before the query.
        right: keys after the query.
        scale: factor of the scores.

    Returns:
        (B, H, N, D).
    """
    batch, _, length, _ = query.shape
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    ends = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
    window = (left, right)
    from torch.nn.attention import varlen

    out = varlen.varlen_attn(query, key, value, ends, ends, length, length, scale=scale, window_size=window)
    assert isinstance(out, Tensor)  # it is a tuple if the lse is asked for
    result: Tensor = out.unflatten(0, (batch, length)).transpose(1, 2)
    return result


def window_partial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None = None,
    *,
    left: int,
    right: int,
    skip: int = 0,
    scale: float,
    dropout_p: float = 0.0,
    out: Tensor | None = None,
) -> Partial:
    """Attention of each query i to the keys i - left .. i + right.

    Args:
        query: (BH, N, D).
        key: (BH, N, D).
        value: (BH, N, Dv).
        key_mask: bool (1, N), True for valid keys, or None. With a gradient, dropout or `torch.compile` also (BH, N).
        left: keys before the query.
        right: keys after the query.
        skip: number of first keys that no query attends to.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.
        out: contiguous (BH, N, Dv) whose memory the result may use, or None.

    Returns:
        Partial of out (BH, N, Dv) and lse (BH, N).
    """
    length, device = query.shape[1], query.device
    reuse_buffers = not dropout_p and can_reuse_buffers(query, key, value)
    # The fused kernel multiplies bfloat16 by the matrix units, with float32 sums. Without these units it is slower than
    # plain products in float32.
    if reuse_buffers and query.dtype == torch.bfloat16 and query.shape[2] == value.shape[2]:
        reuse_buffers = not has_matrix_units()
    exporting = exporting_to_onnx()
    if not (reuse_buffers or dropout_p or exporting) and _has_operator(query, value, key_mask):
        valid = key_mask
        if skip:
            valid = torch.ones(1, length, dtype=torch.bool, device=device) if valid is None else valid
            valid = valid & (torch.arange(length, device=device) >= skip)
        operator = torch.ops.hf_efficient_attn.window_attention
        return Partial(*operator(query, key, value, valid, left, right, float(scale)))
    small = _SMALL_BLOCK_Q if left + right < _SMALL_WINDOW else _BLOCK_Q
    block_q = small if reuse_buffers else _LARGE_BLOCK_Q
    block_q = block_q if exporting else min(block_q, length)
    num_blocks, block_k = count_blocks(length, block_q), left + block_q + right
    after = right + num_blocks * block_q - length
    valid = torch.ones(1, length, dtype=torch.bool, device=device) if key_mask is None else key_mask
    valid = valid & (torch.arange(length, device=device) >= skip)
    valid = pad(valid, (left, after)).unfold(1, block_k, block_q)
    distance = torch.arange(block_k, device=device) - left - torch.arange(block_q, device=device)[:, None]
    in_window = (distance >= -left) & (distance <= right)
    # Without a mask all blocks but those at both ends have the same bias, which then stays in the cache.
    same_bias = key_mask is None and not exporting
    low = min(num_blocks, ceil_div(left + skip, block_q)) if same_bias else num_blocks
    high = max(low, num_blocks - ceil_div(after, block_q))
    if reuse_buffers:
        # Each query is a key of its own window. Those that fill up the last block may have none, and are cut off.
        all_have_keys = same_bias and skip == 0
        plan = _Blocks(in_window, valid, (low, high), all_have_keys, left, right)
        return _in_buffers(query, key, value, plan, scale, out)
    if backend(query) != "cpu":  # fewer launches
        low = high = num_blocks
    blocks = pad_to_blocks(query, block_q)
    views = [_key_blocks(x, num_blocks, block_q, left, right) for x in (key, value)]
    parts = []
    for first, last in ((0, low), (low, high), (high, num_blocks)):
        if first < last:
            is_inner = same_bias and (first, last) == (low, high)
            pairs = in_window[None, None] if is_inner else in_window & valid[:, first:last, None]
            keys, values = (x if last - first == num_blocks else x[:, first:last] for x in views)
            bias = mask_bias(pairs, query.dtype)
            part = partial_attention(blocks[:, first:last], keys, values, bias, scale=scale, dropout_p=dropout_p)
            parts.append(part)
    result, lse = (torch.cat(x, 1) if len(parts) > 1 else x[0] for x in zip(*parts, strict=True))
    return Partial(result.flatten(1, 2)[:, :length], lse.flatten(1, 2)[:, :length])


def _key_blocks(x: Tensor, num_blocks: int, block_q: int, left: int, right: int) -> Tensor:
    """Overlapping views of the keys of each block, padded with zeros: (BH, N, D) -> (BH, T, block_k, D)."""
    padded = pad(x, (0, 0, left, right + num_blocks * block_q - x.shape[1]))
    return padded.unfold(1, left + block_q + right, block_q).transpose(2, 3)


def _pad_with_zeros(x: Tensor, before: int, after: int, dtype: torch.dtype) -> Tensor:
    """Tokens (BH, N, D) of another dtype with zeros around them, (BH, before + N + after, D).

    Unlike `pad` it writes each number once.
    """
    batch_heads, length, dim = x.shape
    out = x.new_empty(batch_heads, before + length + after, dim, dtype=dtype)
    out[:, :before] = 0.0
    out[:, before : before + length] = x
    out[:, before + length :] = 0.0
    return out


def _in_buffers(
    query: Tensor, key: Tensor, value: Tensor, blocks: _Blocks, scale: float, out: Tensor | None
) -> Partial:
    """`window_partial` without gradient and dropout, a few blocks at a time in one buffer of scores.

    Plain products of 64 queries are faster than the fused kernel for so few.
    """
    (batch_heads, length, _), (block_q, block_k) = query.shape, blocks.in_window.shape
    num_blocks, acc_dtype = blocks.valid.shape[1], accumulation_dtype(query.dtype)
    queries = pad_to_blocks(query.to(acc_dtype), block_q)
    after = blocks.right + num_blocks * block_q - length
    keys, values = (_pad_with_zeros(x, blocks.left, after, acc_dtype) for x in (key, value))
    keys, values = (x.unfold(1, block_k, block_q).transpose(2, 3) for x in (keys, values))
    if out is None or out.dtype != acc_dtype or length != num_blocks * block_q:
        result = queries.new_empty(batch_heads, num_blocks, block_q, value.shape[2])
    else:
        result = out.view(batch_heads, num_blocks, block_q, value.shape[2])
    lse = queries.new_empty(batch_heads, num_blocks, block_q)
    window_bias, key_bias = mask_bias(blocks.in_window, acc_dtype), mask_bias(blocks.valid[0], acc_dtype).unsqueeze(1)
    step = max(1, _SCORES_NUMEL // (block_q * block_k))
    buffer = queries.new_empty(min(step, num_blocks), block_q, block_k)
    for start in range(0, num_blocks, step):
        some = slice(start, min(start + step, num_blocks))
        is_inner = blocks.inner[0] <= start and some.stop <= blocks.inner[1]
        has_keys = is_inner or blocks.all_have_keys
        bias = window_bias if is_inner else window_bias + key_bias[some]
        own = buffer[: some.stop - start]
        for a in range(batch_heads):
            # Scores to base 2: see `exp_`.
            scores = torch.baddbmm(bias, queries[a, some], keys[a, some].mT, alpha=scale * LOG2_E, out=own)
            row_max = scores.amax(2, keepdim=True)
            row_max = row_max if has_keys else safe_row_max(row_max)
            total = scores.sub_(row_max).exp2_().sum(2, keepdim=True)
            torch.add(total.log2().squeeze(2), row_max.squeeze(2), out=lse[a, some])
            if not has_keys:
                total.masked_fill_(total == 0, 1.0)
            torch.bmm(scores, values[a, some], out=result[a, some]).div_(total)
    return Partial(result.flatten(1, 2)[:, :length].to(value.dtype), lse.mul_(1.0 / LOG2_E).flatten(1)[:, :length])


def _has_operator(query: Tensor, value: Tensor, key_mask: Tensor | None) -> bool:
    """Whether the operator below takes these tensors: products in the accumulation dtype, on the CPU."""
    if backend(query) != "cpu" or query.device.type != "cpu" or query.shape[2] != value.shape[2]:
        return False
    if query.dtype == torch.bfloat16 and has_matrix_units():
        return False
    return product_dtype(query) == accumulation_dtype(query.dtype) and (key_mask is None or key_mask.shape[0] == 1)


class _Piece(NamedTuple):
    """Blocks of queries that the fused kernel takes in one call.

    Attributes:
        first: the first query.
        block_q: queries of a block.
        num_blocks: T, of blocks.
        first_key: the first key of the first block. That of each further one is `block_q` keys later.
        block_k: keys of a block.
    """

    first: int
    block_q: int
    num_blocks: int
    first_key: int
    block_k: int

    def queries(self, x: Tensor) -> Tensor:
        """The rows of the queries in (BH, N, D): a view (BH, T, block_q, D)."""
        rows = x[:, self.first : self.first + self.num_blocks * self.block_q]
        return rows.view(len(x), self.num_blocks, self.block_q, x.shape[2])

    def keys(self, x: Tensor) -> Tensor:
        """The rows of the keys in (BH, N, D): an overlapping view (BH, T, block_k, D)."""
        end = self.first_key + (self.num_blocks - 1) * self.block_q + self.block_k
        return x[:, self.first_key : end].unfold(1, self.block_k, self.block_q).transpose(2, 3)

    def add_to_keys(self, whole: Tensor, x: Tensor) -> None:
        """Add the rows (BH, T, block_k, D) of the keys of all blocks to (BH, N, D)."""
        for start in range(0, self.block_k, self.block_q):
            part = x[:, :, start : start + self.block_q]
            first, size = self.first_key + start, part.shape[2]
            own = whole[:, first : first + (self.num_blocks - 1) * self.block_q + size]
            own.unfold(1, size, self.block_q).transpose(2, 3).add_(part)

    def bias(self, valid: Tensor | None, window: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The bias (1, T or 1, block_q, block_k) of pairs outside of the window, and of keys (1, N) that are masked."""
        distance = torch.arange(self.block_k) - torch.arange(self.block_q)[:, None] + self.first_key - self.first
        pairs = ((distance >= -window[0]) & (distance <= window[1]))[None, None]
        return mask_bias(pairs if valid is None else pairs & self.keys(valid.unsqueeze(2)).mT, dtype)


def _pieces(length: int, left: int, right: int, masked: bool) -> Iterator[_Piece]:
    """All queries: many blocks whose windows are inside of the sequence, and single blocks at its ends.

    Blocks of up to a quarter of the window: with fewer queries the kernel takes longer, with more it has more pairs
    outside of the window.
    """
    block_q = min(_LARGE_BLOCK_Q, max(_SMALL_BLOCK_Q, 1 << max(1, (left + right) // 2).bit_length() - 1), length)
    low = ceil_div(left, block_q)
    high = max(low, (length - right) // block_q)
    # With a mask each block has its own bias.
    step = max(1, _SCORES_NUMEL // (block_q * (left + block_q + right))) if masked else high - low
    for t in range(low, high, max(1, step)):
        num_blocks = min(step, high - t)
        yield _Piece(t * block_q, block_q, num_blocks, t * block_q - left, left + block_q + right)
    for t in (*range(min(low, ceil_div(length, block_q))), *range(high, ceil_div(length, block_q))):
        first, end = t * block_q, min((t + 1) * block_q, length)
        first_key = max(0, first - left)
        yield _Piece(first, end - first, 1, first_key, min(length, end + right) - first_key)


@torch.library.custom_op("hf_efficient_attn::window_attention", mutates_args=())
def _window_attention(
    query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, left: int, right: int, scale: float
) -> tuple[Tensor, Tensor]:
    """`window_partial` on the CPU by PyTorch's fused kernel, with a backward that adds up the gradients of the keys.

    Autograd of `partial_attention` would add those of overlapping views in memory of all blocks.
    """
    acc_dtype = accumulation_dtype(query.dtype)
    out, lse = value.new_empty(value.shape), query.new_empty(query.shape[:2], dtype=acc_dtype)
    for heads in _heads_at_a_time(query):
        own = [x[heads].to(acc_dtype).contiguous() for x in (query, key, value)]
        for piece in _pieces(query.shape[1], left, right, valid is not None):
            bias = piece.bias(valid, (left, right), acc_dtype)
            rows = piece.queries(own[0]), piece.keys(own[1]), piece.keys(own[2])
            part = _FUSED(*rows, attn_mask=bias, scale=scale)
            piece.queries(out[heads]).copy_(part[0])
            # For a query without keys the kernel gives an output of 0, but also an lse of 0.
            own_lse = part[1] if valid is None else part[1].masked_fill_(bias.amax(-1) == -torch.inf, -torch.inf)
            piece.queries(lse[heads].unsqueeze(2)).copy_(own_lse.unsqueeze(3))
    return out, lse


def _heads_at_a_time(x: Tensor) -> list[slice]:
    """Slices of the heads of (BH, N, D), so that temporaries fit the cache."""
    step = max(1, _HEADS_NUMEL // max(1, x[0].numel()))
    return [slice(a, a + step) for a in range(0, x.shape[0], step)]


@_window_attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, left: int, right: int, scale: float
) -> tuple[Tensor, Tensor]:
    return value.new_empty(value.shape), query.new_empty(query.shape[:2], dtype=accumulation_dtype(query.dtype))


@torch.library.custom_op("hf_efficient_attn::window_attention_backward", mutates_args=())
def _window_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor | None,
    out: Tensor,
    lse: Tensor,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    acc_dtype, dim = accumulation_dtype(query.dtype), query.shape[2]
    grads = tuple(x.new_empty(x.shape) for x in (query, key, value))
    for heads in _heads_at_a_time(query):
        own = [x[heads].to(acc_dtype).contiguous() for x in (query, key, value, grad_out, out)]
        own_lse = lse[heads].unsqueeze(2)
        if grad_lse is not None:
            own = [pad(x, (0, 4 - dim % 4)) for x in own]
            # -grad_lse . 1 is added to the product of grad_out and out, where the values are 0.
            own[3][..., -1], own[4][..., -1] = grad_lse[heads], -1.0
        own_lse = own_lse if valid is None else own_lse.masked_fill(own_lse == -torch.inf, 0.0)
        sums = [torch.zeros_like(x) for x in own[1:3]]
        for piece in _pieces(query.shape[1], left, right, valid is not None):
            rows = [piece.queries(x) if i in (0, 3, 4) else piece.keys(x) for i, x in enumerate(own)]
            found = _FUSED_BACKWARD(
                rows[3], *rows[:3], rows[4], piece.queries(own_lse).squeeze(3), 0.0, False,
                attn_mask=piece.bias(valid, (left, right), acc_dtype), scale=scale,
            )  # fmt: skip
            piece.queries(grads[0][heads]).copy_(found[0][..., :dim])
            for whole, x in zip(sums, found[1:], strict=True):
                piece.add_to_keys(whole, x)
        for grad, x in zip(grads[1:], sums, strict=True):
            grad[heads] = x[..., :dim]
    return grads[0], grads[1], grads[2]


@_window_attention_backward.register_fake
def _(
    grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.left, ctx.right, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)  # without a gradient of the lse less is to compute


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    grad_out = torch.zeros_like(saved[4]) if grad_out is None else grad_out
    operator = torch.ops.hf_efficient_attn.window_attention_backward
    return *operator(grad_out, grad_lse, *saved, ctx.left, ctx.right, ctx.scale), None, None, None, None


torch.library.register_autograd("hf_efficient_attn::window_attention", _backward, setup_context=_save)
