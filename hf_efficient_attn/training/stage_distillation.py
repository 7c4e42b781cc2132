"""Distillation at the start of a stage of up-training.

The new learned parameters of the stage imitate the attention that the model had before the switch: exact attention, or
the method of the stage before with the parameters that it had learned. The model computes that attention on batches of
training data, and each layer is trained on its queries, keys and values, as in `hea.distill`. Nothing is propagated
through the model. Parameters that the stage takes over from the one before are not trained: their values are part of
the attention to imitate, and their optimizer state belongs to these values.

A distillation depends only on the model, the batches and the options. It has random states of its own and restores the
global ones, so that a resumed training repeats it exactly.
"""

import contextlib
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.capture import Batch, Call, exact_output
from hf_efficient_attn.integration.learned import learned_of
from hf_efficient_attn.integration.models import attention_modules, transformers_models
from hf_efficient_attn.methods import MethodConfig
from hf_efficient_attn.training.batches import batch_stream
from hf_efficient_attn.training.distillation import Distillation, DistillationOptions
from hf_efficient_attn.training.stage import Stage
from hf_efficient_attn.training.steps import WINDOW


class FormerAttention:
    """The attention of a model before a switch. It remains valid if the model is switched to another one.

    Attributes:
        layers: attention module -> its method, None if it was exact, and its learned parameters.
        fixed: the parameters of the model that have taken over values of these when it was switched.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers: dict[nn.Module, tuple[MethodConfig | None, dict[str, Tensor]]] = {}
        self.fixed: list[Tensor] = []
        for one in (one for root in transformers_models(model) for one in attention_modules(root)):
            learned = learned_of(one.module)
            self.layers[one.module] = one.chosen, {} if learned is None else learned.tensors()

    def compute(self, call: Call) -> Tensor:
        """The output of this attention for the inputs of a call."""
        method, parameters = self.layers.get(call.module, (None, {}))
        if method is None or call.why_exact(method) is not None:
            return exact_output(call)
        # Parameters that the model no longer has did not move with it to another device.
        parameters = {name: p.detach().to(call.query.device) for name, p in parameters.items()}
        return call.compute(method, parameters or None)


def check_repeatable(batches: Iterable[Batch] | None, options: DistillationOptions | None) -> None:
    """Refuse batches that a resumed training could not read again, and a second stage of the distillation."""
    if isinstance(batches, Iterator):
        raise UnsupportedAttentionError(
            f"the batches for distillation are a {type(batches).__name__}, which can be read only once, but a resumed "
            "training must read the same ones again: give a list or a DataLoader"
        )
    if options is not None and options.finetuning is not None:
        raise UnsupportedAttentionError(
            "a stage of up-training is distilled layer by layer only, because the training itself is the second stage: "
            "leave out options.finetuning"
        )


def distill_stage(
    model: nn.Module, stage: Stage, former: FormerAttention, batches: Iterable[Batch], options: DistillationOptions
) -> dict[str, Any]:
    """Train the learned parameters of a model that was just switched to a stage, in place.

    In distributed training all processes must call it, and end with the same parameters.

    Returns:
        "steps", and the mean loss of the first and of the last steps as "first_loss" and "last_loss".

    Raises:
        UnsupportedAttentionError: there are no batches, the stage computes all of them exactly, or it has no new
            parameters.
        DivergedError: a loss was not finite.
    """
    with _separate_random_state(options.seed):
        stream = batch_stream(batches, options.seed, stage.distill)
        distillation = Distillation(model, stage.distill, "output", options, former.compute, former.fixed)
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
    """The record of a switch as entries of a training's log, without its step. Step 0 is that of the first stage."""
    names = {"uptraining_from": record["from"], "uptraining_stage": record["to"]}
    if record["step"] == 0:
        names = {"distilled_stage": record["to"]}
    return names | {f"distillation_{name}": value for name, value in (record["distillation"] or {}).items()}
