"""Sub-quadratic attention for Transformers.

After `import hf_efficient_attn`, Transformers knows every method of this package by its name, for example in
`AutoModel.from_pretrained(..., attn_implementation="kdeformer")`.
"""

from typing import Any

from hf_efficient_attn import analysis, functional, integration, kernel, methods, models
from hf_efficient_attn.conversion import convert, extend_positions
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.calibration import calibrate
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
from hf_efficient_attn.training import UptrainingSchedule, uptraining_preset
from hf_efficient_attn.version import __version__

integration.register()
models.register()


def _config_classes() -> dict[str, type[MethodConfig]]:
    """The config class of every registered method by its name; all of them are attributes of this package."""
    classes = (method_info(name).config_class for name in available_methods())
    return {config_class.__name__: config_class for config_class in classes}


def __getattr__(name: str) -> Any:
    if name == "UptrainingCallback":
        # Imported on first use, because `transformers.trainer_callback` takes seconds to import.
        from hf_efficient_attn.training.callback import UptrainingCallback

        return UptrainingCallback
    if name in (classes := _config_classes()):
        return classes[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_config_classes()})


__all__ = [
    "EfficientAttentionConfig",
    "MethodConfig",
    "MethodInfo",
    "UnsupportedAttentionError",
    "UptrainingCallback",
    "UptrainingSchedule",
    "__version__",
    "analysis",
    "attention",
    "available_methods",
    "calibrate",
    "convert",
    "extend_positions",
    "functional",
    "integration",
    "kernel",
    "method_info",
    "methods",
    "models",
    "naive_attention",
    "register_method",
    "uptraining_preset",
]
__all__ += _config_classes()
