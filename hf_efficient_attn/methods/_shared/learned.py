"""The learned parameters of a method: the values that it starts from, and what their shapes depend on."""

import functools
from collections.abc import Mapping

from torch import Tensor

from hf_efficient_attn.methods._shared.config import MethodConfig
from hf_efficient_attn.methods._shared.registry import get_method, on_register
from hf_efficient_attn.ops.random import HeadSlice


def all_parameters(
    config: MethodConfig,
    some: Mapping[str, Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: HeadSlice | None = None,
) -> Mapping[str, Tensor]:
    """All learned parameters of a method: those that were given, and the initial values of the others."""
    initial_parameters = get_method(config.method).initial_parameters
    if initial_parameters is None or len(some) == len(config.learned_parameters):
        return some
    (num_heads, num_kv_heads), total = (x.shape[1] for x in (query, key)), heads.total if heads else query.shape[1]
    initial = initial_parameters(
        config,
        num_heads=total,
        num_kv_heads=max(1, total * num_kv_heads // num_heads),
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        max_length=max(query.shape[2], key.shape[2]),
    )
    initial = initial if heads is None else parameters_of_slice(config, initial, heads, num_heads)
    return {**{name: x.to(query.device) for name, x in initial.items()}, **some}


@functools.lru_cache(maxsize=256)
def learns(config: MethodConfig) -> bool:
    """Whether a method with these hyperparameters has learned parameters."""
    initial = get_method(config.method).initial_parameters
    return initial is not None and bool(initial(config, num_heads=1, head_dim=1, value_dim=1, max_length=1))


@functools.lru_cache(maxsize=256)
def learns_for_length(config: MethodConfig) -> bool:
    """Whether a method with these hyperparameters has learned parameters whose shapes depend on the longest sequence.

    Those are tables that contract tokens. Feature maps belong to heads, and fit sequences of any length.
    """
    initial = get_method(config.method).initial_parameters
    if initial is None:
        return False
    sizes = {"num_heads": 1, "head_dim": 1, "value_dim": 1}
    short, long = (initial(config, **sizes, max_length=length) for length in (1, 2))
    return {name: x.shape for name, x in short.items()} != {name: x.shape for name, x in long.items()}


def parameters_of_slice(
    config: MethodConfig, parameters: Mapping[str, Tensor], heads: HeadSlice, num_heads: int
) -> dict[str, Tensor]:
    """The learned parameters of some heads of a layer: of these query heads, or of the key heads that they use.

    Args:
        config: of the method.
        parameters: those of all heads by name.
        heads: the number of the first head and of all query heads.
        num_heads: how many query heads.
    """
    own = dict(parameters)
    for name in parameters_of_heads(config):
        if name in own:
            count = own[name].shape[0]
            last = -(-(heads.first + num_heads) * count // heads.total)
            own[name] = own[name][heads.first * count // heads.total : last]
    return own


@functools.lru_cache(maxsize=256)
def parameters_of_heads(config: MethodConfig) -> tuple[str, ...]:
    """The learned parameters whose first dimension is that of the heads, of queries or of keys."""
    initial, sizes = get_method(config.method).initial_parameters, {"head_dim": 1, "value_dim": 1, "max_length": 1}
    if initial is None:
        return ()
    one, two = (initial(config, num_heads=n, num_kv_heads=n, **sizes) for n in (1, 2))
    return tuple(name for name, x in two.items() if x.ndim and x.shape[0] == 2 * one[name].shape[0])


@on_register
def _forget(name: str) -> None:
    """A method that is registered again may learn something else with the same hyperparameters."""
    for function in (learns, learns_for_length, parameters_of_heads):
        function.cache_clear()
