"""The authors' T2T-ViT checkpoints (github.com/yitu-opensource/T2T-ViT, releases) as Transformers' folders."""

import argparse
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_efficient_attn.models.t2t_vit.configuration_t2t_vit import T2TViTConfig

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
    # Of performer stages, which have no module of their own for the attention.
    "kqv": "mixer.kqv", "proj": "mixer.o_proj", "w": "mixer.w", "mlp.0": "mlp.fc1", "mlp.2": "mlp.fc2",
}  # fmt: skip
# What several projections in one are cut into. Transformer stages and the backbone have the query first, performers the
# key (models/token_performer.py, single_attn).
_CUTS = {"qkv": ("q_proj", "k_proj", "v_proj"), "kqv": ("k_proj", "q_proj", "v_proj")}
_HEAD_WIDTH = 64
_IMAGENET = 1000


def convert_state_dict(
    official: Mapping[str, Tensor], config: "T2TViTConfig | None" = None
) -> tuple[dict[str, Tensor], T2TViTConfig]:
    """Tensors under the authors' names -> those of a `T2TViTForImageClassification`, and its config.

    Args:
        official: a state dict of models/t2t_vit.py, its names perhaps behind "module.".
        config: of the model; None to tell it from the shapes, as `config_of` does.

    Returns:
        (state dict, config). The tensors share memory with those given.

    Raises:
        ValueError: names that are not known or are missing, or tensors of other shapes than the config says.
    """
    official = {name.removeprefix("module."): tensor for name, tensor in official.items()}
    config = config_of(official) if config is None else config
    expected = expected_shapes(config)
    converted: dict[str, Tensor] = {}
    unknown = []
    for name, tensor in official.items():
        found = _rename(name, tensor)
        if any(ours not in expected for ours in found):
            unknown.append(name)
        converted.update(found)
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
                f"{name} has shape {tuple(converted[name].shape)} in the checkpoint and {shape} by the config"
            )
    return converted, config


def config_of(official: Mapping[str, Tensor]) -> T2TViTConfig:
    """The config that the shapes under the authors' names are of.

    The heads cannot be told from shapes: they are taken to be 64 wide, as in all published models but
    t2t_vit_14_resnext. Pictures are square.

    Raises:
        ValueError: a tensor that tells it is missing, or is of no T2T-ViT.
    """
    official = {name.removeprefix("module."): tensor for name, tensor in official.items()}

    def shape(name: str, dimensions: int) -> tuple[int, ...]:
        if name not in official or official[name].ndim != dimensions:
            raise ValueError(f"the architecture cannot be told: {name} is missing or of no T2T-ViT; give its name")
        return tuple(official[name].shape)

    _, positions, width = shape("pos_embed", 3)
    features, performer = 0, "tokens_to_token.attention1.w" in official
    if performer:
        features, token_dim = shape("tokens_to_token.attention1.w", 2)
    else:
        token_dim = shape("tokens_to_token.attention1.attn.proj.weight", 2)[0]
    blocks = [int(match[1]) for name in official if (match := re.match(r"blocks\.(\d+)\.", name))]
    side, pixels = math.isqrt(positions - 1), shape("tokens_to_token.attention1.norm1.weight", 1)[0]
    kernels, strides = T2TViTConfig.t2t_kernel_sizes, T2TViTConfig.t2t_strides
    if side * side != positions - 1 or pixels % kernels[0] ** 2 or not blocks or width % _HEAD_WIDTH:
        raise ValueError(
            f"{positions} positions, {pixels} numbers a window, width {width} and {len(set(blocks))} blocks are of no "
            "T2T-ViT that is known here; give its config"
        )
    return T2TViTConfig(
        image_size=side * math.prod(strides),
        num_channels=pixels // kernels[0] ** 2,
        hidden_size=width,
        num_hidden_layers=max(blocks) + 1,
        num_attention_heads=width // _HEAD_WIDTH,
        intermediate_size=shape("blocks.0.mlp.fc1.weight", 2)[0],
        token_dim=token_dim,
        tokens_type="performer" if performer else "transformer",
        kernel_ratio=features / token_dim if performer else 0.5,
        qkv_bias="blocks.0.attn.qkv.bias" in official,
        num_labels=shape("head.weight", 2)[0],
    )


