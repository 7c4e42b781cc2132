"""Nystromformer (Xiong et al., AAAI 2021): the softmax matrix from its rows and columns at a few landmarks.

How the paper's equations correspond to the code:

- Eq. 16: landmarks are means of segments of tokens, Q~ of the queries and K~ of the keys (`segment_means`).
- Eq. 13 and 15: out = F Z B V with F = softmax(Q K~^T), A = softmax(Q~ K~^T), B = softmax(Q~ K^T) and Z the
  pseudo-inverse of A. The product is computed from the right, B V, W = Z (B V), F W, so no factor is larger than the
  sequence.
- Eq. 14: Z by six steps of the third-order iteration (`iterative_pinv`).
- Figure 4, skip connection: a depth-wise convolution over the tokens of V, with one kernel per head, is added.

Departures from the paper. Where the paper's assumptions hold, the result is the same:

- The paper assumes that n is divisible by the number of landmarks. Here, the first n mod L segments have one token
  more. Segments contain valid tokens only, and segments without a token have no weight. The convolution also runs over
  the valid tokens. With as many queries as keys, as in self-attention, the key mask is also the mask of the queries.
- The iteration starts from the norms of each batch row's and each head's own matrix. The authors' code uses the largest
  norms in the batch, so the output of a batch row depends on the others.
- With up to L tokens the output is exact attention. In a padded batch no other code path is needed for that: the
  landmarks are then the keys themselves, and F W with W = V is exact.
- pinv="solve" is regularised least squares in place of the iteration.

The weights of a query sum to 1 only as far as Z is the pseudo-inverse, and some are negative, so outputs are not
averages of values. There is no causal form, because a landmark contains tokens of the future. Dropout acts on F.
"""

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.heads import FlatHeads, flatten_heads, unflatten_heads
from hf_efficient_attn.methods._shared.registry import AttentionOptions, ShardedForm, register_method
from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.blocks import can_reuse_buffers, chunked_over_heads, inverse, take, valid_first
from hf_efficient_attn.ops.exact import exact_attention, mask_bias
from hf_efficient_attn.ops.landmarks import (
    Segments,
    attention_to_few_keys,
    masked_segments,
    segment_means,
    segment_sizes,
)
from hf_efficient_attn.ops.partial import Partial, accumulation_dtype, merge, partial_attention
from hf_efficient_attn.ops.pinv import DAMPING, damped_solve, iterative_pinv
from hf_efficient_attn.ops.precision import attention_dtype
from hf_efficient_attn.ops.shards import Shards, gather_partials, total


