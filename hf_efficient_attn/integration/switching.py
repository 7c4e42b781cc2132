"""Switching the attention modules of a model to what its configs say, and where Transformers does it.

The second part extends `PreTrainedModel`, `GenerationMixin` and `DynamicCache` (`extend_classes`).
"""

import copy
import functools
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import nn
from transformers import DynamicCache, DynamicLayer, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_efficient_attn.errors import OWN_FILE, UnsupportedAttentionError, did_you_mean
from hf_efficient_attn.integration import distance_bias, inputs, learned, model_kinds, models, own_forward, refusals
from hf_efficient_attn.integration.cache import StateLayer
from hf_efficient_attn.integration.configs import check_parts, parts_of
from hf_efficient_attn.integration.layers import LOCATION, ModuleLocation
from hf_efficient_attn.integration.settings import EXACT, EXACT_IMPLEMENTATIONS, method_at, method_of, settings_of
from hf_efficient_attn.methods import available_methods, get_method
from hf_efficient_attn.ops.tracing import nothing, replaced_in_graphs


def switch(
    roots: Sequence[PreTrainedModel],
    change_configs: Callable[[], Any] | None = None,
    *,
    holder: nn.Module | None = None,
    is_complete: bool = True,
) -> None:
    """Change the configs of models, and give all their attention modules what the configs then ask for.

    This is one transaction: if anything fails, for example because a model cannot run what its configs ask for, all
    models and configs are restored. `roots` are outermost Transformers models, and `change_configs` changes their
    configs; by default they stay as they are. `holder` is the module that holds them, if there is one, such as a PEFT
    model. `is_complete` is False for models that get more parts, which may have the layers that `layers` names.
    """
    names = {id(config): config._attn_implementation for root in roots for config in models.configs_of(root)}
    with models.Snapshot(roots):
        if change_configs is not None:
            change_configs()
        checked = [(root, _checked_modules(root, names, is_complete)) for root in roots]
        for root, modules in checked:
            _switch_modules(root, modules, root if holder is None else holder, is_complete)


def _checked_modules(
    root: PreTrainedModel, names: Mapping[int, str | None], is_complete: bool
) -> list[models.AttentionModule]:
    """The attention modules of a model, after a check of what its configs ask for.

    `names` are the implementations that its configs named before, by the ids of the configs.
    """
    parts = models.models_in(root)
    is_switched = any(method_of(part.config) for part in parts)
    if is_switched:
        adopt(root)
    modules = list(models.attention_modules(root))
    if is_switched:
        # Settings on the config of a composite model go down to its parts, as `attn_implementation` does.
        stored = root.config.efficient_attention
        for part in parts if stored is not None else ():
            if part.config.efficient_attention is None and method_of(part.config) == stored["method"]:
                part.config.efficient_attention = stored
        for part in refusals.parts_to_keep_exact(root, modules):
            before = names.get(id(part.config))
            is_known = before is not None and before not in available_methods()
            part.config._attn_implementation_internal = before if is_known else models.exact_name([part])
            part.config.efficient_attention = None
        refusals.check(root, [found for found in modules if method_of(found.config)], is_complete)
    return modules


def adopt(model: PreTrainedModel) -> None:
    """Give the modules of a model that compute their attention themselves their classes of `patched`.

    Decoders keep their class, except Bloom's, because their masks are made for their own forward.
    """
    for part in models.models_in(model):  # the innermost last, whose config applies
        for module in part.modules():
            kind = type(module)
            row = model_kinds.kind_of(kind)
            is_known = (row.is_patched or row.like_bert_in) and model_kinds.is_known_code(kind)
            if is_known and not getattr(module, "is_decoder", False):
                from hf_efficient_attn.integration import patched  # it imports the models

                module.__class__ = getattr(patched, kind.__name__)
                vars(module)["config"] = part.config


