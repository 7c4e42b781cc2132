"""What a `config.json` says, checked before Transformers sees it: no value in it makes building the model dangerous."""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch

from hf_efficient_attn.checkpoint.values import refusing, short, walk
from hf_efficient_attn.checkpoint.weights import Weights
from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_name
from hf_efficient_attn.integration.settings import EfficientAttentionConfig, as_settings
from hf_efficient_attn.methods import MethodConfig, available_methods, get_method

# How a model can be told to compute its attention: none of these fetches anything.
_IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
# What can make Transformers run code from elsewhere, or read files elsewhere. Nothing in a model's structure.
_DROPPED = ("auto_map", "custom_pipelines", "transformers_weights", "name_or_path", "fusion_config", "kernel_config")
_DROPPED += ("experts_implementation", "trust_remote_code")

_COUNTS = re.compile(r"layer|depth|block|expert|stage|label|head|group|codebook|level|branch|step|class")
_MOST = 2**16
_LARGEST = 2**24


def check_config(values: dict, weights: Weights) -> tuple[dict, list[str]]:
    """A config without what leads elsewhere -> (that config, names of what was dropped).

    Raises:
        UnsupportedAttentionError: sizes that cannot be those of the checkpoint's tensors, a model type or a method that
            does not exist, a form of checkpoint that is not converted (quantised ones).
    """
    kind = values.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise UnsupportedAttentionError("config.json has no model_type, so that nobody can tell what the model is")
    _check_numbers(values, weights)
    _check_attention(values, weights)
    if values.get("quantization_config") is not None:
        raise UnsupportedAttentionError("the checkpoint is quantised; convert the one that it was made from")
    for key, part, _ in walk(values):
        if key == "use_pretrained_backbone" and part:
            raise UnsupportedAttentionError(
                "config.json asks for weights of another model (use_pretrained_backbone), which are not fetched here"
            )
    architectures = values.get("architectures")
    if architectures is not None and (
        not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures)
    ):
        raise UnsupportedAttentionError(f"config.json: architectures={short(architectures)} is no list of class names")
    dropped: set[str] = set()
    return _without(values, dropped), sorted(dropped)


def _without(value: Any, dropped: set[str]) -> Any:
    """A copy without the keys that lead elsewhere, at any depth."""
    if isinstance(value, list):
        return [_without(part, dropped) for part in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, part in value.items():
        if key == "attn_implementation":
            # Which of the exact ones is chosen by who loads the model: some need what is not installed here.
            names = part if isinstance(part, dict) else {"": part}
            names = {place: name for place, name in names.items() if name in available_methods()}
            kept |= {key: names if isinstance(part, dict) else part} if names else {}
        elif key in _DROPPED or key.startswith("_"):
            dropped.add(key)
        else:
            kept[key] = _without(part, dropped)
    return kept


def _check_numbers(values: dict, weights: Weights) -> None:
    largest = weights.largest_dimension
    for key, part, _ in walk(values):
        if isinstance(part, bool) or not isinstance(part, (int, float)):
            continue
        if isinstance(part, float):
            if math.isnan(part):
                raise UnsupportedAttentionError(f"config.json: {short(key)} is no number (NaN)")
            continue
        limit = max(_MOST, largest) if _COUNTS.search(key.lower()) else max(_LARGEST, 4 * largest)
        if "seed" in key:
            limit = 2**64
        if abs(part) > limit:
            raise UnsupportedAttentionError(
                f"config.json: {short(key)}={short(part)} cannot be: the largest tensor of the checkpoint has "
                f"{largest} entries along a dimension"
            )


def _check_attention(values: dict, weights: Weights) -> None:
    """Every choice of a method, at any depth."""
    for key, part, _ in walk(values):
        if "attn_implementation" in key and part is not None:
            for name in _names(part):
                if name not in available_methods() and name not in _IMPLEMENTATIONS:
                    known = [*available_methods(), "sdpa", "eager"]
                    sentence = unknown_name("attention method", name[:60], known)
                    raise UnsupportedAttentionError(f"config.json: {short(key)}: {sentence}")
    for part in _dictionaries(values):
        stored = part.get("efficient_attention")
        if stored is None:
            continue
        what = "config.json: efficient_attention"
        for _, inner, depth in walk(stored):
            too_long = isinstance(inner, (str, list, dict)) and len(inner) > (200 if isinstance(inner, str) else 4096)
            if too_long or depth > 6:
                raise UnsupportedAttentionError(f"{what} is larger than any choice of methods")
        named = part.get("attn_implementation")
        with refusing(what):
            settings = as_settings(stored, named if isinstance(named, str) and named in available_methods() else None)
            _check_learned(settings, part, weights)


def _names(part: Any) -> list[str]:
    found = list(part.values()) if isinstance(part, dict) else [part]
    if not all(isinstance(name, str) for name in found):
        raise UnsupportedAttentionError(f"config.json: attn_implementation={short(part)} is no name of a method")
    return found


def _dictionaries(value: Any) -> list[dict]:
    return [part for _, part, _ in walk(value) if isinstance(part, dict)]


def _check_learned(settings: EfficientAttentionConfig, values: Mapping, weights: Weights) -> None:
    """The tables that a method learns are made before those of the checkpoint are read: they must fit into it."""
    positions = [values.get(key) for key in ("max_position_embeddings", "n_positions")]
    length = max([n for n in positions if isinstance(n, int) and n > 0], default=1)
    for entry in settings.entries:
        if learned_numbers(entry.config, length) > weights.numbers:
            raise UnsupportedAttentionError(
                f"{entry.config.method} would learn more parameters with these settings than the checkpoint holds"
            )


def learned_numbers(method: MethodConfig, length: int) -> int:
    """How many numbers a method learns at least in one layer, for sequences of `length` tokens; nothing is made."""
    start = get_method(method.method).initial_parameters
    if start is None:
        return 0
    with torch.device("meta"):
        made = start(method, num_heads=1, head_dim=1, value_dim=1, max_length=length)
    return sum(tensor.numel() for tensor in made.values())
