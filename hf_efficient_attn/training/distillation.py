"""Distillation of attention, layer by layer: the learned parameters of a method imitate the model's exact attention.

The model computes exact attention on batches of unlabelled inputs. In each call of a converted layer, the method
computes the same queries, keys and values, and the layer's learned parameters follow the gradient of its loss. This is
the attention transfer of LoLCATs (Zhang et al., ICLR 2025, section 3.1) and the distillation of Hedgehog (Zhang et al.,
ICLR 2024, section 4.2). All layers are trained in one pass, and the gradients of a layer end at its inputs.

The losses of a layer:

- "output": |out - exact|^2 / |exact|^2, summed over the valid queries of a head, averaged over sequences and heads.
- "weights": the cross entropy of the attention weights, sum_j -w_ij log(w'_ij) (Zhang et al., Hedgehog, ICLR 2024,
  Eq. 9), averaged over valid queries and heads, for blocks of keys: the weights of a block of keys are the output for
  values that are the block's columns of the identity. An (N, N) matrix is never held.
- "both": the sum of the two, with the cross entropy multiplied by `WEIGHTS_SHARE`.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from hf_efficient_attn.conversion import convert
from hf_efficient_attn.errors import KnownFields, UnsupportedAttentionError, check_positive, shown, unknown_name
from hf_efficient_attn.evaluation.capture import Batch, Call, capture_attention, exact_attention_of, forward
from hf_efficient_attn.evaluation.progress import partial_result
from hf_efficient_attn.integration.learned import LearnedParameters, learned_of
from hf_efficient_attn.integration.models import Snapshot, attention_modules, configs_of, transformers_models
from hf_efficient_attn.integration.settings import EfficientAttentionConfig, method_of
from hf_efficient_attn.methods import MethodConfig, available_methods, learns, make_config, method_info
from hf_efficient_attn.training.finetuning import Finetuning, FinetuningOptions, make_teacher
from hf_efficient_attn.training.steps import DivergedError, LayerLoss, OnStep, Training, batch_stream

LOSSES = ("output", "weights", "both")
# The cross entropy is some nats, and the loss of the output below 1.
WEIGHTS_SHARE = 0.1
# Keys of a block of weights.
_BLOCK = 128
# Smallest weight in a logarithm, as in float32's log(1e-9).
_LEAST = 1e-9


@dataclass(frozen=True, kw_only=True)
class DistillationOptions(KnownFields):
    """How `hea.distill` trains.

    Attributes:
        learning_rate: of AdamW, without weight decay; constant for half of the steps, then falling to 0 linearly. It is
            meant for feature maps. Parameters that start from smaller values, such as tables that contract tokens, have
            a smaller one, down to a tenth.
        seed: the order of the batches, if they are a sequence.
        on_step: called after each step with its number, from 1, and the loss of every layer; in the second stage with
            the losses of the outputs, which have no layer (None).
        finetuning: the second stage, in which the converted model imitates the outputs of the exact one; None for none.
        show_progress: whether to show progress bars, if stderr is a terminal.
    """

    learning_rate: float = 2e-2
    seed: int = 0
    on_step: OnStep | None = None
    finetuning: FinetuningOptions | None = None
    show_progress: bool = True

    def __post_init__(self) -> None:
        check_positive("learning_rate", self.learning_rate, is_count=False)
        for name, is_fit, what in (
            ("seed", isinstance(self.seed, int), "an integer"),
            ("on_step", self.on_step is None or callable(self.on_step), "a function or None"),
            ("finetuning", isinstance(self.finetuning, FinetuningOptions | None), "hea.FinetuningOptions(steps=...)"),
        ):
            if not is_fit:
                raise UnsupportedAttentionError(f"{name} must be {what}, not {shown(getattr(self, name))}")


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
        The same model, converted. If the training is interrupted, it has the parameters of the last step.

    Raises:
        UnsupportedAttentionError: the model is converted already; the method has nothing to learn; there are no batches
            or there is only one; the method computes all sequences exactly; a loss that is unknown or not for the
            method; and as in `hea.convert`. The model is then unchanged.
        DivergedError: a loss was not finite. The model is converted, with the best parameters until then.

    Example:
        >>> batches = [tokenizer(text, return_tensors="pt") for text in texts]
        >>> hea.distill(model, "linear", batches, steps=300, feature_map="hedgehog")
        >>> model.save_pretrained("converted")
    """
    check_positive("steps", steps)
    if not isinstance(options, DistillationOptions | None) or "learning_rate" in hyperparameters:
        raise UnsupportedAttentionError(
            "options must be None or options=hea.DistillationOptions(learning_rate=...), which has the learning rate"
        )
    options = options or DistillationOptions()
    refuse_converted(model)
    before = Snapshot(transformers_models(model))
    stream = batch_stream(batches, options.seed, steps)
    first = next(stream)
    stream = chain([first], stream)
    teacher = None if options.finetuning is None else make_teacher(model, options.finetuning, first)
    try:
        convert(model, method_or_config, layers=layers, **hyperparameters)
        with partial_result(lambda: model):
            for training in stages_of(model, teacher, steps, loss, options):
                training.run(stream, options.on_step, show_progress=options.show_progress)
    except UnsupportedAttentionError as error:
        if not isinstance(error, DivergedError):
            before.restore()
        raise
    return model


