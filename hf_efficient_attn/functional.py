"""`functional.<name>_attention` for every method, with its hyperparameters as keyword arguments."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from hf_efficient_attn.errors import did_you_mean
from hf_efficient_attn.methods import attention, available_methods, get_method, on_register, refuse_positional

_SUFFIX = "_attention"


def __getattr__(name: str) -> Callable[..., Tensor]:
    """Make the functional form of a method when it is first used."""
    method = name.removesuffix(_SUFFIX)
    if name.endswith(_SUFFIX) and method in available_methods():
        globals()[name] = _functional_form(method)
        return globals()[name]
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}.{did_you_mean(name, __dir__())} It has {', '.join(__dir__())}"
    )


def __dir__() -> list[str]:
    return [f"{method}{_SUFFIX}" for method in available_methods()]


def _functional_form(name: str) -> Callable[..., Tensor]:
    """Make `functional.<name>_attention`: `attention` by one method, with its hyperparameters in the signature."""
    info = get_method(name).info

    def call(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *others: object,
        attention_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        dropout_p: float = 0.0,
        seed: int | None = 0,
        **hyperparameters: Any,
    ) -> Tensor:
        if others:
            refuse_positional(name)
        given = {k: v for k, v in hyperparameters.items() if v is not None or k not in info.learned_parameters}
        return attention(
            name,
            query,
            key,
            value,
            attention_mask=attention_mask,
            is_causal=is_causal,
            scale=scale,
            dropout_p=dropout_p,
            seed=seed,
            **given,
        )

    fields = [f for f in dataclasses.fields(info.config_class) if f.name != "seed"]
    lines = "\n".join(f"    {f.name}: {f.metadata.get('help', '')} Default {f.default!r}." for f in fields)
    call.__name__ = call.__qualname__ = f"{name}_attention"
    call.__doc__ = (
        f"{info.title} ({info.paper}): {info.summary}\n\nThe arguments up to `seed` are those of `attention`.\n\n"
        f"Args:\n{lines}"
    )
    signature = inspect.signature(call)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    common = [p for p in signature.parameters.values() if p.kind not in variable]
    defaults = {f.name: f.default for f in fields} | dict.fromkeys(info.learned_parameters)
    own = [inspect.Parameter(k, inspect.Parameter.KEYWORD_ONLY, default=v) for k, v in defaults.items()]
    vars(call)["__signature__"] = signature.replace(parameters=common + own)
    return call


@on_register
def _forget(method: str) -> None:
    """Forget the functional form of a method that another one replaces."""
    globals().pop(f"{method}{_SUFFIX}", None)
