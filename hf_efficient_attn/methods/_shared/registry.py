"""The registry of methods, with the checks of a new method, and the shapes of the parameters that methods learn."""

import dataclasses
import functools
import inspect
import keyword
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hf_efficient_attn.errors import UnsupportedAttentionError, shown, unknown_method
from hf_efficient_attn.methods._shared.config import (
    ARGUMENTS,
    AttentionForward,
    AttentionOptions,
    ConfigT,
    MethodConfig,
    Recurrence,
    ShardedForm,
    refuse,
)
from hf_efficient_attn.ops.attend import with_sinks
from hf_efficient_attn.ops.shards import HeadSlice
from hf_efficient_attn.ops.tracing import unrecorded

# Transformers interprets these parts of the name of an attention implementation.
_RESERVED = ("flash", "/", "sdpa", "flex_attention", "|")
_FACTS = ("method", "title", "paper", "year", "causal", "rectangular", "summary")
# Arguments of `attention` and `hea.convert`, keys of `config.efficient_attention`, and attributes of a config.
_CALL = ("model", "method_or_config", "query", "key", "value", "layers", "version", "calibrated_length", *ARGUMENTS)
_TAKEN = {*_CALL, *dir(MethodConfig), *MethodConfig.__dataclass_fields__} - {"compute_dtype"}
# Attributes of the module that holds learned parameters (`hf_efficient_attn.integration.learned`).
_OF_MODULE = {*dir(nn.Module()), "names", "sizes", "start_values", "take", "tensors"}


@dataclass(frozen=True)
class MethodInfo:
    """The facts about one method, as plain values; see `MethodConfig` for their meaning."""

    name: str
    title: str
    paper: str
    year: int
    causal: bool
    rectangular: bool
    recurrent: bool
    learned_parameters: tuple[str, ...]
    config_class: type[MethodConfig]
    summary: str
    paper_url: str
    near: str
    far: str

    @property
    def decoding(self) -> str | None:
        """The computation of a new token of a decoder, in words; None for methods without a causal form."""
        if not self.causal:
            return None
        if self.recurrent:
            return "by the method, from a state of constant size"
        if self.config_class.decodes_exactly:
            return "exact: up to 128 new tokens at a time attend to all cached keys"
        return "by the method, from all cached keys"


