"""Locality-sensitive hashing: blocks of queries and keys with similar hashes, as a plan without a gradient.

`plan_lsh` (Zandieh et al. 2023, Appendix A): bit b of a code tells on which side of the b-th random hyperplane a vector
lies (Definition A.1). The tokens are sorted by the rank of their code in the order of the reflected Gray code, in which
neighbors differ in one bit (Lemma A.2), and cut into blocks of equal size (Definition A.3). In that order the new bit
is appended at the end, and the second half is reversed. So the last bit is the most significant one of the rank, and
bit b of the rank is the parity of the bits b, b+1, ... of the code.

`plan_rounds` (Kitaev, Kaiser, Levskaya, ICLR 2020, section 2): in every round queries and keys are sorted by the bucket
of a new random hash, and `rounds_attention` merges the rounds.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.ops.attend import BlockKeys, Partial, attend, block_attention, merge
from hf_efficient_attn.ops.backends.devices import accumulation_dtype, planning_dtype, wide_dtype
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.index import ceil_div, clamp_index, integers, inverse, pad_to_blocks, take, valid_first
from hf_efficient_attn.ops.slices import slice_size, sliced


class NearField(NamedTuple):
    """The block of keys of each of T blocks of queries. In a plan of S rounds (`plan_rounds`) orders are (BH, S, N).

    A sorted index counts the keys (or queries) in the order of the plan; a position counts them in the sequence.
    """

    # int64 (BH, Nq), the query at each sorted index, or None if queries are in the order of positions.
    query_order: Tensor | None
    # int64 (BH, Nk), the key at each sorted index, valid keys first, or None if keys are in that order.
    key_order: Tensor | None
    start: Tensor  # int64 (BH, T), the sorted index at which the block of keys starts
    block_q: int  # number of queries of a block
    block_k: int  # number of keys of a block
    num_keys: Tensor | int  # number of valid keys, int64 (BH, 1) or an integer
    # Number of valid queries, int64 (BH, 1) or an integer. Masked queries are known only if queries and keys are the
    # same tokens.
    num_queries: Tensor | int


def key_ranges(near: NearField, key: Tensor) -> BlockKeys:
    """Describe the blocks of keys of a plan for `block_attention`; key (BH, Nk, D)."""
    is_padded = isinstance(near.num_keys, Tensor)
    key_mask = integers(key.shape[1], key.device) < near.num_keys if is_padded else None  # (BH, Nk)
    return BlockKeys(near.block_q, near.query_order, None, near.start, near.block_k, near.key_order, key_mask)


def hyperplanes(head_dim: int, num_hashes: int, draws: Draws) -> Tensor:
    """Draw standard normal vectors that are normals of hyperplanes: float64 (D, num_hashes)."""
    return draws.normal((head_dim, num_hashes), 1)


def hash_keys(x: Tensor, num_hashes: int, draws: Draws, mask: Tensor | None = None) -> Tensor:
    """Compute sorting keys: the Gray rank of a token's cell plus position / N, which tells the tokens of a cell apart.

    Positions and N count the valid tokens. Called without a gradient.

    For tokens (BH, N, D) and r hyperplanes: (BH, N), float32 if that holds all ranks and positions, else
    float64. The sorting key of a token that the mask, bool (BH, N) or None, excludes is inf.
    """
    length = x.shape[1]
    device = x.device
    x = x.to(planning_dtype(x))
    levels = 2.0 ** (24 - num_hashes)  # of a position that float32 holds beside a rank
    dtype = torch.float32 if length <= levels else wide_dtype(device)
    # Planes times tokens is three times as fast as tokens times planes, which has few columns.
    # The last hyperplane comes first, and all are negated, so that bit 1 has a negative sign: (r, D).
    planes = -hyperplanes(x.shape[2], num_hashes, draws).t().flip(0).to(x.dtype)  # (r, D)
    sides = torch.bmm(planes.expand(len(x), -1, -1), x.mT)  # (BH, r, D) @ (BH, D, N) -> (BH, r, N)
    rank = integers(length, device)[None]
    count = torch.full((1, 1), length, device=device)
    if mask is not None:
        rank = mask.cumsum(1) - 1
        count = mask.sum(1, keepdim=True).clamp(min=1)
    share = rank.to(dtype) / count  # (1 or BH, N)
    if dtype == torch.float32 and length > levels:  # so that no rounding moves a token to the next cell
        share = (share * levels).floor() / levels
    share = share + (2.0**num_hashes - 1.0) / 2.0  # (1 or BH, N)
    # (-1)^(bit b of the rank) is the product of the signs of the sides from b on.
    parity = torch.copysign(torch.ones((), dtype=dtype, device=device), sides).cumprod(1, dtype=dtype)  # (BH, r, N)
    powers = -(2.0 ** torch.arange(num_hashes - 2, -2, -1, dtype=dtype, device=device))  # -2^b / 2, the last b first
    keys = torch.baddbmm(share.unsqueeze(1), powers.expand(len(x), 1, -1), parity).squeeze(1)  # (BH, N)
    return keys if mask is None else keys.masked_fill_(~mask, torch.inf)


def plan_lsh(
    query: Tensor,
    key: Tensor,
    block_size: int,
    key_mask: Tensor | None,
    num_hashes: int,
    draws: Draws,
    block_q: int | None = None,
) -> NearField:
    """Cut queries and keys into blocks in hash order, without a gradient.

    A block has `block_size` keys, and `block_q` or as many queries. `block_starts` describes the departure from the
    paper. The mask also masks the queries if there are as many.
    """
    q_len = query.shape[1]
    kv_len = key.shape[1]
    block_q = block_size if block_q is None else block_q
    query_mask = key_mask if q_len == kv_len else None
    hashed = hash_keys(query, num_hashes, draws, query_mask), hash_keys(key, num_hashes, draws, key_mask)
    if q_len == kv_len <= 16384:  # up to this length an accelerator sorts twice as many rows in the same time
        (query_keys, keys), (query_order, key_order) = torch.stack(hashed).sort(stable=True)
    else:
        (query_keys, query_order), (keys, key_order) = (x.sort(stable=True) for x in hashed)
    num_keys = kv_len if key_mask is None else key_mask.sum(1, keepdim=True)
    num_queries = q_len if query_mask is None else num_keys
    start = block_starts(query_keys, keys, num_queries, num_keys, block_q, block_size)
    return NearField(query_order, key_order, start, block_q, block_size, num_keys, num_queries)


def block_starts(
    query_keys: Tensor, keys: Tensor, num_queries: Tensor | int, num_keys: Tensor | int, block_q: int, block_k: int
) -> Tensor:
    """Find the sorted index at which the block of keys of each block of sorted queries starts.

    The papers pair the b-th block of queries with the b-th block of keys. Two sets of vectors may be distributed
    differently over the cells of the hash. So here the block of keys is centered on the sorted index that the middle
    query of the block would have among the keys.

    `query_keys` (BH, Nq) and `keys` (BH, Nk) are sorting keys of queries and keys, in ascending order, of which the
    first `num_queries` and `num_keys`, integers or int64 (BH, 1), are valid. Returns int64 (BH, T). A block of keys
    ends before `num_keys` if there are at least `block_k`.
    """
    batch_heads, q_len = query_keys.shape
    device = keys.device
    middle = torch.arange(block_q // 2, q_len + block_q // 2, block_q, device=device).expand(batch_heads, -1)  # (BH, T)
    of_middle = query_keys.gather(1, middle.clamp(max=num_queries - 1).clamp_(min=0))  # (BH, T)
    start = torch.searchsorted(keys, of_middle) - block_k // 2  # (BH, T)
    return clamp_index(start, num_keys - block_k)


_STREAM = 45
# Its negative is so far below any score that its exponential is 0, but finite, because infinity times 0 is NaN.
_EXCLUDED = 1e30
# The sorting key of a token is bucket * 2**32 + position. The bucket of masked tokens comes after all others.
_BUCKET = 1 << 32
_LAST_BUCKET = 1 << 30


def rotations(kv_len: int, block_size: int, rounds: int, head_dim: int, draws: Draws) -> Tensor:
    """Draw standard normal directions of every round for up to `kv_len` keys: float64 (h, rounds, 2, D).

    Fewer keys use the first of the h directions: see `bucket_halves`.
    """
    most = math.isqrt(ceil_div(kv_len, 2 * block_size) - 1) + 1
    return draws.normal((most, rounds, 2, head_dim), _STREAM)


def bucket_halves(num_keys: Tensor, block_size: int, most: int) -> Tensor:
    """Compute half of each of the two factors of the number of buckets, from 1 to `most`: int64 (BH, 1) -> (BH, 2).

    There are about 2 * num_keys / block_size buckets, so that a bucket has half a block on average (the paper's
    m = 2 l / n_buckets). The first half is the smallest h for which 2h * 2h buckets suffice. The second half is the
    smallest that suffices together with the first.
    """
    smaller = torch.arange(1, most, device=num_keys.device)  # (most - 1,)
    first = 1 + (2 * block_size * smaller * smaller < num_keys.unsqueeze(-1)).sum(-1)  # (BH, 1)
    second = (num_keys + (2 * block_size * first - 1)) // (2 * block_size * first)
    return torch.cat((first, second.clamp(min=1)), 1)  # (BH, 2)


def bucket_codes(x: Tensor, directions: Tensor, half: Tensor, num_keys: Tensor | None = None) -> Tensor:
    """Compute the bucket of every token in every round.

    A bucket is a pair of hashes argmax([xR; -xR]), where R are the first directions of each factor. A single hash with
    as many buckets would cost their number times N, which is quadratic for blocks of constant size.

    Takes tokens (BH, N, D) and the results of `rotations` and `bucket_halves`. If `num_keys`, the number of tokens that
    are not 0, int64 (BH or 1, 1), is given, their mean is subtracted from all. Returns int64 (BH, S, N).
    """
    # A direction that is not used is 0, which is never the largest product.
    used = integers(len(directions), x.device) < half.unsqueeze(2)  # (1 or BH, 2, h)
    directions = directions.permute(1, 2, 0, 3) * used[:, None, :, :, None]  # (1 or BH, S, 2, h, D)
    dtype = accumulation_dtype(x.dtype)
    sizes = directions.shape[1:4]
    # (BH, S * 2 * h, N)
    projected = directions.flatten(1, 3).to(dtype).expand(x.shape[0], -1, -1) @ x.detach().to(dtype).mT
    if num_keys is not None:  # subtract the mean from the products, because they are fewer numbers
        projected -= projected.sum(2, keepdim=True) / num_keys.clamp(min=1).unsqueeze(2)
    projected = projected.unflatten(1, sizes)  # (BH, S, 2, h, N)
    # Find the largest absolute value, one direction at a time: on a CPU several times as fast as `max` with an index.
    largest, *others = projected.abs().unbind(3)  # (BH, S, 2, N) each
    index = torch.zeros_like(largest, dtype=torch.int16)
    for h, other in enumerate(others, 1):
        index = torch.maximum(index, (other > largest).to(torch.int16).mul_(h))
        largest = torch.maximum(largest, other)
    index = index.long()
    index += (projected.gather(3, index.unsqueeze(3)).squeeze(3) < 0) * half[:, None, :, None]
    return index[:, :, 0] * (2 * half[:, 1, None, None]) + index[:, :, 1]  # (BH, S, N)


def _sort(codes: Tensor, share: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sort tokens by bucket (BH, S, N), and within it by their share of the sequence, from 0 to 2^31 - 1.

    Tokens that the mask, bool (BH, N), excludes come last. Returns the sorting keys and the order.
    """
    codes = codes if mask is None else codes.masked_fill(~mask.unsqueeze(1), _LAST_BUCKET)
    return torch.add(share, codes, alpha=_BUCKET).sort()


