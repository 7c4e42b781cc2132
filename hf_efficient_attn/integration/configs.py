"""`efficient_attention` on every Transformers config, and what of it is written to `config.json`."""

import functools
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from hf_efficient_attn.integration.settings import EfficientAttentionConfig, Stored, as_settings
from hf_efficient_attn.methods import available_methods

logger = logging.get_logger(__name__)


def method_of(config: PreTrainedConfig) -> str | None:
    """The method that a config names as its attention implementation; None if it is none of ours."""
    name = getattr(config, "_attn_implementation", None)
    return name if name in available_methods() else None


class EfficientAttentionAttribute:
    """`config.efficient_attention`: None, or a dictionary for reading only.

    Takes None, a dictionary, a method's config or an `EfficientAttentionConfig`, and checks it at once. A dictionary
    without "method" is one of the method that the config names. On a config that names no implementation yet it also
    chooses the method; on one that names another, it waits there until the model is switched.
    """

    def __get__(self, config: PreTrainedConfig | None, owner: type):
        return self if config is None else config.__dict__.get("efficient_attention")

    def __set__(self, config: PreTrainedConfig, value: Any) -> None:
        if value is None:
            config.__dict__.pop("efficient_attention", None)
            return
        settings = as_settings(value, method_of(config))
        config.__dict__["efficient_attention"] = Stored(settings)
        named = getattr(config, "_attn_implementation", None)
        if named is None:
            config._attn_implementation = settings.method
        elif named not in available_methods():
            logger.warning_once(
                f"efficient_attention has no effect while attn_implementation is {named!r}; "
                f"model.set_attn_implementation({settings.method!r}) puts it in force"
            )


def implementation_entry(config: PreTrainedConfig) -> "str | dict | None":
    """The `attn_implementation` to be saved: a name, for a composite model whose parts differ a dictionary, or None."""
    own, parts = method_of(config), {}
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if isinstance(part, PreTrainedConfig):
            parts[key] = implementation_entry(part)
    if all(entry == own for entry in parts.values()):
        return own
    entries = {key: entry for key, entry in parts.items() if entry is not None}
    return entries if own is None else {"": own, **entries}


def extend_configs() -> None:
    """Give `PreTrainedConfig` the attribute and the two keys in `to_dict`. Done once."""
    if isinstance(PreTrainedConfig.__dict__.get("efficient_attention"), EfficientAttentionAttribute):
        return
    PreTrainedConfig.efficient_attention = EfficientAttentionAttribute()
    to_dict = PreTrainedConfig.to_dict

    @functools.wraps(to_dict)
    def to_dict_with_method(self) -> dict[str, Any]:
        output = to_dict(self)
        output.pop("efficient_attention", None)
        entry, name = implementation_entry(self), method_of(self)
        if entry is not None:
            output["attn_implementation"] = entry
        if name is not None:
            stored = self.efficient_attention
            settings = EfficientAttentionConfig(name) if stored is None else stored.settings
            if settings.method != name:
                settings = EfficientAttentionConfig(name)
            output["efficient_attention"] = settings.to_dict()
        return output

    PreTrainedConfig.to_dict = to_dict_with_method