def _switch_modules(
    root: PreTrainedModel, modules: Sequence[models.AttentionModule], holder: nn.Module, is_complete: bool
) -> None:
    """Give the modules of a model what their method needs, and warn of attention that stays exact."""
    parts, exact = models.models_in(root), dict[str, list[tuple[nn.Module, ModuleLocation]]]()
    for found in modules:
        (module, location, config, _), name, method, reason = found, method_of(found.config), found.chosen, None
        if method is not None and location.is_cross:
            reason = refusals.why_cross_attention_is_exact(config, location, method)
        elif is_complete and method_at(config, name, location._replace(window=None)) != method:
            reason = "layers with a sliding window of the model's own stay exact, at the cost of their window:"
        if reason is not None:
            exact.setdefault(reason, []).append((module, location))
        method = method if reason is None and models.uses_interface(type(module)) else None
        learned.attach(found, method, holder)
        own_forward.attach(module, method)
        vars(module).pop(LOCATION, None)
        if name is not None:
            setattr(module, LOCATION, location._replace(method=name))
            distance_bias.attach_hook(module)
    for reason, group in exact.items():
        refusals.warn_of_exact_layers(reason, group)
    tables = models.tables_of(parts) if any(method_of(part.config) for part in parts) else {}
    for part, found_tables in tables.items():
        for cls in type(part).__mro__:
            _extend_generate(cls)
        models.hook_once(part, inputs.check_inputs)
        setattr(part, inputs.TABLES, found_tables)
        for module in part.modules():  # PyTorch's own attention, such as SigLIP 2's pooling, gets a config of its own
            if model_kinds.kind_of(type(module)).needs_exact_config and method_of(module.config) is not None:
                exact_config: Any = copy.copy(module.config)
                exact_config._attn_implementation_internal = EXACT
                module.config = exact_config


def extend_classes() -> None:
    """Extend the classes. Called once."""
    for cls, name, extension in (
        (PreTrainedModel, "post_init", _post_init),
        (PreTrainedModel, "_from_config", _from_config),
        (PreTrainedModel, "set_attn_implementation", _set_implementation),
        (PreTrainedModel, "get_correct_attn_implementation", _correct_implementation),
        (PreTrainedModel, "_initialize_weights", _initialize_weights),
        (PreTrainedModel, "_load_from_state_dict", _load_from_state_dict),
        (GenerationMixin, "init_continuous_batching", _init_continuous_batching),
        (DynamicCache, "__init__", _init_cache),
    ):
        original = inspect.getattr_static(cls, name)
        is_of_class = isinstance(original, classmethod)
        extended = _extended(original.__func__ if is_of_class else original, extension)
        setattr(cls, name, classmethod(extended) if is_of_class else extended)


@functools.cache
def _extend_generate(cls: type) -> None:
    """Extend the `generate` of a class if it writes an implementation into the config, as Whisper's does."""
    original = vars(cls).get("generate")
    code = getattr(inspect.unwrap(original), "__code__", None) if callable(original) else None
    if code is not None and "_attn_implementation" in code.co_names:
        setattr(cls, "generate", _extended(original, _generate))  # noqa: B010 (mypy knows no such attribute)


