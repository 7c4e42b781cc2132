"""The performer stage of T2T-ViT: attention with positive random features, as the authors define it."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from hf_efficient_attn.models.t2t_vit.configuration_t2t_vit import T2TViTConfig
from hf_efficient_attn.models.t2t_vit.parts import FrozenParameters

# Added to the sum of a query's weights. A query whose weights all vanish gets 0 instead of 0 / 0. The authors' value.
EPSILON = 1e-8
# Limit of epsilon's exponent: exp(80) is far below the float32 maximum, and as a factor of epsilon it is far above any
# sum of weights that are at most 1.
LARGEST_EXPONENT = 80.0


class T2TViTTokenPerformer(FrozenParameters):
    """One head over (B, N, in_dim) -> (B, N, token_dim): the value plus the projected output of linear attention.

    The authors' models/token_performer.py, after Choromanski et al. 2021: exp(q . k) is the mean over w of
    exp(w . q - |q|^2 / 2) exp(w . k - |k|^2 / 2), with M fixed orthogonal vectors w of norm sqrt(M). This attention
    does not use Transformers' attention interface.

    Attributes:
        w: the vectors (M, token_dim). They are saved and counted as parameters, but never trained.
    """

    frozen = ("w",)

    def __init__(self, config: T2TViTConfig, in_dim: int) -> None:
        super().__init__()
        dim = config.token_dim
        self.q_proj = nn.Linear(in_dim, dim)
        self.k_proj = nn.Linear(in_dim, dim)
        self.v_proj = nn.Linear(in_dim, dim)
        self.o_proj = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(config.token_dropout_prob or 0.0)
        self.w = nn.Parameter(torch.empty(int(dim * config.kernel_ratio), dim))
        self.reset_features()

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
