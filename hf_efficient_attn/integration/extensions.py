"""Extensions of `PreTrainedModel`, `GenerationMixin` and `DynamicCache`; the docstring of the package lists them."""

import difflib
import functools
import inspect
import sys
import traceback
from typing import Any

from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.utils import GenerationMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from hf_efficient_attn.errors import OWN_FILE, UnsupportedAttentionError, unknown_method
from hf_efficient_attn.integration.checks import refuse_unknown_implementation
from hf_efficient_attn.integration.configs import check_parts, method_of, requested_methods, settings_of
from hf_efficient_attn.integration.learned import LearnedParameters
from hf_efficient_attn.integration.models import configs_of, models_in, with_parts
from hf_efficient_attn.integration.positions import refuse_long_generation
from hf_efficient_attn.integration.recurrent import StateLayer, is_recurrent
from hf_efficient_attn.integration.settings import EXACT, EXACT_IMPLEMENTATIONS
from hf_efficient_attn.integration.switching import switch
from hf_efficient_attn.integration.transaction import Snapshot
from hf_efficient_attn.methods import available_methods
from hf_efficient_attn.ops.tracing import nothing, replaced_in_graphs

# The attribute by which Transformers knows modules that need no initialization.
_INITIALIZED = "_is_hf_initialized"


def _replace(cls: type, function: Any) -> None:
    """Replace the method of a class that `function` wraps."""
    setattr(cls, function.__name__, function)


def extend_models() -> None:
    """Extend `PreTrainedModel`. Called once."""
    _extend_construction()
    _extend_switching()
    _extend_initialization()


def _extend_construction() -> None:
    """Switch every new model to what its config says, and leave the config of a refused model as it was."""
    post_init = PreTrainedModel.post_init

    # Every constructor ends with `post_init`, whichever way a model is made.
    @functools.wraps(post_init)
    def post_init_and_switch(self: PreTrainedModel) -> None:
        post_init(self)
        if any(method_of(part.config) for part in models_in(self)):
            switch([self], is_complete=not _is_part())

    from_config = vars(PreTrainedModel)["_from_config"].__func__

    @functools.wraps(from_config)
    def from_config_or_restore(cls: type[PreTrainedModel], config: PreTrainedConfig, **kwargs: Any) -> PreTrainedModel:
        # The original writes `attn_implementation` into the caller's config before it makes the model.
        names = requested_methods(kwargs.get("attn_implementation"))
        before = Snapshot([], with_parts([config]) if names else [])
        try:
            return from_config(cls, config, **kwargs)
        except BaseException:
            before.restore()
            raise

    _replace(PreTrainedModel, post_init_and_switch)
    _replace(PreTrainedModel, classmethod(from_config_or_restore))


def _is_part() -> bool:
    """Whether a model whose `post_init` is called becomes part of another one, or gets more parts itself.

    Then the constructor of the other one, or that of a derived class, is a caller of its constructor. Only the callers
    know: a part is made by the same calls as a model of its own.
    """
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()) if frame.f_code.co_name == "__init__")
    return sum(isinstance(frame.f_locals.get("self"), PreTrainedModel) for frame in frames) > 1


