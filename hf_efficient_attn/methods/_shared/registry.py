"""The registry of methods: what a method consists of, how it is registered, and how it is found by its name."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeAlias

from torch import Tensor, nn

from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_method
from hf_efficient_attn.methods._shared.config import ConfigT, MethodConfig
from hf_efficient_attn.ops.shards import Seed


class AttentionOptions(NamedTuple):
    """The arguments of a call to a method besides query, key and value.

    Attributes:
        key_mask: bool (B, Nk), True for the keys to attend to; None if there is no padding. In a call to a method, key
            and value are 0 wherever the mask is False.
        is_causal: query i attends to the keys 0 to i only; Nq = Nk.
        scale: the factor of the scores q . k.
        dropout_p: the probability with which an attention weight is dropped. 0 outside of training.
        seed: the seed of everything that is drawn, for `hf_efficient_attn.ops.tokens`: an integer or a scalar tensor,
            and a `HeadSeed` if the call has some heads of a layer. It includes the config's own seed.
        parameters: the learned parameters by name; empty for a method that learns none. Those of heads are the ones of
            the heads of the call.
        distance_bias: (H, 2R + 1), what is added to the scores of each head by the position of the key minus that of
            the query, from -R to R; beyond, it is that of -R or R. None for none. Only methods whose config says
            `adds_distance_bias` get one.
    """

    key_mask: Tensor | None
    is_causal: bool
    scale: float
    dropout_p: float
    seed: Seed
    parameters: Mapping[str, Tensor]
    distance_bias: Tensor | None = None


class HiddenProjections(NamedTuple):
    """The affine maps of a layer from hidden states (B, N, W) to keys and to values, each (B, N, H * D)."""

    to_key: Callable[[Tensor], Tensor]
    to_value: Callable[[Tensor], Tensor]


# forward(config, query, key, value, options) with query (B, H, Nq, D), key (B, H, Nk, D) and value (B, H, Nk, Dv)
# returns the output (B, H, Nq, Dv).
AttentionForward: TypeAlias = Callable[[ConfigT, Tensor, Tensor, Tensor, AttentionOptions], Tensor]
Listener: TypeAlias = Callable[[str], None]
# A state is a named tuple of tensors (B, H_kv, ...).
State: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True)
class Recurrence(Generic[ConfigT]):
    """The operations of a causal method that can represent all past keys and values by a state of constant size.

    A state is a named tuple of tensors (B, H_kv, ...), float32, or float64 if the input is float64. All calls on one
    state, and the call on the whole sequence that they reproduce, must use the same scale and the same seed.

    Attributes:
        update: update(config, state, key, value, options) returns the state after the tokens of key (B, H_kv, N, D) and
            value (B, H_kv, N, Dv). `state` is None before the first tokens.
        query: query(config, state, query, options) returns the attention of query (B, H, N, D) to all tokens of the
            state, (B, H, N, Dv). Here the state has H heads.
        forward: forward(config, query, key, value, options, initial_state) returns (B, H, N, Dv). Query i attends to
            all tokens of the initial state and to the keys 0 to i. Here the state has H heads.
    """

    update: Callable[..., State]
    query: Callable[..., Tensor]
    forward: Callable[..., Tensor]


@dataclass(frozen=True)
class ShardedForm(Generic[ConfigT]):
    """Attention of a sequence whose tokens are divided over processes, in which only summaries of the keys travel.

    Its output and its gradients are those of `forward` on the whole sequence, up to rounding. A method without it is
    computed from all tokens of some heads in each process, which have to be sent there and back.

    Attributes:
        forward: forward(config, query, key, value, options, shards) returns the output (B, H, n, Dv) for the query
            (B, H, n, D) of the n tokens of this process, whose keys (B, H_kv, n, D) and values (B, H_kv, n, Dv) are not
            repeated. `options.key_mask` is that of these tokens, and `shards` (`hf_efficient_attn.ops.shards`)
            says which they are. All processes must call the same collectives.
        applies: applies(config, length, is_causal) says whether the form computes sequences of so many tokens in all
            processes together with these hyperparameters.
    """

    forward: Callable[..., Tensor]
    applies: Callable[[ConfigT, int, bool], bool]


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
        """What a new token of a decoder costs, in words; None for methods without a causal form."""
        if not self.causal:
            return None
        if self.recurrent:
            return "by the method, from a state of constant size"
        if self.config_class.decodes_exactly:
            return "exact: up to 128 new tokens at a time attend to all cached keys"
        return "by the method, from all cached keys"


@dataclass(frozen=True)
class Method:
    """One entry of the registry; see `register_method` for the other attributes.

    Attributes:
        default: the config with the default hyperparameters, kept because to make one takes longer than the checks of a
            call.
    """

    info: MethodInfo
    default: MethodConfig
    forward: AttentionForward[Any]
    naive: AttentionForward[Any]
    decode: AttentionForward[Any] | None
    initial_parameters: Callable[..., dict[str, Tensor]] | None
    starts_from: Mapping[str, str]
    recurrence: Recurrence[Any] | None
    forward_hidden_states: Callable[..., Tensor] | None
    sharded: ShardedForm[Any] | None = None

    @property
    def mixes_queries(self) -> bool:
        """Whether the output of one query depends on other queries; see `MethodConfig`."""
        return self.info.config_class.mixes_queries


_REGISTRY: dict[str, Method] = {}
_LISTENERS: list[Listener] = []

_EXACT = ("sdpa", "eager")


def add_method(method: Method, replace: bool) -> None:
    """Add an entry, or replace the one of the same name, and tell all listeners.

    Raises:
        UnsupportedAttentionError: there is an entry of this name, and it may not be replaced.
    """
    name = method.info.name
    if name in _REGISTRY and not replace:
        raise UnsupportedAttentionError(
            f"a method named {name!r} is registered already: choose another name, or pass replace=True to replace it"
        )
    _REGISTRY[name] = method
    for listener in _LISTENERS:
        listener(name)


def unregister(name: str) -> None:
    """Remove a method. Only tests need this, after they have registered a method of their own."""
    del _REGISTRY[name]


def on_register(listener: Listener) -> Listener:
    """Call `listener` with the name of every method: of those that are registered now, and of each later one.

    A name is passed again when its method is replaced. Usable as a decorator.
    """
    _LISTENERS.append(listener)
    for name in available_methods():
        listener(name)
    return listener


def available_methods() -> tuple[str, ...]:
    """The names of all methods. Each is also an `attn_implementation`."""
    return tuple(_REGISTRY)


def causal_methods() -> list[str]:
    """The names of the methods that have a causal form."""
    return [name for name, method in _REGISTRY.items() if method.info.causal]


def rectangular_methods() -> list[str]:
    """The names of the methods for which the number of keys may differ from the number of queries."""
    return [name for name, method in _REGISTRY.items() if method.info.rectangular]


def exportable_methods() -> list[str]:
    """The names of the methods that `torch.onnx.export` can export."""
    return [name for name, method in _REGISTRY.items() if method.info.config_class.exportable]


def distance_bias_methods() -> list[str]:
    """The names of the methods that, with their default hyperparameters, can add a bias by distance to the scores."""
    return [name for name, method in _REGISTRY.items() if method.default.adds_distance_bias]


def get_method(name: str) -> Method:
    """The entry of the registry with this name.

    Raises:
        UnsupportedAttentionError: there is no such method. The message names the most similar one.
    """
    if not isinstance(name, str) or name not in _REGISTRY:
        raise UnsupportedAttentionError(_no_method(name))
    return _REGISTRY[name]


def _no_method(value: object) -> str:
    """The sentence about something that is not the name of a method."""
    if isinstance(value, type) and issubclass(value, MethodConfig):
        return f"{value.__name__} is a class: give the config {value.__name__}(), or the name {value.method!r}"
    if isinstance(value, type):
        return f"{value.__name__} is a class: give the name of a method, or a config"
    if isinstance(value, MethodConfig):
        return f"{type(value).__name__}(...) is a config, but a name is needed here: give {value.method!r}"
    if isinstance(value, str) and value in _EXACT:
        return (
            f"{value!r} is exact attention, which is no method of this package: call hea.convert(model, {value!r}), or "
            "torch.nn.functional.scaled_dot_product_attention"
        )
    order = ""
    if isinstance(value, Tensor):
        order = "before the tensors: hea.attention(method, query, key, value)"
    elif isinstance(value, nn.Module):
        order = "after the model: hea.convert(model, method)"
    if order:
        return (
            f"a {type(value).__name__} is no attention method: give a name from hea.available_methods(), or a method's "
            f"config, {order}"
        )
    return unknown_method(value, _REGISTRY)


def method_info(name: str) -> MethodInfo:
    """The facts about one method.

    Raises:
        UnsupportedAttentionError: there is no such method. The message names the most similar one.
    """
    return get_method(name).info


def make_config(method_or_config: str | MethodConfig, **hyperparameters: Any) -> MethodConfig:
    """Make a config from a method's name and hyperparameters, or from a config with some of its values replaced.

    Raises:
        UnsupportedAttentionError: the method or a hyperparameter is unknown, or a value is not allowed.
    """
    if isinstance(method_or_config, MethodConfig):
        if not hyperparameters:
            return method_or_config
        return dataclasses.replace(method_or_config, **method_or_config.check_hyperparameters(hyperparameters))
    method = get_method(method_or_config)
    if not hyperparameters:
        return method.default
    config_class = method.info.config_class
    return config_class(**config_class.check_hyperparameters(hyperparameters))
