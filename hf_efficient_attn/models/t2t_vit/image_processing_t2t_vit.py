"""Image preprocessing of T2T-ViT: Transformers' ViT processor with the settings of the authors' evaluation."""

import math

from transformers import ViTImageProcessorPil

from hf_efficient_attn.models.t2t_vit.configuration_t2t_vit import T2TViTConfig

CROP_RATIO = 0.9
IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
BICUBIC = 3


def image_processor(config: T2TViTConfig) -> ViTImageProcessorPil:
    """Return the image processor of the authors' evaluation: bicubic resizing, center crop, ImageNet's mean and std.

    After `image_processor(model.config).save_pretrained(folder)`, `AutoImageProcessor.from_pretrained(folder)` returns
    it. It needs Pillow, but not torchvision.

    Args:
        config: configuration of the model. The shorter side of an image is resized to the larger number of
            `image_size`, divided by 0.9.
    """
    height, width = config.image_shape
    return ViTImageProcessorPil(
        resample=BICUBIC, image_mean=IMAGENET_MEAN, image_std=IMAGENET_STD, do_center_crop=True,
        size={"shortest_edge": math.floor(max(height, width) / CROP_RATIO)},
        crop_size={"height": height, "width": width},
    )  # fmt: skip