@dataclass(frozen=True)
class Method:
    """One entry of the registry; see `register_method` for the other attributes."""

    info: MethodInfo
    # The config with the default hyperparameters. It is kept, because making one takes longer than the checks of a
    # call.
    default: MethodConfig
    forward: AttentionForward[Any]
    naive: AttentionForward[Any]
    decode: AttentionForward[Any] | None
    initial_parameters: Callable[..., dict[str, Tensor]]
    starts_from: Mapping[str, str]
    recurrence: Recurrence[Any] | None
    forward_hidden_states: Callable[..., Tensor] | None
    sharded: ShardedForm[Any] | None = None

    def compute(
        self, form: str, config: MethodConfig, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Call the form "forward", "naive" or "decode", and add the sinks to its denominators: (B, H, Nq, Dv)."""
        out: Tensor = getattr(self, form)(config, query, key, value, options)
        return out if options.sinks is None else with_sinks(out, options.sinks).to(value.dtype)


class _Methods(dict[str, Method]):
    """All methods by name. A call looks its method up here, which costs less than `get_method`."""

    def __missing__(self, name: str) -> Method:
        raise UnsupportedAttentionError(_no_method(name))


METHODS = _Methods()
# The config classes of all methods, and of those that were replaced, whose configs models go on with.
_CONFIG_CLASSES: set[type[MethodConfig]] = set()
_LISTENERS: list[Callable[[str], None]] = []


def register_method(
    config_class: type[ConfigT],
    *,
    forward: AttentionForward[ConfigT],
    naive: AttentionForward[ConfigT],
    decode: AttentionForward[ConfigT] | None = None,
    initial_parameters: Callable[..., dict[str, Tensor]] | None = None,
    starts_from: Mapping[str, str] | None = None,
    recurrence: Recurrence[ConfigT] | None = None,
    forward_hidden_states: Callable[..., Tensor] | None = None,
    sharded: ShardedForm[ConfigT] | None = None,
    replace: bool = False,
) -> None:
    """Add a method, of this package or from a user's own file, under the name `config_class.method`.

    From then on the method is available in the functional form, in Transformers as an `attn_implementation` and in
    saved configs. Every command takes the file that registers it::

        hf-efficient-attn info first_keys --import my_method.py

    Args:
        config_class: a frozen, keyword-only dataclass that subclasses `MethodConfig`. It declares the hyperparameters,
            all with defaults, sets the facts about the method as class attributes, and defines `budget` or
            `with_budget`.
        forward: the fast form. forward(config, query, key, value, options) returns the output (B, H, Nq, Dv) for query
            (B, H, Nq, D), key (B, H, Nk, D), value (B, H, Nk, Dv) and `AttentionOptions`. The inputs have been checked,
            keys and values have as many heads as the queries, and they are 0 wherever `options.key_mask` is False.
        naive: the readable form with dense (Nq, Nk) matrices. It has the same signature, and tests compare the two. A
            method that is dense itself may give the same function twice.
        decode: causal attention of the last few queries (B, H, Nq, D) to the keys of all positions, with the same
            signature. Without it, decoding one token costs as much as the whole sequence.
        initial_parameters: for a method with learned parameters, initial_parameters(config, *, num_heads, head_dim,
            value_dim, max_length) returns the values that a conversion starts from: float32 tensors of one layer by
            their names, for sequences of up to `max_length` tokens. It may also take `num_kv_heads`, the number of key
            heads.
        starts_from: maps a learned parameter to the parameter that initialises it when a model is switched from a
            method that has only the other one.
        recurrence: the operations of a causal method that can decode from a state of constant size.
        forward_hidden_states: for a method that is cheaper to compute from hidden states than from keys and values,
            forward_hidden_states(config, query, hidden_states, projections, options) returns the same output up to
            rounding. `hidden_states` (B, N, W) is 0 wherever `options.key_mask` is False, and `projections` is a
            `HiddenProjections`.
        sharded: the form for a sequence that several processes share (`hea.sequence_parallel`).
        replace: replace a method that has the same name, for example when a notebook cell runs again.

    Raises:
        UnsupportedAttentionError: the name is taken or not allowed, a fact is missing, or the config class and the
            functions do not fit together.

    A complete example is in the guide "A method in your own file".
    """
    _check(config_class, forward, naive, initial_parameters, recurrence)
    name = config_class.method
    if name in METHODS and not replace:
        refuse("a method of this name is registered already: choose another, or pass replace=True", config_class)
    default = config_class()
    if "text" not in vars(default):
        refuse(f"__post_init__ of {config_class.__name__} must call super().__post_init__()", config_class)
    own: dict[str, Any] = {"name": name, "recurrent": recurrence is not None, "config_class": config_class}
    facts = (f.name for f in dataclasses.fields(MethodInfo))
    info = MethodInfo(**{fact: own[fact] if fact in own else getattr(config_class, fact) for fact in facts})
    METHODS[name] = Method(
        info=info, default=default, forward=forward, naive=naive, decode=decode,
        initial_parameters=_sized(initial_parameters or (lambda config, **sizes: {})), starts_from=starts_from or {},
        recurrence=recurrence, forward_hidden_states=forward_hidden_states, sharded=sharded,
    )  # fmt: skip
    _CONFIG_CLASSES.add(config_class)
    parameter_shapes.cache_clear()  # a method that is registered again may learn other parameters
    for listener in _LISTENERS:
        listener(name)


def _sized(initial_parameters: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    """Make the function accept `num_kv_heads`, by default the number of heads, even if it does not take it."""
    takes = inspect.signature(initial_parameters).parameters.values()
    if any(x.name == "num_kv_heads" or x.kind is x.VAR_KEYWORD for x in takes):
        return lambda config, **sizes: initial_parameters(config, **{"num_kv_heads": sizes["num_heads"], **sizes})
    return lambda config, num_kv_heads=0, **sizes: initial_parameters(config, **sizes)


def _check(
    config_class: type[MethodConfig], forward: object, naive: object, initial_parameters: object, recurrence: object
) -> None:
    """Check for errors that would otherwise appear when the new method is used."""
    if not (isinstance(config_class, type) and issubclass(config_class, MethodConfig)):
        raise UnsupportedAttentionError(
            f"the first argument of register_method must be a subclass of MethodConfig; got {shown(config_class)}"
        )

    def refuse(problem: str) -> NoReturn:
        raise UnsupportedAttentionError(f"{config_class.__name__}: {problem}")

    missing = [fact for fact in _FACTS if not hasattr(config_class, fact) or getattr(config_class, fact) in ("", None)]
    if missing:
        refuse(f"the class attributes {', '.join(missing)} are missing; MethodConfig documents them")
    name = config_class.method
    for part in _RESERVED:
        if part in str(name):
            refuse(f"method={name!r} must not contain {part!r}, because Transformers gives it a special meaning")
    if not isinstance(name, str) or not name.isidentifier() or name == "eager":
        refuse(f"method={name!r} must be a Python identifier other than 'eager'")
    if any(isinstance(value, dataclasses.Field) for value in vars(config_class).values()):
        refuse("decorate the class with @dataclass(frozen=True, kw_only=True)")
    minima = {spec.name: spec.metadata.get("minimum") for spec in dataclasses.fields(config_class)}
    learned = config_class.learned_parameters
    if not isinstance(learned, tuple) or not all(isinstance(x, str) and x.isidentifier() for x in learned):
        refuse(f"learned_parameters={learned!r} must be a tuple of names, such as ('weight',)")
    names = [*minima, *learned]
    for x in names:
        if x in _TAKEN or (x in learned and x in _OF_MODULE) or names.count(x) > 1 or keyword.iskeyword(x):
            refuse(f"{x!r} cannot be the name of a hyperparameter or learned parameter: it has another meaning")
    if not all(isinstance(part, tuple) and minima.get(part[0]) is not None for part in config_class.budget):
        refuse("budget must consist of pairs (name, weight), of hyperparameters that have a minimum")
    for spec in dataclasses.fields(config_class):
        if spec.default is dataclasses.MISSING:
            refuse(f"the hyperparameter {spec.name!r} needs a default; declare it with `option`")
    if "seed" not in config_class.hyperparameters():
        refuse("the hyperparameter 'seed' is missing; every method has it, even if nothing is drawn")
    if config_class.with_budget is MethodConfig.with_budget and not config_class.budget:
        refuse("define with_budget(self, columns)")
    for form in (forward, naive):
        if not callable(form):
            refuse("a method needs a forward and a naive form; naive=forward is allowed")
        try:
            inspect.signature(form).bind(*("config", "query", "key", "value", "options"))
        except TypeError as error:
            refuse(f"{form!r} must accept (config, query, key, value, options): {error}")
    if bool(config_class.learned_parameters) != (initial_parameters is not None):
        refuse("learned_parameters and initial_parameters must be given together")
    if recurrence is not None and not config_class.causal:
        refuse("a method with a recurrence must be causal")


def on_register(listener: Callable[[str], None]) -> Callable[[str], None]:
    """Call `listener` with the name of every method, now and whenever a method is registered or replaced.

    Usable as a decorator.
    """
    _LISTENERS.append(listener)
    for name in available_methods():
        listener(name)
    return listener


def available_methods() -> tuple[str, ...]:
    """Return the names of all methods. Each is also an `attn_implementation`."""
    return tuple(METHODS)


def methods_with(*facts: str) -> list[str]:
    """Return the names of the methods for which facts hold, such as "causal", with their default hyperparameters."""
    return [name for name, method in METHODS.items() if all(getattr(method.default, fact) for fact in facts)]


def get_method(name: str) -> Method:
    """Return the entry of the registry with this name.

    Raises:
        UnsupportedAttentionError: there is no such method. The message names the most similar one.
    """
    if not isinstance(name, str):
        raise UnsupportedAttentionError(_no_method(name))
    return METHODS[name]


def _no_method(value: object) -> str:
    """Return the message for a value that is not the name of a method."""
    if isinstance(value, type) and issubclass(value, MethodConfig):
        return f"{value.__name__} is a class: give the config {value.__name__}(), or the name {value.method!r}"
    if isinstance(value, type):
        return f"{value.__name__} is a class: give the name of a method, or a config"
    if isinstance(value, MethodConfig):
        return f"{type(value).__name__}(...) is a config, but a name is needed here: give {value.method!r}"
    if isinstance(value, str) and value in ("sdpa", "eager"):
        return (
            f"{value!r} is exact attention, which is no method of this package: call hea.convert(model, {value!r}), or "
            "torch.nn.functional.scaled_dot_product_attention"
        )
    if isinstance(value, (Tensor, nn.Module)):
        order = "before the tensors: hea.attention(method, query, key, value)"
        if isinstance(value, nn.Module):
            order = "after the model: hea.convert(model, method)"
        return f"a {type(value).__name__} is no attention method: give the name or the config of one, {order}"
    return unknown_method(value, METHODS)


def method_info(name: str) -> MethodInfo:
    """Return the facts about one method.

    Raises:
        UnsupportedAttentionError: there is no such method. The message names the most similar one.
    """
    return get_method(name).info


def make_config(method_or_config: str | MethodConfig, **hyperparameters: Any) -> MethodConfig:
    """Make a config from a method's name and hyperparameters, or from a config with some of its values replaced.

    Raises:
        UnsupportedAttentionError: the method or a hyperparameter is unknown, a value is not allowed, or the config is
            of a class that was not registered. Graphs and saved models would contain the registered class.
    """
    config = method_or_config if isinstance(method_or_config, MethodConfig) else get_method(method_or_config).default
    if type(config) not in _CONFIG_CLASSES:
        own = type(config).__name__
        right = get_method(config.method).info.config_class.__name__
        refuse(f"{own} is not its config class: give {right}(...), or register {own} with another `method`", config)
    return dataclasses.replace(config, **hyperparameters) if hyperparameters else config


@functools.lru_cache(maxsize=256)
def parameter_shapes(
    config: MethodConfig, num_heads: int = 1, max_length: int = 1, head_dim: int = 1
) -> dict[str, torch.Size]:
    """Return the shapes of the learned parameters of a layer with these sizes, by name."""
    sizes = {"num_heads": num_heads, "head_dim": head_dim, "value_dim": 1, "max_length": max_length}
    initial = functools.partial(get_method(config.method).initial_parameters, config, **sizes)
    return {name: x.shape for name, x in unrecorded(initial).items()}


def check_parameters(config: MethodConfig, query: Tensor, options: AttentionOptions, *, grouped: bool = False) -> None:
    """Refuse learned parameters of the heads of a query (B, H, Nq, D): missing, of another shape, or without an effect.

    `grouped` parameters may belong to the key heads, of which H is a multiple.
    """
    _, num_heads, _, head_dim = query.shape
    given = options.parameters
    shapes = parameter_shapes(config, num_heads=num_heads, head_dim=head_dim)
    for name in shapes or [name for name in config.learned_parameters if name in given]:
        found = tuple(given[name].shape) if name in given else ()
        shape = shapes.get(name, ())
        is_count = bool(found) and (num_heads % max(1, found[0]) == 0 if grouped else found[0] == num_heads)
        if not shape or not is_count or found[1:] != shape[1:]:
            other = " or one for the key heads" if grouped else ""
            tensor = f"a tensor {tuple(shape)}{other}" if shape else f"no {name}"
            advice = f"give {tensor}, or hyperparameters that learn {'nothing' if shape else 'it'}"
            what = f"{config} and {num_heads} heads with head_dim={head_dim}"
            refuse(f"{name} {found or None} does not match {what}: {advice}", config)


def learns(config: MethodConfig) -> bool:
    """Whether a method with these hyperparameters has learned parameters."""
    return bool(parameter_shapes(config))


def parameters_of_slice(
    config: MethodConfig, parameters: Mapping[str, Tensor], heads: HeadSlice, num_heads: int
) -> dict[str, Tensor]:
    """Return those learned parameters of all heads of a layer that `num_heads` query heads, or their key heads, use."""
    own = dict(parameters)
    one = parameter_shapes(config)
    for name, shape in parameter_shapes(config, num_heads=2).items():
        if name in own and shape and shape[0] == 2 * one[name][0]:  # one row for each head
            count = own[name].shape[0]
            last = -(-(heads.first + num_heads) * count // heads.total)
            own[name] = own[name][heads.first * count // heads.total : last]
    return own
