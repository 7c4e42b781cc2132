"""How pictures become tensors: the evaluation's square, the training's random parts, and the data set of both.

Pillow does it; torchvision is not used even where it is installed, so that the same command gives the same numbers with
and without it.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipes.data.images import Pictures


def preprocessor_settings(model: str) -> dict[str, Any]:
    """What a checkpoint's preprocessor does, as in `preprocessor_config.json`, with its class's defaults.

    Raises:
        OSError: the checkpoint has none.
    """
    # Where it is defined: the name in `transformers` asks for torchvision up to 5.12.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(model, backend="pil").to_dict()


class Norm(NamedTuple):
    """How a model wants its pictures: values / 255 less `mean`, over `std`, by channel; `resample` as Pillow counts."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Norm":
        """Out of a `preprocessor_config.json`.

        Raises:
            ValueError: it scales the values otherwise.
        """
        if not settings.get("do_rescale", True) or abs(settings.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-3:
            raise ValueError(
                "the checkpoint's preprocessor does not scale the values by 1/255, which is all known here"
            )
        resample = settings.get("resample")
        resample = 2 if resample is None else int(resample)
        if not settings.get("do_normalize", True):
            return cls((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), resample)
        mean, std = (tuple(map(float, settings[f"image_{name}"])) for name in ("mean", "std"))
        return cls(mean, std, resample)


def to_tensor(picture, norm: Norm) -> Tensor:
    """An RGB picture -> (3, height, width), float32."""
    import numpy as np

    values = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (norm.mean, norm.std))
    return (values - mean) / std


def centre_square(picture, pixels: int, ratio: float, resample: int):
    """The square in the middle, `ratio` of the shorter side wide, as pixels x pixels.

    As in the usual evaluation: the shorter side is resized to pixels / ratio, and the square cut out of that.
    """
    shorter, side = min(picture.size), round(pixels / ratio)
    size = tuple(side * length // shorter for length in picture.size)
    left, top = (round((length - pixels) / 2) for length in size)
    return picture.resize(size, resample).crop((left, top, left + pixels, top + pixels))


@dataclass(frozen=True)
class Evaluation:
    """The square in the middle; `crop_ratio` of the shorter side wide."""

    pixels: int
    norm: Norm
    crop_ratio: float = 0.875

    def __call__(self, picture, generator: torch.Generator | None = None) -> Tensor:
        """A picture -> (3, pixels, pixels); nothing is drawn."""
        return to_tensor(centre_square(picture, self.pixels, self.crop_ratio, self.norm.resample), self.norm)


@dataclass(frozen=True)
class Training:
    """A random part of the picture, resized, perhaps mirrored, perhaps changed in colour or shape.

    scale, ratio: the part's share of the area, uniform, and its width over its height, uniform in the logarithm
        (Szegedy et al. 2015, section 6).
    flip: probability of the mirror image.
    jitter: brightness, contrast and saturation change by up to this share, in random order.
    trivial: one operation of random strength as well (TrivialAugment, Mueller and Hutter 2021, its wide ranges).
    """

    pixels: int
    norm: Norm
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    jitter: float = 0.0
    trivial: bool = False

    def __call__(self, picture, generator: torch.Generator) -> Tensor:
        """A picture -> (3, pixels, pixels); all that is random comes from the generator."""
        from PIL import Image

        part = picture.crop(self.box(*picture.size, generator))
        picture = part.resize((self.pixels, self.pixels), self.norm.resample)
        if _uniform(generator) < self.flip:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.trivial:
            picture = trivial_augment(picture, generator)
        if self.jitter:
            picture = color_jitter(picture, self.jitter, generator)
        return to_tensor(picture, self.norm)

    def box(self, width: int, height: int, generator: torch.Generator) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of the part that is cut out."""
        for _ in range(10):
            area = width * height * _uniform(generator, *self.scale)
            ratio = math.exp(_uniform(generator, *map(math.log, self.ratio)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                left, top = _below(width - w + 1, generator), _below(height - h + 1, generator)
                return left, top, left + w, top + h
        # Of a picture too long for any of these the middle, as near to a square as the ratios allow.
        ratio = min(max(width / height, self.ratio[0]), self.ratio[1])
        w, h = min(width, round(height * ratio)), min(height, round(width / ratio))
        left, top = (width - w) // 2, (height - h) // 2
        return left, top, left + w, top + h


def _uniform(generator: torch.Generator, low: float = 0.0, high: float = 1.0) -> float:
    return low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64).item()


def _below(limit: int, generator: torch.Generator) -> int:
    return int(torch.randint(limit, (), generator=generator))


def color_jitter(picture, strength: float, generator: torch.Generator):
    """Brightness, contrast and saturation times 1 +- strength, in random order."""
    from PIL import ImageEnhance

    kinds = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    for i in torch.randperm(3, generator=generator).tolist():
        picture = kinds[i](picture).enhance(_uniform(generator, max(0.0, 1 - strength), 1 + strength))
    return picture


def trivial_augment(picture, generator: torch.Generator):
    """One of fourteen operations, at a strength of one of 31 steps and, where that makes sense, of either sign."""
    from PIL import Image, ImageEnhance, ImageOps

    strength = _below(31, generator) / 30
    sign = 1 - 2 * _below(2, generator)

    def shift(a=0.0, b=0.0, c=0.0, d=0.0):
        # Output (x, y) is taken from (x + a y + b, c x + y + d).
        return lambda p: p.transform(p.size, Image.Transform.AFFINE, (1, a, b, c, 1, d), Image.Resampling.NEAREST)

    operations = (
        lambda p: p,
        ImageOps.autocontrast,
        ImageOps.equalize,
        lambda p: ImageOps.posterize(p, 8 - round(6 * strength)),
        lambda p: ImageOps.solarize(p, round(255 * (1 - strength))),
        *(
            lambda p, kind=kind: kind(p).enhance(1 + sign * 0.99 * strength)
            for kind in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color, ImageEnhance.Sharpness)
        ),
        lambda p: p.rotate(sign * 135 * strength),
        shift(a=sign * 0.99 * strength),
        shift(c=sign * 0.99 * strength),
        # 32 of 224 pixels, whatever the size.
        shift(b=sign * strength * picture.size[0] / 7),
        shift(d=sign * strength * picture.size[1] / 7),
    )
    return operations[_below(len(operations), generator)](picture)


class PictureDataset(torch.utils.data.Dataset):
    """Pictures with their labels, as a model takes them: {"pixel_values": (3, P, P), "labels": int}.

    What is random about a picture follows from the seed, the epoch and its place in the data alone: not from the global
    state, of which a batch that was fetched ahead when a checkpoint was written would have used up some. So a resumed
    run sees what the run that was not stopped would have seen, and any number of workers and processes sees the same.

    Args:
        pictures: the pictures.
        indices: output of the model by class name.
        transform: (picture, generator) -> tensor.
        seed: of what is random in `transform`.
    """

    def __init__(
        self, pictures: Pictures, indices: Mapping[str, int], transform: Callable[..., Tensor], seed: int = 0
    ) -> None:
        self.pictures, self.transform, self.seed = pictures, transform, seed
        self.labels = [indices[name] for name in pictures.classes]
        # Shared, so that workers which outlive an epoch see the next one.
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """To be called before each epoch, in the main process."""
        self.epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = hashlib.blake2b(f"{self.seed},{int(self.epoch)},{index}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(drawn, "little") >> 1)
        return {
            "pixel_values": self.transform(self.pictures.open(index), generator),
            "labels": self.labels[index],
        }
