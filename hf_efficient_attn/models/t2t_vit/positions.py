"""The position table of T2T-ViT: sines and cosines, which are not trained, and their interpolation."""

import torch
from torch import Tensor, nn


def sinusoids(tokens: int, width: int) -> Tensor:
    """The table (1, tokens, width) of Vaswani et al. 2017, section 3.5, float32 on the CPU.

    Sines in even columns and cosines in odd ones, computed in float64. Row 0 is that of the class token.
    """
    position = torch.arange(tokens, dtype=torch.float64, device="cpu")[:, None]
    column = torch.arange(width, dtype=torch.float64, device="cpu")
    angle = position / 10000 ** (2 * (column // 2) / width)
    return torch.where(column % 2 == 0, angle.sin(), angle.cos())[None].float()


def interpolated(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """The table of another grid, bicubic; the class token keeps its row.

    Args:
        table: (1, 1 + tokens, width).
        old, new: (rows, columns) of the grid.

    Returns:
        (1, 1 + tokens of the new grid, width), the table itself where the grid is the same.
    """
    if old == new:
        return table
    grid = table[:, 1:].unflatten(1, old).permute(0, 3, 1, 2).float()
    grid = nn.functional.interpolate(grid, size=new, mode="bicubic", align_corners=False)
    return torch.cat((table[:, :1], grid.flatten(2).transpose(1, 2).to(table.dtype)), dim=1)
