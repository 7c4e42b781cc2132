"""EVA (Zheng, Yuan, Wang, Kong: Efficient Attention via Control Variates, ICLR 2023).

A query sees the keys of its own window exactly (the set E of the paper) and one summary of every chunk P_c of the other
keys, all in one softmax. With queries and keys multiplied by sqrt(scale), and means over the valid tokens of a chunk:

- The key of a summary is the mean key k~_c, so its score is q . k~_c.
- The value of a summary is the random-feature estimate beta_c(omega_c) = sum_m xi(k_m, omega_c) v_m /
  sum_m xi(k_m, omega_c) over m in P_c, with xi(x, omega) = exp(omega . x - |x|^2 / 2).
- omega_c is drawn from the proposal N(mu_c, I) with mu_c = q~_c + k~_c, the chunk's mean query plus its mean key. With
  `proposal="learned"`, mu_c = W_q q~_c + W_k k~_c with two D x D matrices per head that start as the identity.

Departures from the paper, and the reasons:

- The log of the number of keys in the chunk is added to the score of a summary. In the paper a chunk weighs as much as
  one key, exp(q . k~_c), so attention to equal keys is not their mean. On activations of BERT (MiniLM, 512 tokens) this
  lowers the error from .37 to .33 with a window of 64 and 64 chunks, and from .28 to .23 with 128 and 128.
- omega_c is also drawn from the proposal when nothing is trained; `proposal="mean"` uses mu_c instead. Neither is
  always better: with 256 keys and summaries, the error in MiniLM is .238 (drawn) and .232 (mean) at 512 tokens, but .38
  and .45 at 4,096 tokens, where a chunk has many keys. By default the proposal has no parameters, because a pretrained
  checkpoint has none. The learned proposal has no bias and no normalisation, so that it starts as the default one.
- A chunk lies within a window or is a group of whole windows, so a window never contains only a part of a chunk. Chunks
  are groups of windows for more than window_size * num_landmarks tokens. Then the rest of the window's own group is
  summarised by groups of 1, 2, 4, ... windows. A query thus sees window_size keys and num_landmarks summaries, and
  log2(N / (window_size * num_landmarks)) more in longer sequences.
- Queries may be other tokens than the keys; in the paper a window has as many of both. Query i of m has the position
  floor(i n / m) among the n keys and sees the window at that position. The mean query of a chunk [a, b) is that of the
  queries from floor(a m / n) to ceil(b m / n) - 1, which is at least one. With m = n these are the chunk's own tokens.
- Causal form: the near field is the own block of window_size / 2 tokens, up to the query, and the block before it. The
  completed blocks before those are split into intervals of 1, 2, 4, ... blocks as in `hf_efficient_attn.ops.causal`.
  Each interval has num_landmarks / 2 summaries of its own tokens. A fixed grid of chunks would cost N^2 / chunk size.

EVA never switches by length. With up to window_size keys, all of them are in the near field and the output is exact.
The computation is in `hf_efficient_attn.ops.chunks`.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.heads import unflatten_heads
from hf_efficient_attn.methods._shared.registry import AttentionOptions, register_method
from hf_efficient_attn.ops.blocks import ceil_div
from hf_efficient_attn.ops.chunks import (
    Heads,
    Masks,
    interval_attention,
    plan_intervals,
    window_attention,
    window_sizes,
)
from hf_efficient_attn.ops.constants import constant
from hf_efficient_attn.ops.exact import exact_decode
from hf_efficient_attn.ops.partial import accumulation_dtype
from hf_efficient_attn.ops.random import Seed, head_slice, normal

# Streams of random numbers: one for the chunks, and one for each level of groups or intervals.
_CHUNKS = 40
_LEVELS = _CHUNKS + 1
_MAPS = ("proposal_query", "proposal_key")

# bool (B, Nq), the queries that count and have an output; None if all do. "keys": the key mask if there are as many
# queries as keys, as in self-attention, otherwise None.
QueryMask: TypeAlias = Tensor | Literal["keys"] | None


@dataclass(frozen=True, kw_only=True)
class EvaConfig(MethodConfig):
    """Hyperparameters of EVA. Up to window_size keys the output is exact (causal: one less if it is odd)."""

    method = "eva"
    title = "EVA"
    paper = "Zheng, Yuan, Wang, Kong, ICLR 2023"
    year = 2023
    causal = True
    rectangular = True
    decodes_exactly = True
    learned_parameters = _MAPS
    summary = "a window exactly, and one control variate for each chunk of the other keys"
    paper_url = "https://arxiv.org/abs/2302.04542"
    near = "a window"
    far = "one control variate per chunk"

    window_size: int = option(128, "Keys that each query attends to exactly: the near field.", minimum=1)
    num_landmarks: int = option(128, "Chunks that the keys are cut into. One key stands for each chunk.", minimum=1)
    proposal: str = option(
        "normal",
        "'normal': omega of a chunk is drawn around the sum of its mean query and its mean key. 'mean': omega is that "
        "sum. 'learned': omega is drawn around the sum of learned linear maps of the two means.",
        choices=("normal", "mean", "learned"),
    )
    seed: int = option(0, "Seed of the draws of 'normal' and 'learned'.", minimum=0)

    @property
    def exact_length(self) -> int:
        """The window, or more if the chunks next to it have one key each. The smaller number of the two forms counts.

        The causal form has two blocks of half a window, so an odd window counts as one key less there.
        """
        block, chunks = max(1, self.window_size // 2), max(1, self.num_landmarks // 2)
        # An interval of 1, 2, 4, ... blocks is exact if it has at least as many chunks as keys.
        causal = block * (1 + (1 << (chunks // block).bit_length()))
        return min(causal, self.window_size * max(1, self.num_landmarks // self.window_size))

    def with_budget(self, columns: int) -> "EvaConfig":
        """Half of the budget for the window, half for summaries."""
        near = self.check_budget(columns, 2) // 2
        return replace(self, window_size=near, num_landmarks=columns - near)


def initial_parameters(
    config: EvaConfig, *, num_heads: int, head_dim: int, value_dim: int, max_length: int
) -> dict[str, Tensor]:
    """W_q and W_k (H, D, D) of a learned proposal. They are the identity, so that conversion starts from q~ + k~."""
    if config.proposal != "learned":
        return {}
    return {name: torch.eye(head_dim).repeat(num_heads, 1, 1) for name in _MAPS}


def _maps(config: EvaConfig, query: Tensor, options: AttentionOptions) -> list[Tensor | None]:
    """W_q and W_k (H, D, D) in the accumulation dtype; None if the proposal is not learned."""
    (_, num_heads, _, head_dim), learned = query.shape, config.proposal == "learned"
    maps: list[Tensor | None] = []
    for name in _MAPS:
        x = options.parameters.get(name)
        if learned != (x is not None) or (x is not None and x.shape != (num_heads, head_dim, head_dim)):
            raise UnsupportedAttentionError(
                f"eva: {name} {None if x is None else tuple(x.shape)} does not match proposal={config.proposal!r} and "
                f"{num_heads} heads with head_dim={head_dim}: give a tensor (num_heads, head_dim, head_dim) with "
                "proposal='learned', and none with any other proposal"
            )
        maps.append(None if x is None else x.to(accumulation_dtype(query.dtype)))
    return maps


def _noise(config: EvaConfig, query: Tensor, options: AttentionOptions, num_chunks: int, stream: int) -> Tensor | None:
    """Standard normal numbers (H, num_chunks, D) for query (B, H, Nq, D); None if omega is not drawn.

    The numbers of a chunk depend on its index, not on the number of chunks.
    """
    if config.proposal == "mean":
        return None
    _, num_heads, _, head_dim = query.shape
    seed, dtype, device = options.seed, accumulation_dtype(query.dtype), query.device
    # What is kept is rounded up, so that sequences of all lengths have few different ones.
    sizes = 1 << (num_chunks - 1).bit_length(), num_heads, head_dim, seed, stream, dtype
    return constant(_draw, *sizes, device=device)[:, :num_chunks]


def _draw(
    num_chunks: int,
    num_heads: int,
    head_dim: int,
    seed: Seed,
    stream: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    first, total = head_slice(seed, num_heads)
    drawn = normal((num_chunks, total, head_dim), seed, stream, device)[:, first : first + num_heads]
    return drawn.to(dtype).transpose(0, 1).contiguous()


def _resolve(query_mask: QueryMask, query: Tensor, key: Tensor, key_mask: Tensor | None) -> tuple[bool, Tensor | None]:
    """Whether the queries are the keys' own tokens, and the query mask (B, Nq) or None."""
    if isinstance(query_mask, Tensor) or query_mask is None:
        return False, query_mask
    return query.shape[2] == key.shape[2], key_mask if query.shape[2] == key.shape[2] else None


