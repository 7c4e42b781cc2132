"""Reads pictures from IDX files such as MNIST's and pads them to squares of three channels."""

import gzip
import math
import pathlib
import struct

import torch
from torch import Tensor

# The magic number is 0x0803 for pictures and 0x0801 for labels. Its third byte is the type, unsigned bytes; its fourth
# is the number of dimensions.
_UNSIGNED = 8


def read_idx(path: pathlib.Path) -> Tensor:
    """Read an IDX file of unsigned bytes, of any shape, gzipped or not, as uint8.

    Raises:
        ValueError: the file is not such a file, or is truncated.
    """
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        try:
            raw = file.read()
        except (gzip.BadGzipFile, EOFError) as error:
            raise ValueError(f"{path} is not a complete gzip file") from error
    if len(raw) < 4 or raw[:3] != bytes((0, 0, _UNSIGNED)):
        raise ValueError(f"{path} is not an IDX file of unsigned bytes")
    start = 4 + 4 * raw[3]
    shape = struct.unpack(f">{raw[3]}I", raw[4:start]) if len(raw) >= start else ()
    if not shape or len(raw) - start != math.prod(shape):
        raise ValueError(f"{path} holds {len(raw)} bytes, which does not match its shape {tuple(shape)}")
    return torch.frombuffer(bytearray(raw[start:]), dtype=torch.uint8).view(shape)


def find(folder: pathlib.Path, split: str) -> tuple[pathlib.Path, pathlib.Path]:
    """Find the files of pictures and labels of a split, "train" or "t10k", in the folder or its images/mnist.

    Raises:
        FileNotFoundError: a file is missing.
    """
    for parent in (folder, folder / "images" / "mnist", folder / "mnist"):
        for suffix in (".gz", ""):
            pictures, labels = (parent / f"{split}-{name}-ubyte{suffix}" for name in ("images-idx3", "labels-idx1"))
            if pictures.is_file() and labels.is_file():
                return pictures, labels
    raise FileNotFoundError(
        f"no {split}-images-idx3-ubyte.gz with its labels in {folder} or its images/mnist: the IDX files of MNIST are "
        "needed"
    )


def load(folder: pathlib.Path, split: str) -> tuple[Tensor, Tensor]:
    """Load the pictures (N, H, W) uint8 and classes (N,) int64 of a split, "train" or "t10k"."""
    pictures, labels = (read_idx(path) for path in find(folder, split))
    if pictures.ndim != 3 or labels.shape != pictures.shape[:1]:
        raise ValueError(f"{folder}: pictures {tuple(pictures.shape)} do not match labels {tuple(labels.shape)}")
    return pictures, labels.long()


def as_input(pictures: Tensor, pixels: int = 32) -> Tensor:
    """Centre grey pictures on black squares of three equal channels: (N, H, W) uint8 -> (N, 3, P, P) in [-1, 1].

    Raises:
        ValueError: the pictures are larger than `pixels`.
    """
    height, width = pictures.shape[1:]
    if max(height, width) > pixels:
        raise ValueError(f"pictures of {height} x {width} do not fit into {pixels} x {pixels}")
    top, left = (pixels - height) // 2, (pixels - width) // 2
    square = pictures.new_zeros(len(pictures), pixels, pixels)
    square[:, top : top + height, left : left + width] = pictures
    return (square.float() / 127.5 - 1)[:, None].expand(-1, 3, -1, -1)
