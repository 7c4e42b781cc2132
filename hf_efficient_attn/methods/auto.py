"""auto (this package): exact attention where approximation does not pay or is not accurate enough, else nearfar.

- Up to the length at which nearfar becomes faster on this machine (`hf-efficient-attn crossover`), attention is exact.
- In longer sequences the error of each head is bounded from the exact rows of some queries that the weights were not
  fitted to (`hf_efficient_attn.ops.row_error`). A head whose bound exceeds `max_error` is computed again with more
  columns if that can be expected to suffice, and exactly otherwise. A small copy of the problem, some evenly spaced
  keys and queries, first tells which heads are hopeless.
- These decisions depend on the data of a call. They are made in the bidirectional form when no gradient is wanted. With
  a gradient, under `torch.compile` and in the causal form, in which later tokens would decide about earlier ones, every
  head has `columns` columns. `hf_efficient_attn.calibrate` chooses methods and budgets of layers for these cases.

The crossover is that of one sequence, and each sequence of a padded batch is judged by its own number of tokens, so
that outputs do not depend on the batch. Under `torch.compile`, and in the causal form, in which the number of later
tokens must not matter, it is the padded length.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hf_efficient_attn.methods._shared.causal_coreset import decode_exactly, forward_causal, naive_causal
from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.crossover import LARGE_DIM, crossover_length
from hf_efficient_attn.methods._shared.heads import FlatHeads, flatten_heads, unflatten_heads
from hf_efficient_attn.methods._shared.registry import AttentionOptions, register_method
from hf_efficient_attn.methods._shared.weighted_coreset import naive_bidirectional
from hf_efficient_attn.ops.blocks import ceil_div, take, valid_first
from hf_efficient_attn.ops.coreset import candidate_positions
from hf_efficient_attn.ops.exact import exact_attention
from hf_efficient_attn.ops.partial import accumulation_dtype
from hf_efficient_attn.ops.row_error import Rows, exact_rows, row_error, sample_rows
from hf_efficient_attn.ops.sampling import stratified_ranks
from hf_efficient_attn.ops.weighted_coreset import CoresetOptions, weighted_coreset_attention

# Queries whose exact rows fit the weights, and other ones whose exact rows bound the error.
_NUM_PROBES, _NUM_ROWS = 64, 64
# The small copy of the problem: keys, queries and landmarks; and the multiple of max_error from which on its error is
# hopeless for the whole problem, which has more landmarks, near keys and fitted weights.
_COPY_KEYS, _COPY_QUERIES, _COPY_LANDMARKS, _HOPELESS = 512, 64, 64, 8.0
# The largest multiple of the columns, and the share of the error that is left with twice as many.
_MAX_GROWTH, _LEFT_BY_DOUBLING = 4, 0.7
# Numbers of keys that are copied at a time when some heads are computed: 4 MiB of float32.
_CHUNK_NUMEL = 1 << 20
# Of so many heads of a sequence, one is tried first.
_HEADS_PER_SCOUT = 8
_NEAR_LIMIT = 2048


@dataclass(frozen=True, kw_only=True)
class AutoAttentionConfig(MethodConfig):
    """Hyperparameters of auto. Sequences in which approximation does not pay are computed exactly."""

    method = "auto"
    title = "auto"
    paper = "this package"
    year = 2026
    causal = True
    rectangular = True
    summary = "exact attention where it is faster or an error bound asks for it, else nearfar"
    near = "a window, or all keys"
    far = "landmarks with fitted weights, or none"
    default_rank = 1
    default_for = ("compare", "demo")

    columns: int = option(256, "Near keys and landmarks of each query, before a head gets more.", minimum=1)
    max_error: float = option(
        0.1, "Bound of each head's relative error in the operator norm. 0: no bound, `columns` for all.", minimum=0
    )
    crossover: int = option(
        0, "Number of keys up to which attention is exact. 0: what was measured on this machine.", minimum=0
    )
    seed: int = option(0, "Seed of the landmarks and of the queries that bound the error.", minimum=0)

    @property
    def exact_length(self) -> int:
        """The number of keys up to which every call is exact, on this machine's processor and in float32."""
        return self.exact_up_to(LARGE_DIM, torch.float32, False, torch.device("cpu"))

    def exact_up_to(self, total_dim: int, dtype: torch.dtype, is_causal: bool, device: torch.device) -> int:
        """The number of keys up to which calls are exact, for H * D = `total_dim`."""
        length = self.crossover or crossover_length(
            "nearfar",
            total_dim,
            dtype=dtype,
            is_causal=is_causal,
            device=device,
            relative_cost=self.columns / AutoAttentionConfig.columns,
        )
        return max(length, self.columns)

    def with_budget(self, columns: int) -> "AutoAttentionConfig":
        """A copy that begins with `columns` columns. Heads above the error bound have more."""
        return dataclasses.replace(self, columns=self.check_budget(columns))