@torch.no_grad()
def plan_rounds(
    query: Tensor, key: Tensor, key_mask: Tensor | None, *, block_size: int, rounds: int, draws: Draws
) -> NearField:
    """Cut queries into blocks of `block_size`, each with 2 * block_size keys: its own and half of both neighbors.

    If the keys are not the queries, their mean is subtracted before hashing. Softmax attention does not change if the
    same vector is added to all keys, but a large vector would put all keys into one bucket. Masked keys are 0 then. The
    mask also masks the queries if there are as many.

    Sequences of up to rounds * 2 * block_size keys are exact: the blocks of a query are disjoint parts of one order.
    """
    batch_heads, q_len, head_dim = query.shape
    kv_len = key.shape[1]
    device = key.device
    block_k = 2 * block_size
    same_length = q_len == kv_len
    if key_mask is None and kv_len <= rounds * block_k:
        key_mask = torch.ones(batch_heads, kv_len, dtype=torch.bool, device=device)
    query_mask = key_mask if same_length else None
    num_keys = torch.full((1, 1), kv_len, device=device) if key_mask is None else key_mask.sum(1, keepdim=True)
    directions = rotations(kv_len, block_size, rounds, head_dim, draws)
    half = bucket_halves(num_keys, block_size, len(directions))
    share = query_share = integers(kv_len, device)
    if not same_length:  # the share of the sequence before a token, as an integer below 2^31
        rank = share if key_mask is None else (key_mask.cumsum(1) - 1).clamp(min=0).unsqueeze(1)
        query_share = (integers(q_len, device) << 31) // q_len
        share = (rank << 31) // num_keys.clamp(min=1).unsqueeze(2)
    keys, key_order = _sort(bucket_codes(key, directions, half, None if query is key else num_keys), share, key_mask)
    queries = keys
    query_order = key_order
    if query is not key:
        queries, query_order = _sort(bucket_codes(query, directions, half), query_share, query_mask)
    of_rounds = num_keys.expand(batch_heads, 1).repeat_interleave(rounds, 0)  # (BH S, 1)
    num_queries = q_len if query_mask is None else of_rounds
    start = block_starts(queries.flatten(0, 1), keys.flatten(0, 1), num_queries, of_rounds, block_size, block_k)
    start = start.unflatten(0, (batch_heads, rounds))  # (BH, S, T)
    if key_mask is None:
        return NearField(query_order, key_order, start, block_size, block_k, kv_len, q_len)
    short = (num_keys <= rounds * block_k)[:, :, None]  # (BH, 1, 1)
    disjoint = torch.arange(rounds, device=device)[:, None] * block_k  # (S, 1)
    key_order = torch.where(short, valid_first(key_mask)[:, None], key_order)  # (BH, S, Nk)
    start = torch.where(short, disjoint, start)
    return NearField(query_order, key_order, start, block_size, block_k, num_keys, num_queries)


