"""Shapes of the learned parameters of a method, derived from the values that it starts from."""

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from hf_efficient_attn.methods._shared.config import MethodConfig
from hf_efficient_attn.methods._shared.registry import get_method, on_register
from hf_efficient_attn.ops.shards import HeadSlice
from hf_efficient_attn.ops.tracing import unrecorded


@functools.lru_cache(maxsize=256)
def parameter_shapes(
    config: MethodConfig, num_heads: int = 1, max_length: int = 1, head_dim: int = 1
) -> dict[str, torch.Size]:
    """Return the shapes of the learned parameters of a layer with these sizes, by name."""
    sizes = {"num_heads": num_heads, "head_dim": head_dim, "value_dim": 1, "max_length": max_length}
    initial = functools.partial(get_method(config.method).initial_parameters, config, **sizes)
    return {name: x.shape for name, x in unrecorded(initial).items()}


# A method that is registered again may learn other parameters.
on_register(lambda name: parameter_shapes.cache_clear())


def learns(config: MethodConfig) -> bool:
    """Whether a method with these hyperparameters has learned parameters."""
    return bool(parameter_shapes(config))


def learns_for_length(config: MethodConfig) -> bool:
    """Whether a method with these hyperparameters has learned parameters whose shapes depend on the longest sequence.

    Such parameters are tables that contract tokens. Feature maps belong to heads, and fit sequences of any length.
    """
    return parameter_shapes(config) != parameter_shapes(config, max_length=2)


def parameters_of_slice(
    config: MethodConfig, parameters: Mapping[str, Tensor], heads: HeadSlice, num_heads: int
) -> dict[str, Tensor]:
    """Return the learned parameters of query heads of a layer, or of the key heads that these use.

    Args:
        config: the config of the method.
        parameters: the parameters of all heads by name.
        heads: the number of the first head, and the number of all query heads.
        num_heads: the number of query heads.
    """
    own, one = dict(parameters), parameter_shapes(config)
    for name, shape in parameter_shapes(config, num_heads=2).items():
        if name in own and shape and shape[0] == 2 * one[name][0]:  # one row for each head
            count = own[name].shape[0]
            last = -(-(heads.first + num_heads) * count // heads.total)
            own[name] = own[name][heads.first * count // heads.total : last]
    return own
