"""Attention of a module whose model is divided over processes by `hea.sequence_parallel`."""

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.exact import exact_layer
from hf_efficient_attn.methods import MethodConfig, sharded_attention
from hf_efficient_attn.ops.shards import HeadSlice, Shards, over_heads
from hf_efficient_attn.ops.tracing import nothing, replaced_in_graphs

# The attribute of models and attention modules with their `SequenceParallel`.
PARALLEL = "_efficient_attention_parallel"
# The keyword argument by which layers get the shards of a call.
SHARDS = "sequence_shards"


class SequenceParallel:
    """The state of a model that is divided over processes.

    Attributes:
        group: the process group.
        current: the shards of the call that is being computed; None between calls.
        depth: how many models that contain each other are being called.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.current: Shards | None = None
        self.depth = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "SequenceParallel":
        """A copy of the model belongs to the same processes."""
        return SequenceParallel(self.group)


def _refuse() -> NoReturn:
    raise UnsupportedAttentionError(
        "sequence_parallel: the exchanges between processes cannot be compiled: leave torch.compile out"
    )


# A call that is compiled is refused.
_check_eager = replaced_in_graphs(_refuse)(nothing)


def is_parallel(module: nn.Module) -> bool:
    """Whether the model of an attention module is divided over processes."""
    return getattr(module, PARALLEL, None) is not None


def shards_of(module: nn.Module, kwargs: Mapping[str, Any]) -> Shards | None:
    """The shards of the call of an attention module; None if its model is not divided.

    Raises:
        UnsupportedAttentionError: the shards are not known.
    """
    parallel: SequenceParallel | None = getattr(module, PARALLEL, None)
    if parallel is None:
        return None
    _check_eager()
    shards: Shards | None = kwargs.get(SHARDS) or parallel.current
    if shards is None:
        raise UnsupportedAttentionError(
            f"sequence_parallel: a {type(module).__name__} is called outside of a call of its model: call the model "
            "that was given to sequence_parallel; with gradient checkpointing, its layers must pass keyword arguments"
        )
    return shards


def attend(
    method: MethodConfig | None,
    tensors: tuple[Tensor, Tensor, Tensor],
    shards: Shards,
    *,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    seed: int,
    parameters: Mapping[str, Tensor],
) -> Tensor:
    """Attention (B, H, n, Dv) of the tokens of this process to all tokens; exact if `method` is None.

    Dropout is refused.
    """
    query, key, value = tensors
    if key.shape[2] != query.shape[2] or query.shape[2] != shards.lengths[shards.rank]:
        raise UnsupportedAttentionError(
            f"sequence_parallel: a layer has {query.shape[2]} queries and {key.shape[2]} keys, and the call "
            f"{shards.lengths[shards.rank]} tokens in this process: caches and cross attention cannot be divided"
        )
    if dropout_p:
        raise UnsupportedAttentionError(
            "sequence_parallel: dropout of attention weights would draw other numbers in each process than one process "
            "draws: set it to 0 in the config (attention_probs_dropout_prob, attention_dropout or attn_pdrop)"
        )
    if method is not None:
        # In training all processes draw the same, which the model's call has agreed upon.
        seed = seed if shards.seed is None else (shards.seed + seed) % (2**31 - 1)
        return sharded_attention(
            method, query, key, value, shards=shards, is_causal=is_causal, scale=scale, seed=seed, parameters=parameters
        )

    def some_heads(query: Tensor, key: Tensor, value: Tensor, _: HeadSlice) -> Tensor:
        return exact_layer(query, key, value, shards.key_mask, is_causal=is_causal, scale=scale, dropout_p=0.0)

    return over_heads(some_heads, query, key, value, shards)
