"""FLuRKA with the kernel of the linear transformer: keys and values contracted to P rows, features elu(x) + 1.

Gupta et al. 2023, Eq. 2, with phi of Katharopoulos et al. 2020, and their normalisation, phi(q) . sum_j phi(k_j) over
the rows. What departs from the paper is said in `hf_efficient_attn.methods._shared.flurka`.
"""

from dataclasses import dataclass

from hf_efficient_attn.methods._shared.flurka import (
    LEARNED,
    FlurkaConfig,
    forward,
    forward_hidden_states,
    initial_parameters,
    naive,
)
from hf_efficient_attn.methods._shared.registry import register_method
from hf_efficient_attn.ops.projections import STARTS_FROM


@dataclass(frozen=True, kw_only=True)
class FlurkaLinearConfig(FlurkaConfig):
    """Hyperparameters of FLuRKA with the features elu(x) + 1, of which there are as many as a head is wide."""

    method = "flurka_linear"
    title = "FLuRKA, linear transformer"
    paper = "Gupta, Guo, Yuan, Zhou, Mendis 2023"
    year = 2023
    causal = False
    rectangular = True
    learned_parameters = LEARNED
    mixes_queries = False
    summary = "learned projections along the sequence, and elu(x) + 1 features of the rows they give"
    kernel = "linear"


register_method(
    FlurkaLinearConfig,
    forward=forward,
    naive=naive,
    initial_parameters=initial_parameters,
    starts_from=STARTS_FROM,
    forward_hidden_states=forward_hidden_states,
)
