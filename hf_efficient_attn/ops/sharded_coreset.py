"""`hf_efficient_attn.ops.weighted_coreset` for a sequence that processes share, of which only summaries travel.

Every process computes the landmarks and their weights, from the same tensors, so that all decide alike:

1. All get the candidates for landmarks, the queries that tell whether attention is local, and the probes.
2. The mean of the keys is a sum over the processes, and so are the sums that tell which heads have near keys.
3. Near keys of queries at the ends of a shard come from its neighbors.
4. The exact rows of landmarks and probes are partials over each process's own keys, which are merged.
5. What near keys add to the rows of the probes is again a sum, to which each process adds its own keys.

Then a process attends with its own queries. Tokens are counted by their rank among the valid tokens of all processes
(`hf_efficient_attn.ops.ranked_shards`), as in one process, where valid tokens come first.

On accelerators nothing is decided by data, as there in a graph: all heads have room for near keys and for further
landmarks. This is not the form of one process there, `hf_efficient_attn.ops.coreset_blocks`, whose weights for a block
of queries come from the sums over all other blocks.
"""

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hf_efficient_attn.ops.accelerator import backend
from hf_efficient_attn.ops.blocks import ceil_div
from hf_efficient_attn.ops.coreset import even_ranks, gumbel_numbers
from hf_efficient_attn.ops.coreset_landmarks import (
    Candidates,
    CoresetOptions,
    Inputs,
    Landmarks,
    choose_landmarks,
    keeps_half,
    middle_ranks,
    subtract_mean,
    take_alike,
    to_products,
)
from hf_efficient_attn.ops.coreset_near_keys import (
    NUM_KEYS,
    NUM_ROWS,
    ExactRows,
    NearPlan,
    ScoreSums,
    Similarity,
    gather_near_keys,
    heads_with_enough_keys,
    is_attention_local,
    near_block_q,
    near_index,
    near_scores,
    near_sums_of_rows,
    sum_scores_,
)
from hf_efficient_attn.ops.coreset_weights import NearSums, SumsOverKeys, sum_over_keys, weigh_by_sums
from hf_efficient_attn.ops.exact import mask_bias
from hf_efficient_attn.ops.partial import Partial, accumulation_dtype, safe_row_max
from hf_efficient_attn.ops.ranked_shards import (
    Ranks,
    gather_at,
    in_sequence,
    near_position,
    of_heads,
    own_position,
    ranks_of,
    valid_tokens_first,
    with_near_tokens,
)
from hf_efficient_attn.ops.shards import Shards, gather_plain, merge_partials, total
from hf_efficient_attn.ops.weighted_coreset import (
    ACCELERATOR_SCORES,
    SCORES,
    TOKENS,
    attend_to_coreset,
    coreset_of_heads,
    is_fixed,
)

# Numbers of candidates and landmarks of the heads that are processed between two collectives.
_NUMEL = 1 << 24


class _Call(NamedTuple):
    """What is the same for all heads: where the tokens are, the number of query heads, and how landmarks are chosen."""

    ranks: Ranks
    num_heads: int
    options: CoresetOptions

    def of_heads(self, x: Tensor, device: torch.device) -> Tensor:
        """What belongs to sequences, (B', ...), for each head, or for all of them if they are alike: (BH or 1, ...)."""
        return of_heads(x.to(device), self.num_heads)

    def middle_ranks(self, count: int) -> Tensor:
        """The ranks of evenly spaced queries, int64 (B', count) on the CPU."""
        return middle_ranks(count, self.ranks.num_tokens, self.ranks.first.device)


