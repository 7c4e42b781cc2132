"""Models defined in this package, in Transformers' form and registered with its Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForImageClassification

from hf_efficient_attn.models.biggan import BigGANConfig, BigGANModel
from hf_efficient_attn.models.t2t_vit import T2TViTConfig, T2TViTForImageClassification, T2TViTModel

# (config class, Auto class, model class).
_MODELS = (
    (BigGANConfig, AutoModel, BigGANModel),
    (T2TViTConfig, AutoModel, T2TViTModel),
    (T2TViTConfig, AutoModelForImageClassification, T2TViTForImageClassification),
)


def register() -> None:
    """Register the models with Transformers' Auto classes; may be called repeatedly."""
    for config_class, auto, model_class in _MODELS:
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        auto.register(config_class, model_class, exist_ok=True)


def auto_class(model_name: str) -> str | None:
    """Return the name of the Auto class that loads a model of this package by its class; None for other models."""
    return next((auto.__name__ for _, auto, model in _MODELS if model.__name__ == model_name), None)


def model_type(model_name: str) -> str | None:
    """Return the `model_type` of a model of this package by the name of its class; None for other models."""
    return next((config.model_type for config, _, model in _MODELS if model.__name__ == model_name), None)
