"""Scores of generated pictures: Frechet inception distance (FID) and inception score, by any image classifier.

FID (Heusel et al. 2017, eq. 6) is the squared Wasserstein distance between two Gaussians. They have the mean and
covariance of a network's features on generated and on real pictures:

    |mu_1 - mu_2|^2 + tr(C_1 + C_2 - 2 (C_1 C_2)^(1/2))

The inception score (Salimans et al. 2016) is exp E KL(p(y|x) || p(y)) of the network's probabilities. The published
values use Inception v3. Scores of different networks cannot be compared.
"""

import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForImageClassification

from hf_efficient_attn.checkpoint.loading import no_progress_bar
from hf_efficient_attn.errors import UnsupportedAttentionError
from recipes.common.data import images
from recipes.common.data.image_tensors import Evaluation, Norm, preprocessor_settings
from recipes.common.gan import digits


class FeatureNetwork:
    """An image classifier as feature network: returns the input of its last layer, and its probabilities.

    The folder is any that `AutoModelForImageClassification` loads. Pictures are resized and normalised as its
    `preprocessor_config.json` says. A folder without classifier, linear last layer or preprocessor is refused.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        try:
            with no_progress_bar():
                self.model = AutoModelForImageClassification.from_pretrained(folder, local_files_only=True).eval()
            settings = preprocessor_settings(str(folder))
        except (OSError, ValueError) as error:
            raise UnsupportedAttentionError(
                f"--features {folder} must be the folder of an image classifier with its preprocessor, such as "
                f"`python -m recipes.biggan_features` writes: {error}"
            ) from error
        labels, layers = self.model.config.num_labels, self.model.modules()
        heads = [layer for layer in layers if isinstance(layer, nn.Linear) and layer.out_features == labels]
        if not heads:
            raise UnsupportedAttentionError(f"--features {folder}: no linear layer computes the model's labels")
        norm, size = Norm.of(settings), settings["size"] if settings.get("do_resize", True) else {}
        self.side = size.get("height", size.get("shortest_edge"))
        self.mean, self.std = (torch.tensor(values).view(-1, 1, 1) for values in (norm.mean, norm.std))
        self._recorded: list[Tensor] = []
        heads[-1].register_forward_pre_hook(lambda _, inputs: self._recorded.append(inputs[0]))

    def prepare(self, pictures: Tensor) -> Tensor:
        """Resize and normalise pictures (N, 3, P, P) in [-1, 1] for the network."""
        if self.side not in (None, pictures.shape[-1]):
            pictures = nn.functional.interpolate(pictures, (self.side,) * 2, mode="bilinear", antialias=True)
        return ((pictures + 1) / 2 - self.mean) / self.std

    @torch.inference_mode()
    def __call__(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Features (N, D) and probabilities (N, classes) of pictures (N, 3, P, P) in [-1, 1]."""
        self._recorded.clear()
        logits = self.model(pixel_values=self.prepare(pictures)).logits
        return self._recorded.pop().flatten(1), logits.softmax(1)


class Gaussian(NamedTuple):
    """Mean (D,) and covariance (D, D) of features, float64."""

    mean: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, features: Tensor) -> "Gaussian":
        """Mean and unbiased covariance of features (N, D). Refuses fewer than two pictures, NaN and infinity."""
        if features.ndim != 2 or len(features) < 2 or not features.isfinite().all():
            raise ValueError("features must be finite numbers (pictures, D) of at least 2 pictures")
        features = features.detach().to("cpu", torch.float64)
        return cls(features.mean(0), torch.cov(features.t()))

    @classmethod
    def load(cls, path: pathlib.Path) -> "Gaussian":
        """Load a .npz file with `mu` (D,) and `sigma` (D, D), the format of the usual FID programs."""
        try:
            with np.load(path) as stored:
                mean, covariance = (torch.from_numpy(stored[name].astype(np.float64)) for name in ("mu", "sigma"))
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{path} must be a .npz file with the arrays mu (D,) and sigma (D, D)") from error
        return cls(mean, covariance)


def _root(matrix: Tensor) -> Tensor:
    """Square root of a symmetric matrix. Eigenvalues that are negative by rounding count as 0."""
    values, vectors = torch.linalg.eigh((matrix + matrix.t()) / 2)
    return (vectors * values.clamp(min=0).sqrt()) @ vectors.t()


def frechet_distance(first: Gaussian, second: Gaussian) -> float:
    """Squared Wasserstein distance between two Gaussians (Heusel et al. 2017, eq. 6).

    The trace of (C1 C2)^(1/2) is computed as the sum of the singular values of C1^(1/2) C2^(1/2). This is real and
    finite for singular covariances too (fewer pictures than features), where a root of the product itself may not be.
    """
    if first.covariance.shape != second.covariance.shape:
        raise ValueError(
            f"{len(first.mean)} features cannot be compared with {len(second.mean)}: use the same network for both"
        )
    shared = torch.linalg.svdvals(_root(first.covariance) @ _root(second.covariance)).sum()
    traces = first.covariance.trace() + second.covariance.trace()
    # For equal Gaussians the traces differ by rounding, with either sign.
    return max(((first.mean - second.mean).square().sum() + traces - 2 * shared).item(), 0.0)


def inception_score(probabilities: Tensor, splits: int = 10) -> tuple[float, float]:
    """Mean and deviation of exp E KL(p(y|x) || p(y)) over parts of the pictures (Salimans et al. 2016, sec. 4).

    Args:
        probabilities: (N, classes), which sum to 1 for every picture, in the order of generation.
        splits: number of parts, at most N, each with its own p(y). The original uses 10.
    """
    scores = []
    for part in probabilities.detach().to("cpu", torch.float64).tensor_split(splits):
        marginal = part.mean(0, keepdim=True)
        # 0 log 0 is 0, and where the marginal is 0 every probability is 0.
        scores.append((torch.xlogy(part, part) - torch.xlogy(part, marginal)).sum(1).mean().exp())
    found = torch.stack(scores)
    return found.mean().item(), found.std(correction=0).item()


def _batches(source: pathlib.Path, pixels: int, batch: int) -> Iterator[Tensor]:
    """Batches (b, 3, pixels, pixels) in [-1, 1]."""
    if source.is_dir() and any(source.glob("*idx3*")):
        for part in digits.load(source, "t10k")[0].split(batch):
            yield digits.as_input(part, pixels)
        return
    found = images.load(str(source))
    split = next((found[name] for name in images.EVAL_SPLITS if name in found), next(iter(found.values())))
    # Keep the whole shorter side, as for BigGAN's training data.
    transform = Evaluation(pixels, Norm((0.5,) * 3, (0.5,) * 3, 2), 1.0)
    for start in range(0, len(split), batch):
        part = range(start, min(start + batch, len(split)))
        yield torch.stack([transform(split.open(i)) for i in part])


def reference_statistics(source: pathlib.Path, network: FeatureNetwork, pixels: int, batch: int = 250) -> Gaussian:
    """Mean and covariance of the features of real pictures, resized to `pixels`, the side of the generated ones.

    The source is a .npz file with `mu` and `sigma`; MNIST's folder, whose t10k is used; or a folder or zip file of
    pictures, whose validation split is used if it has one. One that cannot be read is refused.
    """
    try:
        if source.suffix == ".npz":
            return Gaussian.load(source)
        bar = tqdm(_batches(source, pixels, batch), unit="batch", desc="reference", disable=None, leave=False)
        return Gaussian.of(torch.cat([network(part)[0] for part in bar]))
    except (OSError, ValueError) as error:
        raise UnsupportedAttentionError(f"--reference {source}: {error}") from error
