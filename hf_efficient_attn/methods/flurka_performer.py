"""FLuRKA with the kernel of the Performer: keys and values contracted to P rows, positive random features (FAVOR+).

Gupta et al. 2023, Eq. 2, with phi of Choromanski et al. 2021, and their normalisation, phi(q) . sum_j phi(k_j) over the
rows. As the features grow in number it becomes the Linformer's softmax over the rows. What departs from the paper is
said in `hf_efficient_attn.methods._shared.flurka`.
"""

from dataclasses import dataclass, replace

from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.flurka import (
    LEARNED,
    FlurkaConfig,
    forward,
    forward_hidden_states,
    initial_parameters,
    naive,
)
from hf_efficient_attn.methods._shared.registry import get_method, register_method
from hf_efficient_attn.ops.projections import STARTS_FROM


@dataclass(frozen=True, kw_only=True)
class FlurkaPerformerConfig(FlurkaConfig):
    """Hyperparameters of FLuRKA with random features of the softmax kernel."""

    method = "flurka_performer"
    title = "FLuRKA, Performer"
    paper = "Gupta, Guo, Yuan, Zhou, Mendis 2023"
    year = 2023
    causal = False
    rectangular = True
    learned_parameters = LEARNED
    mixes_queries = False
    summary = "learned projections along the sequence, and random features of the rows they give (FAVOR+)"
    kernel = "performer"

    num_features: int = option(256, "Random features; a query attends to as many columns.", minimum=1, carried=True)

    def with_budget(self, columns: int) -> "FlurkaPerformerConfig":
        """Half the columns features, which a query attends to, half rows, which every token is contracted to."""
        features = self.check_budget(columns, 2) // 2
        return replace(self, num_features=features, projection_dim=columns - features)

    def kernel_config(self) -> MethodConfig:
        """The config of the Performer."""
        return get_method(self.kernel).info.config_class(num_features=self.num_features)


register_method(
    FlurkaPerformerConfig,
    forward=forward,
    naive=naive,
    initial_parameters=initial_parameters,
    starts_from=STARTS_FROM,
    forward_hidden_states=forward_hidden_states,
)
