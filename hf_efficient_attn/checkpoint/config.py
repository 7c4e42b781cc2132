"""Checks of a checkpoint's `config.json`, made before Transformers builds a model from it."""

from typing import Any

from hf_efficient_attn.checkpoint.files import short
from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_method
from hf_efficient_attn.methods import available_methods

# Exact implementations that Transformers contains. Other names are repositories whose code it would download and run.
_IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
# Keys that can make Transformers run code or read files from elsewhere. None of them describes the model.
_REMOVED = (
    "auto_map", "custom_pipelines", "experts_implementation", "fusion_config", "kernel_config", "name_or_path",
    "transformers_weights", "trust_remote_code",
)  # fmt: skip


def check_config(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Copy `config.json` without what refers to code or files elsewhere; also return the names of the keys left out.

    Raises:
        UnsupportedAttentionError: There is no model type, an attention implementation is unknown, or the checkpoint is
            of a kind that cannot be converted: it is quantised, or uses the weights of another checkpoint.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise UnsupportedAttentionError("config.json has no model_type, so the type of the model is unknown")
    if values.get("quantization_config") is not None:
        raise UnsupportedAttentionError(
            "the checkpoint is quantised: convert the checkpoint that it was made from instead"
        )
    removed: set[str] = set()
    return _checked(values, removed), sorted(removed)


def _checked(value: Any, removed: set[str]) -> Any:
    """Copy a part of the config without the keys that are removed, at any depth; their names go into `removed`."""
    if isinstance(value, list):
        return [_checked(part, removed) for part in value]
    if not isinstance(value, dict):
        return value
    if value.get("use_pretrained_backbone"):
        raise UnsupportedAttentionError(
            "config.json asks for the weights of another model (use_pretrained_backbone), which are not downloaded"
        )
    kept = {key: part for key, part in value.items() if key not in _REMOVED and not key.startswith("_")}
    removed |= value.keys() - kept.keys()
    chosen = kept.pop("attn_implementation", None)
    by_part = chosen if isinstance(chosen, dict) else {"": chosen}
    for name in by_part.values():
        if name is not None and name not in (*available_methods(), *_IMPLEMENTATIONS):
            text = name[:60] if isinstance(name, str) else short(name)
            raise UnsupportedAttentionError(
                f"config.json: {unknown_method(text, [*available_methods(), 'sdpa', 'eager'])}"
            )
    # Whoever loads the model chooses an exact implementation; the one that is named may not be installed.
    methods = {part: name for part, name in by_part.items() if name in available_methods()}
    kept = {key: _checked(part, removed) for key, part in kept.items()}
    if methods:
        kept["attn_implementation"] = methods if isinstance(chosen, dict) else chosen
    return kept
