"""What a switch refuses before it changes a model (`check`), and why; and what it warns of.

What only a call shows is refused there, in `inputs` and `attention`.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from hf_efficient_attn.errors import UnsupportedAttentionError, warn
from hf_efficient_attn.integration import distance_bias, model_kinds, models
from hf_efficient_attn.integration.layers import Layer, ModuleLocation, in_order, names_of
from hf_efficient_attn.integration.settings import EXACT, method_of, settings_of
from hf_efficient_attn.methods import MethodConfig, methods_with
from hf_efficient_attn.ops.tracing import nothing, replaced_in_graphs

# The attribute of an attention module whose exact cross attention has been warned of.
WARNED = "_efficient_attention_warned"


def check(model: PreTrainedModel, chosen: Sequence[models.AttentionModule], is_complete: bool) -> None:
    """Refuse what a model cannot run of what its configs ask for, `chosen` being the modules to which they apply.

    A model that gets more parts (`is_complete` is False) may lack layers that `layers` names, and is checked again.
    """
    kind, through = type(model).__name__, [found for found in chosen if models.uses_interface(type(found.module))]
    named = {part: name for part in models.models_in(model) if (name := method_of(part.config))}
    for part, name in named.items():
        refuse_unknown_implementation(type(part), name)
    if not through and (chosen or is_complete):
        raise UnsupportedAttentionError(_no_interface(model, next(iter(named.values()))))
    for what, module, path in _needs_of_a_matrix(model, through):
        others = "the layers of another part (layers=[...]), or " if model.config.sub_configs else ""
        raise UnsupportedAttentionError(
            f"{kind} {what} (in {type(module).__name__} at {path or 'the top'}), for which no method here builds a "
            f"matrix: use {others}{_exact_for(through)}, or a model without it, such as BERT, GPT-2 or Llama"
        )
    if is_complete:
        _check_layers(kind, chosen)
    has_encoder = any(found.location.is_selected("encoder") for found in chosen)
    for found in chosen:
        if found.chosen is not None:
            is_outside = has_encoder and not found.location.is_selected("encoder")
            _check_form(kind, found, found.chosen, "choose only its encoder (layers=['encoder'])" if is_outside else "")


def parts_to_keep_exact(model: PreTrainedModel, modules: Sequence[models.AttentionModule]) -> list[PreTrainedModel]:
    """The parts that name a method only because the model that holds them does, and that no method can run.

    They are no reason to refuse the other parts. Their own code would not read the masks that are made for a method: a
    decoder would attend to later tokens. A part that names another method than the model that holds it was chosen
    itself, and is refused if it cannot run it.
    """
    kept = []
    for part, names_method in models.parts_of_own(model):
        name, inside = method_of(part.config), set(models.models_in(part))
        own = [found for found in modules if found.config is part.config]
        through = [found for found in own if models.uses_interface(type(found.module))]
        chosen = [found for found in own if found.chosen is not None]
        if name is not None and names_method:
            if not any(models.uses_interface(type(x.module)) for x in modules if x.owner in inside):
                raise UnsupportedAttentionError(_no_interface(part, name))
        elif name is not None and own and not through:
            kept.append(part)
            kind = type(part).__name__
            reason = f"{kind} does not compute its attention through Transformers' attention interface and stays exact:"
            warn_of_exact_layers(reason, [(found.module, found.location) for found in chosen])
        elif name is not None and own and not chosen and any(_needs_of_a_matrix(model, through)):
            kept.append(part)
    return kept


def _no_interface(model: PreTrainedModel, name: str) -> str:
    """Why a model that computes its attention itself is refused."""
    return (
        f"{type(model).__name__} does not compute its attention through Transformers' attention interface, so that "
        f"attn_implementation={name!r} would have no effect: load it without that argument"
    )


def _exact_for(chosen: Iterable[models.AttentionModule]) -> str:
    """How to choose exact attention in the model of some modules."""
    return f"attn_implementation={models.exact_name(found.owner for found in chosen)!r}"


def refuse_unknown_implementation(kind: type[PreTrainedModel], name: str) -> None:
    """Refuse a method for a model class that takes its attention class from a table by the implementation's name."""
    table = models.attention_table(kind)
    if table is not None:
        raise UnsupportedAttentionError(
            f"{kind.__name__} chooses its attention from a table ({table}) that knows only Transformers' own "
            f"implementations, so that attn_implementation={name!r} is not possible: use {EXACT!r} or 'eager'"
        )


