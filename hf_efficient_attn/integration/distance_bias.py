"""The bias of relative positions of T5 and similar models, without its (queries, keys) matrix.

T5's attention modules compute the bias as a (1, H, Nq, Nk) tensor (of zeros for cross attention), hand it to the
attention function as `position_bias`, and return it for the next layer. They compute none if they are given one. A
forward pre-hook therefore gives them a `DistanceBias`, which passes through the layers as the tensor would. UMT5's
modules take none, so their `compute_bias` returns the `DistanceBias`. The classes of `patched` give it to their
attention themselves.
"""

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_efficient_attn.integration.models import hook_once, uses_interface

ARGUMENT = "position_bias"
# The attribute of attention functions that take a `DistanceBias`.
TAKES_DISTANCE_BIAS = "takes_distance_bias"


class DistanceBias:
    """What an attention module of T5 gets in place of a tensor of biases.

    Every layer computes its own table, so that gradients reach the parameters with any kind of gradient checkpointing.
    """

    def __init__(self, module: Any, **options: Any) -> None:
        self.module = module  # it holds the parameters of the bias; None for cross attention, which has none
        self.options = options  # arguments of its `_relative_position_bucket` besides the distances

    def table(self) -> Tensor | None:
        """The bias (H, 2R + 1) for the distances -R to R, beyond which it is constant; None without one."""
        if self.module is None:
            return None
        largest, weights = self.module.relative_attention_max_distance, self.module.relative_attention_bias
        distance = torch.arange(-largest, largest + 1, device=weights.weight.device)
        return weights(self.module._relative_position_bucket(distance, **self.options)).mT


class LinearBias(DistanceBias):
    """The bias of ALiBi (Press et al., ICLR 2022): `slopes` (H,) times the negative distance, for `length` keys."""

    def __init__(self, slopes: Tensor, length: int) -> None:
        super().__init__(None)
        self.slopes, self.length = slopes, length

    def table(self) -> Tensor:
        """The bias (H, 2 * length + 1)."""
        return -self.slopes[:, None] * torch.arange(-self.length, self.length + 1, device=self.slopes.device).abs()


def has_distance_bias(kind: type[nn.Module]) -> bool:
    """Whether a class of attention modules, or of encoders around them, has a bias that a `DistanceBias` replaces."""
    return getattr(kind, "adds_distance_bias", False) or _has_bias_of_t5(kind)


def _has_bias_of_t5(kind: type[nn.Module]) -> bool:
    # UMT5 adds it to the mask in some versions of Transformers.
    passes_it = f"{ARGUMENT}={ARGUMENT}" in inspect.getsource(kind.forward) if uses_interface(kind) else False
    return passes_it and hasattr(kind, "_relative_position_bucket")


def attach_hook(module: nn.Module) -> None:
    """Give an attention module the hook, once. It does nothing while the model computes an attention of others."""
    if _has_bias_of_t5(type(module)):
        if ARGUMENT in inspect.signature(type(module).forward).parameters:
            hook_once(module, _give_bias)
        else:
            vars(module)["compute_bias"] = functools.partial(_compute_bias, module)


def take_bias(module: nn.Module, kwargs: dict[str, Any], device: torch.device) -> Tensor | None:
    """Remove a `DistanceBias` from the arguments of an attention function, and return its table; None without one."""
    bias = kwargs.get(ARGUMENT)
    if isinstance(bias, Tensor) and getattr(module, "has_relative_attention_bias", None) is False:
        del kwargs[ARGUMENT]  # the zeros that UMT5 makes for cross attention
    if not isinstance(bias, DistanceBias):
        return None
    del kwargs[ARGUMENT]
    table = bias.table()
    return None if table is None else table.to(device)


def takes_bias(module: Any) -> bool:
    """Whether the attention function that the config of a module names takes a `DistanceBias`."""
    function = ALL_ATTENTION_FUNCTIONS.get(getattr(module.config, "_attn_implementation", None))
    return bool(getattr(function, TAKES_DISTANCE_BIAS, False))


def _give_bias(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    if not takes_bias(module) or kwargs.get(ARGUMENT) is not None:
        return None
    if not getattr(module, "has_relative_attention_bias", False):
        return args, {**kwargs, ARGUMENT: DistanceBias(None)}
    buckets, largest = module.relative_attention_num_buckets, module.relative_attention_max_distance
    options = {"bidirectional": not module.is_decoder, "num_buckets": buckets, "max_distance": largest}
    return args, {**kwargs, ARGUMENT: DistanceBias(module, **options)}


def _compute_bias(module: Any, *args: Any, **kwargs: Any) -> Tensor | DistanceBias:
    own: Tensor | DistanceBias = DistanceBias(module)  # its `_relative_position_bucket` takes the distances only
    return own if takes_bias(module) else type(module).compute_bias(module, *args, **kwargs)