def _generate(original: Any, self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Refuse timestamps of tokens, for which Whisper makes all attention exact and leaves it so."""
    given = inspect.signature(original).bind_partial(self, *args, **kwargs).arguments
    name = method_of(self.config)
    if name is not None and given.get("return_token_timestamps"):
        raise UnsupportedAttentionError(
            f"return_token_timestamps=True: the timestamps are read from attention probabilities, which {name} never "
            "computes, and Transformers would make the model exact for good: use return_timestamps=True, which gives "
            "the timestamps of segments, or switch the model with hf_efficient_attn.convert(model, 'eager')"
        )
    return original(self, *args, **kwargs)


def _extended(original: Any, extension: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return extension(original, *args, **kwargs)

    return call


def _post_init(original: Any, self: PreTrainedModel) -> None:
    """Switch a new model to what its config says. Every constructor ends with `post_init`.

    The model that a part belongs to switches the part, because only there do layers have the names that `layers` uses.
    """
    original(self)
    if any(method_of(part.config) for part in models.models_in(self)):
        under_construction = _under_construction()
        if all(model is self for model in under_construction):
            # The constructor of a base class calls `post_init` before that of the derived class adds its parts.
            switch([self], is_complete=len(under_construction) < 2)


def _under_construction() -> list[PreTrainedModel]:
    """The models whose constructors are running and call `post_init`, the innermost first.

    A part is made by the same calls as a model of its own: only the constructors that are running tell them apart.
    """
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()) if frame.f_code.co_name == "__init__")
    found = (frame.f_locals.get("self") for frame in frames if "post_init" in frame.f_code.co_names)
    return [model for model in found if isinstance(model, PreTrainedModel)]


def _from_config(original: Any, cls: type[PreTrainedModel], config: PreTrainedConfig, **kwargs: Any) -> PreTrainedModel:
    """Leave the config as it was if the model is refused, and if it may belong to another model that has a method.

    The original writes the implementation into the config.
    """
    configs = models.with_parts([config])
    named = kwargs.get("attn_implementation")
    names = [*(named.values() if isinstance(named, dict) else [named]), *map(method_of, configs)]
    if named is not None and any(name in available_methods() for name in names):
        config = copy.deepcopy(config)
    with models.Snapshot([], configs):
        return cast("PreTrainedModel", original(cls, config, **kwargs))


def _set_implementation(
    original: Any, self: PreTrainedModel, attn_implementation: str | dict[str, Any], *args: Any, **kwargs: Any
) -> None:
    """Switch the modules too."""
    check_parts(self.config, attn_implementation)

    def change_configs() -> None:
        if isinstance(attn_implementation, str) and attn_implementation in available_methods():
            # The original skips classes whose source it cannot read, for example classes that a notebook defines.
            for config in models.configs_of(self):
                config._attn_implementation_internal = attn_implementation
        else:
            parts = models.models_in(self) if isinstance(attn_implementation, str) else []
            # The original skips these classes, with a warning.
            skipped = [x for x in parts if method_of(x.config) is not None and not x._can_set_attn_implementation()]
            for part in skipped:
                name = models.exact_name([part]) if attn_implementation == EXACT else str(attn_implementation)
                part.config._attn_implementation_internal = part.get_correct_attn_implementation(name)
            if not parts or len(skipped) < len(parts):
                original(self, attn_implementation, *args, **kwargs)
            named = attn_implementation if isinstance(attn_implementation, dict) else {}
            for key, config in {"": self.config, **parts_of(self.config)}.items():
                if isinstance(named.get(key), str) and named[key] in available_methods():
                    config._attn_implementation_internal = named[key]  # the check refuses what was skipped

    switch([self], change_configs)


def _correct_implementation(
    original: Any, self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any
) -> str:
    """Explain names that are refused: the original's message names only Transformers' own implementations."""
    name = str(requested_attention)
    if requested_attention in available_methods():
        # A part that has the name from the model that it becomes part of is made exact, as a switch keeps it.
        whole = next(iter(_under_construction()[::-1]), self)
        is_inherited = whole is not self and method_of(getattr(whole, "config", self.config)) == name
        if is_inherited and models.attention_table(type(self)) is not None:
            return str(original(self, None, *args, **kwargs))
        refusals.refuse_unknown_implementation(type(self), name)
    try:
        return str(original(self, requested_attention, *args, **kwargs))
    except ValueError as error:
        # A known one that the model does not support, or a repository with a kernel.
        if name in ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()) or "/" in name:
            raise
        hint = did_you_mean(name, [*available_methods(), *EXACT_IMPLEMENTATIONS])
        raise UnsupportedAttentionError(f"{error}{hint} {OWN_FILE}") from error


def _initialize_weights(original: Any, self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Initialize learned parameters that a checkpoint lacks: models' own `_init_weights` do not know the class."""
    if isinstance(module, learned.LearnedParameters):
        module.reset_parameters()
        vars(module)["_is_hf_initialized"] = True  # by which Transformers knows that nothing is left to do
    else:
        original(self, module, *args, **kwargs)


def _load_from_state_dict(
    original: Any, self: PreTrainedModel, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
) -> None:
    learned.refuse_lost_parameters(self, state_dict, prefix)
    original(self, state_dict, prefix, *args, **kwargs)


def _init_continuous_batching(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse `generate_batch` and `continuous_batching_context_manager` with a method of this package.

    Where flash attention is installed, Transformers would switch the model to that, and generate with exact attention.
    """
    for name in filter(None, map(method_of, models.configs_of(self))):
        raise UnsupportedAttentionError(
            f"{name}: continuous batching (generate_batch) packs the tokens of several texts into one sequence "
            "and keeps their keys in pages, which only exact attention can use: call generate, or switch the "
            f"model with hf_efficient_attn.convert(model, {EXACT!r})"
        )
    return original(self, *args, **kwargs)


def _init_cache(
    original: Any, self: DynamicCache, data: Any = None, config: PreTrainedConfig | None = None, *args: Any, **more: Any
) -> None:
    original(self, more.pop("ddp_cache_data", data), config, *args, **more)
    if type(self) is DynamicCache and config is not None:
        _add_states(self, config.get_text_config(decoder=True))


@replaced_in_graphs(nothing)  # a graph keeps the keys
def _add_states(cache: DynamicCache, config: PreTrainedConfig) -> None:
    """Give a cache made for a config a `StateLayer` in every layer whose method has a recurrence.

    Layers with a sliding window of their own, and layers that get keys when the cache is made, do not change, nor those
    that the config chooses by name, because a cache does not know the modules. They keep keys, with the same output.
    """
    name = None if model_kinds.kind_of(type(config)).needs_cached_keys else method_of(config)
    for index, layer in enumerate(cache.layers if name is not None else ()):
        method = settings_of(config, str(name)).for_layer(index)
        is_plain = type(layer) is DynamicLayer and not layer.is_initialized
        if is_plain and method is not None and get_method(method.method).info.recurrent:
            cache.layers[index] = StateLayer(method)