def forward(
    config: EvaConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    query_mask: QueryMask = "keys",
) -> Tensor:
    """Fast form; see `register_method`. FLuRKA, whose keys are not tokens, also gives the mask of the queries."""
    same_tokens, query_mask = _resolve(query_mask, query, key, options.key_mask)
    masked = None if query_mask is None else ~query_mask[:, None, :, None]
    query = query if masked is None else query.masked_fill(masked, 0.0)
    heads, call = Heads(query, key, value, *_maps(config, query, options)), (options.scale, options.dropout_p)
    if options.is_causal:
        block = max(1, config.window_size // 2)
        plan = plan_intervals(query.shape[2], block, max(1, config.num_landmarks // 2))
        noises = [_noise(config, query, options, x.num_chunks, _LEVELS + i) for i, x in enumerate(plan)]
        out = interval_attention(
            heads, options.key_mask, noises, plan=plan, block=block, scale=call[0], dropout_p=call[1]
        )
    else:
        is_masked = options.key_mask is not None
        sizes = window_sizes(key.shape[2], config.window_size, config.num_landmarks, is_masked)
        noises = [_noise(config, query, options, n, _CHUNKS + i) for i, n in enumerate(sizes.summaries)]
        masks = Masks(options.key_mask, query_mask, same_tokens)
        out = window_attention(heads, masks, noises, sizes=sizes, scale=call[0], dropout_p=call[1])
    out = unflatten_heads(out, query.shape)
    return out if masked is None else out.masked_fill(masked, 0.0)


def decode(config: EvaConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """The last few queries attend to all cached keys exactly, because a cache has no queries for the summaries."""
    return exact_decode(query, key, value, options.key_mask, scale=options.scale, dropout_p=options.dropout_p)


def naive(
    config: EvaConfig,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    query_mask: QueryMask = "keys",
) -> Tensor:
    """Readable form: one batch row at a time without its padding, chunk by chunk, with dense scores."""
    out = query.new_zeros(*query.shape[:3], value.shape[3], dtype=torch.float64)
    maps = [None if x is None else x.double() for x in _maps(config, query, options)]
    query_mask, root = _resolve(query_mask, query, key, options.key_mask)[1], abs(options.scale) ** 0.5
    for b in range(query.shape[0]):
        valid_q, valid_k = (
            x.new_ones(x.shape[2], dtype=torch.bool) if mask is None else mask[b]
            for x, mask in ((query, query_mask), (key, options.key_mask))
        )
        q, k, v = query[b][:, valid_q].double(), key[b][:, valid_k].double(), value[b][:, valid_k].double()
        num_queries, num_keys = q.shape[1], k.shape[1]
        if not num_queries or not num_keys:
            continue
        # The position of each query among the keys.
        position = torch.arange(num_queries, device=q.device) * num_keys // num_queries
        all_positions = torch.arange(num_keys, device=q.device)
        near, chunks = (_causal_chunks if options.is_causal else _bidirectional_chunks)(config, all_positions)
        seen, keys, values, bias = [near[position]], [k], [v], [q.new_zeros(num_keys)]
        for start, stop, seen_from, stream, number in chunks:
            noise = _noise(config, q[None], options, number + 1, stream)
            queries = q[:, start * num_queries // num_keys : ceil_div(stop * num_queries, num_keys)]
            means = queries.mean(1), k[:, start:stop].mean(1)
            mu = [x if w is None else torch.einsum("hde,he->hd", w, x) for x, w in zip(means, maps, strict=True)]
            omega = root * (mu[0] * (1 if options.scale >= 0 else -1) + mu[1]) + (
                0.0 if noise is None else noise[:, -1]
            )
            scaled = root * k[:, start:stop]
            xi = (torch.einsum("hd,hmd->hm", omega, scaled) - scaled.square().sum(-1) / 2).softmax(-1)
            keys.append(means[1][:, None])
            values.append(torch.einsum("hm,hmd->hd", xi, v[:, start:stop])[:, None])
            bias.append(q.new_tensor([stop - start]).log())
            seen.append(seen_from[position, None])
        scores = q @ torch.cat(keys, 1).transpose(1, 2) * options.scale + torch.cat(bias)
        weights = scores.masked_fill(~torch.cat(seen, 1), -torch.inf).softmax(-1)
        out[b, :, valid_q] = weights @ torch.cat(values, 1)
    return out.to(value.dtype)


class _Chunk(NamedTuple):
    """Tokens start .. stop - 1, bool (N,) the positions that see the summary, and the stream and number of its draw."""

    start: int
    stop: int
    seen_from: Tensor
    stream: int
    number: int


def _bidirectional_chunks(config: EvaConfig, position: Tensor) -> tuple[Tensor, list[_Chunk]]:
    """The near field, bool (N, N), and the chunks for the positions (N,) of all keys."""
    num_keys, window_size, landmarks = len(position), config.window_size, config.num_landmarks
    window, num_windows = position // window_size, max(1, ceil_div(num_keys, window_size))
    chunks, level = [], 0
    while ceil_div(num_windows, 1 << level) > landmarks:
        size = window_size << level
        for index, start in enumerate(range(0, num_keys, size)):
            # Seen from the other half of the next larger group, if that lies in the window's own chunk.
            seen_from = window >> level == index ^ 1
            chunks.append(_Chunk(start, min(start + size, num_keys), seen_from, _LEVELS + level, index))
        level += 1
    size, parts = window_size << level, max(1, min(window_size, landmarks // num_windows))
    for index in range(ceil_div(num_keys, size) * parts):
        group, part = divmod(index, parts)
        start, stop = (min(num_keys, group * size + p * size // parts) for p in (part, part + 1))
        if start < stop:
            chunks.append(_Chunk(start, stop, window >> level != group, _CHUNKS, index))
    return window[:, None] == window, chunks


def _causal_chunks(config: EvaConfig, position: Tensor) -> tuple[Tensor, list[_Chunk]]:
    """The same for the causal form."""
    num_keys, block_size = len(position), max(1, config.window_size // 2)
    block, chunks = position // block_size, []
    for level in range(num_keys.bit_length()):
        interval, completed = block_size << level, (block - 1).clamp(min=0) >> level
        size = ceil_div(interval, min(interval, max(1, config.num_landmarks // 2)))
        for number in range(0, num_keys // interval, 2):
            seen_from = (completed & 1 == 1) & (completed - 1 == number)
            for index in range(ceil_div(interval, size)):
                start = number * interval + index * size
                stop = min(start + size, (number + 1) * interval)
                chunks.append(_Chunk(start, stop, seen_from, _LEVELS + level, index))
    near = (position <= position[:, None]) & (block >= block[:, None] - 1)
    return near, [chunk for chunk in chunks if chunk.seen_from.any()]


register_method(EvaConfig, forward=forward, naive=naive, decode=decode, initial_parameters=initial_parameters)
