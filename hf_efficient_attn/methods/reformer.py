"""Reformer (Kitaev, Kaiser, Levskaya, ICLR 2020): attention within chunks of tokens sorted by a random hash, in rounds.

The code in `hf_efficient_attn.ops.sampled_keys.hashing` follows these parts of the paper:

- Hash: h(x) = argmax([xR; -xR]) ("Locality sensitive hashing", section 2), in `bucket_codes`. With about 2 l / m
  buckets for chunks of m tokens, one such hash costs l^2 / m. Here a bucket is a pair of hashes, each of which has
  about sqrt(2 l / m) values.
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

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hf_efficient_attn.methods._shared.config import AttentionOptions, MethodConfig, option, refuse
from hf_efficient_attn.methods._shared.heads import by_heads
from hf_efficient_attn.methods._shared.registry import register_method
from hf_efficient_attn.ops.backends.devices import accumulation_dtype
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.exact import dense_softmax
from hf_efficient_attn.ops.sampled_keys.hashing import NearField, dense_pairs, plan_rounds, rounds_attention
from hf_efficient_attn.ops.slices import with_zero_gradients


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
    cost = 0.4

    block_size: int = option(64, "Queries of a chunk. In each round they attend to 2 * block_size keys.", minimum=1)
    num_hashes: int = option(2, "Number of rounds. Each has its own hash.", minimum=1)
    shared_query_key: bool = option(
        False,
        "Use the normalised queries as keys and ignore the given keys. A token attends to itself only if it has no "
        "other key. This is a different attention, for training.",
    )
    seed: int = option(0, "Seed of the hashes. In training they are drawn again in every call.", minimum=0)

    @property
    def exact_length(self) -> int:
        """The number of keys of all rounds; 0 for shared queries and keys, which are another attention."""
        return 0 if self.shared_query_key else 2 * self.block_size * self.num_hashes

    def with_budget(self, columns: int) -> "ReformerConfig":
        """Set `block_size`, and `num_hashes` if the budget is less than two keys in each of these rounds."""
        rounds = min(self.num_hashes, self.check_budget(columns, 2) // 2)
        return replace(self, block_size=columns // (2 * rounds), num_hashes=rounds)


def _plan(
    config: ReformerConfig, query: Tensor, key: Tensor, key_mask: Tensor | None, options: AttentionOptions
) -> tuple[Tensor, NearField]:
    """Return the keys, which are the normalised queries with `shared_query_key`, and plan the rounds."""
    sizes = {"block_size": min(config.block_size, key.shape[1]), "rounds": config.num_hashes}
    draws = Draws(options.seed, query.device)
    if not config.shared_query_key:
        return key, plan_rounds(query, key, key_mask, **sizes, draws=draws)  # (BH, Nk, D)
    if query.shape[1] != key.shape[1]:
        refuse(
            "shared_query_key uses the queries as keys, so there must be as many queries as values; got "
            f"{query.shape[1]} and {key.shape[1]}. Set shared_query_key=False",
            config,
        )
    plan = plan_rounds(query, query, key_mask, **sizes, draws=draws)
    key = query if key_mask is None else query.masked_fill(~key_mask[:, :, None], 0.0)  # (BH, N, D)
    return normalize(key.to(accumulation_dtype(key.dtype)), dim=-1).to(key.dtype), plan  # (BH, N, D)


def forward(config: ReformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Fast form; see `register_method`."""
    shared = config.shared_query_key
    scale = options.scale
    dropout_p = options.dropout_p

    def form(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:  # (BH, N, .)
        key, plan = _plan(config, query, key, key_mask, options)
        return rounds_attention(query, key, value, plan, others=shared, scale=scale, dropout_p=dropout_p)

    return with_zero_gradients(by_heads(form, query, key, value, options, config.exact_length), key)  # (B, H, Nq, Dv)


def naive(config: ReformerConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Readable form, with the dense matrix of the pairs that are in any round."""

    def form(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:  # (BH, N, .)
        key, plan = _plan(config, query, key, key_mask, options)
        pairs = dense_pairs(plan)  # (BH, Nq, Nk)
        if config.shared_query_key:
            others = pairs & ~torch.eye(key.shape[1], dtype=torch.bool, device=query.device)  # (BH, N, N)
            pairs = torch.where(others.any(-1, keepdim=True), others, pairs)  # (BH, N, N)
        scores = (query.double() @ key.double().mT * options.scale).masked_fill(~pairs, -torch.inf)  # (BH, Nq, Nk)
        return dense_softmax(scores, value)  # (BH, Nq, Dv)

    return by_heads(form, query, key, value, options)  # (B, H, Nq, Dv)


register_method(ReformerConfig, forward=forward, naive=naive)