def _extend_switching() -> None:
    """Make `set_attn_implementation` switch the modules too, and explain names that are refused."""
    set_implementation = PreTrainedModel.set_attn_implementation

    @functools.wraps(set_implementation)
    def set_implementation_and_switch(
        self: PreTrainedModel, attn_implementation: str | dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        check_parts(self.config, attn_implementation)

        def change_configs() -> None:
            if isinstance(attn_implementation, str) and attn_implementation in available_methods():
                # The original skips classes whose source it cannot read, such as those of a notebook.
                for config in configs_of(self):
                    config._attn_implementation_internal = attn_implementation
            else:
                set_implementation(self, attn_implementation, *args, **kwargs)

        switch([self], change_configs)

    correct = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(correct)
    def correct_or_explain(self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        names = available_methods()
        if requested_attention in names:
            refuse_unknown_implementation(type(self), requested_attention)
        try:
            return correct(self, requested_attention, *args, **kwargs)
        except ValueError as error:
            name = str(requested_attention)
            # A known one that the model does not support, or a repository with a kernel.
            if name in ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()) or "/" in name:
                raise
            # The original's message names only Transformers' own implementations.
            if difflib.get_close_matches(name, names):
                sentence = unknown_method(name, [*names, *EXACT_IMPLEMENTATIONS])
                raise UnsupportedAttentionError(sentence) from error
            raise ValueError(f"{error} {OWN_FILE}") from error

    _replace(PreTrainedModel, set_implementation_and_switch)
    _replace(PreTrainedModel, correct_or_explain)


def _extend_initialization() -> None:
    """Initialize learned parameters that a checkpoint lacks: models' own `_init_weights` do not know the class."""
    initialize = PreTrainedModel._initialize_weights

    @functools.wraps(initialize)
    def initialize_learned_too(self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if isinstance(module, LearnedParameters):
            module.reset_parameters()
            setattr(module, _INITIALIZED, True)
        else:
            initialize(self, module, *args, **kwargs)

    _replace(PreTrainedModel, initialize_learned_too)


def extend_generation() -> None:
    """Refuse what `GenerationMixin` cannot do with a method of this package, before it begins. Called once.

    That is a text that would become longer than the position table, and continuous batching (`generate_batch`), which
    Transformers would refuse too, but not where flash attention is installed: there it would switch the model to that,
    and generate with exact attention.
    """
    initialize = GenerationMixin.init_continuous_batching

    # `generate_batch` and `continuous_batching_context_manager` call it as well.
    @functools.wraps(initialize)
    def initialize_or_refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        for config in configs_of(self):
            if name := method_of(config):
                raise UnsupportedAttentionError(
                    f"{name}: continuous batching (generate_batch) packs the tokens of several texts into one sequence "
                    "and keeps their keys in pages, which only exact attention can use: call generate, or switch the "
                    f"model with hf_efficient_attn.convert(model, {EXACT!r})"
                )
        return initialize(self, *args, **kwargs)

    prepare = GenerationMixin._prepare_cache_for_generation
    signature = inspect.signature(prepare)

    # The length of the prompt and the largest number of new tokens are known here, and no token has been computed.
    @functools.wraps(prepare)
    def prepare_or_refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        if any(method_of(config) for config in configs_of(self)):
            # In an encoder-decoder the mask belongs to the encoder.
            inputs = {} if self.config.is_encoder_decoder else given["model_kwargs"]
            for part in models_in(self.get_decoder()):
                refuse_long_generation(part, given["max_cache_length"], inputs)
        return prepare(self, *args, **kwargs)

    _replace(GenerationMixin, initialize_or_refuse)
    _replace(GenerationMixin, prepare_or_refuse)


def extend_caches() -> None:
    """Give a `DynamicCache` made for a config a `StateLayer` in every layer whose method has a recurrence. Called once.

    Other layers do not change: layers with a sliding window of their own, layers that get keys when the cache is made,
    and caches made while a graph is compiled.
    """
    initialize = DynamicCache.__init__

    @functools.wraps(initialize)
    def initialize_with_states(
        self: DynamicCache,
        ddp_cache_data: Any = None,
        config: PreTrainedConfig | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        initialize(self, ddp_cache_data, config, *args, **kwargs)
        if type(self) is DynamicCache and config is not None:
            add_states(self, config.get_text_config(decoder=True))

    @replaced_in_graphs(nothing)
    def add_states(self: DynamicCache, config: PreTrainedConfig) -> None:
        name = method_of(config)
        for index, layer in enumerate(self.layers if name is not None else ()):
            method = settings_of(config, str(name)).for_cached_layer(index)
            is_plain = type(layer) is DynamicLayer and not layer.is_initialized
            if is_plain and method is not None and is_recurrent(method):
                self.layers[index] = StateLayer(method)

    _replace(DynamicCache, initialize_with_states)
