"""Finding the attention modules of a model, and switching them to what the model's configs say, as one transaction."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration import hidden_states, learned, mask_readers, positions
from hf_efficient_attn.integration.attention import LOCATION, ModuleLocation
from hf_efficient_attn.integration.configs import method_of, parts_of, settings_of
from hf_efficient_attn.integration.distance_bias import attach_hook, has_distance_bias
from hf_efficient_attn.integration.layers import Layer, in_order, is_selected, layer_of, names_of, stem_of
from hf_efficient_attn.integration.model_code import (
    attention_arguments,
    attention_table,
    own_mask,
    reads_cache,
    score_change,
    uses_interface,
)
from hf_efficient_attn.integration.recurrent import is_recurrent
from hf_efficient_attn.integration.refusals import (
    WARNED,
    check_methods,
    no_attentions,
    warn_of_exact_cross_attention,
    why_cross_attention_is_exact,
)
from hf_efficient_attn.integration.settings import EXACT, EfficientAttentionConfig
from hf_efficient_attn.integration.transaction import Snapshot
from hf_efficient_attn.methods import MethodConfig, causal_methods, distance_bias_methods, get_method

_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "num_decoder_layers", "encoder_layers", "decoder_layers")
# The attribute of a model that has the forward pre-hook below.
_GUARDED = "_efficient_attention_guarded"
# The attribute of a model under construction that says which names of layers select nothing in it.
_UNKNOWN = "_efficient_attention_unknown"
_CROSS = ("cross", "encdec", "enc_dec", "encoder_attn")


class AttentionModule(NamedTuple):
    """A module that computes attention.

    Attributes:
        module: the module itself.
        location: where it is in its model.
        config: the config that applies to it.
        owner: the innermost model that holds it.
    """

    module: nn.Module
    location: ModuleLocation
    config: PreTrainedConfig
    owner: PreTrainedModel


def models_in(module: nn.Module) -> list[PreTrainedModel]:
    """The Transformers models in a module, itself included, outermost first."""
    return [m for m in module.modules() if isinstance(m, PreTrainedModel)]


def transformers_models(model: nn.Module) -> list[PreTrainedModel]:
    """The outermost Transformers models in a module: the module itself if it is one.

    Raises:
        UnsupportedAttentionError: it contains none.
    """
    if isinstance(model, PreTrainedModel):
        return [model]
    found: list[PreTrainedModel] = []
    waiting = [model] if isinstance(model, nn.Module) else []
    while waiting:
        module = waiting.pop()
        if isinstance(module, PreTrainedModel):
            found.append(module)
        else:
            waiting += list(module.children())
    if not found:
        raise UnsupportedAttentionError(_no_model(model))
    return found


def _no_model(value: object) -> str:
    """Why something holds no Transformers model, and what to give instead."""
    if isinstance(value, str):
        return f"{value!r} is a name and no model: load it first, for example with AutoModel.from_pretrained({value!r})"
    if isinstance(value, type):
        return f"{value.__name__} is a class and no model: make one, for example with {value.__name__}.from_pretrained"
    if isinstance(value, PreTrainedConfig):
        return f"a {type(value).__name__} is a config and no model: make one with AutoModel.from_config(config)"
    advice = ": give its attribute model" if isinstance(getattr(value, "model", None), PreTrainedModel) else ""
    return f"a {type(value).__name__} holds no Transformers model (a PreTrainedModel){advice}"


def configs_of(model: nn.Module) -> list[PreTrainedConfig]:
    """All configs of the Transformers models in a module, with their sub-configs, each once."""
    return with_parts([m.config for m in models_in(model)])


def with_parts(configs: Sequence[PreTrainedConfig]) -> list[PreTrainedConfig]:
    """Configs and all their sub-configs, each once."""
    found: dict[int, PreTrainedConfig] = {}
    waiting = list(configs)
    while waiting:
        config = waiting.pop(0)
        if id(config) not in found:
            found[id(config)] = config
            waiting += parts_of(config)
    return list(found.values())


def attention_modules(model: nn.Module) -> Iterator[AttentionModule]:
    """The modules of a model that compute attention.

    Layers count from the innermost model that holds the module, so that they keep their numbers if their model becomes
    part of another. Names count from `model`, without the prefix by which a model with a head holds the one without:
    they are the same in `BartModel` and in `BartForConditionalGeneration`.
    """
    head = f"{getattr(model, 'base_model_prefix', '')}."
    owners: dict[str, tuple[str, PreTrainedModel | None]] = {}
    found: list[AttentionModule] = []
    for path, module in model.named_modules():
        prefix, owner = owners.get(path.rpartition(".")[0], ("", None))
        owners[path] = (path, module) if isinstance(module, PreTrainedModel) else (prefix, owner)
        if owner is None or isinstance(module, PreTrainedModel) or not is_attention(module):
            continue
        name = path.removeprefix(prefix).removeprefix(".")
        is_cross = bool(getattr(module, "is_cross_attention", False)) or any(
            word in f"{name}.{type(module).__name__}".lower() for word in _CROSS
        )
        config = getattr(module, "config", None)
        config = config if isinstance(config, PreTrainedConfig) else owner.config
        layer = layer_of(module, name)
        location = ModuleLocation(layer, path.removeprefix(head), is_cross, layer)
        found.append(AttentionModule(module, location, config, owner))
    stacks: dict[Layer | None, set[str]] = {}
    for one in found:
        stacks.setdefault(one.location.layer, set()).add(stem_of(one.location.name))
    for one in found:
        layer, name = one.location.layer, one.location.name
        is_shared = isinstance(layer, int) and len(stacks[layer]) > 1
        yield one._replace(location=one.location._replace(label=stem_of(name))) if is_shared else one


def is_attention(module: nn.Module) -> bool:
    """Whether a module is one that computes attention, through the interface or not."""
    return isinstance(getattr(module, "is_causal", None), bool) or "Attention" in type(module).__name__


def snapshot(models: Sequence[PreTrainedModel]) -> Snapshot:
    """The present state of models and their configs, to be restored if a switch fails."""
    return Snapshot(models, [config for model in models for config in configs_of(model)])


def switch(
    models: Sequence[PreTrainedModel], change_configs: Callable[[], Any] | None = None, *, is_complete: bool = True
) -> None:
    """Change the configs of models, and give all their attention modules what the configs then ask for.

    This is one transaction: if anything fails, all models and configs are restored. All checks are made and all new
    parameters created before the first module is changed.

    Args:
        models: outermost Transformers models.
        change_configs: changes their configs; by default they stay as they are.
        is_complete: False for models under construction, which may still lack some layers that `layers` names, or all
            attention.

    Raises:
        UnsupportedAttentionError: a decoder with a method without a causal form; a module with fewer keys than queries
            and a method that needs as many; a model that does not use the attention interface; `layers` that a model
            does not have; learned parameters whose sizes cannot be determined.
    """
    before = snapshot(models)
    try:
        if change_configs is not None:
            change_configs()
        plans = [_plan(model, is_complete) for model in models]
        for plan in plans:
            plan.warn()
        for plan in plans:
            plan.carry_out()
    except BaseException:
        before.restore()
        raise


def choose(models: Sequence[PreTrainedModel], settings: EfficientAttentionConfig) -> None:
    """Write a choice into all configs of models, in which nothing else changes yet."""
    for model in models:
        for config in configs_of(model):
            config._attn_implementation_internal = settings.method
            config.efficient_attention = settings


class _Plan(NamedTuple):
    """What a switch changes in one model, ready to be carried out by assignments alone.

    Attributes:
        parts: the models in the model, for the checks of their calls; empty if it is switched to no method.
        modules: all attention modules whose location is to be noted.
        parameters: for every attention module, the learned parameters that it gets.
        forwards: for every attention module, the forward that it gets of its own.
        exact: modules whose cross attention stays exact, and their names, by the reason.
        unknown: for a model under construction, why some names of layers select nothing in it; None if they all do.
    """

    parts: list[PreTrainedModel]
    modules: list[AttentionModule]
    parameters: list[tuple[nn.Module, learned.LearnedParameters | None]]
    forwards: list[tuple[nn.Module, Callable[..., Any] | None]]
    exact: dict[str, list[tuple[nn.Module, str]]]
    unknown: str | None

    def warn(self) -> None:
        """Warn of cross attention that stays exact."""
        for reason, found in self.exact.items():
            warn_of_exact_cross_attention(found[0][0], reason, [name for _, name in found])

    def carry_out(self) -> None:
        """Change the modules."""
        for module, parameters in self.parameters:
            learned.attach(module, parameters)
        for found in self.modules:
            setattr(found.module, LOCATION, found.location)
        for module, forward in self.forwards:
            hidden_states.attach(module, forward)
        for found in self.modules:
            attach_hook(found.module)
        for module, _ in (found for group in self.exact.values() for found in group):
            setattr(module, WARNED, True)
        for part in self.parts:
            # The names may belong to a model that this one becomes part of, whose construction then replaces the note.
            setattr(part, _UNKNOWN, self.unknown)
            # Some models do not pass the argument on to their attention, so it is checked on the way in.
            if not getattr(part, _GUARDED, False):
                part.register_forward_pre_hook(_refuse_call, with_kwargs=True)
                setattr(part, _GUARDED, True)
            for inner in part.modules():
                mask_readers.adapt(inner)
        for part, tables in positions.tables_of(self.parts).items():
            if tables:
                setattr(part, positions.TABLES, tables)


def _plan(model: PreTrainedModel, is_complete: bool) -> _Plan:
    """Check a model against what its configs ask for, and make what it needs for it."""
    parts, found = models_in(model), list(attention_modules(model))
    methods: list[MethodConfig | None] = [None] * len(found)
    unknown: str | None = None
    chosen: list[AttentionModule] = []
    if any(method_of(part.config) for part in parts):
        _hand_down(model, parts)
        chosen = [each for each in found if method_of(each.config)]
        is_whole = is_complete and method_of(model.config) is not None
        _check_interface(model, chosen, is_whole)
        unknown = _check_layers(model, chosen, is_whole)
        if unknown is not None and is_complete:
            raise UnsupportedAttentionError(unknown)
        methods = [_method_in(each) if method_of(each.config) else None for each in found]
        _check_methods(model, chosen)
    else:
        parts = []
    kind = type(model).__name__
    requests = [
        learned.Request(each.module, method, each.config, each.owner, f"{kind} at {each.location.name}")
        for each, method in zip(found, methods, strict=True)
    ]
    modules = [each.module for each in found]
    forwards = [hidden_states.plan(module, method) for module, method in zip(modules, methods, strict=True)]
    return _Plan(
        parts=parts,
        modules=chosen,
        parameters=list(zip(modules, learned.plan(requests), strict=True)),
        forwards=list(zip(modules, forwards, strict=True)),
        exact=_exact_cross_attention(chosen),
        unknown=unknown,
    )


def _hand_down(model: PreTrainedModel, parts: Sequence[PreTrainedModel]) -> None:
    """Apply a choice on the config of a composite model to its parts, as Transformers does `attn_implementation`."""
    stored = model.config.efficient_attention
    for part in parts:
        missing = part.config.efficient_attention is None
        if stored is not None and missing and method_of(part.config) == stored.settings.method:
            part.config.efficient_attention = stored.settings


def _settings(config: PreTrainedConfig) -> EfficientAttentionConfig:
    name = method_of(config)
    assert name is not None
    return settings_of(config, name)


def _chosen_in(found: AttentionModule) -> MethodConfig | None:
    """The method that the config chooses for the layer of a module; None for exact attention."""
    return _settings(found.config).for_layer(found.location.layer, found.location.name)


def _method_in(found: AttentionModule) -> MethodConfig | None:
    """The method that really computes the attention of a module; None if it is exact."""
    method = _chosen_in(found)
    if method is None or not uses_interface(type(found.module)):
        return None
    is_exact = found.location.is_cross and why_cross_attention_is_exact(method, found.config) is not None
    return None if is_exact else method


def refuse_unknown_implementation(kind: type[PreTrainedModel], name: str) -> None:
    """Refuse a method for a model class that takes its attention class from a table by the implementation's name."""
    table = attention_table(kind)
    if table is not None:
        raise UnsupportedAttentionError(
            f"{kind.__name__} chooses its attention from a table ({table}) that knows only Transformers' own "
            f"implementations, so that attn_implementation={name!r} is not possible: use {EXACT!r} or 'eager'"
        )


