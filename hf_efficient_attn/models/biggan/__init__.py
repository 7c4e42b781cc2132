"""BigGAN-deep (Brock, Donahue and Simonyan 2019), a class-conditional image generator with one attention layer."""

from hf_efficient_attn.models.biggan.configuration_biggan import BigGANConfig as BigGANConfig
from hf_efficient_attn.models.biggan.layers import truncated_noise as truncated_noise
from hf_efficient_attn.models.biggan.modeling_biggan import BigGANModel as BigGANModel
from hf_efficient_attn.models.biggan.modeling_biggan import BigGANOutput as BigGANOutput
from hf_efficient_attn.models.imagenet import class_index as class_index
from hf_efficient_attn.models.imagenet import class_indices as class_indices
from hf_efficient_attn.models.imagenet import class_names as class_names
