"""Which layer uses which method: `EfficientAttentionConfig`, its form on disk, and what a config says of a layer.

Kernel repositories contain this module, so it does not import Transformers.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from hf_efficient_attn.errors import (
    KnownFields,
    UnsupportedAttentionError,
    as_dict,
    check_positive,
    shown,
    unknown_name,
    warn,
)
from hf_efficient_attn.integration.layers import Layer, ModuleLocation, check_layer, in_order, is_selected
from hf_efficient_attn.methods import MethodConfig, available_methods, get_method, make_config
from hf_efficient_attn.ops.tracing import nothing, replaced_in_graphs

# Version 2 has `calibrated_length`. Settings without it are written as version 1, which earlier releases read.
FORMAT_VERSION = 2
# Exact attention as `attn_implementation`: the usual name, and all names.
EXACT = "sdpa"
EXACT_IMPLEMENTATIONS = (EXACT, "eager")
ATTRIBUTE = "efficient_attention"


class Entry(NamedTuple):
    """One method and the layers that use it; None for all layers."""

    layers: tuple[Layer, ...] | None
    config: MethodConfig


@dataclass(frozen=True)
class EfficientAttentionConfig(KnownFields):
    """The settings that a model carries in `config.efficient_attention`. Immutable, checked when they are made.

    Two settings are equal if their entries are, the layers in the same order. A model then computes the same.

    Args:
        method: a name from `hea.available_methods()` or a method's config. It is also the `attn_implementation` under
            which the settings apply. For a mix it can be left out and is then the method of the first entry.
        hyperparameters: replace the method's defaults. None for a mix, whose entries contain their own.
        layers: indices of the layers that use the method, or names. A name selects all attention modules whose path in
            the model begins with it ("encoder", "decoder.layers.0"), or which a model calls so (T2T-ViT's "t2t.0"). All
            other layers stay exact. None for all layers. For a mix: dictionaries {"layers": [indices or names],
            "method": name, hyperparameter: value, ...}.
        calibrated_length: number of tokens of the longest sequence that errors were measured on with these settings, as
            `hea.calibrate` and `analyze` store it; None if they were not measured. The model warns once of a longer
            sequence, because errors grow with the length.

    Attributes:
        entries: every method with its layers.

    Raises:
        UnsupportedAttentionError: the method or a hyperparameter is unknown; a value is out of range or of the wrong
            type; a layer is neither a non-negative integer nor a name, or appears twice.
    """

    method: str | MethodConfig | None = None
    hyperparameters: Mapping[str, Any] | None = field(default=None, compare=False)
    layers: Sequence[Any] | None = field(default=None, compare=False)
    calibrated_length: int | None = field(default=None, compare=False)
    entries: tuple[Entry, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.calibrated_length is not None:
            check_positive("calibrated_length", self.calibrated_length, advice="leave it out if nothing was measured")
        hyperparameters, layers = as_dict(self.hyperparameters or {}, "hyperparameters"), _as_list(self.layers)
        if layers is not None and any(isinstance(layer, Mapping) for layer in layers):
            if hyperparameters or isinstance(self.method, MethodConfig):
                raise UnsupportedAttentionError(
                    "the hyperparameters of a mix of methods belong inside the entries of 'layers', not beside them"
                )
            entries = tuple(_mix_entry(layer, self.method) for layer in layers)
        elif self.method is None:
            raise UnsupportedAttentionError(
                "efficient_attention names no method: add 'method', or pass attn_implementation=<name> as well"
            )
        else:
            checked = None if layers is None else tuple(map(check_layer, layers))
            entries = (Entry(checked, make_config(self.method, **hyperparameters)),)
        counts = Counter(index for entry in entries for index in entry.layers or ())
        twice = in_order(layer for layer, count in counts.items() if count > 1)
        if twice:
            raise UnsupportedAttentionError(f"'layers' names layers more than once: {twice}; each uses one method")
        method = self.method if isinstance(self.method, str) else entries[0].config.method
        get_method(method)
        values: dict[str, Any] = {"method": method, "entries": entries, "hyperparameters": {}, "layers": layers}
        if len(entries) == 1 and entries[0].config.method == method:
            values["hyperparameters"] = {k: v for k, v in entries[0].config.to_dict().items() if k != "method"}
            values["layers"] = entries[0].layers
        for key, value in values.items():
            object.__setattr__(self, key, value)

    def for_layer(self, layer: Layer | None, path: str = "") -> MethodConfig | None:
        """The method's config in an attention module of a layer, at a path in its model; None if it stays exact."""
        for entry in self.entries:
            if entry.layers is None or any(is_selected(chosen, layer, path) for chosen in entry.layers):
                return entry.config
        return None

    def named_layers(self) -> list[Layer]:
        """All layers that the entries name, in order."""
        return in_order(index for entry in self.entries for index in entry.layers or ())

    def to_dict(self, *, defaults: bool = True) -> dict[str, Any]:
        """Values for JSON, which `from_dict` reads.

        With `defaults`, hyperparameters that have their default values are written too, so that a saved model computes
        the same with a later version that has other defaults. A proposal that people read is clearer without them.
        """
        items = []
        for entry in self.entries:
            named = {} if entry.layers is None else {"layers": list(entry.layers)}
            chosen = entry.config.to_dict() if defaults else changed_hyperparameters(entry.config)
            items.append({**named, "method": entry.config.method, **chosen})
        is_mix = len(items) > 1 or items[0]["method"] != self.method
        values: dict[str, Any] = {"method": self.method, "layers": items} if is_mix else items[0]
        length = {} if self.calibrated_length is None else {"calibrated_length": self.calibrated_length}
        return {**values, **length, "version": FORMAT_VERSION if length else 1}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], method: str | None = None) -> "EfficientAttentionConfig":
        """Inverse of `to_dict`.

        `method` is the method if the dictionary names none.

        Raises:
            UnsupportedAttentionError: as the class does, for an unknown key, and for a newer version of the format.
        """
        values = as_dict(values, "efficient_attention")
        version = values.pop("version", FORMAT_VERSION)
        if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= FORMAT_VERSION:
            raise UnsupportedAttentionError(
                f"efficient_attention: version={version!r} must be an integer from 1 to {FORMAT_VERSION}; for a larger "
                "one, of a newer hf_efficient_attn, upgrade it from where you got it"
            )
        method, layers = values.pop("method", method), values.pop("layers", None)
        length = values.pop("calibrated_length", None)
        if method is not None:
            known = get_method(method).info.config_class.hyperparameters()
            for key in [key for key in values if key not in known]:
                others = [*known, "method", "layers", "calibrated_length"]
                raise UnsupportedAttentionError(f"{method}: {unknown_name('key of efficient_attention', key, others)}")
        return cls(method, values, layers, length)


