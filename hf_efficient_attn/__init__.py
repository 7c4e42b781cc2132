"""Sub-quadratic attention for Transformers: `from_pretrained(..., attn_implementation="kdeformer")` after this."""

import hf_efficient_attn.methods
from hf_efficient_attn import analysis, functional, integration, kernel, models
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
)
from hf_efficient_attn.methods.approx_kmv import ApproxKMVConfig
from hf_efficient_attn.methods.eva import EvaConfig
from hf_efficient_attn.methods.flurka_eva import FlurkaEvaConfig
from hf_efficient_attn.methods.flurka_linear import FlurkaLinearConfig
from hf_efficient_attn.methods.flurka_performer import FlurkaPerformerConfig
from hf_efficient_attn.methods.hyperattention import HyperAttentionConfig
from hf_efficient_attn.methods.kdeformer import KDEformerConfig
from hf_efficient_attn.methods.linear import LinearConfig
from hf_efficient_attn.methods.linformer import LinformerConfig
from hf_efficient_attn.methods.longformer import LongformerConfig
from hf_efficient_attn.methods.nystromformer import NystromformerConfig
from hf_efficient_attn.methods.performer import PerformerConfig
from hf_efficient_attn.methods.reformer import ReformerConfig
from hf_efficient_attn.methods.scatterbrain import ScatterbrainConfig
from hf_efficient_attn.training import UptrainingSchedule, uptraining_preset
from hf_efficient_attn.version import __version__

integration.register()
models.register()


def __getattr__(name: str):
    # Trainer's callbacks take seconds to import.
    if name == "UptrainingCallback":
        from hf_efficient_attn.training.callback import UptrainingCallback

        return UptrainingCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
