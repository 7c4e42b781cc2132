"""What every method is made of: a config dataclass, a description, a fast form, a readable form, one registration."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_name


def option(
    default: Any, help: str, *, minimum: int | None = None, choices: tuple | None = None, carried: bool = False
) -> Any:
    """A config field: default, one sentence of help, the values it may take.

    carried: whether it shapes what is learned or drawn, so that a model that goes from one method to another keeps it.
    """
    metadata = {"help": help, "minimum": minimum, "choices": choices, "carried": carried}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """Hyperparameters of one method; immutable, checked when made.

    Raises:
        UnsupportedAttentionError: a value of the wrong type or out of its range.
    """

    method: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value, meta = getattr(self, spec.name), spec.metadata
            where = f"{self.method}: {spec.name}={value!r}"
            if meta.get("choices") is not None and (not isinstance(value, str) or value not in meta["choices"]):
                raise UnsupportedAttentionError(
                    f"{where} is not one of its values: {unknown_name(spec.name, value, meta['choices'])}"
                )
            if meta.get("minimum") is not None:
                if isinstance(value, bool) or not isinstance(value, int):
                    raise UnsupportedAttentionError(f"{where} must be an integer, not {type(value).__name__}")
                if not meta["minimum"] <= value < 2**31:
                    raise UnsupportedAttentionError(f"{where} must be at least {meta['minimum']} and below 2**31")

    def to_dict(self) -> dict[str, Any]:
        """The hyperparameters and the method's name, as plain values that JSON can hold."""
        values = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self)}
        return {"method": self.method, **{k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "MethodConfig":
        """Inverse of `to_dict`; keys that are left out keep their defaults.

        Raises:
            UnsupportedAttentionError: a key that this method does not have (the known ones are named), or another
                method's dictionary.
        """
        values = dict(values)
        named = values.pop("method", cls.method)
        if named != cls.method:
            raise UnsupportedAttentionError(f"a dictionary of {named!r} cannot make a {cls.__name__}")
        return cls(**cls.check_keys(values))

    @classmethod
    def check_keys(cls, values: dict[str, Any]) -> dict[str, Any]:
        """`values` with lists made tuples, after every key was found among the hyperparameters."""
        # Rather than by `dataclasses.fields`, which torch.compile cannot trace on a class.
        known = [name for name in cls.__dataclass_fields__ if name != "method"]
        for key in values:
            if key not in known:
                raise UnsupportedAttentionError(f"{cls.method}: {unknown_name('hyperparameter', key, known)}")
        return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}

    def with_budget(self, columns: int) -> "MethodConfig":
        """A copy whose cost per query is that of `columns` exact columns.

        Raises:
            UnsupportedAttentionError: `columns` is not a positive integer, or too small for the method.
        """
        raise NotImplementedError

    @classmethod
    def check_budget(cls, columns: int, least: int = 1) -> int:
        """`columns`, if a budget of so many columns makes sense."""
        if isinstance(columns, bool) or not isinstance(columns, int) or columns < least:
            raise UnsupportedAttentionError(
                f"{cls.method}: a budget of {columns!r} columns makes no attention; give an integer of {least} or more"
            )
        return columns


@dataclass(frozen=True)
class MethodInfo:
    """What one method is and can do; plain values throughout."""

    name: str
    title: str
    paper: str
    year: int
    causal: bool
    rectangular: bool
    recurrent: bool
    learned_parameters: tuple[str, ...]
    config_class: type
    summary: str


@dataclass(frozen=True)
class Recurrence:
    """The three functions of a causal method whose keys and values can be summed up in a state of constant size.

    A state is a named tuple of tensors (B, Hkv, ...), float32 (float64 for float64 input), one a key head. `seed` must
    be the same in all calls on one state, and on the whole sequence that they are to agree with.

    absorb: absorb(config, state, key, value, *, mask, scale, seed) -> the state with these tokens too; `state` is None
        where there are none before them.
    read: read(config, state, query, *, scale, dropout_p, seed) -> (B, H, N, Dv), attention of queries (B, H, N, D) to
        all that the state of H heads holds.
    resume: resume(config, state, query, key, value, *, mask, scale, dropout_p, seed) -> (B, H, N, Dv), each query
        attends to all that the state holds and to the keys (B, H, N, D) up to its own position.
    """

    absorb: Callable
    read: Callable
    resume: Callable


@dataclass(frozen=True)
class Method:
    """An entry of the registry.

    attend, naive: the fast and the readable form, of one signature: see `hf_efficient_attn.methods._shared.call`.
    decode: causal attention of a few last queries with the keys of all positions, decode(config, query, key, value, *,
        mask, scale, dropout_p); without it such a step costs what the whole sequence costs.
    parameters: for a method with learned parameters, parameters(config, *, heads, width, value_width, length) -> dict
        of the values that conversion starts from, float32, by the names in `info.learned_parameters`: of one layer, for
        sequences of up to `length` tokens. Its attend, naive and decode take them, or those that were learned since, as
        `parameters`, a dictionary of the same names.
    starts_from: learned parameter -> the one of another method that it may start from, where that has none of its name.
    mixes_queries: whether, when not causal, the output of a query depends on the other queries (by what they are sorted
        or averaged to). In cross attention of a decoder later tokens would reach earlier ones that way.
    recurrence: where `info.recurrent`, how the method decodes from a state instead of from all keys.
    attend_hidden: for a method that is cheaper from hidden states than from keys and values, attend_hidden(config,
        query, hidden, to_key, to_value, *, mask, scale, dropout_p, seed, parameters), the same attention to rounding:
        hidden (B, N, W) is 0 where `mask` is False, to_key and to_value are affine maps (B, P, W) -> (B, P, H * D).
    """

    info: MethodInfo
    attend: Callable
    naive: Callable
    decode: Callable | None = None
    parameters: Callable | None = None
    starts_from: Mapping[str, str] = field(default_factory=dict)
    recurrence: Recurrence | None = None
    attend_hidden: Callable | None = None
    mixes_queries: bool = True


_REGISTRY: dict[str, Method] = {}


def register(method: Method) -> None:
    """Add a method. Its name must not be taken, nor hold anything that Transformers reads in a name."""
    name = method.info.name
    if name in _REGISTRY:
        raise ValueError(f"a method named {name!r} is registered already")
    for reserved in ("flash", "/", "sdpa", "flex_attention", "|"):
        if reserved in name:
            raise ValueError(f"{name!r}: Transformers gives {reserved!r} in a name a meaning of its own")
    _REGISTRY[name] = method


def unregister(name: str) -> None:
    """Take a method out again (for tests that register broken ones)."""
    del _REGISTRY[name]


def available_methods() -> tuple[str, ...]:
    """Names of all methods, each also an `attn_implementation`."""
    return tuple(_REGISTRY)


def get_method(name: str) -> Method:
    """The registry's entry of `name`.

    Raises:
        UnsupportedAttentionError: no such method; the nearest known name is given.
    """
    if not isinstance(name, str) or name not in _REGISTRY:
        raise UnsupportedAttentionError(unknown_name("attention method", name, _REGISTRY))
    return _REGISTRY[name]


def method_info(name: str) -> MethodInfo:
    """Description of one method; raises `UnsupportedAttentionError` for a name that is not known."""
    return get_method(name).info


@functools.lru_cache(maxsize=256)
def learns(config: MethodConfig) -> bool:
    """Whether a method with these hyperparameters has parameters to learn."""
    start = get_method(config.method).parameters
    return start is not None and bool(start(config, heads=1, width=1, value_width=1, length=1))


def make_config(method_or_config: "str | MethodConfig", **hyperparameters) -> MethodConfig:
    """A config from a name and hyperparameters, or from a config with some of them replaced.

    Raises:
        UnsupportedAttentionError: unknown method or hyperparameter, or a value out of range.
    """
    if isinstance(method_or_config, MethodConfig):
        if not hyperparameters:
            return method_or_config
        values = type(method_or_config).check_keys(hyperparameters)
        return dataclasses.replace(method_or_config, **values)
    config_class = method_info(method_or_config).config_class
    return config_class(**config_class.check_keys(hyperparameters))