def _needs_of_a_matrix(
    model: PreTrainedModel, through: Sequence[models.AttentionModule]
) -> Iterator[tuple[str, nn.Module, str]]:
    """What a model does that only a (queries, keys) matrix could keep: in words, and the module with its path.

    Modules inside of attention modules, and attention modules that do not ask the interface, do not concern a method.
    """
    for path, module in _around_attention(model, {id(found.owner) for found in through}):
        if not distance_bias.has_distance_bias(type(module)):
            yield from ((what, module, path) for what in models.matrix_needs(module, is_attention=False))
    for module, location, config, owner in through:
        if not distance_bias.has_distance_bias(type(module)):
            yield from ((what, module, location.name) for what in models.matrix_needs(module, is_attention=True))
        if location.window is not None and model_kinds.kind_of(type(module)).hides_window:
            yield "attends to a window of its own that only a mask knows", module, location.name
        size: Any = getattr(config, "attention_chunk_size", None)
        positions = getattr(config, "max_position_embeddings", None)
        is_shorter = size is not None and (positions is None or size < positions)
        if is_shorter and "chunked" in (models.layer_type(module, config) or ""):
            yield "attends within chunks of its own", module, location.name
        # Like `sdpa`, a method takes causality from the attention module. In other models it can say anything.
        if not models.knows_causality(module, owner):
            what = f"does not support attn_implementation={EXACT!r}: possibly only a mask makes it causal"
            yield what, module, location.name


