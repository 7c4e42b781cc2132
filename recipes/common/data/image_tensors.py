"""Converts pictures to tensors: the crops of evaluation and training, and a data set that applies them.

Pillow resizes and crops even if torchvision is installed, so that the same command gives the same numbers with and
without it.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import torch
from PIL.Image import Image
from torch import Tensor

# The name in `transformers` itself needs torchvision up to version 5.12.
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from recipes.common.data.images import Pictures


def preprocessor_settings(model: str) -> dict[str, Any]:
    """The settings of a checkpoint's preprocessor, with the defaults of its class. Raises OSError if there is none."""
    return AutoImageProcessor.from_pretrained(model, backend="pil").to_dict()


class Norm(NamedTuple):
    """The preprocessing of a model: (values / 255 - mean) / std for each channel, and Pillow's number of the filter."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Norm":
        """The preprocessing of a `preprocessor_config.json`. Refuses one that scales the values differently."""
        if not settings.get("do_rescale", True) or abs(settings.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-3:
            raise ValueError("the checkpoint's preprocessor must scale the values by 1/255")
        resample = settings.get("resample")
        mean, std = (0.0,) * 3, (1.0,) * 3
        if settings.get("do_normalize", True):
            mean, std = (tuple(map(float, settings[f"image_{name}"])) for name in ("mean", "std"))
        return cls(mean, std, 2 if resample is None else int(resample))


def to_tensor(picture: Image, norm: Norm) -> Tensor:
    """Normalise an RGB picture: (3, height, width), float32."""
    values = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (norm.mean, norm.std))
    return (values - mean) / std


@dataclass(frozen=True)
class Evaluation:
    """The transform of evaluation: the central square, with `crop_ratio` of the shorter side.

    As usual, the shorter side is resized to pixels / crop_ratio and the square is cut out afterwards.
    """

    pixels: int
    norm: Norm
    crop_ratio: float = 0.875

    def __call__(self, picture: Image, generator: torch.Generator | None = None) -> Tensor:
        """Convert a picture to (3, pixels, pixels). The generator is not used."""
        shorter, side = min(picture.size), round(self.pixels / self.crop_ratio)
        size = tuple(side * length // shorter for length in picture.size)
        left, top = (round((length - self.pixels) / 2) for length in size)
        box = (left, top, left + self.pixels, top + self.pixels)
        return to_tensor(picture.resize(size, self.norm.resample).crop(box), self.norm)


@dataclass(frozen=True)
class Training:
    """The transform of training: a random crop, flipped with probability `flip`.

    `scale` is the range of the crop's share of the area, which is uniform (Szegedy et al. 2015, section 6).
    """

    pixels: int
    norm: Norm
    scale: tuple[float, float] = (0.08, 1.0)
    flip: float = 0.5

    def __call__(self, picture: Image, generator: torch.Generator) -> Tensor:
        """Convert a picture to (3, pixels, pixels). All randomness comes from the generator."""
        part = picture.crop(self.box(*picture.size, generator))
        picture = part.resize((self.pixels, self.pixels), self.norm.resample)
        if _uniform(generator) < self.flip:
            picture = picture.transpose(PIL.Image.Transpose.FLIP_LEFT_RIGHT)
        return to_tensor(picture, self.norm)

    def box(self, width: int, height: int, generator: torch.Generator) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of the crop. The logarithm of its aspect ratio is uniform, from 3/4 to 4/3."""
        for _ in range(10):
            area = width * height * _uniform(generator, *self.scale)
            ratio = math.exp(_uniform(generator, math.log(3 / 4), math.log(4 / 3)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                left, top = _below(width - w + 1, generator), _below(height - h + 1, generator)
                return left, top, left + w, top + h
        # No crop fits into a very elongated picture: take its centre, as close to a square as the ratios allow.
        ratio = min(max(width / height, 3 / 4), 4 / 3)
        w, h = min(width, round(height * ratio)), min(height, round(width / ratio))
        left, top = (width - w) // 2, (height - h) // 2
        return left, top, left + w, top + h


def _uniform(generator: torch.Generator, low: float = 0.0, high: float = 1.0) -> float:
    return low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64).item()


def _below(limit: int, generator: torch.Generator) -> int:
    return int(torch.randint(limit, (), generator=generator))


class PictureDataset(torch.utils.data.Dataset):
    """Examples of pictures and labels: {"pixel_values": (3, P, P), "labels": int}.

    The random augmentation of a picture depends on the seed, the epoch and the index of the picture only. The global
    random state is not used, since prefetched batches would have advanced it when a checkpoint is written. So resumed
    runs and any number of workers and processes get the same pictures. `indices` has the output for every class name.
    """

    def __init__(self, pictures: Pictures, indices: Mapping[str, int], transform: Any, seed: int = 0) -> None:
        self.pictures, self.transform, self.seed = pictures, transform, seed
        self.labels = [indices[name] for name in pictures.classes]
        # In shared memory, since workers may live longer than an epoch.
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = hashlib.blake2b(f"{self.seed},{int(self.epoch)},{index}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(drawn, "little") >> 1)
        return {"pixel_values": self.transform(self.pictures.open(index), generator), "labels": self.labels[index]}