def forward(
    config: AutoAttentionConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """Fast form; see `register_method`."""
    total_dim = query.shape[1] * query.shape[3]
    length = config.exact_up_to(total_dim, query.dtype, options.is_causal, query.device)
    if key.shape[2] <= length:
        return _exact(query, key, value, options)
    mask, by_shape = options.key_mask, options.is_causal or torch.compiler.is_compiling()
    if mask is None or by_shape or not bool((short := mask.sum(1) <= length).any()):
        return _approximate(config, query, key, value, options)
    out = value.new_empty(*query.shape[:3], value.shape[3])
    for rows, form in ((short, _exact), (~short, lambda *tensors: _approximate(config, *tensors))):
        if bool(rows.any()):
            out[rows] = form(query[rows], key[rows], value[rows], options._replace(key_mask=mask[rows]))
    return out


def _exact(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Exact attention: PyTorch's own where it takes the mask and needs no memory for all pairs."""
    mask, scale, dropout_p = options.key_mask, options.scale, options.dropout_p
    if dropout_p > 0.0 or (mask is not None and options.is_causal) or query.shape[3] != value.shape[3]:
        flat = flatten_heads(query, key, value, mask)
        out = exact_attention(*flat, is_causal=options.is_causal, scale=scale, dropout_p=dropout_p)
        return unflatten_heads(out, query.shape)
    if mask is None:
        return scaled_dot_product_attention(query, key, value, is_causal=options.is_causal, scale=scale)
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None], scale=scale)
    return out.masked_fill(~mask.any(1)[:, None, None, None], 0.0)


