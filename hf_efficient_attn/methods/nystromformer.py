"""Nystromformer (Xiong et al., AAAI 2021): the softmax matrix from its rows and columns at a few landmarks.

Which equation is which line:

- Eq. 16: landmarks are means of segments, Q~ of the queries and K~ of the keys (`ops.landmarks.segment_means`).
- Eq. 13 and 15: out = F Z B V with F = softmax(Q K~^T), A = softmax(Q~ K~^T), B = softmax(Q~ K^T), Z the pseudo-inverse
  of A. Read from the right, so that no product is larger than the sequence: B V, then W = Z (B V), then F W.
- Eq. 14: Z by six steps of the third-order iteration (`ops.pinv.iterative_pinv`).
- Skip connection of Figure 4: a depth-wise convolution over the tokens of V, one kernel per head, is added.

Departures from the paper, each of which gives the same where its own case holds:

- The paper assumes that n is divisible by the number of landmarks. Here the first n mod L segments have one token more;
  segments count the tokens that are there, and where these are fewer than the landmarks the empty segments have no
  weight. The convolution runs over the tokens that are there, too. With as many queries as keys, as in self-attention,
  a mask is one of the queries as well.
- The iteration starts from the norms of each batch row's and head's own matrix. The authors' code takes the largest of
  the whole batch, so that the output of a row depends on the others.
- Up to L tokens the output is exact attention. In a padded batch this is no other path: the landmarks then are the keys
  themselves, and with W = V the product F W is exact.
- pinv="solve" is regularised least squares in place of the iteration.

The weights of a row sum to 1 only as far as Z is the pseudo-inverse, and some are negative: outputs are not averages of
values. There is no causal form: a landmark holds tokens of the future. Dropout acts on F.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import conv2d

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.registry import AttentionOptions, register_method
from hf_efficient_attn.ops.blocks import inverse, take, valid_first
from hf_efficient_attn.ops.exact import exact_attention, mask_bias
from hf_efficient_attn.ops.landmarks import attention_to_few_keys, masked_segments, segment_means
from hf_efficient_attn.ops.partial import accumulation_dtype, partial_attention
from hf_efficient_attn.ops.pinv import DAMPING, damped_solve, iterative_pinv


@dataclass(frozen=True, kw_only=True)
class NystromformerConfig(MethodConfig):
    """Hyperparameters of the Nystromformer. Up to num_landmarks keys (or queries) the output is exact."""

    method = "nystromformer"
    title = "Nystromformer"
    paper = "Xiong et al., AAAI 2021"
    year = 2021
    causal = False
    rectangular = True
    learned_parameters = ("conv_weight",)
    summary = "the softmax matrix from its rows and columns at the means of segments"
    default_rank = 10

    num_landmarks: int = option(64, "Landmarks: segments whose mean query and mean key stand for them.", minimum=1)
    pinv: str = option(
        "iterative",
        "'iterative': the paper's iteration for the pseudo-inverse. 'solve': regularised least squares.",
        choices=("iterative", "solve"),
    )
    pinv_iterations: int = option(6, "Steps of the iteration; the fewer, the more small singular values are damped.",
                                  minimum=1)  # fmt: skip
    conv_kernel_size: int = option(
        0, "Odd size of the convolution over the tokens of V, one learned kernel per head. 0 leaves it out.", minimum=0
    )
    seed: int = option(0, "Without effect: nothing is drawn. There since every method has one.", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.conv_kernel_size and self.conv_kernel_size % 2 == 0:
            raise UnsupportedAttentionError(
                f"{self.method}: conv_kernel_size={self.conv_kernel_size} has no middle; give an odd one, or 0 for none"
            )

    def with_budget(self, columns: int) -> "NystromformerConfig":
        """Half as many landmarks as columns.

        A query costs one product with L columns of width D and one with L of width Dv in F W, and as much again in B V.
        The pseudo-inverse, 4 L^3 multiplications a step, is left out: where N > 60 L^2 / D, six steps are less than a
        tenth of the whole.
        """
        return replace(self, num_landmarks=max(1, self.check_budget(columns) // 2))


def initial_parameters(
    config: NystromformerConfig, *, num_heads: int, head_dim: int, value_dim: int, max_length: int
) -> dict[str, Tensor]:
    """`conv_weight` (num_heads, kernel) of zeros, where there is a convolution: conversion leaves the output as it is."""
    return {"conv_weight": torch.zeros(num_heads, config.conv_kernel_size)} if config.conv_kernel_size else {}


def forward(
    config: NystromformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """Fast form; arguments as in `hf_efficient_attn.methods._shared.registry.register_method`."""
    mask, scale, dropout_p, parameters = options.key_mask, options.scale, options.dropout_p, options.parameters
    shape = query.shape[:2]
    kernel = _kernel(config, query, key, parameters or {})
    flat = tuple(x.flatten(0, 1) for x in (query, key, value))
    if min(query.shape[2], key.shape[2]) <= config.num_landmarks:
        flat_mask = None if mask is None else mask.repeat_interleave(shape[1], 0)
        out = exact_attention(*flat, flat_mask, is_causal=False, scale=scale, dropout_p=dropout_p)
    else:
        out = _from_landmarks(config, *flat, mask, scale, dropout_p)
    out = out.unflatten(0, shape)
    if kernel is not None:
        out = out.to(kernel.dtype) + _convolution(value, kernel, mask)
    if out.dtype == value.dtype:
        return out
    # Where the landmarks are far from the tokens the weights are large, and float16 ends at 65504.
    limit = torch.finfo(value.dtype).max
    return out.clamp(-limit, limit).to(value.dtype)


def _from_landmarks(config, query, key, value, mask, scale: float, dropout_p: float) -> Tensor:
    """F Z B V of (A, N, D) heads, in the accumulator's type.

    The mask, (B, N) or None, is that of the queries too where there are as many as keys.
    """
    count, wide, options = (
        config.num_landmarks,
        accumulation_dtype(query.dtype),
        {"scale": scale, "dropout_p": dropout_p},
    )
    segments = bias = landmark_bias = of_queries = None
    if mask is not None:
        heads = query.shape[0] // mask.shape[0]
        segments = masked_segments(mask, count, wide).repeat_interleave(heads)
        bias = mask_bias(mask, wide).repeat_interleave(heads, 0)[:, None, None]
        landmark_bias = mask_bias(~segments.empty, wide)
        of_queries = segments if query.shape[1] == key.shape[1] else None
    queries, keys = segment_means(query, count, of_queries), segment_means(key, count, segments)
    middle = _middle(queries, keys, landmark_bias, None if of_queries is None else of_queries.empty, scale)
    rows = partial_attention(queries[:, None], key.to(wide)[:, None], value.to(wide)[:, None], bias, scale=scale).out[
        :, 0
    ]
    if config.pinv == "solve":
        rows = damped_solve(middle, rows)
    else:
        rows = iterative_pinv(middle, config.pinv_iterations) @ rows
    if segments is not None:
        # So few tokens that each is a landmark of its own: the values in place of W make F W exact attention.
        few = (mask.sum(1) <= count).repeat_interleave(heads)[:, None, None]
        own = take(value, segments.index[:, :, 0]).to(wide).masked_fill(segments.empty.unsqueeze(2), 0.0)
        rows = torch.where(few, own, rows)
    return attention_to_few_keys(query, keys, rows, landmark_bias, **options, dtype=wide)


def _middle(queries, keys, bias, no_query, scale: float) -> Tensor:
    """A = softmax(Q~ K~^T) (A, L, L), with columns of zeros for empty segments of keys, rows for those of queries."""
    scores = queries @ keys.transpose(1, 2) * scale
    if bias is None:
        return scores.softmax(-1)
    # The gradient of a softmax over nothing is NaN: a row with no key at all is computed as if it had all.
    shown = torch.where((bias == -torch.inf).all(1, keepdim=True), 0.0, bias)
    middle = (scores + shown.unsqueeze(1)).softmax(-1).masked_fill((bias == -torch.inf).unsqueeze(1), 0.0)
    return middle if no_query is None else middle.masked_fill(no_query.unsqueeze(2), 0.0)


def _kernel(config, query, key, parameters: dict) -> Tensor | None:
    """The convolution's kernels (H, kernel) in the accumulator's type, or None where there is none."""
    kernel, size, heads = parameters.get("conv_weight"), config.conv_kernel_size, query.shape[1]
    if kernel is None:
        return None
    if tuple(kernel.shape) != (heads, size) or not size:
        raise UnsupportedAttentionError(
            f"nystromformer: conv_weight {tuple(kernel.shape)} does not fit {heads} heads and conv_kernel_size={size}: "
            "give a tensor (heads, conv_kernel_size)"
        )
    if query.shape[2] != key.shape[2]:
        raise UnsupportedAttentionError(
            "nystromformer: the convolution adds tokens of V to those of the output, and there are "
            f"{query.shape[2]} queries and {key.shape[2]} keys; set conv_kernel_size=0"
        )
    return kernel.to(accumulation_dtype(query.dtype))


def _convolution(value: Tensor, kernel: Tensor, mask: Tensor | None) -> Tensor:
    """Each token's neighbours among the tokens that are there, by the kernel of the head: (B, H, N, Dv) of its type."""
    value = value.to(kernel.dtype)
    weight, options = kernel[:, None, :, None], {"padding": (kernel.shape[1] // 2, 0), "groups": kernel.shape[0]}
    if mask is None:
        return conv2d(value, weight, **options)
    order = valid_first(mask).repeat_interleave(value.shape[1], 0)
    there = take(value.flatten(0, 1), order).view(value.shape)
    out = take(conv2d(there, weight, **options).flatten(0, 1), inverse(order)).view(value.shape)
    return out.masked_fill(~mask[:, None, :, None], 0.0)


def naive(config: NystromformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form: row by row with the tokens that are not there taken out, and dense matrices."""
    mask, scale, parameters = options.key_mask, options.scale, options.parameters
    (batch, _, length, _), columns, count = query.shape, key.shape[2], config.num_landmarks
    kernel = _kernel(config, query, key, parameters or {})
    outs = []
    for b in range(batch):
        there = torch.ones(columns, dtype=torch.bool) if mask is None else mask[b]
        queries, keys, values = query[b].double(), key[b, :, there].double(), value[b, :, there].double()
        asked = queries[:, there] if length == columns else queries
        tokens = keys.shape[1]

        def softmax(q, k):
            return (scale * q @ k.transpose(1, 2)).softmax(-1)

        def means(x):
            return torch.stack([part.mean(1) for part in x.tensor_split(count, 1)], 1)

        if not tokens:
            out = queries.new_zeros(*queries.shape[:2], value.shape[3])
        elif tokens <= count or length <= count:
            out = softmax(queries, keys) @ values
        else:
            mean_queries, mean_keys = means(asked), means(keys)
            middle = softmax(mean_queries, mean_keys)
            one = torch.eye(count, dtype=torch.float64)
            # The largest sum of a column; a row sums to 1.
            norm = middle.sum(1).amax(1).view(-1, 1, 1)
            if config.pinv == "solve":
                z = torch.linalg.solve(middle.mT @ middle + DAMPING * norm * one, middle.mT)
            else:
                z = middle.mT / norm
                for _ in range(config.pinv_iterations):
                    product = middle @ z
                    z = z @ (13 * one - product @ (15 * one - product @ (7 * one - product))) / 4
            out = softmax(queries, mean_keys) @ z @ softmax(mean_queries, keys) @ values
        if kernel is not None:
            half = config.conv_kernel_size // 2
            wide = torch.nn.functional.pad(values, (0, 0, half, half))
            skip = sum(kernel[:, i, None, None] * wide[:, i : i + tokens] for i in range(config.conv_kernel_size))
            place = there.nonzero()[:, 0].view(1, -1, 1).expand_as(skip)
            out = out.scatter_add(1, place, skip)
        outs.append(out)
    return torch.stack(outs).to(value.dtype)


register_method(NystromformerConfig, forward=forward, naive=naive, initial_parameters=initial_parameters)
