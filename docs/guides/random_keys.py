"""Attention to keys drawn at random, the example of the guide "A method in your own file"."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.methods import AttentionOptions, MethodConfig, option
from hf_efficient_attn.ops.attend import attend
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.exact import mask_bias


@dataclass(frozen=True, kw_only=True)
class RandomKeysConfig(MethodConfig):
    """Hyperparameters of attention to random keys."""

    method, title, paper, year = "random_keys", "Random keys", "none", 2026
    causal, rectangular, mixes_queries = False, True, False
    summary = "exact attention to keys drawn at random"

    num_samples: int = option(256, "Number of keys that are drawn.", minimum=1)
    seed: int = option(0, "Seed of the draw.", minimum=0)

    @property
    def exact_length(self) -> int:
        """Up to this length all keys are drawn."""
        return self.num_samples

    def with_budget(self, columns: int) -> "RandomKeysConfig":
        """As many keys as columns."""
        return replace(self, num_samples=self.check_budget(columns))


def forward(config: RandomKeysConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Attention of all queries (B, H, Nq, D) to `num_samples` of the keys (B, H, Nk, D)."""
    (batch, num_heads), kv_len = key.shape[:2], key.shape[2]
    mask = options.key_mask
    if mask is None:
        mask = torch.ones(batch, kv_len, dtype=torch.bool, device=key.device)
    rank = mask.cumsum(1) - 1  # (B, Nk): 0 for the first valid key, wherever it is
    draw = Draws(options.seed, key.device).uniform((kv_len,), stream=0)[rank]
    sampled = draw.masked_fill(~mask, 2.0).argsort(1)[:, : config.num_samples]  # (B, S), masked keys last
    bias = mask_bias(mask.take_along_dim(sampled, 1), query.dtype)  # (B, S): -inf if too few keys are valid
    key, value = (x.take_along_dim(sampled[:, None, :, None], 2) for x in (key, value))
    flat = (x.flatten(0, 1)[:, None] for x in (query, key, value))  # (B * H, 1, N, D)
    bias = bias.repeat_interleave(num_heads, 0)[:, None, None]
    partial = attend(*flat, bias, scale=options.scale, dropout_p=options.dropout_p)
    return partial.out[:, 0].unflatten(0, (batch, num_heads))


hea.register_method(RandomKeysConfig, forward=forward, naive=forward)
