"""The stages of up-training: an attention and the step at which it ends."""

import ast
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hf_efficient_attn.conversion.convert import choice_of
from hf_efficient_attn.errors import UnsupportedAttentionError, as_dict, shown
from hf_efficient_attn.integration.settings import EXACT, EfficientAttentionConfig
from hf_efficient_attn.methods import available_methods, method_info
from hf_efficient_attn.training.distillation import why_nothing_to_learn


@dataclass(frozen=True)
class Stage:
    """One attention and the point in training at which it ends.

    Attributes:
        attention: the name of a method, or "sdpa" or another implementation of exact attention.
        end: the number of completed steps at which the stage ends (int), the same as a share of all steps (float), or
            None for the end of training.
        settings: the value for `config.efficient_attention`; None for exact attention.
        distill: the number of steps in which the new learned parameters imitate the attention before the switch to the
            stage; 0 for none.
    """

    attention: str
    end: float | int | None
    settings: EfficientAttentionConfig | None = None
    distill: int = 0

    def end_step(self, total_steps: int) -> int:
        """The number of completed steps at which the stage ends."""
        if self.end is None:
            return total_steps
        # The inner rounding removes floating-point noise: 0.29 * 100 is 28.999999999999996.
        return self.end if isinstance(self.end, int) else round(round(self.end * total_steps, 6))


def make_stages(given: Iterable[Any]) -> tuple[Stage, ...]:
    """Stages from any of the forms that `UptrainingSchedule` accepts, with its refusals."""
    stages: list[Stage] = []
    for entry in given:
        stages.append(_make_stage(entry, stages[-1] if stages else None))
    _check_ends([stage.end for stage in stages])
    if stages[0].distill:
        raise UnsupportedAttentionError(
            f"the first stage has distill={stages[0].distill}: distill the model before the training instead, with "
            "hea.distill or 'hf-efficient-attn distill'"
        )
    for before, after in itertools.pairwise(stages):
        if (before.attention, before.settings) == (after.attention, after.settings):
            raise UnsupportedAttentionError(
                f"two consecutive stages are the same ({before.attention!r}): combine them into one"
            )
    return tuple(stages)


def _make_stage(given: Any, before: Stage | None) -> Stage:
    """One stage; `before` is the preceding one, from which some hyperparameters are inherited."""
    if isinstance(given, Stage):
        return given
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence) or len(given) not in (2, 3):
        raise UnsupportedAttentionError(
            f"{shown(given)} is not a stage: use (attention, end) or (attention, end, hyperparameters)"
        )
    attention, end, *rest = given
    values = as_dict((rest and rest[0]) or {}, "the hyperparameters of a stage")
    distill, layers = values.pop("distill", 0), values.pop("layers", None)
    if isinstance(attention, str):
        attention = EXACT if attention == "exact" else attention
        values = _inherited(attention, before) | values
    settings = choice_of(attention, layers, values)
    name = str(settings.method if settings else attention)
    if isinstance(distill, bool) or not isinstance(distill, int) or distill < 0:
        raise UnsupportedAttentionError(
            f"distill={distill!r}: give the number of steps of the distillation before a stage, or 0 for none"
        )
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


def parse_stage(text: str) -> tuple[str, float | int | None, dict[str, Any]]:
    """(attention, end, hyperparameters) from "ATTENTION[,key=value...]:END"."""
    head, _, end = text.rpartition(":")
    name, *pairs = head.split(",")
    number = None if end == "end" else _parse_value(end)
    if not name or any("=" not in pair for pair in pairs) or isinstance(number, str):
        raise UnsupportedAttentionError(
            f"{text!r} is not a stage: write ATTENTION[,key=value...]:END, for example "
            "linformer,projection_dim=64:0.25. END is a share of all steps, a number of steps, or 'end'"
        )
    return name, number, {key: _parse_value(value) for key, value in (pair.split("=", 1) for pair in pairs)}


def _parse_value(text: str) -> Any:
    """A Boolean or a number if the text is one, otherwise the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
