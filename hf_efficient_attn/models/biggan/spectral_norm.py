"""Spectral norm (Miyato et al. 2018) in BigGAN's layers and in its checkpoints.

The PyPI package pytorch-pretrained-biggan divides most weights by their largest singular value. For each of these
weights its checkpoints hold three tensors, `weight_orig` and the vectors `weight_u` and `weight_v` of a power
iteration, so that in eval mode

    weight = weight_orig / (u^T W v),   W = weight_orig as a matrix (output channels, all other dimensions).

A checkpoint without spectral norm (folded in, or removed by `torch.nn.utils.remove_spectral_norm`) has only `weight`.
"""

import functools
import re
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

from hf_efficient_attn.models.biggan.configuration_biggan import BigGANConfig

LinearOrConv = TypeVar("LinearOrConv", nn.Linear, nn.Conv2d)

# The package's names -> ours: convolutions of the attention layer, and the tensors of a kept spectral norm, which have
# the names of torch.nn.utils.parametrizations.
PROJECTIONS = {"snconv1x1_theta": "theta", "snconv1x1_phi": "phi", "snconv1x1_g": "g", "snconv1x1_o_conv": "o"}
KEPT = {"weight_orig": "original", "weight_u": "0._u", "weight_v": "0._v"}
# Layers with a spectral norm.
NORMALIZED = ("gen_z", *(f"conv_{i}" for i in range(4)), "scale", "offset", "conv_to_rgb", *PROJECTIONS.values())
# Names between loading and the division. Transformers renames "weight_v" by itself, but not these.
TRIPLE = ("spectral_original", "spectral_u", "spectral_v")
_POWER_ITERATIONS = 50


def linear(config: BigGANConfig, in_features: int, out_features: int, bias: bool = True) -> nn.Linear:
    """Return a linear layer, with spectral norm if the config asks for it."""
    return _normalized(config, nn.Linear(in_features, out_features, bias=bias))


def conv(config: BigGANConfig, in_channels: int, out_channels: int, kernel_size: int, bias: bool = True) -> nn.Conv2d:
    """Return a convolution that keeps height and width, with spectral norm if the config asks for it."""
    padding = kernel_size // 2
    return _normalized(config, nn.Conv2d(in_channels, out_channels, kernel_size, padding=padding, bias=bias))


def _normalized(config: BigGANConfig, module: LinearOrConv) -> LinearOrConv:
    if not config.spectral_norm:
        return module
    weight = module.weight
    if weight.is_meta:
        # `spectral_norm` runs power iterations at once. On the meta device they take seconds: use a tiny weight.
        module.weight = nn.Parameter(torch.ones((1,) * weight.ndim, dtype=weight.dtype, device="cpu"))
    parametrizations.spectral_norm(module, eps=config.eps)
    if weight.is_meta:
        kept = module.get_submodule("parametrizations.weight")
        kept.original = weight
        kept.get_submodule("0")._u = weight.new_empty(len(weight))
        kept.get_submodule("0")._v = weight.new_empty(weight[0].numel())
    return module


def checkpoint_names(spectral_norm: bool) -> dict[str, str]:
    """Return the name patterns to replace in a checkpoint, as `from_pretrained` takes them in `key_mapping`.

    If the model keeps the spectral norm, names become those of its parametrizations. If not, they become names that
    the registered converter divides; this includes the names in checkpoints of our own models that keep it.
    """
    _register_conversion()
    names = {rf"\.{theirs}\.": f".{ours}." for theirs, ours in PROJECTIONS.items()}
    for (theirs, ours), between in zip(KEPT.items(), TRIPLE, strict=True):
        if spectral_norm:
            names[rf"\.{theirs}$"] = f".parametrizations.weight.{ours}"
        else:
            names[rf"\.{theirs}$"] = f".{between}"
            names[rf"\.parametrizations\.weight\.{re.escape(ours)}$"] = f".{between}"
    if spectral_norm:
        for layer in NORMALIZED:
            names[rf"\.{layer}\.weight$"] = f".{layer}.parametrizations.weight.original"
    return names


def renamed(name: str, patterns: dict[str, str]) -> str:
    """Replace all patterns in a name."""
    for pattern, replacement in patterns.items():
        name = re.sub(pattern, replacement, name)
    return name


class DivideBySpectralNorm(ConversionOps):
    """Transformers' conversion operation (weight_orig, weight_u, weight_v) -> weight."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        """Return the divided weight under its name; see `ConversionOps.convert`."""
        parts = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        missing = [theirs for theirs, name in zip(KEPT, TRIPLE, strict=True) if name not in parts]
        if missing:
            layer = kwargs.get("full_layer_name")
            raise ValueError(f"{layer}: the checkpoint has a spectral norm without {', '.join(missing)}")
        return {target_patterns[0]: divided(*(parts[name] for name in TRIPLE))}


@torch.no_grad()
def divided(weight: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Divide weight (O, ...) by u^T W v, with u (O,) and v (elements of weight / O,), in float32 or wider."""
    acc_dtype = torch.promote_types(weight.dtype, torch.float32)
    matrix = weight.to(acc_dtype).flatten(1)
    norm = torch.dot(u.to(acc_dtype), torch.mv(matrix, v.to(acc_dtype)))
    return (weight.to(acc_dtype) / norm).to(weight.dtype)


@torch.no_grad()
def leading_vectors(weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the singular vectors u (O,) and v of the largest singular value of weight (O, ...), by power iteration."""
    matrix = weight.flatten(1).to(torch.promote_types(weight.dtype, torch.float32))
    # The iteration starts from the sum of the matrix's rows, which needs no random draw; or from ones if that vanishes.
    v = matrix.sum(0)
    v = torch.where(v.norm() > eps, v, torch.ones_like(v))
    v = nn.functional.normalize(v, dim=0, eps=eps)
    for _ in range(_POWER_ITERATIONS):
        u = nn.functional.normalize(matrix @ v, dim=0, eps=eps)
        v = nn.functional.normalize(u @ matrix, dim=0, eps=eps)
    return u.to(weight.dtype), v.to(weight.dtype)


@functools.cache
def _register_conversion() -> None:
    """Make `from_pretrained` divide weights by their spectral norm. Only it needs this, which takes a while."""
    converter = WeightConverter([*TRIPLE], "weight", [DivideBySpectralNorm()])
    register_checkpoint_conversion_mapping(BigGANConfig.model_type, [converter], overwrite=True)
