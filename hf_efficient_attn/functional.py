"""`functional.<name>_attention` for every method, with its hyperparameters as keyword arguments."""

from collections.abc import Callable

from torch import Tensor

from hf_efficient_attn.errors import did_you_mean
from hf_efficient_attn.methods import available_methods, functional_form, on_register

_SUFFIX = "_attention"


def __getattr__(name: str) -> Callable[..., Tensor]:
    """Make the functional form of a method when it is first used."""
    method = name.removesuffix(_SUFFIX)
    if name.endswith(_SUFFIX) and method in available_methods():
        globals()[name] = functional_form(method)
        return globals()[name]
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}.{did_you_mean(name, __dir__())} It has {', '.join(__dir__())}"
    )


def __dir__() -> list[str]:
    return [f"{method}{_SUFFIX}" for method in available_methods()]


@on_register
def _forget(method: str) -> None:
    """Forget the functional form of a method that another one replaces."""
    globals().pop(f"{method}{_SUFFIX}", None)
