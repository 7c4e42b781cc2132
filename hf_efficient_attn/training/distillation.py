"""Distillation of attention, layer by layer: the learned parameters of a method imitate the model's exact attention.

The model computes exact attention on batches of unlabelled inputs. In each call of a converted layer, the method
computes the same queries, keys and values, and the layer's learned parameters follow the gradient of its loss
(`attention_loss`). This is the attention transfer of LoLCATs (Zhang et al., ICLR 2025, section 3.1) and the
distillation of Hedgehog (Zhang et al., ICLR 2024, section 4.2). All layers are trained in one pass. The gradients of a
layer end at its inputs, so that the activations of only one layer are in memory.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from hf_efficient_attn.conversion import convert
from hf_efficient_attn.errors import KnownFields, UnsupportedAttentionError, shown
from hf_efficient_attn.evaluation.capture import Batch, Call, capture_attention, forward
from hf_efficient_attn.evaluation.progress import partial_result
from hf_efficient_attn.integration.learned import LearnedParameters, learned_of
from hf_efficient_attn.integration.models import attention_modules, snapshot, transformers_models
from hf_efficient_attn.integration.settings import EfficientAttentionConfig
from hf_efficient_attn.methods import MethodConfig
from hf_efficient_attn.training.attention_loss import backward, check_loss, squared_error
from hf_efficient_attn.training.batches import batch_stream
from hf_efficient_attn.training.finetuning import Finetuning, FinetuningOptions, check_rate, make_teacher
from hf_efficient_attn.training.steps import DivergedError, Groups, LayerLoss, OnStep, Reduce, Training
from hf_efficient_attn.training.teachability import refuse_converted, refuse_nothing_to_learn

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
    reduce: Reduce | None = None
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


def distill(
    model: nn.Module,
    method_or_config: str | MethodConfig | EfficientAttentionConfig | dict[str, Any],
    batches: Iterable[Batch],
    *,
    steps: int,
    layers: Sequence[Any] | None = None,
    loss: str = "output",
    options: DistillationOptions | None = None,
    **hyperparameters: Any,
) -> nn.Module:
    """Convert a model in place and train the method's learned parameters to imitate the model's exact attention.

    Only the learned parameters of the method change: feature maps, projections, proposals, convolutions. No labels are
    needed. The training takes as long as `steps` forward passes of exact attention and a forward and backward pass of
    the method in each layer, and the memory of one layer's activations besides the model.

    Args:
        model: a Transformers model with exact attention, or a module that contains some.
        method_or_config: as in `hea.convert`.
        batches: mappings of the model's arguments as tokenizers and data loaders give them (`attention_mask` included),
            or tensors of its main input; at least two. A sequence is read in a random order for as many epochs as the
            steps need, any other iterable in its own order; an iterator is held in memory.
        steps: the number of batches to train on.
        layers: as in `hea.convert`.
        loss: "output" (normalised squares of the output's error), "weights" (cross entropy of the attention weights,
            which costs about N / 128 times as much for N tokens) or "both".
        options: learning rate and others.
        **hyperparameters: of the method, as in `hea.convert`, for example `feature_map="hedgehog"`.

    Returns:
        The same model, converted. If the user interrupts the training it is converted as well, with the parameters of
        the last step.

    Raises:
        UnsupportedAttentionError: the model is converted already; the method has nothing to learn; there are no batches
            or there is only one; the method computes all sequences exactly; an unknown loss; and as in `hea.convert`.
            The model is then unchanged.
        DivergedError: a loss was not finite. The model is converted, with the best parameters until then.

    Example:
        >>> batches = [tokenizer(text, return_tensors="pt") for text in texts]
        >>> hea.distill(model, "linear", batches, steps=300, feature_map="hedgehog")
        >>> model.save_pretrained("converted")
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise UnsupportedAttentionError(f"steps={steps!r} must be an integer of 1 or more")
    check_loss(loss)
    options = _check_options(options, hyperparameters)
    refuse_converted(model)
    stream = batch_stream(batches, options.seed, steps)
    before = snapshot(transformers_models(model))
    teacher = None if options.finetuning is None else make_teacher(model, options.finetuning)
    try:
        convert(model, method_or_config, layers=layers, **hyperparameters)
        refuse_nothing_to_learn(model)
        distillation = Distillation(model, steps, loss, options)
        with partial_result(lambda: model):
            distillation.run(stream, options.on_step, show_progress=options.show_progress)
            if options.finetuning is not None:
                finetuning = Finetuning(model, teacher, options.finetuning, options.reduce)
                finetuning.run(stream, options.on_step, show_progress=options.show_progress)
    except (DivergedError, KeyboardInterrupt):
        raise
    except BaseException:
        before.restore()
        raise
    return model


def _check_options(options: object, hyperparameters: Mapping[str, Any]) -> DistillationOptions:
    """The options, after a check that they are not given as a dictionary or among the hyperparameters."""
    if not isinstance(options, (DistillationOptions, NoneType)):
        raise UnsupportedAttentionError(
            f"options must be hea.DistillationOptions(learning_rate=...) or None, not {shown(options)}"
        )
    for spec in fields(DistillationOptions):
        if spec.name in hyperparameters and spec.name != "seed":  # methods have a seed of their own
            raise UnsupportedAttentionError(
                f"{spec.name!r} is no hyperparameter of a method: give options=hea.DistillationOptions({spec.name}=...)"
            )
    return options or DistillationOptions()


