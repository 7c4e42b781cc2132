"""Methods of `PreTrainedModel` that also make the model ready, and one that knows our names when a name is misspelt."""

import difflib
import functools

from transformers.modeling_utils import PreTrainedModel

from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_name
from hf_efficient_attn.integration import models
from hf_efficient_attn.integration.configs import method_of
from hf_efficient_attn.integration.learned import LearnedParameters
from hf_efficient_attn.methods.base import available_methods


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
