"""Which method stands in which layer, and how a config says so: `EfficientAttentionConfig` and its form on disk."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_name
from hf_efficient_attn.integration.layers import Layer, check_layer, in_order
from hf_efficient_attn.methods import MethodConfig, get_method, make_config

FORMAT_VERSION = 1
# Exact attention as `attn_implementation` names it: the default, and every name of it.
EXACT = "sdpa"
EXACT_IMPLEMENTATIONS = (EXACT, "eager")


@dataclass(frozen=True)
class Entry:
    """One method and the layers in which it stands; None for all of them."""

    layers: tuple[Layer, ...] | None
    config: MethodConfig


@dataclass(frozen=True)
class EfficientAttentionConfig:
    """The choice that a model carries in `config.efficient_attention`; immutable, checked when made.

    Args:
        method: a name from `hea.available_methods()` or a method's config. It is also the `attn_implementation` under
            which the choice is in force. For a mix it may be left out: it is then the first entry's.
        hyperparameters: replace the method's defaults. None for a mix, whose entries hold their own.
        layers: indices of the layers in which the method stands, or the names that a model has for them (T2T-ViT's
            "t2t.0"), all others staying exact; None for all layers; or, for a mix, dictionaries {"layers": [indices],
            "method": name, hyperparameter: value, ...}.

    Attributes:
        entries: the same, resolved: every method with its layers.

    Raises:
        UnsupportedAttentionError: unknown method or hyperparameter, a value out of range or of the wrong type, a layer
            that is neither a non-negative integer nor a name, or is named twice.
    """

    method: "str | MethodConfig | None" = None
    hyperparameters: Mapping[str, Any] | None = field(default=None, compare=False)
    layers: Sequence | None = field(default=None, compare=False)
    entries: tuple[Entry, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        values, layers = dict(self.hyperparameters or {}), _as_list(self.layers)
        if layers is not None and any(isinstance(layer, Mapping) for layer in layers):
            if values or isinstance(self.method, MethodConfig):
                raise UnsupportedAttentionError(
                    "a mix of methods takes its hyperparameters inside the entries of 'layers', not beside them"
                )
            entries = tuple(_mix_entry(layer, self.method) for layer in layers)
            method = self.method or entries[0].config.method
            get_method(method)
        elif self.method is None:
            raise UnsupportedAttentionError(
                "efficient_attention names no method: give 'method', or attn_implementation=<name> beside it"
            )
        else:
            config = make_config(self.method, **values)
            method, entries = config.method, (Entry(None if layers is None else _indices(layers), config),)
        named = [index for entry in entries for index in entry.layers or ()]
        if len(set(named)) < len(named):
            twice = in_order(index for index in named if named.count(index) > 1)
            raise UnsupportedAttentionError(
                f"'layers' names some layers more than once: {twice}; each takes one method"
            )
        plain = len(entries) == 1 and entries[0].config.method == method
        values = {"method": method, "entries": entries, "hyperparameters": {}, "layers": layers}
        if plain:
            values["hyperparameters"] = {k: v for k, v in entries[0].config.to_dict().items() if k != "method"}
            values["layers"] = entries[0].layers
        for key, value in values.items():
            object.__setattr__(self, key, value)

    def for_layer(self, layer: Layer | None) -> MethodConfig | None:
        """The method's config in a layer, or None where attention stays exact."""
        for entry in self.entries:
            if entry.layers is None or layer in entry.layers:
                return entry.config
        return None

    def named_layers(self) -> list[Layer]:
        """All layers that are named, in order."""
        return in_order(index for entry in self.entries for index in entry.layers or ())

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold: every hyperparameter with its value, so that no later default changes it."""
        first = self.entries[0]
        if len(self.entries) == 1 and first.config.method == self.method:
            values = first.config.to_dict()
            if first.layers is not None:
                values["layers"] = list(first.layers)
        else:
            mix = [{"layers": list(entry.layers), **entry.config.to_dict()} for entry in self.entries]
            values = {"method": self.method, "layers": mix}
        return {**values, "version": FORMAT_VERSION}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], method: str | None = None) -> "EfficientAttentionConfig":
        """Inverse of `to_dict`; `method` serves where the dictionary names none. Raises as the class does."""
        values = dict(values)
        version = values.pop("version", FORMAT_VERSION)
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise UnsupportedAttentionError(f"efficient_attention: version={version!r} must be a positive integer")
        if version > FORMAT_VERSION:
            raise UnsupportedAttentionError(
                f"efficient_attention is of format version {version}, written by a newer hf_efficient_attn than this "
                f"one, which reads up to {FORMAT_VERSION}: upgrade it with 'pip install --upgrade hf_efficient_attn'"
            )
        method, layers = values.pop("method", method), values.pop("layers", None)
        if method is not None:
            known = get_method(method).info.config_class.hyperparameters()
            for key in values:
                if key not in known:
                    raise UnsupportedAttentionError(
                        f"{method}: {unknown_name('key of efficient_attention', key, [*known, 'method', 'layers'])}"
                    )
        return cls(method, values, layers)


def as_settings(value: Any, method: str | None = None) -> EfficientAttentionConfig:
    """Any of the forms in which a choice may be given: a dictionary, a method's config, or the class itself."""
    if isinstance(value, EfficientAttentionConfig):
        return value
    if isinstance(value, MethodConfig):
        return EfficientAttentionConfig(value)
    if isinstance(value, Mapping):
        return EfficientAttentionConfig.from_dict(value, method)
    raise UnsupportedAttentionError(
        f"efficient_attention must be a dictionary or an EfficientAttentionConfig, not {type(value).__name__}"
    )


