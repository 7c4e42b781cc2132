"""`functional.<name>_attention` for every method, with its hyperparameters as keyword arguments."""

from hf_efficient_attn.methods import available_methods, functional_form


def __getattr__(name: str):
    method = name.removesuffix("_attention")
    if method != name and method in available_methods():
        form = globals()[name] = functional_form(method)
        return form
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__dir__())}")


def __dir__() -> list[str]:
    return [f"{method}_attention" for method in available_methods()]
