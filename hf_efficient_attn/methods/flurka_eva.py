"""FLuRKA with the kernel of EVA: keys and values contracted to P tokens, a window of them exactly, the rest by chunks.

Gupta et al. 2023, Eq. 2, where phi(q) . phi(k) are the random features of EVA (Zheng et al. 2023). These features are
never computed. `hf_efficient_attn.methods.eva` gives their sums in the limit of one control variate for each key of the
window and one for each chunk of the other keys, all in one softmax. In terms of Eq. 2:

- `forward` and `forward_hidden_states` of `hf_efficient_attn.methods._shared.projections` compute E1 K and E2 V, with
  W_K and W_V applied before or after them.
- phi(Q) (phi(E1 K)^T E2 V) is the attention of EVA for N queries and P keys.

The contracted keys are not tokens and have no queries of their own. Since a table starts from means of P segments,
contracted key p represents the p-th part of the sequence, and query i of N uses the window around i P / N, as EVA does
for queries and keys that are different tokens. If P is at most `window_size`, the method is the Linformer. The two
modules describe the departures from the papers.
"""

from dataclasses import dataclass

from hf_efficient_attn.methods._shared.config import option
from hf_efficient_attn.methods._shared.projections import FlurkaConfig, register_flurka


@dataclass(frozen=True, kw_only=True)
class FlurkaEvaConfig(FlurkaConfig):
    """Hyperparameters of FLuRKA with control variates."""

    method = "flurka_eva"
    title = "FLuRKA, EVA"
    summary = "learned projections along the sequence, a window of the contracted keys exactly, and control variates"
    far = "learned projections, then `eva`"
    kernel = "eva"
    averages_queries = True
    budget = (("window_size", 1), ("num_landmarks", 1), ("projection_dim", 4))

    window_size: int = option(64, "Contracted keys that each query attends to exactly.", minimum=1)
    num_landmarks: int = option(
        64, "Chunks that the contracted keys are cut into. One key stands for each chunk.", minimum=1
    )
    proposal: str = option(
        "normal",
        "'normal': omega of a chunk is drawn around the sum of its mean query and its mean key. 'mean': omega is that "
        "sum.",
        choices=("normal", "mean"),
    )


register_flurka(FlurkaEvaConfig)
