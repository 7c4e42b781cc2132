"""Which attention stands in a model at which step: stages, their ends, and the paper's shares."""

import contextlib
import dataclasses
import itertools
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_name
from hf_efficient_attn.integration.settings import EXACT_IMPLEMENTATIONS, EfficientAttentionConfig
from hf_efficient_attn.methods import MethodConfig, available_methods, make_config, method_info

# A.4 of Gupta et al. 2023: the base that a variant is trained as first, and for which share of the steps. "RNN" there
# is the linear transformer. No other experiment of theirs was up-trained.
_SHARES = {
    "nmt": {
        "flurka_performer": ("linformer", 0.8),
        "flurka_eva": ("linformer", 0.8),
        "flurka_linear": ("linear", 0.64),
    },
    "imagenet": {
        "flurka_performer": ("linformer", 0.167),
        "flurka_eva": ("linformer", 0.167),
        "flurka_linear": ("linear", 0.333),
    },
    "mlm": {},
    "glue": {},
    "lra": {},
}


@dataclass(frozen=True)
class Stage:
    """One attention, and where it ends.

    attention: a method's name, or "sdpa" or "eager" for exact attention.
    end: the share of all steps (float) or the number of steps (int) that are done when it ends; None: with training.
    settings: what is put into the model's config; None for exact attention.
    part: name of the submodule that is switched; None for the whole model.
    """

    attention: str
    end: float | int | None
    settings: EfficientAttentionConfig | None = None
    part: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold; `UptrainingSchedule` takes them as a stage."""
        values = {} if self.settings is None else self.settings.to_dict()
        stage = {"attention": self.attention, "end": self.end, "settings": values or None}
        return stage if self.part is None else {**stage, "part": self.part}


class UptrainingSchedule:
    """Stages of training, one behind the other, each with an attention of its own.

    Two stages, a low-rank or kernel base and a FLuRKA variant, are the paper's up-training (Gupta et al. 2023, section
    4.2, whose alpha is the end of the first stage); a stage of exact attention ("sdpa") and any number of stages will
    do as well.

    Args:
        stages: each (attention, end) or (attention, end, hyperparameters). attention: a method's name or config, an
            `EfficientAttentionConfig`, or "sdpa". end: the share of all steps that are done when the stage ends, a
            float, of which the last is 1.0; or the number of steps, an integer, of which the last may be None. In the
            hyperparameters "layers" names the layers in which the method stands, as in `hea.convert`.
        total_steps: all steps of training, for `step`; the callback is told by Trainer.
        part: name of the submodule that is switched, such as "encoder" in an EncoderDecoderModel, all else staying what
            it is; it must have a config of its own. None for the whole model.

    Of what a stage is not told, it takes projection_dim, max_length, share, init, num_features and seed from the stage
    before, so that what was learned and drawn fits; all else has the method's defaults.

    Raises:
        UnsupportedAttentionError: unknown methods or hyperparameters, ends that do not grow or do not end at 1.0,
            shares mixed with step numbers, a stage that is no other than the one before.
    """

    def __init__(
        self, stages: "Iterable | UptrainingSchedule", total_steps: int | None = None, part: str | None = None
    ) -> None:
        if isinstance(stages, UptrainingSchedule):
            stages = stages.stages
        elif isinstance(stages, (str, bytes, Mapping)) or not isinstance(stages, Iterable):
            raise UnsupportedAttentionError(
                f"stages must be a list of (attention, end), not {stages!r}; UptrainingSchedule.parse reads strings"
            )
        made: list[Stage] = []
        for stage in stages:
            made.append(_stage(stage, made[-1] if made else None))
        self.stages = tuple(made if part is None else [dataclasses.replace(stage, part=part) for stage in made])
        _check_ends(self.stages)
        for before, after in itertools.pairwise(self.stages):
            if (before.attention, before.settings) == (after.attention, after.settings):
                raise UnsupportedAttentionError(
                    f"two stages, one behind the other, are the same: {before.attention!r}; make them one"
                )
        if total_steps is not None and (isinstance(total_steps, bool) or not isinstance(total_steps, int)):
            raise UnsupportedAttentionError(f"total_steps must be an integer, not {total_steps!r}")
        self.total_steps = total_steps
        self._checked: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        if total_steps is not None:
            self.ends(total_steps)

    @classmethod
    def parse(cls, stages: Sequence[str], total_steps: int | None = None) -> "UptrainingSchedule":
        """Stages from strings, as commands take them: "ATTENTION[,key=value...]:END", END a share, a number or "end".

        For instance ["linformer,projection_dim=64:0.25", "flurka_performer:1.0"].

        Raises:
            UnsupportedAttentionError: a string of another form, and whatever the class refuses.
        """
        if isinstance(stages, str):
            stages = stages.split()
        return cls([_parse_stage(text) for text in stages], total_steps)

    def ends(self, total_steps: int) -> list[int]:
        """The number of steps done when each stage ends; the last is `total_steps`.

        Raises:
            UnsupportedAttentionError: a stage that would have no step.
        """
        ends = [_steps(stage.end, total_steps) for stage in self.stages]
        start = 0
        for stage, end in zip(self.stages, ends, strict=True):
            if not start < min(end, total_steps):
                raise UnsupportedAttentionError(
                    f"of {total_steps} steps the stage {stage.attention!r} would have none: it runs from {start} to "
                    f"{min(end, total_steps)}; train for more steps, or move its end"
                )
            start = end
        return [*ends[:-1], total_steps]

    def index(self, step: int, total_steps: int | None = None) -> int:
        """Which stage step `step` (counted from 0) is of; after the last step, the last stage."""
        total = self._total(total_steps)
        if total is None:
            return next((i for i, stage in enumerate(self.stages[:-1]) if step < stage.end), len(self.stages) - 1)
        return next((i for i, end in enumerate(self.ends(total)) if step < end), len(self.stages) - 1)

    def _total(self, total_steps: int | None) -> int | None:
        total = self.total_steps if total_steps is None else total_steps
        if total is None and any(isinstance(stage.end, float) for stage in self.stages):
            raise UnsupportedAttentionError(
                "the ends of the stages are shares of all steps, whose number is not known: give "
                "UptrainingSchedule(stages, total_steps=...)"
            )
        return total

    def step(self, model, optimizer, step: int) -> dict[str, Any] | None:
        """For a loop without Trainer: put the stage of step `step` into the model, if another one stands in it.

        Call it once with `optimizer=None` before the optimizer is made and before a checkpoint is loaded, and then
        before the forward pass of every optimizer step. Parameters that the old and the new stage share stay what they
        are, with their optimizer state; new ones join the parameter group that holds their like, and learning-rate
        schedules go on.

        Args:
            model: a Transformers model, or what wraps it: PEFT, `torch.compile`, DistributedDataParallel.
            optimizer: whose groups hold the model's parameters, Accelerate's wrapper welcome; or None.
            step: optimizer steps done until now.

        Returns:
            None where nothing changed, else a record of the switch: "step", "from", "to", and the names of parameters
            that were "carried", "started" and "dropped".

        Raises:
            UnsupportedAttentionError: before anything is changed, if the model cannot take the stage, or one of the
                later stages, which are checked at the first call.
        """
        from hf_efficient_attn.training.switch import check, stands_in, switch

        stage = self.stages[self.index(step)]
        # Once for the bare model, and once for what it is wrapped in when training begins.
        when = "before" if optimizer is None else "in training"
        if when not in self._checked.setdefault(model, set()):
            check(model, self.stages)
            self._checked[model].add(when)
        return None if stands_in(model, stage) else switch(model, optimizer, stage, step)

    def to_list(self) -> list[dict[str, Any]]:
        """The stages as plain values that JSON can hold; `UptrainingSchedule` takes them."""
        return [stage.to_dict() for stage in self.stages]

    def __eq__(self, other) -> bool:
        return isinstance(other, UptrainingSchedule) and self.stages == other.stages

    __hash__ = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_checked": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _checked=weakref.WeakKeyDictionary())

    def __repr__(self) -> str:
        stages = ", ".join(f"({stage.attention!r}, {stage.end!r})" for stage in self.stages)
        return f"UptrainingSchedule([{stages}])"


def uptraining_preset(
    task: str,
    variant: str = "flurka_performer",
    *,
    total_steps: int | None = None,
    part: str | None = None,
    **hyperparameters,
) -> UptrainingSchedule:
    """The schedule that the paper used for a task (Gupta et al. 2023, A.4).

    "nmt": `flurka_performer` and `flurka_eva` from the Linformer for 80 % of the steps, `flurka_linear` from the linear
    transformer for 64 %. "imagenet": the same, for 16.7 % and 33.3 %. "mlm", "glue" and "lra" were not up-trained
    there: one stage. Its ablation (Table 5) finds the best shares between 25 and 37.5 %.

    Args:
        task: "nmt", "imagenet", "mlm", "glue" or "lra".
        variant: "flurka_performer", "flurka_eva" or "flurka_linear".
        total_steps, part: as `UptrainingSchedule` takes them; for "nmt" the part is "encoder", as in the paper, unless
            the model is an encoder.
        **hyperparameters: of the stages, each given to those that have it.

    Raises:
        UnsupportedAttentionError: an unknown task, variant or hyperparameter.
    """
    if task not in _SHARES:
        raise UnsupportedAttentionError(unknown_name("task of uptraining_preset", task, _SHARES))
    if variant not in _SHARES["nmt"]:
        raise UnsupportedAttentionError(unknown_name("FLuRKA variant", variant, _SHARES["nmt"]))
    base = _SHARES[task].get(variant)
    stages = [(variant, 1.0)] if base is None else [base, (variant, 1.0)]
    known = {name: method_info(name).config_class.__dataclass_fields__ for name, _ in stages}
    for key in hyperparameters:
        if not any(key in fields for fields in known.values()):
            options = sorted({field for fields in known.values() for field in fields} - {"method"})
            raise UnsupportedAttentionError(unknown_name("hyperparameter", key, options))
    return UptrainingSchedule(
        [(name, end, {k: v for k, v in hyperparameters.items() if k in known[name]}) for name, end in stages],
        total_steps,
        part,
    )


def _steps(end: float | int | None, total: int) -> int:
    """The number of steps done when a stage ends."""
    if end is None:
        return total
    # Rounded twice for what float arithmetic adds to a share, as in 0.29 * 100.
    return end if isinstance(end, int) else round(round(end * total, 6))


def _stage(given, before: Stage | None) -> Stage:
    if isinstance(given, Stage):
        return given
    if isinstance(given, Mapping):
        return _stage_of_dict(given)
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence) or len(given) not in (2, 3):
        raise UnsupportedAttentionError(
            f"{given!r} is no stage: give (attention, end) or (attention, end, hyperparameters)"
        )
    attention, end = given[:2]
    values = dict(given[2]) if len(given) == 3 and given[2] is not None else {}
    if attention == "exact":
        attention = "sdpa"
    if isinstance(attention, str) and attention in EXACT_IMPLEMENTATIONS:
        if values:
            raise UnsupportedAttentionError(
                f"{attention!r} is exact attention and has no hyperparameters: {sorted(values)}"
            )
        return Stage(attention, _end(end), None)
    if isinstance(attention, EfficientAttentionConfig):
        if values:
            raise UnsupportedAttentionError("give the hyperparameters inside the EfficientAttentionConfig")
        return Stage(attention.method, _end(end), attention)
    if isinstance(attention, MethodConfig):
        layers = values.pop("layers", None)
        config = make_config(attention, **values)
        return Stage(config.method, _end(end), EfficientAttentionConfig(config, None, layers))
    if attention not in available_methods():
        raise UnsupportedAttentionError(unknown_name("attention of a stage", attention, [*available_methods(), *EXACT_IMPLEMENTATIONS]))
    layers = values.pop("layers", None)
    values = {**_handed_on(attention, before), **values}
    return Stage(attention, _end(end), EfficientAttentionConfig(attention, values, layers))


def _handed_on(method: str, before: Stage | None) -> dict[str, Any]:
    """Hyperparameters of the stage before that shape what is learned or drawn, where this method has them too."""
    if before is None or before.settings is None or len(before.settings.entries) > 1:
        return {}
    config, config_class = before.settings.entries[0].config, method_info(method).config_class
    found = {}
    for spec in dataclasses.fields(config_class):
        name = spec.name
        if (spec.metadata.get("carried") or name == "seed") and hasattr(config, name):
            try:
                config_class(**{name: getattr(config, name)})
            except UnsupportedAttentionError:
                # A value that only the other method knows, such as tables shared by all layers.
                continue
            found[name] = getattr(config, name)
    return found


def _stage_of_dict(given: Mapping) -> Stage:
    """The inverse of `Stage.to_dict`."""
    unknown = set(given) - {field.name for field in dataclasses.fields(Stage)}
    if unknown or "attention" not in given or "end" not in given:
        raise UnsupportedAttentionError(
            f"{dict(given)!r} is no stage: give a dictionary with 'attention', 'end' and 'settings'"
        )
    settings = given.get("settings")
    if settings is None:
        stage = _stage((given["attention"], given["end"]), None)
    else:
        stage = _stage((EfficientAttentionConfig.from_dict(settings, given["attention"]), given["end"]), None)
    return dataclasses.replace(stage, part=given.get("part"))


def _end(end) -> float | int | None:
    if end is None or (isinstance(end, int) and not isinstance(end, bool) and end > 0):
        return end
    if isinstance(end, float) and math.isfinite(end) and 0.0 < end <= 1.0:
        return end
    raise UnsupportedAttentionError(
        f"a stage ends at {end!r}; give a share of all steps, a float above 0 and up to 1.0, or a number of steps, an "
        "integer from 1 on"
    )


def _check_ends(stages: Sequence[Stage]) -> None:
    if not stages:
        raise UnsupportedAttentionError("a schedule needs at least one stage")
    ends = [stage.end for stage in stages]
    if None in ends[:-1]:
        raise UnsupportedAttentionError("only the last stage may end with training (None)")
    known = [end for end in ends if end is not None]
    shares = [isinstance(end, float) for end in known]
    if any(shares) and not all(shares):
        raise UnsupportedAttentionError(
            f"the ends of the stages mix shares and numbers of steps: {ends}; write 1.0 for all steps, and 1 for one"
        )
    if any(shares) and ends[-1] is not None and ends[-1] != 1.0:
        raise UnsupportedAttentionError(f"the shares of the stages do not end at 1.0: {ends}")
    if any(after <= before for before, after in itertools.pairwise(known)):
        raise UnsupportedAttentionError(f"the ends of the stages do not grow: {ends}")


def _parse_stage(text: str) -> tuple:
    head, colon, end = text.rpartition(":")
    name, *pairs = head.split(",")
    if not colon or not name or any("=" not in pair for pair in pairs):
        raise UnsupportedAttentionError(
            f"{text!r} is no stage: write ATTENTION[,key=value...]:END, for instance linformer,projection_dim=64:0.25"
        )
    values = {key: _plain(value) for key, value in (pair.split("=", 1) for pair in pairs)}
    if end == "end":
        return name, None, values
    try:
        return name, int(end) if end.lstrip("+-").isdigit() else float(end), values
    except ValueError:
        raise UnsupportedAttentionError(
            f"{text!r} ends at {end!r}; write a share such as 0.25, a number of steps, or 'end'"
        ) from None


def _plain(text: str) -> Any:
    """A number or a truth value where the text is one."""
    if text in ("True", "False"):
        return text == "True"
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        return float(text)
    return text
