"""Linear transformer (Katharopoulos, Vyas, Pappas, Fleuret, ICML 2020): weights phi(q) . phi(k), phi(x) = elu(x) + 1.

`hf_efficient_attn.ops.features.maps` describes other features, which are learned. With `window_size`, the weights of
softmax replace the weights of the features in a window (`hf_efficient_attn.ops.features.with_window`).

- Bidirectional, Eq. 4-6: out_i = phi(q_i)^T S / phi(q_i)^T Z with S = sum_j phi(k_j) v_j^T and Z = sum_j phi(k_j).
- Causal, Eq. 9-12: the same with sums up to token i, computed chunk by chunk.
- Recurrent, Eq. 16-20: S and Z are the state.

The computation is in `hf_efficient_attn.ops.features.sums`. The paper has no scale. Here, a scale other than
1/sqrt(D) multiplies the queries by scale * sqrt(D) before phi. Dropout acts on phi(q_i) / phi(q_i)^T Z.

A model that is trained with a window can learn to ignore the features, so that the window alone determines its loss. So
measure also the features alone, `dataclasses.replace(config, window_size=0)` with the same learned parameters, and the
window alone, which is `longformer`.
"""

from dataclasses import dataclass, replace

from hf_efficient_attn.methods._shared.config import option
from hf_efficient_attn.methods._shared.feature_maps import LOG_WEIGHT, EluFeatures, register_features
from hf_efficient_attn.ops.features.maps import NAMES, count_features


@dataclass(frozen=True, kw_only=True)
class LinearConfig(EluFeatures):
    """Hyperparameters of the linear transformer: the features, and a window that is computed exactly."""

    method = "linear"
    title = "Linear transformer"
    paper = "Katharopoulos, Vyas, Pappas, Fleuret, ICML 2020"
    year = 2020
    causal = True
    rectangular = True
    exportable = True
    learned_parameters = (*NAMES, LOG_WEIGHT)
    summary = "elu(x) + 1 features in place of the exponential; an attention of its own, for training"
    paper_url = "https://arxiv.org/abs/2006.16236"
    near = "none, or a window"
    far = "elu(x) + 1 or learned features"
    cost = 0.2

    window_size: int = option(
        0,
        "Keys on each side (causal: on the left only) that a query attends to exactly, besides its own. The features "
        "represent all others. 0: no window.",
        minimum=0,
    )
    seed: int = option(0, "Seed of the initial maps of learned features.", minimum=0)

    @property
    def exact_length(self) -> int:
        """The window on one side and the token itself; 0 without a window."""
        return self.window_size + 1 if self.window_size else 0

    @property
    def needs_square(self) -> bool:
        """True with a window, because the window is one of positions."""
        return self.window_size > 0

    def with_budget(self, columns: int) -> "LinearConfig":
        """Spend half of the budget on the window (`window_size`), if there is one, and the rest on learned features.

        `num_features` follows from the rest. A window has the same size on each side. The features "elu" always cost as
        much as about D / 2 exact keys, so the window gets the whole budget.
        """
        columns = self.check_budget(columns)
        num_features = self.num_features
        window_size = self.window_size
        near = columns if self.window_size else 0
        if self.is_learned:
            near //= 2
            num_features = max(1, (columns - near) // count_features(self.feature_map, 1))
        if self.window_size:
            window_size = max(1, (near - 1) // 2)
        return replace(self, num_features=num_features, window_size=window_size)


register_features(LinearConfig)
