"""HyperAttention (Han, Jayaram, Karbasi, Mirrokni, Woodruff, Zandieh, ICLR 2024): LSH blocks and uniform columns.

The near field is Algorithm 1 (sortLSH), the far field the uniform sampling of Algorithm 2 and of the authors' practical
version: m columns, each with weight (number of keys) / m for the queries whose block does not hold them. Departures:

- Columns are drawn without replacement (systematic sampling; `draw="independent"` is the paper's), and by each tile of
  queries for itself (`columns="all"` is the paper's), so that the errors of tiles do not add up.
- The causal form is `hf_efficient_attn.ops.causal`: the paper's recursion lets later queries influence earlier ones.
"""

from dataclasses import dataclass

from hf_efficient_attn.methods._shared.registry import register_method
from hf_efficient_attn.methods._shared.sampled_keys import NearFarConfig, decode, forward, naive


@dataclass(frozen=True, kw_only=True)
class HyperAttentionConfig(NearFarConfig):
    __doc__ = NearFarConfig.__doc__

    method = "hyperattention"
    title = "HyperAttention"
    paper = "Han, Jayaram, Karbasi, Mirrokni, Woodruff, Zandieh, ICLR 2024"
    year = 2023
    causal = True
    rectangular = True
    summary = "blocks of an angular hash exactly, and uniformly sampled columns for the rest"


register_method(HyperAttentionConfig, forward=forward, naive=naive, decode=decode)
