"""The bias of relative positions of T5 and similar models, without its (queries, keys) matrix.

T5's attention modules compute the bias as a (1, H, Nq, Nk) tensor (of zeros for cross attention), hand it to the
attention function as `position_bias`, and return it for the next layer. They compute none if they are given one. A
forward pre-hook therefore gives them a `DistanceBias`, which passes through the layers as the tensor would.
"""

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

    def __init__(self, module: nn.Module | None) -> None:
        self.module: Any = module  # it holds the parameters of the bias; None for cross attention, which has none


def has_distance_bias(kind: type[nn.Module]) -> bool:
    """Whether a class of attention modules has a bias as T5 does, which the hook can replace."""
    is_like_t5 = hasattr(kind, "_relative_position_bucket") and kind.__name__ != "UMT5Attention"  # adds it to the mask
    return is_like_t5 and uses_interface(kind)


def attach_hook(module: nn.Module) -> None:
    """Give an attention module the hook, once. It does nothing while the model computes an attention of others."""
    if has_distance_bias(type(module)):
        hook_once(module, _give_bias)


def take_bias(kwargs: dict[str, Any], device: torch.device) -> Tensor | None:
    """Remove a `DistanceBias` from the arguments of an attention function, and return its table; None without one.

    The table (H, 2R + 1) has the bias for the distances -R to R, beyond which it is constant.
    """
    if not isinstance(kwargs.get(ARGUMENT), DistanceBias):
        return None
    module = kwargs.pop(ARGUMENT).module
    if module is None:
        return None
    largest, weights = module.relative_attention_max_distance, module.relative_attention_bias
    distance = torch.arange(-largest, largest + 1, device=weights.weight.device)
    options = {"bidirectional": not module.is_decoder, "num_buckets": module.relative_attention_num_buckets}
    table: Tensor = weights(module._relative_position_bucket(distance, max_distance=largest, **options))
    return table.mT.to(device)


def _give_bias(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    function = ALL_ATTENTION_FUNCTIONS.get(getattr(module.config, "_attn_implementation", None))
    if not getattr(function, TAKES_DISTANCE_BIAS, False) or kwargs.get(ARGUMENT) is not None:
        return None
    own = module if getattr(module, "has_relative_attention_bias", False) else None
    return args, {**kwargs, ARGUMENT: DistanceBias(module=own)}
