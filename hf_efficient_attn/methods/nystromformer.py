"""Nystromformer (Xiong et al., AAAI 2021): the softmax matrix from its rows and columns at a few landmarks.

How the paper's equations correspond to the code:

- Eq. 16: landmarks are means of segments of tokens, Q~ of the queries and K~ of the keys (`landmark_attention`).
- Eq. 13 and 15: out = F Z B V with F = softmax(Q K~^T), A = softmax(Q~ K~^T), B = softmax(Q~ K^T) and Z the
  pseudo-inverse of A. The product is computed from the right, B V, W = Z (B V), F W, so no factor is larger than the
  sequence.
- Eq. 14: Z by six steps of the third-order iteration (`iterative_pinv`).
- Figure 4, skip connection: a depth-wise convolution over the tokens of V, with one kernel per head, is added.

Departures from the paper. Where the paper's assumptions hold, the result is the same:

- The paper assumes that n is divisible by the number of landmarks. Here, the first n mod L segments have one token
  more. Segments contain valid tokens only, and segments without a token have no weight. The convolution also runs over
  the valid tokens. With as many queries as keys, as in self-attention, the key mask is also the mask of the queries.
- The iteration starts from the norms of the matrix of each batch row and head. The authors' code uses the largest norms
  in the batch, so the output of a batch row depends on other rows.
- With up to L tokens the output is exact attention. For a short row of a padded batch the landmarks are the keys
  themselves, and F W with W = V is exact.
- pinv="solve" is regularised least squares in place of the iteration.

The weights of a query sum to 1 only as far as Z is the pseudo-inverse, and some are negative, so outputs are not
averages of values. There is no causal form, because a landmark contains tokens of the future. Dropout acts on F.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods._shared.config import AttentionOptions, MethodConfig, ShardedForm, option
from hf_efficient_attn.methods._shared.heads import exactly
from hf_efficient_attn.methods._shared.registry import check_parameters, register_method
from hf_efficient_attn.ops.backends.devices import accumulation_dtype
from hf_efficient_attn.ops.nystrom import LandmarkOptions, add_convolution, landmark_attention, landmark_naive
from hf_efficient_attn.ops.shards import Shards
from hf_efficient_attn.ops.tracing import exporting_to_onnx


@dataclass(frozen=True, kw_only=True)
class NystromformerConfig(MethodConfig):
    """Hyperparameters of the Nystromformer. With up to num_landmarks keys or queries the output is exact."""

    method = "nystromformer"
    title = "Nystromformer"
    paper = "Xiong et al., AAAI 2021"
    year = 2021
    causal = False
    rectangular = True
    exportable = True
    learned_parameters = ("conv_weight",)
    trains_on_weights = False
    summary = "the softmax matrix from its rows and columns at the means of segments"
    paper_url = "https://arxiv.org/abs/2102.03902"
    near = "none"
    far = "segment means as landmarks"
    default_rank = 10
    cost = 0.2

    num_landmarks: int = option(
        64, "Number of landmarks. Each is the mean query and the mean key of a segment of tokens.", minimum=1
    )
    pinv: str = option(
        "iterative",
        "'iterative': the paper's iteration for the pseudo-inverse. 'solve': regularised least squares.",
        choices=("iterative", "solve"),
    )
    pinv_iterations: int = option(
        6, "Steps of the iteration. With fewer steps, more small singular values are damped.", minimum=1, maximum=20
    )
    conv_kernel_size: int = option(
        0, "Odd size of the convolution over the tokens of V, with one learned kernel per head. 0: none.", minimum=0
    )
    seed: int = option(0, "No effect, since nothing is drawn. Every method has this field.", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.conv_kernel_size and self.conv_kernel_size % 2 == 0:
            raise UnsupportedAttentionError(
                f"{self.method}: conv_kernel_size={self.conv_kernel_size} is even, so the kernel has no middle; "
                "give an odd size, or 0 for no convolution"
            )

    @property
    def exact_length(self) -> int:
        """The number of landmarks. A convolution, once it is trained, is added at every length."""
        return 0 if self.conv_kernel_size else self.num_landmarks

    def with_budget(self, columns: int) -> "NystromformerConfig":
        """Return a copy with half as many landmarks (`num_landmarks`) as the budget has exact keys.

        For each query, F W costs as much as attention to L keys, and B V the same again. The pseudo-inverse is not
        counted: for N > 60 L^2 / D its six steps of 4 L^3 multiplications cost less than a tenth of the rest.
        """
        return replace(self, num_landmarks=max(1, self.check_budget(columns) // 2))


def initial_parameters(config: NystromformerConfig, *, num_heads: int, **_: int) -> dict[str, Tensor]:
    """Make `conv_weight` (H, kernel) of zeros if there is a convolution, so that conversion keeps the output."""
    if not config.conv_kernel_size:
        return {}
    return {"conv_weight": torch.zeros(num_heads, config.conv_kernel_size, dtype=torch.float32)}  # (H, kernel)


def _prepare(
    config: NystromformerConfig, query: Tensor, key: Tensor, options: AttentionOptions
) -> tuple[Tensor | None, LandmarkOptions]:
    """Return the kernels of the convolution (H, kernel) in the accumulation dtype, or None, and the options."""
    check_parameters(config, query, options)
    iterations = config.pinv_iterations if config.pinv == "iterative" else 0
    chosen = LandmarkOptions(config.num_landmarks, iterations, options.scale, options.dropout_p)
    if not config.conv_kernel_size:
        return None, chosen
    if query.shape[2] != key.shape[2]:
        raise UnsupportedAttentionError(
            "nystromformer: the convolution adds the tokens of V to those of the output, which needs as many keys as "
            f"queries; there are {query.shape[2]} queries and {key.shape[2]} keys; set conv_kernel_size=0"
        )
    return options.parameters["conv_weight"].to(accumulation_dtype(query.dtype)), chosen


def forward(
    config: NystromformerConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    shards: Shards | None = None,
) -> Tensor:
    """Fast form; see `register_method`. As a `ShardedForm` it exchanges the landmarks."""
    kernel, chosen = _prepare(config, query, key, options)  # (H, kernel)
    if exporting_to_onnx() and (kernel is not None or config.pinv == "solve"):
        raise UnsupportedAttentionError(
            "nystromformer cannot be exported to ONNX with pinv='solve' or a convolution: set pinv='iterative' and "
            "conv_kernel_size=0"
        )
    few = not exporting_to_onnx() and min(query.shape[2], key.shape[2]) <= config.num_landmarks
    if shards is None and few:
        out = exactly(query, key, value, options)
    else:
        out = landmark_attention(query, key, value, options.key_mask, chosen, shards)  # (BH, Nq, Dv)
        out = torch.unflatten(out, 0, query.shape[:2])  # (B, H, Nq, Dv)
    return add_convolution(out, value, kernel, options.key_mask)  # (B, H, Nq, Dv)


def naive(config: NystromformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form: one batch row at a time without its padding, with dense matrices."""
    kernel, chosen = _prepare(config, query, key, options)
    return landmark_naive(query, key, value, options.key_mask, chosen, kernel)


register_method(
    NystromformerConfig,
    forward=forward,
    naive=naive,
    initial_parameters=initial_parameters,
    # A convolution needs neighbors, and few tokens are computed exactly.
    sharded=ShardedForm(forward, lambda config, n, is_causal: not config.conv_kernel_size and n > config.num_landmarks),
)
