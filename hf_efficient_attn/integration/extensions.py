"""Methods of `PreTrainedModel` that also make the model ready, and one that knows our names when a name is misspelt.

And `DynamicCache`, whose layers are states where the config's method can decode from one.
"""

import difflib
import functools

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.modeling_utils import PreTrainedModel

from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_name
from hf_efficient_attn.integration import models
from hf_efficient_attn.integration.attention import settings_of
from hf_efficient_attn.integration.configs import method_of
from hf_efficient_attn.integration.learned import LearnedParameters
from hf_efficient_attn.integration.recurrent import StateLayer, is_recurrent
from hf_efficient_attn.integration.settings import EfficientAttentionConfig
from hf_efficient_attn.methods import available_methods


def extend_models() -> None:
    """Every constructor ends with `post_init`, whichever way the model is made. Done once."""
    if hasattr(PreTrainedModel.post_init, "extended_for_efficient_attention"):
        return
    post_init, set_implementation = PreTrainedModel.post_init, PreTrainedModel.set_attn_implementation

    @functools.wraps(post_init)
    def post_init_and_prepare(self):
        post_init(self)
        models.prepare(self)

    @functools.wraps(set_implementation)
    def set_implementation_and_prepare(self, attn_implementation, *args, **kwargs):
        if not models.requested(attn_implementation):
            set_implementation(self, attn_implementation, *args, **kwargs)
            models.drop_learned(self)
            return
        configs = models.configs_of(self)
        before = [(config, config._attn_implementation, config.efficient_attention) for config in configs]
        done = False
        try:
            if isinstance(attn_implementation, str):
                # The original skips, with a log line, classes whose source it cannot read, as those of a notebook.
                for config in configs:
                    config._attn_implementation_internal = attn_implementation
            else:
                set_implementation(self, attn_implementation, *args, **kwargs)
            models.prepare(self, strict=method_of(self.config) is not None)
            done = True
        finally:
            if not done:
                models.restore(before)

    correct = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(correct)
    def correct_or_name_the_nearest(self, requested_attention, *args, **kwargs):
        try:
            return correct(self, requested_attention, *args, **kwargs)
        except ValueError as error:
            # The original names its own implementations alone, and the nearest of ours is what was meant.
            names = available_methods()
            if requested_attention in names or not difflib.get_close_matches(str(requested_attention), names):
                raise
            sentence = unknown_name("attention method", requested_attention, [*names, "sdpa", "eager"])
            raise UnsupportedAttentionError(sentence) from error

    initialize = PreTrainedModel._initialize_weights

    @functools.wraps(initialize)
    def initialize_learned_too(self, module, *args, **kwargs):
        # A model's own `_init_weights` knows its own classes alone, and what no checkpoint holds comes as garbage.
        if isinstance(module, LearnedParameters):
            module.reset_parameters()
            module._is_hf_initialized = True
        else:
            initialize(self, module, *args, **kwargs)

    PreTrainedModel._initialize_weights = initialize_learned_too
    PreTrainedModel.get_correct_attn_implementation = correct_or_name_the_nearest
    post_init_and_prepare.extended_for_efficient_attention = True
    PreTrainedModel.post_init = post_init_and_prepare
    PreTrainedModel.set_attn_implementation = set_implementation_and_prepare


def extend_caches() -> None:
    """A `DynamicCache` made for a config has a `StateLayer` in every layer whose method has a recurrence. Done once.

    Layers with a window of their own, those that are given keys from the start, and caches made while a graph is
    compiled stay what they are.
    """
    if hasattr(DynamicCache.__init__, "extended_for_efficient_attention"):
        return
    make = DynamicCache.__init__

    @functools.wraps(make)
    def make_with_states(self, ddp_cache_data=None, config=None, *args, **kwargs):
        make(self, ddp_cache_data, config, *args, **kwargs)
        if type(self) is not DynamicCache or config is None or torch.compiler.is_compiling():
            return
        config = config.get_text_config(decoder=True)
        name = method_of(config)
        if name is None:
            return
        settings = settings_of(config, EfficientAttentionConfig(name))
        for index, layer in enumerate(self.layers):
            method = settings.for_layer(index)
            if type(layer) is DynamicLayer and not layer.is_initialized and is_recurrent(method):
                self.layers[index] = StateLayer(method)

    make_with_states.extended_for_efficient_attention = True
    DynamicCache.__init__ = make_with_states