def _check_interface(model: PreTrainedModel, chosen: Sequence[AttentionModule], is_whole: bool) -> None:
    """Refuse a model in which the choice would have no effect, or whose attention modules cannot be trusted.

    Like Transformers' `sdpa`, a method takes causality from the attention module. In a model that does not support
    `sdpa` the modules can say anything; in some decoders they say that they are not causal.
    """
    name = method_of(model.config)
    for part in models_in(model):
        if method_of(part.config):
            refuse_unknown_implementation(type(part), str(name))
    through = [found for found in chosen if uses_interface(type(found.module))]
    if not through and (chosen or is_whole):
        raise UnsupportedAttentionError(
            f"{type(model).__name__} does not compute its attention through Transformers' attention interface, so that "
            f"attn_implementation={name!r} would have no effect: load it without that argument"
        )
    for found in through:
        attention_arguments(type(found.module))
        kind, maker = type(found.module).__name__, own_mask(type(found.module))
        if maker is not None:
            raise UnsupportedAttentionError(
                f"{type(found.owner).__name__} makes a (queries, keys) mask of its own ({kind}.{maker}), which no "
                f"method here can use: load it with attn_implementation={EXACT!r}"
            )
        if not found.owner._supports_sdpa:
            raise UnsupportedAttentionError(
                f"{type(found.owner).__name__} does not support attn_implementation={EXACT!r}: possibly only a "
                "(queries, keys) mask, which is never built here, makes its attention causal; load it with 'eager'"
            )
    _check_scores(model, through)


