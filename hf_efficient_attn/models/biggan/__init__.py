"""BigGAN-deep (Brock, Donahue and Simonyan 2019): a class-conditional generator of images with one attention layer."""

import importlib

from hf_efficient_attn.integration.foreign import register_foreign
from hf_efficient_attn.models.biggan.package import PackageBigGAN

register_foreign(PackageBigGAN())

_PLACES = {
    "configuration_biggan": ("BigGANConfig",),
    "modeling_biggan": ("BigGANModel", "BigGANOutput"),
    "conversion_biggan": ("convert_state_dict", "revert_state_dict"),
    "sampling": ("truncated_noise", "class_index", "class_indices", "class_names"),
}
__all__ = [name for names in _PLACES.values() for name in names]


def __getattr__(name: str):
    """The public names, imported when they are asked for: Transformers' model classes take seconds."""
    for place, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{place}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
