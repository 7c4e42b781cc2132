"""FLuRKA with the kernel of the linear transformer: keys and values contracted to P rows, features elu(x) + 1.

Gupta et al. 2023, Eq. 2, with phi of Katharopoulos et al. 2020, and their normalisation, phi(q) . sum_j phi(k_j) over
the rows. What departs from the paper is said in `hf_efficient_attn.methods._shared.flurka`.
"""

from dataclasses import dataclass
from typing import ClassVar

from hf_efficient_attn.methods._shared.base import Method, MethodInfo, register
from hf_efficient_attn.methods._shared.flurka import (
    LEARNED,
    FlurkaConfig,
    attend,
    attend_hidden,
    naive,
    start_parameters,
)
from hf_efficient_attn.ops.projections import STARTS_FROM


@dataclass(frozen=True, kw_only=True)
class FlurkaLinearConfig(FlurkaConfig):
    """Hyperparameters of FLuRKA with the features elu(x) + 1, of which there are as many as a head is wide."""

    method: ClassVar[str] = "flurka_linear"
    kernel = "linear"


register(
    Method(
        info=MethodInfo(
            name="flurka_linear",
            title="FLuRKA, linear transformer",
            paper="Gupta, Guo, Yuan, Zhou, Mendis 2023",
            year=2023,
            causal=False,
            rectangular=True,
            recurrent=False,
            learned_parameters=LEARNED,
            config_class=FlurkaLinearConfig,
            summary="learned projections along the sequence, and elu(x) + 1 features of the rows they give",
        ),
        attend=attend,
        naive=naive,
        mixes_queries=False,
        parameters=start_parameters,
        starts_from=STARTS_FROM,
        attend_hidden=attend_hidden,
    )
)
