"""FLuRKA with the kernel of EVA: keys and values contracted to P rows, a window of them exactly, the rest by chunks.

Gupta et al. 2023, Eq. 2, where phi(q) . phi(k) stands for the random features of EVA (Zheng et al. 2023). These are
never written out: `hf_efficient_attn.methods.eva` gives the sums that they have in the limit of one control variate for
each key of the window and one for each chunk of the other rows, all in one softmax. Which equation is which line:

- E1 K and E2 V of Eq. 2 (with W_K and W_V before or after them) are `attend_hidden` and `attend` of
  `hf_efficient_attn.methods._shared.flurka`;
- phi(Q) (phi(E1 K)^T E2 V) is EVA's own attention of N queries to these P rows.

The rows are no tokens, and have no queries of their own. A table starts from means of P segments, so that row p stands
for the p-th part of the sequence: query i of N goes with the window of rows around i P / N, as EVA pairs queries and
keys that are not the same tokens. With P at most `window_size` it is the Linformer. What departs from the papers is
said in these two files.
"""

from dataclasses import dataclass, replace

from torch import Tensor

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
class FlurkaEvaConfig(FlurkaConfig):
    """Hyperparameters of FLuRKA with control variates."""

    method = "flurka_eva"
    title = "FLuRKA, EVA"
    paper = "Gupta, Guo, Yuan, Zhou, Mendis 2023"
    year = 2023
    causal = False
    rectangular = True
    learned_parameters = LEARNED
    summary = "learned projections along the sequence, a window of the rows exactly and control variates"
    kernel = "eva"

    window_size: int = option(64, "Rows that each query attends to exactly.", minimum=1)
    num_landmarks: int = option(64, "Chunks into which all rows are cut, each summarised by one row.", minimum=1)
    proposal: str = option(
        "normal",
        "'normal': omega of a chunk is drawn around its mean query plus its mean row. 'mean': it is that.",
        choices=("normal", "mean"),
    )

    def with_budget(self, columns: int) -> "FlurkaEvaConfig":
        """A sixth of the columns near, a sixth of them summaries, the rest rows, which every token is contracted to."""
        part = max(1, self.check_budget(columns, 3) // 6)
        return replace(self, window_size=part, num_landmarks=part, projection_dim=columns - 2 * part)

    def kernel_config(self) -> MethodConfig:
        """The config of EVA."""
        own = {"window_size": self.window_size, "num_landmarks": self.num_landmarks, "proposal": self.proposal}
        return get_method(self.kernel).info.config_class(**own)

    def kernel_options(self, query_mask: Tensor | None) -> dict:
        """EVA has means of queries, of which those that are not there are no part."""
        return {"query_mask": query_mask}


register_method(
    FlurkaEvaConfig,
    forward=forward,
    naive=naive,
    initial_parameters=initial_parameters,
    starts_from=STARTS_FROM,
    forward_hidden_states=forward_hidden_states,
)
