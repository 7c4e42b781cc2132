"""Modules that are no attention of Transformers' interface, but read a mask in the form of exact attention.

The mask of every method here is that of the keys, (B, Nk). Two kinds of modules expect another one:

- convolutions that find the padding in a (B, 1, Nq, Nk) mask (LASR's): they get the mask as (B, 1, 1, Nk);
- pooling by PyTorch's own attention, with a mask that the module asks Transformers for (SigLIP 2's). Transformers makes
  it for the implementation in the module's config, so that the module gets a config of exact attention.
"""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from hf_efficient_attn.integration.configs import method_of
from hf_efficient_attn.integration.model_code import uses_interface
from hf_efficient_attn.integration.settings import EXACT

# Transformers' functions that make a mask in the form of an implementation.
_MASKS = frozenset({"create_bidirectional_mask", "create_causal_mask"})
# The attribute of a module that has the forward pre-hook below.
_HOOKED = "_efficient_attention_mask_hook"


def adapt(module: Any) -> None:
    """Give a module that reads a mask what it can read, once. It stays right with every implementation."""
    if _finds_padding(type(module)) and not getattr(module, _HOOKED, False):
        module.register_forward_pre_hook(_extend_mask, with_kwargs=True)
        setattr(module, _HOOKED, True)
    if _makes_mask(module) and method_of(module.config) is not None:
        module.config = copy.copy(module.config)
        module.config._attn_implementation_internal = EXACT


def _finds_padding(kind: type[nn.Module]) -> bool:
    forward = inspect.unwrap(kind.forward)
    return inspect.isfunction(forward) and "all_masked_rows" in forward.__code__.co_varnames


def _makes_mask(module: nn.Module) -> bool:
    forward = inspect.unwrap(type(module).forward)
    return (
        inspect.isfunction(forward)
        and not _MASKS.isdisjoint(forward.__code__.co_names)
        and not isinstance(module, PreTrainedModel)
        and isinstance(getattr(module, "config", None), PreTrainedConfig)
        and not any(uses_interface(type(part)) for part in module.modules())
    )


def _extend_mask(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward pre-hook: make the mask of the keys bool (B, 1, 1, Nk)."""
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        kwargs = {**kwargs, "attention_mask": mask[:, None, None, :].to(torch.bool)}
    return args, kwargs
