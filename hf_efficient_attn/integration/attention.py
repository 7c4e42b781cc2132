"""The attention function that Transformers calls under a method's name."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.exact import exact_layer
from hf_efficient_attn.integration.layers import Layer, layer_of, layer_seed
from hf_efficient_attn.integration.learned import learned_tensors
from hf_efficient_attn.integration.recurrent import NewKeys, state_layer_of
from hf_efficient_attn.integration.settings import EfficientAttentionConfig
from hf_efficient_attn.methods import attention, get_method

# Arguments that change what attention means and that no method here can honour.
_MEANINGFUL = (
    "position_bias", "softcap", "s_aux", "sinks", "alibi", "cache", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k",
    "seq_idx", "head_mask", "layer_head_mask", "indices", "block_indices",
)  # fmt: skip
# Tensors that pass through a model's keyword arguments and that attention has no use for.
_HARMLESS = (
    "position_ids", "cache_position", "position_embeddings", "num_items_in_batch", "encoder_hidden_states",
    "encoder_attention_mask", "input_ids", "token_type_ids", "labels",
)  # fmt: skip


class ModuleLocation(NamedTuple):
    """Where an attention module stands in its model.

    layer: as `layers.layer_of` tells it. name: within its model. is_cross: whether its keys come from another model or
    stack.
    """

    layer: Layer | None
    name: str
    is_cross: bool


def location_of(module: nn.Module) -> ModuleLocation:
    """What `models.prepare` wrote on the module, or else what the module knows of itself."""
    location = getattr(module, "_efficient_attention", None)
    if location is None:
        layer = layer_of(module, str(getattr(module, "layer_idx", "")))
        if layer is None:
            raise UnsupportedAttentionError(
                f"a {type(module).__name__} does not know its layer, since its model was switched by hand: use "
                "model.set_attn_implementation(name) or hf_efficient_attn.convert(model, name)"
            )
        location = ModuleLocation(layer, f"layer {layer}", bool(getattr(module, "is_cross_attention", False)))
    return location


def settings_of(config, default: EfficientAttentionConfig) -> EfficientAttentionConfig:
    """A model config's choice if it is one for this method, else the method with its defaults in all layers.

    The second comes about where a model that carries a choice is switched to another method.
    """
    stored = None if config is None else config.efficient_attention
    return default if stored is None or stored.settings.method != default.method else stored.settings


def make_attention_function(name: str) -> Callable:
    """The function to register under `name`: (module, query, key, value, mask, ...) -> ((B, Nq, H, Dv), None)."""
    default = EfficientAttentionConfig(name)

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
        **kwargs,
    ) -> tuple[Tensor, None]:
        location = location_of(module)
        refuse_arguments(name, key.shape[2], attention_mask, kwargs)
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        is_causal = bool(is_causal) and not location.is_cross
        method = settings_of(getattr(module, "config", None), default).for_layer(location.layer)
        crossing = not is_causal and (location.is_cross or query.shape[2] != key.shape[2])
        if method is not None and crossing:
            reason = why_cross_attention_is_exact(method.method, getattr(module, "config", None))
            if reason is not None:
                warn_of_exact_cross_attention(module, reason, [location.name])
                method = None
        dropout = dropout if module.training else 0.0
        cached = state_layer_of(key)
        from_state = cached is not None and method == cached.method and is_causal
        if isinstance(key, NewKeys) and not from_state:
            raise UnsupportedAttentionError(
                f"{name}: the cache holds a state of {cached.method}, and {location.name} of this model now computes "
                "something else: start with a new cache after switching the model"
            )
        if method is None:
            out = exact_layer(
                query, key, value, attention_mask, is_causal=is_causal, scale=scaling, dropout_p=dropout
            )  # fmt: skip
        else:
            # In training from the global generators, so that checkpointing draws the same again; else by layer alone.
            seed = None if module.training else layer_seed(location.layer)
            options = {"scale": scaling, "dropout_p": dropout, "seed": seed}
            if from_state:
                out = cached.attend(query, key, value, attention_mask, **options)
            else:
                out = attention(
                    method, query, key, value, attention_mask=attention_mask, is_causal=is_causal,
                    parameters=learned_tensors(module), **options
                )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None

    forward.__name__ = forward.__qualname__ = f"{name}_attention_forward"
    return forward


def why_cross_attention_is_exact(method: str, config) -> str | None:
    """Why a method does not compute the cross attention of a model with such a config; None if it does."""
    form = get_method(method)
    if not form.info.rectangular:
        return f"{method} needs as many queries as keys"
    decodes = getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False)
    # GPT-2's config is not marked as a decoder's, but only a decoder adds cross attention.
    if form.mixes_queries and (decodes or getattr(config, "add_cross_attention", False)):
        return f"with {method} later tokens of a decoder would reach earlier ones"
    return None


def warn_of_exact_cross_attention(module: nn.Module, reason: str, names: list[str]) -> None:
    """One warning a module that cross attention stays exact; nothing while a graph is traced."""
    if torch.compiler.is_compiling() or getattr(module, "_efficient_attention_warned", False):
        return
    module._efficient_attention_warned = True
    warnings.warn(
        f"{reason}, so that cross attention stays exact in {', '.join(names)}",
        stacklevel=2,
    )


def refuse_arguments(name: str, columns: int, mask: Tensor | None, kwargs: dict) -> None:
    """Everything that would be dropped in silence."""
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim != 2 or mask.dtype != torch.bool):
        shape = f"{mask.ndim}-D {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
        raise UnsupportedAttentionError(
            f"{name}: a {shape} attention mask cannot be kept, since no (queries, keys) mask is ever built here: give "
            "the model an attention_mask of shape (batch, length), 1 where a token is there, or use "
            "attn_implementation='sdpa'"
        )
    if kwargs.get("output_attentions"):
        raise UnsupportedAttentionError(no_attentions(name))
    window = kwargs.get("sliding_window")
    if window is not None and window < columns:
        raise UnsupportedAttentionError(
            f"{name}: the layer has a sliding window of {window} keys of its own and the sequence {columns}; use "
            "attn_implementation='sdpa' for this model"
        )
    for argument, given in kwargs.items():
        if given is None:
            continue
        tensors = isinstance(given, Tensor) or (
            isinstance(given, (tuple, list)) and any(isinstance(x, Tensor) for x in given)
        )
        if argument in _MEANINGFUL or (tensors and argument not in _HARMLESS):
            raise UnsupportedAttentionError(
                f"{name}: the model gives its attention {argument!r}, which would be lost: use "
                "attn_implementation='sdpa' or 'eager' for this model"
            )


def no_attentions(name: str) -> str:
    return (
        f"output_attentions=True: {name} never forms the attention probabilities; load the model with "
        "attn_implementation='eager' to see them"
    )
