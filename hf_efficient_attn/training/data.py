"""Batches of a text or of pictures for a distillation, some of which are held out."""

import hashlib
import pathlib
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_efficient_attn.conversion.convert import num_positions
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.capture import takes_pictures
from hf_efficient_attn.evaluation.data import Files, ModelData
from hf_efficient_attn.training.steps import process_rank, shuffled, world_size

# The default number of tokens, if the model takes as many.
_DEFAULT_LENGTH = 2048
# One of this many batches is held out, but not more than a number that measures the error well.
_HELD_OUT_INTERVAL, _MOST_HELD_OUT = 20, 8


class TrainingData(ModelData):
    """At most `num_batches` batches of windows of a text, or of pictures, for the model of a checkpoint folder.

    `data`, `length` and `batch_size` are data, length and batch size of `Plan`; None for as many tokens as the model
    takes, at most 2,048, or those of pictures of the size that the model was trained with. Besides what `ModelData`
    refuses, too few batches and a length that the model cannot have are refused. `held_out` are the batches that a
    shorter training of the same data has held out, which this one does not learn from either.

    Attributes:
        tokens: the number of tokens of an input, for pictures the nearest possible one.
        train, held_out: the numbers of the batches to learn from, and of the others.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        folder: pathlib.Path,
        data: Files,
        length: int | None,
        batch_size: int,
        num_batches: int,
        held_out: range | None = None,
    ) -> None:
        is_image, positions = takes_pictures(model), num_positions(model)
        longest = length or min(positions or _DEFAULT_LENGTH, _DEFAULT_LENGTH)
        if not is_image and positions is not None and longest > positions:
            raise UnsupportedAttentionError(
                f"--length {longest}: the model takes {positions} tokens: give a smaller number, or --max-length "
                f"{longest}, which extends its positions"
            )
        most = batch_size * (num_batches + _MOST_HELD_OUT)
        # Of pictures all: which ones have a number does not depend on how many are needed.
        super().__init__(model, folder, data, longest=longest, rows=sys.maxsize if is_image else most)
        self.mask_token = None  # no token of a masked language model is masked
        if is_image:
            longest = length or self.native_tokens
            # Sorted files can be sorted by class.
            order = torch.randperm(len(self.pictures), generator=torch.Generator().manual_seed(0))
            self.pictures = [self.pictures[index] for index in order.tolist()][:most]
            self.rows = len(self.pictures)
        self.check_length(longest)
        self._length, self._count, self.tokens = longest, batch_size, self.tokens_for(longest)
        # Two batches to learn from for every process, and one that is held out.
        count, fewest = self.rows // batch_size, 2 * world_size() + 1
        if count < fewest:
            inputs = "pictures" if is_image else f"windows of {self.tokens} tokens"
            raise UnsupportedAttentionError(
                f"{self.name} has {self.rows} {inputs}, {count} batches of {batch_size}. Distillation needs {fewest} "
                "or more, two for each process to learn from and one to measure the error on: give more data, or a "
                f"smaller --batch-size{'' if is_image else ' or --length'}"
            )
        if held_out is None or held_out.stop > count:
            held_out = range(count - min(_MOST_HELD_OUT, max(1, count // _HELD_OUT_INTERVAL)), count)
        self.held_out = held_out
        self.train = [number for number in range(count) if number not in held_out][:num_batches]

    def batch(self, number: int) -> dict[str, Any]:
        """The batch with a number."""
        return self.inputs(self._length, number * self._count, self._count).values

    def stream(self, seed: int, skip: int = 0) -> Iterator[dict[str, Any]]:
        """The batches to learn from of this process in a random order, epoch after epoch, without the first `skip`."""
        return map(self.batch, islice(shuffled(self.train[process_rank() :: world_size()], seed), skip, None))

    def digest(self, rows: int) -> str:
        """A number that other data hardly have: of the tokens of some inputs, or of their names and some pixels."""
        pixels = self.batch(self.held_out[0])["pixel_values"] if self.is_image else None
        content = self.token_ids[: rows * self.longest] if pixels is None else pixels
        names = [name for name, _ in self.pictures[:rows]]
        return digest(repr((self.name, self._length, self._count, rows, names)), content)


def digest(text: str, *tensors: Tensor) -> str:
    """A hash of a text and tensors."""
    result = hashlib.sha256(text.encode("utf-8", "backslashreplace"))
    for x in tensors:
        result.update(repr((tuple(x.shape), x.dtype)).encode())
        result.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return result.hexdigest()
