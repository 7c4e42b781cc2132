"""Image classifiers for the recipes: loading, a new head, the size of the pictures, and how these are scaled."""

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    ViTImageProcessorPil,
)

import hf_efficient_attn as hea
from hf_efficient_attn.evaluation.demo import quiet_loading
from hf_efficient_attn.integration.settings import EfficientAttentionConfig
from hf_efficient_attn.methods import MethodConfig
from hf_efficient_attn.models.t2t_vit import T2TViTConfig, image_processor
from recipes.arguments import AttentionArguments
from recipes.benchmarks.tasks import for_length
from recipes.data.image_tensors import Norm, preprocessor_settings


@dataclass
class ModelArguments:
    """Which model, at which size of picture."""

    _argument_group_name = "model"

    model_name_or_path: str = field(
        metadata={
            "help": "Image classifier: a folder or a hub id; with --from_scratch also a T2T-ViT by name: "
            f"{', '.join(T2TViTConfig.names())}.",
            "aliases": ["--model"],
        }
    )
    from_scratch: bool = field(default=False, metadata={"help": "Random weights: take only the model's config."})
    new_head: bool = field(default=False, metadata={"help": "A new classifier, with the classes of the training data."})
    resolution: int | None = field(
        default=None,
        metadata={"help": "Side of the pictures; other than the model's own, its positions are interpolated."},
    )
    image_mean: list[float] | None = field(
        default=None, metadata={"help": "By channel, of values from 0 to 1. Default: as the checkpoint says."}
    )
    image_std: list[float] | None = field(default=None, metadata={"help": "As --image_mean."})
    resample: str | None = field(
        default=None,
        metadata={"help": "bilinear, bicubic or lanczos, for resizing. Default: as the checkpoint says."},
    )


def named_architecture(options: ModelArguments) -> bool:
    """Whether the model is one that is made by its name, without a checkpoint; a folder of that name comes first.

    Raises:
        ValueError: it is, and weights are wanted.
    """
    name = options.model_name_or_path
    if name not in T2TViTConfig.names() or os.path.isdir(name):
        return False
    if not options.from_scratch:
        raise ValueError(
            f"{name} is the name of an architecture and has no weights: give --from_scratch, or the folder of one that "
            "hf_efficient_attn.models.t2t_vit.convert_checkpoint made of the authors' file"
        )
    return True


def config_of(options: ModelArguments, **changes):
    """The config of the model, with `changes`.

    Raises:
        ValueError: as `named_architecture`.
    """
    if named_architecture(options):
        return T2TViTConfig.from_name(options.model_name_or_path, **changes)
    return AutoConfig.from_pretrained(options.model_name_or_path, **changes)


def load_model(options: ModelArguments, labels: Sequence[str] | None) -> nn.Module:
    """The classifier; with `labels`, under a new head for them."""
    named: dict[str, Any] = {}
    if labels is not None:
        named = {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}
    if options.from_scratch:
        changes = {} if options.resolution is None else {"image_size": options.resolution}
        return AutoModelForImageClassification.from_config(config_of(options, **named, **changes))
    with quiet_loading():
        same = labels is not None and config_of(options).num_labels == len(labels)
        model = AutoModelForImageClassification.from_pretrained(
            options.model_name_or_path, **named, ignore_mismatched_sizes=labels is not None
        )
    if same:
        # Nothing was mismatched, so that the old head was loaded.
        for module in model.children():
            if isinstance(module, nn.Linear) and module.out_features == len(labels):
                nn.init.normal_(module.weight, std=model.config.initializer_range)
                nn.init.zeros_(module.bias)
    return model


def norm_of(options: ModelArguments) -> Norm:
    """How the pictures are resized and scaled.

    Raises:
        ValueError: a pretrained checkpoint does not say it and the options do not either.
    """
    from PIL.Image import Resampling

    try:
        if named_architecture(options):
            settings = image_processor(config_of(options)).to_dict()
        else:
            settings = preprocessor_settings(options.model_name_or_path)
    except OSError as error:
        # Of weights from here no one has said anything: the usual values of ImageNet.
        settings = ViTImageProcessorPil(resample=Resampling.BICUBIC).to_dict() if options.from_scratch else {}
        if not settings and not (options.image_mean and options.resample):
            raise ValueError(
                f"{options.model_name_or_path} has no preprocessor_config.json: give --image_mean, --image_std and "
                "--resample as they were when it was trained"
            ) from error
    if options.image_mean is not None:
        settings |= {"image_mean": options.image_mean, "image_std": options.image_std, "do_normalize": True}
    if options.resample is not None:
        if options.resample.upper() not in ("BILINEAR", "BICUBIC", "LANCZOS"):
            raise ValueError(f"--resample {options.resample} is none of bilinear, bicubic, lanczos")
        settings["resample"] = Resampling[options.resample.upper()]
    norm = Norm.of(settings)
    if len(norm.mean) != 3 or len(norm.std) != 3 or min(norm.std) <= 0:
        raise ValueError(f"mean {norm.mean} and deviation {norm.std}: three channels are wanted, the latter above 0")
    return norm


