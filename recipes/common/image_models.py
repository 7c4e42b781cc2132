"""Image classifiers of the recipes: loading, new heads, resolution, and preprocessing."""

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL.Image import Resampling
from torch import nn
from transformers import AutoConfig, AutoModelForImageClassification, PretrainedConfig, PreTrainedModel
from transformers import ViTImageProcessorPil as Processor

from hf_efficient_attn.checkpoint.loading import no_progress_bar
from hf_efficient_attn.models.t2t_vit import T2TViTConfig, image_processor
from recipes.common.arguments import option
from recipes.common.data.image_tensors import Norm, preprocessor_settings


@dataclass
class ModelArguments:
    """The model and its resolution."""

    _argument_group_name = "model"

    model_name_or_path: str = option(
        "Image classifier: a folder or a hub id; with --from_scratch also a T2T-ViT by name: "
        f"{', '.join(T2TViTConfig.names())}.",
        aliases=["--model"],
    )
    from_scratch: bool = option("Start from random weights, with the model's config.", False)
    new_head: bool = option("Use a new classifier for the classes of the training data.", False)
    resolution: int | None = option(
        "Side of the pictures in pixels. Positions are interpolated if it is not the model's own.", None
    )

    @property
    def is_architecture(self) -> bool:
        """Whether the model is the name of an architecture without weights. A folder of that name takes precedence."""
        name = self.model_name_or_path
        if name not in T2TViTConfig.names() or os.path.isdir(name):
            return False
        if not self.from_scratch:
            raise ValueError(
                f"{name} is an architecture without weights: give --from_scratch, or a folder that "
                "hf_efficient_attn.models.t2t_vit.convert_checkpoint made from the authors' checkpoint"
            )
        return True


def config_of(options: ModelArguments, **changes: Any) -> PretrainedConfig:
    """The config of the model, with `changes`."""
    make = T2TViTConfig.from_name if options.is_architecture else AutoConfig.from_pretrained
    return make(options.model_name_or_path, **changes)


def load_model(options: ModelArguments, labels: Sequence[str] | None) -> PreTrainedModel:
    """Load the classifier, with a new head if `labels` are given."""
    named: dict[str, Any] = {}
    if labels is not None:
        named = {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}
    if options.from_scratch:
        changes = {} if options.resolution is None else {"image_size": options.resolution}
        return AutoModelForImageClassification.from_config(config_of(options, **named, **changes))
    with no_progress_bar():
        same = labels is not None and config_of(options).num_labels == len(labels)
        model = AutoModelForImageClassification.from_pretrained(
            options.model_name_or_path, **named, ignore_mismatched_sizes=labels is not None
        )
    # If the shapes match, the old head was loaded: reset it.
    for module in model.children() if same else ():
        if isinstance(module, nn.Linear) and module.out_features == len(labels):
            nn.init.normal_(module.weight, std=model.config.initializer_range)
            nn.init.zeros_(module.bias)
    return model


def norm_of(options: ModelArguments) -> Norm:
    """How the pictures are resized and normalised. A pretrained checkpoint must define it."""
    if options.is_architecture:
        return Norm.of(image_processor(config_of(options)).to_dict())
    try:
        return Norm.of(preprocessor_settings(options.model_name_or_path))
    except OSError as error:
        if not options.from_scratch:
            raise ValueError(
                f"{options.model_name_or_path} has no preprocessor_config.json: save the image processor that it was "
                "trained with in its folder, such as ViTImageProcessorPil(image_mean=..., image_std=..., resample=...)"
            ) from error
        # New weights have no preprocessor: use the usual values of ImageNet.
        return Norm.of(Processor(resample=Resampling.BICUBIC).to_dict())


def processor_of(norm: Norm, pixels: int, crop_ratio: float) -> Processor:
    """An image processor that crops like the evaluation, to be saved with the model."""
    return Processor(
        resample=norm.resample, image_mean=list(norm.mean), image_std=list(norm.std), do_center_crop=True,
        size={"shortest_edge": round(pixels / crop_ratio)}, crop_size={"height": pixels, "width": pixels},
    )  # fmt: skip


def fit_resolution(model: nn.Module, pixels: int | None) -> tuple[int, int | None, bool]:
    """Set the resolution of a model. None keeps the model's own. T2T-ViT is changed and needs no interpolation.

    Returns:
        The side of the pictures, the number of tokens of a picture (None if it differs between layers or is unknown),
        and whether positions are interpolated.
    """
    sizes = [getattr(model.config, name, None) for name in ("image_size", "patch_size")]
    sizes = [size[0] if isinstance(size, (list, tuple)) and len(set(size)) == 1 else size for size in sizes]
    own, patch = (size if isinstance(size, int) else None for size in sizes)
    pixels, kind = own if pixels is None else pixels, type(model).__name__
    if pixels is None:
        raise ValueError(f"the config of {kind} has no image_size: give --resolution")
    if pixels < 1 or (patch and pixels % patch):
        raise ValueError(f"--resolution {pixels} is not a multiple of the {patch} pixels of a patch of {kind}")
    if getattr(model.config, "num_channels", 3) != 3:
        raise ValueError(f"{kind} has {model.config.num_channels} input channels; pictures are read as RGB, with three")
    if pixels != own and "interpolate_pos_encoding" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{kind} cannot interpolate its positions: leave out --resolution to use its own {own} pixels")
    if hasattr(model, "set_image_size"):
        if pixels != own:
            model.set_image_size(pixels)
        # Each attention module has its own number of tokens, which is the length of a method's tables.
        sizes = {module.max_tokens for module in model.modules() if hasattr(module, "max_tokens")}
        return pixels, sizes.pop() if len(sizes) == 1 else None, False
    tables = [p for name, p in model.named_parameters() if name.endswith("position_embeddings") and p.ndim == 3]
    if not patch or not own or len(tables) != 1:
        return pixels, None, pixels != own
    # The table also holds the class token, and DeiT's distillation token.
    return pixels, (pixels // patch) ** 2 + tables[0].shape[1] - (own // patch) ** 2, pixels != own
