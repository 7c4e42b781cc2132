"""BigGAN's layers: spectral norm, the noise, and batch normalization whose statistics depend on the truncation.

The PyPI package pytorch-pretrained-biggan divides most weights by their largest singular value (Miyato et al. 2018).
Its checkpoints hold `weight_orig` and the vectors `weight_u` and `weight_v` of a power iteration, so that in eval mode

    weight = weight_orig / (u^T W v),   W = weight_orig as a matrix (output channels, all other dimensions).

A checkpoint without spectral norm (folded in, or removed by `torch.nn.utils.remove_spectral_norm`) has only `weight`.

The distribution of a layer's input depends on the truncation of the noise. Statistics measured at one truncation are
therefore wrong at another (Brock et al. 2019, appendix D: "standing statistics").
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from transformers import initialization as init
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

from hf_efficient_attn.models.biggan.configuration_biggan import BigGANConfig

# The package's names -> ours: convolutions of the attention layer, and the tensors of a kept spectral norm, which have
# the names of torch.nn.utils.parametrizations.
PROJECTIONS = {"snconv1x1_theta": "theta", "snconv1x1_phi": "phi", "snconv1x1_g": "g", "snconv1x1_o_conv": "o"}
KEPT = {"weight_orig": "original", "weight_u": "0._u", "weight_v": "0._v"}
# Layers with a spectral norm.
NORMALIZED = ("gen_z", *(f"conv_{i}" for i in range(4)), "scale", "offset", "conv_to_rgb", *PROJECTIONS.values())
# Names between loading and the division. Transformers renames "weight_v" by itself, but not these.
TRIPLE = ("spectral_original", "spectral_u", "spectral_v")
_POWER_ITERATIONS = 50
# The normal distribution is truncated at this many standard deviations before it is scaled (Brock et al. 2019,
# section 3.1).
_CUTOFF = 2.0
# A smaller weight of a row is rounding: 0.58 / 0.02 is 28.999999999999996.
_ROUNDING = 1e-6


def add_spectral_norm(module: nn.Module, eps: float) -> None:
    """Add a spectral norm to every linear layer and convolution in a module."""
    for layer in [x for x in module.modules() if isinstance(x, (nn.Linear, nn.Conv2d))]:
        weight = layer.weight
        if weight.is_meta:
            # `spectral_norm` runs power iterations at once. On the meta device they take seconds: use a tiny weight.
            layer.weight = nn.Parameter(torch.ones((1,) * weight.ndim, dtype=weight.dtype, device="cpu"))
        parametrizations.spectral_norm(layer, eps=eps)
        if weight.is_meta:
            kept = layer.get_submodule("parametrizations.weight")
            kept.original = weight
            kept.get_submodule("0")._u = weight.new_empty(len(weight))
            kept.get_submodule("0")._v = weight.new_empty(weight[0].numel())


def checkpoint_names(spectral_norm: bool) -> dict[str, str]:
    """Return the name patterns to replace in a checkpoint, as `from_pretrained` takes them in `key_mapping`.

    If the model keeps the spectral norm, names become those of its parametrizations. If not, they become names that
    the registered converter divides; this includes the names in checkpoints of our own models that keep it.
    """
    # The division of weights by their spectral norm. Only `from_pretrained` needs it, and registering it takes a while.
    converter = WeightConverter([*TRIPLE], "weight", [DivideBySpectralNorm()])
    register_checkpoint_conversion_mapping(BigGANConfig.model_type, [converter], overwrite=True)
    # The end is (?!.), because Transformers reverses these patterns to names, and would keep a $ in them.
    names = {rf"\.{theirs}\.": f".{ours}." for theirs, ours in PROJECTIONS.items()}
    for (theirs, ours), between in zip(KEPT.items(), TRIPLE, strict=True):
        target = f".parametrizations.weight.{ours}" if spectral_norm else f".{between}"
        names |= {rf"\.{theirs}(?!.)": target, rf"\.parametrizations\.weight\.{re.escape(ours)}(?!.)": target}
    if spectral_norm:
        for layer in NORMALIZED:
            names[rf"\.{layer}\.weight(?!.)"] = f".{layer}.parametrizations.weight.original"
    return names


class DivideBySpectralNorm(ConversionOps):
    """Transformers' conversion operation (weight_orig, weight_u, weight_v) -> weight."""

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        """Return the weight divided by u^T W v, computed in float32 or wider; see `ConversionOps.convert`."""
        parts = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        missing = [theirs for theirs, name in zip(KEPT, TRIPLE, strict=True) if name not in parts]
        if missing:
            layer = kwargs.get("full_layer_name")
            raise ValueError(f"{layer}: the checkpoint has a spectral norm without {', '.join(missing)}")
        dtype = parts[TRIPLE[0]].dtype
        weight, u, v = (parts[name].to(torch.promote_types(dtype, torch.float32)) for name in TRIPLE)
        return {target_patterns[0]: (weight / torch.dot(u, torch.mv(weight.flatten(1), v))).to(dtype)}


