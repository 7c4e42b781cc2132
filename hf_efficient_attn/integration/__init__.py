"""The way into Transformers: one attention function and one mask function a method, and a few base-class extensions.

Transformers has an official place for the first two (`AttentionInterface`, `AttentionMaskInterface`). It has none for
what a checkpoint must carry (`attn_implementation` is dropped on every save) nor for a look at a model that was just
made, so `register` extends its base classes, once, in these places only:

- `PreTrainedConfig.efficient_attention`, an attribute (`configs.EfficientAttentionAttribute`);
- `PreTrainedConfig.to_dict` also holds the method and its hyperparameters (`configs.extend_configs`);
- `PreTrainedModel.post_init` and `set_attn_implementation` also run `models.prepare`, and the error of
  `get_correct_attn_implementation` names the method that a misspelt name comes nearest to (`extensions.extend_models`);
- `PreTrainedModel._initialize_weights` also starts the parameters that a method learns (`learned.LearnedParameters`);
- `DynamicCache.__init__` gives layers whose method decodes from a state a layer for it (`extensions.extend_caches`).

`models.prepare` changes no class. It numbers the attention modules, gives them the parameters that their method learns,
and a few kinds of them a forward that hands the method hidden states in place of keys and values (`contracted`).

An attention module may say of itself, by plain attributes: `attention_layer`, its name in `layers`; `num_heads`,
`head_dim`, `value_head_dim` and `max_tokens` (keys), by which learned parameters get their sizes; `is_rectangular`,
that it has fewer keys than queries by construction, so that a method without such a form is refused. A config's
`attention_note` says why there is no attention where one may look for it.

A model or config that names none of our methods passes through all of them unchanged.
"""

from hf_efficient_attn.integration.imports import after_import
from hf_efficient_attn.integration.settings import EfficientAttentionConfig
from hf_efficient_attn.methods import available_methods

__all__ = ["EfficientAttentionConfig", "register"]


def register() -> None:
    """Make every method known to Transformers; may be called again after a method was added."""
    after_import("transformers.configuration_utils", _extend_configs)
    after_import("transformers.masking_utils", _register_masks)
    after_import("transformers.modeling_utils", _register_attention)


def _extend_configs() -> None:
    from hf_efficient_attn.integration.configs import extend_configs

    extend_configs()


def _register_masks() -> None:
    from transformers.masking_utils import AttentionMaskInterface

    from hf_efficient_attn.integration.masks import padding_mask

    for name in available_methods():
        AttentionMaskInterface.register(name, padding_mask)


def _register_attention() -> None:
    from transformers.modeling_utils import AttentionInterface

    from hf_efficient_attn.integration.attention import make_attention_function
    from hf_efficient_attn.integration.extensions import extend_caches, extend_models

    _extend_configs()
    extend_models()
    extend_caches()
    for name in available_methods():
        AttentionInterface.register(name, make_attention_function(name))
