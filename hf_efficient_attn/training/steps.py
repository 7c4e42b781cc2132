"""Training one batch at a time: what both stages of a distillation have in common, and batches without end."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.capture import Batch
from hf_efficient_attn.integration.layers import Layer
from hf_efficient_attn.integration.learned import LearnedParameters

# Steps whose mean loss decides which parameters are the best so far.
WINDOW = 20
# Steps after which a training is refused whose batches trained nothing.
_PATIENCE = 8


class DivergedError(UnsupportedAttentionError):
    """A loss was not finite. The model has the best parameters until then."""


class LayerLoss(NamedTuple):
    """A loss before a step: the number or name of the layer, the name of what the loss is of, and its value."""

    layer: Layer | None
    name: str
    loss: float


OnStep = Callable[[int, Sequence[LayerLoss]], None]


class Training:
    """Trains some parameters. The values at the end of the steps with the smallest mean loss are kept in reserve.

    A subclass has `_backward`, which adds gradients and returns the losses, none if a batch trains nothing; `measure`,
    which returns the errors on a batch, without training; and `finish`, which gives the model the trained parameters.

    Attributes:
        title, key: what the progress bar and reports call the stage.
        max_norm: the largest norm of the gradients.
        trained: the parameters.
        num_steps, step_number: the number of steps of the whole training, and so far.
    """

    title: str
    key: str
    max_norm = math.inf
    _backward: Callable[[Batch], list[LayerLoss]]
    measure: Callable[[Batch], list[LayerLoss]]
    finish: Callable[[], None]

    def __init__(self, trained: list[Tensor], optimizer: Optimizer, schedule: LambdaLR, num_steps: int) -> None:
        self.trained, self.num_steps, self.step_number = trained, num_steps, 0
        self._optimizer, self._schedule = optimizer, schedule
        # The sum of the losses in the present window, the smallest sum, and the parameters at its end.
        self._sum, self._least, self._best = 0.0, math.inf, _copies(trained)

    def step(self, batch: Batch) -> list[LayerLoss]:
        """Train on one batch. Returns the losses before the step; none if the batch trained nothing.

        If a loss is not finite, `DivergedError` is raised, and the parameters are the best ones so far.
        """
        self._optimizer.zero_grad()
        losses = self._backward(batch)
        mean = torch.tensor([statistics.fmean(one.loss for one in losses) if losses else 0.0], dtype=torch.float32)
        if world_size() > 1:
            # All processes stop in the same step, and choose the same best parameters. Every process must take part,
            # also if its batch trained nothing.
            mean = mean_over_processes(mean.to(self.trained[0].device))
            for p in self.trained:
                p.grad = mean_over_processes(torch.zeros_like(p) if p.grad is None else p.grad)
        if not mean.isfinite():
            self._set(self._best)
            names = [one.name for one in losses if not math.isfinite(one.loss)]
            raise DivergedError(
                f"the loss of {names[0] if names else 'another process'} is not finite in step {self.step_number + 1} "
                f"of the {self.title}: use a smaller learning rate. The model keeps the best parameters so far"
            )
        torch.nn.utils.clip_grad_norm_(self.trained, self.max_norm)
        self._optimizer.step()
        self._schedule.step()
        self.step_number += 1
        self._sum += mean.item()
        if self.step_number % WINDOW == 0:
            if self._sum < self._least:
                self._least, self._best = self._sum, _copies(self.trained)
            self._sum = 0.0
        return losses

    def run(self, stream: Iterator[Batch], on_step: OnStep | None = None, *, show_progress: bool = True) -> list[float]:
        """Take the steps that remain, with a progress bar. The model then has the parameters, however this ends.

        Returns the mean of the losses in each of the steps that trained something. First batches that train nothing,
        and too few batches, are refused.
        """
        means: list[float] = []
        first, is_hidden = self.step_number, None if show_progress and process_rank() == 0 else True
        try:
            with tqdm(None, self.title, self.num_steps, initial=first, disable=is_hidden) as bar:
                for number, batch in enumerate(islice(stream, self.num_steps - first), start=first + 1):
                    losses = self.step(batch)
                    if losses:
                        means.append(statistics.fmean(one.loss for one in losses))
                        bar.set_postfix(loss=f"{means[-1]:.3f}", refresh=False)
                    elif not means and number >= min(first + _PATIENCE, self.num_steps):
                        raise UnsupportedAttentionError(
                            "the batches train nothing: no converted layer was called, or the sequences are within the "
                            "budget of the method, which computes them exactly: give longer sequences or a smaller "
                            "budget"
                        )
                    bar.update()
                    if on_step is not None:
                        on_step(number, losses)
        finally:
            self.finish()
        return means

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to continue bit for bit: tensors, numbers and strings."""
        return {
            "step": self.step_number,
            "trained": _copies(self.trained),
            "window": (self._sum, self._least, self._best),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict` of a training of the same model with the same arguments.

        The number of steps can be larger; the learning rate then follows the schedule of the new number.
        """
        self._set(state["trained"])
        self.step_number, (self._sum, self._least, self._best) = state["step"], state["window"]
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        schedule, groups = self._schedule, self._optimizer.param_groups
        for group, rate, share in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
            group["lr"] = rate * share(schedule.last_epoch)

    @torch.no_grad()
    def _set(self, values: list[Tensor]) -> None:
        for p, value in zip(self.trained, values, strict=True):
            p.copy_(value)


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    return [x.detach().clone() for x in tensors]


def batch_stream(batches: Iterable[Batch], seed: int, num_steps: int) -> Iterator[Batch]:
    """Batches without end, the same in every call with the same arguments. None at all, or only one, are refused."""
    if isinstance(batches, Iterator):
        batches = list(islice(batches, num_steps))
    if isinstance(batches, Sequence):
        check_count(len(batches))
        yield from shuffled(batches, seed)
    while True:
        count = 0
        for count, batch in enumerate(batches, start=1):  # noqa: B007 (the number of the last one)
            yield batch
        check_count(count)


def shuffled(items: Sequence[Any], seed: int) -> Iterator[Any]:
    """The items of a sequence in a random order, and without end: in each epoch in another order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for index in torch.randperm(len(items), generator=generator).tolist():
            yield items[index]


def check_count(count: int) -> None:
    """Refuse no batches at all, or only one."""
    if count < 2:
        raise UnsupportedAttentionError(
            f"there is {'a single' if count else 'no'} batch, and the learned parameters would fit one batch without "
            "generalising: give at least two, better twenty or more, of the kind of data that the model is used on"
        )


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and `torch.compile`."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = cast("nn.Module", model.module if isinstance(model, DistributedDataParallel) else model._orig_mod)
    return model


def learned_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that the attention methods of a model learn, each once, by name."""
    inner = unwrap(model)
    ours = {id(p) for module in inner.modules() if isinstance(module, LearnedParameters) for p in module.parameters()}
    return {name: p for name, p in inner.named_parameters() if id(p) in ours}


def world_size() -> int:
    """The number of processes of a distributed training."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def process_rank() -> int:
    """The number of this process, of which 0 writes all files."""
    return torch.distributed.get_rank() if world_size() > 1 else 0


def wait_for_processes() -> None:
    """Wait until all processes have come here."""
    if world_size() > 1:
        torch.distributed.barrier()


def mean_over_processes(x: Tensor) -> Tensor:
    """The mean of a tensor over the processes, in place."""
    torch.distributed.all_reduce(x)
    return x / world_size()
