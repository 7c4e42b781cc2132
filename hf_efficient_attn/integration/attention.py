"""The attention function that Transformers calls under a method's name."""

import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration import refusals
from hf_efficient_attn.integration.cache import LAYER, MethodLayer, NewKeys
from hf_efficient_attn.integration.configs import settings_of
from hf_efficient_attn.integration.distance_bias import TAKES_DISTANCE_BIAS, take_bias
from hf_efficient_attn.integration.exact import exact_layer
from hf_efficient_attn.integration.layers import layer_seed
from hf_efficient_attn.integration.learned import first_number, required_tensors
from hf_efficient_attn.integration.masks import KeyMask, read_mask
from hf_efficient_attn.integration.models import ModuleLocation, location_of, method_at
from hf_efficient_attn.integration.settings import EXACT, warn_beyond_calibration
from hf_efficient_attn.integration.shards import shard_attention, shards_of
from hf_efficient_attn.methods import attention, parameters_of_slice
from hf_efficient_attn.ops.shards import HeadSlice

# The attention functions as they were registered, by the methods' names.
REGISTERED: dict[str, Callable[..., Any]] = {}


def is_causal_call(module: nn.Module, location: ModuleLocation, mask: KeyMask, is_causal: bool | None) -> bool:
    """Whether a call is causal: what the mask says, else the call, else the module. Cross attention never is."""
    if mask.is_causal is not None:
        is_causal = mask.is_causal
    elif is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    return bool(is_causal) and not location.is_cross


def make_attention_function(name: str) -> Callable[..., tuple[Tensor, None]]:
    """The function to register under a method's name.

    It takes the module, query (B, H, Nq, D), key (B, H_kv, Nk, D), value (B, H_kv, Nk, Dv) and the mask of
    `masks.padding_mask`, and returns ((B, Nq, H, Dv), None).
    """

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        location, shards, config = location_of(module), shards_of(module, kwargs), getattr(module, "config", None)
        refuse_context_parallel(name, module)
        distance_bias, mask = take_bias(module, kwargs, query.device), read_mask(name, attention_mask)
        window = refusals.take_window(name, location.window, mask.is_local, key.shape[2], kwargs)
        refusals.refuse_arguments(name, kwargs)
        is_causal = is_causal_call(module, location, mask, is_causal)
        method = method_at(config, name, location)
        if method is not None and (location.is_cross or (not is_causal and query.shape[2] != key.shape[2])):
            reason = refusals.why_cross_attention_is_exact(method, config)
            if reason is not None:
                refusals.warn_of_exact_layers(f"{reason}: cross attention stays exact in", [(module, location)])
                method = None
        # The cache layer that returned the keys computes the call if they are not those of all tokens.
        cached: MethodLayer | None = getattr(key, LAYER, None)
        if cached is None or not is_causal or method != cached.method:
            if isinstance(key, NewKeys):
                raise UnsupportedAttentionError(
                    f"{name}: the cache holds {'a state' if cached is None else f'a state of {cached.method}'}, but "
                    f"{location.name} of this model now computes something else: start with a new cache after "
                    "switching the model"
                )
            cached = None
        if cached is None and shards is None:
            refusals.check_length_of_mask(name, location.name, mask.keys, key)
        parameters: Mapping[str, Tensor] = {}
        if method is not None:
            # A switch could not see this, or has not seen it.
            why = "its mask is causal, or its config was changed without hf_efficient_attn.convert(model, ...)"
            refusals.check_methods([method], is_causal, model=f"{location.name} ({why})")
            parameters = required_tensors(module, method, location.name)
            keys = (key.shape[2], mask.keys) if shards is None else (shards.total, shards.key_mask)
            warn_beyond_calibration(settings_of(config, name), *keys)
        options: dict[str, Any] = {"scale": scaling, "dropout_p": dropout if module.training else 0.0}
        seed = layer_seed(location.layer)
        if shards is not None:
            options |= {"is_causal": is_causal, "seed": seed, "parameters": parameters}
            out = shard_attention(method, (query, key, value), shards, **options)
        elif method is None:
            options |= {"is_causal": is_causal, "distance_bias": distance_bias, "window": window}
            out = exact_layer(query, key, value, mask.keys, **options)
        else:
            # In training the seed comes from the global generators, so that gradient checkpointing draws the same
            # again. Otherwise it depends on the layer alone.
            heads = head_slice_of(name, module, query.shape[1])
            if heads is not None:
                parameters = parameters_of_slice(method, parameters, heads, query.shape[1])
            options |= {"seed": None if module.training else seed, "parameters": parameters}
            if distance_bias is not None:
                options["distance_bias"] = distance_bias
            if cached is not None:
                out = cached.attention(query, key, value, mask.keys, **options)
            else:
                options |= {"is_causal": is_causal, "heads": heads}
                out = attention(method, query, key, value, attention_mask=mask.keys, **options)
        return out.transpose(1, 2).contiguous(), None

    setattr(forward, TAKES_DISTANCE_BIAS, True)
    forward.__name__ = forward.__qualname__ = f"{name}_attention_forward"
    return forward


def head_slice_of(name: str, module: nn.Module, num_heads: int) -> HeadSlice | None:
    """The numbers of the `num_heads` query heads of a call of an attention module; None for all heads of the layer.

    Tensor parallelism gives attention only some of the heads that the module and its config describe. What a method
    draws and has learned for a head depends on its number among all, so an unknown one is refused.
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
    hooks = (getattr(hook, "__name__", "") for hook in module._forward_pre_hooks.values())
    if replaced or any(hook == "_self_attn_pre_forward_hook" for hook in hooks):  # accelerate's
        raise UnsupportedAttentionError(
            f"{name}: context parallelism (cp_size, ring attention) joins the sequence again in PyTorch's own "
            "attention only, so that this layer would attend within its shard: use "
            f"hf_efficient_attn.sequence_parallel, or attn_implementation={EXACT!r}"
        )