def _approximate(
    config: AutoAttentionConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """Attention in sequences that are longer than the crossover."""
    if options.is_causal:
        return forward_causal(config.columns, query, key, value, options)
    shape, flat = query.shape, flatten_heads(query, key, value, options.key_mask)
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if not config.max_error or torch.compiler.is_compiling() or needs_grad or options.dropout_p:
        return unflatten_heads(_nearfar(flat, config.columns, options), shape)
    return unflatten_heads(_bounded(config, flat, shape[1], options)[0], shape)


def _coreset(columns: int, batch: int, options: AttentionOptions) -> CoresetOptions:
    """The default hyperparameters of nearfar. With the number of heads as `batch`, all have the same random numbers."""
    near = columns // 8
    return CoresetOptions(
        num_landmarks=columns - near,
        num_candidates=max(1024, 4 * columns),
        num_refinements=3,
        num_probes=_NUM_PROBES,
        block_size=near,
        near_limit=_NEAR_LIMIT,
        scale=options.scale,
        seed=options.seed,
        batch=batch,
    )


def _nearfar(heads: FlatHeads, columns: int, options: AttentionOptions) -> Tensor:
    """The bidirectional form of nearfar."""
    return weighted_coreset_attention(*heads, _coreset(columns, len(heads.query), options), options.dropout_p)


def _select(heads: FlatHeads, index: Tensor) -> FlatHeads:
    """Some of the heads, all of them without a copy."""
    if len(index) == heads.query.shape[0]:
        return heads
    return FlatHeads(*(None if x is None else x[index] for x in heads))  # type: ignore[arg-type]


def _bounded(
    config: AutoAttentionConfig, heads: FlatHeads, num_heads: int, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Nearfar with as many columns as every head needs, and exact attention where that is not enough.

    Returns:
        The output (BH, Nq, Dv), and the columns of every head, int64 (BH,); 0 for an exact head.
    """
    batch_heads, q_len, _ = heads.query.shape
    out = heads.value.new_empty(batch_heads, q_len, heads.value.shape[2])
    columns_of = torch.zeros(batch_heads, dtype=torch.int64, device=out.device)
    num_keys = _num_keys(heads)
    error = _error_of_copy(heads, num_keys, options)
    hopeless = error > _HOPELESS * config.max_error
    step = max(1, _CHUNK_NUMEL // heads.key[0].numel())
    largest = (num_keys // 2).clamp(max=_MAX_GROWTH * config.columns)

    def attempt(index: Tensor, columns: int) -> Tensor:
        """Compute heads, keep those within the bound, and return those for which twice the columns may suffice."""
        bounds = []
        for some in index.split(step):
            own = _select(heads, some)
            part = _nearfar(own, columns, options)
            bounds.append(_bound(own, part, options))
            good = bounds[-1] <= config.max_error
            out[some[good]], columns_of[some[good]] = part[good], columns
        bound = torch.cat(bounds)
        good = bound <= config.max_error
        limit = largest[index]
        left = bound * _LEFT_BY_DOUBLING ** (limit / columns).clamp(min=1.0).log2()
        return index[~good & (left <= config.max_error) & (2 * columns <= limit)]

    # If even the most promising heads of a sequence need exact attention, the others are not tried.
    rank = error.view(-1, num_heads).argsort(1).argsort(1).flatten()
    scouts = rank < ceil_div(num_heads, _HEADS_PER_SCOUT)
    todo = (scouts & ~hopeless).nonzero()[:, 0]
    again = attempt(todo, config.columns) if len(todo) else todo
    useful = columns_of > 0
    useful[again] = True
    useful = useful.view(-1, num_heads).any(1).repeat_interleave(num_heads)
    todo = (useful & ~scouts & ~hopeless).nonzero()[:, 0]
    again = torch.cat((again, attempt(todo, config.columns))) if len(todo) else again
    columns = config.columns
    while len(again):
        columns *= 2
        again = attempt(again.sort().values, columns)
    exact = (columns_of == 0).nonzero()[:, 0]
    for some in exact.split(step) if len(exact) else ():
        own = _select(heads, some)
        query, key, value = (x.unsqueeze(1) for x in own[:3])
        out[some] = _exact(query, key, value, options._replace(key_mask=own.key_mask))[:, 0]
    return out, columns_of


def _num_keys(heads: FlatHeads) -> Tensor:
    """The number of valid keys of every head, int64 (BH,)."""
    batch_heads, kv_len, _ = heads.key.shape
    if heads.key_mask is None:
        return torch.full((batch_heads,), kv_len, device=heads.key.device)
    return heads.key_mask.sum(1)


def _error_of_copy(heads: FlatHeads, num_keys: Tensor, options: AttentionOptions) -> Tensor:
    """The error (BH,) of a few landmarks on some evenly spaced keys and queries; 0 for sequences that are as short."""
    query, key, value, mask = heads
    if key.shape[1] <= 2 * _COPY_KEYS:
        return torch.zeros(len(query), dtype=accumulation_dtype(query.dtype), device=query.device)
    same = query.shape[1] == key.shape[1]
    position, valid = candidate_positions(mask, key.shape[1], _COPY_KEYS, key.device)
    row, row_valid = candidate_positions(mask if same else None, query.shape[1], _COPY_QUERIES, query.device)
    position, row = (x.expand(query.shape[0], -1) for x in (position, row))
    small = FlatHeads(take(query, row), take(key, position), take(value, position), valid)
    coreset = CoresetOptions(
        num_landmarks=_COPY_LANDMARKS,
        num_candidates=_COPY_KEYS // 2,
        num_refinements=1,
        num_probes=0,
        block_size=0,
        near_limit=0,
        scale=options.scale,
        seed=options.seed,
        batch=query.shape[0],
    )
    rough = weighted_coreset_attention(*small, coreset)
    exact = exact_attention(*small, is_causal=False, scale=options.scale)
    return row_error(rough, exact, row_valid).estimate.masked_fill(num_keys <= 2 * _COPY_KEYS, 0.0)


def _bound(heads: FlatHeads, approximate: Tensor, options: AttentionOptions) -> Tensor:
    """An upper bound (BH,) of the error of each head, from rows that the weights were not fitted to."""
    query, mask = heads.query, heads.key_mask
    (batch_heads, q_len, _), device = query.shape, query.device
    if mask is None or q_len != heads.key.shape[1]:
        mask = torch.ones(1, q_len, dtype=torch.bool, device=device)
    half = torch.full((len(mask), 1), 0.5, dtype=torch.float64, device=device)
    probe = valid_first(mask).gather(1, stratified_ranks(_NUM_PROBES, mask.sum(1, keepdim=True), half))
    available = mask.scatter(1, probe, False)
    rows = sample_rows(len(available), q_len, _NUM_ROWS, available, num_heads=1, seed=options.seed, device=device)
    rows = Rows(*(x.expand(batch_heads, -1) if isinstance(x, Tensor) else x for x in rows))  # type: ignore[arg-type]
    exact = exact_rows(*heads[:3], rows, heads.key_mask, is_causal=False, scale=options.scale)
    return row_error(take(approximate, rows.queries), exact, rows.valid, rows.population).bound


def naive(config: AutoAttentionConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form: dense matrices, with the decisions of `forward` about each sequence and head."""
    length = config.exact_up_to(query.shape[1] * query.shape[3], query.dtype, options.is_causal, query.device)
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    outs = []
    for b in range(query.shape[0]):
        q, k, v = (x[b : b + 1] for x in (query, key, value))
        own = options._replace(key_mask=None if options.key_mask is None else options.key_mask[b : b + 1])
        num_keys = k.shape[2] if own.key_mask is None else int(own.key_mask.sum())
        exact = CoresetOptions(num_keys, 1, 0, 0, 0, 0, options.scale, 0, 1)
        if options.is_causal:
            outs.append(naive_causal(k.shape[2] if k.shape[2] <= length else config.columns, q, k, v, own))
        elif num_keys <= length:
            outs.append(naive_bidirectional(exact, q, k, v, own))
        elif not config.max_error or needs_grad:
            outs.append(_naive_nearfar(config.columns, q, k, v, own))
        else:
            columns = _bounded(config, flatten_heads(q, k, v, own.key_mask), q.shape[1], own)[1].tolist()
            forms = []
            for h, count in enumerate(columns):
                head = q[:, h : h + 1], k[:, h : h + 1], v[:, h : h + 1]
                coreset = _coreset(count, 1, own) if count else exact
                forms.append(naive_bidirectional(coreset, *head, own))
            outs.append(torch.cat(forms, 1))
    return torch.cat(outs)


def _naive_nearfar(columns: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """The readable form of `_nearfar` for one sequence, one head at a time as they have the same random numbers."""
    coreset = _coreset(columns, 1, options)
    heads = zip(*(x.split(1, dim=1) for x in (query, key, value)), strict=True)
    return torch.cat([naive_bidirectional(coreset, q, k, v, options) for q, k, v in heads], 1)


register_method(AutoAttentionConfig, forward=forward, naive=naive, decode=decode_exactly)
