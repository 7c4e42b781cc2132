"""Switching the attention modules of a model to what the model's configs say, as one transaction."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration import hidden_states, learned, positions
from hf_efficient_attn.integration.checks import check
from hf_efficient_attn.integration.configs import method_of
from hf_efficient_attn.integration.distance_bias import attach_hook
from hf_efficient_attn.integration.masks import refuse_packed_rows
from hf_efficient_attn.integration.model_code import adapt_mask_reader, uses_interface
from hf_efficient_attn.integration.models import LOCATION, AttentionModule, attention_modules, models_in, snapshot
from hf_efficient_attn.integration.refusals import (
    WARNED,
    no_attentions,
    warn_of_exact_cross_attention,
    why_cross_attention_is_exact,
)

# The attribute of a model that has the forward pre-hook below.
_GUARDED = "_efficient_attention_guarded"


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


class _Plan(NamedTuple):
    """What a switch changes in one model, ready to be carried out by assignments alone.

    Attributes:
        parts: the models in the model, for the checks of their calls; empty if it is switched to no method.
        chosen: the attention modules whose config names a method.
        changes: every attention module, with the learned parameters and the forward that it gets of its own.
        exact: modules whose cross attention stays exact and was not warned of yet, by the reason.
        windowed: the chosen modules that stay exact because of a window, and were not warned of yet.
    """

    parts: list[PreTrainedModel]
    chosen: list[AttentionModule]
    changes: list[tuple[nn.Module, learned.LearnedParameters | None, Callable[..., Any] | None]]
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
        for module, parameters, _ in self.changes:
            learned.attach(module, parameters)
        for found in self.chosen:
            setattr(found.module, LOCATION, found.location)
        for module, _, forward in self.changes:
            hidden_states.attach(module, forward)
        for found in self.chosen:
            attach_hook(found.module)
        for found in (*self.windowed, *(each for group in self.exact.values() for each in group)):
            setattr(found.module, WARNED, True)
        for part in self.parts:
            if not getattr(part, _GUARDED, False):
                part.register_forward_pre_hook(_refuse_call, with_kwargs=True)
                setattr(part, _GUARDED, True)
            for inner in part.modules():
                adapt_mask_reader(inner)
        for part, tables in positions.tables_of(self.parts).items():
            if tables:
                setattr(part, positions.TABLES, tables)


def _plan(model: PreTrainedModel, is_complete: bool) -> _Plan:
    """Check a model against what its configs ask for, and make what it needs for it."""
    parts, found = models_in(model), list(attention_modules(model))
    if any(method_of(part.config) for part in parts):
        _hand_down(model, parts)
        chosen = [each for each in found if method_of(each.config)]
        check(model, chosen, is_complete)
    else:
        parts, chosen = [], []
    methods = {id(each.module): each.chosen for each in chosen if uses_interface(type(each.module))}
    exact: dict[str, list[AttentionModule]] = {}
    windowed: list[AttentionModule] = []
    for each in chosen:
        is_new, method = not getattr(each.module, WARNED, False), each.chosen
        is_cross = each.location.is_cross
        reason = None if method is None or not is_cross else why_cross_attention_is_exact(method, each.config)
        if reason is not None:
            methods[id(each.module)] = None
            if is_new:
                exact.setdefault(reason, []).append(each)
        without_window = each._replace(location=each.location._replace(window=None))
        if is_complete and is_new and method is None and without_window.chosen is not None:
            windowed.append(each)
    requests = [(each, methods.get(id(each.module))) for each in found]
    parameters = learned.plan(requests, type(model).__name__)
    forwards = [hidden_states.plan(each.module, method) for each, method in requests]
    changes = list(zip((each.module for each in found), parameters, forwards, strict=True))
    return _Plan(parts, chosen, changes, exact, windowed)


def _hand_down(model: PreTrainedModel, parts: Sequence[PreTrainedModel]) -> None:
    """Apply a choice on the config of a composite model to its parts, as Transformers does `attn_implementation`."""
    stored = model.config.efficient_attention
    for part in parts:
        missing = part.config.efficient_attention is None
        if stored is not None and missing and method_of(part.config) == stored.settings.method:
            part.config.efficient_attention = stored.settings


def _refuse_call(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook: refuse `output_attentions`, packed rows, and inputs longer than the position table.

    Some models do not pass these arguments on to their attention. It also prepares a replica of
    `torch.nn.DataParallel`.
    """
    name = method_of(model.config)
    if name is None:
        return
    learned.bind_replica(model)
    given = positions.by_name(model, args, kwargs)
    refuse_packed_rows(given)
    positions.refuse_long_input(model, given)
    requested = given.get("output_attentions")
    if model.config.output_attentions if requested is None else requested:
        raise UnsupportedAttentionError(no_attentions(name))
