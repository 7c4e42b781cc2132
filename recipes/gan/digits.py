"""Pictures in IDX files, as MNIST's: read, and made squares of three channels."""

import gzip
import math
import pathlib
import struct

import torch
from torch import Tensor

# The third byte of the magic number 0x0803 and 0x0801 says unsigned bytes, the fourth the dimensions.
_UNSIGNED = 8


def read_idx(path: pathlib.Path) -> Tensor:
    """An IDX file of unsigned bytes, gzipped or not, of any shape -> uint8.

    Raises:
        ValueError: it is no such file, or is cut off.
    """
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        try:
            raw = file.read()
        except (gzip.BadGzipFile, EOFError) as error:
            raise ValueError(f"{path} is no whole gzip file") from error
    if len(raw) < 4 or raw[:3] != bytes((0, 0, _UNSIGNED)):
        raise ValueError(f"{path} is no IDX file of unsigned bytes")
    start = 4 + 4 * raw[3]
    shape = struct.unpack(f">{raw[3]}I", raw[4:start]) if len(raw) >= start else ()
    if not shape or len(raw) - start != math.prod(shape):
        raise ValueError(f"{path} holds {len(raw)} bytes, which does not fit its own shape {tuple(shape)}")
    return torch.frombuffer(bytearray(raw[start:]), dtype=torch.uint8).view(shape)


def find(folder: pathlib.Path, split: str) -> tuple[pathlib.Path, pathlib.Path]:
    """Pictures' and labels' file of a split, "train" or "t10k", in the folder or in its images/mnist.

    Raises:
        FileNotFoundError: they are not there.
    """
    for place in (folder, folder / "images" / "mnist", folder / "mnist"):
        for end in (".gz", ""):
            found = tuple(place / f"{split}-{what}-ubyte{end}" for what in ("images-idx3", "labels-idx1"))
            if all(path.is_file() for path in found):
                return found  # type: ignore[return-value]
    raise FileNotFoundError(
        f"there is no {split}-images-idx3-ubyte.gz with its labels in {folder} or its images/mnist; they are MNIST's "
        "files, in IDX format"
    )


def load(folder: pathlib.Path, split: str) -> tuple[Tensor, Tensor]:
    """Pictures (N, H, W) uint8 and classes (N,) int64 of a split, "train" or "t10k"."""
    pictures, labels = (read_idx(path) for path in find(folder, split))
    if pictures.ndim != 3 or labels.shape != pictures.shape[:1]:
        raise ValueError(f"{folder}: pictures {tuple(pictures.shape)} and labels {tuple(labels.shape)} do not fit")
    return pictures, labels.long()


def as_input(pictures: Tensor, pixels: int = 32) -> Tensor:
    """(N, H, W) uint8 -> (N, 3, pixels, pixels) in [-1, 1]: in the middle of black, grey copied to three channels.

    Raises:
        ValueError: the pictures are larger than the square.
    """
    height, width = pictures.shape[1:]
    if max(height, width) > pixels:
        raise ValueError(f"pictures of {height} x {width} do not fit into {pixels} x {pixels}")
    top, left = (pixels - height) // 2, (pixels - width) // 2
    square = pictures.new_zeros(len(pictures), pixels, pixels)
    square[:, top : top + height, left : left + width] = pictures
    return (square.float() / 127.5 - 1)[:, None].expand(-1, 3, -1, -1)
