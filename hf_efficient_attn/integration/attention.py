"""A call of an attention module: what it asks for (`read_call`), and the function that computes it.

Transformers hands every argument that a model does not know through to its attention function, which would lose one of
`_ATTENTION_ARGUMENTS`, whatever its type, and a tensor whose name speaks of attention (`_ATTENTION_WORDS`). No model of
Transformers names another one in its call. Everything else passes to no effect, as it does with exact attention:
arguments of a loss (`_LOSS_WORDS`) and inputs that the model has used already (`_INPUTS`).
"""

import functools
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_tracing

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration import inputs, model_kinds, packing, refusals, settings
from hf_efficient_attn.integration.cache import LAYER, MethodLayer, NewKeys
from hf_efficient_attn.integration.distance_bias import ARGUMENT, TAKES_DISTANCE_BIAS, take_bias
from hf_efficient_attn.integration.exact import exact_layer
from hf_efficient_attn.integration.layers import LOCATION, ModuleLocation
from hf_efficient_attn.integration.learned import NAME, learned_of
from hf_efficient_attn.integration.settings import EXACT
from hf_efficient_attn.integration.shards import shard_attention, shards_of
from hf_efficient_attn.methods import MethodConfig, attention, get_method, parameters_of_slice
from hf_efficient_attn.ops.shards import HeadSlice

# The attention functions as they were registered, by the methods' names.
REGISTERED: dict[str, Callable[..., Any]] = {}
# Arguments that change what attention computes, as Transformers' attention functions and paged caches name them.
_ATTENTION_ARGUMENTS = ("softcap", "cache", "read_index", "write_index", model_kinds.SINKS, ARGUMENT)
_ATTENTION_WORDS = (
    "attention", "attn", "mask", "bias", "alibi", "sink", "cache", "seq_len", "seqlen", "seq_idx", "block", "window",
    "indices",
)  # fmt: skip
_LOSS_WORDS = ("label", "loss", "target")
_INPUTS = (
    "position_ids", "cache_position", "position_embeddings", "num_items_in_batch", "encoder_hidden_states",
    "encoder_attention_mask", "input_ids", "token_type_ids",
)  # fmt: skip
_SMALLEST = {"num_heads": 1, "head_dim": 1, "value_dim": 1, "max_length": 1}


class LayerCall(NamedTuple):
    """What a call of an attention module asks for, besides its queries, keys and values."""

    location: ModuleLocation  # of the module in its model
    key_mask: Tensor | None  # bool (B, Nk), True for the keys to attend to; None if there is no padding
    is_causal: bool
    scale: float | None  # factor of the scores; None for 1/sqrt(D)
    dropout_p: float  # 0 in eval mode
    seed: int  # of the layer's draws in eval mode
    window: int | None  # the number of keys on one side, its own included, that a query attends to; None for all
    distance_bias: Tensor | None  # (H, 2R + 1), the bias of the scores by distance; None for none
    begins: Tensor | None = None  # bool (B, N), True for the first token of each text of packed rows; None for others
    filled: Tensor | None = None  # bool (B, Nk), True for the keys that a static cache holds; None for other keys
    sinks: Tensor | None = None  # (H,), the score of one more key of each head, whose value is 0; None for none


def location_of(module: nn.Module) -> ModuleLocation:
    """The location that a switch to the method of its config wrote on a module, which is refused without one."""
    location, name = getattr(module, LOCATION, None), settings.method_of(getattr(module, "config", None))
    if location is None or name not in (None, location.method):
        raise UnsupportedAttentionError(
            f"a {type(module).__name__} was not switched to {name}, which its config names: another model or part has "
            "that config, too, or it was changed by hand: use model.set_attn_implementation(name) or hf_efficient_attn."
            "convert(model, name, layers=[...]) for the whole model, and give each model a config of its own"
        )
    return location


