"""The attention function of a kernel repository, which Transformers calls where this package is not installed.

`standalone.export` copies this module, and all others that it imports, into the repository. None of them imports
Transformers. The function reads the hyperparameters from `module.config`, and it knows no more of the model than the
attention module that calls it. What depends on the rest of the model is therefore refused, although the package itself
can do it.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.exact import exact_layer
from hf_efficient_attn.integration.layers import Layer
from hf_efficient_attn.integration.settings import EfficientAttentionConfig, implementation_entry, layer_seed
from hf_efficient_attn.methods import attention

# Arguments without an effect on attention, because a model has used them already or needs them later.
_UNUSED = ("position_ids", "cache_position", "position_embeddings", "use_cache", "output_hidden_states", "return_dict")
_LOSS_WORDS = ("label", "loss", "target", "num_items_in_batch")
_INSTALL = "install hf_efficient_attn, which can do this, and load the model with attn_implementation={!r}"


def kernel_function(method: str) -> Callable[..., tuple[Tensor, None]]:
    """Make the attention function of a method: (B, H, Nq, D), (B, H_kv, Nk, D), (B, H_kv, Nk, Dv) -> (B, Nq, H, Dv)."""

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        scale, dropout, is_causal = (kwargs.pop(name, None) for name in ("scaling", "dropout", "is_causal"))
        settings = _settings(method, module)
        # It also determines the random draws. None if the module does not say.
        layer: Layer | None = getattr(module, "attention_layer", getattr(module, "layer_idx", None))
        is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        if attention_mask is not None and attention_mask.shape[1:] != key.shape[2:3]:
            shape = tuple(attention_mask.shape)
            _refuse(method, f"the mask has the shape {shape}, and only (batch, {key.shape[2]}) marks padding alone")
        mask = None if attention_mask is None else attention_mask.to(torch.bool)
        _refuse_lost(method, kwargs, key.shape[2])
        if is_causal and mask is None:
            _check_positions(method, kwargs.get("position_ids"), query.shape[2], key)
        named = settings.named_layers()
        if named and (layer is None or any(isinstance(x, str) for x in named)):
            _refuse(method, "'layers' chooses some layers, and an attention module does not know which one it is")
        config = settings.for_layer(layer)
        dropout_p = dropout if module.training and dropout else 0.0
        options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "dropout_p": dropout_p}
        if config is None:
            out = exact_layer(query, key, value, mask, **options)
        else:
            if is_causal and not config.causal:
                _refuse(method, "it has no causal form, which this model needs")
            seed = None if module.training else layer_seed(layer)
            out = attention(config, query, key, value, attention_mask=mask, seed=seed, parameters={}, **options)
        return out.transpose(1, 2).contiguous(), None

    forward.__name__ = forward.__qualname__ = method
    return forward


def _refuse(method: str, problem: str) -> NoReturn:
    raise UnsupportedAttentionError(
        f"{method}: {problem}: {_INSTALL.format(method)}, or use attn_implementation='sdpa'"
    )


def _settings(method: str, module: nn.Module) -> EfficientAttentionConfig:
    """The settings in the config of a module's model, or the method with its default hyperparameters."""
    config = getattr(module, "config", None)
    stored = getattr(config, "efficient_attention", None)
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        _refuse(method, "the model has cross attention, which this function cannot tell from self-attention")
    settings = EfficientAttentionConfig.from_dict(stored or {}, method)
    if {entry.config.method for entry in settings.entries} != {method}:
        named = ", ".join(sorted({entry.config.method for entry in settings.entries}))
        _refuse(method, f"config.efficient_attention chooses {named}, and this repository has only {method}")
    return settings


def _refuse_lost(method: str, kwargs: Mapping[str, Any], kv_len: int) -> None:
    """Refuse arguments that exact attention would use: a window, a bias, packed sequences and the like."""
    for name, value in kwargs.items():
        if name == "sliding_window":
            lost = value is not None and value < kv_len
        elif name in _UNUSED or any(word in name for word in _LOSS_WORDS):
            lost = False
        else:  # a tensor, or a request such as output_attentions=True or softcap=30.0
            lost = isinstance(value, Tensor) or (isinstance(value, (bool, float)) and bool(value))
        if lost:
            _refuse(method, f"the argument {name!r} of the attention would be lost")


def _check_positions(method: str, position_ids: Tensor | None, q_len: int, key: Tensor) -> None:
    """Refuse packed sequences, by the positions (B, Nq), and static caches, also by an empty last place; no mask."""
    kv_len = key.shape[2]
    is_wrong = q_len < kv_len and not bool(key[:, :, -1].any())
    if isinstance(position_ids, Tensor) and position_ids.ndim == 2 and position_ids.shape[1] == q_len:
        expected = torch.arange(kv_len - q_len, kv_len, device=position_ids.device)
        is_wrong = is_wrong or not bool((position_ids == expected).all())
    if is_wrong:
        _refuse(method, "the positions are not those of one sequence per row (packed sequences, or a static cache)")


def keep_name(method: str) -> None:
    """Let Transformers write the name of a kernel repository, ORG/NAME:METHOD, into config.json on every save.

    Otherwise it drops the name, and a saved copy of the model would load with exact attention. Transformers is loaded
    already if it imports the repository, and what imports it without Transformers saves no such config.
    """
    cls: Any = getattr(sys.modules.get("transformers.configuration_utils"), "PreTrainedConfig", None)
    if cls is None:
        return
    to_dict = cls.to_dict

    def name_of(config: Any) -> str | None:
        name = str(getattr(config, "_attn_implementation", None))
        return name if name.endswith(f":{method}") else None

    @functools.wraps(to_dict)
    def to_dict_with_name(self: Any) -> dict[str, Any]:
        output: dict[str, Any] = to_dict(self)
        entry = implementation_entry(self, name_of)
        return output if entry is None else {**output, "attn_implementation": entry}

    cls.to_dict = to_dict_with_name
