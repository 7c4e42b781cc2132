"""The connection to Transformers: one attention function and one mask function per method, and a few extensions.

Transformers has an interface for the two functions, but none for what a checkpoint must carry (`attn_implementation` is
dropped on every save), nor for changing a model that was just made. `register` therefore extends its base classes:

- `PreTrainedConfig.efficient_attention` is an attribute, which `to_dict` contains together with the method's name, and
  `_attn_implementation` refuses methods for parts that a model does not have (`configs`).
- `PreTrainedModel.post_init` of the outermost model and `set_attn_implementation` also switch the attention modules.
  `switching.extend_classes` lists these and all other methods that are extended; their extensions say what they do.

A switch numbers the attention modules and attaches the parameters that their method learns. A few kinds of modules also
get a forward of their own (`own_forward`), a hook (`distance_bias`), or a subclass that asks the interface (`patched`).

An attention module can describe itself by plain attributes: `attention_layer`, its name in `layers`; `num_heads`,
`head_dim`, `value_head_dim` and `max_tokens` (the largest number of keys), which determine the sizes of learned
parameters; `is_rectangular`, True if it has fewer keys than queries by construction. The attribute `attention_note` of
a config explains why a layer has no attention.
"""

import functools

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from hf_efficient_attn.integration.attention import REGISTERED, make_attention_function
from hf_efficient_attn.integration.configs import extend_configs
from hf_efficient_attn.integration.inputs import padding_mask
from hf_efficient_attn.integration.settings import DEFAULTS, EfficientAttentionConfig
from hf_efficient_attn.integration.switching import extend_classes
from hf_efficient_attn.methods import on_register
from hf_efficient_attn.ops.tracing import in_onnx_export

__all__ = ["EfficientAttentionConfig", "register"]


@functools.cache
def register() -> None:
    """Make every method known to Transformers, those that are registered later included. A second call does nothing."""
    # Dynamo, with which the exporter tries again after a failure, otherwise takes the result for False. Marking it
    # imports Dynamo, as Transformers does; where the methods are defined it would delay what needs no models.
    torch.compiler.assume_constant_result(in_onnx_export)
    extend_configs()
    extend_classes()
    on_register(_register_method)


def _register_method(name: str) -> None:
    DEFAULTS[name] = EfficientAttentionConfig(name)
    AttentionMaskInterface.register(name, padding_mask)
    REGISTERED[name] = make_attention_function(name)
    AttentionInterface.register(name, REGISTERED[name])
