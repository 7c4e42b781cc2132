"""Switching the attention modules of a model to what the model's configs say, as one transaction."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from transformers.modeling_utils import PreTrainedModel

from hf_efficient_attn.integration import learned, own_forward, positions
from hf_efficient_attn.integration.configs import method_of
from hf_efficient_attn.integration.distance_bias import attach_hook
from hf_efficient_attn.integration.masks import refuse_packed_rows
from hf_efficient_attn.integration.model_code import adapt_mask_reader, hook_once, uses_interface
from hf_efficient_attn.integration.models import LOCATION, AttentionModule, attention_modules, models_in, snapshot
from hf_efficient_attn.integration.refusals import (
    WARNED,
    check,
    refuse_attentions,
    warn_of_exact_cross_attention,
    why_cross_attention_is_exact,
)


def switch(
    models: Sequence[PreTrainedModel], change_configs: Callable[[], Any] | None = None, *, is_complete: bool = True
) -> None:
    """Change the configs of models, and give all their attention modules what the configs then ask for.

    This is one transaction: if anything fails, all models and configs are restored. All checks are made and all new
    parameters created before the first module is changed.

    Args:
        models: outermost Transformers models.
        change_configs: changes their configs; by default they stay as they are.
        is_complete: False for models that become parts of others, which have the layers that `layers` names, or all
            attention.

    Raises:
        UnsupportedAttentionError: a decoder with a method without a causal form; a module with fewer keys than queries
            and a method that needs as many; a model that does not use the attention interface; `layers` that a model
            does not have; learned parameters whose sizes cannot be determined.
    """
    before = snapshot(models)
    try:
        if change_configs is not None:
            change_configs()
        plans = [_plan(model, is_complete) for model in models]
        for plan in plans:
            plan.warn()
        for plan in plans:
            plan.carry_out()
    except BaseException:
        before.restore()
        raise


class _Change(NamedTuple):
    """What a switch changes in one attention module, by assignments alone: what the module gets of its own."""

    found: AttentionModule
    parameters: learned.LearnedParameters | None
    forward: Callable[..., Any] | None


class _Plan(NamedTuple):
    """What a switch changes in one model.

    Attributes:
        parts: the models in the model, for the checks of their calls; empty if it is switched to no method.
        changes: of every attention module.
        exact: modules whose cross attention stays exact and was not warned of yet, by the reason.
        windowed: modules that stay exact because of a window, and were not warned of yet.
    """

    parts: list[PreTrainedModel]
    changes: list[_Change]
    exact: dict[str, list[AttentionModule]]
    windowed: list[AttentionModule]

    def warn(self) -> None:
        """Warn of cross attention and of layers with a window, which stay exact."""
        if self.windowed:
            names = ", ".join(found.location.name for found in self.windowed)
            warnings.warn(
                f"{method_of(self.windowed[0].config)}: layers with a sliding window of the model's own stay exact, "
                f"at the cost of their window: {names}",
                stacklevel=2,
            )
        for reason, found in self.exact.items():
            warn_of_exact_cross_attention(found[0].module, reason, [each.location.name for each in found])

    def carry_out(self) -> None:
        """Change the modules."""
        for (module, location, config, _), parameters, forward in self.changes:
            learned.attach(module, parameters)
            own_forward.give(module, forward)
            if method_of(config) is not None:
                setattr(module, LOCATION, location)
                attach_hook(module)
        for found in (*self.windowed, *(each for group in self.exact.values() for each in group)):
            setattr(found.module, WARNED, True)
        for part, tables in positions.tables_of(self.parts).items():
            hook_once(part, _refuse_call)
            if tables:
                setattr(part, positions.TABLES, tables)
            for module in part.modules():
                adapt_mask_reader(module)


def _plan(model: PreTrainedModel, is_complete: bool) -> _Plan:
    """Check a model against what its configs ask for, and make what it needs for it."""
    parts, modules = models_in(model), list(attention_modules(model))
    if any(method_of(part.config) for part in parts):
        _hand_down(model, parts)
        check(model, [found for found in modules if method_of(found.config)], is_complete)
    else:
        parts = []
    requests, exact, windowed = [], dict[str, list[AttentionModule]](), []
    for found in modules:
        method, location, is_new = found.chosen, found.location, not getattr(found.module, WARNED, False)
        if method is not None and location.is_cross:
            reason = why_cross_attention_is_exact(method, found.config)
            if reason is not None:
                method = None
                if is_new:
                    exact.setdefault(reason, []).append(found)
        elif is_new and is_complete and location.window is not None:
            windowed += [found] if found._replace(location=location._replace(window=None)).chosen is not None else []
        requests.append((found, method if uses_interface(type(found.module)) else None))
    changes = [_Change(x, learned.plan(x, method), own_forward.plan(x.module, method)) for x, method in requests]
    return _Plan(parts, changes, exact, windowed)


def _hand_down(model: PreTrainedModel, parts: Sequence[PreTrainedModel]) -> None:
    """Apply a choice on the config of a composite model to its parts, as Transformers does `attn_implementation`."""
    stored = model.config.efficient_attention
    for part in parts:
        missing = part.config.efficient_attention is None
        if stored is not None and missing and method_of(part.config) == stored.settings.method:
            part.config.efficient_attention = stored.settings


def _refuse_call(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook: refuse `output_attentions`, packed rows, and inputs longer than the position table.

    Some models do not pass these arguments on to their attention.
    """
    name = method_of(model.config)
    if name is None:
        return
    given = positions.by_name(model, args, kwargs)
    refuse_packed_rows(given)
    positions.refuse_long_input(model, given)
    requested = given.get("output_attentions")
    refuse_attentions(name, model.config.output_attentions if requested is None else requested)
