"""What stands beside the attention in T2T-ViT: MLP, stochastic depth, parameters that are not trained."""

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from hf_efficient_attn.models.t2t_vit.configuration_t2t_vit import T2TViTConfig


class T2TViTMLP(nn.Module):
    """Two layers; dropout after the second, and after the activation where `inner_dropout` is given."""

    def __init__(
        self, config: T2TViTConfig, width: int, inner: int, dropout: float, inner_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.activation_fn = ACT2FN[config.hidden_act]
        self.fc2 = nn.Linear(inner, width)
        self.inner_dropout, self.dropout = nn.Dropout(inner_dropout), nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.inner_dropout(self.activation_fn(self.fc1(hidden_states)))
        return self.dropout(self.fc2(hidden_states))


class T2TViTDropPath(nn.Module):
    """Skips a branch for whole rows of the batch in training (Huang et al. 2016, stochastic depth)."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, branch: Tensor) -> Tensor:
        if not self.training or self.probability == 0:
            return branch
        kept = torch.rand(branch.shape[0], 1, 1, device=branch.device) >= self.probability
        return branch * kept / (1 - self.probability)


class FrozenParameters(nn.Module):
    """A module whose parameters named in `frozen` ask for no gradient, whoever sets them.

    `from_pretrained` sets every parameter anew, as one that is trained.
    """

    frozen: tuple[str, ...] = ()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if param is not None and name in self.frozen:
            param.requires_grad_(False)
        super().register_parameter(name, param)
