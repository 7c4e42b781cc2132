"""The PyPI package pytorch-pretrained-biggan: conversion of its state dicts, and method switching for its models.

The package is not imported.
"""

import functools
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration import own_forward
from hf_efficient_attn.integration.layers import layer_seed
from hf_efficient_attn.integration.refusals import check_methods
from hf_efficient_attn.integration.settings import EXACT_IMPLEMENTATIONS, EfficientAttentionConfig
from hf_efficient_attn.methods import MethodConfig, attention, learns
from hf_efficient_attn.models.biggan.configuration_biggan import BigGANConfig
from hf_efficient_attn.models.biggan.modeling_biggan import BigGANModel, pixel_attention
from hf_efficient_attn.models.biggan.spectral_norm import (
    KEPT,
    NORMALIZED,
    PROJECTIONS,
    TRIPLE,
    checkpoint_names,
    divided,
    renamed,
)

_PROJECTIONS = ("snconv1x1_theta", "snconv1x1_phi", "snconv1x1_g", "snconv1x1_o_conv")


def convert_state_dict(state_dict: dict[str, Tensor], config: BigGANConfig) -> dict[str, Tensor]:
    """Convert a state dict of pytorch-pretrained-biggan for `BigGANModel(config).load_state_dict`.

    Args:
        state_dict: with or without spectral norm.
        config: configuration of the model. `spectral_norm=True` requires a state dict with spectral norm.

    Returns:
        A new dictionary. Tensors that are not divided are shared with `state_dict`.

    Raises:
        ValueError: names are missing, or the model does not have them.
    """
    names = checkpoint_names(config.spectral_norm)
    converted = {renamed(name, names): tensor for name, tensor in state_dict.items()}
    for name in list(converted):
        stem, _, last = name.rpartition(".")
        if last == TRIPLE[0] and all(f"{stem}.{part}" in converted for part in TRIPLE):
            converted[f"{stem}.weight"] = divided(*(converted.pop(f"{stem}.{part}") for part in TRIPLE))
    with torch.device("meta"):
        expected = set(BigGANModel(config).state_dict())
    missing, unknown = sorted(expected - set(converted)), sorted(set(converted) - expected)
    if missing or unknown:
        raise ValueError(f"the state dict does not match the config; missing: {missing}; not in the model: {unknown}")
    return converted


def revert_state_dict(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert a state dict of `BigGANModel` for a `pytorch_pretrained_biggan.BigGAN` of the same config.

    The package always divides by a spectral norm. Weights without one get vectors that make it 1. This is correct in
    eval mode, where the package uses the vectors as they are, but not for training.
    """
    names = {rf"\.{ours}\.": f".{theirs}." for theirs, ours in PROJECTIONS.items()}
    names |= {rf"\.parametrizations\.weight\.{re.escape(ours)}$": f".{theirs}" for theirs, ours in KEPT.items()}
    reverted: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        theirs = renamed(name, names)
        if not name.endswith(".weight") or name.split(".")[-2] not in NORMALIZED:
            reverted[theirs] = tensor
            continue
        # For any row W_i of W, e_i^T W (W_i / |W_i|^2) = 1. The row with the largest norm avoids a division by 0.
        matrix = tensor.flatten(1)
        row = int(matrix.norm(dim=1).argmax())
        u = torch.zeros_like(matrix[:, 0])
        u[row] = 1.0
        v = matrix[row] / matrix[row].square().sum()
        reverted.update({f"{theirs}_orig": tensor, f"{theirs}_u": u, f"{theirs}_v": v})
    return reverted


class PackageBigGAN:
    """Handler with which `hf_efficient_attn.convert` switches the package's models."""

    title = "a BigGAN of pytorch-pretrained-biggan"

    def find(self, model: nn.Module) -> list[nn.Module]:
        """Return the package's `SelfAttn` modules in `model`, an empty list for any other model."""
        modules = model.modules() if isinstance(model, nn.Module) else ()
        return [module for module in modules if any(_is_self_attention(cls) for cls in type(module).__mro__)]

    def check_other(self, name: str) -> None:
        """Raise UnsupportedAttentionError unless `name` is an exact attention that stands for the package's own."""
        if name not in EXACT_IMPLEMENTATIONS:
            raise UnsupportedAttentionError(
                f"{self.title} has its own exact attention and no {name!r}: 'sdpa' goes back to it"
            )

    def switch(self, modules: Sequence[nn.Module], settings: EfficientAttentionConfig) -> None:
        """Make the modules compute a method, in place, with the output of a `BigGANModel` with the same weights.

        Raises:
            UnsupportedAttentionError: before anything is changed, if the settings name a layer other than 0, or the
                method needs as many keys as queries or learns parameters.
        """
        if any(entry.layers not in (None, (0,)) for entry in settings.entries):
            raise UnsupportedAttentionError(
                f"{self.title} has one attention layer, number 0: leave layers out, or give layers=[0]"
            )
        method = settings.entries[0].config
        check_methods([method], is_causal=False, is_rectangular=True, model=self.title, allow_learned=True)
        if learns(method):
            raise UnsupportedAttentionError(
                f"{method.method} learns parameters, and {self.title} cannot save them: use "
                "hf_efficient_attn.models.biggan.BigGANModel, whose from_pretrained reads the same folder"
            )
        for module in modules:
            own_forward.give(module, functools.partial(_forward, module, method))

    def restore(self, modules: Sequence[nn.Module]) -> None:
        """Give the modules their own forward back."""
        for module in modules:
            if own_forward.computes(module, _forward):
                own_forward.give(module, None)


def _is_self_attention(cls: type) -> bool:
    return cls.__name__ == "SelfAttn" and cls.__module__.partition(".")[0] == "pytorch_pretrained_biggan"


def _forward(module: Any, method: MethodConfig, x: Tensor) -> Tensor:
    """Replace `SelfAttn.forward`: (B, C, height, width) -> (B, C, height, width).

    The seed is that of layer 0 of any model; in training mode the method draws from the global generators.
    """
    seed = None if module.training else layer_seed(0)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(method, query, key, value, scale=1.0, seed=seed).transpose(1, 2)

    return x + module.gamma * pixel_attention(x, [module.get_submodule(name) for name in _PROJECTIONS], attend)
