"""State dicts of the PyPI package pytorch-pretrained-biggan: to the names of `BigGANModel`, and back.

The package divides most weights by their spectral norm (Miyato et al. 2018) and stores three tensors for one:
`weight_orig`, and the vectors `weight_u` and `weight_v` of a power iteration, so that in eval mode

    weight = weight_orig / (u^T W v),   W = weight_orig as (output channels, everything else).

Without spectral norm (folded in, or taken away by `torch.nn.utils.remove_spectral_norm`) there is `weight` alone.
"""

import re

import torch
from torch import Tensor
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

from hf_efficient_attn.models.biggan.configuration_biggan import BigGANConfig

# Convolutions of the attention layer: the package's names and ours.
_PROJECTIONS = {"snconv1x1_theta": "theta", "snconv1x1_phi": "phi", "snconv1x1_g": "g", "snconv1x1_o_conv": "o"}
# What is kept with spectral_norm=True: the package's names and those of torch.nn.utils.parametrizations.
_KEPT = {"weight_orig": "original", "weight_u": "0._u", "weight_v": "0._v"}
# Names on the way to the division, which Transformers' own renamings (of "weight_v") leave alone.
_TRIPLE = ("spectral_original", "spectral_u", "spectral_v")
_NORMALIZED = re.compile(r"(.*\.(?:gen_z|conv_\d|scale|offset|theta|phi|g|o|conv_to_rgb))\.weight")
_ITERATIONS = 50


def checkpoint_names(spectral_norm: bool) -> dict[str, str]:
    """Patterns to be replaced in the names of a checkpoint, as `from_pretrained` takes them in `key_mapping`.

    Args:
        spectral_norm: whether the model keeps it. If so the names become those of its parametrizations; if not, those
            on which the registered converter divides, also in a checkpoint that a model of ours kept it in.
    """
    names = {rf"\.{theirs}\.": f".{ours}." for theirs, ours in _PROJECTIONS.items()}
    for (theirs, ours), between in zip(_KEPT.items(), _TRIPLE, strict=True):
        if spectral_norm:
            names[rf"\.{theirs}$"] = f".parametrizations.weight.{ours}"
        else:
            names[rf"\.{theirs}$"] = f".{between}"
            names[rf"\.parametrizations\.weight\.{re.escape(ours)}$"] = f".{between}"
    if spectral_norm:
        for layer in ("gen_z", *(f"conv_{i}" for i in range(4)), "scale", "offset", *_PROJECTIONS.values()):
            names[rf"\.{layer}\.weight$"] = f".{layer}.parametrizations.weight.original"
        names[r"\.conv_to_rgb\.weight$"] = ".conv_to_rgb.parametrizations.weight.original"
    return names


class DivideBySpectralNorm(ConversionOps):
    """(weight_orig, weight_u, weight_v) -> weight."""

    def convert(self, input_dict, source_patterns, target_patterns, full_layer_name=None, **kwargs):
        parts = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        missing = [theirs for theirs, name in zip(_KEPT, _TRIPLE, strict=True) if name not in parts]
        if missing:
            raise ValueError(f"{full_layer_name}: the checkpoint has a spectral norm without {', '.join(missing)}")
        return {target_patterns[0]: divided(*(parts[name] for name in _TRIPLE))}


def register_conversion() -> None:
    """Let `from_pretrained` divide by the spectral norm; may be called again."""
    if get_checkpoint_conversion_mapping(BigGANConfig.model_type) is None:
        converter = WeightConverter([*_TRIPLE], "weight", [DivideBySpectralNorm()])
        register_checkpoint_conversion_mapping(BigGANConfig.model_type, [converter])


@torch.no_grad()
def divided(weight: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """weight (O, ...) over u^T W v, computed in float32 at least, in the type of `weight`."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    matrix = weight.to(wide).flatten(1)
    return (weight.to(wide) / torch.dot(u.to(wide), torch.mv(matrix, v.to(wide)))).to(weight.dtype)


@torch.no_grad()
def leading_vectors(weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Left and right singular vector of the largest singular value of a weight (O, ...), by power iteration."""
    matrix = weight.flatten(1).to(torch.promote_types(weight.dtype, torch.float32))
    # Started from the rows' sum, so that nothing is drawn; from ones where that is too little to start from.
    v = matrix.sum(0)
    v = torch.where(v.norm() > eps, v, torch.ones_like(v))
    v = torch.nn.functional.normalize(v, dim=0, eps=eps)
    for _ in range(_ITERATIONS):
        u = torch.nn.functional.normalize(matrix @ v, dim=0, eps=eps)
        v = torch.nn.functional.normalize(u @ matrix, dim=0, eps=eps)
    return u.to(weight.dtype), v.to(weight.dtype)


def convert_state_dict(state_dict: dict[str, Tensor], config: BigGANConfig) -> dict[str, Tensor]:
    """A state dict of pytorch-pretrained-biggan for `BigGANModel(config).load_state_dict`.

    Args:
        state_dict: with spectral norm or without.
        config: of the model; with `spectral_norm=True` the state dict must have it too.

    Returns:
        a new dictionary, of the same tensors where nothing was divided.

    Raises:
        ValueError: names that are missing or that the model does not have.
    """
    from hf_efficient_attn.models.biggan.modeling_biggan import BigGANModel

    renamed: dict[str, Tensor] = {}
    patterns = [(re.compile(pattern), name) for pattern, name in checkpoint_names(config.spectral_norm).items()]
    for theirs, tensor in state_dict.items():
        name = theirs
        for pattern, replacement in patterns:
            name = pattern.sub(replacement, name)
        renamed[name] = tensor
    found = dict(renamed)
    for name in renamed:
        stem, _, last = name.rpartition(".")
        if last == _TRIPLE[0] and all(f"{stem}.{part}" in renamed for part in _TRIPLE):
            found[f"{stem}.weight"] = divided(*(found.pop(f"{stem}.{part}") for part in _TRIPLE))
    with torch.device("meta"):
        expected = set(BigGANModel(config).state_dict())
    missing, surplus = sorted(expected - set(found)), sorted(set(found) - expected)
    if missing or surplus:
        raise ValueError(f"the state dict does not fit the config; missing: {missing}; not of the model: {surplus}")
    return found


def revert_state_dict(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of `BigGANModel` for a `pytorch_pretrained_biggan.BigGAN` of the same config.

    Where the spectral norm was folded in, vectors are made up that give a spectral norm of 1: right in eval mode, in
    which the package uses them as they are, and not for training.

    Args:
        state_dict: with the spectral norm kept or without.

    Returns:
        a new dictionary.
    """
    found: dict[str, Tensor] = {}
    ours = {name: theirs for theirs, name in _PROJECTIONS.items()}
    kept = {f".parametrizations.weight.{name}": f".{theirs}" for theirs, name in _KEPT.items()}
    for name, tensor in state_dict.items():
        theirs = re.sub(r"\.(theta|phi|g|o)\.", lambda match: f".{ours[match[1]]}.", name)
        for ending, other in kept.items():
            if theirs.endswith(ending):
                theirs = theirs.removesuffix(ending) + other
        if not _NORMALIZED.fullmatch(name):
            found[theirs] = tensor
            continue
        # e_i^T W (W_i / |W_i|^2) = 1 for any row i; the largest is the furthest from 0.
        matrix = tensor.flatten(1)
        row = matrix.norm(dim=1).argmax()
        u = torch.zeros_like(matrix[:, 0])
        u[row] = 1.0
        v = matrix[row] / matrix[row].square().sum()
        found.update({f"{theirs}_orig": tensor, f"{theirs}_u": u, f"{theirs}_v": v})
    return found
