"""The stages of up-training: an attention and the step at which it ends."""

import ast
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_efficient_attn.errors import UnsupportedAttentionError, as_dict, shown, unknown_method
from hf_efficient_attn.integration.settings import EXACT, EXACT_IMPLEMENTATIONS, EfficientAttentionConfig
from hf_efficient_attn.methods import MethodConfig, available_methods, get_method, make_config, method_info
from hf_efficient_attn.training.teachability import why_nothing_to_learn


@dataclass(frozen=True)
class Stage:
    """One attention and the point in training at which it ends.

    Attributes:
        attention: the name of a method, or "sdpa" or "eager" for exact attention.
        end: the number of completed steps at which the stage ends (int), the same as a share of all steps (float), or
            None for the end of training.
        settings: the value for `config.efficient_attention`; None for exact attention.
        part: the name of the submodule to switch; None for the whole model.
        distill: the number of steps in which the learned parameters imitate the attention before the switch to the
            stage; 0 for none.
    """

    attention: str
    end: float | int | None
    settings: EfficientAttentionConfig | None = None
    part: str | None = None
    distill: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The stage as plain values that JSON can represent; `UptrainingSchedule` accepts this form."""
        values = {} if self.settings is None else self.settings.to_dict()
        stage = {"attention": self.attention, "end": self.end, "settings": values or None}
        if self.distill:
            stage["distill"] = self.distill
        return stage if self.part is None else {**stage, "part": self.part}

    def end_step(self, total_steps: int) -> int:
        """The number of completed steps at which the stage ends."""
        if self.end is None:
            return total_steps
        # The inner rounding removes floating-point noise: 0.29 * 100 is 28.999999999999996.
        return self.end if isinstance(self.end, int) else round(round(self.end * total_steps, 6))


def make_stages(given: Iterable[Any], part: str | None = None) -> tuple[Stage, ...]:
    """Stages from any of the forms that `UptrainingSchedule` accepts, with its refusals."""
    stages: list[Stage] = []
    for entry in given:
        stages.append(_make_stage(entry, stages[-1] if stages else None))
    _check_ends(stages)
    for before, after in itertools.pairwise(stages):
        if (before.attention, before.settings) == (after.attention, after.settings):
            raise UnsupportedAttentionError(
                f"two consecutive stages are the same ({before.attention!r}): combine them into one"
            )
    return tuple(stages if part is None else [dataclasses.replace(stage, part=part) for stage in stages])


def _make_stage(given: Any, before: Stage | None) -> Stage:
    """One stage; `before` is the preceding one, from which some hyperparameters are inherited."""
    if isinstance(given, Stage):
        return given
    if isinstance(given, Mapping):
        return _stage_from_dict(given)
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence) or len(given) not in (2, 3):
        raise UnsupportedAttentionError(
            f"{shown(given)} is not a stage: use (attention, end) or (attention, end, hyperparameters)"
        )
    values = as_dict(given[2] or {}, "the hyperparameters of a stage") if len(given) == 3 else {}
    distill = _check_distill(values.pop("distill", 0))
    stage = _stage_of(given[0], _check_end(given[1]), values, before)
    if distill:
        methods = [] if stage.settings is None else [entry.config for entry in stage.settings.entries]
        reason = why_nothing_to_learn(methods) if methods else f"{stage.attention!r} is exact attention"
        if reason is not None:
            raise UnsupportedAttentionError(f"a stage with distill={distill}: {reason}")
    return dataclasses.replace(stage, distill=distill)


def _stage_of(attention: Any, end: float | int | None, values: dict[str, Any], before: Stage | None) -> Stage:
    """The stage of an attention and its hyperparameters, without distillation."""
    if attention == "exact":
        attention = EXACT
    if isinstance(attention, str) and attention in EXACT_IMPLEMENTATIONS:
        if values:
            raise UnsupportedAttentionError(
                f"{attention!r} is exact attention and has no hyperparameters: remove {sorted(values)}"
            )
        return Stage(attention, end)
    if isinstance(attention, EfficientAttentionConfig):
        if values:
            raise UnsupportedAttentionError("set the hyperparameters in the EfficientAttentionConfig of the stage")
        assert isinstance(attention.method, str)  # the config resolves method configs to names
        return Stage(attention.method, end, attention)
    layers = values.pop("layers", None)
    if isinstance(attention, MethodConfig):
        config = make_config(attention, **values)
        return Stage(config.method, end, EfficientAttentionConfig(config, None, layers))
    if isinstance(attention, str) and attention not in available_methods():
        known = [*available_methods(), *EXACT_IMPLEMENTATIONS]
        raise UnsupportedAttentionError(f"a stage: {unknown_method(attention, known)}")
    values = {**_inherited(get_method(attention).info.name, before), **values}
    return Stage(attention, end, EfficientAttentionConfig(attention, values, layers))


def _inherited(method: str, before: Stage | None) -> dict[str, Any]:
    """Hyperparameters of the preceding stage that determine what is learned or drawn and that `method` has too."""
    if before is None or before.settings is None or len(before.settings.entries) > 1:
        return {}
    config, config_class = before.settings.entries[0].config, method_info(method).config_class
    found: dict[str, Any] = {}
    for spec in dataclasses.fields(config_class):
        if (spec.metadata.get("carried") or spec.name == "seed") and hasattr(config, spec.name):
            value = {spec.name: getattr(config, spec.name)}
            # The other method may not accept this value, for example tables that all layers share.
            with contextlib.suppress(UnsupportedAttentionError):
                config_class(**value)
                found |= value
    return found


def _stage_from_dict(given: Mapping[str, Any]) -> Stage:
    """The inverse of `Stage.to_dict`."""
    unknown = set(given) - {spec.name for spec in dataclasses.fields(Stage)}
    if unknown or "attention" not in given or "end" not in given:
        raise UnsupportedAttentionError(
            f"{dict(given)!r} is not a stage: use a dictionary with 'attention', 'end' and 'settings'"
        )
    attention, settings = given["attention"], given.get("settings")
    if settings is not None:
        attention = EfficientAttentionConfig.from_dict(settings, attention)
    stage = _make_stage((attention, given["end"], {"distill": given.get("distill", 0)}), None)
    return dataclasses.replace(stage, part=given.get("part"))


def _check_distill(steps: Any) -> int:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise UnsupportedAttentionError(
            f"distill={steps!r}: give the number of steps of the distillation before a stage, or 0 for none"
        )
    return steps


def _check_end(end: Any) -> float | int | None:
    if end is None or (isinstance(end, int) and not isinstance(end, bool) and end > 0):
        return end
    if isinstance(end, float) and math.isfinite(end) and 0.0 < end <= 1.0:
        return end
    raise UnsupportedAttentionError(
        f"{end!r} is not the end of a stage: use a share of all steps (a float above 0 and at most 1.0) or a number of "
        "steps (an integer of at least 1)"
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
            f"the ends of the stages mix shares and step numbers: {ends}. Write 1.0 for all steps and 1 for one step"
        )
    if any(shares) and ends[-1] is not None and ends[-1] != 1.0:
        raise UnsupportedAttentionError(f"the last share must be 1.0: {ends}")
    if any(after <= before for before, after in itertools.pairwise(known)):
        raise UnsupportedAttentionError(f"every stage must end after the one before it: {ends}")


def parse_stage(text: str) -> tuple[str, float | int | None, dict[str, Any]]:
    """(attention, end, hyperparameters) from "ATTENTION[,key=value...]:END"."""
    head, colon, end = text.rpartition(":")
    name, *pairs = head.split(",")
    if not colon or not name or any("=" not in pair for pair in pairs):
        raise UnsupportedAttentionError(
            f"{text!r} is not a stage: write ATTENTION[,key=value...]:END, for example linformer,projection_dim=64:0.25"
        )
    values = {key: _parse_value(value) for key, value in (pair.split("=", 1) for pair in pairs)}
    if end == "end":
        return name, None, values
    try:
        return name, int(end) if end.lstrip("+-").isdigit() else float(end), values
    except ValueError:
        raise UnsupportedAttentionError(
            f"{text!r} ends at {end!r}: write a share such as 0.25, a number of steps, or 'end'"
        ) from None


def _parse_value(text: str) -> Any:
    """A Boolean or a number if the text is one, otherwise the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