class _Heads(NamedTuple):
    """What a process needs for some heads.

    Attributes:
        query: (BH, n, D), of its tokens, the valid ones first.
        key: (BH, n + m, D), of its tokens, followed by m keys of other processes that are near keys of its queries.
        value: (BH, n + m, Dv).
        mean: (BH, 1, D), of all valid keys, in the accumulation dtype.
        candidate_key: (BH, C, D).
        candidate_value: (BH, C, Dv).
        candidate_valid: bool (BH, C), which exist, or None: all.
        probe: (BH, P, D), or None without a fit.
        num_keys: the valid keys of all processes, an integer or int64 (BH, 1).
        bias: (BH, 1, 1, n), which excludes padding, or None.
        near: bool (BH,), the heads with near keys, or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mean: Tensor
    candidate_key: Tensor
    candidate_value: Tensor
    candidate_valid: Tensor | None
    probe: Tensor | None
    num_keys: Tensor | int
    bias: Tensor | None
    near: Tensor | None

    def inputs(self) -> Inputs:
        """The inputs with centered keys."""
        inputs = Inputs(self.query, self.key, self.value, self.bias, self.num_keys, self.num_keys)
        return subtract_mean(to_products(inputs), self.mean)

    def with_keys(self, key: Tensor, value: Tensor) -> "_Heads":
        """These heads without queries, and with other keys, none of which is padding."""
        return self._replace(query=self.query[:, :0], key=key, value=value, bias=None)

    def candidates(self) -> Candidates:
        """The candidates with centered keys."""
        key, value = self.candidate_key.to(self.mean.dtype) - self.mean, self.candidate_value.to(self.mean.dtype)
        return Candidates(key, value, self.candidate_valid, self.num_keys, self.product_dtype)

    @property
    def product_dtype(self) -> torch.dtype:
        """The dtype of products with all tokens."""
        return self.key.dtype if keeps_half(self.key) else self.mean.dtype


class _NearTokens(NamedTuple):
    """Which keys are near, and how queries are put into blocks. What is the same for all heads has a first size of 1.

    Attributes:
        key_index: int64 (BH or 1, T, w), positions in `_Heads.key` for each block of queries.
        bias: (BH, T, w), as in `NearPlan`, or None.
        of_probes: int64 (BH or 1, P, w), positions of the near keys of the probes that this process holds.
        bias_of_probes: (BH or 1, P, w), -inf for those that it does not hold.
        query_index: int64 (BH or 1, n + block_q - 1), the query at each position in the blocks.
        block_position: int64 (BH or 1, n), the position of each query in the blocks.
    """

    key_index: Tensor
    bias: Tensor | None
    of_probes: Tensor
    bias_of_probes: Tensor
    query_index: Tensor
    block_position: Tensor


_Tensors = TypeVar("_Tensors", _Heads, _NearTokens)


def _of(tensors: _Tensors, some: Tensor | slice) -> _Tensors:
    """What belongs to some heads: those of a slice, or of an index."""

    def part(x: Any) -> Any:
        if not isinstance(x, Tensor) or (len(x) == 1 and isinstance(tensors, _NearTokens)):
            return x
        return x[some] if isinstance(some, slice) else x.index_select(0, some)

    return type(tensors)(*map(part, tensors))


def sharded_coreset_attention(
    query: Tensor, key: Tensor, value: Tensor, shards: Shards, options: CoresetOptions
) -> Tensor:
    """`weighted_coreset_attention` of all tokens, for the queries of this process.

    Args:
        query: (B, H, n, D).
        key: (B, H_kv, n, D), 0 for padding. All processes together have more keys than landmarks and near keys.
        value: (B, H_kv, n, Dv), 0 for padding.
        shards: which tokens these are.
        options: how landmarks are chosen.

    Returns:
        (B, H, n, Dv) in the dtype of `value`; 0 for padding.
    """
    if shards.own_mask is not None:
        query = query.masked_fill(~shards.own_mask[:, None, :, None], 0.0)
    call = _Call(ranks_of(shards), query.shape[1], options)
    query, key, value = (valid_tokens_first(x, call.ranks) for x in (query, key, value))
    heads, spread = _gathered(query, key, value, call)
    near, tokens, fixed = _heads_with_near_keys(spread, heads, call), None, is_fixed(query)
    if near is not None and (fixed or bool(near.any())):
        (key, value), around = with_near_tokens((key, value), max(1, options.block_size - 1), call.ranks)
        heads = heads._replace(key=_repeat(key, call), value=_repeat(value, call), near=near)
        tokens = _near_tokens(heads, around, call)
    like = key.new_empty(0, dtype=heads.mean.dtype)
    num_candidates = heads.candidate_key.shape[1]
    numbers = gumbel_numbers(options.num_landmarks + options.block_size, num_candidates, options.seed, like)
    if near is None or tokens is None or fixed:
        out = _attend_alike(heads, tokens, numbers, call)
    else:
        groups = [(near.logical_not().nonzero()[:, 0], None), (near.nonzero()[:, 0], tokens)]
        outs = [
            _attend_alike(_of(heads, index), None if own is None else _of(own, index), numbers, call)
            for index, own in groups
            if len(index)
        ]
        out = torch.cat(outs).index_select(0, torch.cat([index for index, _ in groups]).argsort())
    return in_sequence(out.unflatten(0, query.shape[:2]), call.ranks)


def _repeat(x: Tensor, call: _Call) -> Tensor:
    """One key head for each query head: (B, H_kv, n, F) -> (BH, n, F)."""
    groups = call.num_heads // x.shape[1]
    return (x if groups == 1 else x.repeat_interleave(groups, 1)).flatten(0, 1)


def _gathered(query: Tensor, key: Tensor, value: Tensor, call: _Call) -> tuple[_Heads, Tensor]:
    """All but the near keys, and the queries (BH, R, D) that tell whether attention is local."""
    ranks, device, options = call.ranks, query.device, call.options
    shards, acc_dtype = ranks.shards, accumulation_dtype(key.dtype)
    candidate, exists = even_ranks(ranks.num_tokens, min(options.num_candidates, shards.total), ranks.first.device)
    given = [(key, candidate), (value, candidate), (query, call.middle_ranks(NUM_ROWS))]
    if options.num_probes:
        given.append((query, call.middle_ranks(options.num_probes)))
    keys, values, spread, *probes = gather_at(given, ranks)
    (sums,) = total([key.sum(2, keepdim=True, dtype=acc_dtype)], shards.group)
    num_keys: Tensor | int = shards.total
    divisor: Tensor | int = shards.total
    bias = valid = None
    if shards.key_mask is not None:
        num_keys = ranks.num_tokens.to(device).repeat_interleave(call.num_heads, 0)
        divisor = num_keys.clamp(min=1).unsqueeze(2)
        own = torch.arange(key.shape[2]) < ranks.num_valid[shards.rank, :, None]
        own, valid = (x.to(device).repeat_interleave(call.num_heads, 0) for x in (own, exists))
        bias = mask_bias(own, acc_dtype)[:, None, None]
    heads = _Heads(
        query.flatten(0, 1),
        _repeat(key, call),
        _repeat(value, call),
        _repeat(sums, call) / divisor,
        _repeat(keys, call),
        _repeat(values, call),
        valid,
        probes[0].flatten(0, 1) if probes else None,
        num_keys,
        bias,
        None,
    )
    return heads, spread.flatten(0, 1)


@torch.no_grad()
def _heads_with_near_keys(query: Tensor, heads: _Heads, call: _Call) -> Tensor | None:
    """`heads_with_near_keys` from queries (BH, R, D), of whose scores each process sums those of its own keys."""
    ranks, options, device = call.ranks, call.options, query.device
    if not options.block_size or options.near_share >= 1.0:
        return None
    enough = heads_with_enough_keys(heads.num_keys, options)
    if options.near_share == 0.0:
        return query.new_ones(len(query), dtype=torch.bool) if enough is None else enough
    query = query.to(heads.mean.dtype) * options.scale
    index, is_own = _near_keys_of(call.middle_ranks(NUM_ROWS), call, device)
    near = near_scores(query, take_alike(heads.key, index)).masked_fill(~is_own, -torch.inf)
    rank, exists = even_ranks(ranks.num_tokens, min(ranks.shards.total, NUM_KEYS), ranks.first.device)
    position, is_own = own_position(rank, ranks)
    position, is_own = (call.of_heads(x, device) for x in (position, is_own & exists))
    scores = query @ take_alike(heads.key, position).to(query.dtype).mT
    sums = sum_scores_(near, scores.masked_fill(~is_own.unsqueeze(1), -torch.inf))
    number = call.of_heads(exists.sum(1, keepdim=True).clamp(min=1), device)
    is_local = is_attention_local(_of_all(sums, ranks.shards), heads.num_keys / number, options.near_share)
    return is_local if enough is None else enough & is_local


def _near_keys_of(rank: Tensor, call: _Call, device: torch.device) -> tuple[Tensor, Tensor]:
    """The near keys of queries at ranks (B', R): positions of those of this process, and which it has, (., R, w)."""
    width, ranks = call.options.block_size, call.ranks
    found = own_position(near_index(rank // near_block_q(width), width, ranks.num_tokens), ranks)
    position, is_own = (call.of_heads(x, device) for x in found)
    return position, is_own


def _of_all(sums: ScoreSums, shards: Shards) -> ScoreSums:
    """The sums over the keys of all processes."""
    row_max = sums.row_max.squeeze(2).masked_fill(sums.near + sums.spread == 0.0, -torch.inf)
    row_max, near, spread = gather_plain(torch.stack((row_max, sums.near, sums.spread)), shards.group).unbind(1)
    largest = safe_row_max(row_max.amax(0))
    factor = (row_max - largest).exp()
    return ScoreSums(largest.unsqueeze(2), (near * factor).sum(0), (spread * factor).sum(0))


def _near_tokens(heads: _Heads, around: Tensor, call: _Call) -> _NearTokens:
    """Where near keys are in the keys of `with_near_tokens`.

    Blocks of queries begin at a rank that is a multiple of their length, so that the first block of a shard may begin
    with positions of queries of other processes. These have arbitrary queries and keys.
    """
    ranks, width, length, device = call.ranks, call.options.block_size, heads.query.shape[1], heads.query.device
    block_q = near_block_q(width)
    first, num_tokens = ranks.first[ranks.shards.rank, :, None].to(device), ranks.num_tokens.to(device)
    offset, padded = first % block_q, length + block_q - 1
    query_index = (torch.arange(padded, device=device) - offset).clamp(0, length - 1)
    block = torch.arange(ceil_div(padded, block_q), device=device) + first // block_q
    rank = near_index(block, width, num_tokens)
    index = call.of_heads(near_position(rank, around, ranks), device)
    of_probes, is_own = _near_keys_of(call.middle_ranks(call.options.num_probes), call, device)
    bias, dtype = None, heads.mean.dtype
    if is_fixed(heads.query) and heads.near is not None:
        near = heads.near[:, None, None]
        is_own = is_own & near
        bias = mask_bias(call.of_heads(rank < num_tokens.unsqueeze(2), device) & near, dtype)
    block_position = torch.arange(length, device=device) + offset
    query_index, block_position = (call.of_heads(x, device) for x in (query_index, block_position))
    return _NearTokens(index, bias, of_probes, mask_bias(is_own, dtype), query_index, block_position)


def _attend_alike(heads: _Heads, tokens: _NearTokens | None, numbers: Tensor, call: _Call) -> Tensor:
    """Attend in heads that all have near keys or all have none: (BH, n, Dv) in the dtype of the values.

    On accelerators all have room for near keys and for as many further landmarks.
    """
    options = call.options
    if tokens is None or is_fixed(heads.query):
        options = options._replace(num_landmarks=options.num_landmarks + options.block_size)
    # Between two collectives, as many heads as in every other process.
    step = max(1, _NUMEL // (heads.candidate_key.shape[1] * options.num_landmarks))
    outs = []
    for a in range(0, len(heads.query), step):
        some = slice(a, a + step)
        own = None if tokens is None else _of(tokens, some)
        outs.append(_attend_some(_of(heads, some), own, numbers, call._replace(options=options)))
    return torch.cat(outs)


def _attend_some(heads: _Heads, tokens: _NearTokens | None, numbers: Tensor, call: _Call) -> Tensor:
    """`_attend_alike` for as many heads as may be processed between two collectives."""
    options, few = call.options, heads.near if tokens is not None and is_fixed(heads.query) else None
    landmarks = choose_landmarks(heads.candidates(), numbers, options, few)
    exact = _sum_over_all(heads, landmarks, call)
    near = None if tokens is None else _near_sums(heads, tokens, call)
    coreset, weights = weigh_by_sums(landmarks, exact, options.scale, near)
    outs = []
    for some in _parts(heads, 0 if tokens is None else options.num_landmarks):
        own, own_coreset = _of(heads, some), coreset_of_heads(coreset, some)
        if tokens is None or weights is None:
            queries = own.with_keys(own.key[:, :0], own.value[:, :0])._replace(query=own.query).inputs()
            outs.append(attend_to_coreset(queries, own_coreset, None, options, 0.0).to(own.value.dtype))
            continue
        key_index, bias, _, _, query_index, block_position = _of(tokens, some)
        inputs = own._replace(query=take_alike(own.query, query_index), bias=None).inputs()
        plan = NearPlan(key_index, bias, near_block_q(options.block_size))
        near_keys = gather_near_keys(inputs, plan, weights.of_keys(inputs.key, some))
        out = attend_to_coreset(inputs, own_coreset, near_keys, options, 0.0).to(own.value.dtype)
        outs.append(take_alike(out, block_position))
    return torch.cat(outs)


def _parts(heads: _Heads, num_landmarks: int) -> list[slice]:
    """The heads that are processed at a time, for so many numbers of each key, or 0 if there are only those of keys."""
    count, length = heads.query.shape[:2]
    if backend(heads.query) != "cpu":
        step = ACCELERATOR_SCORES // (length * num_landmarks) if num_landmarks else count
    else:
        step = SCORES // (length * num_landmarks) if num_landmarks else TOKENS // length
    step = max(1, step)
    return [slice(a, min(a + step, count)) for a in range(0, count, step)]


def _sum_over_all(heads: _Heads, landmarks: Landmarks, call: _Call) -> SumsOverKeys:
    """`sum_over_keys` for the keys of all processes."""
    length, probe, sums = heads.query.shape[1], heads.probe, []
    for some in _parts(heads, 0):
        own = _of(heads, some)
        inputs = own.with_keys(own.key[:, :length], own.value[:, :length])._replace(bias=own.bias).inputs()
        queries = None if own.probe is None else own.probe.to(inputs.key.dtype)
        found = sum_over_keys(landmarks.key[some], queries, inputs, call.options.scale)
        partials = [x for x in found[:2] if x is not None]
        sums.append(Partial(torch.cat([x.out for x in partials], 1), torch.cat([x.lse for x in partials], 1)))
    out, lse = (torch.cat(x).to(landmarks.key.dtype) for x in zip(*sums, strict=True))
    out, lse = merge_partials(Partial(out, lse), call.ranks.shards.group)
    if probe is None:
        return SumsOverKeys(Partial(out, lse), None, None)
    sizes = (landmarks.key.shape[1], probe.shape[1])
    of_landmarks, of_probes = (Partial(*x) for x in zip(out.split(sizes, 1), lse.split(sizes, 1), strict=True))
    return SumsOverKeys(of_landmarks, of_probes, probe.to(heads.product_dtype))


def _near_sums(heads: _Heads, tokens: _NearTokens, call: _Call) -> NearSums:
    """What the weights of heads with near keys need, where each process adds what its own keys add to the rows."""
    index = tokens.of_probes
    key, value = (take_alike(x, index).flatten(1, 2) for x in (heads.key, heads.value))
    own = heads.with_keys(key, value).inputs()
    key_index = torch.arange(key.shape[1], device=key.device).view(1, *index.shape[1:]).expand(len(key), -1, -1)
    plan = NearPlan(key_index, tokens.bias_of_probes, 1)

    def of_rows(rows: ExactRows, similarity: Similarity, solved: Tensor) -> Tensor:
        return total([near_sums_of_rows(own, rows, plan, similarity, solved)], call.ranks.shards.group)[0]

    return NearSums(of_rows, own.mean, None)
