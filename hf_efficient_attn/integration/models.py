"""What is done to a model whose config names a method: attention modules get numbers, what cannot work is refused."""

import inspect
from collections.abc import Iterator

from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration import contracted, learned
from hf_efficient_attn.integration.attention import (
    ModuleLocation,
    no_attentions,
    settings_of,
    warn_of_exact_cross_attention,
    why_cross_attention_is_exact,
)
from hf_efficient_attn.integration.configs import method_of
from hf_efficient_attn.integration.layers import in_order, layer_of
from hf_efficient_attn.integration.settings import EfficientAttentionConfig
from hf_efficient_attn.methods import MethodConfig, available_methods, causal_methods, get_method, rectangular_methods

_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "num_decoder_layers", "encoder_layers", "decoder_layers")
_CROSS = ("cross", "encdec", "enc_dec", "encoder_attn")


def models_in(module: nn.Module) -> list[PreTrainedModel]:
    """The model itself and those inside it, outermost first."""
    return [m for m in module.modules() if isinstance(m, PreTrainedModel)]


def transformers_models(model: nn.Module) -> list:
    """The model, or the outermost Transformers models inside it."""
    if isinstance(model, PreTrainedModel):
        return [model]
    found: list = []
    waiting = [model] if isinstance(model, nn.Module) else []
    while waiting:
        module = waiting.pop()
        if isinstance(module, PreTrainedModel):
            found.append(module)
        else:
            waiting += list(module.children())
    if not found:
        raise UnsupportedAttentionError(f"a {type(model).__name__} holds no Transformers model (a PreTrainedModel)")
    return found


def configs_of(model: nn.Module) -> list[PreTrainedConfig]:
    """Every config, each once, of the models in `model`, their sub-configs included."""
    found: dict[int, PreTrainedConfig] = {}
    waiting = [m.config for m in models_in(model)]
    while waiting:
        config = waiting.pop(0)
        if id(config) not in found:
            found[id(config)] = config
            parts = (getattr(config, key, None) for key in config.sub_configs)
            waiting += [part for part in parts if isinstance(part, PreTrainedConfig)]
    return list(found.values())


def attention_modules(
    model: nn.Module,
) -> Iterator[tuple[nn.Module, ModuleLocation, PreTrainedConfig, PreTrainedModel]]:
    """The modules that compute attention, with their locations, the configs that rule them, and the models that hold them.

    Names count from the innermost model that holds the module, so that a model inside another keeps its numbers.
    """
    owners: dict[str, tuple[str, PreTrainedModel | None]] = {}
    for path, module in model.named_modules():
        above = owners.get(path.rpartition(".")[0], ("", None))
        owners[path] = (path, module) if isinstance(module, PreTrainedModel) else above
        if above[1] is None or isinstance(module, PreTrainedModel) or not _is_attention(module):
            continue
        name = path.removeprefix(above[0]).removeprefix(".")
        is_cross = bool(getattr(module, "is_cross_attention", False)) or any(
            word in f"{name}.{type(module).__name__}".lower() for word in _CROSS
        )
        config = getattr(module, "config", None)
        config = config if isinstance(config, PreTrainedConfig) else above[1].config
        yield module, ModuleLocation(layer_of(module, name), name, is_cross), config, above[1]


def _is_attention(module: nn.Module) -> bool:
    return isinstance(getattr(module, "is_causal", None), bool) or "Attention" in type(module).__name__


def _uses_interface(module: nn.Module) -> bool:
    """Whether the module's class, or one that it derives from, asks Transformers' attention interface."""
    methods = (
        inspect.unwrap(value) for kind in type(module).__mro__ for value in vars(kind).values() if callable(value)
    )
    codes = (getattr(method, "__code__", None) for method in methods)
    return any(code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names for code in codes)


def prepare(model: PreTrainedModel, strict: bool = False) -> None:
    """Make a model ready for the methods that its configs name; does nothing to one that names none. Idempotent.

    Args:
        strict: whether `model` is known to be whole. A part of a model under construction may lack some layers that
            `layers` names, or all attention.

    Raises:
        UnsupportedAttentionError: a decoder with a method without causal form, a module with fewer keys than queries
            and a method that needs as many, a model that does not go through the attention interface, or `layers` that
            the model does not have.
    """
    models = models_in(model)
    if not any(method_of(m.config) for m in models):
        return
    _hand_down(model, models)
    owned = [found for found in attention_modules(model) if method_of(found[2])]
    _check_interface(model, owned, strict)
    found = [(module, location, config) for module, location, config, _ in owned]
    _check_layers(model, found, strict)
    _check_causal(model, found)
    _check_rectangular(model, found)
    methods = [_method_in(*each) for each in found]
    learned.fit(
        [
            learned.Fitting(module, method, config, owner, f"{type(model).__name__} at {location.name}")
            for (module, location, config, owner), method in zip(owned, methods, strict=True)
        ]
    )
    for (module, location, _), method in zip(found, methods, strict=True):
        module._efficient_attention = location
        contracted.fit(module, method)
    for part in models:
        # Some models drop the argument on the way to their attention, so that it is caught where it enters.
        if not getattr(part, "_efficient_attention_guarded", False):
            part.register_forward_pre_hook(_refuse_output_attentions, with_kwargs=True)
            part._efficient_attention_guarded = True
    _warn_of_cross_attention(found)


def drop_learned(model: PreTrainedModel) -> None:
    """Take away learned parameters, and forwards of ours, where the config names none of our methods any more."""
    for module, location, config, owner in attention_modules(model):
        if method_of(config) is None:
            learned.fit([learned.Fitting(module, None, config, owner, location.name)])
            contracted.fit(module, None)


