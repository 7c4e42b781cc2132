"""Performer (Choromanski et al., ICLR 2021): positive orthogonal random features of the softmax kernel (FAVOR+).

Eq. 5 with the orthogonal features of section 3.2 (`hf_efficient_attn.ops.features.maps`), in the sums of the linear
transformer (`hf_efficient_attn.ops.features.sums`). The scale is split evenly between queries and keys. Dropout acts on
the features of a query.

One departure from the paper affects rounding only: the features of a token are relative to the largest feature, and the
log of that factor is a weight of the key. The authors subtract one maximum over all keys, which leaks the future in a
causal model, and add 1e-6.
"""

from dataclasses import dataclass, replace

from hf_efficient_attn.methods._shared.config import option
from hf_efficient_attn.methods._shared.feature_maps import FavorFeatures, register_features
from hf_efficient_attn.ops.features.maps import NAMES, count_features


@dataclass(frozen=True, kw_only=True)
class PerformerConfig(FavorFeatures):
    """Hyperparameters of the Performer."""

    method = "performer"
    title = "Performer"
    paper = "Choromanski et al., ICLR 2021"
    year = 2020
    causal = True
    rectangular = True
    exportable = True
    learned_parameters = NAMES
    summary = "positive orthogonal random features of the softmax kernel (FAVOR+)"
    paper_url = "https://arxiv.org/abs/2009.14794"
    near = "none"
    far = "FAVOR+ random features"
    cost = 0.5

    seed: int = option(
        0, "Seed of the features, or of the initial maps. In training FAVOR+ is redrawn in every call.", minimum=0
    )

    def with_budget(self, columns: int) -> "PerformerConfig":
        """Return a copy with as many features (`num_features`) as the budget has exact keys."""
        columns = self.check_budget(columns)
        columns = max(1, columns // count_features(self.feature_map, 1)) if self.is_learned else columns
        return replace(self, num_features=columns)


register_features(PerformerConfig)
