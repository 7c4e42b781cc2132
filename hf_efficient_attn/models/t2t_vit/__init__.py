"""T2T-ViT (Yuan et al., ICCV 2021) as a Transformers model, with every attention method in every attention layer.

    from hf_efficient_attn.models.t2t_vit import T2TViTConfig, T2TViTForImageClassification

    model = T2TViTForImageClassification(T2TViTConfig.from_name("t2t_vit_t_14"))
    hea.convert(model, "kdeformer", layers=["t2t.0", "t2t.1"])

In `layers` the two token stages are called "t2t.0" and "t2t.1", and the blocks of the backbone have their index.
"""

from hf_efficient_attn.models.t2t_vit.configuration_t2t_vit import T2TViTConfig
from hf_efficient_attn.models.t2t_vit.conversion_t2t_vit import convert_checkpoint, convert_state_dict, image_processor
from hf_efficient_attn.models.t2t_vit.modeling_t2t_vit import (
    T2TViTForImageClassification,
    T2TViTModel,
    T2TViTPreTrainedModel,
)

__all__ = [
    "T2TViTConfig",
    "T2TViTForImageClassification",
    "T2TViTModel",
    "T2TViTPreTrainedModel",
    "convert_checkpoint",
    "convert_state_dict",
    "image_processor",
]
