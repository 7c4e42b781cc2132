"""Whether a model can be distilled: it must have exact attention, and its method must learn something."""

import dataclasses
from collections.abc import Sequence

from torch import nn

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.configs import method_of
from hf_efficient_attn.integration.models import configs_of, transformers_models
from hf_efficient_attn.methods import MethodConfig, available_methods, learns, make_config, method_info

_ADVICE = (
    "load the original checkpoint without attn_implementation, or switch back with hea.convert(model, 'sdpa') if its "
    "weights were not trained since"
)


def refuse_converted(model: nn.Module, called: str | None = None, advice: str = _ADVICE) -> None:
    """Refuse a model whose attention is not exact, because its exact attention is not that of its training.

    The message calls it `called`, or by its class, and ends with `advice`.
    """
    for root in transformers_models(model):
        for name in filter(None, map(method_of, configs_of(root))):
            raise UnsupportedAttentionError(
                f"{called or type(root).__name__} is converted to {name} already, and only exact attention can teach: "
                f"{advice}"
            )


def why_nothing_to_learn(methods: Sequence[MethodConfig]) -> str | None:
    """Why none of the methods has learned parameters, and which of its options would give it some; None if one has."""
    if any(map(learns, methods)):
        return None
    return "; ".join(dict.fromkeys(map(_advice, methods))) or "the model is not converted"


def _advice(method: MethodConfig) -> str:
    """Which values of single options, or which other methods, would learn something."""
    options = []
    for field in dataclasses.fields(method) if method_info(method.method).learned_parameters else ():
        present, values = getattr(method, field.name), field.metadata.get("choices") or ()
        if isinstance(present, bool):
            values = (not present,)
        elif present == 0 and field.name != "seed":
            values = (3,)
        changes = [{field.name: value} for value in values if value != present]
        options += [f"{field.name}={x[field.name]!r}" for x in changes if learns(make_config(method, **x))]
    if options:
        return f"{method.method} learns nothing with these hyperparameters: use {' or '.join(options)}"
    others = [name for name in available_methods() if method_info(name).learned_parameters]
    return (
        f"{method.method} has no learned parameters, so that there is nothing to distill: use a method that has, "
        f"{', '.join(others[:-1])} or {others[-1]}"
    )
