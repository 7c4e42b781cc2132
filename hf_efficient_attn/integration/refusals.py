"""What is refused, and why: methods that do not suit a model, and calls that would silently lose something.

Tensors among the keyword arguments of a call need a rule, because Transformers hands everything that a model does not
know itself through to its attention function. Attention would lose an argument

- that one of Transformers' attention functions reads (`_ATTENTION_ARGUMENTS`), whatever its type;
- that is a tensor and whose name speaks of attention (`_ATTENTION_WORDS`);
- that is a tensor and that the model's own attention code names (`model_code.attention_arguments`).

Everything else passes through to no effect, as it does with exact attention: arguments of a loss (`labels`,
`shift_labels`, `num_items_in_batch`, weights) and inputs that the model has used already (`_INPUTS`).
"""

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.model_code import attention_arguments
from hf_efficient_attn.integration.models import LOCATION, ModuleLocation
from hf_efficient_attn.integration.settings import EXACT
from hf_efficient_attn.methods import MethodConfig, get_method, learns, methods_with
from hf_efficient_attn.ops.tracing import nothing, replaced_in_graphs

# The attribute of an attention module whose exact cross attention has been warned of.
WARNED = "_efficient_attention_warned"
# Arguments that change what attention computes, as Transformers' attention functions and paged caches name them.
_ATTENTION_ARGUMENTS = (
    "position_bias", "softcap", "s_aux", "sinks", "alibi", "cache", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k",
    "seq_idx", "head_mask", "layer_head_mask", "indices", "block_indices", "block_table", "read_index", "write_index",
)  # fmt: skip
_ATTENTION_WORDS = (
    "attention", "attn", "mask", "bias", "alibi", "sink", "cache", "seq_len", "seqlen", "seq_idx", "block", "window",
    "indices",
)  # fmt: skip
_LOSS_WORDS = ("label", "loss", "target")
# Inputs of a model that its layers hand on.
_INPUTS = (
    "position_ids", "cache_position", "position_embeddings", "num_items_in_batch", "encoder_hidden_states",
    "encoder_attention_mask", "input_ids", "token_type_ids",
)  # fmt: skip


def check_methods(
    configs: Iterable[MethodConfig],
    is_causal: bool,
    is_rectangular: bool = False,
    *,
    model: str = "the model",
    allow_learned: bool = False,
) -> None:
    """Check that methods suit a model.

    Raises:
        UnsupportedAttentionError: a method does not suit the model. The message names the methods that do.
    """
    for config in configs:
        name, info = config.method, get_method(config.method).info
        if is_causal and not info.causal:
            raise UnsupportedAttentionError(
                f"{model} is a decoder and {name} has no causal form. Methods that have one: "
                f"{', '.join(methods_with('causal'))}"
            )
        if is_rectangular and config.needs_square:
            raise UnsupportedAttentionError(
                f"{model} has fewer keys than queries and {name} needs as many keys as queries. Methods that do not: "
                f"{', '.join(methods_with('rectangular'))}"
            )
        if not allow_learned and learns(config):
            raise UnsupportedAttentionError(
                f"{name} has learned parameters, and its error before training says nothing about its error after it: "
                "leave the method out here, convert the model to it and fine-tune"
            )


def refuse_unchecked(method: MethodConfig, module: nn.Module, name: str) -> None:
    """Refuse a causal call of a method without a causal form, which a switch could not see or has not seen."""
    if get_method(method.method).info.causal:
        return
    if getattr(module, "is_causal", None) is True:
        why = (
            "config.efficient_attention was changed without switching the model: call "
            "hf_efficient_attn.convert(model, ...) instead of assigning to the config"
        )
    else:
        why = "The module calls itself bidirectional, but its model gives it a causal mask: choose another method"
    raise UnsupportedAttentionError(
        f"{name} is causal and {method.method} has no causal form. {why}. Methods that have a causal form: "
        f"{', '.join(methods_with('causal'))}"
    )


def why_cross_attention_is_exact(method: str | MethodConfig, config: object) -> str | None:
    """The reason why cross attention stays exact in a model with this config; None if the method computes it.

    A name stands for the method with its default hyperparameters.
    """
    form = get_method(method if isinstance(method, str) else method.method)
    name, hyperparameters = form.info.name, form.default if isinstance(method, str) else method
    if hyperparameters.needs_square:
        return f"{name} needs as many queries as keys"
    decodes = getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False)
    # GPT-2's config does not say that the model is a decoder, but only a decoder adds cross attention.
    if form.default.mixes_queries and (decodes or getattr(config, "add_cross_attention", False)):
        return f"with {name} later tokens of a decoder would influence earlier ones"
    return None


@replaced_in_graphs(nothing)
def warn_of_exact_cross_attention(module: nn.Module, reason: str, names: list[str]) -> None:
    """Warn once per module that cross attention stays exact. No warning is given while a graph is traced."""
    if not getattr(module, WARNED, False):
        warnings.warn(f"{reason}: cross attention stays exact in {', '.join(names)}", stacklevel=2)
        setattr(module, WARNED, True)


def refuse_arguments(name: str, module: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Refuse everything in a call of an attention module that would silently be lost, in the name of a method."""
    if kwargs.get("output_attentions"):
        raise UnsupportedAttentionError(no_attentions(name))
    for argument, value in kwargs.items():
        if value is not None and (argument in _ATTENTION_ARGUMENTS or _is_lost(module, argument, value)):
            raise UnsupportedAttentionError(
                f"{name}: the argument {argument!r} of the attention would be lost: use attn_implementation={EXACT!r} "
                "or 'eager' for this model, or leave the argument out"
            )


def _is_lost(module: nn.Module, argument: str, value: object) -> bool:
    """Whether attention would lose an argument that is or holds a tensor; see the rule at the top."""
    holds_tensors = isinstance(value, Tensor) or (
        isinstance(value, (tuple, list)) and any(isinstance(item, Tensor) for item in value)
    )
    if not holds_tensors or argument in _INPUTS or any(word in argument for word in _LOSS_WORDS):
        return False
    if any(word in argument for word in _ATTENTION_WORDS):
        return True
    location: ModuleLocation | None = getattr(module, LOCATION, None)
    known = None if location is None else location.arguments
    return argument in (attention_arguments(type(module)) if known is None else known)


def no_attentions(name: str) -> str:
    """The message for `output_attentions=True`."""
    return (
        f"output_attentions=True: {name} never computes the attention probabilities; load the model with "
        "attn_implementation='eager' to see them"
    )
