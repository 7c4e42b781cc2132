"""T2T-ViT (Yuan et al., ICCV 2021) as a Transformers model, with every attention method in every attention layer.

    from hf_efficient_attn.models.t2t_vit import T2TViTConfig, T2TViTForImageClassification

    model = T2TViTForImageClassification(T2TViTConfig.from_name("t2t_vit_t_14"))
    hea.convert(model, "kdeformer", layers=["t2t.0", "t2t.1"])

In `layers` the two token stages are called "t2t.0" and "t2t.1", and the blocks of the backbone have their index.
"""

from hf_efficient_attn.models.t2t_vit.configuration_t2t_vit import T2TViTConfig as T2TViTConfig
from hf_efficient_attn.models.t2t_vit.conversion_t2t_vit import convert_checkpoint as convert_checkpoint
from hf_efficient_attn.models.t2t_vit.conversion_t2t_vit import convert_state_dict as convert_state_dict
from hf_efficient_attn.models.t2t_vit.conversion_t2t_vit import image_processor as image_processor
from hf_efficient_attn.models.t2t_vit.modeling_t2t_vit import (
    T2TViTForImageClassification as T2TViTForImageClassification,
)
from hf_efficient_attn.models.t2t_vit.modeling_t2t_vit import T2TViTModel as T2TViTModel
from hf_efficient_attn.models.t2t_vit.modeling_t2t_vit import T2TViTPreTrainedModel as T2TViTPreTrainedModel