def processor_of(norm: Norm, pixels: int, crop_ratio: float) -> ViTImageProcessorPil:
    """What cuts a picture as the evaluation does, to be saved with the model."""
    return ViTImageProcessorPil(
        resample=norm.resample, image_mean=list(norm.mean), image_std=list(norm.std), do_center_crop=True,
        size={"shortest_edge": round(pixels / crop_ratio)}, crop_size={"height": pixels, "width": pixels},
    )  # fmt: skip


def fit_resolution(model: nn.Module, pixels: int | None) -> tuple[int, int | None, bool]:
    """The side of the pictures, the tokens of one where that is one number, and whether positions are interpolated.

    A model that can be made one for pictures of another size (T2T-ViT) is, and has nothing to interpolate any more.

    Raises:
        ValueError: the model takes no pictures of this size.
    """
    own, patch = (getattr(model.config, name, None) for name in ("image_size", "patch_size"))
    own, patch = (size[0] if isinstance(size, (list, tuple)) and len(set(size)) == 1 else size for size in (own, patch))
    pixels = own if pixels is None else pixels
    kind = type(model).__name__
    if not isinstance(pixels, int):
        raise ValueError(f"{kind} does not say how large its pictures are: give --resolution")
    if not isinstance(patch, int):
        patch = None
    if pixels < 1 or (patch and pixels % patch):
        raise ValueError(f"--resolution {pixels} is no multiple of the {patch} pixels of a patch of {kind}")
    if getattr(model.config, "num_channels", 3) != 3:
        raise ValueError(f"{kind} takes {model.config.num_channels} channels; pictures are read in three, RGB")
    if pixels != own and "interpolate_pos_encoding" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{kind} cannot interpolate its positions: leave --resolution out for its own {own} pixels")
    if hasattr(model, "set_image_size"):
        if pixels != own:
            model.set_image_size(pixels)
        # Each attention says its own number, and the tables of a method are as long as that.
        sizes = {module.max_tokens for module in model.modules() if hasattr(module, "max_tokens")}
        return pixels, sizes.pop() if len(sizes) == 1 else None, False
    tables = [p for name, p in model.named_parameters() if name.endswith("position_embeddings") and p.ndim == 3]
    if not patch or not isinstance(own, int) or len(tables) != 1:
        return pixels, None, pixels != own
    # Beside the patches the table holds the class token, and DeiT's distillation token.
    return pixels, (pixels // patch) ** 2 + tables[0].shape[1] - (own // patch) ** 2, pixels != own


class Sized:
    """AttentionArguments whose methods have their learned tables for so many tokens, where they have tables.

    Of a model at a resolution other than its own these cannot be told from its config.
    """

    def __init__(self, attention: AttentionArguments, tokens: int | None) -> None:
        self.attention, self.tokens = attention, tokens

    def method(self):
        """As `AttentionArguments.method`."""
        found = self.attention.method()
        return found and (self.sized(found[0]), found[1])

    def schedule(self, total_steps: int | None = None):
        """As `AttentionArguments.schedule`."""
        found = self.attention.schedule(total_steps)
        if found is None:
            return None
        stages = []
        for stage in found.stages:
            if stage.settings is not None and len(stage.settings.entries) == 1:
                entry = stage.settings.entries[0]
                stage = replace(stage, settings=EfficientAttentionConfig(self.sized(entry.config), None, entry.layers))
            stages.append(stage)
        return hea.UptrainingSchedule(stages, found.total_steps)

    def sized(self, method):
        """The config with tables of the right length; raises ValueError where it says another."""
        if not isinstance(method, MethodConfig) or self.tokens is None:
            return method
        given = getattr(method, "max_length", 0)
        if 0 < given < self.tokens:
            raise ValueError(f"{method.method}: max_length={given}, but a picture has {self.tokens} tokens")
        return method if given else for_length(method, self.tokens)


@torch.no_grad()
def probe(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """One forward pass, so that what the model refuses is refused before the training."""
    training = model.training
    model.eval()(**{key: x.to(model.device) if isinstance(x, torch.Tensor) else x for key, x in inputs.items()})
    model.train(training)