def _as_list(layers: Any) -> list | None:
    if layers is None:
        return None
    if isinstance(layers, (str, bytes, Mapping)) or not isinstance(layers, Iterable):
        raise UnsupportedAttentionError(f"'layers' must be a list of layer indices or of entries, not {layers!r}")
    layers = list(layers)
    if not layers:
        raise UnsupportedAttentionError("'layers' is empty, so that nothing would change; leave it out for all layers")
    return layers


def _indices(layers: list) -> tuple[Layer, ...]:
    return tuple(check_layer(layer) for layer in layers)


def _mix_entry(entry: Any, method: str | None) -> Entry:
    if not isinstance(entry, Mapping) or entry.get("layers") is None:
        raise UnsupportedAttentionError(
            f'\'layers\' holds {entry!r}; in a mix every entry is {{"layers": [indices], "method": name, ...}}'
        )
    if "version" in entry:
        raise UnsupportedAttentionError("'version' stands beside 'layers', not in its entries")
    if any(isinstance(layer, Mapping) for layer in _as_list(entry["layers"])):
        raise UnsupportedAttentionError("an entry of 'layers' holds indices, not entries again")
    return EfficientAttentionConfig.from_dict(entry, method).entries[0]


class Stored(dict):
    """The dictionary that a config holds: for reading only, with its parsed form beside it.

    It was checked as a whole when it was assigned; a change of a single key would escape the check.
    """

    def __init__(self, settings: EfficientAttentionConfig) -> None:
        super().__init__(settings.to_dict())
        self.settings = settings

    def _refuse(self, *args, **kwargs):
        raise UnsupportedAttentionError(
            "config.efficient_attention is read-only: assign a new dictionary instead, "
            "config.efficient_attention = {**config.efficient_attention, key: value}"
        )

    __setitem__ = __delitem__ = __ior__ = update = setdefault = popitem = clear = _refuse

    def pop(self, key, *default):
        # Transformers strips private keys from every nested dictionary of a config, whether they are there or not.
        return self._refuse() if key in self or not default else default[0]

    def __copy__(self) -> "Stored":
        return self

    def __deepcopy__(self, memo) -> "Stored":
        return self

    def __reduce__(self):
        return Stored, (self.settings,)
