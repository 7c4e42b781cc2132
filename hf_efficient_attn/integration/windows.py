"""Layers whose model gives them a sliding window of its own: they stay exact, at the cost of the window.

Such a layer attends to the last `sliding_window` keys, or to that many on both sides. It is sub-quadratic already, and
a method would lose the window. Its attention module says at its call how long the window is, as Transformers' flash
attention needs it too, and its mask says that it has one (`masks.KeyMask.is_local`).
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers.configuration_utils import PreTrainedConfig

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.model_code import uses_interface
from hf_efficient_attn.integration.settings import EXACT

# The argument of attention functions with the length of the window.
ARGUMENT = "sliding_window"


def window_of(module: nn.Module, config: PreTrainedConfig) -> int | None:
    """The number of keys on one side to which an attention module is limited by its model; None if it sees all.

    A window that is as long as the model's positions is none.
    """
    if not uses_interface(type(module)):
        return None
    kind = _layer_type(module, config)
    if (kind is not None and "sliding" not in kind) or getattr(module, "is_sliding", True) is False:
        return None
    size: Any = getattr(module, ARGUMENT, getattr(config, ARGUMENT, None))
    if not isinstance(size, int) or isinstance(size, bool):
        return None
    positions = getattr(config, "max_position_embeddings", None)
    return None if isinstance(positions, int) and positions <= size else size


def refuse_chunks(model: str, module: nn.Module, config: PreTrainedConfig, name: str) -> None:
    """Refuse a layer that attends within chunks, as those of Llama 4 do, which only a (queries, keys) mask knows."""
    size, positions = getattr(config, "attention_chunk_size", None), getattr(config, "max_position_embeddings", None)
    is_shorter = size is not None and (positions is None or size < positions)
    if is_shorter and "chunked" in (_layer_type(module, config) or ""):
        raise UnsupportedAttentionError(
            f"{model} attends within chunks of its own in some layers ({name}), which only a (queries, keys) mask "
            f"knows, and that is never built here: use attn_implementation={EXACT!r} for this model"
        )


def take_window(name: str, expected: int | None, is_local: bool, kv_len: int, kwargs: Mapping[str, Any]) -> int | None:
    """The window with which a call is to be computed; None for attention to all keys.

    Raises:
        UnsupportedAttentionError: the module, its mask and the switch of its model do not agree on the window.
    """
    size = kwargs.get(ARGUMENT)
    bites = size is not None and size < kv_len
    if not bites and not is_local:
        return None
    if expected is None or size is None or not is_local:
        raise UnsupportedAttentionError(
            f"{name}: a layer of this model attends to a window of {size or 'a few'} keys and the sequence has "
            f"{kv_len}, so that the window would be lost: use attn_implementation={EXACT!r} for this model"
        )
    return int(size)


def _layer_type(module: nn.Module, config: PreTrainedConfig) -> str | None:
    types, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if isinstance(types, (list, tuple)) and isinstance(index, int) and 0 <= index < len(types):
        return str(types[index])
    return None
