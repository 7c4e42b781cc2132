"""`efficient_attention` on every Transformers config, and its entry in `config.json`."""

import functools
from typing import Any, NoReturn

from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_name
from hf_efficient_attn.integration import settings
from hf_efficient_attn.integration.settings import ATTRIBUTE, method_of
from hf_efficient_attn.methods import available_methods, learns

logger = logging.get_logger(__name__)


def saved_name(config: object) -> str | None:
    """The name that config.json keeps: a method, or its function in a kernel repository (ORG/NAME:METHOD); or None."""
    name = str(getattr(config, "_attn_implementation", None))
    return name if name.rpartition(":")[2] in available_methods() else None


def parts_of(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """The sub-configs of a config of a composite model, by their names."""
    parts = {key: getattr(config, key, None) for key in config.sub_configs}
    return {key: part for key, part in parts.items() if isinstance(part, PreTrainedConfig)}


class Stored(dict[str, Any]):
    """The read-only dictionary `config.efficient_attention`: a change of one key would escape the check."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedAttentionError(
            "config.efficient_attention is read-only: assign a new dictionary instead, "
            "config.efficient_attention = {**config.efficient_attention, key: value}"
        )

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return Stored, (dict(self),)


def _get(config: PreTrainedConfig) -> Stored | None:
    """None, or a read-only dictionary.

    It can be set to None, a dictionary, a method's config or an `EfficientAttentionConfig`. A dictionary without
    "method" belongs to the method that the config names. If it names no implementation yet, this also chooses the
    method, for all parts of a composite model, or only for those that name it already. If it names another one, the
    setting has no effect until the model is switched.
    """
    stored = settings.stored_settings(config)
    return None if stored is None else Stored(stored.to_dict())


def _set(config: PreTrainedConfig, value: Any) -> None:
    if value is None:
        config.__dict__.pop(ATTRIBUTE, None)
        return
    config.__dict__[ATTRIBUTE] = given = settings.as_settings(value, method_of(config))
    named = getattr(config, "_attn_implementation", None)
    if named is None:
        # If parts were chosen by name, these are the hyperparameters of those parts, which get them in a switch.
        if not any(method_of(part) == given.method for part in parts_of(config).values()):
            config._attn_implementation = str(given.method)
    elif str(named).rpartition(":")[2] != given.method:  # a kernel repository, ORG/NAME:METHOD, reads it too
        rest = ", with new learned parameters; for those of a checkpoint, load it without attn_implementation"
        rest = rest if any(learns(entry.config) for entry in given.entries) else ""
        logger.warning_once(
            f"efficient_attention (of {given.method!r}) has no effect while attn_implementation is {named!r}; "
            f"call model.set_attn_implementation({given.method!r}) to use it{rest}"
        )


def check_parts(config: PreTrainedConfig, implementation: object) -> None:
    """Refuse parts that a composite model does not have in an `attn_implementation`. Transformers ignores them."""
    # Trainer reads the config.json of a checkpoint as a plain config, which does not know the parts of its model.
    if not isinstance(implementation, dict) or type(config) is PreTrainedConfig:
        return
    for key, value in implementation.items():
        if key not in ("", *config.sub_configs) and (isinstance(value, dict) or value in available_methods()):
            unknown = unknown_name(f"part of {type(config).__name__}", key, sorted(config.sub_configs))
            raise UnsupportedAttentionError(f"attn_implementation: {unknown} A model without parts takes one name")


def extend_configs() -> None:
    """Give `PreTrainedConfig` the attribute, two more keys in `to_dict` and a check of names of parts."""
    setattr(PreTrainedConfig, ATTRIBUTE, property(_get, _set))
    implementation: Any = PreTrainedConfig.__dict__["_attn_implementation"]

    def set_checked(self: PreTrainedConfig, value: str | dict[str, Any] | None) -> None:
        check_parts(self, value)
        implementation.fset(self, value)

    setattr(PreTrainedConfig, implementation.fget.__name__, implementation.setter(set_checked))
    to_dict = PreTrainedConfig.to_dict

    @functools.wraps(to_dict)
    def to_dict_with_method(self: PreTrainedConfig) -> dict[str, Any]:
        output = to_dict(self)
        output.pop(ATTRIBUTE, None)
        for part in (output.get(key) for key in self.sub_configs):
            # Its own dictionary names the method as well. LightGlue's config names the implementation a second time.
            if isinstance(part, dict) and ATTRIBUTE in part:
                part.pop("attn_implementation", None)
        entry, name = settings.implementation_entry(self, saved_name), saved_name(self)
        if type(self).base_config_key and not type(self).model_type:
            # A group of values that is no config of a model. Some such classes refuse keys that they do not know.
            return output
        if entry is not None:
            output["attn_implementation"] = entry
        if name is not None:
            output[ATTRIBUTE] = settings.settings_of(self, name.rpartition(":")[2]).to_dict()
        return output

    setattr(PreTrainedConfig, to_dict.__name__, to_dict_with_method)