def read_call(
    name: str, module: nn.Module, location: ModuleLocation, key: Tensor, attention_mask: object, kwargs: dict[str, Any]
) -> LayerCall:
    """Read a call of an attention module, and refuse, in the name of a method, what would be lost.

    Only the length and the device of the key (B, H, Nk, D) are read. `attention_mask` is as `inputs.padding_mask` made
    it, and `kwargs` are the other arguments of an attention function of Transformers. What is read is removed.
    """
    dropout, scale, is_causal = kwargs.pop("dropout", 0.0), kwargs.pop("scaling", None), kwargs.pop("is_causal", None)
    distance_bias = take_bias(module, kwargs, key.device) if ARGUMENT in kwargs else None
    sinks = kwargs.pop(model_kinds.SINKS, None)
    mask = inputs.read_mask(name, attention_mask)
    window = take_window(name, location.window, mask.is_local, key.shape[2], kwargs)
    if window is not None and mask.is_causal is False:  # whose mask has the keys at this distance, too
        own = getattr(settings.of_layer(getattr(module, "config", None), module), model_kinds.WINDOW, None)
        window += window == own  # modules like ModernBERT's have added the 1 themselves
    if mask.begins is not None:  # the mask says the same
        kwargs = {name: x for name, x in kwargs.items() if name not in packing.ARGUMENTS}
    refuse_arguments(name, kwargs)
    # What the mask says, else the call, else the module. Cross attention never is causal.
    said = (mask.is_causal, is_causal, getattr(module, "is_causal", True))
    is_causal = not location.is_cross and bool(next((x for x in said if x is not None), False))
    dropout_p, seed = dropout if module.training else 0.0, settings.layer_seed(location.layer)
    return LayerCall(
        location, mask.keys, is_causal, scale, dropout_p, seed, window, distance_bias, mask.begins, mask.filled, sinks
    )


def take_window(name: str, expected: int | None, is_local: bool, kv_len: int, kwargs: Mapping[str, Any]) -> int | None:
    """The window of a call, on which its module, mask and switch must agree; None for attention to all keys."""
    size = kwargs.get(model_kinds.WINDOW)
    if not is_local and (size is None or size >= kv_len):
        return None
    if expected is None or size is None or not is_local:
        raise UnsupportedAttentionError(
            f"{name}: a layer of this model attends to a window of {size or 'a few'} keys and the sequence has "
            f"{kv_len}, so that the window would be lost: use attn_implementation={EXACT!r} for this model"
        )
    return int(size)


def refuse_arguments(name: str, kwargs: Mapping[str, Any]) -> None:
    """Refuse everything in a call of an attention module that would silently be lost, in the name of a method."""
    inputs.refuse_attentions(name, kwargs.get("output_attentions"))
    for argument, value in kwargs.items():
        items = value if isinstance(value, (tuple, list)) else (value,)
        is_harmless = argument in _INPUTS or any(word in argument for word in _LOSS_WORDS)
        is_lost = not is_harmless and any(word in argument for word in _ATTENTION_WORDS)
        is_lost = is_lost and any(isinstance(item, Tensor) for item in items)
        if value is not None and (argument in _ATTENTION_ARGUMENTS or is_lost):
            raise UnsupportedAttentionError(
                f"{name}: the argument {argument!r} of the attention would be lost: use attn_implementation={EXACT!r} "
                "or 'eager' for this model, or leave the argument out"
            )


