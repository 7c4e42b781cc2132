"""Attention with random features of the softmax kernel (Choromanski et al. 2021): bidirectional, and causal on the CPU.

The sums over the features are kept in the log domain, as `hf_efficient_attn.ops.features` explains. In the causal form
the keys of the chunks before a chunk enter through the sums of the features, and the pairs of a query and a key of the
same chunk through the products of their features. The two are merged. `hf_efficient_attn.ops.feature_scan` is the
causal form for training and for accelerators.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.blocks import pad_to_blocks
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.features import key_state, merge_blocks, query_state
from hf_efficient_attn.ops.partial import accumulation_dtype, safe_row_max
from hf_efficient_attn.ops.precision import LOG2_E, attention_dtype
from hf_efficient_attn.ops.scan import running_sum

_CHUNK = 128  # tokens
# The buffered form uses chunks of 64 tokens for up to 128 features. It processes this many heads at a time, and blocks
# of this many numbers.
_FEW_FEATURES, _SMALL_CHUNK = 128, 64
BUFFERED_HEADS = 8
_BLOCK = 1 << 18
# Queries of a block of the bidirectional form, and keys of a block on accelerators.
_BLOCK_Q, _ACCELERATOR_BLOCK = 1024, 2048


class FeatureKernel(NamedTuple):
    """An approximation of exp(scale * q . k) by F random features.

    Attributes:
        features: (F, D), the directions of the features.
        scale: factor of the scores. Queries and keys are each multiplied by its square root.
    """

    features: Tensor
    scale: float

    def directions(self, x: Tensor) -> Tensor:
        """The features (F, D) times sqrt(|scale|), in the dtype of attention, on the device of `x`.

        With these, keys need no scaling, and neither do queries. These use the negative for a negative scale.
        """
        root: float = abs(self.scale) ** 0.5
        return (self.features * root).to(attention_dtype(x))

    def bias(self, key: Tensor, key_mask: Tensor | None) -> Tensor:
        """The bias of keys (..., D) that are not scaled; see `scale_key`."""
        acc_dtype = accumulation_dtype(key.dtype)
        bias: Tensor = torch.linalg.vector_norm(key, dim=-1, dtype=acc_dtype).square() * (-0.5 * abs(self.scale))
        return bias if key_mask is None else bias + mask_bias(key_mask, acc_dtype)

    def scale_query(self, query: Tensor) -> Tensor:
        """Queries (..., D) times sqrt(|scale|), in the accumulation dtype. They also take the sign of the scale."""
        root: float = abs(self.scale) ** 0.5
        return query.to(accumulation_dtype(query.dtype)) * (root if self.scale >= 0 else -root)

    def scale_key(self, key: Tensor, value: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Keys (..., D) times sqrt(|scale|), values and the bias of the keys, in the accumulation dtype.

        The bias (...) is -|k|^2 / 2 for the scaled key k, and -inf where `key_mask`, bool (...), is False.
        """
        acc_dtype = accumulation_dtype(key.dtype)
        key, value = key.to(acc_dtype) * abs(self.scale) ** 0.5, value.to(acc_dtype)
        bias = -0.5 * key.square().sum(-1)
        return key, value, bias if key_mask is None else bias + mask_bias(key_mask, acc_dtype)


def _chunks(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, size: int) -> tuple[Tensor, ...]:
    """Cut (BH, N, .) into chunks (BH, C, size, .) and bias (BH, N) into (BH, C, size), -inf for the padding."""
    bias = pad(bias, (0, -bias.shape[1] % size), value=-torch.inf)
    query, key, value = (pad_to_blocks(x, size) for x in (query, key, value))
    return query, key, value, bias.view(key.shape[:3])


def feature_attention(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, *, kernel: FeatureKernel, dropout_p: float
) -> Tensor:
    """Bidirectional form: features attend to the keys, then queries to the features.

    Args:
        query: (BH, Nq, D).
        key: (BH, Nk, D).
        value: (BH, Nk, Dv).
        key_mask: bool (BH, Nk) or None.
        kernel: the features and the scale.
        dropout_p: probability of dropping the weight of a feature.

    Returns:
        (BH, Nq, Dv), in the dtype of attention.
    """
    directions, bias = kernel.directions(query), kernel.bias(key, key_mask)
    query, key, value = (x.to(directions.dtype) for x in (query, key, value))
    # On an accelerator, one sequence of keys would occupy a few processors only.
    block_k = key.shape[1] if backend(key) == "cpu" else min(key.shape[1], _ACCELERATOR_BLOCK)
    if key.shape[1] > block_k:
        state = merge_blocks(key_state(*_key_blocks(key, value, bias, block_k, directions)))
    else:
        state = key_state(key[:, None], value[:, None], directions, bias[:, None, None])
    blocks = pad_to_blocks(query, min(query.shape[1], _BLOCK_Q))
    directions = directions if kernel.scale >= 0 else -directions
    out = query_state(blocks, state._replace(out=state.out.to(query.dtype)), directions, dropout_p).out
    return out.flatten(1, 2)[:, : query.shape[1]]


