"""NAME (AUTHORS, VENUE YEAR): what the method computes, in one sentence.

What a query attends to exactly, what stands for all other keys, and where the paper says so (section, equation). Then
the departures from the paper, each with its reason and a figure.

This template attends to evenly spaced keys. Replace its text, the class and the two forms.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.config import AttentionOptions, MethodConfig, option
from hf_efficient_attn.methods._shared.heads import by_heads
from hf_efficient_attn.methods._shared.registry import register_method
from hf_efficient_attn.ops.attend import attend
from hf_efficient_attn.ops.clusters import candidate_positions
from hf_efficient_attn.ops.exact import dense_softmax, mask_bias
from hf_efficient_attn.ops.index import take


@dataclass(frozen=True, kw_only=True)
class NewMethodConfig(MethodConfig):
    """Hyperparameters. Up to num_samples keys the output is exact."""

    method = "new_method"
    title = "New method"
    paper = "this package"
    year = 2026
    causal = False
    rectangular = True
    mixes_queries = False
    budget = (("num_samples", 1),)
    exact_budget = ("num_samples",)
    summary = "exact attention to evenly spaced keys"
    near = "evenly spaced keys"
    far = "none"

    num_samples: int = option(256, "Keys that all queries attend to.", minimum=1)
    seed: int = option(0, "No effect, because nothing is random. Every method has this hyperparameter.", minimum=0)


def _positions(key: Tensor, key_mask: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """Choose evenly spaced valid keys of (BH, Nk, D): int64 (BH, m), and bool (BH, m), False if there are fewer."""
    mask = torch.ones_like(key[..., 0], dtype=torch.bool) if key_mask is None else key_mask  # (BH, Nk)
    return candidate_positions(mask, count)


def forward(config: NewMethodConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Fast form; see `register_method`."""

    def form(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
        position, valid = _positions(key, key_mask, config.num_samples)  # (BH, m) each
        keys, values = (take(x, position)[:, None] for x in (key, value))  # (BH, 1, m, .): one block of queries
        bias = mask_bias(valid, query.dtype)[:, None, None]  # (BH, 1, 1, m)
        return attend(query[:, None], keys, values, bias, scale=options.scale, dropout_p=options.dropout_p).out[:, 0]

    return by_heads(form, query, key, value, options, config.exact_length)


def naive(config: NewMethodConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form, with a dense matrix of all pairs."""

    def form(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
        position, valid = _positions(key, key_mask, config.num_samples)
        sampled = torch.zeros_like(key[..., 0], dtype=torch.bool).scatter(1, position, valid)  # (BH, Nk)
        scores = options.scale * query.double() @ key.double().mT  # (BH, Nq, Nk)
        return dense_softmax(scores, value, sampled)

    return by_heads(form, query, key, value, options)


register_method(NewMethodConfig, forward=forward, naive=naive)