def make_attention_function(name: str) -> Callable[..., tuple[Tensor, None]]:
    """The function to register under a method's name.

    It takes the module, query (B, H, Nq, D), key (B, H_kv, Nk, D), value (B, H_kv, Nk, Dv) and the mask of
    `inputs.padding_mask`, and returns ((B, Nq, H, Dv), None).
    """

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        tensors = (query, key, value)
        shards, location = shards_of(module, kwargs), location_of(module)
        refuse_context_parallel(name, module)
        has_pairs = shards is None and inputs.has_pairs(attention_mask)
        if has_pairs and _method_of_call(name, module, location, is_self=True) is None:
            refuse_arguments(name, kwargs)
            return ALL_ATTENTION_FUNCTIONS[EXACT](module, query, key, value, attention_mask, **kwargs)
        call = read_call(name, module, location, key, attention_mask, kwargs)
        method = _method_of_call(name, module, location, call.is_causal or query.shape[2] == key.shape[2])
        if call.filled is not None:
            call, tensors = _without_empty_places(name, method, call, tensors)
            query, key, value = tensors
        cached = _computing_cache_layer(name, module, method, call, key)
        if cached is None and shards is None:
            check_length_of_mask(name, call.location.name, call.key_mask, key)
        if method is not None and call.is_causal and not method.causal:  # a switch could not or did not see this
            why = "its mask is causal, or its config was changed without hf_efficient_attn.convert(model, ...)"
            refusals.check_methods([method], is_causal=True, model=f"{call.location.name} ({why})")
        compute = functools.partial(_compute, name, module, method, call, cached)
        if shards is not None:
            packing.refuse_begins("sequence parallelism", call.begins)
            options = {"is_causal": call.is_causal, "scale": call.scale, "dropout_p": call.dropout_p, "seed": call.seed}
            if method is not None:
                settings.warn_beyond_calibration(getattr(module, "config", None), name, shards.total, shards.key_mask)
            parameters = {} if method is None else required_tensors(module, method, call.location.name)
            out = shard_attention(method, tensors, shards, **options, parameters=parameters)
        elif call.begins is not None:
            out = packing.attend_by_text(compute, tensors, call.begins)
        else:
            out = compute(tensors, call.key_mask)
        return out.transpose(1, 2).contiguous(), None

    setattr(forward, TAKES_DISTANCE_BIAS, True)
    forward.__name__ = forward.__qualname__ = f"{name}_attention_forward"
    return forward


def _without_empty_places(
    name: str, method: MethodConfig | None, call: LayerCall, tensors: packing.QueryKeyValue
) -> tuple[LayerCall, packing.QueryKeyValue]:
    """Remove the places of a static cache that hold no key yet, which are the last ones.

    A token that is decoded exactly attends to all places under the mask instead. So nothing waits for their number, and
    a compiled step does not depend on it. Other calls break the graph here.
    """
    query, key, value = tensors
    assert call.filled is not None
    check_length_of_mask(name, call.location.name, call.filled, key)
    is_exact = method is None or method.decodes_exactly
    if query.shape[2] == 1 and is_exact and (call.window is None or call.window >= key.shape[2]):
        if call.distance_bias is None or call.key_mask is None:
            return call, tensors
        # The token's distances count from the last place, so the empty ones come first.
        order = (torch.arange(key.shape[2], device=key.device) + call.filled[0].sum()) % key.shape[2]
        return call._replace(key_mask=call.key_mask[:, order]), (query, key[:, :, order], value[:, :, order])
    end = int(call.filled[0].sum())
    mask = None if call.key_mask is None or bool(call.key_mask[:, :end].all()) else call.key_mask[:, :end]
    return call._replace(key_mask=mask), (query, key[:, :, :end], value[:, :, :end])


def _method_of_call(name: str, module: nn.Module, location: ModuleLocation, is_self: bool) -> MethodConfig | None:
    """The method that computes a call; None for exact attention, of which cross attention (not `is_self`) warns."""
    config = getattr(module, "config", None)
    method = settings.method_at(config, name, location)
    if method is not None and (location.is_cross or not is_self):
        reason = refusals.why_cross_attention_is_exact(config, location, method)
        if reason is not None:
            refusals.warn_of_exact_layers(reason, [(module, location)])
            return None
    return method