def _around_attention(
    module: nn.Module, owners: Set[int], path: str = "", is_concerned: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """The modules of some models, by their ids, that are neither attention modules nor inside of one; with paths."""
    if not models.is_attention(module):
        is_concerned = id(module) in owners if isinstance(module, PreTrainedModel) else is_concerned
        if is_concerned:
            yield path, module
        for name, child in module.named_children():
            yield from _around_attention(child, owners, f"{path}.{name}".lstrip("."), is_concerned)


def _check_layers(kind: str, chosen: Sequence[models.AttentionModule]) -> None:
    """Refuse layers that the model does not have, items of `layers` with windows only, and modules of two entries."""
    named, selected = set[Layer](), dict[Layer | None, list[models.AttentionModule]]()
    for found in chosen:
        settings = settings_of(found.config, str(method_of(found.config)))
        named.update(settings.named_layers())
        methods = []
        for entry in settings.entries:
            items = [x for x in entry.layers or (None,) if x is None or found.location.is_selected(x)]
            methods += [entry.config.method] if items else []
            for item in items if models.uses_interface(type(found.module)) else ():
                selected.setdefault(item, []).append(found)
        if len(methods) > 1:
            raise UnsupportedAttentionError(
                f"{len(methods)} entries of 'layers' select {found.location.name} ({', '.join(methods)}): each layer "
                "uses one method"
            )
    # A part that is named by the whole model may since have settings of its own.
    through = [found for found in chosen if models.uses_interface(type(found.module))]
    missing = in_order(item for item in named if not any(found.location.is_selected(item) for found in through))
    if missing:
        layers = in_order(found.location.layer for found in chosen if found.location.layer is not None)
        notes = {str(note) for found in chosen if (note := getattr(found.config, "attention_note", None))}
        raise UnsupportedAttentionError(
            f"{kind} has no attention in layers {missing}; its layers are {'; '.join([str(layers), *notes])}. Names "
            f"that select several of them: {', '.join(map(repr, names_of(x.location.name for x in chosen)))}"
        )
    for group in selected.values():
        if all(found.location.window is not None for found in group):
            others = ", ".join(found.location.name for found in through if found.location.window is None)
            another = f"use {_exact_for(group)} for this model, or another model"
            raise UnsupportedAttentionError(
                f"{method_of(group[0].config)}: {kind} has a sliding window of its own in {group[0].location.name}"
                f"{f' and {len(group) - 1} more of the chosen layers' if len(group) > 1 else ''}, which is "
                "sub-quadratic already and would be lost: "
                f"{f'choose layers without a window: {others}' if others else another}"
            )


def _check_form(kind: str, found: models.AttentionModule, method: MethodConfig, advice: str) -> None:
    """Refuse a method without the form that a module needs, with some more advice on what to choose instead."""
    location, attention, is_causal = found.location, type(found.module), found.is_causal
    is_rectangular = getattr(found.module, "is_rectangular", False)
    adds_bias = method.adds_distance_bias and (method.adds_causal_bias or not is_causal)
    has_bias = not location.is_cross and distance_bias.has_distance_bias(attention)
    has_sinks = models.has_sinks(found.module)
    facts = ["adds_causal_bias" if is_causal else "adds_distance_bias"] * has_bias + ["knows_lse"] * has_sinks
    suitable = _suitable(is_causal, is_rectangular, facts)
    if has_bias and not adds_bias:
        is_decoder = is_causal and method.adds_distance_bias
        raise UnsupportedAttentionError(
            f"{kind} adds a bias of relative positions to the scores of its attention "
            f"(in {attention.__name__} at {location.name}), which {method.method} cannot keep"
            f"{' in causal attention' if is_decoder else ''}: {f'{advice}, or ' if is_decoder and advice else ''}use "
            f"{suitable} with default hyperparameters, or {_exact_for([found])}, or a model without it, such as BERT, "
            "GPT-2 or Llama"
        )
    if has_sinks and not method.knows_lse:
        raise UnsupportedAttentionError(
            f"{kind} has attention sinks (in {attention.__name__} at {location.name}), which {method.method} cannot "
            f"keep, because it does not know the sum of its weights: use {suitable}, or {_exact_for([found])}"
        )
    check_methods([method], is_causal, is_rectangular, model=f"{kind} (at {location.name})", advice=advice, facts=facts)


def _suitable(is_causal: bool, is_rectangular: bool, facts: Iterable[str]) -> str:
    """The names of the methods that suit a model, and for which `facts` hold."""
    return ", ".join(methods_with(*["causal"] * is_causal, *["rectangular"] * is_rectangular, *facts))


def check_methods(
    configs: Iterable[MethodConfig],
    is_causal: bool,
    is_rectangular: bool = False,
    *,
    model: str = "the model",
    advice: str = "",
    facts: Iterable[str] = (),
) -> None:
    """Refuse methods that do not suit a model, with the names of methods that do, and for which `facts` hold."""
    suitable = _suitable(is_causal, is_rectangular, facts)
    for config in configs:
        name = config.method
        if is_causal and not config.causal:
            raise UnsupportedAttentionError(
                f"{model} is a decoder and {name} has no causal form. Methods that have one: "
                f"{suitable}{advice and f'; or {advice}'}"
            )
        if is_causal:
            config.check_causal()
        if is_rectangular and config.needs_square:
            raise UnsupportedAttentionError(
                f"{model} has fewer keys than queries and {name} needs as many keys as queries. Methods that do not: "
                f"{suitable}"
            )


def why_cross_attention_is_exact(config: object, location: ModuleLocation, method: MethodConfig) -> str | None:
    """The warning that cross attention of a model with this config stays exact; None if the method computes it."""
    if method.needs_square:
        return f"{method.method} needs as many queries as keys: cross attention stays exact in"
    # The config of MusicGen does not say that the model is a decoder. SegFormer's self-attention merges keys.
    decodes = (getattr(config, x, False) for x in ("is_decoder", "is_encoder_decoder", "add_cross_attention"))
    if method.mixes_queries and (location.is_cross or any(decodes)):
        return f"with {method.method} outputs depend on other tokens, also later ones: cross attention stays exact in"
    return None


@replaced_in_graphs(nothing)
def warn_of_exact_layers(reason: str, found: Iterable[tuple[nn.Module, ModuleLocation]]) -> None:
    """Warn once per module that its attention stays exact. No warning is given while a graph is traced."""
    new = {location.name: module for module, location in found if not getattr(module, WARNED, False)}
    if new:
        warn(f"{reason} {', '.join(new)}")
    for module in new.values():
        setattr(module, WARNED, True)
