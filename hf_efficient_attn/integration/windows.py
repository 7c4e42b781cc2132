"""Layers whose model gives them a sliding window of its own: they stay exact, at the cost of the window.

Such a layer attends to the last `sliding_window` keys, or to that many on both sides. It is sub-quadratic already, and
a method would lose the window. Its attention module says at its call how long the window is, as Transformers' flash
attention needs it too, and its mask says that it has one (`masks.KeyMask.is_local`).
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from transformers.configuration_utils import PreTrainedConfig

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.model_code import attention_arguments, uses_interface
from hf_efficient_attn.integration.settings import EXACT

# The argument of attention functions with the length of the window.
ARGUMENT = "sliding_window"


def window_of(module: nn.Module, config: PreTrainedConfig) -> int | None:
    """The number of keys on one side to which an attention module is limited by its model; None if it sees all.

    A window that is as long as the model's positions is none.

    Args:
        module: an attention module.
        config: the config that applies to it.
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


def check_windows(model: str, windowed: Iterable[tuple[nn.Module, str]]) -> None:
    """Refuse a model with a window that cannot be kept.

    Args:
        model: how the message names the model.
        windowed: the attention modules with a window, and their names.

    Raises:
        UnsupportedAttentionError: a module does not tell its attention function how long its window is.
    """
    for module, name in windowed:
        if ARGUMENT not in attention_arguments(type(module)):
            raise UnsupportedAttentionError(
                f"{model} gives {name} a window of its own that only a (queries, keys) mask knows, which is never "
                f"built here: use attn_implementation={EXACT!r} for this model"
            )


def refuse_chunks(model: str, module: nn.Module, config: PreTrainedConfig, name: str) -> None:
    """Refuse a layer that attends within chunks, as those of Llama 4 do.

    Raises:
        UnsupportedAttentionError: only a (queries, keys) mask knows the chunks.
    """
    size, positions = getattr(config, "attention_chunk_size", None), getattr(config, "max_position_embeddings", None)
    is_shorter = size is not None and (positions is None or size < positions)
    if is_shorter and "chunked" in (_layer_type(module, config) or ""):
        raise UnsupportedAttentionError(
            f"{model} attends within chunks of its own in some layers ({name}), which only a (queries, keys) mask "
            f"knows, and that is never built here: use attn_implementation={EXACT!r} for this model"
        )


def nothing_left(model: str, name: str, names: Sequence[str], others: Sequence[str]) -> UnsupportedAttentionError:
    """The refusal of a choice that would change windowed layers only.

    Args:
        model: how the message names the model.
        name: the method.
        names: of the chosen attention modules.
        others: of the attention modules without a window.
    """
    more = f" and {len(names) - 1} more of the chosen layers" if len(names) > 1 else ""
    instead = f"use attn_implementation={EXACT!r} for this model, or another model"
    if others:
        instead = f"choose layers without a window: {', '.join(others)}"
    return UnsupportedAttentionError(
        f"{name}: {model} has a sliding window of its own in {names[0]}{more}, which is sub-quadratic already and "
        f"would be lost: {instead}"
    )


def warn_of_windows(name: str, names: Sequence[str]) -> None:
    """Warn that windowed layers stay exact."""
    warnings.warn(
        f"{name}: layers with a sliding window of the model's own stay exact, at the cost of their window: "
        f"{', '.join(names)}",
        stacklevel=2,
    )


def take_window(name: str, expected: int | None, is_local: bool, kv_len: int, kwargs: Mapping[str, Any]) -> int | None:
    """The window with which a call is to be computed; None for attention to all keys.

    Args:
        name: what computes the call, a method.
        expected: the window of the module's location.
        is_local: whether the mask was made for a window that is shorter than the keys.
        kv_len: number of keys.
        kwargs: the arguments of the attention function.

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