def convert_checkpoint(
    path: str | os.PathLike, output: str | os.PathLike, name: str | None = None, *, ema: bool = True, **changes
) -> T2TViTConfig:
    """A checkpoint of the authors -> a folder with config, safetensors and image processor.

    It then loads with `T2TViTForImageClassification.from_pretrained(output)` and, once this package is imported, with
    Transformers' Auto classes. A thousand classes are taken for ImageNet's, and get their names.

    Args:
        path: a .pth or .pth.tar file as the authors' main.py writes it, or a bare state dict. Nothing in it is run:
            only tensors and plain values are read.
        output: the folder, made if it is not there.
        name: as `T2TViTConfig.from_name` takes it; None to tell the model from the shapes.
        ema: take the moving average of the weights where the file holds one, as the authors do.
        **changes: of the config, such as id2label, or qk_scale=hidden_size**-0.5 for weights trained through timm's
            older port.

    Raises:
        ValueError: an unknown name, or a file that does not hold the weights of such a model.
        FileNotFoundError: there is no such file.
    """
    from hf_efficient_attn.models.biggan.sampling import imagenet_labels
    from hf_efficient_attn.models.t2t_vit.image_processing_t2t_vit import image_processor
    from hf_efficient_attn.models.t2t_vit.modeling_t2t_vit import T2TViTForImageClassification

    official = read_checkpoint(path, ema=ema)
    told = config_of(official)
    if name is not None:
        same = {"num_labels": told.num_labels, "image_size": told.image_size}
        told = T2TViTConfig.from_name(name, **same)
    if told.num_labels == _IMAGENET and not {"id2label", "num_labels"} & set(changes):
        changes = {**changes, "id2label": dict(enumerate(imagenet_labels()))}
    if "id2label" in changes and "label2id" not in changes:
        changes = {**changes, "label2id": {label: index for index, label in changes["id2label"].items()}}
    if changes:
        labels = {} if "id2label" in changes else {"num_labels": told.num_labels}
        values = told.to_dict()
        kept = {key: values[key] for key in T2TViTConfig.__annotations__ if key in values}
        told = T2TViTConfig(**{**kept, **labels, **changes})
    state, config = convert_state_dict(official, told)
    model = T2TViTForImageClassification(config)
    model.load_state_dict(state)
    model.save_pretrained(output)
    image_processor(config).save_pretrained(output)
    return config


def read_checkpoint(path: str | os.PathLike, *, ema: bool = True) -> dict[str, Tensor]:
    """The state dict of a file; of its moving average if asked for and there, else of the weights themselves.

    Raises:
        ValueError: the file holds no state dict, or objects other than tensors and plain values.
        FileNotFoundError: there is no such file.
    """
    try:
        # The authors' files hold the command line too, a plain namespace, which torch.load does not take by itself.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{path} cannot be read as a checkpoint of tensors: {_first_line(error)}") from error
    order = ("state_dict_ema", "state_dict", "model") if ema else ("state_dict", "model", "state_dict_ema")
    if isinstance(content, Mapping):
        content = next((content[key] for key in order if isinstance(content.get(key), Mapping)), content)
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{path} holds no state dict, neither by itself nor under {', '.join(order)}")
    return dict(content)


def expected_shapes(config: T2TViTConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a `T2TViTForImageClassification` with this config; no memory is taken."""
    from hf_efficient_attn.models.t2t_vit.modeling_t2t_vit import T2TViTForImageClassification

    with torch.device("meta"):
        model: Any = T2TViTForImageClassification(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _rename(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """One tensor under the authors' name -> one or three under ours; under its own where it is not known."""
    block = re.fullmatch(r"(blocks\.\d+|tokens_to_token\.attention[12])\.(.+?)(\.weight|\.bias)?", name)
    if block is None:
        stem, dot, last = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "")
        return {f"{_NAMES[stem]}{dot}{last}": tensor} if stem in _NAMES else {name: tensor}
    where, part, last = block[1], block[2], block[3] or ""
    if part not in _PARTS:
        return {name: tensor}
    where = where.replace("blocks.", "t2t_vit.layers.") if where.startswith("blocks.") else _NAMES[where]
    stem, _, final = f"{where}.{_PARTS[part]}".rpartition(".")
    if final not in _CUTS:
        return {f"{stem}.{final}{last}": tensor}
    if tensor.shape[0] % 3:
        raise ValueError(f"{name} has {tensor.shape[0]} rows, which are not those of three projections")
    return {f"{stem}.{cut}{last}": rows for cut, rows in zip(_CUTS[final], tensor.chunk(3), strict=True)}


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
