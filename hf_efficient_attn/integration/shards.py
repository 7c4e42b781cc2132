"""Attention of a layer whose model is divided over processes: `methods.sharded_attention`, or exact by `over_heads`.

`hea.sequence_parallel` writes a `SequenceParallel` on the attention modules.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.exact import exact_layer
from hf_efficient_attn.methods import MethodConfig, sharded_attention
from hf_efficient_attn.ops.shards import HeadSlice, Shards, over_heads
from hf_efficient_attn.ops.tracing import refuse_in_graphs

# The attribute of models and attention modules with their `SequenceParallel`.
PARALLEL = "_efficient_attention_parallel"
# The keyword argument by which layers get the shards of a call.
SHARDS = "sequence_shards"


class SequenceParallel:
    """The state of a model that is divided over processes: its group, and the shards of the call that is computed."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.current: Shards | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "SequenceParallel":
        return SequenceParallel(self.group)  # a copy of the model belongs to the same processes


def shards_of(module: nn.Module, kwargs: Mapping[str, Any]) -> Shards:
    """The shards of the call of an attention module whose model is divided over processes."""
    refuse_in_graphs("sequence_parallel: the exchanges between processes cannot be compiled: leave torch.compile out")
    shards: Shards | None = kwargs.get(SHARDS) or getattr(module, PARALLEL).current
    if shards is None:
        raise UnsupportedAttentionError(
            f"sequence_parallel: a {type(module).__name__} is called outside of a call of its model: call the model "
            "that was given to sequence_parallel; with gradient checkpointing, its layers must pass keyword arguments"
        )
    return shards


def shard_attention(
    method: MethodConfig | None, tensors: tuple[Tensor, Tensor, Tensor], shards: Shards, **options: Any
) -> Tensor:
    """Attention (B, H, n, Dv) of the tokens of this process to all tokens; exact if `method` is None.

    The options are is_causal, scale, dropout_p, seed and parameters of `methods.attention`.
    """
    (query, key, _), own = tensors, shards.lengths[shards.rank]
    if key.shape[2] != query.shape[2] or query.shape[2] != own:
        raise UnsupportedAttentionError(
            f"sequence_parallel: a layer has {query.shape[2]} queries and {key.shape[2]} keys, and the call {own} "
            "tokens in this process: caches and cross attention cannot be divided"
        )
    if options.pop("dropout_p"):
        raise UnsupportedAttentionError(
            "sequence_parallel: dropout of attention weights would draw other numbers in each process than one process "
            "draws: set it to 0 in the config (attention_probs_dropout_prob, attention_dropout or attn_pdrop)"
        )
    if method is not None:
        if shards.seed is not None:  # in training all processes draw the same, which the model's call has agreed upon
            options["seed"] = (shards.seed + options["seed"]) % (2**31 - 1)
        return sharded_attention(method, *tensors, shards=shards, **options)
    exact = {"is_causal": options["is_causal"], "scale": options["scale"], "dropout_p": 0.0}

    def some_heads(query: Tensor, key: Tensor, value: Tensor, _: HeadSlice) -> Tensor:
        return exact_layer(query, key, value, shards.key_mask, **exact)

    return over_heads(some_heads, *tensors, shards)
