"""Batch normalization with one table of statistics for every truncation, and the filling of these tables.

The distribution of what enters a layer depends on the truncation of the noise, so that the statistics measured at one
truncation do not serve another (Brock et al. 2019, appendix D: "standing statistics").
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from hf_efficient_attn.models.biggan.sampling import truncated_noise

# Less of a row than this is rounding: 0.58 / 0.02 is 28.999999999999996.
_ROUNDING = 1e-6


class Lookup(NamedTuple):
    """Two neighbouring rows of a table and the share of the lower one; `share` 1 stands for this row alone.

    Numbers, or scalar tensors where a graph is traced, which then serves every truncation.
    """

    lower: int | Tensor
    upper: int | Tensor
    share: float | Tensor

    def rows(self) -> list[int]:
        """The rows that count."""
        return [row for row, share in ((self.lower, self.share), (self.upper, 1 - self.share)) if share > _ROUNDING]

    def read(self, table: Tensor) -> Tensor:
        """(rows, C) -> (C,)."""
        if isinstance(self.share, Tensor):
            lower, upper = table.index_select(0, torch.stack((self.lower, self.upper)))
            share = self.share.to(table.dtype)
            return lower * share + upper * (1 - share)
        if self.share == 1.0:
            return table[self.lower]
        return table[self.lower] * self.share + table[self.upper] * (1 - self.share)


def look_up(truncation: float, n_stats: int, device: torch.device | None = None) -> Lookup:
    """Where the statistics for a truncation stand in a table of `n_stats` rows, for truncations 0 to 1 in equal steps.

    Between two rows the shares are the wrong way round: at three quarters of the way the lower row counts for three
    quarters. So it is in pytorch-pretrained-biggan, and its images are to be reproduced here.
    """
    if torch.compiler.is_compiling():
        # Python's floats would be constants of the graph, or worse: rounded ones were seen to keep the first value.
        position = torch.ones((), dtype=torch.float64, device=device) * truncation / (1.0 / (n_stats - 1))
        lower = position.floor()
        share = torch.where(position == lower, 1.0, position - lower)
        rows = lower.long()
        return Lookup(rows.clamp(max=n_stats - 1), (rows + 1).clamp(max=n_stats - 1), share)
    position = float(truncation) / (1.0 / (n_stats - 1))
    lower = int(position)
    # Rounding may lead past the last row.
    return Lookup(min(lower, n_stats - 1), min(lower + 1, n_stats - 1), (position - lower) or 1.0)


class BigGANBatchNorm(nn.Module):
    """Batch normalization of (B, C, H, W), its scale and offset learned or made from a condition.

    In training it takes the statistics of the batch and leaves the tables as they are (`fill_statistics`).

    Args:
        channels: C.
        n_stats: rows of the tables.
        eps: added to the variance.
        condition: width of the condition that `scale` and `offset` are linear in; None for learned ones.
        linear: makes the two linear maps.
    """

    def __init__(
        self,
        channels: int,
        n_stats: int,
        eps: float,
        condition: int | None = None,
        linear: Callable[..., nn.Linear] = nn.Linear,
    ) -> None:
        super().__init__()
        self.eps, self.conditional = eps, condition is not None
        self.register_buffer("running_means", torch.zeros(n_stats, channels))
        self.register_buffer("running_vars", torch.ones(n_stats, channels))
        if self.conditional:
            self.scale = linear(condition, channels, bias=False)
            self.offset = linear(condition, channels, bias=False)
        else:
            self.weight = nn.Parameter(torch.ones(channels))
            self.bias = nn.Parameter(torch.zeros(channels))
        self.moments: Moments | None = None

    def forward(self, x: Tensor, lookup: Lookup, condition: Tensor | None = None) -> Tensor:
        """x (B, C, H, W), condition (B, its width) -> (B, C, H, W)."""
        if self.moments is not None:
            self.moments.add(x)
        mean = var = None
        if not self.training:
            mean, var = (lookup.read(table) for table in (self.running_means, self.running_vars))
        if not self.conditional:
            return functional.batch_norm(x, mean, var, self.weight, self.bias, training=self.training, eps=self.eps)
        if self.training:
            normal = functional.batch_norm(x, None, None, training=True, eps=self.eps)
        else:
            normal = (x - mean[:, None, None]) / torch.sqrt(var[:, None, None] + self.eps)
        return normal * (1 + self.scale(condition))[..., None, None] + self.offset(condition)[..., None, None]


class Moments:
    """Mean and variance of everything that entered a layer, in float64."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def add(self, x: Tensor) -> None:
        """(B, C, H, W), by the pairwise update of Chan, Golub and LeVeque 1983, equation 2.1."""
        x = x.detach().double()
        count = x.numel() // x.shape[1]
        mean = x.mean((0, 2, 3))
        squares = ((x - mean[:, None, None]) ** 2).sum((0, 2, 3))
        total = self.count + count
        shift = mean - self.mean
        self.squares = self.squares + squares + shift**2 * (self.count * count / total)
        self.mean = self.mean + shift * (count / total)
        self.count = total


