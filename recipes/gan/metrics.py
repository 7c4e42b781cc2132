"""Measures of generated pictures: Frechet distance between Gaussians (FID) and inception score.

FID (Heusel et al. 2017, eq. 6): the squared Wasserstein distance of two Gaussians that have the mean and covariance of
a network's features on generated and on real pictures,

    |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)).

Inception score (Salimans et al. 2016): exp E KL(p(y|x) || p(y)), of a classifier's probabilities; 1 at least, the
number of classes at most. Both hang on the network: figures of different networks say nothing about one another.
"""

import pathlib
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_efficient_attn.io.writing import replacing


class Gaussian(NamedTuple):
    """mean (D,) and covariance (D, D), float64."""

    mean: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, features: Tensor) -> "Gaussian":
        """Of features (N, D), N at least 2."""
        moments = Moments()
        moments.update(features)
        return moments.gaussian()

    @classmethod
    def load(cls, path: pathlib.Path) -> "Gaussian":
        """Out of a .npz with `mu` and `sigma`, as FID's programs write them.

        Raises:
            ValueError: it is no such file, or holds other shapes.
        """
        try:
            with np.load(path) as stored:
                mean, covariance = (
                    torch.from_numpy(np.array(stored[name], dtype=np.float64)) for name in ("mu", "sigma")
                )
        except FileNotFoundError:
            raise
        except Exception as error:
            raise ValueError(f"{path}: statistics are a .npz with the arrays mu (D,) and sigma (D, D)") from error
        _check(mean, covariance, str(path))
        return cls(mean, covariance)

    def save(self, path: pathlib.Path) -> None:
        """As .npz with `mu` and `sigma`."""
        with replacing(path) as draft, draft.open("wb") as file:
            np.savez(file, mu=self.mean.numpy(), sigma=self.covariance.numpy())


class Moments:
    """Mean and covariance of features that come in batches, in one pass (Chan et al. 1979)."""

    def __init__(self) -> None:
        self.count = 0
        self._mean = self._scatter = torch.zeros(())

    def update(self, features: Tensor) -> None:
        """Take in a batch (N, D).

        Raises:
            ValueError: it is no matrix, its width is another than before, or it holds NaN or infinity.
        """
        if features.ndim != 2:
            raise ValueError(f"features must be (pictures, width), not {tuple(features.shape)}")
        if not features.isfinite().all():
            raise ValueError("the features hold NaN or infinity: look at the pictures and at the feature network")
        if self.count and features.shape[1] != len(self._mean):
            raise ValueError(f"features of width {features.shape[1]} after some of width {len(self._mean)}")
        if not len(features):
            return
        batch = features.detach().to("cpu", torch.float64)
        if not self.count:
            self._mean, self._scatter = batch.new_zeros(batch.shape[1]), batch.new_zeros(batch.shape[1], batch.shape[1])
        mean = batch.mean(0)
        away, whole = mean - self._mean, self.count + len(batch)
        centred = batch - mean
        self._scatter = self._scatter + centred.t() @ centred
        self._scatter += torch.outer(away, away) * (self.count * len(batch) / whole)
        self._mean = self._mean + away * (len(batch) / whole)
        self.count = whole

    def gaussian(self) -> Gaussian:
        """Mean and unbiased covariance of all so far.

        Raises:
            ValueError: of fewer than two pictures there is no covariance.
        """
        if self.count < 2:
            raise ValueError(f"a covariance takes at least 2 pictures, and there are {self.count}")
        return Gaussian(self._mean, self._scatter / (self.count - 1))


def _check(mean: Tensor, covariance: Tensor, what: str) -> None:
    if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
        shapes = f"{tuple(mean.shape)} and {tuple(covariance.shape)}"
        raise ValueError(f"{what}: a mean (D,) and a covariance (D, D) are wanted, not {shapes}")
    if not (mean.isfinite().all() and covariance.isfinite().all()):
        raise ValueError(f"{what}: NaN or infinity in the mean or the covariance")


def _root(matrix: Tensor) -> Tensor:
    """Square root of a symmetric matrix; eigenvalues that rounding made negative count as 0."""
    values, vectors = torch.linalg.eigh((matrix + matrix.t()) / 2)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.t()


def frechet_distance(first: Gaussian, second: Gaussian) -> float:
    """Squared Wasserstein distance of two Gaussians (Heusel et al. 2017, eq. 6).

    The trace of (C1 C2)^(1/2) is the sum of the singular values of C1^(1/2) C2^(1/2), so that it is real and finite for
    singular covariances as well, of fewer pictures than features, where a root of the product itself may not be.

    Raises:
        ValueError: the widths differ, or there is NaN.
    """
    for one, what in ((first, "first"), (second, "second")):
        _check(*one, what)
    if len(first.mean) != len(second.mean):
        raise ValueError(
            f"features of width {len(first.mean)} cannot be compared with features of width {len(second.mean)}: "
            "both must come from the same network"
        )
    (mean, covariance), (other, others) = ((x.double() for x in one) for one in (first, second))
    shared = torch.linalg.svdvals(_root(covariance) @ _root(others)).sum()
    found = (mean - other).square().sum() + covariance.trace() + others.trace() - 2 * shared
    # Of equal Gaussians the difference of the traces is rounding, of either sign.
    return max(found.item(), 0.0)


def inception_score(probabilities: Tensor, splits: int = 10) -> tuple[float, float]:
    """exp E KL(p(y|x) || p(y)), mean and standard deviation over parts of the pictures (Salimans et al. 2016, sec. 4).

    Args:
        probabilities: (N, classes), rows sum to 1, in the order in which the pictures were made.
        splits: parts, each with a p(y) of its own; the original has 10.

    Raises:
        ValueError: fewer pictures than parts, or rows that are no probabilities.
    """
    if probabilities.ndim != 2 or not probabilities.isfinite().all():
        raise ValueError("probabilities must be (pictures, classes), without NaN")
    if not 1 <= splits <= len(probabilities):
        raise ValueError(f"{len(probabilities)} pictures cannot be cut into {splits} parts; give fewer parts")
    given = probabilities.detach().to("cpu", torch.float64)
    if given.min() < 0 or (given.sum(1) - 1).abs().max() > 1e-3:
        raise ValueError("probabilities must be at least 0 and sum to 1 for every picture; logits take a softmax first")
    scores = []
    for part in given.tensor_split(splits):
        marginal = part.mean(0, keepdim=True)
        # 0 log 0 is 0; where the marginal is 0 so is every row.
        scores.append((torch.xlogy(part, part) - torch.xlogy(part, marginal)).sum(1).mean().exp())
    found = torch.stack(scores)
    return found.mean().item(), found.std(correction=0).item()