@dataclass(frozen=True, kw_only=True)
class NystromformerConfig(MethodConfig):
    """Hyperparameters of the Nystromformer. With up to num_landmarks keys or queries the output is exact."""

    method = "nystromformer"
    title = "Nystromformer"
    paper = "Xiong et al., AAAI 2021"
    year = 2021
    causal = False
    rectangular = True
    learned_parameters = ("conv_weight",)
    summary = "the softmax matrix from its rows and columns at the means of segments"
    paper_url = "https://arxiv.org/abs/2102.03902"
    near = "none"
    far = "segment means as landmarks"
    default_rank = 10

    num_landmarks: int = option(
        64, "Number of landmarks. Each is the mean query and the mean key of a segment of tokens.", minimum=1
    )
    pinv: str = option(
        "iterative",
        "'iterative': the paper's iteration for the pseudo-inverse. 'solve': regularised least squares.",
        choices=("iterative", "solve"),
    )
    pinv_iterations: int = option(
        6, "Steps of the iteration. With fewer steps, more small singular values are damped.", minimum=1
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
        """Half as many landmarks as the budget has exact keys.

        For each query, F W costs as much as attention to L keys, and B V costs the same again. The pseudo-inverse, with
        4 L^3 multiplications per step, is not counted: for N > 60 L^2 / D its six steps cost less than a tenth of the
        rest.
        """
        return replace(self, num_landmarks=max(1, self.check_budget(columns) // 2))


def initial_parameters(
    config: NystromformerConfig, *, num_heads: int, head_dim: int, value_dim: int, max_length: int
) -> dict[str, Tensor]:
    """`conv_weight` (H, kernel) of zeros if there is a convolution, so that conversion does not change the output."""
    return {"conv_weight": torch.zeros(num_heads, config.conv_kernel_size)} if config.conv_kernel_size else {}


def forward(
    config: NystromformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """Fast form; see `register_method`."""
    kernel = _kernel(config, query, key, options)
    flat = flatten_heads(query, key, value, options.key_mask)
    if min(query.shape[2], key.shape[2]) <= config.num_landmarks:
        out = exact_attention(*flat, is_causal=False, scale=options.scale, dropout_p=options.dropout_p)
    else:
        out = _from_landmarks(config, flat, options)
    out = unflatten_heads(out, query.shape)
    if kernel is not None:
        out = out.to(kernel.dtype) + _convolution(value, kernel, options.key_mask)
    if out.dtype == value.dtype:
        return out
    # If the landmarks are far from the tokens, the weights are large and can exceed the range of float16.
    limit = torch.finfo(value.dtype).max
    return out.clamp(-limit, limit).to(value.dtype)


def _from_landmarks(config: NystromformerConfig, heads: FlatHeads, options: AttentionOptions) -> Tensor:
    """F Z B V: (BH, Nq, Dv) in the dtype of the products with all tokens.

    All three factors use landmarks of that dtype, because Z enlarges differences between them. Its own products are
    float32, and those of float16 tensors, too: the weights can exceed its range.
    """
    query, key, value, _ = heads
    count, key_mask, scale = config.num_landmarks, options.key_mask, options.scale
    acc_dtype, dtype = _dtypes(query)
    segments = query_segments = bias = None
    found = _Found(None, None, None, None)
    if key_mask is not None:
        num_heads = query.shape[0] // key_mask.shape[0]
        segments = masked_segments(key_mask, count, acc_dtype).repeat_interleave(num_heads)
        query_segments = segments if query.shape[1] == key.shape[1] else None
        bias = mask_bias(key_mask, acc_dtype).repeat_interleave(num_heads, 0)[:, None, None]
        few = (key_mask.sum(1) <= count).repeat_interleave(num_heads)[:, None, None]
        own = take(value, segments.token[:, :, 0])
        found = _Found(segments.empty, None if query_segments is None else query_segments.empty, few, own)
    parts = (*heads[:3], bias, *(segments or (None, None)), *(query_segments or (None, None)))
    landmarks = functools.partial(_landmarks, count=count, scale=scale, dtype=dtype)
    if key.dtype != dtype and can_reuse_buffers(query, key, value):
        # A few heads at a time, so that the copies in another dtype stay in the CPU's cache.
        joined = chunked_over_heads(lambda *parts: torch.cat(landmarks(*parts), 2), *parts)
        queries, keys, values = joined.split((query.shape[2], key.shape[2], value.shape[2]), 2)
    else:
        queries, keys, values = landmarks(*parts)
    return _attend(config, query, (queries, keys, values), found, options, value.dtype)


def _dtypes(query: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """The accumulation dtype, and that of the products with all tokens."""
    acc_dtype, dtype = accumulation_dtype(query.dtype), attention_dtype(query)
    return acc_dtype, acc_dtype if dtype == torch.float16 else dtype


class _Found(NamedTuple):
    """What a mask says about the landmarks; all None without a mask.

    Attributes:
        empty: bool (BH, L), the segments of keys without a token.
        empty_queries: bool (BH, L), those of queries; None if the queries are other tokens.
        few: bool (BH, 1, 1), whether there are not more tokens than landmarks.
        own: (BH, L, Dv), the value of the only token of each segment if there are few.
    """

    empty: Tensor | None
    empty_queries: Tensor | None
    few: Tensor | None
    own: Tensor | None


def _attend(
    config: NystromformerConfig,
    query: Tensor,
    landmarks: tuple[Tensor, Tensor, Tensor],
    found: _Found,
    options: AttentionOptions,
    value_dtype: torch.dtype,
) -> Tensor:
    """F Z (B V) for Q~ (BH, L, D), K~ (BH, L, D) and B V (BH, L, Dv): (BH, Nq, Dv)."""
    (queries, keys, values), scale = landmarks, options.scale
    acc_dtype, dtype = _dtypes(query)
    middle = _landmark_weights(queries.to(acc_dtype), keys.to(acc_dtype), found.empty, found.empty_queries, scale)
    values = values.to(acc_dtype)
    if config.pinv == "solve":
        values = damped_solve(middle, values)
    else:
        # A has no negative number, and the sum of each row is 1, or 0 without a token.
        bound = middle.sum(1, keepdim=True).amax(2, keepdim=True).clamp(min=torch.finfo(acc_dtype).tiny)
        values = iterative_pinv(middle, config.pinv_iterations, bound) @ values
    landmark_bias = None
    if found.empty is not None and found.few is not None and found.own is not None:
        # Each of a few tokens is a landmark by itself. With the values in place of W, F W is exact attention.
        own = found.own.to(acc_dtype).masked_fill(found.empty.unsqueeze(2), 0.0)
        values, landmark_bias = torch.where(found.few, own, values), mask_bias(~found.empty, acc_dtype)
    # Weights that exceed the range of float16, and sums with a convolution, need the wider dtype.
    result = value_dtype if value_dtype == torch.bfloat16 and not config.conv_kernel_size else dtype
    return attention_to_few_keys(
        query, keys, values.to(dtype), landmark_bias, scale=scale, dropout_p=options.dropout_p, dtype=result
    )


def _landmarks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    *segments: Tensor | None,
    count: int,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Q~ (BH, L, D), K~ (BH, L, D) and B V (BH, L, Dv) in `dtype`.

    `segments` are the two parts of `Segments`, or None, for the keys and for the queries.
    """
    key, value = key.to(dtype), value.to(dtype)
    # On an accelerator the means are computed from the tokens themselves.
    query = query if backend(query) != "cpu" else query.to(dtype)
    own, of_query = (
        None if token is None or weight is None else Segments(token, weight)
        for token, weight in (segments[:2], segments[2:])
    )
    queries, keys = segment_means(query, count, of_query).to(dtype), segment_means(key, count, own).to(dtype)
    return queries, keys, partial_attention(queries[:, None], key[:, None], value[:, None], bias, scale=scale).out[:, 0]


def _landmark_weights(
    queries: Tensor, keys: Tensor, empty: Tensor | None, empty_queries: Tensor | None, scale: float
) -> Tensor:
    """A = softmax(Q~ K~^T) (BH, L, L) for landmarks (BH, L, D); 0 in the columns and rows of empty segments."""
    scores = queries @ keys.transpose(1, 2) * scale
    if empty is None:
        return scores.softmax(-1)
    # If all segments are empty, their scores stay finite, because the gradient of softmax over -inf only is NaN.
    bias = mask_bias(~empty | empty.all(1, keepdim=True), scores.dtype)
    weights = (scores + bias.unsqueeze(1)).softmax(-1).masked_fill(empty.unsqueeze(1), 0.0)
    return weights if empty_queries is None else weights.masked_fill(empty_queries.unsqueeze(2), 0.0)


def _kernel(config: NystromformerConfig, query: Tensor, key: Tensor, options: AttentionOptions) -> Tensor | None:
    """The kernels of the convolution (H, kernel) in the accumulation dtype, or None if there is none."""
    kernel, size, num_heads = options.parameters.get("conv_weight"), config.conv_kernel_size, query.shape[1]
    if kernel is None:
        return None
    if kernel.shape != (num_heads, size) or not size:
        raise UnsupportedAttentionError(
            f"nystromformer: conv_weight {tuple(kernel.shape)} does not match {num_heads} heads and "
            f"conv_kernel_size={size}: give a tensor (num_heads, conv_kernel_size)"
        )
    if query.shape[2] != key.shape[2]:
        raise UnsupportedAttentionError(
            "nystromformer: the convolution adds the tokens of V to those of the output, which needs as many keys as "
            f"queries; there are {query.shape[2]} queries and {key.shape[2]} keys; set conv_kernel_size=0"
        )
    return kernel.to(accumulation_dtype(query.dtype))


def _convolution(value: Tensor, kernel: Tensor, key_mask: Tensor | None) -> Tensor:
    """Convolution of the valid tokens of value (B, H, N, Dv) with kernel (H, kernel): (B, H, N, Dv) of its dtype."""
    value, weight = value.to(kernel.dtype), kernel[:, None, :, None]
    padding, groups = (kernel.shape[1] // 2, 0), kernel.shape[0]
    if key_mask is None:
        return conv2d(value, weight, padding=padding, groups=groups)
    order = valid_first(key_mask).repeat_interleave(value.shape[1], 0)
    valid = take(value.flatten(0, 1), order).view(value.shape)
    out = conv2d(valid, weight, padding=padding, groups=groups)
    out = take(out.flatten(0, 1), inverse(order)).view(value.shape)
    return out.masked_fill(~key_mask[:, None, :, None], 0.0)


def naive(config: NystromformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form: one batch row at a time without its padding, with dense matrices."""
    q_len, kv_len, count = query.shape[2], key.shape[2], config.num_landmarks
    kernel, outs = _kernel(config, query, key, options), []

    def softmax(q: Tensor, k: Tensor) -> Tensor:
        return (options.scale * q @ k.transpose(1, 2)).softmax(-1)

    def means(x: Tensor) -> Tensor:
        return torch.stack([part.mean(1) for part in x.tensor_split(count, 1)], 1)

    for b in range(query.shape[0]):
        valid = key.new_ones(kv_len, dtype=torch.bool) if options.key_mask is None else options.key_mask[b]
        queries, keys, values = query[b].double(), key[b, :, valid].double(), value[b, :, valid].double()
        num_keys = keys.shape[1]
        if not num_keys:
            out = queries.new_zeros(*queries.shape[:2], value.shape[3])
        elif num_keys <= count or q_len <= count:
            out = softmax(queries, keys) @ values
        else:
            mean_queries, mean_keys = means(queries[:, valid] if q_len == kv_len else queries), means(keys)
            middle = softmax(mean_queries, mean_keys)
            one = torch.eye(count, dtype=torch.float64, device=middle.device)
            # The largest sum of a column. The sum of a row is 1.
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
            half, skip = config.conv_kernel_size // 2, torch.zeros_like(values)
            padded = pad(values, (0, 0, half, half))
            for i in range(config.conv_kernel_size):
                skip = skip + kernel[:, i, None, None] * padded[:, i : i + num_keys]
            out = out.index_add(1, valid.nonzero()[:, 0], skip)
        outs.append(out)
    return torch.stack(outs).to(value.dtype)


def forward_shard(
    config: NystromformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, shards: Shards
) -> Tensor:
    """The form for a sequence that processes share: the landmarks travel; see `ShardedForm`."""
    num_heads, count, groups = query.shape[1], config.num_landmarks, query.shape[1] // key.shape[1]
    acc_dtype, dtype = _dtypes(query)
    mask, sizes, segment = shards.key_mask, *_own_segments(shards, count, query.device)
    own_mask = None if options.key_mask is None else options.key_mask[:, None, :, None]
    own_query = query if own_mask is None else query.masked_fill(~own_mask, 0.0)
    sums = [_segment_sums(x.to(acc_dtype), segment, own_mask, count) for x in (own_query, key)]
    # The values of the landmarks are of use only where a masked sequence has so few tokens that each is a landmark.
    sums += [] if mask is None else [_segment_sums(value.to(acc_dtype), segment, own_mask, count)]
    sizes = sizes.clamp(min=1)[:, None, :, None]
    means = [x / sizes for x in total(sums, shards.group)]
    means = [x.repeat_interleave(num_heads // x.shape[1], 1).flatten(0, 1) for x in means]
    queries, keys = (x.to(dtype) for x in means[:2])
    keys_of_tokens, values_of_tokens = (
        x.to(dtype).repeat_interleave(groups, 1).flatten(0, 1)[:, None] for x in (key, value)
    )
    bias = None
    if options.key_mask is not None:
        bias = mask_bias(options.key_mask, acc_dtype).repeat_interleave(num_heads, 0)[:, None, None]
    own = partial_attention(queries[:, None], keys_of_tokens, values_of_tokens, bias, scale=options.scale)
    values = merge(*gather_partials(Partial(own.out.to(acc_dtype), own.lse), shards.group)).out[:, 0]
    found = _Found(None, None, None, None)
    if mask is not None:
        num_tokens = mask.sum(1)
        empty = (torch.arange(count, device=mask.device) >= num_tokens[:, None]).repeat_interleave(num_heads, 0)
        few = (num_tokens <= count).repeat_interleave(num_heads)[:, None, None]
        found = _Found(empty, empty, few, means[2])
    out = _attend(config, query.flatten(0, 1), (queries, keys, values), found, options, value.dtype)
    limit = torch.finfo(value.dtype).max
    return unflatten_heads(out, query.shape).clamp(-limit, limit).to(value.dtype)


def _own_segments(shards: Shards, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The sizes of all segments, (B or 1, L), and the segment of each token of this process, int64 (B or 1, n)."""
    if shards.key_mask is None:
        num_tokens, rank = torch.full((1,), shards.total, device=device), torch.arange(shards.total, device=device)
        rank = rank[None, shards.own]
    else:
        num_tokens = shards.key_mask.sum(1)
        rank = (shards.key_mask.cumsum(1) - 1)[:, shards.own].clamp(min=0)
    sizes = segment_sizes(num_tokens, count)
    return sizes, torch.searchsorted(sizes.cumsum(1), rank.contiguous(), right=True).clamp(max=count - 1)


def _segment_sums(x: Tensor, segment: Tensor, mask: Tensor | None, count: int) -> Tensor:
    """The sums of the tokens (B, H, n, D) of each segment: (B, H, L, D); mask (B, 1, n, 1) is True for valid tokens."""
    x = x if mask is None else x.masked_fill(~mask, 0.0)
    index = segment[:, None, :, None].expand(x.shape)
    return x.new_zeros(*x.shape[:2], count, x.shape[3]).scatter_add(2, index, x)


register_method(
    NystromformerConfig,
    forward=forward,
    naive=naive,
    initial_parameters=initial_parameters,
    # A convolution needs neighbors, and few tokens are computed exactly.
    sharded=ShardedForm(
        forward_shard,
        lambda config, length, is_causal: not config.conv_kernel_size and length > config.num_landmarks,
    ),
)
