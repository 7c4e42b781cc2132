"""What a switch checks before it changes a model: layers that do not exist, and methods that the model cannot run."""

from collections.abc import Iterator, Sequence, Set
from typing import Any

from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration import windows
from hf_efficient_attn.integration.configs import method_of, settings_of
from hf_efficient_attn.integration.distance_bias import has_distance_bias
from hf_efficient_attn.integration.layers import in_order, is_selected, names_of
from hf_efficient_attn.integration.model_code import (
    attention_table,
    composes_mask,
    own_mask,
    reads_cache,
    score_change,
    uses_interface,
)
from hf_efficient_attn.integration.models import AttentionModule, is_attention, models_in
from hf_efficient_attn.integration.recurrent import is_recurrent
from hf_efficient_attn.integration.refusals import check_methods
from hf_efficient_attn.integration.settings import EXACT, EfficientAttentionConfig
from hf_efficient_attn.methods import get_method, methods_with

_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "num_decoder_layers", "encoder_layers", "decoder_layers")


def check(model: PreTrainedModel, chosen: Sequence[AttentionModule], is_complete: bool) -> None:
    """Refuse what a model cannot run of what its configs ask for, `chosen` being the modules to which they apply.

    In a model that becomes part of another one (`is_complete` is False) fewer choices are errors.
    """
    through = [found for found in chosen if uses_interface(type(found.module))]
    _check_interface(model, chosen, through, is_complete)
    _check_scores(model, through)
    _check_layers(model, chosen, is_complete)
    if is_complete:
        _check_windows(model, chosen, through)
    _check_methods(model, chosen)


def refuse_unknown_implementation(kind: type[PreTrainedModel], name: str) -> None:
    """Refuse a method for a model class that takes its attention class from a table by the implementation's name."""
    table = attention_table(kind)
    if table is not None:
        raise UnsupportedAttentionError(
            f"{kind.__name__} chooses its attention from a table ({table}) that knows only Transformers' own "
            f"implementations, so that attn_implementation={name!r} is not possible: use {EXACT!r} or 'eager'"
        )


def _check_interface(
    model: PreTrainedModel, chosen: Sequence[AttentionModule], through: Sequence[AttentionModule], is_complete: bool
) -> None:
    """Refuse a model in which the choice would have no effect, or whose attention modules cannot be trusted.

    Like Transformers' `sdpa`, a method takes causality from the attention module. In a model that does not support
    `sdpa` the modules can say anything; in some decoders they say that they are not causal.
    """
    named = {part: name for part in models_in(model) if (name := method_of(part.config))}
    for part, name in named.items():
        refuse_unknown_implementation(type(part), name)
        if composes_mask(part):
            raise UnsupportedAttentionError(
                f"{type(part).__name__} composes its masks itself (use_bidirectional_attention=True), and no method "
                f"here knows them: use attn_implementation={EXACT!r}"
            )
    if not through and (chosen or is_complete):
        raise UnsupportedAttentionError(
            f"{type(model).__name__} does not compute its attention through Transformers' attention interface, so that "
            f"attn_implementation={next(iter(named.values()))!r} would have no effect: load it without that argument"
        )


def _check_scores(model: PreTrainedModel, through: Sequence[AttentionModule]) -> None:
    """Refuse models that change the scores of attention, such as T5 by a bias of relative positions, or its mask.

    The bias belongs to the attention modules, or to the layers and models around them. Modules inside of attention
    modules, and attention modules that do not ask the interface, are no concern of a method.
    """
    biased = {id(found.module) for found in through if has_distance_bias(type(found.module))}
    asking = [(found.location.name, found.module) for found in through if id(found.module) not in biased]
    around = [*_around_attention(model, {id(found.owner) for found in through})]
    for path, module in (*around, *asking):
        change = score_change(module, is_attention=is_attention(module))
        if change is not None:
            exact = EXACT if all(found.owner._supports_sdpa for found in through) else "eager"
            raise UnsupportedAttentionError(
                f"{type(model).__name__} adds {change} to the scores of its attention (in {type(module).__name__} at "
                f"{path or 'the top'}), which no method here can keep, because the (queries, keys) matrix of scores is "
                f"never built: use attn_implementation={exact!r}, or a model without it, such as BERT, GPT-2 or Llama"
            )
    for found in through:
        kind, owner, method = type(found.module), type(found.owner).__name__, found.chosen
        is_biased = id(found.module) in biased and not found.location.is_cross
        if method is not None and is_biased and not method.adds_distance_bias:
            raise UnsupportedAttentionError(
                f"{type(model).__name__} adds a bias of relative positions (relative_attention_bias) to the scores of "
                f"its attention (in {kind.__name__} at {found.location.name}), which {method.method} cannot keep, "
                "because it does not compute the scores of all pairs: use "
                f"{' or '.join(methods_with('adds_distance_bias'))} without global tokens, whose window adds it, or "
                f"attn_implementation={EXACT!r}, or a model with learned or rotary positions, such as BERT, GPT-2 or "
                "Llama"
            )
        if (maker := own_mask(kind)) is not None:
            raise UnsupportedAttentionError(
                f"{owner} makes a (queries, keys) mask of its own ({kind.__name__}.{maker}), which no method here can "
                f"use: load it with attn_implementation={EXACT!r}"
            )
        if not found.owner._supports_sdpa:
            raise UnsupportedAttentionError(
                f"{owner} does not support attn_implementation={EXACT!r}: possibly only a (queries, keys) mask, which "
                "is never built here, makes its attention causal; load it with 'eager'"
            )