def rounds_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: NearField, *, others: bool, scale: float, dropout_p: float = 0.0
) -> Tensor:
    """Compute the attention of a plan: (BH, Nq, Dv).

    A pair that several rounds contain counts in the first of them only, so that the first round needs no bias and
    dropout is applied once to each pair. The paper's weights of the rounds (Eq. 6-7) have the same sum.

    With `others`, for Nq = Nk, a token attends to itself only if it has no other key.
    """
    rounds, num_blocks = plan.start.shape[1:]

    def some_heads(query: Tensor, key: Tensor, value: Tensor, some: NearField) -> Tensor:
        query_order, key_order, start, *_ = some
        num_keys = some.num_keys if isinstance(some.num_keys, Tensor) else None
        assert query_order is not None and key_order is not None
        query_rank, key_rank = (inverse(x.flatten(0, 1)).view_as(x) for x in (query_order, key_order))  # (BH, S, N)
        # The last block is padded with query 0; the result for the padding is not used.
        queries = pad_to_blocks(query_order.flatten(0, 1).unsqueeze(2), plan.block_q)  # (BH S, T, block_q, 1)
        queries = queries.view(len(query), rounds, num_blocks, plan.block_q)  # (BH, S, T, block_q)
        index = start.unsqueeze(3) + integers(plan.block_k, query.device)  # (BH, S, T, block_k)
        masked = None if num_keys is None else index >= num_keys[:, :, None, None]  # (BH, S, T, block_k)
        index = index.clamp(max=key.shape[1] - 1)
        keys = key_order.gather(2, index.flatten(2)).view_as(index)  # (BH, S, T, block_k)
        # The start of each query's block of keys in each round: (BH, S, Nq).
        first = start.gather(2, query_rank // plan.block_q)

        def one_round(s: int) -> Partial:
            if s == 0 and not others:  # no bias
                first_round = some._replace(query_order=query_order[:, 0], key_order=key_order[:, 0], start=start[:, 0])
                ranges = key_ranges(first_round, key)
                found = block_attention(query, key, value, ranges, scale=scale, dropout_p=dropout_p)
                if found is not None:
                    return found
            own = queries[:, s]
            own_keys = keys[:, s]
            # Round t contains a pair if the rank of the key is in the block of keys of the query.
            earlier = [(_at(key_rank[:, t], own_keys), _at(first[:, t], own)) for t in range(s)]
            bias = _round_bias(query.dtype, (own, own_keys), None if masked is None else masked[:, s], earlier, others)
            block = take(query, own), take(key, own_keys), take(value, own_keys)
            part = attend(*block, bias, scale=scale, dropout_p=dropout_p)
            rank = query_rank[:, s]
            return Partial(take(part.out.flatten(1, 2), rank), part.lse.flatten(1).gather(1, rank))

        # The first round has no bias, so it comes last, when the results of the others take memory.
        out, lse = merge(*(one_round(s) for s in reversed(range(rounds))))
        return torch.where((lse == -torch.inf).unsqueeze(-1), value, out) if others else out

    size = slice_size(2 * query.shape[1] * plan.block_k, query.device)
    # Without dropout autograd keeps copies of the tokens, and biases: 1.3 times as fast as computing them again.
    draws = dropout_p > 0.0
    some = plan._replace(num_queries=query.shape[1])
    return sliced(some_heads, query, key, value, some, size=size, draws=draws, recompute=draws)


def _at(x: Tensor, index: Tensor) -> Tensor:
    """Gather numbers x (BH, N) by an index (BH, ...), in the shape of the index."""
    return x.gather(1, index.flatten(1)).view_as(index)


def _round_bias(
    dtype: torch.dtype,
    pairs: tuple[Tensor, Tensor],
    masked: Tensor | None,
    earlier: list[tuple[Tensor, Tensor]],
    others: bool,
) -> Tensor | None:
    """Compute the bias of the pairs of a round, (BH, T, block_q or 1, block_k), or None if all pairs count.

    It is -inf for masked keys and -`_EXCLUDED` for pairs of an earlier round. The query has larger weights in that
    round, so the weight of an excluded pair is lost beside them.

    `pairs` are the queries, int64 (BH, T, block_q), and the keys, (BH, T, block_k). `earlier` has for each earlier
    round the ranks of these keys, and the starts of the blocks of keys of these queries. `others` excludes the pairs of
    a token with itself.
    """
    queries, keys = pairs
    acc_dtype = accumulation_dtype(dtype)
    bias = None
    block_k = keys.shape[2]
    for rank, first in earlier:
        # Twice a rank is even and twice the center of a block is odd, because block_k is even. So the distance is at
        # most block_k - 1 within the block of keys, and at least block_k + 1 outside.
        center = (2 * first + (block_k - 1)).to(acc_dtype)  # (BH, T, block_q)
        gap = ((2 * rank).to(acc_dtype)[:, :, None] - center[:, :, :, None]).abs_()  # (BH, T, block_q, block_k)
        # Several operations on one buffer are several times as fast as a masked fill.
        excluded = gap.clamp_(block_k - 1, block_k).sub_(block_k).mul_(_EXCLUDED)
        bias = excluded if bias is None else bias.add_(excluded)
    if others:
        itself = mask_bias(keys[:, :, None] != queries[:, :, :, None], dtype)  # (BH, T, block_q, block_k)
        bias = itself if bias is None else bias.add_(itself)
    if masked is not None:
        key_bias = mask_bias(~masked[:, :, None], dtype)  # (BH, T, 1, block_k)
        bias = key_bias if bias is None else bias.add_(key_bias)
    return bias


def dense_pairs(plan: NearField) -> Tensor:
    """Mark the pairs of any round, in the readable form: bool (BH, Nq, Nk)."""
    assert plan.query_order is not None and plan.key_order is not None
    batch_heads, rounds, q_len = plan.query_order.shape
    kv_len = plan.key_order.shape[2]
    pairs = torch.zeros(batch_heads, q_len, kv_len, dtype=torch.bool, device=plan.query_order.device)
    for a in range(batch_heads):
        num_keys = plan.num_keys if isinstance(plan.num_keys, int) else int(plan.num_keys[a])
        for s in range(rounds):
            for t, start in enumerate(plan.start[a, s].tolist()):
                queries = plan.query_order[a, s, t * plan.block_q : (t + 1) * plan.block_q]
                keys = plan.key_order[a, s, start : min(start + plan.block_k, num_keys)]
                pairs[a, queries[:, None], keys] = True
    return pairs
