"""`functional.<name>_attention` for every method, with its hyperparameters as keyword arguments."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError, did_you_mean
from hf_efficient_attn.methods import MASK_ADVICE, attention, available_methods, get_method, on_register

_SUFFIX = "_attention"
# The arguments of `attention` that a functional form has, besides hyperparameters and learned parameters.
_ARGUMENTS = ("query", "key", "value", "attention_mask", "is_causal", "scale", "dropout_p", "seed")


def __getattr__(name: str) -> Callable[..., Tensor]:
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}.{did_you_mean(name, __dir__())} It has {', '.join(__dir__())}"
    )


def __dir__() -> list[str]:
    return [f"{method}{_SUFFIX}" for method in available_methods()]


def _functional_form(name: str) -> Callable[..., Tensor]:
    """Make `functional.<name>_attention`: `attention` by one method, with its hyperparameters in the signature."""
    info = get_method(name).info

    def call(*tensors: Tensor, **options: Any) -> Tensor:
        if len(tensors) > 3:
            problem = "only query, key and value are given by position: for a mask"
            raise UnsupportedAttentionError(f"{name}: {problem} {MASK_ADVICE}")
        given = {k: v for k, v in options.items() if v is not None or k not in info.learned_parameters}
        return attention(name, *tensors, **given)

    call.__name__ = call.__qualname__ = f"{name}{_SUFFIX}"
    fields = [f for f in dataclasses.fields(info.config_class) if f.name != "seed"]
    lines = "\n".join(f"    {f.name}: {f.metadata.get('help', '')} Default {f.default!r}." for f in fields)
    call.__doc__ = (
        f"{info.title} ({info.paper}): {info.summary}\n\nThe arguments up to `seed` are those of `attention`.\n\n"
        f"Args:\n{lines}"
    )
    parameters = inspect.signature(attention).parameters
    common = [parameters[x] for x in _ARGUMENTS]
    defaults = {f.name: f.default for f in fields} | dict.fromkeys(info.learned_parameters)
    own = [inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY, default=v) for k, v in defaults.items()]
    vars(call)["__signature__"] = inspect.Signature(common + own, return_annotation=Tensor)
    return call


on_register(lambda method: globals().update({f"{method}{_SUFFIX}": _functional_form(method)}))