@torch.no_grad()
def init_vectors(norm: parametrize.ParametrizationList, eps: float) -> None:
    """Set u (O,) and v to the singular vectors of the largest singular value of the weight, by power iteration."""
    matrix = norm.original.flatten(1).to(torch.promote_types(norm.original.dtype, torch.float32))
    # The iteration starts from the sum of the matrix's rows, which needs no random draw; or from ones if that vanishes.
    v = matrix.sum(0)
    v = torch.where(v.norm() > eps, v, torch.ones_like(v))
    v = functional.normalize(v, dim=0, eps=eps)
    for _ in range(_POWER_ITERATIONS):
        u = functional.normalize(matrix @ v, dim=0, eps=eps)
        v = functional.normalize(u @ matrix, dim=0, eps=eps)
    init.copy_(norm.get_buffer("0._u"), u.to(norm.original.dtype))
    init.copy_(norm.get_buffer("0._v"), v.to(norm.original.dtype))


def truncated_noise(batch_size: int, dim: int = 128, truncation: float = 1.0, seed: int | None = None) -> Tensor:
    """Sample noise for `BigGANModel`: a normal distribution truncated at 2 standard deviations, times `truncation`.

    With a seed, the values equal those of `truncated_noise_sample` in pytorch-pretrained-biggan up to 1e-6.

    Args:
        batch_size: number of samples, B.
        dim: size of a sample, the model's `z_dim`.
        truncation: in (0, 1]. Small values give images that are more typical of their class and vary less.
        seed: None draws from PyTorch's global generator. A seed leaves all global generators untouched.

    Returns:
        (B, dim), float32, on the CPU.

    Raises:
        ValueError: `truncation` is outside (0, 1].
    """
    check_truncation(truncation)
    size = (batch_size, dim)
    if seed is None:
        uniform = torch.rand(size, dtype=torch.float64, device="cpu")
    else:
        uniform = torch.from_numpy(np.random.RandomState(seed).uniform(size=size))
    # The inverse of the truncated distribution's cumulative distribution function.
    low = torch.special.ndtr(torch.tensor(-_CUTOFF, dtype=torch.float64))
    return truncation * torch.special.ndtri(low + uniform * (1 - 2 * low)).float()


def check_truncation(truncation: float) -> None:
    """Raise ValueError unless `truncation` is in (0, 1]."""
    if not 0 < truncation <= 1:
        raise ValueError(f"truncation must be above 0 and at most 1, not {truncation!r}")


class Lookup(NamedTuple):
    """Two adjacent rows of a table and their weights: (2,), int64, and (2,), which sum to 1."""

    rows: Tensor
    weights: Tensor

    def read(self, table: Tensor) -> Tensor:
        """Interpolate between rows of a table (n_stats, C) -> (C,)."""
        return (table.index_select(0, self.rows) * self.weights.to(table.dtype)[:, None]).sum(0)