def _key_blocks(
    key: Tensor, value: Tensor, bias: Tensor, size: int, directions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The arguments of `key_state` for keys (BH, N, .) and their bias (BH, N) in blocks."""
    bias = pad(bias, (0, -bias.shape[1] % size), value=-torch.inf)
    key, value = pad_to_blocks(key, size), pad_to_blocks(value, size)
    return key, value, directions, bias.view(*key.shape[:2], 1, size)


def buffered_causal_feature_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    *initial_state: Tensor,
    kernel: FeatureKernel,
    out: Tensor | None = None,
) -> Tensor:
    """Causal form without a gradient, in one pass over blocks of chunks.

    The sums over all keys before a chunk, S (BH, F, Dv) and Z (BH, 1, F), are those of exp(log feature - m) with m
    (BH, 1, F) the largest log feature so far. So nothing overflows, and no later key has an influence.

    Args:
        query: (BH, N, D).
        key: (BH, N, D).
        value: (BH, N, Dv).
        key_mask: bool (BH, N) or None.
        initial_state: out (BH, F, Dv) and lse (BH, F) of the state of earlier tokens, or nothing.
        kernel: the features and the scale.
        out: (BH, N, Dv) to write into, or None.
    """
    (batch_heads, q_len, head_dim), count = query.shape, kernel.features.shape[0]
    acc_dtype = accumulation_dtype(query.dtype)
    size = min(_SMALL_CHUNK if count <= _FEW_FEATURES else _CHUNK, q_len)
    block = max(1, _BLOCK // (batch_heads * size * max(count, size, head_dim))) * size
    # All logs are to base 2, because `exp2` is faster than `exp`.
    directions = kernel.features.to(acc_dtype).t() * LOG2_E
    out = value.new_empty(batch_heads, q_len, value.shape[2]) if out is None else out
    if not initial_state:
        lse = query.new_zeros(batch_heads, count, dtype=acc_dtype) - torch.inf
        initial_state = lse.new_zeros(batch_heads, count, value.shape[2]), lse
    sums, key_max = initial_state[0][:, None], initial_state[1].unsqueeze(1) * LOG2_E
    norm = (initial_state[1] != -torch.inf).to(acc_dtype)[:, None, None]
    for start in range(0, q_len, block):
        tokens = slice(start, min(start + block, q_len))
        scaled = kernel.scale_key(key[:, tokens], value[:, tokens], None if key_mask is None else key_mask[:, tokens])
        queries, keys, values, bias = _chunks(kernel.scale_query(query[:, tokens]), *scaled, size)
        queries, keys, bias = queries @ directions, keys @ directions, bias.unsqueeze(3) * LOG2_E
        weights, weight_max = _pair_weights(queries, keys, bias)
        keys += bias
        # The largest log feature before each chunk, and after the last one: (BH, C + 1, F).
        maxima = torch.cat((key_max, keys.amax(2)), 1).cummax(1).values
        features = keys.sub_(safe_row_max(maxima[:, 1:]).unsqueeze(2)).exp2_().transpose(2, 3)
        decay = torch.exp2(maxima[:, :-1] - safe_row_max(maxima[:, 1:])).unsqueeze(3)
        sums = running_sum(features @ values, decay, sums[:, -1])
        norm = running_sum(features.sum(3).unsqueeze(2), decay.transpose(2, 3), norm[:, -1])
        queries += maxima[:, :-1].unsqueeze(2)
        query_max = queries.amax(3, keepdim=True)
        features = queries.sub_(safe_row_max(query_max)).exp2_()
        own = weights.sum(3, keepdim=True), weight_max
        before = (features * norm[:, :-1]).sum(3, keepdim=True), query_max
        own_factor, before_factor = _merge_factors(own, before)
        result = (weights @ values).mul_(own_factor).addcmul_(features @ sums[:, :-1], before_factor)
        out[:, tokens] = result.flatten(1, 2)[:, : tokens.stop - start]
        key_max = maxima[:, -1:]
    return out


def _merge_factors(*partials: tuple[Tensor, Tensor]) -> list[Tensor]:
    """What the sums of two disjoint sets of keys are multiplied with in the merged output.

    Args:
        partials: two pairs of the total weight relative to 2**m, and m, each (BH, C, size, 1).

    Returns:
        For each pair its share of the weight of both, divided by its total weight. A total weight that is too small for
        its inverse counts as 0.
    """
    tiny = torch.finfo(partials[0][0].dtype).tiny
    lses = [(total.log2() + m).masked_fill_(total < tiny, -torch.inf) for total, m in partials]
    largest = safe_row_max(torch.maximum(*lses))
    shares = [torch.exp2(lse - largest) for lse in lses]
    both = shares[0] + shares[1]
    both.masked_fill_(both == 0, 1.0)
    return [share.div_(both).div_(total.clamp_(min=tiny)) for share, (total, _) in zip(shares, partials, strict=True)]


def _pair_weights(queries: Tensor, keys: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Causal weights of the pairs of each chunk, relative to 2**m, and m for each query.

    m is the query's largest log feature plus the largest of the keys up to it. No weight is larger than F. A feature
    product that float32 can represent is lost only if a closer one is larger by the range of float32.

    Args:
        queries: (BH, C, size, F), logs to base 2 of their features.
        keys: (BH, C, size, F), likewise.
        bias: (BH, C, size, 1), of the keys.

    Returns:
        (BH, C, size, size) and (BH, C, size, 1).
    """
    query_max, key_max = queries.amax(-1, keepdim=True), keys.amax(-1, keepdim=True)
    products = (queries - query_max).exp2_() @ (keys - key_max).exp2_().transpose(2, 3)
    key_max = key_max + bias
    reference = key_max.cummax(2).values
    weights = (key_max.transpose(2, 3) - safe_row_max(reference)).exp2_().mul_(products).tril_()
    return weights, reference + query_max
