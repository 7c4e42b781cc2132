"""Conversion of the authors' T2T-ViT checkpoints (github.com/yitu-opensource/T2T-ViT, releases) to Transformers."""

import argparse
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.models.imagenet import imagenet_labels
from hf_efficient_attn.models.t2t_vit.configuration_t2t_vit import T2TViTConfig
from hf_efficient_attn.models.t2t_vit.image_processing_t2t_vit import image_processor
from hf_efficient_attn.models.t2t_vit.modeling_t2t_vit import T2TViTForImageClassification

# The authors' names -> ours.
_NAMES = {
    "cls_token": "t2t_vit.embeddings.cls_token",
    "pos_embed": "t2t_vit.embeddings.position_embeddings",
    "tokens_to_token.project": "t2t_vit.embeddings.tokens_to_token.projection",
    "norm": "t2t_vit.layernorm",
    "head": "classifier",
    **{f"tokens_to_token.attention{i + 1}": f"t2t_vit.embeddings.tokens_to_token.stages.{i}" for i in range(2)},
}
_PARTS = {
    "norm1": "layernorm_before", "norm2": "layernorm_after",
    "attn.qkv": "attention.qkv", "attn.proj": "attention.o_proj", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2",
    # Performer stages, which have no separate module for the attention.
    "kqv": "mixer.kqv", "proj": "mixer.o_proj", "w": "mixer.w", "mlp.0": "mlp.fc1", "mlp.2": "mlp.fc2",
}  # fmt: skip
# Fused projections and their parts. Transformer stages and the backbone start with the query, performers with the key
# (models/token_performer.py, single_attn).
_FUSED = {"qkv": ("q_proj", "k_proj", "v_proj"), "kqv": ("k_proj", "q_proj", "v_proj")}
_HEAD_DIM = 64


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
    official = {name.removeprefix("module."): tensor for name, tensor in official.items()}
    config = config_of(official) if config is None else config
    expected = _expected_shapes(config)
    converted: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in official.items():
        renamed = _rename(name, tensor)
        if any(ours not in expected for ours in renamed):
            unknown.append(name)
        converted.update(renamed)
    missing = [name for name in expected if name not in converted]
    if unknown or missing:
        parts = [f"unknown names: {_some(unknown)}"] * bool(unknown) + [f"missing: {_some(missing)}"] * bool(missing)
        raise ValueError(
            f"these are not the weights of a T2T-ViT with {config.num_hidden_layers} layers and {config.tokens_type} "
            f"stages; {'; '.join(parts)}"
        )
    for name, shape in expected.items():
        if tuple(converted[name].shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(converted[name].shape)} in the checkpoint, and the config requires {shape}"
            )
    return converted, config


