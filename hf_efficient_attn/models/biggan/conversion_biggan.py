"""Conversion of state dicts between the PyPI package pytorch-pretrained-biggan and `BigGANModel`."""

import re

import torch
from torch import Tensor

from hf_efficient_attn.models.biggan.configuration_biggan import BigGANConfig
from hf_efficient_attn.models.biggan.modeling_biggan import BigGANModel
from hf_efficient_attn.models.biggan.spectral_norm import (
    KEPT,
    NORMALIZED,
    PROJECTIONS,
    TRIPLE,
    checkpoint_names,
    divided,
    renamed,
)


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

    Args:
        state_dict: with or without spectral norm.
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
