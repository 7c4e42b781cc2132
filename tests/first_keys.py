"""A method in a file of its own, the example of the tests: attention to the first valid keys only."""

from dataclasses import dataclass, replace

import torch

import hf_efficient_attn as hea
from hf_efficient_attn.methods import MethodConfig, option


@dataclass(frozen=True, kw_only=True)
class FirstKeysConfig(MethodConfig):
    "Hyperparameters of attention to the first keys."

    method = "first_keys"
    title = "First keys"
    paper = "none"
    year = 2026
    causal = False
    rectangular = True
    mixes_queries = False
    summary = "exact attention to the first keys of the sequence"

    num_samples: int = option(64, "Number of first valid keys that each query attends to.", minimum=1)
    seed: int = option(0, "No effect, since nothing is drawn. Every method has this field.", minimum=0)

    def with_budget(self, columns):
        return replace(self, num_samples=self.check_budget(columns))


def forward(config, query, key, value, options):
    dtype = torch.promote_types(query.dtype, torch.float32)  # softmax and sums in float32 or float64
    count, key_mask = min(config.num_samples, key.shape[2]), options.key_mask
    if key_mask is not None:  # padding on the left: the first valid keys, not the first positions
        order = key_mask.byte().argsort(dim=1, descending=True, stable=True)[:, :count]
        key, value = (x.take_along_dim(order[:, None, :, None], 2) for x in (key, value))
        key_mask = key_mask.take_along_dim(order, 1)[:, None, None]
    scores = query.to(dtype) @ key[:, :, :count].to(dtype).mT * options.scale  # (B, H, Nq, count)
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask, torch.finfo(dtype).min)
    weights = scores.softmax(-1)
    if key_mask is not None:
        weights = weights.masked_fill(~key_mask, 0.0)  # a query without keys gives 0
    weights = torch.nn.functional.dropout(weights, options.dropout_p)
    return (weights @ value[:, :, :count].to(dtype)).to(value.dtype)


hea.register_method(FirstKeysConfig, forward=forward, naive=forward)
