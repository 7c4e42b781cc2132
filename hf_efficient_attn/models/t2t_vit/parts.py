"""Building blocks of T2T-ViT: MLP, performer, position table, frozen parameters."""

import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN

from hf_efficient_attn.models.t2t_vit.configuration_t2t_vit import T2TViTConfig

# Added to the sum of a query's weights. A query whose weights all vanish gets 0 instead of 0 / 0. The authors' value.
EPSILON = 1e-8
# Limit of epsilon's exponent: exp(80) is far below the float32 maximum, and epsilon times it far above all weights.
LARGEST_EXPONENT = 80.0


def mlp(
    hidden_size: int, intermediate_size: int, activation: str, dropout: float, inner_dropout: float = 0.0
) -> nn.Sequential:
    """Return two linear layers with an activation between them; dropout follows each of them."""
    parts = OrderedDict(
        fc1=nn.Linear(hidden_size, intermediate_size),
        activation_fn=ACT2FN[activation],
        inner_dropout=nn.Dropout(inner_dropout),
        fc2=nn.Linear(intermediate_size, hidden_size),
        dropout=nn.Dropout(dropout),
    )
    return nn.Sequential(parts)


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


class T2TViTTokenPerformer(FrozenParameters):
    """One head over (B, N, in_dim) -> (B, N, token_dim): the value plus the projected output of linear attention.

    The authors' models/token_performer.py, after Choromanski et al. 2021: exp(q . k) is the mean over w of
    exp(w . q - |q|^2 / 2) exp(w . k - |k|^2 / 2), with M fixed orthogonal vectors w of norm sqrt(M). These are the
    parameter `w` (M, token_dim), which is saved but never trained. Transformers' attention interface is not used.
    """

    frozen = ("w",)

    def __init__(self, config: T2TViTConfig, in_dim: int) -> None:
        super().__init__()
        dim = config.token_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(in_dim, dim) for _ in range(3))
        self.o_proj = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(config.token_dropout_prob or 0.0)
        self.w = nn.Parameter(torch.empty(int(dim * config.kernel_ratio), dim))

    @torch.no_grad()
    def reset_features(self) -> None:
        """Draw `w`, unless it was loaded from a checkpoint."""
        # In float32, since half precision has no QR decomposition.
        drawn = torch.empty(self.w.shape, device=self.w.device, dtype=torch.float32)
        init.copy_(self.w, init.orthogonal_(drawn, gain=math.sqrt(self.w.shape[0])).to(self.w.dtype))

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        """(B, N, in_dim) -> (B, N, token_dim), and None in place of attention weights, which are never computed."""
        value = self.v_proj(hidden_states)
        mixed = self.linear_attention(self.q_proj(hidden_states), self.k_proj(hidden_states), value)
        return value + self.dropout(self.o_proj(mixed.to(value.dtype))), None

    def linear_attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute attention with random features: query, key, value (B, N, D) -> (B, N, D), in float32 or wider.

        In exact arithmetic the exponents are at most |w|^2 / 2 = M / 2, whose exponential overflows in half precision.
        The computation is therefore float32, also under autocast. The largest exponent of each query, and the largest
        exponent of all keys of a sample, are subtracted. The shifts cancel between numerator and denominator, except
        in epsilon, which is multiplied by their exponential.
        """
        acc_dtype = torch.promote_types(value.dtype, torch.float32)
        with torch.autocast(device_type=value.device.type, enabled=False):
            query, key, value, w = (x.to(acc_dtype) for x in (query, key, value, self.w))
            query, key = (x @ w.t() - x.square().sum(-1, keepdim=True) / 2 for x in (query, key))  # (B, N, M)
            # The output does not depend on the shifts, so they need no gradient.
            query_shift = query.detach().amax(-1, keepdim=True)
            key_shift = key.detach().amax((1, 2), keepdim=True)
            query, key = (query - query_shift).exp(), (key - key_shift).exp()
            exponent = (-query_shift - key_shift).clamp(max=LARGEST_EXPONENT)
            epsilon = EPSILON * w.shape[0] * exponent.exp()
            weights = query @ key.sum(1)[..., None]
            return query @ (key.transpose(1, 2) @ value) / (weights + epsilon)


def sinusoids(num_tokens: int, dim: int) -> Tensor:
    """Return the position table of Vaswani et al. 2017, section 3.5: (1, num_tokens, dim), float32, on the CPU.

    Even channels hold sines and odd channels cosines, computed in float64. Position 0 is that of the class token.
    """
    position = torch.arange(num_tokens, dtype=torch.float64, device="cpu")[:, None]
    channel = torch.arange(dim, dtype=torch.float64, device="cpu")
    angle = position / 10000 ** (2 * (channel // 2) / dim)
    return torch.where(channel % 2 == 0, angle.sin(), angle.cos())[None].float()


def interpolated(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Resize a position table from the grid `old` to `new`, (height, width) in tokens, by bicubic interpolation.

    (1, 1 + old height * old width, dim) -> (1, 1 + new height * new width, dim). The class token's entry, the first,
    stays unchanged. If the grids are equal, the result is `table` itself.
    """
    if old == new:
        return table
    grid = table[:, 1:].unflatten(1, old).permute(0, 3, 1, 2).float()
    grid = nn.functional.interpolate(grid, size=new, mode="bicubic", align_corners=False)
    return torch.cat((table[:, :1], grid.flatten(2).transpose(1, 2).to(table.dtype)), dim=1)
