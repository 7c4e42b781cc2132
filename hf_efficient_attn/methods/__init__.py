"""The methods, one file each; importing this registers them all."""

from hf_efficient_attn.methods import (
    approx_kmv,
    eva,
    flurka_eva,
    flurka_linear,
    flurka_performer,
    hyperattention,
    kdeformer,
    linear,
    linformer,
    longformer,
    nystromformer,
    performer,
    reformer,
    scatterbrain,
)

__all__ = [
    "approx_kmv",
    "eva",
    "flurka_eva",
    "flurka_linear",
    "flurka_performer",
    "hyperattention",
    "kdeformer",
    "linear",
    "linformer",
    "longformer",
    "nystromformer",
    "performer",
    "reformer",
    "scatterbrain",
]
