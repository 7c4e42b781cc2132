"""The methods, one file each; importing this registers them all."""

from hf_efficient_attn.methods import hyperattention, kdeformer, linear, linformer, longformer, nystromformer, performer

__all__ = ["hyperattention", "kdeformer", "linear", "linformer", "longformer", "nystromformer", "performer"]
