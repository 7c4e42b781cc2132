"""Measures of generated pictures: Frechet inception distance (FID) and inception score.

FID (Heusel et al. 2017, eq. 6) is the squared Wasserstein distance between two Gaussians. They have the mean and
covariance of a network's features on generated and on real pictures:

    |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)).

The inception score (Salimans et al. 2016) is exp E KL(p(y|x) || p(y)) of a classifier's probabilities. It lies between
1 and the number of classes. Both depend on the network: values from different networks cannot be compared.
"""

import pathlib
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_efficient_attn.io.writing import replacing


class Gaussian(NamedTuple):
    """Mean (D,) and covariance (D, D), float64."""

    mean: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, features: Tensor) -> "Gaussian":
        """Mean and unbiased covariance of features (N, D).

        Raises:
            ValueError: there are fewer than two pictures, or a feature is NaN or infinite.
        """
        if features.ndim != 2 or len(features) < 2:
            raise ValueError(f"a covariance needs features of at least 2 pictures, not {tuple(features.shape)}")
        if not features.isfinite().all():
            raise ValueError("the features hold NaN or infinity: check the pictures and the feature network")
        features = features.detach().to("cpu", torch.float64)
        return cls(features.mean(0), torch.cov(features.t()))

    @classmethod
    def load(cls, path: pathlib.Path) -> "Gaussian":
        """Load a .npz file with `mu` and `sigma`, the format of the usual FID programs.

        Raises:
            ValueError: the file is not such a file, or its arrays have other shapes.
        """
        try:
            with np.load(path) as stored:
                found = cls(*(torch.from_numpy(stored[name].astype(np.float64)) for name in ("mu", "sigma")))
        except FileNotFoundError:
            raise
        except Exception as error:
            raise ValueError(f"{path} must be a .npz file with the arrays mu (D,) and sigma (D, D)") from error
        if found.mean.ndim != 1 or found.covariance.shape != 2 * found.mean.shape:
            shapes = f"{tuple(found.mean.shape)} and {tuple(found.covariance.shape)}"
            raise ValueError(f"{path}: the mean must be (D,) and the covariance (D, D), not {shapes}")
        return found

    def save(self, path: pathlib.Path) -> None:
        """Save as .npz file with `mu` and `sigma`."""
        with replacing(path) as draft, draft.open("wb") as file:
            np.savez(file, mu=self.mean.numpy(), sigma=self.covariance.numpy())


def _root(matrix: Tensor) -> Tensor:
    """Square root of a symmetric matrix. Eigenvalues that are negative by rounding count as 0."""
    values, vectors = torch.linalg.eigh((matrix + matrix.t()) / 2)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.t()


def frechet_distance(first: Gaussian, second: Gaussian) -> float:
    """Squared Wasserstein distance between two Gaussians (Heusel et al. 2017, eq. 6).

    The trace of (C1 C2)^(1/2) is computed as the sum of the singular values of C1^(1/2) C2^(1/2). This is real and
    finite for singular covariances too (fewer pictures than features), where a root of the product itself may not be.

    Raises:
        ValueError: the numbers of features differ, or a value is NaN.
    """
    if len(first.mean) != len(second.mean):
        raise ValueError(
            f"{len(first.mean)} features cannot be compared with {len(second.mean)}: use the same network for both"
        )
    (mean, covariance), (other, others) = ((x.double() for x in one) for one in (first, second))
    if not all(x.isfinite().all() for x in (mean, covariance, other, others)):
        raise ValueError("the mean or the covariance holds NaN or infinity")
    shared = torch.linalg.svdvals(_root(covariance) @ _root(others)).sum()
    found = (mean - other).square().sum() + covariance.trace() + others.trace() - 2 * shared
    # For equal Gaussians the traces differ by rounding, with either sign.
    return max(found.item(), 0.0)


def inception_score(probabilities: Tensor, splits: int = 10) -> tuple[float, float]:
    """Mean and deviation of exp E KL(p(y|x) || p(y)) over parts of the pictures (Salimans et al. 2016, sec. 4).

    Args:
        probabilities: (N, classes), which sum to 1 for every picture, in the order of generation.
        splits: number of parts, each with its own p(y). The original uses 10.

    Raises:
        ValueError: there are fewer pictures than parts, or the values are not probabilities.
    """
    if probabilities.ndim != 2 or not probabilities.isfinite().all():
        raise ValueError("probabilities must have shape (pictures, classes) and hold no NaN")
    if not 1 <= splits <= len(probabilities):
        raise ValueError(f"{len(probabilities)} pictures cannot be split into {splits} parts: give fewer parts")
    given = probabilities.detach().to("cpu", torch.float64)
    if given.min() < 0 or (given.sum(1) - 1).abs().max() > 1e-3:
        raise ValueError("probabilities must be at least 0 and sum to 1 for every picture: apply a softmax to logits")
    scores = []
    for part in given.tensor_split(splits):
        marginal = part.mean(0, keepdim=True)
        # 0 log 0 is 0, and where the marginal is 0 every probability is 0.
        scores.append((torch.xlogy(part, part) - torch.xlogy(part, marginal)).sum(1).mean().exp())
    found = torch.stack(scores)
    return found.mean().item(), found.std(correction=0).item()
