"""Gradients of windows and of what landmarks count, against those of plain operations."""

import pytest
import torch

from hf_efficient_attn.ops.exact import mask_bias, window_partial
from naive import attend_naive


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(result, tensors, seed, with_lse):
    """Those of a weighted sum of the output, and of the lse of rows that have a key."""
    out, lse = result
    is_row = lse.detach() > -torch.inf
    out, lse = torch.where(is_row.unsqueeze(-1), out, 0.0), torch.where(is_row, lse, 0.0)
    loss = (out * numbers(*out.shape, seed=seed)).sum()
    loss = loss + (lse * numbers(*lse.shape, seed=seed + 1)).sum() if with_lse else loss
    return torch.autograd.grad(loss, tensors)


def check(ours, naive, tensors, with_lse):
    found, expected = (gradients(x, tensors, 9, with_lse) for x in (ours, naive))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y.nan_to_num(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize(
    ("length", "left", "right", "skip", "masked"),
    [
        (700, 64, 64, 0, False), (300, 20, 5, 3, True), (513, 256, 256, 0, True), (900, 200, 0, 0, False),
        (5, 10, 10, 0, False), (1, 0, 0, 0, False), (600, 100, 300, 40, True), (700, 101, 98, 7, False),
        (300, 0, 0, 0, True),
    ],
)  # fmt: skip
def test_gradients_of_windows(length, left, right, skip, masked, with_lse):
    tensors = [numbers(3, length, 8, seed=s).requires_grad_() for s in range(3)]
    mask = numbers(1, length, seed=4) > -0.5 if masked else None
    distance = torch.arange(length) - torch.arange(length)[:, None]
    pairs = (distance >= -left) & (distance <= right) & (torch.arange(length) >= skip)
    pairs = pairs if mask is None else pairs & mask
    ours = window_partial(*tensors, mask, left=left, right=right, skip=skip, scale=0.4)
    naive = attend_naive(*tensors, mask_bias(pairs, torch.float64), scale=0.4)
    torch.testing.assert_close(ours.out, naive.out.nan_to_num())
    torch.testing.assert_close(ours.lse, naive.lse)
    # The naive gradient of an lse of -inf is NaN.
    check(ours, naive, tensors, with_lse and bool(naive.lse.isfinite().all()))
