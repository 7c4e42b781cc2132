"""The methods, one file each; importing this registers them all."""

from hf_efficient_attn.methods import (
    flurka_linear,
    flurka_performer,
    hyperattention,
    kdeformer,
    linear,
    linformer,
    longformer,
    nystromformer,
    performer,
)

__all__ = [
    "flurka_linear",
    "flurka_performer",
    "hyperattention",
    "kdeformer",
    "linear",
    "linformer",
    "longformer",
    "nystromformer",
    "performer",
]
