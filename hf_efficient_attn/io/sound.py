"""Recordings from .wav files that users name. What cannot be read is refused with the name of the file."""

import pathlib
import shlex
import wave
from typing import NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError

_SUFFIX = ".wav"
_SAMPLE_BYTES = 2
# What `wave` raises; RuntimeError for a part of the file that is longer than the whole.
_UNREADABLE = (wave.Error, EOFError, OSError, RuntimeError)
# The shortest header.
_HEADER_BYTES = 44
_FULL_SCALE = 1 << 15


class Recording(NamedTuple):
    """What the header of a file says.

    Attributes:
        path: The file.
        rate: Its sampling rate in hertz.
        samples: The number of samples of each channel.
        channels: The number of channels.
    """

    path: pathlib.Path
    rate: int
    samples: int
    channels: int


def recordings_of(path: pathlib.Path) -> list[Recording]:
    """Read the headers of a .wav file, or of those in a folder and its subfolders.

    Args:
        path: The file or folder.

    Returns:
        The recordings, sorted by the names of their files.

    Raises:
        UnsupportedAttentionError: The path is neither a .wav file nor a folder with some, or one of the files is
            damaged, empty, or not 16-bit PCM.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() == _SUFFIX and file.is_file())
        if not files:
            raise UnsupportedAttentionError(f"{path}: no recordings in it ({_SUFFIX})")
        return list(map(_header_of, files))
    if not path.is_file():
        raise UnsupportedAttentionError(f"{path}: no such file; recordings are {_SUFFIX} files, or a folder of them")
    if path.suffix.lower() != _SUFFIX:
        raise UnsupportedAttentionError(f"{path}: recordings come from a {_SUFFIX} file, or from a folder of them")
    return [_header_of(path)]


def conversion_advice(name: str, rate: int | None = None) -> str:
    """A sentence's end that says how to make a file that can be read, with a sampling rate if one is given."""
    wanted = "" if rate is None else f"-ar {rate} "
    return f"convert it, for example with: ffmpeg -i {shlex.quote(name)} {wanted}-ac 1 -c:a pcm_s16le converted.wav"


def _header_of(path: pathlib.Path) -> Recording:
    try:
        with wave.open(str(path), "rb") as file:
            width, channels = file.getsampwidth(), file.getnchannels()
            found = Recording(path, file.getframerate(), file.getnframes(), channels)
    except _UNREADABLE as error:
        reason = str(error) or "the file ends too early"
        raise UnsupportedAttentionError(
            f"{path}: not a recording that can be read ({reason}): {conversion_advice(path.name)}"
        ) from None
    if width != _SAMPLE_BYTES:
        raise UnsupportedAttentionError(
            f"{path}: samples of {8 * width} bits, where 16 are supported: {conversion_advice(path.name)}"
        )
    # A program that was interrupted, or that wrote into a pipe, leaves a header that promises more than there is.
    if path.stat().st_size - _HEADER_BYTES < found.samples * channels * width:
        raise UnsupportedAttentionError(
            f"{path}: the file ends before the {found.samples:,} samples that its header promises: "
            f"{conversion_advice(path.name)}"
        )
    if not found.samples:
        raise UnsupportedAttentionError(f"{path}: there is no sound in it")
    return found


def read_samples(recording: Recording, start: int, count: int) -> Tensor:
    """Samples start, ..., start + count - 1 of a recording.

    Returns:
        Float32 (samples,) between -1 and 1, the mean of the channels.

    Raises:
        UnsupportedAttentionError: The file has not as many samples.
    """
    try:
        with wave.open(str(recording.path), "rb") as file:
            file.setpos(start)
            content = file.readframes(count)
    except _UNREADABLE as error:
        raise UnsupportedAttentionError(f"{recording.path}: not a recording that can be read ({error})") from None
    if len(content) != count * recording.channels * _SAMPLE_BYTES:
        raise UnsupportedAttentionError(
            f"{recording.path}: the file ends before the {recording.samples:,} samples that its header promises"
        )
    samples = torch.frombuffer(bytearray(content), dtype=torch.int16)
    return samples.view(-1, recording.channels).float().mean(1) / _FULL_SCALE
