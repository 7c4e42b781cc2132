"""All attention methods, one per module. Importing this package finds and registers every one of them.

Each module of this package is a method, except modules whose name starts with an underscore. `_shared` contains the
code that methods share. Other packages import from here and not from `_shared`.
"""

import importlib
import pkgutil

from hf_efficient_attn.methods._shared import crossover
from hf_efficient_attn.methods._shared.arguments import refuse_positional
from hf_efficient_attn.methods._shared.call import attention, naive_attention, refuse_tracing
from hf_efficient_attn.methods._shared.config import (
    AttentionOptions,
    HiddenProjections,
    MethodConfig,
    Recurrence,
    ShardedForm,
    option,
)
from hf_efficient_attn.methods._shared.learned import learns, learns_for_length, parameters_of_slice
from hf_efficient_attn.methods._shared.parts import attention_with_state, sharded_attention, update_state
from hf_efficient_attn.methods._shared.registry import (
    Method,
    MethodInfo,
    available_methods,
    get_method,
    make_config,
    method_info,
    methods_with,
    on_register,
    register_method,
)

for _module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
    if not _module.startswith("_"):
        importlib.import_module(f"{__name__}.{_module}")

__all__ = [
    "AttentionOptions",
    "HiddenProjections",
    "Method",
    "MethodConfig",
    "MethodInfo",
    "Recurrence",
    "ShardedForm",
    "attention",
    "attention_with_state",
    "available_methods",
    "crossover",
    "get_method",
    "learns",
    "learns_for_length",
    "make_config",
    "method_info",
    "methods_with",
    "naive_attention",
    "on_register",
    "option",
    "parameters_of_slice",
    "refuse_positional",
    "refuse_tracing",
    "register_method",
    "sharded_attention",
    "update_state",
]