def changed_hyperparameters(config: MethodConfig) -> dict[str, Any]:
    """The hyperparameters that differ from the method's defaults, as values that JSON can represent."""
    defaults = make_config(config.method).to_dict()
    return {key: value for key, value in config.to_dict().items() if value != defaults.get(key)}


def as_settings(value: Any, method: str | None = None) -> EfficientAttentionConfig:
    """Read settings from any of their forms: a dictionary, a method's config, or an `EfficientAttentionConfig`."""
    if isinstance(value, EfficientAttentionConfig):
        return value
    if isinstance(value, MethodConfig):
        return EfficientAttentionConfig(value)
    if isinstance(value, Mapping):
        return EfficientAttentionConfig.from_dict(value, method)
    raise UnsupportedAttentionError(
        f"efficient_attention must be a dictionary or an EfficientAttentionConfig, not {type(value).__name__}"
    )


def _as_list(layers: Any) -> list[Any] | None:
    if layers is None:
        return None
    if isinstance(layers, (str, bytes, Mapping)) or not isinstance(layers, Iterable):
        raise UnsupportedAttentionError(
            f"'layers' must be a list of layer indices or of entries, not {shown(layers)}: write layers=[...]"
        )
    items = list(layers)
    if not items:
        raise UnsupportedAttentionError("'layers' is empty, so that nothing would change; leave it out for all layers")
    return items


def _mix_entry(entry: Any, method: str | None) -> Entry:
    is_entry = isinstance(entry, Mapping) and entry.get("layers") is not None
    if not is_entry or any(key in entry for key in ("version", "calibrated_length")):
        raise UnsupportedAttentionError(
            f"'layers' contains {shown(entry)}; in a mix every entry is "
            '{"layers": [indices], "method": name, hyperparameters}, and any other key belongs beside \'layers\''
        )
    if any(isinstance(layer, Mapping) for layer in _as_list(entry["layers"]) or ()):
        raise UnsupportedAttentionError("an entry of 'layers' contains indices, not entries again")
    return EfficientAttentionConfig.from_dict(entry, method).entries[0]


