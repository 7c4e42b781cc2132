"""The methods, one file each; importing this package discovers and registers all of them.

A module of this package whose name does not start with an underscore is a method. What methods share is in `_shared`.
"""

import importlib
import pkgutil

from hf_efficient_attn.methods._shared.base import (
    Method,
    MethodConfig,
    MethodInfo,
    available_methods,
    get_method,
    learns,
    make_config,
    method_info,
    option,
    register,
    unregister,
)
from hf_efficient_attn.methods._shared.call import (
    absorb,
    attention,
    causal_methods,
    functional_form,
    naive_attention,
    rectangular_methods,
    step,
)

for _module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
    if not _module.startswith("_"):
        importlib.import_module(f"{__name__}.{_module}")

__all__ = [
    "Method",
    "MethodConfig",
    "MethodInfo",
    "absorb",
    "attention",
    "available_methods",
    "causal_methods",
    "functional_form",
    "get_method",
    "learns",
    "make_config",
    "method_info",
    "naive_attention",
    "option",
    "rectangular_methods",
    "register",
    "step",
    "unregister",
]
