"""Thinformer (Carrell, Gong, Shetty, Dwivedi, Mackey, ICML 2025): attention to keys that kernel halving selects.

How "Low-Rank Thinning" (arXiv 2502.12063), section 4, corresponds to the code:

- Selection by KH-Compress with the kernel exp(<k, k'> / sqrt(d)) (<v, v'> + max |V|^2): `thin` in
  `hf_efficient_attn.ops.thinning`. It depends on the keys and values only, so all queries of a head share it.
- Output: exact attention of all queries to the selected keys.

Departures from the paper:

- KH-Compress(g) keeps 2^g sqrt(n) of n tokens, where n is a power of four. The authors' code reduces other lengths to
  such an n by taking every (N / n)-th token. Here any `num_samples` of any number of tokens are kept, and all tokens
  take part. They are spread evenly over num_samples 2^r places, the next such number. If one place of a pair is empty,
  the token in the other is kept. So kept tokens may stand for different numbers of tokens. These numbers are their
  weights in the softmax, and the decision between the tokens of a pair takes them into account.
- At the paper's sizes with g >= 1 all weights are equal. Buckets, probabilities and the margin of the decisions (for a
  failure probability of 1/2) are then the same as in the authors' code, and the same random numbers keep the same
  tokens. There is one exception: the authors' code keeps the first token of a bucket's first pair, and then flips all
  decisions of a round with probability 1/2. Here the first decision is a fair draw.
- There is no causal form, in the paper or here, because a kept token would stand for later tokens.

The rounds, and the pairs of a bucket, follow one another: a call has about 2 * num_samples steps of a few small
operations on all heads and buckets together, whatever the length.

Up to `num_samples` valid keys, all keys are kept, so the output is exact. Gradients hold the selection fixed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.config import AttentionOptions, MethodConfig, option
from hf_efficient_attn.methods._shared.heads import by_heads
from hf_efficient_attn.methods._shared.registry import register_method
from hf_efficient_attn.ops.attend import attend
from hf_efficient_attn.ops.backends.devices import accumulation_dtype
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.index import take
from hf_efficient_attn.ops.thinning import draw_numbers, thin, thin_naive


@dataclass(frozen=True, kw_only=True)
class ThinformerConfig(MethodConfig):
    """Hyperparameters of the Thinformer. With up to num_samples keys the output is exact."""

    method = "thinformer"
    title = "Thinformer"
    paper = "Carrell, Gong, Shetty, Dwivedi, Mackey, ICML 2025"
    year = 2025
    causal = False
    rectangular = True
    # The selection is not counted. Each of its log2(N / num_samples) rounds computes 4 num_samples^2 values of the
    # kernel and at most num_samples sequential steps.
    budget = (("num_samples", 1),)
    exact_budget = ("num_samples",)
    mixes_queries = False
    summary = "exact attention to a few keys, which kernel halving selects to represent all of them"
    paper_url = "https://arxiv.org/abs/2502.12063"
    near = "none"
    far = "keys selected by kernel halving"
    cost = 0.8

    num_samples: int = option(256, "Keys that are kept. Each query attends to all of them.", minimum=1)
    seed: int = option(0, "Seed of the halving.", minimum=0)


def forward(config: ThinformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Fast form; see `register_method`."""
    count = config.num_samples
    scale = options.scale
    batch = len(query)
    draws = Draws(options.seed, query.device)

    def form(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:  # (BH, N, .)
        token, log_weight = thin(key, value, key_mask, count, scale=scale, draws=draws, batch=batch)  # (BH, M) each
        keys, values = (take(x, token)[:, None] for x in (key, value))  # (BH, 1, M, .)
        bias = log_weight.to(accumulation_dtype(query.dtype))[:, None, None]  # (BH, 1, 1, M)
        return attend(query[:, None], keys, values, bias, scale=scale, dropout_p=options.dropout_p).out[:, 0]

    return by_heads(form, query, key, value, options, count)  # (B, H, Nq, Dv)


def naive(config: ThinformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form: one head at a time without padding, with a dense matrix that has weight 0 for dropped keys."""
    batch, num_heads, _, _ = query.shape
    count = config.num_samples
    scale = options.scale
    out = value.new_zeros((*query.shape[:3], value.shape[3]), dtype=torch.float64)  # (B, H, Nq, Dv)
    for b in range(batch):
        valid = key.new_ones(key.shape[2], dtype=torch.bool) if options.key_mask is None else options.key_mask[b]
        if not valid.any():
            continue
        # (H, num_pairs) for each round
        draws = draw_numbers(Draws(options.seed, query.device), int(valid.sum()), count, num_heads)
        for h in range(num_heads):
            keys = key[b, h, valid].double()  # (n, D)
            values = value[b, h, valid].double()  # (n, Dv)
            counts = thin_naive(keys, values, count, [draw[h] for draw in draws], scale=scale)  # (n,)
            # (Nq, n) @ (n, Dv) -> (Nq, Dv)
            out[b, h] = (scale * query[b, h].double() @ keys.mT + counts.log()).softmax(-1) @ values
    return out.to(value.dtype)


register_method(ThinformerConfig, forward=forward, naive=naive)
