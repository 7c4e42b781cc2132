"""Batches for distillation from a text or from pictures, some of which are held out to measure errors."""

import hashlib
import math
import pathlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.capture import takes_pictures
from hf_efficient_attn.evaluation.data import ModelData, max_positions
from hf_efficient_attn.evaluation.speech import takes_speech
from hf_efficient_attn.training.batches import shuffled

# The default number of tokens, if the model takes as many.
_DEFAULT_LENGTH = 2048
# One of this many batches is held out, but not more than a number that measures the error well.
_HELD_OUT_INTERVAL, _MOST_HELD_OUT = 20, 8
# Two batches to learn from, and one that is held out.
_FEWEST = 3


class BatchSize(NamedTuple):
    """The number of tokens of an input, and the number of inputs.

    Pictures have the nearest possible number of tokens. None stands for as many as the model takes, at most 2,048; for
    pictures, for those of the size that the model was trained with.
    """

    length: int | None = None
    num_inputs: int = 4


class TrainingData:
    """At most `num_batches` batches of windows of a text, or of pictures, for the model of a checkpoint folder.

    Attributes:
        name: of the data.
        tokens: number of tokens of an input.
        train: the numbers of the batches to learn from.
        held_out: the numbers of the others.

    Raises:
        UnsupportedAttentionError: a file that cannot be read or has too few batches, a length that the model cannot
            have, a model without a tokenizer or image processor, or a model of speech.
    """

    def __init__(
        self, model: PreTrainedModel, folder: pathlib.Path, file: pathlib.Path, size: BatchSize, num_batches: int
    ) -> None:
        if takes_speech(model):
            raise UnsupportedAttentionError(
                f"{type(model).__name__} takes speech. The command distills models of text and of pictures; for this "
                "one call hea.distill with batches of your own"
            )
        is_image, positions = takes_pictures(model), max_positions(model)
        length = size.length or min(positions or _DEFAULT_LENGTH, _DEFAULT_LENGTH)
        if not is_image and positions is not None and length > positions:
            raise UnsupportedAttentionError(
                f"--length {length}: the model takes {positions} tokens: give a smaller number, or --max-length "
                f"{length}, which extends its positions"
            )
        rows = size.num_inputs * (num_batches + _MOST_HELD_OUT)
        self._data = ModelData(model, folder, file, longest=length, rows=rows)
        if is_image:
            length = size.length or self._data.native_tokens
            # Sorted files can be sorted by class.
            order = torch.randperm(len(self._data.pictures), generator=torch.Generator().manual_seed(0))
            self._data.pictures = [self._data.pictures[index] for index in order.tolist()]
        self._data.check_length(length)
        self._length, self._count = length, size.num_inputs
        self.name, self.tokens = self._data.name, self._data.tokens_for(length)
        found = self._data.rows // size.num_inputs
        if found < _FEWEST:
            raise UnsupportedAttentionError(self._too_few(found))
        held_out = min(_MOST_HELD_OUT, max(1, found // _HELD_OUT_INTERVAL))
        self.train, self.held_out = range(min(found - held_out, num_batches)), range(found - held_out, found)

    def _too_few(self, found: int) -> str:
        inputs = "pictures" if self._data.is_image else f"windows of {self.tokens} tokens"
        smaller = "a smaller --batch-size" if self._data.is_image else "a smaller --batch-size or --length"
        batches = {0: "not one batch", 1: "a single batch"}.get(found, f"{found} batches")
        return (
            f"{self.name} has {self._data.rows} {inputs}, which are {batches} of {self._count}. Distillation needs "
            f"{_FEWEST} or more, two to learn from and one to measure the error on: give more data, or {smaller}"
        )

    def batch(self, number: int) -> dict[str, Any]:
        """The batch with a number. No token of a masked language model is masked."""
        inputs = self._data.inputs(self._length, number * self._count, self._count)
        values = dict(inputs.values)
        if inputs.masked is not None and inputs.targets is not None:
            values["input_ids"] = values["input_ids"].masked_scatter(inputs.masked, inputs.targets)
        return values

    def batches(self, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
        """The batches with some numbers."""
        return map(self.batch, numbers)

    def stream(self, numbers: Sequence[int], seed: int, skip: int = 0) -> Iterator[dict[str, Any]]:
        """The batches with some numbers in a random order, epoch after epoch, without the first `skip`."""
        return map(self.batch, islice(shuffled(numbers, seed), skip, None))

    def digest(self) -> str:
        """A number that other data hardly have: of all tokens, or of all names and some pixels."""
        found = hashlib.sha256(repr((self.name, self._length, self._count, self._data.rows)).encode())
        if self._data.is_image:
            found.update("\n".join(name for name, _ in self._data.pictures).encode("utf-8", "backslashreplace"))
            update(found, self.batch(self.held_out[0])["pixel_values"])
        else:
            update(found, self._data.token_ids)
        return found.hexdigest()


def update(found: Any, tensor: Tensor) -> None:
    """Add the bytes of a tensor to a hash of `hashlib`."""
    found.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
    for part in tensor.detach().cpu().reshape(-1).split(1 << 24):
        found.update(part.contiguous().view(torch.uint8).numpy().data)


def mean(values: Sequence[float]) -> float | None:
    """The mean of some numbers; None if there are none, or if it is not finite."""
    value = sum(values) / len(values) if values else math.nan
    return value if math.isfinite(value) else None
