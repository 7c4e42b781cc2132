"""Two methods of `PreTrainedModel` that also make the model ready: `post_init` and `set_attn_implementation`."""

import functools

from transformers.modeling_utils import PreTrainedModel

from hf_efficient_attn.integration import models
from hf_efficient_attn.integration.configs import method_of


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
            return set_implementation(self, attn_implementation, *args, **kwargs)
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

    post_init_and_prepare.extended_for_efficient_attention = True
    PreTrainedModel.post_init = post_init_and_prepare
    PreTrainedModel.set_attn_implementation = set_implementation_and_prepare
