"""FLuRKA with the kernel of the Performer: keys and values contracted to P rows, positive random features (FAVOR+).

Gupta et al. 2023, Eq. 2, with phi of Choromanski et al. 2021, and their normalisation, phi(q) . sum_j phi(k_j) over the
rows. As the features grow in number it becomes the Linformer's softmax over the rows. What departs from the paper is
said in `hf_efficient_attn.methods._shared.flurka`.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from hf_efficient_attn.methods._shared.base import Method, MethodConfig, MethodInfo, get_method, option, register
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
class FlurkaPerformerConfig(FlurkaConfig):
    """Hyperparameters of FLuRKA with random features of the softmax kernel."""

    method: ClassVar[str] = "flurka_performer"
    kernel = "performer"

    num_features: int = option(256, "Random features; a query attends to as many columns.", minimum=1, carried=True)

    def with_budget(self, columns: int) -> "FlurkaPerformerConfig":
        """Half the columns features, which a query attends to, half rows, which every token is contracted to."""
        features = self.check_budget(columns, 2) // 2
        return replace(self, num_features=features, projection_dim=columns - features)

    def kernel_config(self) -> MethodConfig:
        """The config of the Performer."""
        return get_method(self.kernel).info.config_class(num_features=self.num_features)


register(
    Method(
        info=MethodInfo(
            name="flurka_performer",
            title="FLuRKA, Performer",
            paper="Gupta, Guo, Yuan, Zhou, Mendis 2023",
            year=2023,
            causal=False,
            rectangular=True,
            recurrent=False,
            learned_parameters=LEARNED,
            config_class=FlurkaPerformerConfig,
            summary="learned projections along the sequence, and random features of the rows they give (FAVOR+)",
        ),
        attend=attend,
        naive=naive,
        mixes_queries=False,
        parameters=start_parameters,
        starts_from=STARTS_FROM,
        attend_hidden=attend_hidden,
    )
)
