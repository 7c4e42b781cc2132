"""Both stages of a distillation, from a model with exact attention to a converted one: `hea.distill`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from types import NoneType
from typing import Any

from torch import nn

from hf_efficient_attn.conversion import convert
from hf_efficient_attn.errors import UnsupportedAttentionError, shown
from hf_efficient_attn.evaluation.capture import Batch
from hf_efficient_attn.evaluation.progress import partial_result
from hf_efficient_attn.integration.models import snapshot, transformers_models
from hf_efficient_attn.integration.settings import EfficientAttentionConfig
from hf_efficient_attn.methods import MethodConfig
from hf_efficient_attn.training.attention_loss import check_loss
from hf_efficient_attn.training.batches import batch_stream
from hf_efficient_attn.training.distillation import Distillation, DistillationOptions
from hf_efficient_attn.training.finetuning import Finetuning, make_teacher
from hf_efficient_attn.training.steps import DivergedError, Training
from hf_efficient_attn.training.teachability import refuse_converted, refuse_nothing_to_learn


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
        run = DistillationRun(model, teacher, steps, loss, options)
        run.train_layers(stream)
        if options.finetuning is not None:
            run.train_outputs(stream)
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


class DistillationRun:
    """The two stages of a distillation, which can be saved after any step and continued.

    Attributes:
        distillation: the first stage.
        finetuning: the second stage; None before it begins.
    """

    def __init__(
        self, model: nn.Module, teacher: nn.Module | None, num_steps: int, loss: str, options: DistillationOptions
    ) -> None:
        self._model, self._teacher, self._options = model, teacher, options
        self.distillation = Distillation(model, num_steps, loss, options)
        self.finetuning: Finetuning | None = None

    @property
    def num_batches(self) -> int:
        """The number of batches so far, in both stages."""
        return self.distillation.step_number + (0 if self.finetuning is None else self.finetuning.step_number)

    def train_layers(self, stream: Iterator[Batch]) -> None:
        """The steps that remain of the first stage, with the exceptions of `Training.run`."""
        self._train(self.distillation, stream)

    def begin_finetuning(self) -> Finetuning:
        """Begin the second stage, after the first; `options.finetuning` must be given."""
        assert self._options.finetuning is not None
        self.finetuning = Finetuning(self._model, self._teacher, self._options.finetuning, self._options.reduce)
        return self.finetuning

    def train_outputs(self, stream: Iterator[Batch]) -> None:
        """The steps that remain of the second stage."""
        self._train(self.finetuning or self.begin_finetuning(), stream)

    def _train(self, training: Training, stream: Iterator[Batch]) -> None:
        with partial_result(lambda: self._model):
            training.run(stream, self._options.on_step, show_progress=self._options.show_progress)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to continue bit for bit: tensors, numbers and strings."""
        state = {"distillation": self.distillation.state_dict()}
        return state if self.finetuning is None else {**state, "finetuning": self.finetuning.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict`, as `Training.load_state_dict` does."""
        self.distillation.load_state_dict(state["distillation"])
        if "finetuning" in state:
            self.distillation.finish()
            self.begin_finetuning().load_state_dict(state["finetuning"])