def _check_scores(model: PreTrainedModel, through: Sequence[AttentionModule]) -> None:
    """Refuse models that change the scores of attention, such as T5 by a bias of relative positions.

    The bias belongs to the attention modules, or to the layers and models around them. Modules inside of attention
    modules, and attention modules that do not ask the interface, are no concern of a method.
    """
    owners = {id(found.owner) for found in through}
    asking = {id(found.module) for found in through}
    biased = {id(found.module) for found in through if has_distance_bias(type(found.module))}
    inside: dict[str, tuple[bool, bool]] = {}  # path: whether its model is concerned, whether it is in attention
    for path, module in model.named_modules():
        is_concerned, is_inner = inside.get(path.rpartition(".")[0], (False, False))
        if isinstance(module, PreTrainedModel):
            is_concerned = id(module) in owners
        is_attention_module = is_attention(module)
        inside[path] = (is_concerned, is_inner or is_attention_module)
        change = None
        if id(module) in biased:
            continue
        if id(module) in asking or (is_concerned and not is_inner and not is_attention_module):
            change = score_change(module, is_attention=is_attention_module)
        if change is not None:
            raise UnsupportedAttentionError(
                f"{type(model).__name__} adds {change} to the scores of its attention (in {type(module).__name__} at "
                f"{path or 'the top'}), which no method here can keep, because the (queries, keys) matrix of scores is "
                f"never built: use attn_implementation={EXACT!r}, or a model with learned or rotary positions, such "
                "as BERT, GPT-2 or Llama"
            )
    for found in through:
        method = _chosen_in(found)
        if id(found.module) in biased and method is not None and not found.location.is_cross:
            _check_distance_bias(model, found, method)


