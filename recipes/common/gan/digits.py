"""Reads pictures from IDX files such as MNIST's and pads them to squares of three channels."""

import gzip
import pathlib
import zlib

import numpy as np
import torch
from torch import Tensor


def read_idx(path: pathlib.Path) -> Tensor:
    """Read an IDX file of unsigned bytes, of any shape, gzipped or not, as uint8. Refuses other and truncated ones."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            raw = file.read()
        # Two zeros, the type (8 for unsigned bytes), the number of dimensions, and the size of each.
        if raw[:3] != b"\0\0\x08":
            raise ValueError("its type is not that of unsigned bytes")
        shape = np.frombuffer(raw, ">u4", raw[3], 4)
        return torch.from_numpy(np.frombuffer(raw, np.uint8, -1, 4 + 4 * raw[3]).reshape(shape).copy())
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a complete IDX file of unsigned bytes: {error}") from error


def load(folder: pathlib.Path, split: str) -> tuple[Tensor, Tensor]:
    """Load the pictures (N, H, W) uint8 and classes (N,) int64 of a split, "train" or "t10k".

    The files are in the folder or its images/mnist. Missing and broken ones are refused.
    """
    for parent in (folder, folder / "images" / "mnist"):
        for end in (".gz", ""):
            paths = [parent / f"{split}-{name}-ubyte{end}" for name in ("images-idx3", "labels-idx1")]
            if all(path.is_file() for path in paths):
                pictures, labels = map(read_idx, paths)
                if pictures.ndim != 3 or labels.shape != pictures.shape[:1]:
                    raise ValueError(f"{parent}: pictures {tuple(pictures.shape)} and labels {tuple(labels.shape)}")
                return pictures, labels.long()
    raise FileNotFoundError(
        f"no {split}-images-idx3-ubyte.gz with its labels in {folder} or its images/mnist: the IDX files of MNIST are "
        "needed"
    )


def as_input(pictures: Tensor, pixels: int = 32) -> Tensor:
    """Centre grey pictures on black squares of three equal channels: (N, H, W) uint8 -> (N, 3, P, P) in [-1, 1]."""
    height, width = pictures.shape[1:]
    if max(height, width) > pixels:
        raise ValueError(f"pictures of {height} x {width} do not fit into {pixels} x {pixels}")
    left, top = (pixels - width) // 2, (pixels - height) // 2
    margins = (left, pixels - width - left, top, pixels - height - top)
    square = torch.nn.functional.pad(pictures, margins)
    return (square.float() / 127.5 - 1)[:, None].expand(-1, 3, -1, -1)
