"""Up-training schedules: which attention a model uses at which step, and the schedules of the paper."""

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hf_efficient_attn.conversion.convert import requested_settings
from hf_efficient_attn.errors import UnsupportedAttentionError, as_dict, check_positive, shown, unknown_name
from hf_efficient_attn.evaluation.capture import Batch
from hf_efficient_attn.integration.settings import EXACT
from hf_efficient_attn.io.json import parse_value
from hf_efficient_attn.methods import available_methods, method_info
from hf_efficient_attn.training.distillation import DistillationOptions, why_nothing_to_learn
from hf_efficient_attn.training.switch import Stage, check_distillation, check_stages, is_in_stage, switch_stage

# Gupta et al. 2023, appendix A.4: the base that a variant is trained as first, and its share of the steps. The paper's
# "RNN" is the linear transformer. The other experiments of the paper have no up-training.
_SHARES = {"nmt": {"linformer": 0.8, "linear": 0.64}, "imagenet": {"linformer": 0.167, "linear": 0.333}}
_TASKS, _VARIANTS = (*_SHARES, "mlm", "glue", "lra"), ("flurka_performer", "flurka_eva", "flurka_linear")


class UptrainingSchedule:
    """Consecutive stages of training, each with its own attention.

    The up-training of Gupta et al. 2023 (section 4.2) has two stages: a low-rank or kernel base, then a FLuRKA variant;
    the paper's alpha is the end of the first stage. Any number of stages is possible, including stages of exact
    attention ("sdpa").

    A stage inherits projection_dim, max_length, share, init, num_features, feature_map and seed from the stage before
    unless they are given, so that learned parameters and random draws still fit. Others have the method's defaults.

    A later stage whose method learns parameters can be distilled: before its first step, the new parameters are trained
    to imitate the attention that the model had before the switch, layer by layer and without labels.

    Args:
        stages: each (attention, end) or (attention, end, hyperparameters). `attention` is the name or the config of a
            method, an `EfficientAttentionConfig`, or "sdpa". `end` is the share of all steps after which the stage ends
            (a float; the last must be 1.0) or the number of steps (an integer; the last one has no effect, and may be
            None). The key "layers" among the hyperparameters selects layers as in `hea.convert`, and "distill" is the
            number of steps of the stage's distillation, which do not count as steps of the training.
        total_steps: the number of steps of the whole training. `step` needs it if ends are shares; Trainer tells the
            callback.

    Raises:
        UnsupportedAttentionError: a method or hyperparameter is unknown, ends do not increase or do not end at 1.0,
            shares and step numbers are mixed, or a stage with "distill" is the first or has nothing to learn.
    """

    def __init__(self, stages: "Iterable[Any] | UptrainingSchedule", total_steps: int | None = None) -> None:
        made: list[Stage] = []
        for entry in stages.stages if isinstance(stages, UptrainingSchedule) else stages:
            made.append(_make_stage(entry, made[-1] if made else None))
        _check_ends([stage.end for stage in made])
        if made[0].distill:
            raise UnsupportedAttentionError(
                f"the first stage has distill={made[0].distill}: distill the model before the training instead, with "
                "hea.distill or 'hf-efficient-attn distill'"
            )
        self.stages: tuple[Stage, ...] = tuple(made)
        self.total_steps = total_steps
        if total_steps is not None:
            self.ends(total_steps)

    @classmethod
    def parse(cls, stages: str | Sequence[str], total_steps: int | None = None) -> "UptrainingSchedule":
        """A schedule from strings "ATTENTION[,key=value...]:END", such as "linformer,projection_dim=64:0.25".

        END is a share, a number of steps or "end". A text with spaces contains several stages. Others are refused.
        """
        return cls(map(_parse_stage, stages.split() if isinstance(stages, str) else stages), total_steps)

    def ends(self, total_steps: int) -> list[int]:
        """The number of completed steps at which each stage ends, up to `total_steps`. Each stage must have a step."""
        # The inner rounding removes floating-point noise: 0.29 * 100 is 28.999999999999996.
        known = [stage.end or 0 for stage in self.stages[:-1]]
        ends = [*(end if isinstance(end, int) else round(round(end * total_steps, 6)) for end in known), total_steps]
        for stage, (start, end) in zip(self.stages, itertools.pairwise([0, *ends]), strict=True):
            if start >= end:
                raise UnsupportedAttentionError(
                    f"the stage {stage.attention!r} would have none of the {total_steps} steps: it runs from {start} "
                    f"to {end}. Train for more steps or move its end"
                )
        return ends

    def index(self, step: int) -> int:
        """The index of the stage of step `step` (counted from 0); after the last step, the last stage."""
        if self.total_steps is None and any(isinstance(stage.end, float) for stage in self.stages):
            raise UnsupportedAttentionError(
                "the ends of the stages are shares of all steps, but the number of steps is unknown: use "
                "UptrainingSchedule(stages, total_steps=...)"
            )
        ends = self.ends(self.total_steps or sys.maxsize)
        return next((i for i, end in enumerate(ends) if step < end), len(self.stages) - 1)

    def distilled(self, step: int) -> list[Stage]:
        """The stage of step `step` and later ones, as far as they have "distill"."""
        return [stage for stage in self.stages[self.index(step) if step else 0 :] if stage.distill]

    def step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        step: int,
        batches: Iterable[Batch] | None = None,
        options: DistillationOptions | None = None,
    ) -> "dict[str, Any] | None":
        """Switch the model to the stage of its next step if it is in another one; for training loops without Trainer.

        Call it once with `optimizer=None` before creating the optimizer and before loading a checkpoint, then before
        the forward pass of every optimizer step. Parameters that both stages share keep their values and their
        optimizer state; new parameters join the parameter group of similar parameters, and learning-rate schedules
        continue.

        A stage with "distill" is distilled in the call of its first step. In distributed training gradients are
        averaged over all processes, each of which may give batches of its own. The global random states stay.

        Args:
            model: a Transformers model, or its wrapper: PEFT, `torch.compile`, DistributedDataParallel.
            optimizer: the optimizer (or Accelerate's wrapper of it) of the model's parameters, or None.
            step: the number of completed optimizer steps. Without an optimizer, the stage is that of the last of them.
            batches: for stages with "distill", batches as for `hea.distill`, for example of the training set, which
                must be the same whenever they are read; give them in every call with an optimizer.
            options: the learning rate of the distillation and others; the default suits most models.

        Returns:
            A record of the switch with "step", "from", "to", the names of the parameters that were "carried", "started"
            and "dropped", and "distillation": None, or its "steps", "first_loss" and "last_loss", which are means over
            some steps. None if nothing changed.

        Raises:
            UnsupportedAttentionError: the model cannot take one of the stages, or batches are missing. This is checked
                in the first call, before anything changes. Or the stage computes all batches exactly.
            DivergedError: a loss of the distillation was not finite.
        """
        if optimizer is not None and (stages := self.distilled(step)):
            check_distillation(stages, batches, options)
        # First the bare model, then its wrappers, which exist when training begins.
        if optimizer is None or step == 0:
            check_stages(model, self.stages)
        number = step if optimizer is not None else step - 1
        stage = self.stages[self.index(number) if number > 0 else 0]
        return None if is_in_stage(model, stage) else switch_stage(model, optimizer, stage, step, batches, options)