def _hand_down(model: PreTrainedModel, models: list[PreTrainedModel]) -> None:
    """A choice on the config of a composite model holds for its parts, as `attn_implementation` does."""
    stored = model.config.efficient_attention
    for part in models:
        bare = part.config.efficient_attention is None
        if stored is not None and bare and method_of(part.config) == stored.settings.method:
            part.config.efficient_attention = stored.settings


def _method_in(module: nn.Module, location: ModuleLocation, config: PreTrainedConfig) -> MethodConfig | None:
    """The method that computes a module's attention; None where it is exact."""
    method = _settings(config).for_layer(location.layer)
    exact = location.is_cross and method is not None and why_cross_attention_is_exact(method.method, config)
    return None if exact or not _uses_interface(module) else method


def _settings(config: PreTrainedConfig) -> EfficientAttentionConfig:
    return settings_of(config, EfficientAttentionConfig(method_of(config)))


def _check_interface(model: PreTrainedModel, owned: list, strict: bool) -> None:
    """Refuse a model in which the choice would have no effect, or whose attention modules cannot be trusted.

    Transformers' `sdpa` takes causality from the modules, as we do. Where a model does not support it, they may say
    anything: in some decoders, that they are not causal.
    """
    through = [owner for module, _, _, owner in owned if _uses_interface(module)]
    if not through and (owned or strict):
        raise UnsupportedAttentionError(
            f"{type(model).__name__} does not compute its attention through Transformers' attention interface, so that "
            f"attn_implementation={method_of(model.config)!r} would have no effect: load it without that argument"
        )
    for owner in through:
        if not owner._supports_sdpa:
            raise UnsupportedAttentionError(
                f"{type(owner).__name__} does not support attn_implementation='sdpa': its attention may tell what is "
                "causal by nothing but a (queries, keys) mask, which is never built here; load it with 'eager'"
            )


def _check_layers(model: PreTrainedModel, found: list, strict: bool) -> None:
    there = {location.layer for _, location, _ in found if location.layer is not None}
    for config in {id(config): config for _, _, config in found}.values():
        known = set(there)
        if not strict:
            counts = (getattr(config, key, 0) for key in _LAYER_COUNTS)
            known |= set(range(max((count for count in counts if isinstance(count, int)), default=0)))
        missing = [layer for layer in _settings(config).named_layers() if layer not in known]
        if missing:
            note = getattr(config, "attention_note", None)
            raise UnsupportedAttentionError(
                f"{type(model).__name__} has no attention in layers {missing}; its layers are {in_order(there)}"
                + (f"; {note}" if note else "")
            )


def _check_causal(model: PreTrainedModel, found: list) -> None:
    for module, location, config in found:
        method = _settings(config).for_layer(location.layer)
        if method is None or location.is_cross or getattr(module, "is_causal", None) is not True:
            continue
        if not get_method(method.method).info.causal:
            raise UnsupportedAttentionError(
                f"{type(model).__name__} is a decoder ({location.name} is causal) and {method.method} has no causal form. "
                f"Methods that have one: {', '.join(causal_methods())}"
            )


def _check_rectangular(model: PreTrainedModel, found: list) -> None:
    """Where a module has fewer keys than queries by construction, a method would be exact attention in disguise."""
    for module, location, config in found:
        method = _settings(config).for_layer(location.layer)
        if method is None or not getattr(module, "is_rectangular", False):
            continue
        if not get_method(method.method).info.rectangular:
            raise UnsupportedAttentionError(
                f"{type(model).__name__} has fewer keys than queries in {location.name}, and {method.method} needs as "
                f"many of each. Methods that do not: {', '.join(rectangular_methods())}"
            )


def _warn_of_cross_attention(found: list) -> None:
    names: dict[str, list] = {}
    for module, location, config in found:
        method = _settings(config).for_layer(location.layer)
        if method is None or not location.is_cross or getattr(module, "_efficient_attention_warned", False):
            continue
        reason = why_cross_attention_is_exact(method.method, config)
        if reason is not None:
            names.setdefault(reason, []).append((module, location.name))
    for reason, locations in names.items():
        warn_of_exact_cross_attention(locations[0][0], reason, [name for _, name in locations])
        for module, _ in locations:
            module._efficient_attention_warned = True


def _refuse_output_attentions(model: PreTrainedModel, args: tuple, kwargs: dict) -> None:
    name = method_of(model.config)
    wanted = kwargs.get("output_attentions")
    if name and (model.config.output_attentions if wanted is None else wanted):
        raise UnsupportedAttentionError(no_attentions(name))


def switch(models: list[PreTrainedModel], settings: EfficientAttentionConfig) -> None:
    """Put a choice into every config of the models, which stay as they were if one of them cannot take it."""
    configs = [config for model in models for config in configs_of(model)]
    before = [(config, config._attn_implementation, config.efficient_attention) for config in configs]
    done = False
    try:
        for config in configs:
            config._attn_implementation_internal = settings.method
            config.efficient_attention = settings
        for model in models:
            prepare(model, strict=True)
        done = True
    finally:
        if not done:
            restore(before)


def restore(before: list[tuple]) -> None:
    """Set configs back to what (config, attn_implementation, efficient_attention) says."""
    for config, implementation, stored in before:
        config._attn_implementation_internal = implementation
        config.efficient_attention = None
        if stored is not None:
            config.__dict__["efficient_attention"] = stored


def requested(implementation: "str | dict") -> list[str]:
    """The methods of this package that an `attn_implementation` argument names."""
    if isinstance(implementation, dict):
        return [name for value in implementation.values() for name in requested(value)]
    return [implementation] if implementation in available_methods() else []
