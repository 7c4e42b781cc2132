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
    kept: dict[str, Any] = {}
    for key, part in value.items():
        if key == "attn_implementation":
            implementation = _own_methods(part)
            kept |= {key: implementation} if implementation else {}
        elif key == "use_pretrained_backbone" and part:
            raise UnsupportedAttentionError(
                "config.json asks for the weights of another model (use_pretrained_backbone), which are not downloaded"
            )
        elif key in _REMOVED or key.startswith("_"):
            removed.add(key)
        else:
            kept[key] = _checked(part, removed)
    return kept


def _own_methods(implementation: Any) -> Any:
    """Keep those names that are methods of this package.

    Whoever loads the model chooses an exact implementation; the one that is named may not be installed.
    """
    names = implementation if isinstance(implementation, dict) else {"": implementation}
    for name in names.values():
        if name is not None and name not in (*available_methods(), *_IMPLEMENTATIONS):
            known = [*available_methods(), "sdpa", "eager"]
            text = name[:60] if isinstance(name, str) else short(name)
            raise UnsupportedAttentionError(f"config.json: {unknown_method(text, known)}")
    own = {part: name for part, name in names.items() if name in available_methods()}
    return own if isinstance(implementation, dict) else own.get("")
