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
  floor(i n / m) among the n keys and sees the window at that position. The mean query of a chunk [a, b) averages the
  queries from floor(a m / n) to ceil(b m / n) - 1, at least one. With m = n these are the chunk's own tokens.
- Causal form: the near field is the query's block of window_size / 2 tokens, up to the query, and the block before it.
  All earlier blocks are split into intervals of 1, 2, 4, ... blocks. Each interval has num_landmarks / 2 summaries of
  its tokens. A fixed grid of chunks would cost N^2 / chunk size.

EVA never switches by length. With up to window_size keys, all of them are in the near field and the output is exact.
The computation is in `hf_efficient_attn.ops.control_variates.chunks`.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.config import AttentionOptions, MethodConfig, option
from hf_efficient_attn.methods._shared.heads import by_heads, decode_exactly, without_padding
from hf_efficient_attn.methods._shared.registry import check_parameters, register_method
from hf_efficient_attn.ops.backends.devices import accumulation_dtype
from hf_efficient_attn.ops.control_variates.bidirectional import chunked_attention
from hf_efficient_attn.ops.control_variates.causal import chunked_causal_attention
from hf_efficient_attn.ops.control_variates.chunks import ChunkOptions
from hf_efficient_attn.ops.control_variates.naive import interval_chunks, summary_attention_naive, window_chunks
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.shards import head_slice

_MAPS = ("proposal_query", "proposal_key")
# The stream of random numbers of the chunks. The levels of groups or intervals use the streams after it.
_STREAM = 40


@dataclass(frozen=True, kw_only=True)
class EvaConfig(MethodConfig):
    """Hyperparameters of EVA. Up to window_size keys the output is exact (causal: one less if it is odd)."""

    method = "eva"
    title = "EVA"
    paper = "Zheng, Yuan, Wang, Kong, ICLR 2023"
    year = 2023
    causal = True
    rectangular = True
    budget = (("window_size", 1), ("num_landmarks", 1))
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
        """The window, or more if the chunks next to it have one key each: the smaller number of the two forms.

        The causal form has two blocks of half a window, so an odd window counts as one key less there.
        """
        block = max(1, self.window_size // 2)
        chunks = max(1, self.num_landmarks // 2)
        # An interval of 1, 2, 4, ... blocks is exact if it has at least as many chunks as keys.
        causal = block * (1 + (1 << (chunks // block).bit_length()))
        return min(causal, self.window_size * max(1, self.num_landmarks // self.window_size))


def chunk_noise(
    num_heads: int, head_dim: int, dtype: torch.dtype, draws: Draws | None, stream: int, count: int
) -> Tensor | None:
    """Draw standard normal numbers (H, count, D) of chunks; None without draws.

    The numbers of a chunk depend on its index, not on the number of chunks.
    """
    if draws is None:
        return None
    first, total = head_slice(draws.seed, num_heads)
    # The numbers are kept for later calls. A power of two of them serves sequences of many lengths.
    drawn = draws.normal((1 << (count - 1).bit_length(), total, head_dim), _STREAM + stream)
    return drawn[:count, first : first + num_heads].transpose(0, 1).to(dtype)  # (H, count, D)


def initial_parameters(config: EvaConfig, *, num_heads: int, head_dim: int, **_: int) -> dict[str, Tensor]:
    """Make W_q and W_k (H, D, D) of a learned proposal. They are the identity, so conversion starts from q~ + k~."""
    if config.proposal != "learned":
        return {}
    return {name: torch.eye(head_dim, dtype=torch.float32).repeat(num_heads, 1, 1) for name in _MAPS}  # (H, D, D)


def _options(config: EvaConfig, query: Tensor, options: AttentionOptions) -> ChunkOptions:
    """Make the options of the forms for queries (B, H, Nq, D)."""
    check_parameters(config, query, options)
    _, num_heads, _, head_dim = query.shape
    dtype = accumulation_dtype(query.dtype)
    query_map, key_map = (None if x is None else x.to(dtype) for x in map(options.parameters.get, _MAPS))  # (H, D, D)
    draws = None if config.proposal == "mean" else Draws(options.seed, query.device)
    draw = functools.partial(chunk_noise, num_heads, head_dim, dtype, draws)
    sizes = config.window_size, config.num_landmarks
    return ChunkOptions(*sizes, (query_map, key_map), draw, options.scale, options.dropout_p)


def forward(
    config: EvaConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, *query_mask: Tensor
) -> Tensor:
    """Fast form; see `register_method`.

    FLuRKA, whose keys are not tokens, also passes the mask of the queries, bool (B, Nq).
    """
    chosen = _options(config, query, options)
    if options.is_causal:
        form = functools.partial(chunked_causal_attention, options=chosen)
        return by_heads(form, query, key, value, options, moves_valid_first=True)  # (B, H, N, Dv)
    form = functools.partial(chunked_attention, options=chosen)
    return without_padding(form, query, key, value, options, 0, *query_mask)  # (B, H, Nq, Dv)


def naive(
    config: EvaConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, *query_mask: Tensor
) -> Tensor:
    """Readable form: sequences without their padding, chunk by chunk, with dense scores."""
    cut = interval_chunks if options.is_causal else window_chunks
    form = functools.partial(summary_attention_naive, options=_options(config, query, options), cut=cut)
    return without_padding(form, query, key, value, options, 0, *query_mask)  # (B, H, Nq, Dv)


register_method(EvaConfig, forward=forward, naive=naive, decode=decode_exactly, initial_parameters=initial_parameters)
