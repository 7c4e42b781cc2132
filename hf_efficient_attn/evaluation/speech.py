"""Inputs of speech models with an encoder and a decoder, such as Whisper: features of recordings, or random ones."""

import pathlib
from typing import Any

import torch
from torch import Tensor
from transformers import AutoFeatureExtractor, PreTrainedModel

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.io.sound import Recording, conversion_advice, read_samples, recordings_of

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

    Args:
        model: the model, see `takes_speech`, as loaded from `folder`.
        folder: the checkpoint, with the configuration of its feature extractor.
        file: a .wav file or a folder of them; None for random features.

    Attributes:
        positions: number of positions of the encoder, the only length that it takes.
        seconds: length of an excerpt.
        excerpts: the parts of the recordings; none for random features.
        note: what a report says about the inputs.

    Raises:
        UnsupportedAttentionError: files that cannot be read or have another sampling rate, or a checkpoint without a
            feature extractor that fits the model.
    """

    def __init__(self, model: PreTrainedModel, folder: pathlib.Path, file: pathlib.Path | None) -> None:
        self._config, self._dtype = model.config, model.dtype
        self.positions: int = model.config.max_source_positions
        self._frames = _FRAMES_PER_POSITION * self.positions
        self.seconds = self._frames * _FRAME_SECONDS
        self._prompt = _prompt_of(model)
        self.excerpts: list[tuple[Recording, int, int]] = []  # with the first sample, and the number of samples
        self.note = "The decoder gets the first tokens of every transcript, and random ones after them."
        if file is None:
            return
        self._extractor = self._load_extractor(folder)
        size, rate = self._extractor.n_samples, self._extractor.sampling_rate
        self.seconds = size / rate
        cut = f"Recordings are cut into excerpts of {self.seconds:g} seconds; shorter ones are filled with silence."
        self.note = f"{cut} {self.note}"
        for recording in recordings_of(file):
            if recording.rate != rate:
                raise UnsupportedAttentionError(
                    f"{recording.path}: a sampling rate of {recording.rate:,} Hz, and the model takes {rate:,} Hz: "
                    f"{conversion_advice(recording.path.name, rate)}"
                )
            whole = range(0, recording.samples - size + 1, size)
            self.excerpts += [(recording, start, min(size, recording.samples)) for start in whole or (0,)]

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
        wanted = self._frames, self._config.num_mel_bins
        if made != wanted:
            raise UnsupportedAttentionError(
                f"{folder}: its feature extractor makes {made[0]} frames of {made[1]} features, and the model takes "
                f"{wanted[0]} of {wanted[1]}: use the preprocessor_config.json of this model"
            )
        return extractor

    def check_length(self, length: int) -> None:
        """Refuse every other length than that of the encoder, with `UnsupportedAttentionError`."""
        if length != self.positions:
            raise UnsupportedAttentionError(
                f"the model takes {self.positions:,} positions ({self.seconds:g} seconds) only: give a length of "
                f"{self.positions}"
            )

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
        samples, rate = read_samples(*self.excerpts[index]).numpy(), self._extractor.sampling_rate
        return self._extractor(samples, sampling_rate=rate, return_tensors="pt")["input_features"][0], decoder_ids


def _prompt_of(model: PreTrainedModel) -> list[int]:
    """The tokens that every transcript begins with: the decoder's start token, and those that generation forces."""
    configs = (getattr(model, "generation_config", None), model.config)
    start = next((token for one in configs if (token := getattr(one, "decoder_start_token_id", None)) is not None), 0)
    lists = (getattr(one, "forced_decoder_ids", None) for one in configs)
    forced: list[tuple[int, int | None]] = next((ids for ids in lists if ids), [])
    # A pair of position and token; no token where generation finds out the language itself.
    return [start, *(token for _, token in sorted(forced, key=lambda pair: pair[0]) if token is not None)]
