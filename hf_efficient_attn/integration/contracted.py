"""Attention modules that hand a method their hidden states rather than keys and values.

A method with `Method.forward_hidden_states` contracts the tokens before they are projected to keys and values, so that P rows
are projected in place of N. The attention interface comes after these projections; so in the modules of `_LAYOUTS` the
instance gets a forward of its own, which goes when the model is switched to something else. In all others the method
gets keys and values and contracts those, which gives the same numbers to rounding.
"""

import functools
from typing import NamedTuple

from torch import Tensor, nn

from hf_efficient_attn.integration.attention import location_of, refuse_arguments, settings_of
from hf_efficient_attn.integration.layers import layer_seed
from hf_efficient_attn.integration.learned import learned_tensors
from hf_efficient_attn.integration.settings import EfficientAttentionConfig
from hf_efficient_attn.methods import (
    AttentionOptions,
    HiddenProjections,
    MethodConfig,
    available_methods,
    get_method,
)
from hf_efficient_attn.ops.random import draw_seed


class _Layout(NamedTuple):
    """Attributes of an attention module: projections (None: the output has none), width of a head, dropout."""

    query: str
    key: str
    value: str
    output: str | None
    width: str
    dropout: str


_LAYOUTS = {
    "BertSelfAttention": _Layout("query", "key", "value", None, "attention_head_size", "dropout"),
    "RobertaSelfAttention": _Layout("query", "key", "value", None, "attention_head_size", "dropout"),
    "DistilBertSelfAttention": _Layout("q_lin", "k_lin", "v_lin", "out_lin", "attention_head_size", "dropout"),
    "ViTAttention": _Layout("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "attention_dropout"),
    "DeiTAttention": _Layout("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "attention_dropout"),
    "T2TViTAttention": _Layout("q_proj", "k_proj", "v_proj", "o_proj", "head_dim", "attention_dropout"),
}
_PLACES = ("transformers.models.", "hf_efficient_attn.models.")

# What a method's name alone means, made before a graph is traced.
_DEFAULTS: dict[str, EfficientAttentionConfig] = {}


def fit(module: nn.Module, method: MethodConfig | None) -> None:
    """Let an attention module contract its hidden states if its method does that, and undo it if not."""
    present = vars(module).get("forward")
    ours = isinstance(present, functools.partial) and present.func is _forward
    wanted = method is not None and get_method(method.method).forward_hidden_states is not None and _layout(module) is not None
    if ours and not wanted:
        del module.forward
    elif wanted and present is None:
        _DEFAULTS.update(
            {name: EfficientAttentionConfig(name) for name in available_methods() if name not in _DEFAULTS}
        )
        module.forward = functools.partial(_forward, module)


def _layout(module: nn.Module) -> _Layout | None:
    """The layout of one of Transformers' own modules, or of ours, that is known here and not causal."""
    kind = type(module)
    layout = _LAYOUTS.get(kind.__name__) if kind.__module__.startswith(_PLACES) else None
    if layout is None or getattr(module, "is_causal", True):
        return None
    names = [name for name in (*layout, "scaling") if name is not None]
    return layout if all(hasattr(module, name) for name in names) else None


def _forward(
    module: nn.Module, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs
) -> tuple[Tensor, None]:
    """In place of the module's own forward: the same arguments, and the same output to rounding."""
    method = _method_of(module)
    if method is None or kwargs.get("past_key_values") is not None or kwargs.get("is_causal"):
        return type(module).forward(module, hidden_states, attention_mask, **kwargs)
    layout = _layout(module)
    refuse_arguments(method.method, hidden_states.shape[1], attention_mask, kwargs)
    project = {name: getattr(module, getattr(layout, name)) for name in ("query", "key", "value")}
    query = project["query"](hidden_states).unflatten(2, (-1, getattr(module, layout.width))).transpose(1, 2)
    dropout = getattr(module, layout.dropout)
    dropout = getattr(dropout, "p", dropout) if module.training else 0.0
    # As in the attention function: in training from the global generators, else by layer alone.
    seed = draw_seed(query.device) if module.training else layer_seed(location_of(module).layer)
    hidden = hidden_states
    if attention_mask is not None:
        hidden = hidden.masked_fill(~attention_mask[:, :, None], 0.0)
    options = AttentionOptions(
        attention_mask, False, module.scaling, dropout, seed + method.seed, learned_tensors(module) or {}
    )
    projections = HiddenProjections(project["key"], project["value"])
    out = get_method(method.method).forward_hidden_states(method, query, hidden, projections, options)
    out = out.transpose(1, 2).flatten(2)
    return (out if layout.output is None else getattr(module, layout.output)(out)), None


def _method_of(module: nn.Module) -> MethodConfig | None:
    """The method in force at a module, if it takes hidden states."""
    default = _DEFAULTS.get(module.config._attn_implementation)
    if default is None:  # another implementation, set by hand
        return None
    method = settings_of(module.config, default).for_layer(location_of(module).layer)
    return None if method is None or get_method(method.method).forward_hidden_states is None else method
