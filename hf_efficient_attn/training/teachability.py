"""Whether a model can be distilled: it must have exact attention, and its method must learn something."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.configs import method_of
from hf_efficient_attn.integration.models import configs_of, transformers_models
from hf_efficient_attn.integration.settings import EfficientAttentionConfig
from hf_efficient_attn.methods import MethodConfig, available_methods, learns, make_config, method_info


def refuse_converted(
    model: nn.Module,
    called: str | None = None,
    advice: str = (
        "load the original checkpoint without attn_implementation, or switch back with hea.convert(model, 'sdpa') if "
        "its weights were not trained since"
    ),
) -> None:
    """Refuse a model whose attention is not exact, because its exact attention is not that of its training.

    The message calls it `called`, or by its class, and ends with `advice`.
    """
    roots = transformers_models(model)
    name = next((name for root in roots for config in configs_of(root) if (name := method_of(config))), None)
    if name is not None:
        raise UnsupportedAttentionError(
            f"{called or type(roots[0]).__name__} is converted to {name} already, and only exact attention can teach: "
            f"{advice}"
        )


def refuse_nothing_to_learn(model: nn.Module) -> None:
    """Refuse a converted model without learned parameters, and say which option gives its method some."""
    methods: list[MethodConfig] = []
    for config in (config for root in transformers_models(model) for config in configs_of(root)):
        stored, name = config.efficient_attention, method_of(config)
        settings = stored.settings if stored is not None else name and EfficientAttentionConfig(name)
        methods += [entry.config for entry in settings.entries] if settings else []
    reason = why_nothing_to_learn(methods)
    if reason is not None:
        raise UnsupportedAttentionError(reason)


def why_nothing_to_learn(methods: Sequence[MethodConfig]) -> str | None:
    """Why none of the methods has learned parameters, and which of its options would give it some; None if one has."""
    if any(learns(method) for method in methods):
        return None
    return "; ".join(dict.fromkeys(_what_could_learn(method) for method in methods)) or "the model is not converted"


def _what_could_learn(method: MethodConfig) -> str:
    """Why a method learns nothing, and which of its options, or which other methods, would."""
    options = _options_that_learn(method)
    if options:
        return f"{method.method} learns nothing with these hyperparameters: use {' or '.join(options)}"
    others = []
    for name in available_methods():
        config = method_info(name).config_class()
        options = _options_that_learn(config)
        if learns(config):
            others.append(name)
        elif options:
            others.append(f"{name} with {options[0]}")
    return (
        f"{method.method} has no learned parameters, so that there is nothing to distill: use a method that has, "
        f"{', '.join(others[:-1])} or {others[-1]}"
    )


def _options_that_learn(method: MethodConfig) -> list[str]:
    """Values of single options with which a method has learned parameters, as "option=value"."""
    names = type(method).hyperparameters() if method_info(method.method).learned_parameters else ()
    candidates = [(name, value) for name in names for value in _alternatives(method, name)]
    return [f"{name}={value!r}" for name, value in candidates if learns(make_config(method, **{name: value}))]


def _alternatives(method: MethodConfig, name: str) -> list[Any]:
    """Other values of a hyperparameter that may give a method something to learn."""
    present, facts = getattr(method, name), {field.name: field.metadata for field in dataclasses.fields(method)}[name]
    if facts["choices"]:
        return [choice for choice in facts["choices"] if choice != present]
    if isinstance(present, bool):
        return [not present]
    return [3] if present == 0 and name != "seed" else []
