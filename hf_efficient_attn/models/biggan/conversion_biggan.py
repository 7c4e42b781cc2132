"""Conversion of state dicts between the PyPI package pytorch-pretrained-biggan and `BigGANModel`."""

import re

import torch
from torch import Tensor

from hf_efficient_attn.models.biggan.configuration_biggan import BigGANConfig
from hf_efficient_attn.models.biggan.modeling_biggan import BigGANModel
from hf_efficient_attn.models.biggan.spectral_norm import KEPT, PROJECTIONS, TRIPLE, checkpoint_names, divided

# Weights that the package divides by their spectral norm.
_NORMALIZED = re.compile(r"(.*\.(?:gen_z|conv_\d|scale|offset|theta|phi|g|o|conv_to_rgb))\.weight")


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
    converted: dict[str, Tensor] = {}
    patterns = [(re.compile(pattern), name) for pattern, name in checkpoint_names(config.spectral_norm).items()]
    for theirs, tensor in state_dict.items():
        name = theirs
        for pattern, replacement in patterns:
            name = pattern.sub(replacement, name)
        converted[name] = tensor
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

    Returns:
        A new dictionary.
    """
    reverted: dict[str, Tensor] = {}
    projections = {ours: theirs for theirs, ours in PROJECTIONS.items()}
    endings = {f".parametrizations.weight.{ours}": f".{theirs}" for theirs, ours in KEPT.items()}
    for name, tensor in state_dict.items():
        theirs = re.sub(r"\.(theta|phi|g|o)\.", lambda match: f".{projections[match[1]]}.", name)
        for ending, replacement in endings.items():
            if theirs.endswith(ending):
                theirs = theirs.removesuffix(ending) + replacement
        if not _NORMALIZED.fullmatch(name):
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
