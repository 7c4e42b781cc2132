"""The attention function that Transformers calls under a method's name."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.cache_layers import NewKeys, cache_layer_of
from hf_efficient_attn.integration.configs import settings_of
from hf_efficient_attn.integration.distance_bias import TAKES_DISTANCE_BIAS, take_bias
from hf_efficient_attn.integration.exact import exact_layer
from hf_efficient_attn.integration.head_numbers import head_slice_of, refuse_context_parallel
from hf_efficient_attn.integration.layers import Layer, layer_of, layer_seed
from hf_efficient_attn.integration.learned import required_tensors
from hf_efficient_attn.integration.masks import KeyMask, read_mask
from hf_efficient_attn.integration.refusals import (
    refuse_arguments,
    refuse_unchecked,
    warn_of_exact_cross_attention,
    why_cross_attention_is_exact,
)
from hf_efficient_attn.integration.settings import warn_beyond_calibration
from hf_efficient_attn.integration.sharding import attend, shards_of
from hf_efficient_attn.integration.windows import take_window
from hf_efficient_attn.methods import MethodConfig, attention, parameters_of_slice

# The attribute of an attention module that holds its `ModuleLocation`.
LOCATION = "_efficient_attention"


class ModuleLocation(NamedTuple):
    """Where an attention module is in its model.

    Attributes:
        layer: its layer, as `layers.layer_of` determines it.
        name: its name within the model.
        is_cross: whether its keys come from another model or stack.
        label: what reports and calibration call its layer: `layer`, or, if modules of several stacks have the same
            number, the part of the name up to it, such as "encoder.layers.0".
        window: the sliding window that its model gives it, as `windows.window_of` determines it; None for none.
    """

    layer: Layer | None
    name: str
    is_cross: bool
    label: Layer | None
    window: int | None = None


def location_of(module: nn.Module) -> ModuleLocation:
    """The location that `models.switch` wrote on the module, or else what the module itself says about it."""
    location = getattr(module, LOCATION, None)
    if location is None:
        layer = layer_of(module, str(getattr(module, "layer_idx", "")))
        if layer is None:
            raise UnsupportedAttentionError(
                f"a {type(module).__name__} does not know its layer, because its model was switched by hand: use "
                "model.set_attn_implementation(name) or hf_efficient_attn.convert(model, name)"
            )
        location = ModuleLocation(layer, f"layer {layer}", bool(getattr(module, "is_cross_attention", False)), layer)
    return location


def method_at(config: object, name: str | None, location: ModuleLocation) -> MethodConfig | None:
    """The method that a config chooses for an attention module; None for exact attention, as in layers with a window.

    Args:
        config: the config that applies to the module.
        name: the method that it names as its implementation; None if it names none.
        location: where the module is.
    """
    if name is None or location.window is not None:
        return None
    return settings_of(config, name).for_layer(location.layer, location.name)


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
        location, shards = location_of(module), shards_of(module, kwargs)
        refuse_context_parallel(name, module)
        distance_bias = take_bias(kwargs, query.device)
        mask = read_mask(name, attention_mask)
        attention_mask = mask.keys
        window = take_window(name, location.window, mask.is_local, key.shape[2], kwargs)
        refuse_arguments(name, module, kwargs)
        is_causal = is_causal_call(module, location, mask, is_causal)
        config = getattr(module, "config", None)
        settings = settings_of(config, name)
        method = method_at(config, name, location)
        if method is not None and not is_causal and (location.is_cross or query.shape[2] != key.shape[2]):
            reason = why_cross_attention_is_exact(method, config)
            if reason is not None:
                warn_of_exact_cross_attention(module, reason, [location.name])
                method = None
        dropout = dropout if module.training else 0.0
        if shards is not None:
            if location.window is not None:
                raise UnsupportedAttentionError(
                    f"sequence_parallel: {location.name} attends to a sliding window, which is not divided over "
                    "processes: use a model without windows"
                )
            if distance_bias is not None:
                raise UnsupportedAttentionError(
                    f"sequence_parallel: {location.name} adds a bias of relative positions to its scores, which is not "
                    "divided over processes: use a model with learned or rotary positions, such as BERT or Llama"
                )
            if method is not None and is_causal:
                refuse_unchecked(method, module, location.name)
            warn_beyond_calibration(settings, shards.total, shards.key_mask)
            parameters = {} if method is None else required_tensors(module, method, location.name)
            call: dict[str, Any] = {"is_causal": is_causal, "scale": scaling, "dropout_p": dropout}
            tensors, seed_of_layer = (query, key, value), layer_seed(location.layer)
            out = attend(method, tensors, shards, seed=seed_of_layer, parameters=parameters, **call)
            return out.transpose(1, 2).contiguous(), None
        heads = head_slice_of(name, module, query.shape[1])
        cached = cache_layer_of(key)
        from_state = cached is not None and method == cached.method and is_causal
        if isinstance(key, NewKeys) and not from_state:
            held = "a state" if cached is None else f"a state of {cached.method}"
            raise UnsupportedAttentionError(
                f"{name}: the cache holds {held}, but {location.name} of this model now computes something else: start "
                "with a new cache after switching the model"
            )
        if method is None:
            out = exact_layer(
                query, key, value, attention_mask, is_causal=is_causal, scale=scaling, dropout_p=dropout,
                distance_bias=distance_bias, window=window,
            )  # fmt: skip
        else:
            if is_causal:
                refuse_unchecked(method, module, location.name)
            warn_beyond_calibration(settings, key.shape[2], attention_mask)
            # In training the seed comes from the global generators, so that gradient checkpointing draws the same
            # again. Otherwise it depends on the layer alone.
            seed = None if module.training else layer_seed(location.layer)
            options: dict[str, Any] = {"scale": scaling, "dropout_p": dropout, "seed": seed}
            parameters = required_tensors(module, method, location.name)
            if heads is not None:
                parameters = parameters_of_slice(method, parameters, heads, query.shape[1])
            options["parameters"] = parameters
            if distance_bias is not None:
                options["distance_bias"] = distance_bias
            if cached is not None and from_state:
                out = cached.attention(query, key, value, attention_mask, **options)
            else:
                out = attention(
                    method,
                    query,
                    key,
                    value,
                    attention_mask=attention_mask,
                    is_causal=is_causal,
                    heads=heads,
                    **options,
                )
        return out.transpose(1, 2).contiguous(), None

    setattr(forward, TAKES_DISTANCE_BIAS, True)
    forward.__name__ = forward.__qualname__ = f"{name}_attention_forward"
    return forward
