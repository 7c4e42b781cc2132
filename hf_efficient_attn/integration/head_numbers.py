"""Which heads of a layer this process holds, if an engine gives its attention only some of them.

Tensor parallelism splits the projections, and DeepSpeed's Ulysses exchanges the tokens of all heads for all tokens of
some. In both cases Transformers' module and config still describe all heads, and the attention function is called with
some. What a method draws for a head, and what it has learned for it, depends on the head's number among all of them.
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

_DEEPSPEED = "deepspeed.runtime.sequence_parallel.parallel_state_sp"
# The attention functions as they were registered, by the methods' names.
REGISTERED: dict[str, Callable[..., Any]] = {}


def is_wrapped(name: str) -> bool:
    """Whether another library has put a function of its own in the place of a method's."""
    return name in REGISTERED and ALL_ATTENTION_FUNCTIONS.get(name) is not REGISTERED[name]


def head_slice_of(name: str, module: nn.Module, num_heads: int) -> HeadSlice | None:
    """The numbers of the `num_heads` query heads of a call of an attention module; None for all heads of the layer.

    Raises:
        UnsupportedAttentionError: it has some of the layer's heads, and it cannot be known which.
    """
    config = getattr(module, "config", None)
    total = first_number(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
    if total is None or num_heads >= total:
        return None
    for parameter in sharded_parameters(module):
        mesh = parameter.device_mesh
        for dim, placement in enumerate(parameter.placements):
            if placement.is_shard() and total == num_heads * mesh.size(dim):
                return HeadSlice(int(mesh.get_local_rank(dim)) * num_heads, total)
    rank = ulysses_rank()
    if rank is not None and total == num_heads * sys.modules[_DEEPSPEED].get_sequence_parallel_world_size():
        return HeadSlice(rank * num_heads, total)
    if is_wrapped(name) or sharded_parameters(module):
        raise UnsupportedAttentionError(
            f"{name}: a {type(module).__name__} calls its attention with {num_heads} of {total} heads, and it is not "
            "known which they are, so that what is drawn or learned for a head would be that of another one: use "
            "Transformers' tensor parallelism, DeepSpeed's Ulysses (ParallelismConfig(sp_size=...)) or "
            f"hf_efficient_attn.sequence_parallel, or attn_implementation={EXACT!r}"
        )
    return None  # a model whose layers have different numbers of heads


def ulysses_rank() -> int | None:
    """The process's number among those that share a sequence by DeepSpeed's Ulysses; None without it."""
    state = sys.modules.get(_DEEPSPEED)
    if state is None or getattr(state, "_SEQUENCE_PARALLEL_GROUP", None) is None:
        return None
    return int(state.get_sequence_parallel_rank())


def refuse_lost_padding(mask: Tensor, is_causal: bool) -> None:
    """Refuse padding that DeepSpeed's Ulysses would lose: it calls attention without the mask of this process, (B, n).

    Padding on the right has no influence on other tokens of a causal model.
    """
    rank = ulysses_rank()
    if rank is None or not any(map(is_wrapped, REGISTERED)):
        return
    if not is_causal or (mask[:, 1:] > mask[:, :-1]).any() or (rank == 0 and not mask[:, 0].all()):
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
    prepared = any(
        "_attach_context_parallel_hooks" in getattr(hook, "__qualname__", "")
        for hook in module._forward_pre_hooks.values()
    )
    if replaced or prepared:
        raise UnsupportedAttentionError(
            f"{name}: context parallelism (cp_size, ring attention) divides the sequence and joins it again in "
            "PyTorch's own attention only, so that this layer would attend within its shard: for a decoder use "
            "ParallelismConfig(sp_size=...) (DeepSpeed's Ulysses), for any model hf_efficient_attn.sequence_parallel, "
            f"or attn_implementation={EXACT!r}"
        )
