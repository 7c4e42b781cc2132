"""Distillation of attention, layer by layer: the learned parameters of a method imitate the model's exact attention.

The model computes exact attention on batches of unlabelled inputs. In each call of a converted layer, the method
computes the same queries, keys and values, and the layer's learned parameters follow the gradient of its loss
(`attention_loss`). This is the attention transfer of LoLCATs (Zhang et al., ICLR 2025, section 3.1) and the
distillation of Hedgehog (Zhang et al., ICLR 2024, section 4.2). All layers are trained in one pass. The gradients of a
layer end at its inputs, so that the activations of only one layer are in memory.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from hf_efficient_attn.conversion import convert
from hf_efficient_attn.errors import KnownFields, UnsupportedAttentionError, shown
from hf_efficient_attn.evaluation.capture import Batch, Call, capture_attention, exact_output, forward
from hf_efficient_attn.evaluation.progress import partial_result
from hf_efficient_attn.integration.configs import method_of
from hf_efficient_attn.integration.learned import LearnedParameters, learned_of
from hf_efficient_attn.integration.models import attention_modules, configs_of, snapshot, transformers_models
from hf_efficient_attn.integration.settings import EfficientAttentionConfig
from hf_efficient_attn.methods import MethodConfig, available_methods, learns, make_config, method_info
from hf_efficient_attn.training.attention_loss import backward, check_loss, relative_error
from hf_efficient_attn.training.batches import batch_stream
from hf_efficient_attn.training.finetuning import Finetuning, FinetuningOptions, make_teacher
from hf_efficient_attn.training.steps import DivergedError, LayerLoss, OnStep, Reduce, Training, check_positive

# A loss or an error of a call, for a method and all its parameters.
Loss = Callable[[Call, MethodConfig, Mapping[str, Tensor]], float]


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
        check_positive("learning_rate", self.learning_rate, is_count=False)
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
    check_positive("steps", steps)
    check_loss(loss)
    if not isinstance(options, (DistillationOptions, NoneType)):
        raise UnsupportedAttentionError(
            f"options must be hea.DistillationOptions(learning_rate=...) or None, not {shown(options)}"
        )
    for name in hyperparameters.keys() & {spec.name for spec in dataclasses.fields(DistillationOptions)} - {"seed"}:
        raise UnsupportedAttentionError(
            f"{name!r} is no hyperparameter of a method: give options=hea.DistillationOptions({name}=...)"
        )
    options = options or DistillationOptions()
    refuse_converted(model)
    stream = batch_stream(batches, options.seed, steps)
    before = snapshot(transformers_models(model))
    teacher = None if options.finetuning is None else make_teacher(model, options.finetuning)
    try:
        convert(model, method_or_config, layers=layers, **hyperparameters)
        with partial_result(lambda: model):
            for training in stages_of(model, teacher, steps, loss, options):
                training.run(stream, options.on_step, show_progress=options.show_progress)
    except (DivergedError, KeyboardInterrupt):
        raise
    except BaseException:
        before.restore()
        raise
    return model


class Distillation(Training):
    """Trains the learned parameters of a converted model's layers, one batch at a time.

    The parameters are trained as copies in float32 or float64, and each layer keeps the best ones of its own.

    Args:
        model: a converted model, whose other parameters stay as they are.
        num_steps: the number of steps of the whole training.
        loss: one of `attention_loss.LOSSES`.
        options: the learning rate and others.
        teacher: computes the output to imitate, for the inputs of a call.
        fixed: learned parameters that stay as they are.

    Raises:
        UnsupportedAttentionError: no layer has learned parameters to train.
    """

    title = "distillation"

    def __init__(
        self,
        model: nn.Module,
        num_steps: int,
        loss: str = "output",
        options: DistillationOptions | None = None,
        teacher: Callable[[Call], Tensor] = exact_output,
        fixed: Collection[Tensor] = (),
    ) -> None:
        options = options or DistillationOptions()
        self.model, self.learning_rate, self.reduce = model, options.learning_rate, options.reduce
        self._loss, self._teacher, ids = loss, teacher, {id(p) for p in fixed}
        # What holds the learned parameters of a layer, and the names of the groups.
        self._names: dict[LearnedParameters, str] = {}
        groups: dict[str, dict[str, Tensor]] = {}
        modules = [one for root in transformers_models(model) for one in attention_modules(root)]
        for module, location, *_ in modules:
            learned = learned_of(module)
            if learned is None or learned in self._names:
                continue
            copies = {
                name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True).requires_grad_()
                for name, p in learned.tensors().items()
                if id(p) not in ids
            }
            if copies:
                self._names[learned], groups[location.name] = location.name, copies
        if not groups:
            reason = why_nothing_to_learn([one.chosen for one in modules if one.chosen is not None])
            if reason is not None:
                raise UnsupportedAttentionError(reason)
            raise UnsupportedAttentionError(
                "no layer of the model has learned parameters to distill: choose layers whose method has them"
            )
        trained = [p for group in groups.values() for p in group.values()]
        settings = [{"params": [p], "lr": options.learning_rate * _share(p)} for p in trained]
        optimizer = torch.optim.AdamW(settings, weight_decay=0.0)
        schedule = LambdaLR(optimizer, lambda step: min(1.0, 2 * (num_steps - step) / num_steps))
        super().__init__(groups, optimizer, schedule, num_steps)
        self.idle = "no converted layer computed attention"

    def _backward(self, batch: Batch) -> tuple[list[LayerLoss], Tensor]:
        """The losses of the layers, without those that compute this batch exactly, and their sums by group."""
        found = self._visit(batch, partial(backward, loss=self._loss))
        sums = dict.fromkeys(self.groups, 0.0)
        for name, one in found:
            sums[name] += one.loss
        return [one for _, one in found], torch.tensor(list(sums.values()), device=self.trained[0].device)

    def measure(self, batch: Batch) -> list[LayerLoss]:
        """The relative error of each layer on a batch, without training."""
        return [one for _, one in self._visit(batch, torch.no_grad()(relative_error))]

    @torch.no_grad()
    def finish(self) -> None:
        """Write the trained parameters into the model."""
        for holder, name in self._names.items():
            tensors = holder.tensors()
            for key, p in self.groups[name].items():
                tensors[key].copy_(p)

    def _visit(self, batch: Batch, loss: Loss) -> list[tuple[str, LayerLoss]]:
        """A loss for every call that trains something, with the name of the group.

        The parameters have the dtype of the model.
        """
        found = []

        def visit(call: Call) -> None:
            learned = learned_of(call.module)
            if learned is None or learned not in self._names or self._is_exact(call, learned.method):
                return
            name = self._names[learned]
            group, present = self.groups[name], learned.tensors()
            with torch.enable_grad():
                copies = {key: group.get(key, p.detach()).to(p.dtype) for key, p in present.items()}
                found.append((name, LayerLoss(call.layer, call.name, loss(call, learned.method, copies))))

        # What only the loss of a task needs is left out. Encoder-decoder models make inputs of their labels.
        has_decoder = any(root.config.is_encoder_decoder for root in transformers_models(self.model))
        if isinstance(batch, Mapping) and (not has_decoder or "decoder_input_ids" in batch):
            batch = {name: x for name, x in batch.items() if name not in ("labels", "label", "label_ids")}
        with capture_attention(self.model, visit, self._teacher):
            forward(self.model, batch)
        return found

    def _is_exact(self, call: Call, method: MethodConfig) -> bool:
        """Whether the converted model computes a call exactly."""
        if call.why_exact(method) is not None:
            return True
        self.idle = (
            f"sequences of {call.tokens} tokens are within the budget of {method.method}, which computes up to "
            f"{method.exact_length} tokens exactly, so that there is nothing to learn: give longer sequences or a "
            "smaller budget"
        )
        return call.key.shape[2] <= method.exact_length

    def _name_of_loss(self, index: int) -> str:
        return list(self.groups)[index]


def stages_of(
    model: nn.Module, teacher: nn.Module | None, steps: int, loss: str, options: DistillationOptions
) -> Iterator["Distillation | Finetuning"]:
    """The stages of the distillation of a converted model. The second is made when the first is done.

    `teacher` is what `make_teacher` made of the model before it was converted.
    """
    yield Distillation(model, steps, loss, options)
    if options.finetuning is not None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(options.seed)  # of LoRA's adapters
            finetuning = Finetuning(model, teacher, options.finetuning, options.reduce)
        yield finetuning


def _share(parameter: Tensor) -> float:
    """Learning rate of a parameter as a share of the option, for its start values.

    A step of Adam is about as large as the learning rate, whatever the gradient is. For the initial
    map of a head with 32 dimensions the share is 1, for averages of two tokens out of 512 it is .16.
    """
    return min(1.0, max(0.1, 5.0 * parameter.detach().square().mean().sqrt().item()))


def refuse_converted(
    model: nn.Module,
    advice: str = "load the original checkpoint without attn_implementation, or switch back with hea.convert(model, "
    "'sdpa') if its weights were not trained since",
) -> None:
    """Refuse a model whose attention is not exact, because its exact attention is not that of its training."""
    for root in transformers_models(model):
        for name in filter(None, map(method_of, configs_of(root))):
            raise UnsupportedAttentionError(
                f"the {type(root).__name__} is converted to {name} already, and only exact attention can teach: "
                f"{advice}"
            )


def why_nothing_to_learn(methods: Sequence[MethodConfig]) -> str | None:
    """Why none of the methods has learned parameters, and which of its options would give it some; None if one has."""
    if any(map(learns, methods)):
        return None
    return "; ".join(dict.fromkeys(map(_advice, methods))) or "the model is not converted"


def _advice(method: MethodConfig) -> str:
    """Which values of single options, or which other methods, would learn something."""
    options = []
    for field in dataclasses.fields(method) if method_info(method.method).learned_parameters else ():
        present, values = getattr(method, field.name), field.metadata.get("choices") or ()
        if isinstance(present, bool):
            values = (not present,)
        elif present == 0 and field.name != "seed":
            values = (3,)
        changes = [{field.name: value} for value in values if value != present]
        options += [f"{field.name}={x[field.name]!r}" for x in changes if learns(make_config(method, **x))]
    if options:
        return f"{method.method} learns nothing with these hyperparameters: use {' or '.join(options)}"
    others = [name for name in available_methods() if method_info(name).learned_parameters]
    return (
        f"{method.method} has no learned parameters, so that there is nothing to distill: use a method that has, "
        f"{', '.join(others[:-1])} or {others[-1]}"
    )
