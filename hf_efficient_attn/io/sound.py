"""Recordings from .wav files that users name. What cannot be read is refused with the name of the file."""

import contextlib
import pathlib
import shlex
import wave
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError

_SUFFIX = ".wav"
_SAMPLE_BYTES = 2


class Recording(NamedTuple):
    """What the header of a file says: the sampling rate in hertz, and the number of samples of each channel."""

    path: pathlib.Path
    rate: int
    samples: int


def recordings_of(path: pathlib.Path) -> list[Recording]:
    """Read the headers of a .wav file, or of those in a folder and its subfolders, sorted by the names of the files.

    Raises:
        UnsupportedAttentionError: The path is neither a .wav file nor a folder with some, or one of the files is
            damaged, empty, or not 16-bit PCM.
    """
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() == _SUFFIX and file.is_file())
        if not files:
            raise UnsupportedAttentionError(f"{path}: no recordings in it ({_SUFFIX})")
    elif not path.is_file():
        raise UnsupportedAttentionError(f"{path}: no such file; recordings are {_SUFFIX} files, or a folder of them")
    elif path.suffix.lower() != _SUFFIX:
        raise UnsupportedAttentionError(f"{path}: recordings come from a {_SUFFIX} file, or from a folder of them")
    return list(map(_header_of, files))


def conversion_advice(name: str, rate: int | None = None) -> str:
    """A sentence's end that says how to make a file that can be read, with a sampling rate if one is given."""
    wanted = "" if rate is None else f"-ar {rate} "
    return f"convert it, for example with: ffmpeg -i {shlex.quote(name)} {wanted}-ac 1 -c:a pcm_s16le converted.wav"


@contextlib.contextmanager
def _open(path: pathlib.Path) -> Iterator[wave.Wave_read]:
    try:
        with wave.open(str(path), "rb") as file:
            yield file
    # RuntimeError for a part of the file that is longer than the whole.
    except (wave.Error, EOFError, OSError, RuntimeError) as error:
        reason = str(error) or "the file ends too early"
        raise UnsupportedAttentionError(
            f"{path}: not a recording that can be read ({reason}): {conversion_advice(path.name)}"
        ) from None


def _header_of(path: pathlib.Path) -> Recording:
    with _open(path) as file:
        width, found = file.getsampwidth(), Recording(path, file.getframerate(), file.getnframes())
    if width != _SAMPLE_BYTES:
        raise UnsupportedAttentionError(
            f"{path}: samples of {8 * width} bits, where 16 are supported: {conversion_advice(path.name)}"
        )
    if not found.samples:
        raise UnsupportedAttentionError(f"{path}: there is no sound in it")
    # A program that was interrupted, or that wrote into a pipe, leaves a header that promises more than there is.
    read_samples(found, found.samples - 1, 1)
    return found


def read_samples(recording: Recording, start: int, count: int) -> Tensor:
    """Samples start, ..., start + count - 1 of a recording.

    Returns:
        Float32 (samples,) between -1 and 1, the mean of the channels.

    Raises:
        UnsupportedAttentionError: The file has not as many samples.
    """
    with _open(recording.path) as file:
        file.setpos(start)
        content, channels = file.readframes(count), file.getnchannels()
    if len(content) != count * channels * _SAMPLE_BYTES:
        raise UnsupportedAttentionError(
            f"{recording.path}: the file ends before the {recording.samples:,} samples that its header promises: "
            f"{conversion_advice(recording.path.name)}"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.int16).view(-1, channels).float().mean(1) / (1 << 15)
