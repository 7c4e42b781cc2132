"""FLuRKA with the kernel of the Performer: keys and values contracted to P tokens, positive random features (FAVOR+).

Gupta et al. 2023, Eq. 2, with phi of Choromanski et al. 2021 and with their normalisation, phi(q) . sum_j phi(k_j) over
the contracted keys. With more and more features the output converges to the output of the Linformer.
`hf_efficient_attn.methods._shared.projections` describes the departures from the paper.
"""

from dataclasses import dataclass

from hf_efficient_attn.methods._shared.feature_maps import FavorFeatures
from hf_efficient_attn.methods._shared.projections import NAMES as TABLES
from hf_efficient_attn.methods._shared.projections import FlurkaConfig, register_flurka
from hf_efficient_attn.ops.features.maps import NAMES as MAPS


@dataclass(frozen=True, kw_only=True)
class FlurkaPerformerConfig(FavorFeatures, FlurkaConfig):
    """Hyperparameters of FLuRKA with random features of the softmax kernel."""

    method = "flurka_performer"
    title = "FLuRKA, Performer"
    summary = "learned projections along the sequence, and random features of the contracted keys (FAVOR+)"
    far = "learned projections, then `performer`"
    exportable = True
    kernel = "performer"
    budget = (("num_features", 1), ("projection_dim", 1))  # a query attends to the features
    learned_parameters = TABLES + MAPS


register_flurka(FlurkaPerformerConfig)
