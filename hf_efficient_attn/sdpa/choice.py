"""Which calls of attention a method computes: what their tensors, their lengths and their masks allow.

All other calls stay exact, and a sentence says why.
"""

import ast
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_efficient_attn.methods import MethodConfig, crossover, make_config
from hf_efficient_attn.ops import tracing

# Arguments of `multi_head_attention_forward` that add keys.
_FURTHER_KEYS = ("bias_k", "bias_v", "static_k", "static_v", "add_zero_attn")
# A mask that is added to the scores has this or less at masked keys.
_MASKED = -1e4
# Reasons why calls stay exact.
SHORT = "fewer than"
_BIAS = "a bias is added to the scores"
_BROADCAST = "heads are broadcast"
_DROPPED = "all weights are dropped"
_SUBCLASS = "a tensor is nested, or of another subclass of torch.Tensor"


class Choice(NamedTuple):
    """How a call is computed."""

    key_mask: Tensor | None  # bool (B, Nk), True for the keys to attend to; None for all keys
    is_causal: bool  # whether it is causal, by its argument or by its mask
    reason: str  # why the call stays exact; empty if the method computes it


def _exact(reason: str) -> Choice:
    return Choice(None, False, reason)


class Chooser(NamedTuple):
    """Chooses how calls are computed."""

    config: MethodConfig  # the method
    min_length: int | None  # as in `replace_sdpa`

    def choose(
        self, tensors: Sequence[Tensor], mask: Tensor | None, dropout_p: float, is_causal: bool, enable_gqa: bool
    ) -> Choice:
        """Choose for a call of `scaled_dot_product_attention`, by its arguments."""
        query, key, _ = tensors
        masks = [] if mask is None else [mask]
        if not all(tracing.is_plain(x) for x in (*tensors, *masks)):
            return _exact(_SUBCLASS)
        if query.dim() == key.dim() == 4 and query.shape[1] != key.shape[1] and not enable_gqa:
            return _exact(_BROADCAST)
        return _exact(_DROPPED) if dropout_p >= 1.0 else self._choose_by_masks(tensors, masks, is_causal)

    def choose_multi_head(self, given: Mapping[str, Any]) -> Choice:
        """Choose for a call of `multi_head_attention_forward`, by its arguments."""
        num_heads, mask, padding = given["num_heads"], given["attn_mask"], given["key_padding_mask"]
        if not all(tracing.is_plain(x) for x in given.values() if isinstance(x, Tensor)):
            return _exact(_SUBCLASS)
        if given["query"].dim() != 3:
            return _exact("inputs have no batch")
        if given["need_weights"]:
            return _exact("the caller asks for the weights (need_weights=True)")
        if any(given[x] is not None and given[x] is not False for x in _FURTHER_KEYS):
            return _exact("keys are added to those of the input")
        if given["training"] and given["dropout_p"] >= 1.0:
            return _exact(_DROPPED)
        # Views of the inputs that have the shapes of the projected heads, (B, H, N, .).
        tensors = [given[x].expand(num_heads, -1, -1, -1).permute(2, 0, 1, 3) for x in ("query", "key", "value")]
        masks = [] if padding is None else [padding[:, None, None]]  # (B, 1, 1, Nk)
        if mask is not None and not given["is_causal"]:  # (Nq, Nk) or (B * H, Nq, Nk)
            masks.append(mask if mask.dim() == 2 else mask.unflatten(0, (-1, num_heads)))
        # Here True is for the keys that are masked.
        masks = [~x if x.dtype == torch.bool else x for x in masks]
        choice = self._choose_by_masks(tensors, masks, given["is_causal"])
        if given["query"] is not given["key"] and not choice.is_causal and self.config.mixes_queries:
            return _exact(f"cross attention, where an output of {self.config.method} depends on other queries")
        return choice

    def _choose_by_masks(self, tensors: Sequence[Tensor], masks: Sequence[Tensor], is_causal: bool) -> Choice:
        """Choose by tensors (B, H, N, .) and masks that broadcast to (B, H, Nq, Nk), True for keys to attend to."""
        query, key, value = tensors
        if not query.dim() == key.dim() == value.dim() == 4 or not query.shape[0] == key.shape[0] == value.shape[0]:
            return _exact("query, key and value are not (B, H, N, D) with one B")
        if key.shape[1] != value.shape[1]:
            return _exact(_BROADCAST)
        if query.is_meta:
            return _exact("tensors on the meta device have no values")
        q_len, kv_len, key_mask = query.shape[2], key.shape[2], None
        if q_len != kv_len and not self.config.rectangular:
            return _exact(f"{self.config.method} needs as many queries as keys")
        # Reading masks takes time. It is worthwhile if the call is long enough in case that none of them is causal.
        for mask in masks if min(q_len, kv_len) >= max(1, self._least(query, is_causal)) else ():
            valid, of_mask, reason = _read_mask(mask, query.shape[0], kv_len)
            if reason:
                return _exact(reason)
            key_mask = valid if key_mask is None or valid is None else key_mask & valid
            is_causal = is_causal or of_mask
        if is_causal and not self.config.causal:
            return _exact(f"{self.config.method} has no causal form")
        if is_causal and q_len != kv_len:  # PyTorch aligns the first query with the first key, this package the last
            return _exact("causal, with another number of queries than of keys")
        least = self._least(query, is_causal)
        is_short = min(q_len, kv_len) < least
        return Choice(key_mask, is_causal, f"{SHORT} {least} tokens (min_length)" if is_short else "")

    def _least(self, query: Tensor, is_causal: bool) -> int:
        """The number of tokens below which calls stay exact. As in the methods, the batch does not matter."""
        if self.min_length is not None:
            return self.min_length
        _, num_heads, _, head_dim = query.shape
        return _crossover(self.config.text, num_heads, head_dim, query.dtype, is_causal, query.device)