def implementation_entry(config: Any, name_of: Callable[[Any], str | None]) -> str | dict[str, Any] | None:
    """The `attn_implementation` to save: a name, None, or a dictionary for a composite model whose parts differ.

    `name_of` returns the name to save of a model's config alone, or None.
    """
    own = name_of(config)
    found = {key: getattr(config, key, None) for key in config.sub_configs}
    parts = {key: implementation_entry(part, name_of) for key, part in found.items() if hasattr(part, "sub_configs")}
    if all(entry == own for entry in parts.values()):
        return own
    entries = {key: entry for key, entry in parts.items() if entry is not None}
    return entries if own is None else {"": own, **entries}


# The settings of each method's defaults. They are made at registration, because torch.compile cannot trace it.
DEFAULTS: dict[str, EfficientAttentionConfig] = {}


def method_of(config: object) -> str | None:
    """The method that a config names as its attention implementation; None if it names another implementation."""
    name = getattr(config, "_attn_implementation", None)
    return name if name in available_methods() else None


def stored_settings(config: object) -> EfficientAttentionConfig | None:
    """The settings that a config stores."""
    stored: EfficientAttentionConfig | dict[str, Any] | None = config.__dict__.get(ATTRIBUTE)
    if isinstance(stored, dict):  # the config was loaded before this package
        stored = config.__dict__[ATTRIBUTE] = as_settings(stored, getattr(config, "_attn_implementation", None))
    return stored


def settings_of(config: object, name: str) -> EfficientAttentionConfig:
    """The settings of a method in a model's config: those that it stores for the method, or the method's defaults."""
    stored = None if config is None else stored_settings(config)
    # After its model was switched by name, a config stores the settings of another method.
    return DEFAULTS[name] if stored is None or stored.method != name else stored


def method_at(config: object, name: str | None, location: ModuleLocation) -> MethodConfig | None:
    """The method that a config which names it chooses for an attention module; None for exact attention."""
    if name is None or location.window is not None:  # layers with a window stay exact
        return None
    settings = settings_of(config, name)
    found = settings.for_layer(location.layer, location.name)
    return settings.for_layer(location.layer, location.own_name) if found is None and location.own_name else found


@replaced_in_graphs(nothing)
def warn_beyond_calibration(config: object, name: str, kv_len: int, key_mask: Tensor | None) -> None:
    """Warn once for settings, outside of graphs, of a sequence longer than those that they were calibrated on."""
    settings = settings_of(config, name)
    limit = settings.calibrated_length
    if limit is None or kv_len <= limit or "_warned" in vars(settings):
        return
    # Padding does not count. Only inputs longer than the limit take the time to count their tokens.
    longest = kv_len if key_mask is None else int(key_mask.sum(1).max())
    if longest > limit:
        object.__setattr__(settings, "_warned", True)
        warn(
            f"a sequence has {longest} tokens, but the attention of this model was calibrated on sequences of up to "
            f"{limit} tokens, and its errors grow with the length: calibrate it again with sequences as long as those "
            "it is used on (hea.calibrate, or hf-efficient-attn analyze --length)"
        )


def layer_seed(layer: Layer | None) -> int:
    """The seed of a layer's random draws in eval mode: equal in every process, below 2^31.

    Layers with different numbers have different seeds. Those of two names are equal with probability 2^-30.
    """
    if isinstance(layer, str):
        # Computed by hand, because torch.compile does not trace the hash functions of the standard library.
        return 2**30 + functools.reduce(lambda number, c: (1000003 * number + ord(c)) % (2**30 - 35), layer, 0)
    return 1000003 * ((layer or 0) + 1)


def of_layer(config: Any, module: object) -> Any:
    """The config of the layer of a module, if a config has values for single layers (Transformers 5.24)."""
    layer = getattr(module, "layer_idx", None)
    is_mixed = getattr(config, "is_heterogeneous", False)
    return config.per_layer_config[layer] if is_mixed and isinstance(layer, int) else config


def first_number(holder: object, *names: str) -> int | None:
    """The first of these attributes that is a positive integer."""
    values = (getattr(holder, name, None) for name in names)
    return next((x for x in values if isinstance(x, int) and not isinstance(x, bool) and x > 0), None)
