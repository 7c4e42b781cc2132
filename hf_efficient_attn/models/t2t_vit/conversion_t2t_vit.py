"""Conversion of the authors' T2T-ViT checkpoints (github.com/yitu-opensource/T2T-ViT, releases) to Transformers."""

import argparse
import math
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_efficient_attn.errors import refusing
from hf_efficient_attn.models.imagenet import imagenet_labels
from hf_efficient_attn.models.t2t_vit.configuration_t2t_vit import T2TViTConfig
from hf_efficient_attn.models.t2t_vit.modeling_t2t_vit import T2TViTForImageClassification

if TYPE_CHECKING:
    from transformers import ViTImageProcessorPil

# Parts of the authors' names -> ours, replaced one after the other.
_NAMES = {
    r"^(cls_token)$": r"t2t_vit.embeddings.\1",
    r"^pos_embed$": "t2t_vit.embeddings.position_embeddings",
    r"^tokens_to_token\.project\.": "t2t_vit.embeddings.tokens_to_token.projection.",
    r"^tokens_to_token\.attention1\.": "t2t_vit.embeddings.tokens_to_token.stages.0.",
    r"^tokens_to_token\.attention2\.": "t2t_vit.embeddings.tokens_to_token.stages.1.",
    r"^blocks\.": "t2t_vit.layers.",
    r"^norm\.": "t2t_vit.layernorm.",
    r"^head\.": "classifier.",
    r"\.norm1\.": ".layernorm_before.",
    r"\.norm2\.": ".layernorm_after.",
    r"\.attn\.proj\.": ".attention.o_proj.",
    r"\.attn\.qkv\.": ".attention.qkv.",
    # Performer stages, which have no separate module for the attention.
    r"(stages\.\d)\.(kqv\.|w$)": r"\1.mixer.\2",
    r"(stages\.\d)\.proj\.": r"\1.mixer.o_proj.",
    r"\.mlp\.0\.": ".mlp.fc1.",
    r"\.mlp\.2\.": ".mlp.fc2.",
}
_HEAD_DIM = 64
_BICUBIC = 3  # as Pillow counts its filters


def convert_state_dict(
    official: Mapping[str, Tensor], config: T2TViTConfig | None = None
) -> tuple[dict[str, Tensor], T2TViTConfig]:
    """Convert the authors' state dict to one for `T2TViTForImageClassification`.

    Args:
        official: a state dict of the authors' models/t2t_vit.py; names may start with "module.".
        config: configuration of the model; None infers it from the shapes, as `config_of` does.

    Returns:
        The state dict, whose tensors share memory with `official`, and the configuration.

    Raises:
        ValueError: names are unknown or missing, or shapes differ from those that the configuration requires.
    """
    config = config_of(official) if config is None else config
    converted: dict[str, Tensor] = {}
    for name, tensor in official.items():
        converted |= _renamed(name.removeprefix("module."), tensor)
    with torch.device("meta"):
        model = T2TViTForImageClassification(config)
    try:
        model.load_state_dict(converted, assign=True)
    except RuntimeError as error:
        raise ValueError(
            f"these are not the weights of a T2T-ViT with {config.num_hidden_layers} layers and {config.tokens_type} "
            f"stages: {' '.join(str(error).split())}"
        ) from error
    return converted, config


def config_of(official: Mapping[str, Tensor]) -> T2TViTConfig:
    """Infer the configuration from the shapes of the authors' state dict; ValueError if they fit no T2T-ViT.

    Shapes do not tell the number of heads. It is derived from a head_dim of 64, that of all published models but
    t2t_vit_14_resnext. Images are assumed to be square.
    """
    shapes = {name.removeprefix("module."): tuple(tensor.shape) for name, tensor in official.items()}

    def shape(name: str, ndim: int) -> tuple[int, ...]:
        if len(shapes.get(name, ())) != ndim:
            raise ValueError(f"cannot be inferred: {name} is missing or has a wrong shape; give the model's name")
        return shapes[name]

    stage = "tokens_to_token.attention1"
    performer = f"{stage}.w" in shapes
    _, num_positions, hidden_size = shape("pos_embed", 3)
    num_features, token_dim = shape(f"{stage}.w" if performer else f"{stage}.attn.proj.weight", 2)
    blocks = [int(match[1]) for name in shapes if (match := re.match(r"blocks\.(\d+)\.", name))]
    side, (window,) = math.isqrt(num_positions - 1), shape(f"{stage}.norm1.weight", 1)
    pixels = T2TViTConfig.t2t_kernel_sizes[0] ** 2
    if side * side != num_positions - 1 or window % pixels or not blocks or hidden_size % _HEAD_DIM:
        raise ValueError(
            f"{num_positions} positions, {window} values per window, hidden size {hidden_size} and {len(set(blocks))} "
            "blocks do not fit a known T2T-ViT; give its config"
        )
    values: dict[str, Any] = {
        "image_size": side * math.prod(T2TViTConfig.t2t_strides),
        "num_channels": window // pixels,
        "hidden_size": hidden_size,
        "num_hidden_layers": max(blocks) + 1,
        "num_attention_heads": hidden_size // _HEAD_DIM,
        "intermediate_size": shape("blocks.0.mlp.fc1.weight", 2)[0],
        "token_dim": token_dim,
        "tokens_type": "performer" if performer else "transformer",
        "kernel_ratio": num_features / token_dim if performer else 0.5,
        "qkv_bias": "blocks.0.attn.qkv.bias" in shapes,
        "num_labels": shape("head.weight", 2)[0],
    }
    return T2TViTConfig(**values)


