"""Models of our own, in Transformers' form, and their place among its Auto classes.

`AutoConfig`, `AutoModel` and `AutoModelForImageClassification` know them from `import hf_efficient_attn` on, whichever
of the two is imported first; nothing of them is imported before Transformers' own Auto classes are.
"""

import functools
import importlib
import sys

from hf_efficient_attn.integration.imports import after_import
from hf_efficient_attn.models import biggan, t2t_vit

_AUTO = "transformers.models.auto.modeling_auto"
_LAYERS = "transformers.modeling_layers"
# Folder and model type -> name of the config, names of the models by Auto class.
_MODELS = {
    "biggan": ("BigGANConfig", {"AutoModel": "BigGANModel"}),
    "t2t_vit": (
        "T2TViTConfig",
        {"AutoModel": "T2TViTModel", "AutoModelForImageClassification": "T2TViTForImageClassification"},
    ),
}


def register() -> None:
    """Make the models known to Transformers' Auto classes; may be called again."""
    after_import("transformers.models.auto.configuration_auto", _register_configs)
    for name in (_AUTO, _LAYERS):
        after_import(name, _import_models)
    for folder in _MODELS:
        after_import(_file(folder, "modeling"), functools.partial(_register_models, folder))


def auto_class(model: str) -> str | None:
    """The Auto class that makes a model of ours out of a checkpoint, by the model's class name; None for others."""
    return next((auto for _, models in _MODELS.values() for auto, name in models.items() if name == model), None)


def model_type(model: str) -> str | None:
    """The `model_type` of a model of ours, by its class name; None for others."""
    return next((kind for kind, (_, models) in _MODELS.items() if model in models.values()), None)


def _file(folder: str, part: str) -> str:
    return f"{__name__}.{folder}.{part}_{folder}"


def _register_configs() -> None:
    from transformers.models.auto.configuration_auto import AutoConfig

    for folder, (config, _) in _MODELS.items():
        AutoConfig.register(
            folder, getattr(importlib.import_module(_file(folder, "configuration")), config), exist_ok=True
        )


def _import_models() -> None:
    """Import the models, which registers them. One whose import led to that of the Auto classes is half done yet.

    So is `transformers.modeling_layers`, which the models need, where its import led to that of the Auto classes (since
    Transformers 5.23): this is called again when it is done.
    """
    layers = sys.modules.get(_LAYERS)
    if _AUTO not in sys.modules or (layers is not None and not hasattr(layers, "GradientCheckpointingLayer")):
        return
    for folder in _MODELS:
        if _file(folder, "modeling") in sys.modules:
            _register_models(folder)
        else:
            importlib.import_module(_file(folder, "modeling"))


def _register_models(folder: str) -> None:
    """Register the models of a folder as soon as both they and the Auto classes are there."""
    config, models = _MODELS[folder]
    auto, modeling = sys.modules.get(_AUTO), sys.modules[_file(folder, "modeling")]
    if auto is None or not all(hasattr(modeling, name) for name in models.values()):
        return
    for name, model in models.items():
        cls = getattr(importlib.import_module(_file(folder, "configuration")), config)
        getattr(auto, name).register(cls, getattr(modeling, model), exist_ok=True)
