"""The public names of the package. Importing them registers methods and models with Transformers."""

import importlib
from typing import Any

from hf_efficient_attn import functional, integration, kernel, methods, models
from hf_efficient_attn.conversion import convert, extend_positions
from hf_efficient_attn.conversion.sequence_parallel import sequence_parallel
from hf_efficient_attn.errors import UnsupportedAttentionError, did_you_mean
from hf_efficient_attn.evaluation import crossover
from hf_efficient_attn.integration.nearfar_cache import NearFarCache
from hf_efficient_attn.integration.settings import EfficientAttentionConfig
from hf_efficient_attn.methods import (
    MethodConfig,
    MethodInfo,
    attention,
    available_methods,
    method_info,
    naive_attention,
    register_method,
)
from hf_efficient_attn.sdpa import SDPAReplacement, replace_sdpa, restore_sdpa
from hf_efficient_attn.training import (
    DistillationOptions,
    FinetuningOptions,
    UptrainingSchedule,
    distill,
    uptraining_preset,
)

integration.register()
models.register()
crossover.register()


# Public names and their modules, which are imported on first use. What they import takes up to seconds:
# `transformers.trainer_callback`, and for timing `torch.utils.benchmark`, which imports setuptools.
ON_FIRST_USE = {
    "UptrainingCallback": "training.callback",
    "analysis": "analysis",
    "attention_error": "evaluation.model_error",
    "calibrate": "evaluation.calibration",
}


def config_classes() -> dict[str, type[MethodConfig]]:
    """The config class of every registered method by its name; of several with one name, the first is an attribute."""
    classes = (method_info(name).config_class for name in reversed(available_methods()))
    return {config_class.__name__: config_class for config_class in classes}


def find(name: str) -> Any:
    """Return a public name that is not in `__all__`, because it is imported or registered later than this module.

    Raises:
        AttributeError: there is no such name.
    """
    if name in ON_FIRST_USE:
        module = importlib.import_module(f"hf_efficient_attn.{ON_FIRST_USE[name]}")
        return getattr(module, name, module)
    classes = config_classes()
    if name in classes:
        return classes[name]
    hint = "" if name.startswith("_") else did_you_mean(name, [*__all__, *ON_FIRST_USE, *classes])
    raise AttributeError(f"module 'hf_efficient_attn' has no attribute {name!r}.{hint}")


__all__ = [
    "DistillationOptions", "EfficientAttentionConfig", "FinetuningOptions", "MethodConfig", "MethodInfo",
    "NearFarCache", "SDPAReplacement", "UnsupportedAttentionError", "UptrainingSchedule", "attention",
    "available_methods", "convert", "distill", "extend_positions", "functional", "integration", "kernel", "method_info",
    "methods", "models", "naive_attention", "register_method", "replace_sdpa", "restore_sdpa", "sequence_parallel",
    "uptraining_preset",
]  # fmt: skip
