"""Training one batch at a time: what both stages of a distillation have in common."""

import abc
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm

from hf_efficient_attn.errors import UnsupportedAttentionError, shown
from hf_efficient_attn.evaluation.capture import Batch
from hf_efficient_attn.integration.layers import Layer
from hf_efficient_attn.integration.learned import LearnedParameters

# Of type DistillationOptions, which is defined later.
OptionsT = TypeVar("OptionsT", bound=Any)
# Steps whose mean loss decides which parameters are the best so far.
WINDOW = 20
# Steps after which a training is refused whose batches trained nothing.
_PATIENCE = 8


class DivergedError(UnsupportedAttentionError):
    """A loss was not finite. The model has the best parameters until then.

    Attributes:
        what: which loss, and in which step.
        learning_rate: the one that was too large.
    """

    def __init__(self, what: str, learning_rate: float) -> None:
        super().__init__(
            f"{what}. The model keeps the best parameters so far: use a smaller learning rate than {learning_rate:g}"
        )
        self.what, self.learning_rate = what, learning_rate


class LayerLoss(NamedTuple):
    """The loss of one layer in one step: its number or name, the name of its attention module, and the loss before."""

    layer: Layer | None
    name: str
    loss: float


OnStep = Callable[[int, Sequence[LayerLoss]], None]
Reduce = Callable[[Tensor], Tensor]
# Parameters by name, in groups.
Groups = dict[str, dict[str, Tensor]]


