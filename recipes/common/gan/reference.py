"""Statistics of real pictures, which generated pictures are compared with."""

import pathlib
from collections.abc import Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from hf_efficient_attn.errors import UnsupportedAttentionError
from recipes.common.data import images
from recipes.common.data.image_tensors import Evaluation, Norm
from recipes.common.gan import digits
from recipes.common.gan.features import FeatureNetwork
from recipes.common.gan.metrics import Gaussian


def _batches(source: pathlib.Path, pixels: int, batch: int) -> tuple[Iterator[Tensor], int]:
    """Batches (b, 3, pixels, pixels) in [-1, 1], and the number of pictures."""
    if "idx3-ubyte" in source.name:
        values = digits.read_idx(source)
    elif source.is_dir() and not any(source.glob("*/")) and (any(source.glob("*idx3*")) or "mnist" in source.name):
        values = digits.load(source, "t10k")[0]
    else:
        found = images.load(str(source))
        split = next((found[name] for name in images.EVAL_SPLITS if name in found), next(iter(found.values())))
        # Keep the whole shorter side, as for BigGAN's training data.
        transform = Evaluation(pixels, Norm((0.5,) * 3, (0.5,) * 3, 2), 1.0)
        parts = (range(start, min(start + batch, len(split))) for start in range(0, len(split), batch))
        return (torch.stack([transform(split.open(i)) for i in part]) for part in parts), len(split)
    return (digits.as_input(part, pixels) for part in values.split(batch)), len(values)


def reference_statistics(source: pathlib.Path, network: FeatureNetwork, pixels: int, batch: int = 250) -> Gaussian:
    """Mean and covariance of the features of real pictures.

    Args:
        source: a .npz file with `mu` and `sigma`; an IDX file of pictures, or MNIST's folder, whose t10k is used; or a
            folder or zip file of pictures, whose validation split is used if it has one.
        network: the feature network.
        pixels: side to which the pictures are resized, that of the generated ones.
        batch: batch size.

    Raises:
        UnsupportedAttentionError: the source does not exist or cannot be read.
    """
    if not source.exists():
        raise UnsupportedAttentionError(f"--reference {source}: no such file or folder")
    try:
        if source.suffix == ".npz":
            return Gaussian.load(source)
        batches, number = _batches(source, pixels, batch)
        found = []
        with tqdm(total=number, unit="picture", desc="reference", disable=None, leave=False) as bar:
            for part in batches:
                found.append(network(part)[0])
                bar.update(len(part))
        return Gaussian.of(torch.cat(found))
    except ValueError as error:
        raise UnsupportedAttentionError(f"--reference {source}: {error}") from error
