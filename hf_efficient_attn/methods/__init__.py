"""The methods, one file each; importing this registers them all."""

from hf_efficient_attn.methods import approx_kmv, hyperattention, kdeformer, linear, longformer, performer

__all__ = ["approx_kmv", "hyperattention", "kdeformer", "linear", "longformer", "performer"]