class Distillation(Training):
    """Trains the learned parameters of a converted model's layers, one batch at a time; its other parameters stay.

    The parameters are trained as copies in float32 or float64. A model without any is refused. `num_steps`, `loss` and
    `options` are those of `distill`. `teacher` computes the output to imitate, for the inputs of a call, and `fixed`
    are learned parameters that stay as they are.
    """

    title, key = "distillation", "layers"

    def __init__(
        self,
        model: nn.Module,
        num_steps: int,
        loss: str = "output",
        options: DistillationOptions | None = None,
        teacher: Callable[[Call], Tensor] = exact_attention_of,
        fixed: Collection[Tensor] = (),
    ) -> None:
        if loss not in LOSSES:
            raise UnsupportedAttentionError(unknown_name("loss", loss, LOSSES))
        options = options or DistillationOptions()
        self.model, self._loss, self._teacher, ids = model, loss, teacher, {id(p) for p in fixed}
        self.copies: dict[LearnedParameters, dict[str, Tensor]] = {}
        modules = [one for root in transformers_models(model) for one in attention_modules(root)]
        for learned in filter(None, (learned_of(one.module) for one in modules)):
            copies = {
                name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True).requires_grad_()
                for name, p in learned.tensors().items()
                if id(p) not in ids
            }
            if copies:
                self.copies[learned] = copies
        if not self.copies:
            reason = why_nothing_to_learn([one.chosen for one in modules if one.chosen is not None])
            other = "no layer learns new parameters: choose layers whose method learns some"
            raise UnsupportedAttentionError(reason or other)
        unfit = {learned.method.method for learned in self.copies if not learned.method.trains_on_weights}
        if unfit and loss != "output":
            what = f"what {', '.join(sorted(unfit))} learns can make attention weights negative or change their sum"
            raise UnsupportedAttentionError(f"the loss {loss!r} would ruin the outputs: {what}: use the loss 'output'")
        trained = [p for copies in self.copies.values() for p in copies.values()]
        # A step of Adam is about as large as the learning rate, whatever the gradient is. For the initial map of a head
        # with 32 dimensions the share of the user's rate is 1, for averages of two tokens out of 512 it is .16.
        shares = [min(1.0, max(0.1, 5.0 * p.detach().square().mean().sqrt().item())) for p in trained]
        settings = [{"params": [p], "lr": options.learning_rate * x} for p, x in zip(trained, shares, strict=True)]
        optimizer = torch.optim.AdamW(settings, weight_decay=0.0)
        schedule = LambdaLR(optimizer, lambda step: min(1.0, 2 * (num_steps - step) / num_steps))
        super().__init__(trained, optimizer, schedule, num_steps)

    def _backward(self, batch: Batch) -> list[LayerLoss]:
        return self._visit(batch, partial(backward, loss=self._loss))

    def measure(self, batch: Batch) -> list[LayerLoss]:
        """The relative error of each layer on a batch, without training."""
        # |out - exact| / |exact| in the Frobenius norm, the root of the loss "output".
        return self._visit(batch, torch.no_grad()(lambda *given: squared_error(*given).mean().sqrt().item()))

    @torch.no_grad()
    def finish(self) -> None:
        """Write the trained parameters into the model."""
        for learned, copies in self.copies.items():
            tensors = learned.tensors()
            for name, p in copies.items():
                tensors[name].copy_(p)

    def _visit(self, batch: Batch, loss: Callable[..., float]) -> list[LayerLoss]:
        """A loss for every call that trains something. The parameters have the dtype of the model."""
        losses = []

        def visit(call: Call) -> None:
            learned = learned_of(call.module)
            if learned is None or learned not in self.copies or call.chosen(learned.method) is None:
                return
            if call.key.shape[2] <= learned.method.exact_length:
                return
            copies = self.copies[learned]
            with torch.enable_grad():
                parameters = {name: copies.get(name, p.detach()).to(p.dtype) for name, p in learned.tensors().items()}
                losses.append(LayerLoss(call.layer, call.name, loss(call, learned.method, parameters)))

        with capture_attention(self.model, visit, self._teacher):
            forward(self.model, batch)
        return losses