class Training(abc.ABC):
    """Trains groups of parameters, of which each keeps the values with the smallest loss.

    Attributes:
        title: what the progress bar says.
        max_norm: the largest norm of the gradients.
        groups: the parameters.
        trained: the parameters in a list.
        num_steps: the number of steps of the whole training.
        step_number: the number of steps so far.
        learning_rate: the user's, for messages.
        reduce: averages a tensor over all processes; None for one.
        idle: why the last batch trained nothing, if it did not.
    """

    title: str
    max_norm = math.inf
    learning_rate: float
    reduce: Reduce | None
    idle = ""

    def __init__(self, groups: Groups, optimizer: Optimizer, schedule: LRScheduler, num_steps: int) -> None:
        self.groups, self.num_steps, self.step_number = groups, num_steps, 0
        self.trained = [p for group in groups.values() for p in group.values()]
        self._optimizer, self._schedule = optimizer, schedule
        # For every group the sum of the losses in the present window, the smallest sum, and the values at its end.
        self._sums, self._least = dict.fromkeys(groups, 0.0), dict.fromkeys(groups, math.inf)
        self._best = _copies(groups)

    @abc.abstractmethod
    def _backward(self, batch: Batch) -> tuple[list[LayerLoss], Tensor]:
        """Add gradients.

        Returns:
            The losses to report, and the losses (groups * n) of which the mean of every n is the loss of a group.
        """

    @abc.abstractmethod
    def _name_of_loss(self, index: int) -> str:
        """What one of the losses (groups * n) is the loss of, for messages."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Give the model the trained parameters."""

    def abandon(self) -> None:  # noqa: B027 (optional)
        """Undo what the training changed in the model."""

    def step(self, batch: Batch) -> list[LayerLoss]:
        """Train on one batch.

        Returns:
            The losses before the step; none if the batch trained nothing.

        Raises:
            DivergedError: a loss is not finite. The model then has the best parameters so far.
        """
        self._optimizer.zero_grad()
        losses, means = self._backward(batch)
        if self.reduce is not None:
            # All processes stop in the same step, and choose the same best parameters. Every process must take part,
            # also if its batch trained nothing.
            means = self.reduce(means)
            for p in self.trained:
                p.grad = self.reduce(torch.zeros_like(p) if p.grad is None else p.grad)
        finite = means.isfinite().tolist()
        if not all(finite):
            self._set(self._best)
            self.finish()
            what = f"{self._name_of_loss(finite.index(False))} is not finite in step {self.step_number + 1}"
            raise DivergedError(f"the loss of {what} of the {self.title}", self.learning_rate)
        if self.max_norm < math.inf:
            torch.nn.utils.clip_grad_norm_(self.trained, self.max_norm)
        self._optimizer.step()
        self._schedule.step()
        self.step_number += 1
        for name, loss in zip(self.groups, means.view(len(self.groups), -1).mean(1).tolist(), strict=True):
            self._sums[name] += loss
        if self.step_number % WINDOW == 0:
            better = {name: self.groups[name] for name, loss in self._sums.items() if loss < self._least[name]}
            self._least |= {name: self._sums[name] for name in better}
            self._best |= _copies(better)
            self._sums = dict.fromkeys(self.groups, 0.0)
        return losses

    def run(self, stream: Iterator[Batch], on_step: OnStep | None = None, *, show_progress: bool = True) -> list[float]:
        """Take the steps that remain, with a progress bar; the model then has the parameters.

        Returns:
            The mean of the losses in each of the steps that trained something.

        Raises:
            UnsupportedAttentionError: the first batches train nothing.
            DivergedError: see `step`.
            KeyboardInterrupt: the user interrupted the training. The model has the parameters of the last step.
        """
        means: list[float] = []
        first = self.step_number
        try:
            with tqdm(None, self.title, self.num_steps, initial=first, disable=None if show_progress else True) as bar:
                for number, batch in enumerate(islice(stream, self.num_steps - first), start=first + 1):
                    losses = self.step(batch)
                    if losses:
                        means.append(statistics.fmean(one.loss for one in losses))
                        bar.set_postfix(loss=f"{means[-1]:.3f}", refresh=False)
                    elif not means and number >= min(first + _PATIENCE, self.num_steps):
                        raise UnsupportedAttentionError(self.idle)
                    bar.update()
                    if on_step is not None:
                        on_step(number, losses)
        except DivergedError:
            raise
        except KeyboardInterrupt:
            self.finish()
            raise
        except BaseException:
            self.abandon()
            raise
        self.finish()
        return means

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to continue bit for bit: tensors, numbers and strings."""
        return {
            "step": self.step_number,
            "trained": _copies(self.groups),
            "windows": (self._sums, self._least, self._best),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict` of a training of the same model with the same arguments."""
        self._set(state["trained"])
        self.step_number = state["step"]
        self._sums, self._least, self._best = (dict(values) for values in state["windows"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])

    @torch.no_grad()
    def _set(self, values: Groups) -> None:
        for name, group in self.groups.items():
            for key, p in group.items():
                p.copy_(values[name][key])


def _copies(groups: Groups) -> Groups:
    return {name: {key: p.detach().clone() for key, p in group.items()} for name, group in groups.items()}


def over_processes(options: OptionsT) -> OptionsT:
    """Options of a distillation that average over all processes unless `reduce` is given; one shows its progress."""
    if world_size() == 1:
        return options
    is_shown = options.show_progress and process_rank() == 0
    return dataclasses.replace(options, reduce=options.reduce or mean_over_processes, show_progress=is_shown)


def check_positive(name: str, value: object, *, is_count: bool = True) -> None:
    """Refuse a number of something that is not an integer of 1 or more, or another number that is not above 0."""
    if isinstance(value, bool) or not isinstance(value, int if is_count else (int, float)) or not value > 0:
        what = "1 or more, an integer" if is_count else "a number above 0"
        raise UnsupportedAttentionError(f"{name}={shown(value)} must be {what}")


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and `torch.compile`."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        else:
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


def wait_for_all() -> None:
    """Wait until all processes are here."""
    if world_size() > 1:
        torch.distributed.barrier()


def mean_over_processes(x: Tensor) -> Tensor:
    """The mean of a tensor over the processes, in place."""
    torch.distributed.all_reduce(x)
    return x / world_size()
