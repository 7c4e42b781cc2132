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
from hf_efficient_attn.integration.layers import layer_seed
from hf_efficient_attn.integration.learned import required_tensors
from hf_efficient_attn.integration.masks import KeyMask, read_mask
from hf_efficient_attn.integration.models import ModuleLocation, location_of, method_at
from hf_efficient_attn.integration.refusals import (
    refuse_arguments,
    refuse_unchecked,
    warn_of_exact_cross_attention,
    why_cross_attention_is_exact,
)
from hf_efficient_attn.integration.sequence_parallel import attend, shards_of
from hf_efficient_attn.integration.settings import warn_beyond_calibration
from hf_efficient_attn.integration.windows import take_window
from hf_efficient_attn.methods import MethodConfig, attention, parameters_of_slice
from hf_efficient_attn.ops.shards import Shards

__all__ = ["ModuleLocation", "is_causal_call", "location_of", "make_attention_function", "method_at"]


class _Call(NamedTuple):
    """One call of an attention module under the name of a method; the other values are those of `exact_layer`."""

    name: str
    module: nn.Module
    location: ModuleLocation
    method: MethodConfig | None  # what computes the call; None for exact attention
    key_mask: Tensor | None
    is_causal: bool
    window: int | None
    distance_bias: Tensor | None
    scale: float | None
    dropout_p: float

    def check(self, kv_len: int, key_mask: Tensor | None) -> None:
        """Refuse a method without the form of this call, and warn of sequences longer than calibrated."""
        if self.method is not None and self.is_causal:
            refuse_unchecked(self.method, self.module, self.location.name)
        warn_beyond_calibration(settings_of(getattr(self.module, "config", None), self.name), kv_len, key_mask)


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
        window = take_window(name, location.window, mask.is_local, key.shape[2], kwargs)
        refuse_arguments(name, module, kwargs)
        is_causal = is_causal_call(module, location, mask, is_causal)
        method = _method_of(name, module, location, is_rectangular=not is_causal and query.shape[2] != key.shape[2])
        dropout = dropout if module.training else 0.0
        call = _Call(name, module, location, method, mask.keys, is_causal, window, distance_bias, scaling, dropout)
        out = _of_all(call, query, key, value) if shards is None else _of_shard(call, (query, key, value), shards)
        return out.transpose(1, 2).contiguous(), None

    setattr(forward, TAKES_DISTANCE_BIAS, True)
    forward.__name__ = forward.__qualname__ = f"{name}_attention_forward"
    return forward


def _method_of(name: str, module: nn.Module, location: ModuleLocation, *, is_rectangular: bool) -> MethodConfig | None:
    """The method that computes a call. Cross attention that it cannot compute stays exact, with a warning."""
    config = getattr(module, "config", None)
    method = method_at(config, name, location)
    if method is not None and (location.is_cross or is_rectangular):
        reason = why_cross_attention_is_exact(method, config)
        if reason is not None:
            warn_of_exact_cross_attention(module, reason, [location.name])
            return None
    return method


def _of_shard(call: _Call, tensors: tuple[Tensor, Tensor, Tensor], shards: Shards) -> Tensor:
    """Attention of the tokens of this process, (B, H, n, Dv)."""
    location, method = call.location, call.method
    what, instead = "", ""
    if location.window is not None:
        what, instead = "attends to a sliding window, which", "a model without windows"
    elif call.distance_bias is not None:
        what = "adds a bias of relative positions to its scores, which"
        instead = "a model with learned or rotary positions, such as BERT or Llama"
    if what:
        raise UnsupportedAttentionError(
            f"sequence_parallel: {location.name} {what} is not divided over processes: use {instead}"
        )
    call.check(shards.total, shards.key_mask)
    parameters = {} if method is None else required_tensors(call.module, method, location.name)
    return attend(
        method, tensors, shards, is_causal=call.is_causal, scale=call.scale, dropout_p=call.dropout_p,
        seed=layer_seed(location.layer), parameters=parameters,
    )  # fmt: skip


def _of_all(call: _Call, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention in one process, (B, H, Nq, Dv), from keys or from what a layer of the cache holds instead of keys."""
    name, module, location, method = call[:4]
    heads = head_slice_of(name, module, query.shape[1])
    cached = cache_layer_of(key)
    if cached is not None and (method != cached.method or not call.is_causal):
        cached = None
    if isinstance(key, NewKeys) and cached is None:
        holder = cache_layer_of(key)
        held = "a state" if holder is None else f"a state of {holder.method}"
        raise UnsupportedAttentionError(
            f"{name}: the cache holds {held}, but {location.name} of this model now computes something else: start "
            "with a new cache after switching the model"
        )
    options: dict[str, Any] = {"scale": call.scale, "dropout_p": call.dropout_p}
    if method is None:
        return exact_layer(
            query, key, value, call.key_mask, is_causal=call.is_causal, distance_bias=call.distance_bias,
            window=call.window, **options,
        )  # fmt: skip
    call.check(key.shape[2], call.key_mask)
    # In training the seed comes from the global generators, so that gradient checkpointing draws the same again.
    # Otherwise it depends on the layer alone.
    options["seed"] = None if module.training else layer_seed(location.layer)
    parameters = required_tensors(module, method, location.name)
    if heads is not None:
        parameters = parameters_of_slice(method, parameters, heads, query.shape[1])
    options["parameters"] = parameters
    if call.distance_bias is not None:
        options["distance_bias"] = call.distance_bias
    if cached is not None:
        return cached.attention(query, key, value, call.key_mask, **options)
    return attention(
        method, query, key, value, attention_mask=call.key_mask, is_causal=call.is_causal, heads=heads, **options
    )