def _make_stage(given: Any, before: Stage | None) -> Stage:
    """One stage; `before` is the preceding one, from which some hyperparameters are inherited."""
    if isinstance(given, Stage):
        return given
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence) or len(given) not in (2, 3):
        raise UnsupportedAttentionError(f"{shown(given)} is not a stage: use (attention, end[, hyperparameters])")
    attention, end, *rest = given
    values = as_dict((rest and rest[0]) or {}, "the hyperparameters of a stage")
    distill, layers = values.pop("distill", 0), values.pop("layers", None)
    if isinstance(attention, str):
        attention = EXACT if attention == "exact" else attention
        values = _inherited(attention, before) | values
    settings = requested_settings(attention, layers, values)
    name = str(settings.method if settings else attention)
    check_positive("distill", distill, least=0, advice="the steps of the distillation before the stage, or 0 for none")
    learning = why_nothing_to_learn([entry.config for entry in settings.entries] if settings else [])
    if distill and learning:
        reason = learning if settings else f"{name!r} is exact attention"
        raise UnsupportedAttentionError(f"a stage with distill={distill}: {reason}")
    return Stage(name, end, settings, distill)


def _inherited(method: str, before: Stage | None) -> dict[str, Any]:
    """Hyperparameters of the preceding stage that determine what is learned or drawn and that `method` has too."""
    if method not in available_methods() or not before or not before.settings or len(before.settings.entries) > 1:
        return {}
    values = before.settings.entries[0].config.to_dict()
    return {
        spec.name: values[spec.name]
        for spec in dataclasses.fields(method_info(method).config_class)
        if (spec.metadata.get("carried") or spec.name == "seed")
        and spec.name in values
        # The other method may not have this value, for example a feature map.
        and values[spec.name] in (spec.metadata.get("choices") or [values[spec.name]])
    }


