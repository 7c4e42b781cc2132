"""Attention to a sliding window over the positions, in blocks of queries over overlapping views of the keys."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.attend import attend
from hf_efficient_attn.ops.blocks import ceil_div, count_blocks, pad_to_blocks
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.export import exporting_to_onnx
from hf_efficient_attn.ops.partial import Partial

# The fewest and the most queries of a block: few, so that few keys of a block are outside the window of its queries.
_MIN_BLOCK_Q, _MAX_BLOCK_Q = 32, 64


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
) -> Partial:
    """Attention of each query i to the keys i - left .. i + right.

    Args:
        query: (BH, N, D).
        key: (BH, N, D).
        value: (BH, N, Dv).
        key_mask: bool (1 or BH, N), True for valid keys, or None. With a mask each block has a bias of its own, so that
            (1, N) is cheaper.
        left: keys before the query.
        right: keys after the query.
        skip: number of first keys that no query attends to.
        scale: factor of the scores.
        dropout_p: probability of dropping a weight.

    Returns:
        Partial of out (BH, N, Dv) and lse (BH, N).
    """
    length, device, exporting = query.shape[1], query.device, exporting_to_onnx()
    # With a gradient blocks are larger, because the gradient of a key is summed over all blocks that contain it.
    block_q = window_block(left, right) * (2 if torch.is_grad_enabled() and key.requires_grad else 1)
    block_q = block_q if exporting else min(block_q, length)  # a graph must not depend on the length
    num_blocks, block_k = count_blocks(length, block_q), left + block_q + right
    after = right + num_blocks * block_q - length
    in_window = window_bias(block_q, left, right, query.dtype, device)
    valid = torch.ones(1, length, dtype=torch.bool, device=device) if key_mask is None else key_mask
    valid = valid & (torch.arange(length, device=device) >= skip)
    valid = pad(valid, (left, after)).unfold(1, block_k, block_q)  # (1 or BH, T, block_k)
    # Without a mask all blocks but those at both ends have the same bias.
    low = high = num_blocks
    if key_mask is None and not exporting:
        low = min(num_blocks, ceil_div(left + skip, block_q))
        high = max(low, num_blocks - ceil_div(after, block_q))
    blocks, keys, values = pad_to_blocks(query, block_q), *(key_blocks(x, block_q, left, right) for x in (key, value))
    parts = []
    for first, last in ((0, low), (low, high), (high, num_blocks)):
        if first < last:
            is_inner = low < high and first == low
            bias = in_window[None, None]
            bias = bias if is_inner else bias + mask_bias(valid[:, first:last, None], query.dtype)
            own, own_keys, own_values = (
                x if last - first == num_blocks else x[:, first:last] for x in (blocks, keys, values)
            )
            parts.append(attend(own, own_keys, own_values, bias, scale=scale, dropout_p=dropout_p))
    out, lse = (torch.cat(x, 1) if len(parts) > 1 else x[0] for x in zip(*parts, strict=True))
    return Partial(out.flatten(1, 2)[:, :length], lse.flatten(1, 2)[:, :length])


def window_block(left: int, right: int) -> int:
    """The number of queries of a block."""
    return _MAX_BLOCK_Q if left + right >= 2 * _MAX_BLOCK_Q else _MIN_BLOCK_Q


def window_bias(block_q: int, left: int, right: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 for the pairs of a block that are within the window, else -inf: (block_q, left + block_q + right)."""
    distance = block_distances(block_q, left, right, device)
    return mask_bias((distance >= -left) & (distance <= right), dtype)


def block_distances(block_q: int, left: int, right: int, device: torch.device) -> Tensor:
    """The position of each key of a block minus that of each query: int64 (block_q, left + block_q + right)."""
    position = torch.arange(left + block_q + right, device=device) - left
    return position - torch.arange(block_q, device=device)[:, None]


def key_blocks(x: Tensor, block_q: int, left: int, right: int) -> Tensor:
    """Overlapping views of the keys of each block, padded with zeros: (BH, N, D) -> (BH, T, block_k, D)."""
    after = right + count_blocks(x.shape[1], block_q) * block_q - x.shape[1]
    return pad(x, (0, 0, left, after)).unfold(1, left + block_q + right, block_q).transpose(2, 3)