def _check_distance_bias(model: PreTrainedModel, found: AttentionModule, method: MethodConfig) -> None:
    """Refuse a method that cannot add a bias by distance, as T5 has it, in self-attention."""
    if not method.adds_distance_bias:
        kind = type(found.module).__name__
        raise UnsupportedAttentionError(
            f"{type(model).__name__} adds a bias of relative positions (relative_attention_bias) to the scores of its "
            f"attention (in {kind} at {found.location.name}), which {method.method} cannot keep, because it does not "
            f"compute the scores of all pairs: use {' or '.join(distance_bias_methods())} without global tokens, whose "
            f"window adds it, or attn_implementation={EXACT!r}, or a model with learned or rotary positions, such as "
            "BERT, GPT-2 or Llama"
        )


def _check_layers(model: PreTrainedModel, chosen: Sequence[AttentionModule], is_whole: bool) -> str | None:
    """Refuse numbers in `layers` that the model does not have, and modules that two entries of a mix select.

    Returns:
        why some names select nothing in the model; None if they all do. Under construction this is no error yet,
        because a name counts from the outermost model.
    """
    layers = {found.location.layer for found in chosen if found.location.layer is not None}
    unknown: list[Any] = []
    for config in {id(found.config): found.config for found in chosen}.values():
        known = set(layers)
        if not is_whole:
            counts = (getattr(config, key, 0) for key in _LAYER_COUNTS)
            known |= set(range(max((count for count in counts if isinstance(count, int)), default=0)))
        settings = _settings(config)
        missing = [layer for layer in settings.named_layers() if isinstance(layer, int) and layer not in known]
        if missing:
            raise UnsupportedAttentionError(_no_such_layers(model, chosen, missing))
        unknown += [
            name
            for name in settings.named_layers()
            if isinstance(name, str) and not any(is_selected(name, *found.location[:2]) for found in chosen)
        ]
    for found in chosen:
        entries = _settings(found.config).entries
        selecting = [one for one in entries if one.layers is None or _selects(one.layers, found)]
        if len(selecting) > 1:
            raise UnsupportedAttentionError(
                f"{len(selecting)} entries of 'layers' select {found.location.name} of {type(model).__name__} "
                f"({', '.join(one.config.method for one in selecting)}): each layer uses one method"
            )
    return _no_such_layers(model, chosen, in_order(unknown)) if unknown else None


