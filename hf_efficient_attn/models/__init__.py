"""Models of our own, in Transformers' form, and their place among its Auto classes.

`AutoConfig`, `AutoModel` and `AutoModelForImageClassification` know them from `import hf_efficient_attn` on, whichever
of the two is imported first; nothing of them is imported before Transformers' own Auto classes are.
"""

import importlib
import importlib.util

from hf_efficient_attn.integration.imports import after_import

# Folder and model type -> name of the config, names of the models by Auto class.
_MODELS = {
    "biggan": ("BigGANConfig", {"AutoModel": "BigGANModel"}),
    "t2t_vit": (
        "T2TViTConfig",
        {"AutoModel": "T2TViTModel", "AutoModelForImageClassification": "T2TViTForImageClassification"},
    ),
}

# STAND-IN: until both are there.
_MODELS = {name: rest for name, rest in _MODELS.items() if importlib.util.find_spec(f"{__name__}.{name}")}


def register() -> None:
    """Make the models known to Transformers' Auto classes; may be called again."""
    after_import("transformers.models.auto.configuration_auto", _register_configs)
    after_import("transformers.models.auto.modeling_auto", _register_models)


def _named(folder: str, module: str, name: str) -> type:
    return getattr(importlib.import_module(f"{__name__}.{folder}.{module}_{folder}"), name)


def _register_configs() -> None:
    from transformers.models.auto.configuration_auto import AutoConfig

    for folder, (config, _) in _MODELS.items():
        AutoConfig.register(folder, _named(folder, "configuration", config), exist_ok=True)


def _register_models() -> None:
    from transformers.models.auto import modeling_auto

    for folder, (config, models) in _MODELS.items():
        for auto, model in models.items():
            cls = getattr(modeling_auto, auto)
            cls.register(_named(folder, "configuration", config), _named(folder, "modeling", model), exist_ok=True)
