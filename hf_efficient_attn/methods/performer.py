"""Performer (Choromanski et al., ICLR 2021): positive orthogonal random features of the softmax kernel (FAVOR+).

Eq. 5 with the orthogonal features of section 3.2 (`hf_efficient_attn.ops.features`), in the sums of the linear
transformer (`hf_efficient_attn.ops.linear`). The scale is split evenly between queries and keys. Dropout acts on the
features of a query.

One departure from the paper affects rounding only: the features of a token are relative to the largest one, and a key
has a weight besides, whose log is kept. The authors subtract one maximum over all keys, which leaks the future in a
causal model, and add 1e-6.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.feature_maps import (
    features_forward,
    features_naive,
    features_query,
    features_update,
    initial_maps,
    is_learned,
)
from hf_efficient_attn.methods._shared.registration import register_method
from hf_efficient_attn.methods._shared.registry import Recurrence
from hf_efficient_attn.methods._shared.sharded_states import sharded_states
from hf_efficient_attn.ops.features import LEARNED, NAMES, count_features


@dataclass(frozen=True, kw_only=True)
class PerformerConfig(MethodConfig):
    """Hyperparameters of the Performer."""

    method = "performer"
    title = "Performer"
    paper = "Choromanski et al., ICLR 2021"
    year = 2020
    causal = True
    rectangular = True
    mixes_queries = False
    learned_parameters = NAMES
    summary = "positive orthogonal random features of the softmax kernel (FAVOR+)"
    paper_url = "https://arxiv.org/abs/2009.14794"
    near = "none"
    far = "FAVOR+ random features"

    num_features: int = option(
        256,
        "Random features, or columns of the map of learned ones. A query costs as much as attention to this many keys, "
        "and to twice as many with 'hedgehog' and 'exp'.",
        minimum=1,
        carried=True,
    )
    feature_map: str = option(
        "favor",
        "The features. 'favor': FAVOR+. Learned, as for linear: 'hedgehog', 't2r' or 'exp'.",
        choices=("favor", *LEARNED),
        carried=True,
    )
    seed: int = option(
        0, "Seed of the features, or of the initial maps. In training FAVOR+ is redrawn in every call.", minimum=0
    )

    def with_budget(self, columns: int) -> "PerformerConfig":
        """As many features as the budget has exact keys."""
        columns = self.check_budget(columns)
        columns = max(1, columns // count_features(self.feature_map, 1)) if is_learned(self) else columns
        return replace(self, num_features=columns)


def initial_parameters(
    config: PerformerConfig, *, num_heads: int, head_dim: int, value_dim: int, max_length: int, num_kv_heads: int
) -> dict[str, Tensor]:
    """The maps of learned features."""
    return initial_maps(config, num_kv_heads, head_dim)


_RECURRENCE: Recurrence[PerformerConfig] = Recurrence(features_update, features_query, features_forward)

register_method(
    PerformerConfig,
    forward=features_forward,
    naive=features_naive,
    initial_parameters=initial_parameters,
    recurrence=_RECURRENCE,
    sharded=sharded_states(_RECURRENCE, lambda config, length, is_causal: True),
)