def _selects(layers: Sequence[Any], found: AttentionModule) -> bool:
    return any(is_selected(chosen, found.location.layer, found.location.name) for chosen in layers)


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


def _check_methods(model: PreTrainedModel, chosen: Sequence[AttentionModule]) -> None:
    """Refuse methods without the form that a module needs."""
    for found in chosen:
        method = _chosen_in(found)
        if method is not None:
            check_methods(
                [method],
                is_causal=not found.location.is_cross and getattr(found.module, "is_causal", None) is True,
                is_rectangular=getattr(found.module, "is_rectangular", False),
                model=f"{type(model).__name__} (at {found.location.name})",
                allow_learned=True,
            )
        is_state = method is not None and is_recurrent(method) and not found.location.is_cross
        if method is not None and is_state and reads_cache(type(found.module)):
            raise UnsupportedAttentionError(
                f"{type(model).__name__} reads cached keys itself ({type(found.module).__name__} at "
                f"{found.location.name}), and {method.method} keeps a state instead of keys: use a method that keeps "
                f"keys, such as {', '.join(name for name in causal_methods() if get_method(name).recurrence is None)}"
            )


def _exact_cross_attention(chosen: Sequence[AttentionModule]) -> dict[str, list[tuple[nn.Module, str]]]:
    """The modules whose cross attention stays exact and was not warned of yet, with their names, by the reason."""
    exact: dict[str, list[tuple[nn.Module, str]]] = {}
    for found in chosen:
        method = _chosen_in(found)
        if method is None or not found.location.is_cross:
            continue
        reason = why_cross_attention_is_exact(method, found.config)
        if reason is not None and not getattr(found.module, WARNED, False):
            exact.setdefault(reason, []).append((found.module, found.location.name))
    return exact


def _refuse_call(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook: refuse `output_attentions`, and inputs that are longer than the position table."""
    name = method_of(model.config)
    if name is None:
        return
    if getattr(model, _UNKNOWN, None) is not None:
        raise UnsupportedAttentionError(getattr(model, _UNKNOWN))
    positions.refuse_long_input(model, args, kwargs)
    requested = kwargs.get("output_attentions")
    if model.config.output_attentions if requested is None else requested:
        raise UnsupportedAttentionError(no_attentions(name))
