"""Which heads of a layer this process holds, if tensor parallelism gives its attention only some of them.

The module and its config still describe all heads. What a method draws for a head, and what it has learned for it,
depends on the head's number among all of them.
"""

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.learned import first_number
from hf_efficient_attn.integration.settings import EXACT
from hf_efficient_attn.ops.shards import HeadSlice

# The attention functions as they were registered, by the methods' names.
REGISTERED: dict[str, Callable[..., Any]] = {}


def head_slice_of(name: str, module: nn.Module, num_heads: int) -> HeadSlice | None:
    """The numbers of the `num_heads` query heads of a call of an attention module; None for all heads of the layer.

    Raises:
        UnsupportedAttentionError: it has some of the layer's heads, and it cannot be known which.
    """
    total = first_number(getattr(module, "config", None), "num_attention_heads", "n_head", "n_heads", "num_heads")
    if total is None or num_heads >= total:
        return None
    sharded = sharded_parameters(module)
    for parameter in sharded:
        mesh = parameter.device_mesh
        for dim, placement in enumerate(parameter.placements):
            if placement.is_shard() and total == num_heads * mesh.size(dim):
                return HeadSlice(int(mesh.get_local_rank(dim)) * num_heads, total)
    # Another library, such as DeepSpeed with its Ulysses, has put a function of its own in the place of the method's.
    is_wrapped = name in REGISTERED and ALL_ATTENTION_FUNCTIONS.get(name) is not REGISTERED[name]
    if is_wrapped or sharded:
        raise UnsupportedAttentionError(
            f"{name}: a {type(module).__name__} calls its attention with {num_heads} of {total} heads, and it is not "
            "known which they are, so that what is drawn or learned for a head would be that of another one: use "
            "Transformers' tensor parallelism or hf_efficient_attn.sequence_parallel instead of another engine, such "
            f"as DeepSpeed's Ulysses (sp_size), or attn_implementation={EXACT!r}"
        )
    return None  # a model whose layers have different numbers of heads


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
            "attention only, so that this layer would attend within its shard: use "
            f"hf_efficient_attn.sequence_parallel, or attn_implementation={EXACT!r}"
        )
