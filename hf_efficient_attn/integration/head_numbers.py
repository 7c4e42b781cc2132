"""Which heads of a layer this process holds, if an engine gives its attention only some of them.

Tensor parallelism splits the projections, and DeepSpeed's Ulysses exchanges the tokens of all heads for all tokens of
some. The module and its config still describe all heads. What a method draws for a head, and what it has learned for
it, depends on the head's number among all of them.
"""

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.learned import first_number
from hf_efficient_attn.integration.settings import EXACT
from hf_efficient_attn.ops.shards import HeadSlice

# The attention functions as they were registered, by the methods' names.
REGISTERED: dict[str, Callable[..., Any]] = {}


def _is_wrapped(name: str) -> bool:
    """Whether another library has put a function of its own in the place of a method's."""
    return name in REGISTERED and ALL_ATTENTION_FUNCTIONS.get(name) is not REGISTERED[name]


def head_slice_of(name: str, module: nn.Module, num_heads: int) -> HeadSlice | None:
    """The numbers of the `num_heads` query heads of a call of an attention module; None for all heads of the layer.

    Raises:
        UnsupportedAttentionError: it has some of the layer's heads, and it cannot be known which.
    """
    total = first_number(getattr(module, "config", None), "num_attention_heads", "n_head", "n_heads", "num_heads")
    if total is None or num_heads >= total:
        return None
    sharded, ulysses = sharded_parameters(module), _ulysses()
    ranks = [
        int(x.device_mesh.get_local_rank(dim))
        for x in sharded
        for dim, placement in enumerate(x.placements)
        if placement.is_shard() and total == num_heads * x.device_mesh.size(dim)
    ]
    if ulysses is not None and total == num_heads * ulysses.get_sequence_parallel_world_size():
        ranks.append(int(ulysses.get_sequence_parallel_rank()))
    if ranks:
        return HeadSlice(ranks[0] * num_heads, total)
    if _is_wrapped(name) or sharded:
        raise UnsupportedAttentionError(
            f"{name}: a {type(module).__name__} calls its attention with {num_heads} of {total} heads, and it is not "
            "known which they are, so that what is drawn or learned for a head would be that of another one: use "
            "Transformers' tensor parallelism, DeepSpeed's Ulysses (ParallelismConfig(sp_size=...)) or "
            f"hf_efficient_attn.sequence_parallel, or attn_implementation={EXACT!r}"
        )
    return None  # a model whose layers have different numbers of heads


def _ulysses() -> Any:
    """The state of DeepSpeed's Ulysses, by which processes share a sequence; None without it."""
    state = sys.modules.get("deepspeed.runtime.sequence_parallel.parallel_state_sp")
    return None if getattr(state, "_SEQUENCE_PARALLEL_GROUP", None) is None else state


def refuse_lost_padding(mask: Tensor, is_causal: bool) -> None:
    """Refuse padding that DeepSpeed's Ulysses would lose: it calls attention without the mask of this process, (B, n).

    Padding on the right has no influence on other tokens of a causal model.
    """
    state = _ulysses()
    if state is None or not any(map(_is_wrapped, REGISTERED)):
        return
    is_first = int(state.get_sequence_parallel_rank()) == 0
    if not is_causal or (mask[:, 1:] > mask[:, :-1]).any() or (is_first and not mask[:, 0].all()):
        raise UnsupportedAttentionError(
            "DeepSpeed's Ulysses calls attention without the attention_mask, so that padding would count as tokens: "
            "pad a decoder's sequences on the right, or use hf_efficient_attn.sequence_parallel, which keeps padding"
        )


def sharded_parameters(module: nn.Module) -> list[Any]:
    """The parameters of a module that are divided over processes while it computes."""
    if "torch.distributed.tensor" not in sys.modules:
        return []
    from torch.distributed.tensor import DTensor

    return [x for x in module.parameters() if isinstance(x, DTensor) and any(p.is_shard() for p in x.placements)]


def refuse_context_parallel(name: str, module: nn.Module) -> None:
    """Refuse PyTorch's context parallelism, which divides the sequence and takes care of PyTorch's attention only.

    The call is in `context_parallel`, or accelerate has prepared the module for it.
    """
    exact: Any = torch.nn.functional.scaled_dot_product_attention
    # PyTorch's own is built in, and torch.compile cannot read its module (PyTorch 2.14).
    replaced = isinstance(exact, FunctionType) and exact.__module__.startswith("torch.distributed")
    hooks = (getattr(hook, "__qualname__", "") for hook in module._forward_pre_hooks.values())
    if replaced or any("_attach_context_parallel_hooks" in hook for hook in hooks):
        raise UnsupportedAttentionError(
            f"{name}: context parallelism (cp_size, ring attention) joins the sequence again in PyTorch's own "
            "attention only, so that this layer would attend within its shard: for a decoder use "
            "ParallelismConfig(sp_size=...) (DeepSpeed's Ulysses), for any model hf_efficient_attn.sequence_parallel, "
            f"or attn_implementation={EXACT!r}"
        )
