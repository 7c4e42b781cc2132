"""Real pictures that generated ones are measured against, as statistics of a network's features."""

import pathlib
from collections.abc import Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from hf_efficient_attn.errors import UnsupportedAttentionError
from recipes.data import images
from recipes.data.image_tensors import Evaluation, Norm
from recipes.gan import digits
from recipes.gan.features import FeatureNetwork
from recipes.gan.metrics import Gaussian, Moments


def _pictures(source: pathlib.Path, pixels: int, batch: int) -> tuple[Iterator[Tensor], int]:
    """Batches (b, 3, pixels, pixels) in [-1, 1] and how many pictures there are."""
    if "idx3-ubyte" in source.name:
        values = digits.read_idx(source)
    elif source.is_dir() and not any(source.glob("*/")) and (any(source.glob("*idx3*")) or "mnist" in source.name):
        values = digits.load(source, "t10k")[0]
    else:
        found = images.load(str(source))
        split = next((found[name] for name in images.EVAL_SPLITS if name in found), next(iter(found.values())))
        # The whole shorter side, as BigGAN's training data was cut.
        cut = Evaluation(pixels, Norm((0.5,) * 3, (0.5,) * 3, 2), 1.0)
        parts = (range(at, min(at + batch, len(split))) for at in range(0, len(split), batch))
        return (torch.stack([cut(split.open(i)) for i in part]) for part in parts), len(split)
    return (digits.as_input(part, pixels) for part in values.split(batch)), len(values)


def reference_statistics(source: pathlib.Path, network: FeatureNetwork, pixels: int, batch: int = 250) -> Gaussian:
    """Mean and covariance of the features of real pictures.

    Args:
        source: a .npz with `mu` and `sigma`; an IDX file of pictures, or a folder of MNIST's, of which t10k is taken;
            or a folder or zip file of pictures, of which the validation split is taken where there is one.
        pixels: side of the square that they are made, that of the generated ones.

    Raises:
        UnsupportedAttentionError: there is no such source, or it cannot be read.
    """
    if not source.exists():
        raise UnsupportedAttentionError(f"--reference {source}: there is no such file or folder")
    try:
        if source.suffix == ".npz":
            return Gaussian.load(source)
        batches, number = _pictures(source, pixels, batch)
        moments = Moments()
        with tqdm(total=number, unit="picture", desc="reference", disable=None, leave=False) as bar:
            for part in batches:
                moments.update(network(part)[0])
                bar.update(len(part))
        return moments.gaussian()
    except ValueError as error:
        raise UnsupportedAttentionError(f"--reference {source}: {error}") from error
