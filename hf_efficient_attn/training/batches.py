"""Batches in a random order, and without end."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.capture import Batch

ItemT = TypeVar("ItemT")


def batch_stream(batches: Iterable[Batch], seed: int, num_steps: int) -> Iterator[Batch]:
    """Batches without end, the same in every call with the same arguments.

    Raises:
        UnsupportedAttentionError: when they are read, if there are no batches, or only one.
    """
    if isinstance(batches, (str, bytes, Mapping, Tensor)) or not isinstance(batches, Iterable):
        raise UnsupportedAttentionError(
            f"batches must be an iterable of batches, such as a list or a DataLoader, not {type(batches).__name__}: "
            "split the data into batches"
        )
    if isinstance(batches, Iterator):
        batches = list(islice(batches, num_steps))
    if isinstance(batches, Sequence):
        _check_count(len(batches))
        yield from shuffled(batches, seed)
    while True:
        count = 0
        for count, batch in enumerate(batches, start=1):  # noqa: B007 (the number of the last one)
            yield batch
        _check_count(count)


def shuffled(items: Sequence[ItemT], seed: int) -> Iterator[ItemT]:
    """The items of a sequence in a random order, and without end: in each epoch in another order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for index in torch.randperm(len(items), generator=generator).tolist():
            yield items[index]


def _check_count(count: int) -> None:
    if count == 0:
        raise UnsupportedAttentionError("there is no text or picture to learn from: batches is empty")
    if count == 1:
        raise UnsupportedAttentionError(
            "there is a single batch, which the learned parameters would fit without generalising: give at least two, "
            "better twenty or more, of the kind of data that the model is used on"
        )
