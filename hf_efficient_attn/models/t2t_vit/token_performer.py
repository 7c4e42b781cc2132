"""The performer stage of T2T-ViT: attention by positive random features, as the authors define it."""

import math

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_efficient_attn.models.t2t_vit.configuration_t2t_vit import T2TViTConfig
from hf_efficient_attn.models.t2t_vit.parts import FrozenParameters

# Beside the sum of a query's weights, so that a query that sees nothing gets 0 and not 0 / 0; the authors' value.
EPSILON = 1e-8
# exp(80) is far from the end of float32 and, as an epsilon, far above any sum of weights that are at most 1.
LARGEST_EXPONENT = 80.0


class T2TViTTokenPerformer(FrozenParameters):
    """One head over (B, N, width) -> (B, N, token_dim): v plus the projected mean of v under exp(q . k).

    The authors' models/token_performer.py, after Choromanski et al. 2021: exp(q . k) is the mean over w of
    exp(w . q - |q|^2 / 2) exp(w . k - |k|^2 / 2), with m fixed rows w, orthogonal and of length sqrt(m). It is an
    attention of its own, and does not go through Transformers' attention interface.

    Attributes:
        w: the rows (m, token_dim): saved and counted with the parameters, never trained.
    """

    frozen = ("w",)

    def __init__(self, config: T2TViTConfig, width: int) -> None:
        super().__init__()
        dim = config.token_dim
        self.q_proj = nn.Linear(width, dim)
        self.k_proj = nn.Linear(width, dim)
        self.v_proj = nn.Linear(width, dim)
        self.o_proj = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(config.token_dropout_prob)
        self.w = nn.Parameter(torch.empty(int(dim * config.kernel_ratio), dim))
        self.reset_features()

    @torch.no_grad()
    def reset_features(self) -> None:
        """Draw `w`, unless it was loaded from a checkpoint."""
        # In float32, since half precision has no QR decomposition.
        drawn = torch.empty(self.w.shape, device=self.w.device, dtype=torch.float32)
        init.copy_(self.w, init.orthogonal_(drawn, gain=math.sqrt(self.w.shape[0])).to(self.w.dtype))

    def forward(self, hidden_states: Tensor, **kwargs) -> tuple[Tensor, None]:
        """(B, N, width) -> (B, N, token_dim), and no weights, which are never formed."""
        value = self.v_proj(hidden_states)
        mixed = self.attend(self.q_proj(hidden_states), self.k_proj(hidden_states), value)
        return value + self.dropout(self.o_proj(mixed.to(value.dtype))), None

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query, key, value (B, N, D) -> (B, N, D), in float32 or wider.

        The exponents are at most |w|^2 / 2 = m / 2 in exact arithmetic, and their exponentials overflow half precision.
        So all is float32, also under autocast, and the largest exponent of a query, and of all keys of a row of the
        batch, is subtracted: that cancels between numerator and denominator but for epsilon, which takes the factor.
        """
        wide = torch.promote_types(value.dtype, torch.float32)
        with torch.autocast(device_type=value.device.type, enabled=False):
            query, key, value, w = (x.to(wide) for x in (query, key, value, self.w))
            query, key = (x @ w.t() - x.square().sum(-1, keepdim=True) / 2 for x in (query, key))
            # Both without gradient: the output does not depend on them.
            shift_query = query.detach().amax(-1, keepdim=True)
            shift_key = key.detach().amax((1, 2), keepdim=True)
            query, key = (query - shift_query).exp(), (key - shift_key).exp()
            exponent = (-shift_query - shift_key).clamp(max=LARGEST_EXPONENT)
            epsilon = EPSILON * w.shape[0] * exponent.exp()
            weights = query @ key.sum(1)[..., None]
            return query @ (key.transpose(1, 2) @ value) / (weights + epsilon)
