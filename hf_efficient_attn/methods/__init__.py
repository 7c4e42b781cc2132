"""All attention methods, one per module. Importing this package finds and registers every one of them.

Each module of this package is a method, except modules whose name starts with an underscore. `_shared` contains the
code that methods share. Other packages import from here and not from `_shared`.
"""

import importlib
import pkgutil

from hf_efficient_attn.methods._shared import crossover as crossover
from hf_efficient_attn.methods._shared.call import attention as attention
from hf_efficient_attn.methods._shared.call import naive_attention as naive_attention
from hf_efficient_attn.methods._shared.call import refuse_tracing as refuse_tracing
from hf_efficient_attn.methods._shared.config import MASK_ADVICE as MASK_ADVICE
from hf_efficient_attn.methods._shared.config import AttentionOptions as AttentionOptions
from hf_efficient_attn.methods._shared.config import HiddenProjections as HiddenProjections
from hf_efficient_attn.methods._shared.config import MethodConfig as MethodConfig
from hf_efficient_attn.methods._shared.config import Recurrence as Recurrence
from hf_efficient_attn.methods._shared.config import ShardedForm as ShardedForm
from hf_efficient_attn.methods._shared.config import option as option
from hf_efficient_attn.methods._shared.config import refuse as refuse
from hf_efficient_attn.methods._shared.parts import attention_with_state as attention_with_state
from hf_efficient_attn.methods._shared.parts import sharded_attention as sharded_attention
from hf_efficient_attn.methods._shared.parts import update_state as update_state
from hf_efficient_attn.methods._shared.registry import Method as Method
from hf_efficient_attn.methods._shared.registry import MethodInfo as MethodInfo
from hf_efficient_attn.methods._shared.registry import available_methods as available_methods
from hf_efficient_attn.methods._shared.registry import get_method as get_method
from hf_efficient_attn.methods._shared.registry import learns as learns
from hf_efficient_attn.methods._shared.registry import make_config as make_config
from hf_efficient_attn.methods._shared.registry import method_info as method_info
from hf_efficient_attn.methods._shared.registry import methods_with as methods_with
from hf_efficient_attn.methods._shared.registry import on_register as on_register
from hf_efficient_attn.methods._shared.registry import parameter_shapes as parameter_shapes
from hf_efficient_attn.methods._shared.registry import parameters_of_slice as parameters_of_slice
from hf_efficient_attn.methods._shared.registry import register_method as register_method

for _module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
    if not _module.startswith("_"):
        importlib.import_module(f"{__name__}.{_module}")
