"""HyperAttention (Han, Jayaram, Karbasi, Mirrokni, Woodruff, Zandieh, ICLR 2024): hash blocks and uniform samples.

The near field is Algorithm 1 (sortLSH). The far field is the uniform sampling of Algorithm 2 and of the authors'
practical version: m sampled keys, each with weight (number of keys) / m for the queries whose near field does not
contain it. Departures from the paper:

- Each block of queries draws its own keys, so that the errors of the blocks do not add up, without replacement
  (systematic sampling) and from outside of its near field, so that no draw is lost and all keys have the weight (number
  of keys outside) / m. `draw="independent"` and `columns="all"`, the paper's choices, draw from all keys.
- A head has a window in place of the hash blocks where the exact rows of 32 queries show that the window holds more of
  their weight (`near_field="auto"`, the default).
- `hf_efficient_attn.ops.sampled_keys.causal` describes the causal form. In the paper's recursion later queries
  influence earlier outputs.
"""

from dataclasses import dataclass

from hf_efficient_attn.methods._shared.sampled_keys import SampledKeysConfig, register_sampled_keys


@dataclass(frozen=True, kw_only=True)
class HyperAttentionConfig(SampledKeysConfig):
    """Hyperparameters of HyperAttention. Up to block_size + num_samples keys the output is exact."""

    method = "hyperattention"
    title = "HyperAttention"
    paper = "Han, Jayaram, Karbasi, Mirrokni, Woodruff, Zandieh, ICLR 2024"
    year = 2023
    summary = "blocks of an angular hash exactly, and uniformly sampled columns for the rest"
    paper_url = "https://arxiv.org/abs/2310.05869"
    near = "LSH blocks or a window"
    far = "keys sampled uniformly"
    cost = 0.5


register_sampled_keys(HyperAttentionConfig)
