"""Distillation at the switch to a stage of up-training.

The new learned parameters of the stage imitate the attention that the model had before the switch, on batches of
training data, layer by layer as in `hea.distill`. Parameters that the stage takes over are not trained: their values
are part of the attention to imitate, and their optimizer state belongs to these values.

A distillation depends only on the model, the batches and the options. It has random states of its own and restores the
global ones, so that a resumed training repeats it exactly.
"""

import contextlib
import random
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.capture import Batch, Call
from hf_efficient_attn.training.distillation import Distillation, DistillationOptions
from hf_efficient_attn.training.stage import Stage
from hf_efficient_attn.training.steps import WINDOW, batch_stream


def distill_stage(
    model: nn.Module,
    stage: Stage,
    batches: Iterable[Batch],
    options: DistillationOptions,
    teacher: Callable[[Call], Tensor],
    fixed: Collection[Tensor],
) -> dict[str, Any]:
    """Train the learned parameters of a model that was just switched to a stage, in place, except `fixed` ones.

    In distributed training all processes must call it, and end with the same parameters.

    Returns:
        "steps", and the mean loss of the first and of the last steps as "first_loss" and "last_loss".

    Raises:
        UnsupportedAttentionError: the batches can be read only once, there are none, the stage computes all of them
            exactly, or the options have a second stage.
        DivergedError: a loss was not finite.
    """
    if isinstance(batches, Iterator) or options.finetuning is not None:
        raise UnsupportedAttentionError(
            f"{stage.attention!r} is to be distilled, layer by layer, from batches that a resumed training can read "
            "again: give a list or a DataLoader, no iterator, and leave out options.finetuning"
        )
    with _separate_random_state(options.seed):
        stream = batch_stream(batches, options.seed, stage.distill)
        distillation = Distillation(model, stage.distill, "output", options, teacher, fixed)
        distillation.title = f"distillation of {stage.attention}"
        losses = distillation.run(stream, options.on_step, show_progress=options.show_progress)
    count = min(WINDOW, max(1, len(losses) // 5))
    first, last = statistics.fmean(losses[:count]), statistics.fmean(losses[-count:])
    return {"steps": stage.distill, "first_loss": first, "last_loss": last}


@contextlib.contextmanager
def _separate_random_state(seed: int) -> Iterator[None]:
    """Within the context the generators from which data sets and collators draw depend on the seed only."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            random.seed(seed)
            np.random.seed(seed % 2**32)
            # Not `torch.manual_seed`, which would also seed the generators of accelerators.
            torch.default_generator.manual_seed(seed)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def training_batches(
    dataset: Any, collate: Callable[[list[Any]], Batch], batch_size: int, process_index: int = 0, num_processes: int = 1
) -> Iterable[Batch]:
    """Batches of a training set, read by index, so that the loader of the training and its sampler are not disturbed.

    The samples of a batch are spread evenly over the data set, which may be sorted. The processes of a distributed
    training get different batches.

    Raises:
        UnsupportedAttentionError: the data set can only be iterated.
    """
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise UnsupportedAttentionError(
            f"a stage is to be distilled, but the training set ({type(dataset).__name__}) can only be iterated, which "
            "the training does: give other batches, with UptrainingCallback(schedule, distillation_batches=...)"
        )
    count = max(1, len(dataset) // batch_size)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()[process_index::num_processes]
    samples = [list(range(first, len(dataset) // count * count, count)) for first in order]
    return DataLoader(dataset, batch_sampler=samples, collate_fn=collate)


def log_entries(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record of a switch as entries of a training's log, without its step."""
    names = {"uptraining_from": record["from"], "uptraining_stage": record["to"]}
    return names | {f"distillation_{name}": value for name, value in (record["distillation"] or {}).items()}
