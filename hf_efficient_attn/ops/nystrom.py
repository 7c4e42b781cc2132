"""Landmarks that are means of segments of the valid tokens, and pseudo-inverses."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from hf_efficient_attn.ops.attend import Partial, attend, merge
from hf_efficient_attn.ops.backends.devices import accumulation_dtype, may_hold, rounded, sum_dtype, widened
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.index import constant, inverse, take, valid_first
from hf_efficient_attn.ops.shards import Shards, gather_partials, total
from hf_efficient_attn.ops.tracing import exporting_to_onnx

# `damped_solve` damps squared singular values below this share of |A|_1 |A|_inf. They are more noise than signal, and
# six steps of the iteration damp all below a share of 1e-3 as well.
DAMPING = 1e-4


class Segments(NamedTuple):
    """L segments of the valid tokens, for every mask.

    The first n mod L segments of n tokens have one token more than the others. If n < L the last segments are empty.
    """

    sizes: Tensor  # int64 (R, L), the number of tokens of each segment; R is B, or 1 without a mask
    # int64 (R, L), how many positions each segment covers, masked positions included. A segment begins where the
    # previous segment ends.
    lengths: Tensor
    equal: bool  # whether the segments are known to be equal parts of the sequence
    # For graphs of ONNX, which has no sums of segments: bool (R, L, N), the tokens of each segment.
    members: Tensor | None = None


def segment_sizes(num_tokens: Tensor, num_segments: int) -> Tensor:
    """Compute the sizes of the segments for numbers of tokens: int64 (...) -> (..., L)."""
    segment = torch.arange(num_segments, device=num_tokens.device)
    return (num_tokens // num_segments).unsqueeze(-1) + (segment < (num_tokens % num_segments).unsqueeze(-1))


def find_segments(key_mask: Tensor | None, total: int, own: slice, num_segments: int, device: torch.device) -> Segments:
    """Cut `total` tokens into segments, and count the positions of each segment among the positions `own`.

    `key_mask` is bool (B, total), or None if all tokens are valid.
    """
    if key_mask is None:
        sizes, lengths = _plain_segments(total, own.start, own.stop, num_segments, device)
        return Segments(sizes, lengths, own == slice(0, total) and total % num_segments == 0)
    rank = key_mask.cumsum(1)  # (B, total)
    sizes = segment_sizes(rank[:, -1], num_segments)  # (B, L)
    if exporting_to_onnx():
        last = sizes.cumsum(1)[..., None]  # (B, L, 1)
        rank = rank.masked_fill(~key_mask, 0)[:, None]  # (B, 1, N)
        return Segments(sizes, sizes, False, (rank <= last) & (rank > last - sizes[..., None]))
    ends = torch.searchsorted(rank, sizes.cumsum(1)) + 1  # (B, L)
    return Segments(sizes, _lengths(ends, own.start, own.stop), False)


@constant
def _plain_segments(total: int, start: int, stop: int, num_segments: int, device: torch.device) -> Tensor:
    """Return the sizes of the segments without a mask, and their lengths from start to stop: (2, 1, L)."""
    sizes = segment_sizes(torch.full((1,), total, device=device), num_segments)
    return torch.stack((sizes, _lengths(sizes.cumsum(1), start, stop)))


def _lengths(ends: Tensor, start: int, stop: int) -> Tensor:
    """Return how many of the positions start to stop each segment covers, from the ends of segments (R, L)."""
    ends = ends.clamp(start, stop) - start
    ends[:, -1] = stop - start  # with the padding behind the last token
    return ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))


def segment_sums(x: Tensor, segments: Segments) -> Tensor:
    """Sum the segments of x (B, H, N, D), which is 0 at masked tokens: (B, H, L, D) in the accumulation dtype."""
    if segments.equal:  # a fifth of the time
        return torch.unflatten(x, 2, (segments.sizes.shape[1], -1)).sum(3, dtype=accumulation_dtype(x.dtype))
    if segments.members is not None:
        members = segments.members.to(accumulation_dtype(x.dtype))[:, None]
        return members @ x.to(members.dtype)  # (B, 1, L, N) @ (B, H, N, D) -> (B, H, L, D)
    lengths = segments.lengths[:, None].expand(*x.shape[:2], -1).contiguous()  # (B, H, L)
    x = x.to(accumulation_dtype(x.dtype))
    sums: Tensor = torch.segment_reduce(x, "sum", lengths=lengths, axis=2, unsafe=True)  # (B, H, L, D)
    return sums


def segment_means(x: Tensor, segments: Segments) -> Tensor:
    """Compute the means of the segments, as `segment_sums`; 0 for a segment without tokens."""
    if segments.equal:
        return torch.unflatten(x, 2, (segments.sizes.shape[1], -1)).mean(3, dtype=accumulation_dtype(x.dtype))
    return segment_sums(x, segments) / segments.sizes.clamp(min=1)[:, None, :, None]


class LandmarkOptions(NamedTuple):
    """The hyperparameters of `landmark_attention`."""

    num_landmarks: int  # L
    iterations: int  # steps of `iterative_pinv`, or 0 for `damped_solve`
    scale: float  # factor of the scores
    dropout_p: float  # probability of dropping a weight of F


def landmark_attention(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, options: LandmarkOptions, shards: Shards | None
) -> Tensor:
    """Compute F Z B V with F = softmax(Q K~^T), Z the pseudo-inverse of A = softmax(Q~ K~^T) and B = softmax(Q~ K^T).

    The landmarks Q~ and K~ are means of segments of the valid tokens. All three factors use them in the dtype of the
    products, because Z enlarges differences between them. Z is float32. Products of float16 tensors are float32 as
    well, because the weights can exceed the range of float16.

    Args:
        query: (B, H, Nq, D). The mask of the keys also masks the queries if Nq = Nk.
        key: (B, H_kv, Nk, D), with more than L tokens in all processes together.
        value: (B, H_kv, Nk, Dv); key and value are 0 where they are masked.
        key_mask: bool (B, Nk), or None.
        options: the hyperparameters.
        shards: the tokens of this process if processes share the sequence, or None.

    Returns:
        (BH, Nq, Dv) in the dtype of the products. A sequence with up to L tokens has exact attention.
    """
    num_heads = query.shape[1]
    acc_dtype = accumulation_dtype(query.dtype)
    dtype = sum_dtype(query)
    if key_mask is None and exporting_to_onnx():  # one graph for few and for many tokens
        key_mask = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device)
    landmarks, of_mask = _find_landmarks(query, key, value, key_mask, options.num_landmarks, shards)
    queries, keys = (x.to(dtype) for x in landmarks[:2])  # (BH, L, D)
    tokens, values = (_all_heads(x, num_heads).to(dtype)[:, None] for x in (key, value))  # (BH, 1, Nk, .)
    bias = None
    if key_mask is not None:
        bias = mask_bias(key_mask, acc_dtype).repeat_interleave(num_heads, 0)[:, None, None]  # (BH, 1, 1, Nk)
    part = attend(queries[:, None], tokens, values, bias, scale=options.scale)  # B V
    if shards is not None:
        part = merge(*gather_partials(Partial(part.out.to(acc_dtype), part.lse), shards.group))
    middle = _middle_factor(queries.to(acc_dtype), keys.to(acc_dtype), of_mask, options.scale)  # A: (BH, L, L)
    values = part.out[:, 0].to(acc_dtype)  # (BH, L, Dv)
    values = iterative_pinv(middle, options.iterations) @ values if options.iterations else damped_solve(middle, values)
    landmark_bias = None
    if of_mask is not None and len(landmarks) > 2:
        # With the values of the tokens in place of Z B V, F Z B V is exact attention.
        values = torch.where(of_mask.few[:, None, None], landmarks[2], values)
        landmark_bias = mask_bias(~of_mask.no_keys, acc_dtype)[:, None, None]  # (BH, 1, 1, L)
    # Weights that exceed the range of float16 need the wider dtype.
    result = value.dtype if value.dtype == torch.bfloat16 else dtype
    tensors = query.flatten(0, 1)[:, None].to(dtype), keys[:, None], values[:, None].to(dtype), landmark_bias
    return attend(*tensors, scale=options.scale, dropout_p=options.dropout_p).out[:, 0].to(result)


class _OfMask(NamedTuple):
    """What a mask tells about the segments."""

    few: Tensor  # bool (BH,), whether a sequence has at most L tokens, each of which is a landmark by itself
    no_queries: Tensor  # bool (BH, L), whether a segment has no query
    no_keys: Tensor  # bool (BH, L), whether a segment has no key


def _find_landmarks(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, count: int, shards: Shards | None
) -> tuple[list[Tensor], _OfMask | None]:
    """Compute `count` landmarks (BH, L, .) of queries, keys and, if a sequence may have few tokens, of values.

    They have the accumulation dtype. Without a mask all segments have tokens, and the second result is None.
    """
    batch, num_heads, q_len, _ = query.shape
    kv_len = key.shape[2]
    device = query.device
    mask = key_mask if shards is None else shards.key_mask
    length, own = (kv_len, slice(0, kv_len)) if shards is None else (shards.total, shards.own)
    segments = of_queries = find_segments(mask, length, own, count, device)
    if q_len != kv_len:  # other tokens, which have no mask
        ones = torch.ones(1, q_len, dtype=torch.bool, device=device) if exporting_to_onnx() else None
        of_queries = find_segments(ones, q_len, slice(0, q_len), count, device)
    elif key_mask is not None:
        query = query.masked_fill(~key_mask[:, None, :, None], 0.0)
    given = [(query, of_queries), (key, segments)]
    of_mask = None
    if mask is not None:
        few = (segments.sizes.sum(1) <= count).expand(batch)  # (B,)
        empty = ((x.sizes == 0).expand(batch, -1).repeat_interleave(num_heads, 0) for x in (of_queries, segments))
        of_mask = _OfMask(few.repeat_interleave(num_heads), *empty)
        given += [(value, segments)] if exporting_to_onnx() or may_hold(few) else []
    if shards is None:
        means = [segment_means(*x) for x in given]
    else:
        sums = total([segment_sums(*x) for x in given], shards.group)
        means = [x / n.sizes.clamp(min=1)[:, None, :, None] for x, (_, n) in zip(sums, given, strict=True)]
    return [_all_heads(x, num_heads) for x in means], of_mask


def _middle_factor(query: Tensor, key: Tensor, of_mask: _OfMask | None, scale: float) -> Tensor:
    """Compute A = softmax(Q~ K~^T) from landmarks (BH, L, D), with 0 for segments without tokens: (BH, L, L)."""
    scores = query @ key.mT * scale  # (BH, L, L)
    if of_mask is None:
        return scores.softmax(-1)
    no_keys = of_mask.no_keys
    # If all segments are empty, their scores stay finite, because the gradient of softmax over -inf only is NaN.
    excluded = no_keys & ~no_keys.all(1, keepdim=True)
    weights = scores.masked_fill(excluded.unsqueeze(1), -torch.inf).softmax(-1)
    return weights.masked_fill(no_keys.unsqueeze(1) | of_mask.no_queries.unsqueeze(2), 0.0)


def _all_heads(x: Tensor, num_heads: int) -> Tensor:
    """Repeat (B, H_kv, N, .) for all heads: (B H, N, .)."""
    groups = num_heads // x.shape[1]
    return (x if groups == 1 else x.repeat_interleave(groups, 1)).flatten(0, 1)


def iterative_pinv(matrix: Tensor, iterations: int) -> Tensor:
    """Approximate the pseudo-inverse of every matrix by the third-order iteration of Razavi et al. (2014).

    It starts from Z = A^T / (|A|_1 |A|_inf), and a step is Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4. With
    e = 1 - s z, for singular values s of A and z of Z, a step takes e to e^3 (3 + e) / 4. A small s z grows by a factor
    of 13/4 per step, so that few steps leave small singular values damped. Each matrix starts from its own norms and
    does not depend on the others: (BH, L, M) -> (BH, M, L). Rows and columns of zeros remain zeros.
    """
    z = matrix.mT / _norm_bound(matrix)  # (BH, M, L)
    for _ in range(iterations):
        product = torch.bmm(matrix, z)  # (BH, L, M) @ (BH, M, L) -> (BH, L, L)
        inner = torch.baddbmm(product, product, product, beta=7.0, alpha=-1.0)  # (BH, L, L)
        inner = torch.baddbmm(product, product, inner, beta=15.0, alpha=-1.0)
        z = torch.baddbmm(z, z, inner, beta=3.25, alpha=-0.25)  # (BH, M, L)
    return z


def _norm_bound(matrix: Tensor) -> Tensor:
    """Compute |A|_1 |A|_inf >= |A|_2^2, the largest column sum times the largest row sum: (..., 1, 1); 1 for A = 0."""
    size = matrix.abs()
    bound = size.sum(-2).amax(-1) * size.sum(-1).amax(-1)  # (...)
    return bound.masked_fill(bound == 0, 1.0)[..., None, None]


def damped_solve(matrix: Tensor, right: Tensor) -> Tensor:
    """Find the X that minimizes |A X - Y|^2 + c |X|^2 with c = 1e-4 |A|_1 |A|_inf.

    This uses the Cholesky decomposition of A^T A + c I, in float64 for every dtype, because A^T A loses half of the
    digits. Unlike with a truncated pseudo-inverse, the result and its gradient are finite for singular matrices, too.

    Args:
        matrix: A, (..., L, M).
        right: Y, (..., L, N).

    Returns:
        X, (..., M, N), in the dtype of `matrix`.
    """
    a = widened(matrix)
    right = widened(right)
    gram = a.transpose(-1, -2) @ a  # (..., M, L) @ (..., L, M) -> (..., M, M)
    gram = gram + DAMPING * _norm_bound(a) * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    factor, _ = torch.linalg.cholesky_ex(gram)
    return torch.cholesky_solve(a.transpose(-1, -2) @ right, factor).to(matrix.dtype)


def add_convolution(out: Tensor, value: Tensor, kernel: Tensor | None, key_mask: Tensor | None) -> Tensor:
    """Add the convolution of the valid tokens of value (B, H, N, Dv) with kernel (H, size) to an output like `value`.

    The result has the dtype of `value`.
    """
    if kernel is not None:
        tokens = value.to(kernel.dtype)
        weight = kernel[:, None, :, None]  # (H, 1, size, 1)
        order = None
        if key_mask is not None:
            order = valid_first(key_mask).repeat_interleave(value.shape[1], 0)  # (BH, N)
            tokens = take(tokens.flatten(0, 1), order).view(value.shape)
        more = conv2d(tokens, weight, padding=(kernel.shape[1] // 2, 0), groups=kernel.shape[0])  # (B, H, N, Dv)
        if order is not None and key_mask is not None:
            more = take(more.flatten(0, 1), inverse(order)).view(value.shape)
            more = more.masked_fill(~key_mask[:, None, :, None], 0.0)
        out = out.to(kernel.dtype) + more
    # If the landmarks are far from the tokens, the weights are large.
    return rounded(out, value.dtype)


def landmark_naive(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, options: LandmarkOptions, kernel: Tensor | None
) -> Tensor:
    """Compute `landmark_attention` and `add_convolution` in the readable form, by dense matrices, row after row."""
    q_len = query.shape[2]
    kv_len = key.shape[2]
    count, iterations, scale, _ = options
    outs = []

    def softmax(q: Tensor, k: Tensor) -> Tensor:
        return (scale * q @ k.mT).softmax(-1)

    def means(x: Tensor) -> Tensor:
        return torch.stack([part.mean(1) for part in x.tensor_split(count, 1)], 1)  # (H, L, .)

    for b in range(query.shape[0]):
        valid = key.new_ones(kv_len, dtype=torch.bool) if key_mask is None else key_mask[b]
        queries = query[b].double()
        keys = key[b, :, valid].double()
        values = value[b, :, valid].double()
        if keys.shape[1] <= count or q_len <= count:
            out = softmax(queries, keys) @ values
        else:
            mean_queries = means(queries[:, valid] if q_len == kv_len else queries)
            mean_keys = means(keys)
            middle = softmax(mean_queries, mean_keys)  # (H, L, L)
            one = torch.eye(count, dtype=torch.float64, device=middle.device)
            # The largest sum of a column. The sum of a row is 1.
            norm = middle.sum(1).amax(1).view(-1, 1, 1)  # (H, 1, 1)
            z = (
                middle.mT / norm
                if iterations
                else torch.linalg.solve(middle.mT @ middle + DAMPING * norm * one, middle.mT)
            )
            for _ in range(iterations):
                product = middle @ z
                z = z @ (13 * one - product @ (15 * one - product @ (7 * one - product))) / 4
            out = softmax(queries, mean_keys) @ z @ softmax(mean_queries, keys) @ values  # (H, Nq, Dv)
        if kernel is not None and keys.shape[1]:
            size = kernel.shape[1]
            windows = pad(values, (0, 0, size // 2, size // 2)).unfold(1, size, 1)  # (H, n, Dv, size)
            out = out.index_add(1, valid.nonzero()[:, 0], (windows * kernel.double()[:, None, None]).sum(-1))
        outs.append(out)
    return torch.stack(outs).to(value.dtype)
