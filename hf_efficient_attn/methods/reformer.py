"""Reformer (Kitaev, Kaiser, Levskaya, ICLR 2020): attention within chunks of tokens sorted by a random hash, in rounds.

The code in `hf_efficient_attn.ops.lsh_rounds` follows these parts of the paper:

- Hash: h(x) = argmax([xR; -xR]) ("Locality sensitive hashing", section 2), in `bucket_codes`. With about 2 l / m
  buckets for chunks of m tokens, one such hash costs l^2 / m. Here a bucket is a pair of hashes, each with about the
  square root of that number of values.
- Sorting by bucket and then by position, and chunks of equal size ("LSH attention", Figure 2): `plan_rounds`. In the
  paper a chunk attends to itself and to the chunk before it, which suits a causal order. Here it attends to itself and
  to half of each neighbour, which is the same number of keys. Queries and keys that are not shared are sorted
  separately, and a chunk of queries attends to the keys around the index at which its middle query would be sorted
  among the keys. The mean of the keys, which does not change the softmax, is subtracted before the keys are hashed.
- Merging rounds by their normalisers, with each pair counted once (Eq. 6-7): `rounds_attention`. A pair counts in the
  first round that contains it. The paper gives it the weight 1 / N_ij in each of N_ij rounds, which is the same sum.
- Shared queries and keys ("Shared-QK attention"): with `shared_query_key`, k_j = q_j / |q_j|, and a token attends to
  itself only if it has no other key.

There is no causal form. The paper masks the pairs of the future but sorts all tokens together, so the chunk of a pair,
and with it the output, depends on later tokens. A decoder that is trained in this way learns to rely on them.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods._shared.config import MethodConfig, option
from hf_efficient_attn.methods._shared.heads import flatten_heads, unflatten_heads
from hf_efficient_attn.methods._shared.registration import register_method
from hf_efficient_attn.methods._shared.registry import AttentionOptions
from hf_efficient_attn.ops.exact import exact_attention
from hf_efficient_attn.ops.lsh_rounds import Rounds, dense_pairs, plan_rounds, rounds_attention
from hf_efficient_attn.ops.near_far import dense_attention
from hf_efficient_attn.ops.partial import accumulation_dtype


@dataclass(frozen=True, kw_only=True)
class ReformerConfig(MethodConfig):
    """Hyperparameters of the hash rounds. Up to 2 * block_size * num_hashes keys the output is exact."""

    method = "reformer"
    title = "Reformer"
    paper = "Kitaev, Kaiser, Levskaya, ICLR 2020"
    year = 2020
    causal = False
    rectangular = True
    summary = "chunks of tokens sorted by a random hash, in rounds whose pairs count once"
    paper_url = "https://arxiv.org/abs/2001.04451"
    near = "chunks of equal hashes, in several rounds"
    far = "none"

    block_size: int = option(64, "Queries of a chunk. In each round they attend to 2 * block_size keys.", minimum=1)
    num_hashes: int = option(2, "Number of rounds. Each has its own hash.", minimum=1)
    shared_query_key: bool = option(
        False,
        "Use the normalised queries as keys and ignore the given keys. A token attends to itself only if it has no "
        "other key. This is a different attention, for training.",
    )
    seed: int = option(0, "Seed of the hashes. In training they are drawn again in every call.", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.shared_query_key, bool):
            raise UnsupportedAttentionError(
                f"{self.method}: shared_query_key={self.shared_query_key!r} must be True or False"
            )

    @property
    def exact_length(self) -> int:
        """The keys of all rounds. With shared queries and keys the attention is another one at every length."""
        return 0 if self.shared_query_key else 2 * self.block_size * self.num_hashes

    def with_budget(self, columns: int) -> "ReformerConfig":
        """Keep the number of rounds, unless the budget is less than two keys per round, and choose the chunk size."""
        rounds = min(self.num_hashes, self.check_budget(columns, 2) // 2)
        return replace(self, block_size=columns // (2 * rounds), num_hashes=rounds)


class _Prepared(NamedTuple):
    """Inputs (BH, N, D) and the plan of their rounds. With shared queries and keys, `key` is the normalised query."""

    query: Tensor
    key: Tensor
    value: Tensor
    plan: Rounds


def _prepare(config: ReformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> _Prepared:
    """Flatten (B, H, N, D) inputs and plan the rounds."""
    query, key, value, key_mask = flatten_heads(query, key, value, options.key_mask)
    size, rounds, seed = config.block_size, config.num_hashes, options.seed
    if not config.shared_query_key:
        plan = plan_rounds(query, key, key_mask, block_size=size, rounds=rounds, seed=seed)
        return _Prepared(query, key, value, plan)
    if query.shape[1] != key.shape[1]:
        raise UnsupportedAttentionError(
            f"{config.method}: shared_query_key uses the queries as keys, so there must be as many queries as values; "
            f"got {query.shape[1]} and {value.shape[1]}. Set shared_query_key=False"
        )
    plan = plan_rounds(query, query, key_mask, block_size=size, rounds=rounds, seed=seed)
    key = query if key_mask is None else query.masked_fill(~key_mask[:, :, None], 0.0)
    key = normalize(key.to(accumulation_dtype(key.dtype)), dim=-1).to(key.dtype)
    return _Prepared(query, key, value, plan)


def forward(config: ReformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Compute the fast form; see `register_method` for the arguments."""
    shape, shared = query.shape, config.shared_query_key
    scale, dropout_p = options.scale, options.dropout_p
    if key.shape[2] <= config.exact_length:
        query, key, value, key_mask = flatten_heads(query, key, value, options.key_mask)
        out = exact_attention(query, key, value, key_mask, is_causal=False, scale=scale, dropout_p=dropout_p)
    else:
        out = rounds_attention(
            *_prepare(config, query, key, value, options), others=shared, scale=scale, dropout_p=dropout_p
        )
    return unflatten_heads(out, shape)


def naive(config: ReformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Compute the readable form, with the dense matrix of the pairs that are in any round."""
    shape = query.shape
    query, key, value, plan = _prepare(config, query, key, value, options)
    pairs = dense_pairs(plan)
    if config.shared_query_key:
        same_token = torch.eye(key.shape[1], dtype=torch.bool, device=query.device)
        pairs = torch.where((pairs & ~same_token).any(-1, keepdim=True), pairs & ~same_token, pairs)
    log_weights = torch.zeros(pairs.shape, dtype=torch.float64, device=query.device).masked_fill(~pairs, -torch.inf)
    return unflatten_heads(dense_attention(query, key, value, log_weights, scale=options.scale), shape)


register_method(ReformerConfig, forward=forward, naive=naive)
