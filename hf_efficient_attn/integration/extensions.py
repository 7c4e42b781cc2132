"""Extensions of `PreTrainedModel`, `GenerationMixin` and `DynamicCache`; the docstring of the package lists them."""

import functools
import inspect
import sys
import traceback
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.utils import GenerationMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from hf_efficient_attn.errors import OWN_FILE, UnsupportedAttentionError, did_you_mean
from hf_efficient_attn.integration.cache import StateLayer
from hf_efficient_attn.integration.configs import check_parts, method_of, requested_methods, settings_of
from hf_efficient_attn.integration.learned import LearnedParameters
from hf_efficient_attn.integration.models import Snapshot, configs_of, models_in, with_parts
from hf_efficient_attn.integration.positions import refuse_long_generation
from hf_efficient_attn.integration.refusals import refuse_unknown_implementation
from hf_efficient_attn.integration.settings import EXACT, EXACT_IMPLEMENTATIONS
from hf_efficient_attn.integration.switching import switch
from hf_efficient_attn.methods import available_methods, get_method
from hf_efficient_attn.ops.tracing import nothing, replaced_in_graphs


def extend_classes() -> None:
    """Extend the classes. Called once."""
    for cls, name, extension in (
        (PreTrainedModel, "post_init", _post_init),
        (PreTrainedModel, "_from_config", _from_config),
        (PreTrainedModel, "set_attn_implementation", _set_implementation),
        (PreTrainedModel, "get_correct_attn_implementation", _correct_implementation),
        (PreTrainedModel, "_initialize_weights", _initialize_weights),
        (GenerationMixin, "init_continuous_batching", _init_continuous_batching),
        (GenerationMixin, "_prepare_cache_for_generation", _prepare_cache),
        (DynamicCache, "__init__", _init_cache),
    ):
        original = inspect.getattr_static(cls, name)
        is_of_class = isinstance(original, classmethod)
        extended = _extended(original.__func__ if is_of_class else original, extension)
        setattr(cls, name, classmethod(extended) if is_of_class else extended)


def _extended(original: Any, extension: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return extension(original, *args, **kwargs)

    return call


def _post_init(original: Any, self: PreTrainedModel) -> None:
    """Switch a new model to what its config says. Every constructor ends with `post_init`."""
    original(self)
    if any(method_of(part.config) for part in models_in(self)):
        switch([self], is_complete=not _is_part())


def _is_part() -> bool:
    """Whether a model whose `post_init` is called becomes part of another one, or gets more parts itself.

    Then the constructor of the other one, or that of a derived class, is a caller of its constructor. Only the callers
    know: a part is made by the same calls as a model of its own.
    """
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()) if frame.f_code.co_name == "__init__")
    return sum(isinstance(frame.f_locals.get("self"), PreTrainedModel) for frame in frames) > 1


def _from_config(original: Any, cls: type[PreTrainedModel], config: PreTrainedConfig, **kwargs: Any) -> PreTrainedModel:
    """Leave the config of a refused model as it was: the original writes the implementation into it first."""
    names = requested_methods(kwargs.get("attn_implementation"))
    before = Snapshot([], with_parts([config]) if names else [])
    try:
        model: PreTrainedModel = original(cls, config, **kwargs)
    except BaseException:
        before.restore()
        raise
    return model


def _set_implementation(
    original: Any, self: PreTrainedModel, attn_implementation: str | dict[str, Any], *args: Any, **kwargs: Any
) -> None:
    """Switch the modules too."""
    check_parts(self.config, attn_implementation)

    def change_configs() -> None:
        if isinstance(attn_implementation, str) and attn_implementation in available_methods():
            # The original skips classes whose source it cannot read, for example classes that a notebook defines.
            for config in configs_of(self):
                config._attn_implementation_internal = attn_implementation
        else:
            original(self, attn_implementation, *args, **kwargs)

    switch([self], change_configs)


def _correct_implementation(
    original: Any, self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any
) -> str:
    """Explain names that are refused: the original's message names only Transformers' own implementations."""
    name = str(requested_attention)
    if requested_attention in available_methods():
        refuse_unknown_implementation(type(self), name)
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
    if isinstance(module, LearnedParameters):
        module.reset_parameters()
        vars(module)["_is_hf_initialized"] = True  # by which Transformers knows that nothing is left to do
    else:
        original(self, module, *args, **kwargs)


def _init_continuous_batching(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse `generate_batch` and `continuous_batching_context_manager` with a method of this package.

    Transformers would refuse it too, but not where flash attention is installed: there it would switch the model to
    that, and generate with exact attention.
    """
    for name in filter(None, map(method_of, configs_of(self))):
        raise UnsupportedAttentionError(
            f"{name}: continuous batching (generate_batch) packs the tokens of several texts into one sequence "
            "and keeps their keys in pages, which only exact attention can use: call generate, or switch the "
            f"model with hf_efficient_attn.convert(model, {EXACT!r})"
        )
    return original(self, *args, **kwargs)


def _prepare_cache(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse a text that would become longer than the position table.

    The length of the prompt and the largest number of new tokens are known here, and no token has been computed.
    """
    given = inspect.signature(original).bind(self, *args, **kwargs).arguments
    if any(map(method_of, configs_of(self))):
        # In an encoder-decoder the mask belongs to the encoder.
        inputs = {} if self.config.is_encoder_decoder else given["model_kwargs"]
        for part in models_in(self.get_decoder()):
            refuse_long_generation(part, given["max_cache_length"], inputs)
    return original(self, *args, **kwargs)


def _init_cache(
    original: Any, self: DynamicCache, data: Any = None, config: PreTrainedConfig | None = None, *args: Any, **more: Any
) -> None:
    original(self, more.pop("ddp_cache_data", data), config, *args, **more)
    if type(self) is DynamicCache and config is not None:
        _add_states(self, config.get_text_config(decoder=True))


# A graph keeps the keys.
@replaced_in_graphs(nothing)
def _add_states(cache: DynamicCache, config: PreTrainedConfig) -> None:
    """Give a cache made for a config a `StateLayer` in every layer whose method has a recurrence.

    Layers with a sliding window of their own, and layers that get keys when the cache is made, do not change.
    """
    name = method_of(config)
    for index, layer in enumerate(cache.layers if name is not None else ()):
        method = settings_of(config, str(name)).for_cached_layer(index)
        is_plain = type(layer) is DynamicLayer and not layer.is_initialized
        if is_plain and method is not None and get_method(method.method).info.recurrent:
            cache.layers[index] = StateLayer(method)