@functools.lru_cache(maxsize=64)
def _config_of(text: str) -> MethodConfig:
    values = ast.literal_eval(text)
    return make_config(values.pop("method"), **values)


# torch.compile cannot trace what the length depends on, and with PyTorch 2.11 it does not pass a config on.
@torch.compiler.assume_constant_result
def _crossover(
    config: str, num_heads: int, head_dim: int, dtype: torch.dtype, is_causal: bool, device: torch.device
) -> int:
    return crossover.crossover_of(
        _config_of(config), num_heads, head_dim, dtype=dtype, is_causal=is_causal, device=device
    )


def _read_mask(mask: Tensor, batch: int, kv_len: int) -> Choice:
    """Read a mask that broadcasts to (B, H, Nq, Nk): it may be a mask of keys, a causal one, or both in one.

    Masks that are added to the scores are 0 for keys to attend to, and very negative for the others.
    """
    mask = mask[(None,) * (4 - mask.dim())]  # (B | 1, H | 1, Nq | 1, Nk | 1)
    for dim in (1, 2):  # a view that repeats one mask for all heads or queries has a stride of 0
        mask = mask.narrow(dim, 0, 1) if mask.stride(dim) == 0 else mask
    is_bool, is_causal = mask.dtype == torch.bool, False
    if not is_bool and (mask.requires_grad or not mask.is_floating_point()):
        return _exact(_BIAS)
    if not is_bool or mask.shape[1] != 1 or mask.shape[2] != 1:
        if not tracing.has_values(mask):
            return _exact("the values of the mask cannot be read in a graph or a transform of torch.func")
        only_masks, of_keys, is_causal = _facts_of_mask(mask)
        if not only_masks:
            return _exact(_BIAS)
        if not of_keys and not is_causal:
            return _exact("the mask is one of pairs of queries and keys")
        is_causal = is_causal and not of_keys
    valid = mask[:, 0, -1] if is_bool else mask[:, 0, -1] == 0  # (B | 1, Nk | 1), the keys of the last query
    return Choice(valid.expand(batch, kv_len), is_causal, "")


def _facts_of_mask(mask: Tensor) -> list[bool]:
    """Whether a mask (B, H, Nq, Nk) only masks, is one of keys, and is a causal one with a mask of keys.

    The values are read once, because an accelerator is waited for.
    """
    is_bool = mask.dtype == torch.bool
    valid = mask if is_bool else mask == 0
    keys = valid[:, :1, -1:]  # (B, 1, 1, Nk), of the last query
    causal = keys & torch.ones(mask.shape[2:], dtype=torch.bool, device=mask.device).tril()  # (B, 1, Nq, Nk)
    only_masks = torch.ones_like(keys) if is_bool else valid | (mask <= _MASKED)
    return torch.stack([x.all() for x in (only_masks, valid == keys, valid == causal)]).tolist()