def config_of(official: Mapping[str, Tensor]) -> T2TViTConfig:
    """Infer the configuration from the shapes of the authors' state dict.

    Shapes do not tell the number of heads. It is derived from a head_dim of 64, that of all published models but
    t2t_vit_14_resnext. Images are assumed to be square.

    Args:
        official: as in `convert_state_dict`.

    Raises:
        ValueError: a required tensor is missing, or the shapes are not those of a T2T-ViT.
    """
    official = {name.removeprefix("module."): tensor for name, tensor in official.items()}

    def shape(name: str, ndim: int) -> tuple[int, ...]:
        if name not in official or official[name].ndim != ndim:
            raise ValueError(
                f"the architecture cannot be inferred: {name} is missing or has a wrong shape; give the model's name"
            )
        return tuple(official[name].shape)

    _, num_positions, hidden_size = shape("pos_embed", 3)
    num_features, performer = 0, "tokens_to_token.attention1.w" in official
    if performer:
        num_features, token_dim = shape("tokens_to_token.attention1.w", 2)
    else:
        token_dim = shape("tokens_to_token.attention1.attn.proj.weight", 2)[0]
    blocks = [int(match[1]) for name in official if (match := re.match(r"blocks\.(\d+)\.", name))]
    side, window = math.isqrt(num_positions - 1), shape("tokens_to_token.attention1.norm1.weight", 1)[0]
    kernels, strides = T2TViTConfig.t2t_kernel_sizes, T2TViTConfig.t2t_strides
    if side * side != num_positions - 1 or window % kernels[0] ** 2 or not blocks or hidden_size % _HEAD_DIM:
        raise ValueError(
            f"{num_positions} positions, {window} values per window, hidden size {hidden_size} and {len(set(blocks))} "
            "blocks do not fit a known T2T-ViT; give its config"
        )
    values: dict[str, Any] = {
        "image_size": side * math.prod(strides),
        "num_channels": window // kernels[0] ** 2,
        "hidden_size": hidden_size,
        "num_hidden_layers": max(blocks) + 1,
        "num_attention_heads": hidden_size // _HEAD_DIM,
        "intermediate_size": shape("blocks.0.mlp.fc1.weight", 2)[0],
        "token_dim": token_dim,
        "tokens_type": "performer" if performer else "transformer",
        "kernel_ratio": num_features / token_dim if performer else 0.5,
        "qkv_bias": "blocks.0.attn.qkv.bias" in official,
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
    num_labels = config.num_labels
    if name is not None:
        config = T2TViTConfig.from_name(name, num_labels=num_labels, image_size=config.image_size)
    labels = imagenet_labels()
    if num_labels == len(labels) and not {"id2label", "num_labels"} & set(changes):
        changes["id2label"] = dict(enumerate(labels))
    if "id2label" in changes:
        changes.setdefault("label2id", {label: index for index, label in changes["id2label"].items()})
    elif changes:
        changes.setdefault("num_labels", num_labels)
    if changes:
        values = config.to_dict()
        own_fields = {key: values[key] for key in T2TViTConfig.__annotations__ if key in values}
        config = T2TViTConfig(**{**own_fields, **changes})
    state, config = convert_state_dict(official, config)
    model = T2TViTForImageClassification(config)
    model.load_state_dict(state)
    model.save_pretrained(output)
    image_processor(config).save_pretrained(output)
    return config


def read_checkpoint(path: str | os.PathLike, *, ema: bool = True) -> dict[str, Tensor]:
    """Read the state dict of a checkpoint file.

    Args:
        path: as in `convert_checkpoint`.
        ema: prefer the moving average of the weights to the weights themselves; False prefers the weights.

    Raises:
        ValueError: the file holds no state dict, or objects other than tensors and plain values.
        FileNotFoundError: the file does not exist.
    """
    try:
        # The authors' files also hold the command line as an argparse.Namespace, which torch.load refuses by default.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise ValueError(f"{path} cannot be read as a checkpoint of tensors: {reason}") from error
    keys = ("state_dict_ema", "state_dict", "model") if ema else ("state_dict", "model", "state_dict_ema")
    if isinstance(content, Mapping):
        content = next((content[key] for key in keys if isinstance(content.get(key), Mapping)), content)
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{path} holds no state dict, neither directly nor under {', '.join(keys)}")
    return dict(content)


def _expected_shapes(config: T2TViTConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a `T2TViTForImageClassification`, without allocating memory."""
    with torch.device("meta"):
        model = T2TViTForImageClassification(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _rename(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Convert one of the authors' tensors to one or three of ours; an unknown name stays unchanged."""
    block = re.fullmatch(r"(blocks\.\d+|tokens_to_token\.attention[12])\.(.+?)(\.weight|\.bias)?", name)
    if block is None:
        stem, dot, last = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "")
        return {f"{_NAMES[stem]}{dot}{last}": tensor} if stem in _NAMES else {name: tensor}
    module, part, last = block[1], block[2], block[3] or ""
    if part not in _PARTS:
        return {name: tensor}
    module = module.replace("blocks.", "t2t_vit.layers.") if module.startswith("blocks.") else _NAMES[module]
    stem, _, final = f"{module}.{_PARTS[part]}".rpartition(".")
    if final not in _FUSED:
        return {f"{stem}.{final}{last}": tensor}
    if tensor.shape[0] % 3:
        raise ValueError(f"{name} has {tensor.shape[0]} outputs, which are not those of three projections")
    return {f"{stem}.{ours}{last}": chunk for ours, chunk in zip(_FUSED[final], tensor.chunk(3), strict=True)}


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