def _check_ends(ends: Sequence[Any]) -> None:
    """Refuse ends of stages that are no ends, do not increase, or mix shares and numbers of steps."""
    if not ends:
        raise UnsupportedAttentionError("a schedule needs at least one stage")
    known = [0, *(ends[:-1] if ends[-1] is None else ends)]
    kinds = {type(end) for end in known[1:]}
    is_fit = kinds <= {int} or (kinds == {float} and ends[-1] == 1.0)
    if not is_fit or not all(before < after for before, after in itertools.pairwise(known)):
        raise UnsupportedAttentionError(
            f"the ends of the stages cannot be {ends}: give shares of all steps, floats that increase to 1.0, or "
            "numbers of steps, integers that increase, of which the last may be None for the end of training"
        )


def _parse_stage(text: str) -> tuple[str, float | int | None, dict[str, Any]]:
    """(attention, end, hyperparameters) from "ATTENTION[,key=value...]:END"."""
    head, _, end = text.rpartition(":")
    name, *pairs = head.split(",")
    number = None if end == "end" else parse_value(end)
    if not name or any("=" not in pair for pair in pairs) or isinstance(number, str):
        raise UnsupportedAttentionError(
            f"{text!r} is not a stage: write ATTENTION[,key=value...]:END, for example "
            "linformer,projection_dim=64:0.25. END is a share of all steps, a number of steps, or 'end'"
        )
    return name, number, {key: parse_value(value) for key, value in (pair.split("=", 1) for pair in pairs)}


def uptraining_preset(
    task: str, variant: str = "flurka_performer", *, total_steps: int | None = None, **hyperparameters: Any
) -> UptrainingSchedule:
    """The schedule that the paper uses for a task (Gupta et al. 2023, appendix A.4).

    For "nmt", `flurka_performer` and `flurka_eva` start as `linformer` for 80 % of the steps, and `flurka_linear`
    starts as `linear` for 64 %. For "imagenet" the shares are 16.7 % and 33.3 %. The paper does not up-train for "mlm",
    "glue" and "lra": these have one stage. In its ablation (Table 5) shares between 25 and 37.5 % are best.

    Args:
        task: "nmt", "imagenet", "mlm", "glue" or "lra".
        variant: "flurka_performer", "flurka_eva" or "flurka_linear".
        total_steps: see `UptrainingSchedule`.
        **hyperparameters: of the variant; the base takes those that it has. With "nmt" the paper switches only the
            encoder of a translation model: `layers=["encoder"]`.

    Raises:
        UnsupportedAttentionError: the task, the variant or a hyperparameter is unknown.
    """
    for kind, name, names in (("task of uptraining_preset", task, _TASKS), ("FLuRKA variant", variant, _VARIANTS)):
        if name not in names:
            raise UnsupportedAttentionError(unknown_name(kind, name, names))
    base = "linear" if variant == "flurka_linear" else "linformer"
    stages = [(base, _SHARES[task][base]), (variant, 1.0)] if task in _SHARES else [(variant, 1.0)]
    known = {"layers", *method_info(base).config_class.hyperparameters()}
    values = {base: {key: value for key, value in hyperparameters.items() if key in known}, variant: hyperparameters}
    return UptrainingSchedule([(name, end, values[name]) for name, end in stages], total_steps)
