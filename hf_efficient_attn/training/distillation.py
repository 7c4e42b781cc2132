"""Distillation of attention, layer by layer: the learned parameters of a method imitate the model's exact attention.

The model computes exact attention on batches of unlabelled inputs. In each call of a converted layer, the method
computes the same queries, keys and values, and the layer's learned parameters follow the gradient of its loss
(`attention_loss`). This is the attention transfer of LoLCATs (Zhang et al., ICLR 2025, section 3.1) and the
distillation of Hedgehog (Zhang et al., ICLR 2024, section 4.2). All layers are trained in one pass. The gradients of a
layer end at its inputs, so that the activations of only one layer are in memory.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_efficient_attn.errors import KnownFields, UnsupportedAttentionError, shown
from hf_efficient_attn.evaluation.capture import Batch, Call, capture_attention, forward
from hf_efficient_attn.integration.layers import Layer
from hf_efficient_attn.integration.learned import LearnedParameters, learned_of
from hf_efficient_attn.integration.models import attention_modules, transformers_models
from hf_efficient_attn.methods import MethodConfig
from hf_efficient_attn.training.attention_loss import WINDOW, DivergedError, backward, check_loss, squared_error
from hf_efficient_attn.training.finetuning import FinetuningOptions, check_rate


class LayerLoss(NamedTuple):
    """The loss of one layer in one step.

    Attributes:
        layer: the layer's number or name.
        name: the name of its attention module in the model.
        loss: the loss before the step.
    """

    layer: Layer | None
    name: str
    loss: float


OnStep = Callable[[int, Sequence[LayerLoss]], None]
Capture = Callable[[nn.Module, Callable[[Call], None]], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class DistillationOptions(KnownFields):
    """How `hea.distill` trains.

    Attributes:
        learning_rate: of AdamW, without weight decay; constant for half of the steps, then falling to 0 linearly. It is
            meant for feature maps. Parameters that start from smaller values, such as tables that contract tokens, have
            a smaller one, down to a tenth.
        seed: the order of the batches, if they are a sequence.
        on_step: called after each step with its number, from 1, and the loss of every layer; in the second stage with
            a single loss, whose layer is None.
        reduce: averages a tensor (a gradient, or losses) over the processes of a distributed training, for example
            `functools.partial(accelerator.reduce, reduction="mean")`; None for one process.
        finetuning: the second stage, in which the converted model imitates the outputs of the exact one; None for none.
        show_progress: whether to show progress bars, if stderr is a terminal.
    """

    learning_rate: float = 2e-2
    seed: int = 0
    on_step: OnStep | None = None
    reduce: Callable[[Tensor], Tensor] | None = None
    finetuning: FinetuningOptions | None = None
    show_progress: bool = True

    def __post_init__(self) -> None:
        check_rate("learning_rate", self.learning_rate)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise UnsupportedAttentionError(f"seed={shown(self.seed)} must be an integer")
        if not isinstance(self.finetuning, (FinetuningOptions, NoneType)):
            raise UnsupportedAttentionError(
                f"finetuning must be hea.FinetuningOptions(steps=...) or None, not {shown(self.finetuning)}"
            )
        for name in ("on_step", "reduce"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise UnsupportedAttentionError(f"{name} must be a function or None, not {shown(getattr(self, name))}")


class _Group:
    """The learned parameters of a layer, or those that several layers share.

    Args:
        learned: the module that holds them.
        fixed: those of them that stay as they are.

    Attributes:
        learned: as above.
        trained: copies of the others in float32 or float64, which are trained, by name.
        loss: sum of the losses of the current window of steps.
        best: the smallest mean loss of a window, and the parameters at its end.
    """

    def __init__(self, learned: LearnedParameters, fixed: Collection[Tensor] = ()) -> None:
        ids = {id(p) for p in fixed}
        self.learned = learned
        self.trained = {name: _copy(p) for name, p in learned.tensors().items() if id(p) not in ids}
        self.loss = 0.0
        self.best: tuple[float, dict[str, Tensor]] = (float("inf"), self.copy())

    @property
    def device(self) -> torch.device:
        """The device of the trained parameters."""
        return next(iter(self.trained.values())).device

    def copy(self) -> dict[str, Tensor]:
        """Copies of the trained parameters."""
        return {name: p.detach().clone() for name, p in self.trained.items()}

    def parameters(self) -> dict[str, Tensor]:
        """All parameters in the dtype of the model, as the method takes them."""
        return {name: self.trained.get(name, p.detach()).to(p.dtype) for name, p in self.learned.tensors().items()}

    @torch.no_grad()
    def store(self, values: Mapping[str, Tensor]) -> None:
        """Write values into the model."""
        tensors = self.learned.tensors()
        for name in self.trained:
            tensors[name].copy_(values[name])


def _copy(parameter: Tensor) -> Tensor:
    """A copy to train, in float32 or float64."""
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return parameter.detach().to(wide, copy=True).requires_grad_()


def _share(parameter: Tensor) -> float:
    """Learning rate of a parameter as a share of the option, for its start values.

    A step of Adam is about as large as the learning rate, whatever the gradient is. For the initial
    map of a head with 32 dimensions the share is 1, for averages of two tokens out of 512 it is .16.
    """
    return min(1.0, max(0.1, 5.0 * parameter.detach().square().mean().sqrt().item()))


class Distillation:
    """Trains the learned parameters of a converted model's layers, one batch at a time.

    Args:
        model: a converted model, whose other parameters stay as they are.
        num_steps: the number of steps of the whole training, for the learning rate.
        loss: one of `attention_loss.LOSSES`.
        options: see `DistillationOptions`.
        capture: passes the calls of all layers to a function, with the output to imitate as `exact`; that of exact
            attention by default.
        fixed: learned parameters that stay as they are.

    Attributes:
        step_number: the number of steps so far.

    Raises:
        UnsupportedAttentionError: the loss is unknown, or no layer has learned parameters to train.
    """

    def __init__(
        self,
        model: nn.Module,
        num_steps: int,
        loss: str = "output",
        options: DistillationOptions | None = None,
        capture: Capture = capture_attention,
        fixed: Collection[Tensor] = (),
    ) -> None:
        check_loss(loss)
        self.model, self.num_steps, self.loss, self.capture = model, num_steps, loss, capture
        self.options = options or DistillationOptions()
        self.step_number = 0
        self._groups: dict[LearnedParameters, _Group] = {}
        self._names: dict[LearnedParameters, str] = {}
        for root in transformers_models(model):
            for module, location, *_ in attention_modules(root):
                learned = learned_of(module)
                if learned is not None and learned.holder not in self._groups:
                    group = _Group(learned.holder, fixed)
                    if group.trained:
                        self._groups[learned.holder], self._names[learned.holder] = group, location.name
        if not self._groups:
            raise UnsupportedAttentionError("no layer of the model has learned parameters to distill")
        trained = [p for group in self._groups.values() for p in group.trained.values()]
        settings = [{"params": [p], "share": _share(p)} for p in trained]
        self._optimizer = torch.optim.AdamW(settings, lr=self.options.learning_rate, weight_decay=0.0)
        # Number of tokens -> why batches of so many tokens trained nothing.
        self._why_idle: dict[int, str] = {}

    def step(self, batch: Batch) -> list[LayerLoss]:
        """Train all layers on one batch.

        Returns:
            The loss of each layer before the step. Layers that compute this batch exactly are missing.

        Raises:
            UnsupportedAttentionError: a loss is not finite. The model then has the best parameters so far.
        """
        losses: list[LayerLoss] = []
        sums = dict.fromkeys(self._names.values(), 0.0)

        def visit(call: Call) -> None:
            group, method = self._trained_in(call)
            if group is None or method is None:
                return
            with torch.enable_grad():
                loss = backward(call, method, group.parameters(), self.loss)
            losses.append(LayerLoss(call.layer, call.name, loss))
            sums[self._names[group.learned]] += loss

        self._optimizer.zero_grad()
        self._run(batch, visit)
        # All processes stop in the same step, and choose the same best parameters.
        means = torch.tensor(list(sums.values()), device=next(iter(self._groups.values())).device)
        if self.options.reduce is not None:
            means = self.options.reduce(means)
        for name, mean in zip(sums, means.tolist(), strict=True):
            if not math.isfinite(mean):
                self._stop(next((x.name for x in losses if not math.isfinite(x.loss)), name))
        for group, mean in zip(self._groups.values(), means.tolist(), strict=True):
            group.loss += mean
        rate = self.options.learning_rate * min(1.0, 2 * (self.num_steps - self.step_number) / self.num_steps)
        for settings in self._optimizer.param_groups:
            settings["lr"] = rate * settings["share"]
        if self.options.reduce is not None:
            # Every process must take part, also if its batch trained nothing.
            for p in (p for group in self._groups.values() for p in group.trained.values()):
                p.grad = self.options.reduce(torch.zeros_like(p) if p.grad is None else p.grad)
        self._optimizer.step()
        self.step_number += 1
        if self.step_number % WINDOW == 0:
            for group in self._groups.values():
                if group.loss < group.best[0]:
                    group.best = group.loss, group.copy()
                group.loss = 0.0
        return losses

    def measure(self, batch: Batch) -> list[LayerLoss]:
        """The relative error |out - exact| / |exact| of each layer on a batch, in the Frobenius norm, without training.

        It is the root of the loss "output": the mean over sequences and heads of squared errors.
        """
        errors: list[LayerLoss] = []

        def visit(call: Call) -> None:
            group, method = self._trained_in(call)
            if group is None or method is None:
                return
            error, exact = squared_error(call.compute(method, group.parameters()), call)
            error = (error / exact)[exact > 0]
            errors.append(LayerLoss(call.layer, call.name, error.mean().sqrt().item()))

        self._run(batch, visit)
        return errors

    def store(self) -> None:
        """Write the trained parameters into the model."""
        for group in self._groups.values():
            group.store(group.trained)

    @property
    def why_idle(self) -> str:
        """Why the batches so far trained nothing, for the longest of them."""
        return self._why_idle[max(self._why_idle)] if self._why_idle else "no converted layer computed attention"

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to continue bit for bit: tensors, numbers and strings."""
        groups = {
            self._names[holder]: {"trained": group.copy(), "loss": group.loss, "best": group.best}
            for holder, group in self._groups.items()
        }
        return {"step": self.step_number, "groups": groups, "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict` of a distillation of the same model with the same arguments.

        Raises:
            UnsupportedAttentionError: the state belongs to other layers or parameters.
        """
        shapes = {
            self._names[holder]: {name: p.shape for name, p in group.trained.items()}
            for holder, group in self._groups.items()
        }
        found = {name: {k: p.shape for k, p in group["trained"].items()} for name, group in state["groups"].items()}
        if shapes != found:
            raise UnsupportedAttentionError(
                "the saved state belongs to a distillation with other layers or learned parameters: continue it with "
                "the model and the arguments that it began with, or start again elsewhere"
            )
        for holder, group in self._groups.items():
            saved = state["groups"][self._names[holder]]
            with torch.no_grad():
                for name, p in group.trained.items():
                    p.copy_(saved["trained"][name])
            group.loss, group.best = saved["loss"], tuple(saved["best"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.step_number = state["step"]

    def _run(self, batch: Batch, visit: Callable[[Call], None]) -> None:
        with self.capture(self.model, visit):
            forward(self.model, _without_head(batch, self.model))

    def _trained_in(self, call: Call) -> tuple[_Group | None, MethodConfig | None]:
        """The parameters and the method of a call; None if the converted model computes it exactly."""
        learned = learned_of(call.module)
        if learned is None or learned.holder not in self._groups or call.why_exact(learned.method) is not None:
            return None, None
        method, tokens = learned.method, call.tokens
        if call.key.shape[2] <= method.exact_length:
            self._why_idle[tokens] = (
                f"sequences of {tokens} tokens are within the budget of {method.method}, which computes up to "
                f"{method.exact_length} tokens exactly, so that there is nothing to learn: give longer sequences or a "
                "smaller budget"
            )
            return None, None
        return self._groups[learned.holder], method

    def _stop(self, name: str) -> None:
        """Give the model its best parameters, and raise because of a layer's loss."""
        for group in self._groups.values():
            group.store(group.best[1])
        raise DivergedError(
            f"the loss of {name} is not finite in step {self.step_number + 1}", self.options.learning_rate
        )


def _without_head(batch: Batch, model: nn.Module) -> Batch:
    """A batch without what only the loss of a task needs. Encoder-decoder models make inputs of their labels."""
    has_decoder = any(root.config.is_encoder_decoder for root in transformers_models(model))
    if isinstance(batch, Mapping) and (not has_decoder or "decoder_input_ids" in batch):
        return {name: x for name, x in batch.items() if name not in ("labels", "label", "label_ids")}
    return batch
