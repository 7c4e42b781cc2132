"""Noise for BigGAN: samples of a truncated normal distribution."""

import numpy as np
import torch
from torch import Tensor

# The normal distribution is truncated at this many standard deviations before it is scaled (Brock et al. 2019,
# section 3.1).
CUTOFF = 2.0


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
        ValueError: `truncation` is outside (0, 1], or a size is below 1.
    """
    check_truncation(truncation)
    if batch_size < 1 or dim < 1:
        raise ValueError(f"batch_size={batch_size} and dim={dim} must be at least 1")
    size = (batch_size, dim)
    if seed is None:
        uniform = torch.rand(size, dtype=torch.float64, device="cpu")
    else:
        uniform = torch.from_numpy(np.random.RandomState(seed).uniform(size=size))
    # The inverse of the truncated distribution's cumulative distribution function.
    low = torch.special.ndtr(torch.tensor(-CUTOFF, dtype=torch.float64))
    return truncation * torch.special.ndtri(low + uniform * (1 - 2 * low)).float()


def check_truncation(truncation: float) -> None:
    """Raise ValueError unless `truncation` is in (0, 1]."""
    if not 0 < truncation <= 1:
        raise ValueError(f"truncation must be above 0 and at most 1, not {truncation!r}")
