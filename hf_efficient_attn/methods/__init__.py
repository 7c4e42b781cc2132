"""The methods, one file each; importing this registers them all."""

from hf_efficient_attn.methods import hyperattention, kdeformer, linear, longformer, performer, reformer

__all__ = ["hyperattention", "kdeformer", "linear", "longformer", "performer", "reformer"]