def _computing_cache_layer(
    name: str, module: nn.Module, method: MethodConfig | None, call: LayerCall, key: Tensor
) -> MethodLayer | None:
    """The cache layer that computes a call, because it returned other keys than those of all tokens; or None."""
    cached: MethodLayer | None = getattr(key, LAYER, None)
    is_its_call = cached is not None and call.is_causal and method == cached.method
    if is_its_call and not model_kinds.kind_at(module).needs_cached_keys:
        return cached
    if isinstance(key, NewKeys):
        raise UnsupportedAttentionError(
            f"{name}: the cache holds {'a state' if cached is None else f'a state of {cached.method}'}, but "
            f"{call.location.name} of this model needs the keys of all tokens: start with a new cache after switching "
            "the model, or use the ordinary cache"
        )
    return None


def check_length_of_mask(name: str, layer: str, mask: Tensor | None, key: Tensor) -> None:
    """Refuse a mask (B, N) for another number of keys than a layer's key (B, H, Nk, D) has, unless a graph is traced.

    Models make one mask for all layers, by the cache's first one.
    """
    if mask is None or is_tracing(key) or mask.shape[1] == key.shape[2]:
        return
    raise UnsupportedAttentionError(
        f"{name}: the mask is for {mask.shape[1]} keys, and {layer} has {key.shape[2]}: the layers of the cache have "
        "different lengths, for example after a call that failed: start with a new cache, or leave attention_mask out "
        "if there is no padding"
    )


def _compute(
    name: str,
    module: nn.Module,
    method: MethodConfig | None,
    call: LayerCall,
    cached: MethodLayer | None,
    tensors: packing.QueryKeyValue,
    key_mask: Tensor | None,
) -> Tensor:
    """The output (B, H, Nq, Dv) for queries, keys and values: that of a method, of a cache layer, or exact."""
    options: dict[str, Any] = {"scale": call.scale, "dropout_p": call.dropout_p}
    added: dict[str, Any] = {"distance_bias": call.distance_bias, "sinks": call.sinks}
    if method is None:
        given = {**options, **added, "window": call.window, "is_causal": call.is_causal}
        return exact_layer(*tensors, key_mask, **given)
    settings.warn_beyond_calibration(getattr(module, "config", None), name, tensors[1].shape[2], key_mask)
    num_heads = tensors[0].shape[1]
    parameters: Mapping[str, Tensor] = required_tensors(module, method, call.location.name)
    heads = head_slice_of(name, module, num_heads)
    if heads is not None:
        parameters = parameters_of_slice(method, parameters, heads, num_heads)
    # In training the global generators draw, so that gradient checkpointing draws the same again.
    options |= {"seed": None if module.training else call.seed, "parameters": parameters}
    options |= {name: x for name, x in added.items() if x is not None}
    if cached is not None:
        return cached.attention(*tensors, key_mask, **options)
    options |= {"is_causal": call.is_causal, "heads": heads}
    return attention(method, *tensors, attention_mask=key_mask, **options)


def required_tensors(module: nn.Module, method: MethodConfig, name: str) -> dict[str, Tensor]:
    """The learned parameters with which a module computes a method; empty if the method learns none."""
    learned = learned_of(module) if NAME in module._modules else None
    if learned is not None and learned.method == method:
        return learned()
    # Not `learns`, because torch.compile warns about cached functions.
    if not get_method(method.method).initial_parameters(method, **_SMALLEST):
        return {}
    found = "no learned parameters" if learned is None else f"learned parameters of {learned.method}"
    raise UnsupportedAttentionError(
        f"{method.method}: {name} has {found}, although its config, which another model may share, asks for {method}: "
        f"call hf_efficient_attn.convert(model, {method.method!r}), and give each model a config of its own"
    )


def head_slice_of(name: str, module: nn.Module, num_heads: int) -> HeadSlice | None:
    """The numbers of the `num_heads` query heads of a call of an attention module; None for all heads of the layer.

    Tensor parallelism gives attention only some of the heads that the module and its config describe. What a method
    draws and has learned for a head depends on its number among all, so an unknown one is refused.
    """
    config = settings.of_layer(getattr(module, "config", None), module)
    total = settings.first_number(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
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
    """Refuse PyTorch's context parallelism, which divides the sequence and takes care of PyTorch's attention only."""
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
