"""How T2T-ViT wants its pictures: Transformers' own processor, with the authors' evaluation."""

import math

from transformers import ViTImageProcessorPil

from hf_efficient_attn.models.t2t_vit.configuration_t2t_vit import T2TViTConfig

CROP_RATIO = 0.9
IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
BICUBIC = 3


def image_processor(config: T2TViTConfig) -> ViTImageProcessorPil:
    """The processor of the authors' evaluation: the middle of the picture, bicubic, in ImageNet's mean and deviation.

    Saved beside the model (`image_processor(model.config).save_pretrained(folder)`), it is what
    `AutoImageProcessor.from_pretrained(folder)` gives. It needs Pillow and no torchvision.

    Args:
        config: of the model; the shorter side of a picture becomes shorter side of `image_size` / 0.9.

    Returns:
        a `ViTImageProcessorPil`.
    """
    height, width = config.image_shape
    return ViTImageProcessorPil(
        resample=BICUBIC, image_mean=IMAGENET_MEAN, image_std=IMAGENET_STD, do_center_crop=True,
        size={"shortest_edge": math.floor(max(height, width) / CROP_RATIO)},
        crop_size={"height": height, "width": width},
    )  # fmt: skip
