"""Switching the attention modules of a model to what the model's configs say, as one transaction."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration import hidden_states, learned, mask_readers, positions, windows
from hf_efficient_attn.integration.attention import LOCATION
from hf_efficient_attn.integration.checks import (
    check_interface,
    check_layers,
    check_methods_of,
    exact_cross_attention,
    method_in,
    refuse_unknown_implementation,
    windowed_modules,
)
from hf_efficient_attn.integration.configs import method_of
from hf_efficient_attn.integration.distance_bias import attach_hook
from hf_efficient_attn.integration.finding import (
    AttentionModule,
    attention_modules,
    configs_of,
    is_attention,
    models_in,
    transformers_models,
    with_parts,
)
from hf_efficient_attn.integration.masks import refuse_packed_rows
from hf_efficient_attn.integration.refusals import WARNED, no_attentions, warn_of_exact_cross_attention
from hf_efficient_attn.integration.settings import EfficientAttentionConfig
from hf_efficient_attn.integration.transaction import Snapshot
from hf_efficient_attn.methods import MethodConfig

__all__ = [
    "AttentionModule",
    "attention_modules",
    "choose",
    "configs_of",
    "is_attention",
    "models_in",
    "refuse_unknown_implementation",
    "snapshot",
    "switch",
    "transformers_models",
    "with_parts",
]
# The attribute of a model that has the forward pre-hook below.
_GUARDED = "_efficient_attention_guarded"


def snapshot(models: Sequence[PreTrainedModel]) -> Snapshot:
    """The present state of models and their configs, to be restored if a switch fails."""
    return Snapshot(models, [config for model in models for config in configs_of(model)])


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


def choose(models: Sequence[PreTrainedModel], settings: EfficientAttentionConfig) -> None:
    """Write a choice into all configs of models, in which nothing else changes yet."""
    for model in models:
        for config in configs_of(model):
            config._attn_implementation_internal = settings.method
            config.efficient_attention = settings


class _Plan(NamedTuple):
    """What a switch changes in one model, ready to be carried out by assignments alone.

    Attributes:
        parts: the models in the model, for the checks of their calls; empty if it is switched to no method.
        modules: all attention modules whose location is to be noted.
        parameters: for every attention module, the learned parameters that it gets.
        forwards: for every attention module, the forward that it gets of its own.
        exact: modules whose cross attention stays exact, and their names, by the reason.
        windowed: the chosen modules that stay exact because of a window, and that were not warned of yet.
    """

    parts: list[PreTrainedModel]
    modules: list[AttentionModule]
    parameters: list[tuple[nn.Module, learned.LearnedParameters | None]]
    forwards: list[tuple[nn.Module, Callable[..., Any] | None]]
    exact: dict[str, list[tuple[nn.Module, str]]]
    windowed: list[AttentionModule]

    def warn(self) -> None:
        """Warn of cross attention and of layers with a window, which stay exact."""
        if self.windowed:
            names = [found.location.name for found in self.windowed]
            windows.warn_of_windows(str(method_of(self.windowed[0].config)), names)
        for reason, found in self.exact.items():
            warn_of_exact_cross_attention(found[0][0], reason, [name for _, name in found])

    def carry_out(self) -> None:
        """Change the modules."""
        for module, parameters in self.parameters:
            learned.attach(module, parameters)
        for found in self.modules:
            setattr(found.module, LOCATION, found.location)
        for module, forward in self.forwards:
            hidden_states.attach(module, forward)
        for found in self.modules:
            attach_hook(found.module)
        warned = [module for group in self.exact.values() for module, _ in group]
        for module in (*warned, *(found.module for found in self.windowed)):
            setattr(module, WARNED, True)
        for part in self.parts:
            if not getattr(part, _GUARDED, False):
                part.register_forward_pre_hook(_refuse_call, with_kwargs=True)
                setattr(part, _GUARDED, True)
            for inner in part.modules():
                mask_readers.adapt(inner)
        for part, tables in positions.tables_of(self.parts).items():
            if tables:
                setattr(part, positions.TABLES, tables)


def _plan(model: PreTrainedModel, is_complete: bool) -> _Plan:
    """Check a model against what its configs ask for, and make what it needs for it."""
    parts, found = models_in(model), list(attention_modules(model))
    methods: list[MethodConfig | None] = [None] * len(found)
    chosen: list[AttentionModule] = []
    windowed: list[AttentionModule] = []
    if any(method_of(part.config) for part in parts):
        _hand_down(model, parts)
        chosen = [each for each in found if method_of(each.config)]
        check_interface(model, chosen, is_complete)
        check_layers(model, chosen, is_complete)
        windowed = windowed_modules(model, chosen) if is_complete else []
        methods = [method_in(each) if method_of(each.config) else None for each in found]
        check_methods_of(model, chosen)
    else:
        parts = []
    kind = type(model).__name__
    requests = [
        learned.Request(each.module, method, each.config, each.owner, f"{kind} at {each.location.name}")
        for each, method in zip(found, methods, strict=True)
    ]
    modules = [each.module for each in found]
    forwards = [hidden_states.plan(module, method) for module, method in zip(modules, methods, strict=True)]
    return _Plan(
        parts=parts,
        modules=chosen,
        parameters=list(zip(modules, learned.plan(requests), strict=True)),
        forwards=list(zip(modules, forwards, strict=True)),
        exact=exact_cross_attention(chosen),
        windowed=windowed,
    )


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
