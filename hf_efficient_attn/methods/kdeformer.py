"""KDEformer (Zandieh, Han, Daliri, Karbasi, ICML 2023): blocks of an angular hash, and keys sampled by column norms.

The near field computes blocks of hashed queries and keys exactly. The far field estimates the rest from sampled keys,
where a key is sampled by the estimated norm of its column of the attention matrix. The code follows these equations:

- Near field, A_spar of Eq. 10: blocks of equal size in the Gray order of an angular hash (Appendix A). `plan_lsh` in
  `hf_efficient_attn.ops.sampled_keys.hashing` chooses them. The paper pairs the b-th block of queries with the b-th
  block of keys. Here the hash of the middle query of a block determines its keys.
- Far field, A_res = A - A_spar: m keys. Key j is sampled with a probability proportional to the squared norm of column
  j of D^-1 A_res plus gamma |v_j|^2 with gamma = 1 / |V|_op^2 (Algorithm 1, lines 2 and 5; Algorithm 3, line 3). The
  Frobenius norm of V^T V estimates |V|_op^2; in the paper the power method does. A sampled key has weight 0 for the
  queries whose near field contains it.
- Column norms: by default they are estimated from exact rows of some queries and not from kernel densities. With
  `near_field="auto"` the rows that choose the near field are used, and otherwise the rows of `num_probes` queries.
  `column_scores="kde"` is the paper's estimate: Algorithm 1, lines 3-4, with Algorithm 2 on densities by hashing
  (`kernel.softmax_column_norms`), minus the norms of the near field (Algorithm 3, line 3). The amount of its work
  depends on the data.

Departures from the paper:

- A head has a window in place of the hash blocks where the exact rows of 32 queries show that the window holds more of
  their weight (`near_field="auto"`, the default). On MiniLM with 512 tokens and budget 128 the error is .27 with the
  hash, .15 with a window and .14 with this choice. On DeiT-tiny with 1,025 tokens and budget 128 it is .18, .16, .14.
- Each block of neighbouring queries draws its own m keys, by norms over its own group of neighbouring blocks
  (`score_groups`). Algorithm 1 has one draw for all queries (`columns="all"`). A draw per block costs little, because
  the sampled keys are gathered for each block anyway. It adapts the keys to the queries, and the independent errors of
  the blocks do not add up in the operator norm. On MiniLM with 512 tokens and budget 128 the error falls from .36 to
  .28, and on DeiT-tiny with 1,025 tokens and budget 256 from .16 to .11.
- Keys are drawn without replacement (systematic sampling with inclusion probability pi_j and weight 1/pi_j), which has
  a lower variance at the same budget. `draw="independent"` is the draw of Algorithm 1 with weights 1/(m p_j).
- Algorithm 1 divides by a separate estimate of D. Here the denominator of an output is the sum of the weights in its
  numerator (the merged lse of near and far field). Every output is therefore a convex combination of values, the errors
  of numerator and denominator partly cancel, and no output is scaled up by a poor estimate of D.
- The paper has no causal form. `hf_efficient_attn.ops.sampled_keys.causal` describes the causal form here.
"""

from dataclasses import dataclass

from hf_efficient_attn.methods._shared.config import option
from hf_efficient_attn.methods._shared.sampled_keys import SampledKeysConfig, register_sampled_keys


@dataclass(frozen=True, kw_only=True)
class KDEformerConfig(SampledKeysConfig):
    """Hyperparameters of KDEformer. Up to block_size + num_samples keys the output is exact."""

    method = "kdeformer"
    title = "KDEformer"
    paper = "Zandieh, Han, Daliri, Karbasi, ICML 2023"
    year = 2023
    summary = "blocks of an angular hash exactly, and columns sampled by their estimated norms in the rest"
    paper_url = "https://arxiv.org/abs/2302.02451"
    near = "LSH blocks or a window"
    far = "keys sampled by estimated norm"
    default_rank = 30
    default_variants = ({"near_field": "window"}, {})
    cost = 0.6

    column_scores: str = option(
        "probe",
        "What keys are sampled by. 'probe': the norms of their columns in the exact rows of some queries, plus gamma "
        "|v|^2. 'kde': the norms of their columns by hashed kernel densities, plus gamma |v|^2. 'value_norm': |v|^2.",
        choices=("probe", "kde", "value_norm"),
    )
    num_probes: int = option(
        32, "Queries whose exact rows estimate the column norms; at least 48 with near_field='auto'.", minimum=1
    )
    score_groups: int = option(
        4, "Groups of neighbouring query blocks. Each has its own probes and column norms.", minimum=1
    )


register_sampled_keys(KDEformerConfig)
