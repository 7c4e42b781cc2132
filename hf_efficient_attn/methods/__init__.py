"""The methods, one file each; importing this registers them all."""

from hf_efficient_attn.methods import (
    eva,
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
    "eva",
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
