"""What users call on a model that they have: `convert` and `extend_positions`.

Transformers' model classes are imported inside the functions, since that import takes seconds.
"""

from collections.abc import Sequence

from torch import nn

from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_name
from hf_efficient_attn.integration.foreign import ForeignHandler, foreign_attention
from hf_efficient_attn.integration.settings import EfficientAttentionConfig, as_settings
from hf_efficient_attn.methods import MethodConfig, available_methods, make_config


def convert(
    model: nn.Module,
    method_or_config: "str | MethodConfig | EfficientAttentionConfig | dict",
    *,
    layers: Sequence | None = None,
    **hyperparameters,
) -> nn.Module:
    """Switch a model to a method, in place; the choice is saved with the model.

    Args:
        model: a Transformers model, or a module that holds some (a PEFT model, a wrapper); or a `BigGAN` of the package
            pytorch-pretrained-biggan, whose choice is saved with nothing.
        method_or_config: a method's name or config, an `EfficientAttentionConfig`, or a dictionary as in
            `config.efficient_attention`. "sdpa", "eager" and Transformers' other implementations go back: the weights
            were never touched, so the model is then what it was.
        layers: indices of the layers to switch (all others become exact), or entries of a mix; None for all layers.
        **hyperparameters: replace those of the method or its config.

    Returns:
        the same model.

    Raises:
        UnsupportedAttentionError: before anything is changed, if the method, a hyperparameter or a layer is unknown, or
            the model cannot take the method.
    """
    for handler, modules in foreign_attention(model):
        return _convert_foreign(model, handler, modules, method_or_config, layers, hyperparameters)
    from hf_efficient_attn.integration.models import configs_of, switch, transformers_models

    roots = transformers_models(model)
    if isinstance(method_or_config, str) and method_or_config not in available_methods():
        _check_other(method_or_config, layers, hyperparameters)
        for root in roots:
            root.set_attn_implementation(method_or_config)
            for config in configs_of(root):
                config.efficient_attention = None
        return model
    switch(roots, _settings(method_or_config, layers, hyperparameters))
    return model


def _convert_foreign(
    model: nn.Module, handler: ForeignHandler, modules: list, method_or_config, layers, hyperparameters
) -> nn.Module:
    from transformers.modeling_utils import PreTrainedModel

    if any(isinstance(module, PreTrainedModel) for module in model.modules()):
        raise UnsupportedAttentionError(
            f"the module holds {handler.title} beside Transformers models: convert each by itself"
        )
    if isinstance(method_or_config, str) and method_or_config not in available_methods():
        _check_other(method_or_config, layers, hyperparameters)
        handler.check_other(method_or_config)
        handler.restore(modules)
    else:
        handler.switch(modules, _settings(method_or_config, layers, hyperparameters))
    return model


def _settings(method_or_config, layers, hyperparameters) -> EfficientAttentionConfig:
    if isinstance(method_or_config, (str, MethodConfig)):
        if layers is not None and any(isinstance(layer, dict) for layer in layers):
            return EfficientAttentionConfig(method_or_config, hyperparameters, layers)
        return EfficientAttentionConfig(make_config(method_or_config, **hyperparameters), None, layers)
    settings = as_settings(method_or_config)
    if layers is None and not hyperparameters:
        return settings
    if len(settings.entries) > 1 or (layers is not None and settings.layers is not None):
        raise UnsupportedAttentionError(
            "the configuration says already what stands in which layer: give layers and hyperparameters inside it"
        )
    changed = make_config(settings.entries[0].config, **hyperparameters)
    return EfficientAttentionConfig(changed, None, settings.layers if layers is None else layers)


def _check_other(name: str, layers, hyperparameters) -> None:
    """`name`, an implementation that is not ours, must be one of Transformers' and takes nothing else."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    if name not in known:
        raise UnsupportedAttentionError(unknown_name("attention method", name, [*available_methods(), "sdpa", "eager"]))
    if layers is not None or hyperparameters:
        raise UnsupportedAttentionError(
            f"{name!r} is no method of this package and takes no layers or hyperparameters; to keep some layers "
            "exact name the others: convert(model, method, layers=[...])"
        )
