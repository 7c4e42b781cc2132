"""KDEformer (Zandieh, Han, Daliri, Karbasi, ICML 2023): LSH blocks, and columns sampled by their estimated norms.

Which equation is which line, and where this departs from the paper:

- Near field, A_spar of Eq. 10: blocks of equal size in the Gray order of an angular hash (Appendix A),
  `near_far.plan_lsh`. The key block of a query block is placed by the hash of its middle query, not by its number.
- Far field, A_res = A - A_spar: m columns with p_j proportional to the squared norm of column j of D^-1 A_res plus
  gamma |v_j|^2 (Algorithm 1, lines 2 and 5; Algorithm 3, line 3), gamma = 1 / |V|_op^2 by the power method. A sampled
  column that lies in a query's own block has weight 0 for it. By default the norms come from the exact rows of
  `num_probes` queries rather than from a kernel density estimate. `column_scores="kde"` is the paper's: Algorithm 1,
  lines 3-4, with Algorithm 2 on densities by hashing (`kernel.softmax_column_norms`), less the norms of the near field
  (Algorithm 3, line 3); its work depends on the data, and it is not for torch.compile.
- Every tile of neighbouring queries draws its own m columns, by norms over the queries of its own group of tiles
  (`score_groups`), where Algorithm 1 has one draw for all queries (`columns="all"`). It costs little, since the columns
  of a tile are gathered for themselves anyway; it fits the columns to the queries, and errors of tiles that are drawn
  apart do not add up in the operator norm: on MiniLM, 512 tokens, budget 128, from .36 to .28, on DeiT-tiny at 1,025
  tokens, budget 256, from .16 to .11.
- Columns are drawn without replacement (systematic sampling, inclusion probability pi_j, weight 1/pi_j), which has a
  lower variance at the same budget; `draw="independent"` is Algorithm 1's draw with weights 1/(m p_j).
- Algorithm 1 divides by a separate estimate of D. Here the denominator of a row is the sum of the very weights of its
  numerator (the merged lse of near and far field), so that every output is a convex combination of values, the errors
  of numerator and denominator cancel in part, and no row is scaled up by a poor estimate.
- Causal form: `hf_efficient_attn.ops.causal`; the paper has none.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from hf_efficient_attn.methods._shared.config import option
from hf_efficient_attn.methods._shared.registry import register_method
from hf_efficient_attn.methods._shared.sampled_keys import NearFarConfig, decode, forward, naive


@dataclass(frozen=True, kw_only=True)
class KDEformerConfig(NearFarConfig):
    __doc__ = NearFarConfig.__doc__

    method = "kdeformer"
    title = "KDEformer"
    paper = "Zandieh, Han, Daliri, Karbasi, ICML 2023"
    year = 2023
    causal = True
    rectangular = True
    summary = "blocks of an angular hash exactly, and columns sampled by their estimated norms in the rest"
    default_rank = 30
    default_variants = ({"near_field": "window"}, {})

    column_scores: str = option(
        "probe",
        "What columns are sampled by. 'probe': their norms in the exact rows of some queries, plus gamma |v|^2. "
        "'kde': their norms by hashed kernel densities, plus gamma |v|^2. 'value_norm': |v|^2 alone.",
        choices=("probe", "kde", "value_norm"),
    )
    num_probes: int = option(32, "Queries whose exact rows estimate the column norms.", minimum=1)
    score_groups: int = option(
        4, "Groups of neighbouring tiles of queries, each with column norms of its own, by its own probes.", minimum=1
    )


register_method(KDEformerConfig, forward=forward, naive=naive, decode=decode)
