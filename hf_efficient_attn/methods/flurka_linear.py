"""FLuRKA with the kernel of the linear transformer: keys and values contracted to P tokens, features elu(x) + 1.

Gupta et al. 2023, Eq. 2, with phi of Katharopoulos et al. 2020 and with their normalisation, phi(q) . sum_j phi(k_j)
over the contracted keys. `hf_efficient_attn.methods._shared.projections` describes the departures from the paper.
"""

from dataclasses import dataclass

from hf_efficient_attn.methods._shared.feature_maps import EluFeatures
from hf_efficient_attn.methods._shared.projections import NAMES as TABLES
from hf_efficient_attn.methods._shared.projections import FlurkaConfig, register_flurka
from hf_efficient_attn.ops.features.maps import NAMES as MAPS


@dataclass(frozen=True, kw_only=True)
class FlurkaLinearConfig(EluFeatures, FlurkaConfig):
    """Hyperparameters of FLuRKA with the D features elu(x) + 1, or with learned features."""

    method = "flurka_linear"
    title = "FLuRKA, linear transformer"
    summary = "learned projections along the sequence, and elu(x) + 1 features of the contracted keys"
    far = "learned projections, then `linear`"
    exportable = True
    kernel = "linear"
    learned_parameters = TABLES + MAPS


register_flurka(FlurkaLinearConfig)