def convert_checkpoint(
    path: str | os.PathLike, output: str | os.PathLike, name: str | None = None, *, ema: bool = True, **changes: Any
) -> T2TViTConfig:
    """Convert a checkpoint file of the authors to a folder with config, safetensors and image processor.

    `T2TViTForImageClassification.from_pretrained(output)` loads the folder, as do Transformers' Auto classes after
    `import hf_efficient_attn`. A model with a thousand classes gets the names of ImageNet's classes.

    Args:
        path: a .pth or .pth.tar file as the authors' main.py writes it, or a plain state dict. Only tensors and plain
            values are read, and no code in the file is run.
        output: the folder, created if necessary.
        name: name of the model as in `T2TViTConfig.from_name`; None infers the model from the shapes.
        ema: use the moving average of the weights if the file holds one, as the authors do.
        **changes: fields of the config, such as id2label, or qk_scale=hidden_size**-0.5 for weights trained with
            timm's older port.

    Raises:
        ValueError: the name is unknown, or the file does not hold the weights of such a model.
        FileNotFoundError: the file does not exist.
    """
    official = read_checkpoint(path, ema=ema)
    config = config_of(official)
    num_labels, labels = config.num_labels, imagenet_labels()
    if name is not None:
        config = T2TViTConfig.from_name(name, num_labels=num_labels, image_size=config.image_size)
    if num_labels == len(labels) and not {"id2label", "num_labels"} & set(changes):
        changes["id2label"] = dict(enumerate(labels))
    if "id2label" in changes:
        changes.setdefault("label2id", {label: index for index, label in changes["id2label"].items()})
    else:
        changes.setdefault("num_labels", num_labels)
    own_fields = {key: getattr(config, key) for key in T2TViTConfig.__annotations__ if hasattr(config, key)}
    state, config = convert_state_dict(official, T2TViTConfig(**{**own_fields, **changes}))
    model = T2TViTForImageClassification(config)
    model.load_state_dict(state)
    model.save_pretrained(output)
    image_processor(config).save_pretrained(output)
    return config


def image_processor(config: T2TViTConfig) -> "ViTImageProcessorPil":
    """Return the image processor of the authors' evaluation: bicubic resizing, center crop, ImageNet's mean and std.

    The shorter side of an image is resized to the larger number of the config's `image_size`, divided by 0.9. The
    processor needs Pillow, but not torchvision.
    """
    from transformers import ViTImageProcessorPil
    from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    height, width = config.image_shape
    return ViTImageProcessorPil(
        resample=_BICUBIC, image_mean=IMAGENET_DEFAULT_MEAN, image_std=IMAGENET_DEFAULT_STD, do_center_crop=True,
        size={"shortest_edge": math.floor(max(height, width) / 0.9)},
        crop_size={"height": height, "width": width},
    )  # fmt: skip


def read_checkpoint(path: str | os.PathLike, *, ema: bool = True) -> dict[str, Tensor]:
    """Read the state dict of a checkpoint file, as in `convert_checkpoint`; False for `ema` prefers the weights.

    A file without a state dict, or with objects other than tensors and plain values, raises ValueError.
    """
    # The authors' files also hold the command line as an argparse.Namespace, which torch.load refuses by default.
    allowed = torch.serialization.safe_globals([argparse.Namespace])
    with refusing(f"{path} cannot be read as a checkpoint of tensors", FileNotFoundError), allowed:
        content = torch.load(path, map_location="cpu", weights_only=True)
    keys = ("state_dict_ema", "state_dict", "model") if ema else ("state_dict", "model", "state_dict_ema")
    if isinstance(content, Mapping):
        content = next((content[key] for key in keys if isinstance(content.get(key), Mapping)), content)
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{path} holds no state dict, neither directly nor under {', '.join(keys)}")
    return dict(content)


def _renamed(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Convert one of the authors' tensors to one or three of ours; an unknown name does not become one of ours."""
    ours = name
    for pattern, replacement in _NAMES.items():
        ours = re.sub(pattern, replacement, ours)
    # Fused projections, of which the query is the first, or in performers (models/token_performer.py) the key.
    fused = re.search(r"\.(qkv|kqv)\.", ours)
    if fused is None:
        return {ours: tensor}
    if tensor.shape[0] % 3:
        raise ValueError(f"{name} has {tensor.shape[0]} outputs, which are not those of three projections")
    chunks = zip(fused[1], tensor.chunk(3), strict=True)
    return {ours.replace(fused[0], f".{letter}_proj."): chunk for letter, chunk in chunks}
