"""T2T-ViT (Yuan et al., ICCV 2021) as a Transformers model, every attention of which takes every method.

    from hf_efficient_attn.models.t2t_vit import T2TViTConfig, T2TViTForImageClassification

    model = T2TViTForImageClassification(T2TViTConfig.from_name("t2t_vit_t_14"))
    hea.convert(model, "kdeformer", layers=["t2t.0", "t2t.1"])

The names are imported when they are asked for, since Transformers' own modules take seconds.
"""

import importlib

_PLACES = {
    "T2TViTConfig": "configuration_t2t_vit",
    "T2TViTPreTrainedModel": "modeling_t2t_vit",
    "T2TViTModel": "modeling_t2t_vit",
    "T2TViTForImageClassification": "modeling_t2t_vit",
    "convert_checkpoint": "conversion_t2t_vit",
    "convert_state_dict": "conversion_t2t_vit",
    "image_processor": "image_processing_t2t_vit",
}

__all__ = list(_PLACES)


def __getattr__(name: str):
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
