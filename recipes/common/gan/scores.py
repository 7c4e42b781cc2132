"""Scores of generated pictures: Frechet inception distance (FID) and inception score, by any image classifier.

FID (Heusel et al. 2017, eq. 6) is the squared Wasserstein distance between two Gaussians. They have the mean and
covariance of a network's features on generated and on real pictures:

    |mu_1 - mu_2|^2 + tr(C_1 + C_2 - 2 (C_1 C_2)^(1/2))

The inception score (Salimans et al. 2016) is exp E KL(p(y|x) || p(y)) of the network's probabilities. The published
values use Inception v3. Scores of different networks cannot be compared.
"""

import pathlib
from collections.abc import Iterator

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


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Squared Wasserstein distance between the Gaussians of features (N, D) and (M, D) (Heusel et al. 2017, eq. 6).

    The trace of (C1 C2)^(1/2) is the sum of the roots of the eigenvalues, which are real and not negative up to
    rounding, for singular covariances (fewer pictures than features) too.
    """
    first, second = first.double(), second.double()
    covariances = [torch.cov(features.t()) for features in (first, second)]
    shared = torch.linalg.eigvals(covariances[0] @ covariances[1]).real.clamp(min=0).sqrt().sum()
    distance = (first.mean(0) - second.mean(0)).square().sum() + sum(x.trace() for x in covariances) - 2 * shared
    # For equal Gaussians the terms differ by rounding, with either sign.
    return max(distance.item(), 0.0)


def inception_score(probabilities: Tensor, splits: int = 10) -> tuple[float, float]:
    """Mean and deviation of exp E KL(p(y|x) || p(y)) over parts of the pictures (Salimans et al. 2016, sec. 4).

    Args:
        probabilities: (N, classes), which sum to 1 for every picture, in the order of generation.
        splits: number of parts, at most N, each with its own p(y). The original uses 10.
    """
    scores = []
    for part in probabilities.double().tensor_split(splits):
        marginal = part.mean(0, keepdim=True)
        # 0 log 0 is 0, and where the marginal is 0 every probability is 0.
        scores.append((torch.xlogy(part, part) - torch.xlogy(part, marginal)).sum(1).mean().exp())
    values = torch.stack(scores)
    return values.mean().item(), values.std(correction=0).item()


def _batches(source: pathlib.Path, pixels: int, batch: int) -> Iterator[Tensor]:
    """Batches (b, 3, pixels, pixels) in [-1, 1]."""
    if source.is_dir() and any(source.glob("*idx3*")):
        for part in digits.load(source, "t10k")[0].split(batch):
            yield digits.as_input(part, pixels)
        return
    splits = images.load(str(source))
    split = images.pick(splits, None, images.EVAL_SPLITS, str(source)) or next(iter(splits.values()))
    # Keep the whole shorter side, as for BigGAN's training data.
    transform = Evaluation(pixels, Norm((0.5,) * 3, (0.5,) * 3, 2), 1.0)
    for part in torch.arange(len(split)).split(batch):
        yield torch.stack([transform(split.open(i)) for i in part.tolist()])


def reference_features(source: pathlib.Path, network: FeatureNetwork, pixels: int, batch: int = 250) -> Tensor:
    """The features (N, D) of real pictures, resized to `pixels`, the side of the generated ones.

    The source is MNIST's folder, whose t10k is used; or a folder or zip file of pictures, whose validation split is
    used if it has one. One that cannot be read, or has fewer than two pictures, is refused.
    """
    try:
        bar = tqdm(_batches(source, pixels, batch), unit="batch", desc="reference", disable=None, leave=False)
        features = torch.cat([network(part)[0] for part in bar])
    except (OSError, ValueError) as error:
        raise UnsupportedAttentionError(f"--reference {source}: {error}") from error
    if len(features) < 2:
        raise UnsupportedAttentionError(f"--reference {source}: the statistics need two pictures or more")
    return features
