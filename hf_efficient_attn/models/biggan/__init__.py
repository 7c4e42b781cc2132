"""BigGAN-deep (Brock, Donahue and Simonyan 2019), a class-conditional image generator with one attention layer."""

from hf_efficient_attn.models.biggan.configuration_biggan import BigGANConfig
from hf_efficient_attn.models.biggan.layers import truncated_noise
from hf_efficient_attn.models.biggan.modeling_biggan import BigGANModel, BigGANOutput
from hf_efficient_attn.models.imagenet import class_index, class_indices, class_names

__all__ = [
    "BigGANConfig",
    "BigGANModel",
    "BigGANOutput",
    "class_index",
    "class_indices",
    "class_names",
    "truncated_noise",
]