class Distillation(Training):
    """Trains the learned parameters of a converted model's layers, one batch at a time.

    The parameters are trained as copies in float32 or float64, and each layer keeps the best ones of its own.

    Args:
        model: a converted model, whose other parameters stay as they are.
        num_steps: the number of steps of the whole training.
        loss: one of `attention_loss.LOSSES`.
        options: the learning rate and others.
        capture: passes the calls of all layers to a function, with the output to imitate as `exact`; that of exact
            attention by default.
        fixed: learned parameters that stay as they are.

    Raises:
        UnsupportedAttentionError: the loss is unknown, or no layer has learned parameters to train.
    """

    title = "distillation"

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
        self.model, self.loss, self._capture, self.options = model, loss, capture, options or DistillationOptions()
        ids = {id(p) for p in fixed}
        # What holds learned parameters, of one layer or of several that share them, and the names of the groups.
        self._names: dict[LearnedParameters, str] = {}
        groups: Groups = {}
        for root in transformers_models(model):
            for module, location, *_ in attention_modules(root):
                learned = learned_of(module)
                if learned is None or learned in self._names:
                    continue
                trained = {name: _copy(p) for name, p in learned.tensors().items() if id(p) not in ids}
                if trained:
                    self._names[learned], groups[location.name] = location.name, trained
        if not groups:
            raise UnsupportedAttentionError("no layer of the model has learned parameters to distill")
        rate = self.options.learning_rate
        settings = [{"params": [p], "lr": rate * _share(p)} for group in groups.values() for p in group.values()]
        optimizer = torch.optim.AdamW(settings, weight_decay=0.0)
        schedule = LambdaLR(optimizer, lambda step: min(1.0, 2 * (num_steps - step) / num_steps))
        super().__init__(groups, optimizer, schedule, num_steps, self.options.reduce)
        # Number of tokens -> why batches of so many tokens trained nothing.
        self._why_idle: dict[int, str] = {}

    def _backward(self, batch: Batch) -> tuple[list[LayerLoss], Tensor]:
        """The losses of the layers, without those that compute this batch exactly, and their sums by group."""
        losses: list[LayerLoss] = []
        sums = dict.fromkeys(self.groups, 0.0)

        def visit(call: Call, name: str, method: MethodConfig, parameters: dict[str, Tensor]) -> None:
            with torch.enable_grad():
                loss = backward(call, method, parameters, self.loss)
            losses.append(LayerLoss(call.layer, call.name, loss))
            sums[name] += loss

        self._visit(batch, visit)
        return losses, torch.tensor(list(sums.values()), device=self.trained[0].device)

    def measure(self, batch: Batch) -> list[LayerLoss]:
        """The relative error |out - exact| / |exact| of each layer on a batch, in the Frobenius norm, without training.

        It is the root of the loss "output": the mean over sequences and heads of squared errors.
        """
        errors: list[LayerLoss] = []

        def visit(call: Call, name: str, method: MethodConfig, parameters: dict[str, Tensor]) -> None:
            error, exact = squared_error(call.compute(method, parameters), call)
            error = (error / exact)[exact > 0]
            errors.append(LayerLoss(call.layer, call.name, error.mean().sqrt().item()))

        self._visit(batch, visit)
        return errors

    def finish(self) -> None:
        """Write the trained parameters into the model."""
        for holder, name in self._names.items():
            tensors = holder.tensors()
            with torch.no_grad():
                for key, p in self.groups[name].items():
                    tensors[key].copy_(p)

    def why_idle(self) -> str:
        """Why the batches so far trained nothing, for the longest of them."""
        return self._why_idle[max(self._why_idle)] if self._why_idle else "no converted layer computed attention"

    def _visit(self, batch: Batch, visit: Callable[[Call, str, MethodConfig, dict[str, Tensor]], None]) -> None:
        """Pass the calls that train something, with the name of the group, the method and all its parameters.

        The parameters have the dtype of the model.
        """

        def visit_call(call: Call) -> None:
            learned = learned_of(call.module)
            if learned is None or learned not in self._names or self._is_exact(call, learned.method):
                return
            name = self._names[learned]
            trained = self.groups[name]
            with torch.enable_grad():
                parameters = {key: trained.get(key, p.detach()).to(p.dtype) for key, p in learned.tensors().items()}
            visit(call, name, learned.method, parameters)

        with self._capture(self.model, visit_call):
            forward(self.model, _without_head(batch, self.model))

    def _is_exact(self, call: Call, method: MethodConfig) -> bool:
        """Whether the converted model computes a call exactly."""
        if call.why_exact(method) is not None:
            return True
        if call.key.shape[2] > method.exact_length:
            return False
        self._why_idle[call.tokens] = (
            f"sequences of {call.tokens} tokens are within the budget of {method.method}, which computes up to "
            f"{method.exact_length} tokens exactly, so that there is nothing to learn: give longer sequences or a "
            "smaller budget"
        )
        return True

    def _diverged(self, losses: Sequence[LayerLoss], finite: Tensor) -> DivergedError:
        found = [one.name for one in losses if not math.isfinite(one.loss)]
        found += [name for name, is_finite in zip(self.groups, finite.tolist(), strict=True) if not is_finite]
        what = f"the loss of {found[0]} is not finite in step {self.step_number + 1}"
        return DivergedError(what, self.options.learning_rate)


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


def _without_head(batch: Batch, model: nn.Module) -> Batch:
    """A batch without what only the loss of a task needs. Encoder-decoder models make inputs of their labels."""
    has_decoder = any(root.config.is_encoder_decoder for root in transformers_models(model))
    if isinstance(batch, Mapping) and (not has_decoder or "decoder_input_ids" in batch):
        return {name: x for name, x in batch.items() if name not in ("labels", "label", "label_ids")}
    return batch