def squared_error(call: Call, config: MethodConfig, parameters: Mapping[str, Tensor]) -> Tensor:
    """|out - exact|^2 / |exact|^2 over the valid queries of every sequence and head, without those of padding alone."""
    out, exact = call.compute(config, parameters).float(), call.exact.float()
    error, size = ((x.square().sum(-1) * _valid(call)).sum(-1) for x in (out - exact, exact))
    return (error / size.clamp(min=torch.finfo(size.dtype).tiny))[size > 0]


def backward(call: Call, config: MethodConfig, parameters: Mapping[str, Tensor], loss: str) -> float:
    """Compute one of `LOSSES` for one call, add its gradients to the parameters' gradients, and return it."""
    total = 0.0
    if loss != "weights":
        errors = squared_error(call, config, parameters)
        value = errors.sum() / max(1, len(errors))
        value.backward()
        total = value.item()
    if loss == "output":
        return total
    valid = _valid(call).expand(*call.query.shape[:3])
    factor = (1.0 if loss == "weights" else WEIGHTS_SHARE) / max(1, int(valid.sum()))
    positions = torch.arange(call.key.shape[2], device=call.value.device)
    for keys in positions.split(_BLOCK):
        columns = torch.eq(positions[:, None], keys).to(call.value.dtype)
        block = call._replace(value=columns.expand(*call.value.shape[:2], -1, -1))
        weights = exact_attention_of(block) * valid[..., None]  # (B, H, Nq, block)
        entropy = -factor * (weights * block.compute(config, parameters).float().clamp(min=_LEAST).log()).sum()
        # The cast of parameters to another dtype is shared by all blocks.
        entropy.backward(retain_graph=True)
        total += entropy.item()
    return total


def _valid(call: Call) -> Tensor:
    """Bool, broadcastable to (B, H, Nq): the queries that are not padding, as far as they are known."""
    mask = call.query_mask
    return torch.ones(1, 1, 1, dtype=torch.bool, device=call.query.device) if mask is None else mask[:, None]


def stages_of(
    model: nn.Module, teacher: nn.Module | None, steps: int, loss: str, options: DistillationOptions
) -> Iterator["Distillation | Finetuning"]:
    """The stages of a distillation. The second, with what `make_teacher` has made, begins when the first is done."""
    yield Distillation(model, steps, loss, options)
    if options.finetuning is not None:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(options.seed)  # of LoRA's adapters
            finetuning = Finetuning(model, teacher, options.finetuning)
        yield finetuning


def refuse_converted(model: nn.Module) -> None:
    """Refuse a model whose attention is not exact, because its exact attention is not that of its training."""
    for root in transformers_models(model):
        for name in filter(None, map(method_of, configs_of(root))):
            raise UnsupportedAttentionError(
                f"the {type(root).__name__} is converted to {name} already, and only exact attention can teach: load "
                "the original checkpoint without attn_implementation, or switch back with hea.convert(model, 'sdpa') "
                "or 'hf-efficient-attn convert --method sdpa' if its weights were not trained since"
            )


def why_nothing_to_learn(methods: Sequence[MethodConfig]) -> str | None:
    """Why none of the methods has learned parameters, and which of its options would give it some; None if one has."""
    if any(map(learns, methods)):
        return None
    return "; ".join(dict.fromkeys(map(_advice, methods))) or "the model is not converted"


def _advice(method: MethodConfig) -> str:
    """Which values of single options, or which other methods, would learn something."""
    options, others = [], [name for name in available_methods() if method_info(name).learned_parameters]
    for field in dataclasses.fields(method) if method.method in others else ():
        values = field.metadata.get("choices") or ([3] if type(getattr(method, field.name)) is int else [])
        options += [f"{field.name}={x!r}" for x in values if learns(make_config(method, **{field.name: x}))]
    if options:
        return f"{method.method} learns nothing with these hyperparameters: use {' or '.join(options)}"
    return (
        f"{method.method} has no learned parameters, so that there is nothing to distill: use a method that has, "
        f"{', '.join(others[:-1])} or {others[-1]}"
    )
