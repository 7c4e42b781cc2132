"""Inputs of speech models with an encoder and a decoder, such as Whisper: features of recordings, or random ones."""

import contextlib
import pathlib
import shlex
import wave
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoFeatureExtractor, PreTrainedModel

from hf_efficient_attn.errors import UnsupportedAttentionError

# The encoder's first convolutions halve the number of frames.
_FRAMES_PER_POSITION = 2
# Seconds of a frame in the published checkpoints of Whisper.
_FRAME_SECONDS = 0.01
# Tokens of the decoder: a sentence or two.
_DECODER_TOKENS = 32
_SIZES = ("max_source_positions", "max_target_positions", "num_mel_bins")


def takes_speech(model: PreTrainedModel) -> bool:
    """Whether the main input of a model is a batch of spectrograms with a fixed number of frames, as for Whisper."""
    sizes = (getattr(model.config, name, None) for name in _SIZES)
    return model.main_input_name == "input_features" and all(isinstance(size, int) for size in sizes)


class Speech:
    """The inputs of a speech model.

    A recording is cut into excerpts of the length that the encoder takes, 30 seconds for Whisper. What is left at its
    end is not used; a recording that is shorter than an excerpt is filled with silence.

    The decoder gets the tokens that a transcript begins with and, after them, random tokens, because the exact model's
    own transcript would have to be generated first. They are the same for each method and in each run, and they differ
    from excerpt to excerpt. So agreement shows how the encoder's error changes the decoder's guesses, but not how it
    changes a transcript.

    Attributes:
        positions: number of positions of the encoder, the only length that it takes.
        seconds: length of an excerpt.
        excerpts: file, first sample and number of samples of each excerpt; none for random features.
        note: what a report says about the inputs.

    Raises:
        UnsupportedAttentionError: a `file` that is neither a .wav file that can be used nor a folder of them, or a
            checkpoint `folder` without a feature extractor that fits the model.
    """

    def __init__(self, model: PreTrainedModel, folder: pathlib.Path, file: pathlib.Path | None) -> None:
        self._config, self._dtype = model.config, model.dtype
        self.positions: int = model.config.max_source_positions
        self._frames = _FRAMES_PER_POSITION * self.positions
        self.seconds = self._frames * _FRAME_SECONDS
        # Every transcript begins with the start token and those that generation forces, pairs (position, token).
        # There is no token where generation finds out the language itself.
        generation = getattr(model, "generation_config", None) or model.config
        forced = sorted(getattr(generation, "forced_decoder_ids", None) or [])
        start = model.config.decoder_start_token_id or 0
        self._prompt = [start, *(token for _, token in forced if token is not None)]
        self.excerpts: list[tuple[pathlib.Path, int, int]] = []
        self.note = "The decoder gets the first tokens of every transcript, and random ones after them."
        if file is None:
            return
        self._extractor = self._load_extractor(folder)
        size, self._rate = self._extractor.n_samples, self._extractor.sampling_rate
        self.seconds = size / self._rate
        cut = f"Recordings are cut into excerpts of {self.seconds:g} seconds; shorter ones are filled with silence."
        self.note = f"{cut} {self.note}"
        for path in _recordings_in(file):
            with _open(path, self._rate) as recording:
                count = recording.getnframes()
            # A program that was interrupted leaves a header that promises more than there is.
            read_samples(path, self._rate, count - 1, 1)
            self.excerpts += [(path, start, min(size, count)) for start in range(0, count - size + 1, size) or (0,)]

    def _load_extractor(self, folder: pathlib.Path) -> Any:
        """The checkpoint's feature extractor, if it makes what the model takes."""
        load: Any = AutoFeatureExtractor.from_pretrained
        try:
            extractor = load(folder, trust_remote_code=False)
        except Exception as error:  # noqa: BLE001 (a wrong value of any size raises an error of its own)
            reason = " ".join(str(error).split())
            raise UnsupportedAttentionError(
                f"{folder}: its feature extractor cannot be loaded ({reason}): correct its preprocessor_config.json, "
                "which describes how recordings become features, or leave the data out for random features"
            ) from None
        made = tuple(getattr(extractor, name, None) for name in ("nb_max_frames", "feature_size"))
        if made != (self._frames, self._config.num_mel_bins):
            raise UnsupportedAttentionError(
                f"{folder}: its feature extractor makes {made[0]} frames of {made[1]} features, and the model takes "
                f"{self._frames} of {self._config.num_mel_bins}: use the preprocessor_config.json of this model"
            )
        return extractor

    def values(self, indices: range) -> dict[str, Tensor]:
        """The arguments of the model for the excerpts with these indices."""
        features, decoder_ids = zip(*map(self._input, indices), strict=True)
        return {"input_features": torch.stack(features).to(self._dtype), "decoder_input_ids": torch.stack(decoder_ids)}

    def _input(self, index: int) -> tuple[Tensor, Tensor]:
        """Features (mel bins, frames) of an excerpt, and the tokens of the decoder."""
        generator = torch.Generator().manual_seed(index)
        count = min(_DECODER_TOKENS, self._config.max_target_positions)
        random_ids = torch.randint(self._config.vocab_size, (count,), generator=generator)
        decoder_ids = torch.cat([torch.tensor(self._prompt, dtype=random_ids.dtype), random_ids])[:count]
        if not self.excerpts:
            return torch.randn(self._config.num_mel_bins, self._frames, generator=generator), decoder_ids
        path, start, size = self.excerpts[index]
        samples = read_samples(path, self._rate, start, size).numpy()
        features = self._extractor(samples, sampling_rate=self._rate, return_tensors="pt")["input_features"]
        return features[0], decoder_ids


def _recordings_in(path: pathlib.Path) -> list[pathlib.Path]:
    """A .wav file, or those in a folder and its subfolders, sorted by name."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    files = [file for file in files if file.suffix.lower() == ".wav" and file.is_file()]
    if not files:
        raise UnsupportedAttentionError(f"{path}: no recordings: give a .wav file that exists, or a folder of them")
    return files


@contextlib.contextmanager
def _open(path: pathlib.Path, rate: int) -> Iterator[wave.Wave_read]:
    """Open 16-bit samples of a sampling rate; refuse everything else with the command that converts it."""
    try:
        with wave.open(str(path), "rb") as file:
            bits = 8 * file.getsampwidth()
            if bits != 16:
                raise wave.Error(f"samples of {bits} bits, where 16 are supported")
            if file.getframerate() != rate:
                raise wave.Error(f"a sampling rate of {file.getframerate():,} Hz, and the model takes {rate:,} Hz")
            if not file.getnframes():
                raise wave.Error("there is no sound in it")
            yield file
    # RuntimeError for a part of the file that is longer than the whole.
    except (wave.Error, EOFError, OSError, RuntimeError) as error:
        reason = str(error) or "the file ends too early"
        raise UnsupportedAttentionError(
            f"{path}: not a recording that can be used ({reason}): convert it, for example with: ffmpeg -i "
            f"{shlex.quote(path.name)} -ar {rate} -ac 1 -c:a pcm_s16le converted.wav"
        ) from None


def read_samples(path: pathlib.Path, rate: int, start: int, count: int) -> Tensor:
    """Samples start, ..., start + count - 1 of a .wav file, float32 between -1 and 1, the mean of the channels."""
    with _open(path, rate) as file:
        file.setpos(start)
        content, channels = file.readframes(count), file.getnchannels()
        if len(content) != 2 * count * channels:
            raise EOFError
    return torch.frombuffer(bytearray(content), dtype=torch.int16).view(-1, channels).float().mean(1) / (1 << 15)
