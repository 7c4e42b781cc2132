"""Reformer (Kitaev, Kaiser, Levskaya, ICLR 2020): attention within chunks of tokens sorted by a random hash, in rounds.

Which equation is which line (`ops.lsh_rounds` throughout), and where this departs from the paper:

- Hash: h(x) = argmax([xR; -xR]) ("Locality sensitive hashing", section 2), in `bucket_codes`. With about 2 l / m
  buckets for chunks of m tokens one such hash costs l^2 / m; here a bucket is a pair of hashes of about the square root
  of as many values each.
- Sort by bucket, then by position, and chunks of equal size ("LSH attention", Figure 2): `sort_codes`. The paper's
  chunk sees itself and the one before, which suits a causal order; here it sees itself and half of each neighbour, the
  same number of keys. Queries and keys that are not shared are sorted apart, and a chunk of queries sees the run of
  keys around the place where its middle query would stand among the keys: `run_starts`. The mean of the keys, which
  no softmax depends on, is taken off before they are hashed: `plan_rounds`.
- Rounds merged by their normalisers with pairs counted once (Eq. 6-7): `rounds_attention`. A pair counts in the first
  round that holds it, where the paper gives it the weight 1 / N_ij in each of N_ij rounds: the same sum.
- Shared queries and keys ("Shared-QK attention"): `shared_query_key`, k_j = q_j / |q_j|, and a token attends to itself
  only where it has nothing else.

There is no causal form. The paper masks the pairs of the future, but sorts all tokens together: which chunk a pair
falls into, and so which of its past a query sees, depends on the tokens that follow. Its outputs change with the
future, and a decoder that is trained so learns to rely on what it will not have when it generates.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.registry import AttentionOptions, register_method
from hf_efficient_attn.ops.exact import exact_attention
from hf_efficient_attn.ops.lsh_rounds import Rounds, dense_pairs, plan_rounds, rounds_attention
from hf_efficient_attn.ops.near_far import dense_attention
from hf_efficient_attn.ops.partial import accumulation_dtype


@dataclass(frozen=True, kw_only=True)
class ReformerConfig(MethodConfig):
    """Hyperparameters of the rounds of hashing. Up to 2 * block_size * num_hashes keys the output is exact."""

    method = "reformer"
    title = "Reformer"
    paper = "Kitaev, Kaiser, Levskaya, ICLR 2020"
    year = 2020
    causal = False
    rectangular = True
    summary = "chunks of tokens sorted by a random hash, in rounds whose pairs count once"

    block_size: int = option(64, "Queries of a chunk; in each round they see 2 * block_size keys.", minimum=1)
    num_hashes: int = option(2, "Rounds, each with a hash of its own.", minimum=1)
    shared_query_key: bool = option(
        False,
        "The keys are the queries at length 1, what is given as keys is ignored, and a token attends to itself only "
        "where it has nothing else: an attention of its own, for training.",
    )
    seed: int = option(0, "Seed of the hashes. In training they are redrawn at every call.", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.shared_query_key, bool):
            raise UnsupportedAttentionError(
                f"{self.method}: shared_query_key={self.shared_query_key!r} must be True or False"
            )

    def with_budget(self, columns: int) -> "ReformerConfig":
        """The same number of rounds, as far as each can have two columns, and chunks to suit."""
        rounds = min(self.num_hashes, self.check_budget(columns, 2) // 2)
        return dataclasses.replace(self, block_size=columns // (2 * rounds), num_hashes=rounds)


def _prepare(config: ReformerConfig, query, key, value, mask, seed) -> tuple[Tensor, Tensor, Tensor, Tensor, Rounds]:
    """(A, N, D) inputs and their mask, and the plan; the queries as keys where they are shared."""
    heads = query.shape[1]
    query, key, value = (x.flatten(0, 1) for x in (query, key, value))
    mask = None if mask is None else mask.repeat_interleave(heads, 0)
    options = {"size": config.block_size, "rounds": config.num_hashes, "seed": seed}
    if not config.shared_query_key:
        return query, key, value, mask, plan_rounds(query, key, mask, **options)
    if query.shape[1] != key.shape[1]:
        raise UnsupportedAttentionError(
            f"{config.method}: shared_query_key takes the queries as keys, which needs as many of them as values; got "
            f"{query.shape[1]} and {value.shape[1]}. Set shared_query_key=False"
        )
    plan = plan_rounds(query, query, mask, **options)
    key = query if mask is None else query.masked_fill(~mask[:, :, None], 0.0)
    key = normalize(key.to(accumulation_dtype(key.dtype)), dim=-1).to(key.dtype)
    return query, key, value, mask, plan


def forward(config: ReformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Fast form; arguments as in `hf_efficient_attn.methods._shared.registry.register_method`."""
    mask, scale, dropout_p, seed = options.key_mask, options.scale, options.dropout_p, options.seed
    shape, shared = query.shape[:2], config.shared_query_key
    if key.shape[2] <= 2 * config.block_size * config.num_hashes and not shared:
        mask = None if mask is None else mask.repeat_interleave(shape[1], 0)
        flat = (x.flatten(0, 1) for x in (query, key, value))
        out = exact_attention(*flat, mask, is_causal=False, scale=scale, dropout_p=dropout_p)
    else:
        query, key, value, mask, plan = _prepare(config, query, key, value, mask, seed)
        out = rounds_attention(query, key, value, plan, others=shared, scale=scale, dropout_p=dropout_p)
    return out.unflatten(0, shape)


def naive(config: ReformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form: the dense matrix of the pairs that some round holds."""
    mask, scale, seed = options.key_mask, options.scale, options.seed
    shape = query.shape[:2]
    query, key, value, mask, plan = _prepare(config, query, key, value, mask, seed)
    pairs = dense_pairs(plan).to(query.device)
    if config.shared_query_key:
        itself = torch.eye(key.shape[1], dtype=torch.bool, device=query.device)
        pairs = torch.where((pairs & ~itself).any(-1, keepdim=True), pairs & ~itself, pairs)
    log_weights = torch.zeros(pairs.shape, dtype=torch.float64, device=query.device).masked_fill(~pairs, -torch.inf)
    return dense_attention(query, key, value, log_weights, scale=scale).unflatten(0, shape)


register_method(ReformerConfig, forward=forward, naive=naive)
