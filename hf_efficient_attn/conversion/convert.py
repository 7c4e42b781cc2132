"""`convert`: switch a model that is in memory to another attention method."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_method
from hf_efficient_attn.integration.models import choose, configs_of, transformers_models
from hf_efficient_attn.integration.settings import EXACT_IMPLEMENTATIONS, EfficientAttentionConfig, as_settings
from hf_efficient_attn.integration.switching import switch
from hf_efficient_attn.methods import MethodConfig, available_methods, make_config


def convert(
    model: nn.Module,
    method_or_config: str | MethodConfig | EfficientAttentionConfig | dict[str, Any],
    *,
    layers: Sequence[Any] | None = None,
    **hyperparameters: Any,
) -> nn.Module:
    """Switch a model to a method, in place. The choice is saved with the model.

    The switch is one transaction: if it fails for any reason, the model is as it was before.

    Args:
        model: a Transformers model; or a module that contains some, such as a PEFT model or a wrapper, all of which are
            switched.
        method_or_config: a method's name or config, an `EfficientAttentionConfig`, or a dictionary as in
            `config.efficient_attention`. "sdpa", "eager" and Transformers' other implementations switch back. The
            weights never change, so the model then is what it was before.
        layers: indices of the layers to switch (all others become exact), names such as "encoder", or entries of a mix;
            None for all layers. See `EfficientAttentionConfig`.
        **hyperparameters: replace those of the method or its config.

    Returns:
        The same model.

    Raises:
        UnsupportedAttentionError: the method, a hyperparameter or a layer is unknown, or the model does not support the
            method.
    """
    settings = choice_of(method_or_config, layers, hyperparameters)
    roots = transformers_models(model)

    def change_configs() -> None:
        if settings is not None:
            choose(roots, settings)
            return
        for root in roots:
            root.set_attn_implementation(str(method_or_config))
            for config in configs_of(root):
                config.efficient_attention = None

    switch(roots, change_configs)
    return model


def choice_of(
    method_or_config: str | MethodConfig | EfficientAttentionConfig | dict[str, Any],
    layers: Sequence[Any] | None,
    hyperparameters: Mapping[str, Any],
) -> EfficientAttentionConfig | None:
    """The choice that the arguments of `convert` describe; None for one of Transformers' own implementations.

    What is no choice, whatever the model is, is refused.
    """
    if isinstance(method_or_config, str) and method_or_config not in available_methods():
        if method_or_config not in ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()):
            known = [*available_methods(), *EXACT_IMPLEMENTATIONS]
            raise UnsupportedAttentionError(unknown_method(method_or_config, known))
        if layers is not None or hyperparameters:
            raise UnsupportedAttentionError(
                f"{method_or_config!r} is exact attention in all layers and takes no layers or hyperparameters; to "
                "keep some layers exact, name the others: convert(model, method, layers=[...])"
            )
        return None
    if not isinstance(method_or_config, (EfficientAttentionConfig, Mapping)):
        make_config(method_or_config)  # refuses what is no method, None included
        return EfficientAttentionConfig(method_or_config, hyperparameters, layers)
    settings = as_settings(method_or_config)
    if layers is None and not hyperparameters:
        return settings
    if len(settings.entries) > 1 or (layers is not None and settings.layers is not None):
        raise UnsupportedAttentionError(
            "the configuration already says which layer uses which method: give layers and hyperparameters inside it"
        )
    changed = make_config(settings.entries[0].config, **hyperparameters)
    return EfficientAttentionConfig(changed, None, settings.layers if layers is None else layers)