def look_up(truncation: float, n_stats: int, like: Tensor) -> Lookup:
    """Find the statistics for a truncation in a table of `n_stats` rows, for truncations from 0 to 1 in equal steps.

    Between two rows the weights are the wrong way round: at three quarters of the way from the lower to the upper row,
    the lower row has weight 3/4. pytorch-pretrained-biggan does the same, and this model reproduces its images.

    `like`, a tensor of the model, gives the result its device, and the weights its dtype, at least float32.
    """
    # Tensors, because a Python float would become a constant of a compiled graph. Worse, torch.compile was seen to keep
    # the first value of a rounded float for all later ones.
    position = torch.ones((), dtype=torch.float64, device="cpu") * truncation / (1.0 / (n_stats - 1))
    floor = position.floor()
    share = torch.where(position == floor, 1.0, position - floor)
    # Rounding may lead past the last row.
    rows = torch.stack((floor, floor + 1)).clamp(max=n_stats - 1).long()
    weights = torch.stack((share, 1 - share))
    return Lookup(rows.to(like.device), weights.to(like.device, torch.promote_types(like.dtype, torch.float32)))


class BigGANBatchNorm(nn.Module):
    """Batch normalization of (B, C, height, width), with statistics that depend on the truncation.

    In training mode it uses the statistics of the batch and leaves its tables unchanged; `BigGANModel.set_statistics`
    fills them. If `conditional`, scale and offset are linear functions of the condition (B, 2 z_dim), otherwise
    parameters.
    """

    running_means: Tensor
    running_vars: Tensor

    def __init__(self, config: BigGANConfig, channels: int, conditional: bool = True) -> None:
        super().__init__()
        self.eps, self.conditional = config.eps, conditional
        self.register_buffer("running_means", torch.zeros(config.n_stats, channels))
        self.register_buffer("running_vars", torch.ones(config.n_stats, channels))
        if conditional:
            self.scale = nn.Linear(2 * config.z_dim, channels, bias=False)
            self.offset = nn.Linear(2 * config.z_dim, channels, bias=False)
        else:
            self.weight = nn.Parameter(torch.ones(channels))
            self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, lookup: Lookup, condition: Tensor | None = None) -> Tensor:
        """Normalize x (B, C, height, width), with condition (B, 2 z_dim) if conditional."""
        weight, bias = (None, None) if self.conditional else (self.weight, self.bias)
        mean, var = (None, None) if self.training else map(lookup.read, (self.running_means, self.running_vars))
        normal = functional.batch_norm(x, mean, var, weight, bias, training=self.training, eps=self.eps)
        if not self.conditional:
            return normal
        return normal * (1 + self.scale(condition))[..., None, None] + self.offset(condition)[..., None, None]


def rows_to_fill(truncations: Sequence[float] | None, n_stats: int) -> dict[float, list[int]]:
    """Map each truncation to the rows of a table of `n_stats` rows that its statistics go into; None: all rows.

    A truncation outside (0, 1], and two truncations that use the same row, raise ValueError.
    """
    if truncations is None:
        return {row / (n_stats - 1): [row] for row in range(n_stats)}
    found: dict[float, list[int]] = {}
    for truncation in truncations:
        check_truncation(truncation)
        lookup = look_up(truncation, n_stats, torch.empty(0, dtype=torch.float64, device="cpu"))
        found[truncation] = lookup.rows[lookup.weights > _ROUNDING].tolist()
    used = [row for rows in found.values() for row in rows]
    if len(set(used)) < len(used):
        raise ValueError(
            f"two of the truncations {[*found]} use the same row of a table of {n_stats}: fill it for one of them, "
            "fill all rows (truncations=None), or create the model with a larger n_stats"
        )
    return found