def _around_attention(
    module: nn.Module, owners: Set[int], path: str = "", is_concerned: bool = False
) -> Iterator[tuple[str, nn.Module]]:
    """The modules of some models, by their ids, that are neither attention modules nor inside of one; with paths."""
    if not is_attention(module):
        is_concerned = id(module) in owners if isinstance(module, PreTrainedModel) else is_concerned
        if is_concerned:
            yield path, module
        for name, child in module.named_children():
            yield from _around_attention(child, owners, f"{path}.{name}".lstrip("."), is_concerned)


def _check_layers(model: PreTrainedModel, chosen: Sequence[AttentionModule], is_complete: bool) -> None:
    """Refuse layers that the model does not have, and modules that two entries of a mix select.

    In a part of a model a name that selects nothing is no error, because names count from the outermost model.
    """
    layers = {found.location.layer for found in chosen if found.location.layer is not None}
    unknown: list[Any] = []
    for config in {id(found.config): found.config for found in chosen}.values():
        known = set(layers)
        if not (is_complete and method_of(model.config)):
            counts = (getattr(config, key, 0) for key in _LAYER_COUNTS)
            known |= set(range(max((count for count in counts if isinstance(count, int)), default=0)))
        named = _settings(config).named_layers()
        missing = [layer for layer in named if isinstance(layer, int) and layer not in known]
        if missing:
            raise UnsupportedAttentionError(_no_such_layers(model, chosen, missing))
        unknown += [x for x in named if isinstance(x, str) and not any(_selects([x], found) for found in chosen)]
    for found in chosen:
        selecting = [
            one for one in _settings(found.config).entries if one.layers is None or _selects(one.layers, found)
        ]
        if len(selecting) > 1:
            raise UnsupportedAttentionError(
                f"{len(selecting)} entries of 'layers' select {found.location.name} of {type(model).__name__} "
                f"({', '.join(one.config.method for one in selecting)}): each layer uses one method"
            )
    if unknown and is_complete:
        raise UnsupportedAttentionError(_no_such_layers(model, chosen, in_order(unknown)))


def _settings(config: PreTrainedConfig) -> EfficientAttentionConfig:
    return settings_of(config, str(method_of(config)))


def _selects(layers: Sequence[Any], found: AttentionModule) -> bool:
    return any(is_selected(layer, found.location.layer, found.location.name) for layer in layers)


def _no_such_layers(model: PreTrainedModel, chosen: Sequence[AttentionModule], missing: list[Any]) -> str:
    """The message about layers that a model does not have."""
    layers = in_order(found.location.layer for found in chosen if found.location.layer is not None)
    notes = {getattr(found.config, "attention_note", None) for found in chosen}
    note = "".join(f"; {note}" for note in notes if note)
    names = ", ".join(map(repr, names_of(found.location.name for found in chosen)))
    return (
        f"{type(model).__name__} has no attention in layers {missing}; its layers are {layers}{note}. Names that "
        f"select several of them: {names}"
    )


def _check_windows(
    model: PreTrainedModel, chosen: Sequence[AttentionModule], through: Sequence[AttentionModule]
) -> None:
    """Refuse a model whose windows would be lost, and a choice that would change windowed modules only."""
    kind = type(model).__name__
    for each in chosen:
        if each.location.window is not None and windows.ARGUMENT not in (each.location.arguments or ()):
            raise UnsupportedAttentionError(
                f"{kind} gives {each.location.name} a window of its own that only a (queries, keys) mask knows, which "
                f"is never built here: use attn_implementation={EXACT!r} for this model"
            )
        windows.refuse_chunks(kind, each.module, each.config, each.location.name)
    selected: dict[Any, list[AttentionModule]] = {}
    for each in through:
        for entry in _settings(each.config).entries:
            for item in [None] if entry.layers is None else [one for one in entry.layers if _selects([one], each)]:
                selected.setdefault(item, []).append(each)
    for group in selected.values():
        if all(each.location.window is not None for each in group):
            more = f" and {len(group) - 1} more of the chosen layers" if len(group) > 1 else ""
            others = ", ".join(each.location.name for each in through if each.location.window is None)
            another = f"use attn_implementation={EXACT!r} for this model, or another model"
            raise UnsupportedAttentionError(
                f"{method_of(group[0].config)}: {kind} has a sliding window of its own in {group[0].location.name}"
                f"{more}, which is sub-quadratic already and would be lost: "
                f"{f'choose layers without a window: {others}' if others else another}"
            )


def _check_methods(model: PreTrainedModel, chosen: Sequence[AttentionModule]) -> None:
    """Refuse methods without the form that a module needs."""
    for found in chosen:
        method, name, kind = found.chosen, found.location.name, type(found.module)
        if method is None:
            continue
        check_methods(
            [method],
            is_causal=not found.location.is_cross and getattr(found.module, "is_causal", None) is True,
            is_rectangular=getattr(found.module, "is_rectangular", False),
            model=f"{type(model).__name__} (at {name})",
            allow_learned=True,
        )
        if is_recurrent(method) and not found.location.is_cross and reads_cache(kind):
            others = [name for name in methods_with("causal") if get_method(name).recurrence is None]
            raise UnsupportedAttentionError(
                f"{type(model).__name__} reads cached keys itself ({kind.__name__} at {name}), and {method.method} "
                f"keeps a state instead of keys: use a method that keeps keys, such as {', '.join(others)}"
            )