@torch.no_grad()
def fill_statistics(
    model: nn.Module,
    truncations: Sequence[float] | None,
    class_label: Tensor | None,
    num_samples: int,
    batch_size: int,
    seed: int,
    progress: bool,
) -> None:
    """What `BigGANModel.set_statistics` says."""
    config = model.config
    wanted = _rows(truncations, config.n_stats)
    norms = [module for module in model.modules() if isinstance(module, BigGANBatchNorm)]
    device = model.embeddings.weight.device
    modes = {module: module.training for module in model.modules()}
    sizes = [len(part) for part in torch.arange(num_samples).split(batch_size)]
    bar = tqdm(total=len(wanted) * num_samples, unit="img", desc="statistics", disable=None if progress else True)
    # Only the norms are in training mode: dropout and power iterations stay as they are.
    model.eval()
    try:
        for norm in norms:
            norm.train()
        for truncation, rows in wanted.items():
            generator = torch.Generator().manual_seed(seed)
            noise_seeds = torch.randint(2**31 - 1, (len(sizes),), generator=generator).tolist()
            for norm in norms:
                norm.moments = Moments()
            for size, noise_seed in zip(sizes, noise_seeds, strict=True):
                # At truncation 0 all noise is 0.
                z = truncated_noise(size, config.z_dim, truncation or 1.0, noise_seed) * bool(truncation)
                if class_label is None:
                    labels = torch.randint(config.num_classes, (size,), generator=generator)
                else:
                    labels = class_label[torch.randint(len(class_label), (size,), generator=generator)]
                model(z.to(device), labels.to(device), truncation or 1.0)
                bar.update(size)
            for norm in norms:
                norm.running_means[rows] = norm.moments.mean.to(norm.running_means)
                norm.running_vars[rows] = (norm.moments.squares / norm.moments.count).to(norm.running_vars)
    finally:
        bar.close()
        for norm in norms:
            norm.moments = None
        for module, mode in modes.items():
            module.training = mode


def _rows(truncations: Sequence[float] | None, n_stats: int) -> dict[float, list[int]]:
    """Truncation -> the rows that are to hold its statistics."""
    if truncations is None:
        return {row / (n_stats - 1): [row] for row in range(n_stats)}
    found: dict[float, list[int]] = {}
    owners: dict[int, float] = {}
    for truncation in truncations:
        if not 0 < truncation <= 1:
            raise ValueError(f"truncation must be above 0 and at most 1, not {truncation!r}")
        found[truncation] = look_up(truncation, n_stats).rows()
        for row in found[truncation]:
            other = owners.setdefault(row, truncation)
            if other != truncation:
                raise ValueError(
                    f"truncations {other} and {truncation} read the same row of a table of {n_stats}: fill it for one "
                    "of them, for all (truncations=None), or make the model with a larger n_stats"
                )
    if not found:
        raise ValueError("truncations is empty: name some, or give None for all rows")
    return found


def check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not math.isfinite(count) or count != int(count) or count < 1:
            raise ValueError(f"{name} must be an integer of at least 1, not {count!r}")
