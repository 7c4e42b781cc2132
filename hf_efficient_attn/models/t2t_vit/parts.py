"""Building blocks of T2T-ViT beside the attention: MLP, stochastic depth, position table, frozen parameters."""

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN


class T2TViTMLP(nn.Module):
    """Two linear layers, with dropout after the second.

    Args:
        hidden_size: size of input and output.
        intermediate_size: size between the two layers.
        activation: name of the activation function.
        dropout: dropout probability of the output.
        inner_dropout: dropout probability after the activation.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, dropout: float, inner_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, intermediate_size)
        self.activation_fn = ACT2FN[activation]
        self.fc2 = nn.Linear(intermediate_size, hidden_size)
        self.inner_dropout, self.dropout = nn.Dropout(inner_dropout), nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, N, hidden_size) -> (B, N, hidden_size)."""
        hidden_states = self.inner_dropout(self.activation_fn(self.fc1(hidden_states)))
        return self.dropout(self.fc2(hidden_states))


class T2TViTDropPath(nn.Module):
    """Stochastic depth (Huang et al. 2016): in training, drops a residual branch for whole samples of the batch."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, branch: Tensor) -> Tensor:
        """(B, N, hidden_size) -> (B, N, hidden_size)."""
        if not self.training or self.probability == 0:
            return branch
        kept = torch.rand(branch.shape[0], 1, 1, device=branch.device) >= self.probability
        return branch * kept / (1 - self.probability)


class FrozenParameters(nn.Module):
    """Base class of modules whose parameters named in `frozen` are never trained.

    `from_pretrained` replaces every parameter by a new one that requires a gradient, so the flag is set on assignment.
    """

    frozen: tuple[str, ...] = ()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter, without gradient if it is frozen."""
        if param is not None and name in self.frozen:
            param.requires_grad_(False)
        super().register_parameter(name, param)


def sinusoids(num_tokens: int, dim: int) -> Tensor:
    """Return the position table of Vaswani et al. 2017, section 3.5: (1, num_tokens, dim), float32, on the CPU.

    Even channels hold sines and odd channels cosines, computed in float64. Position 0 is that of the class token.
    """
    position = torch.arange(num_tokens, dtype=torch.float64, device="cpu")[:, None]
    channel = torch.arange(dim, dtype=torch.float64, device="cpu")
    angle = position / 10000 ** (2 * (channel // 2) / dim)
    return torch.where(channel % 2 == 0, angle.sin(), angle.cos())[None].float()


def interpolated(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Resize a position table to another grid by bicubic interpolation; the class token's entry stays unchanged.

    Args:
        table: (1, 1 + old height * old width, dim).
        old: (height, width) of the table's grid, in tokens.
        new: (height, width) of the wanted grid, in tokens.

    Returns:
        (1, 1 + new height * new width, dim); `table` itself if the grids are equal.
    """
    if old == new:
        return table
    grid = table[:, 1:].unflatten(1, old).permute(0, 3, 1, 2).float()
    grid = nn.functional.interpolate(grid, size=new, mode="bicubic", align_corners=False)
    return torch.cat((table[:, :1], grid.flatten(2).transpose(1, 2).to(table.dtype)), dim=1)
