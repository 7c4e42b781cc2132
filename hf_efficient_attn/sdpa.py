"""Any PyTorch model: methods in place of `torch.nn.functional.scaled_dot_product_attention`.

Models of timm, torchvision, diffusers or open_clip, and your own, know nothing of Transformers. Their attention is a
call of `scaled_dot_product_attention` or of `torch.nn.MultiheadAttention`. While a model that `replace_sdpa` has
prepared runs, a `torch.overrides.TorchFunctionMode` of its thread sees these calls. Nothing is patched.
"""

import contextlib
import functools
import inspect
import threading
import zlib
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_efficient_attn.errors import UnsupportedAttentionError, shown
from hf_efficient_attn.methods import MethodConfig, attention, crossover, learns, make_config
from hf_efficient_attn.ops import tracing

_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)
# Arguments of `multi_head_attention_forward` that add keys.
_FURTHER_KEYS = ("bias_k", "bias_v", "static_k", "static_v", "add_zero_attn")
# A mask that is added to the scores has this or less at masked keys.
_MASKED = -1e4


class _Running(threading.local):
    """The modules of this thread that are in their forward pass, the innermost one last.

    Of each: the `SDPAReplacement` that prepared it, its name in the model, and the seed of its draws in eval mode; None
    in training, in which they come from the global generator, so that gradient checkpointing draws the same again.
    """

    def __init__(self) -> None:
        self.modules: list[tuple[SDPAReplacement, str, int | None]] = []


_running = _Running()


class SDPAReplacement(contextlib.AbstractContextManager["SDPAReplacement", None]):
    """What `replace_sdpa` does in a model. As a context manager it ends the replacement.

    Attributes:
        config: the method.
        min_length: calls with fewer queries or keys stay exact. None: fewer than the length from which on the method is
            faster on this machine.
        counts: (module, shapes, outcome) -> number of calls. The outcome is "replaced", or why the call stayed exact.
            Calls inside a graph of `torch.compile` are not counted.
    """

    def __init__(self, model: nn.Module, config: MethodConfig, min_length: int | None) -> None:
        self.config = config
        self.min_length = min_length
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.mode = _Mode(self)
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            # A layer without further layers, such as Linear, calls no attention; the model itself may do so.
            if module is model or next(module.children(), None) is not None:
                name = name or type(model).__name__
                seed = zlib.crc32(name.encode()) // 2
                self._handles.append(module.register_forward_pre_hook(functools.partial(self._enter, name, seed)))
                leave = functools.partial(self._leave, name)
                # Of several replacements the last one to enter is the first to leave.
                self._handles.append(module.register_forward_hook(leave, prepend=True, always_call=True))

    def _enter(self, name: str, seed: int, module: nn.Module, *_: object) -> None:
        if not any(replacement is self for replacement, *_ in _running.modules):
            self.mode.__enter__()
        _running.modules.append((self, name, None if module.training else seed))

    def _leave(self, name: str, *_: object) -> None:
        # PyTorch calls this after every failure, also if another hook has failed before `_enter`.
        if not _running.modules or _running.modules[-1][:2] != (self, name):
            return
        _running.modules.pop()
        if not any(replacement is self for replacement, *_ in _running.modules):
            self.mode.__exit__(None, None, None)

    def report(self) -> str:
        """One line for each module, shape and outcome, with the number of calls."""
        return "\n".join(f"{n} x {': '.join(key)}" for key, n in self.counts.items()) or "no call of attention yet"

    def remove(self) -> None:
        """Make all attention of the model exact again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __exit__(self, *_: object) -> None:
        self.remove()


def replace_sdpa(
    model: nn.Module, method_or_config: str | MethodConfig, *, min_length: int | None = None
) -> SDPAReplacement:
    """Compute the attention of any PyTorch model by a method of this package.

    Calls of `scaled_dot_product_attention` and `nn.MultiheadAttention` in the model's forward pass use the method where
    shapes, masks and causality allow it. All others stay exact; `report` says which and why. Nothing is saved with the
    weights. Other models and other threads are not affected. `torch.compile` may follow, not precede.

    Args:
        model: is changed in place: its modules get forward hooks.
        method_or_config: a name from `available_methods()`, or a config.
        min_length: calls with fewer queries or keys stay exact. None: fewer than the length from which on the method is
            faster on this machine (`hf-efficient-attn crossover`).

    Raises:
        UnsupportedAttentionError: `model` is no module; the method is unknown, or has learned parameters.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedAttentionError(f"replace_sdpa: give a torch.nn.Module, not {shown(model)}")
    config = make_config(method_or_config)
    if learns(config):
        raise UnsupportedAttentionError(
            f"replace_sdpa: {config.method} has learned parameters, which this model does not contain: use a method "
            "without them, such as nearfar, or convert and distill a model of Transformers"
        )
    return SDPAReplacement(model, config, min_length)


class _Mode(TorchFunctionMode):
    """Sees the functions of PyTorch that a model calls."""

    def __init__(self, replacement: SDPAReplacement) -> None:
        super().__init__()
        self.replacement = replacement

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # If several replacements are active, the innermost one decides, and the others do not see what it calls.
        if _running.modules[-1][0] is not self.replacement:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return _attend(self.replacement, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            return _multi_head(self.replacement, *args, **kwargs)
        if func is Tensor.unflatten:  # calls super(), which Dynamo does not trace under a mode
            func = torch.unflatten
        return func(*args, **kwargs)


def _attend(
    replacement: SDPAReplacement,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention`, with tensors (B, H, N, D)."""
    reason, key_mask = _why_exact(replacement, query, key, value, is_causal), None
    if not reason and query.shape[1] != key.shape[1] and not enable_gqa:
        reason = "heads are broadcast"
    if not reason and attn_mask is not None:
        key_mask, reason = _key_mask(attn_mask, query.shape[0], key.shape[2])
    _count(replacement, query, key, reason)
    if reason:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return attention(
        replacement.config, query, key, value, attention_mask=key_mask, is_causal=is_causal, scale=scale,
        dropout_p=dropout_p, seed=_running.modules[-1][2],
    )  # fmt: skip


def _multi_head(replacement: SDPAReplacement, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """`multi_head_attention_forward`, with query (Nq, B, E), and key and value (Nk, B, E)."""
    call = _MULTI_HEAD.bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    query, key, value, key_mask, is_causal = (
        given[x] for x in ("query", "key", "value", "key_padding_mask", "is_causal")
    )
    if query.dim() != 3:
        reason = "inputs have no batch"
    elif given["need_weights"]:
        reason = "the caller asks for the weights (need_weights=True)"
    elif any(given[x] is not None and given[x] is not False for x in _FURTHER_KEYS):
        reason = "keys are added to those of the input"
    elif given["attn_mask"] is not None and not is_causal:
        reason = "the mask is one of pairs of queries and keys"
    else:
        # Views of the inputs that have the shapes of the projected heads, (B, H, N, .).
        shapes = (x.expand(given["num_heads"], *x.shape).permute(2, 0, 1, 3) for x in (query, key, value))
        reason = _why_exact(replacement, next(shapes), next(shapes), next(shapes), is_causal)
    if not reason and key_mask is not None:  # True for padding, if it is bool
        key_mask = ~key_mask if key_mask.dtype == torch.bool else key_mask
        key_mask, reason = _key_mask(key_mask[:, None, None], query.shape[1], key.shape[0])
    _count(replacement, query, key, reason)
    if reason:
        return F.multi_head_attention_forward(*args, **kwargs)
    weights = given["in_proj_weight"]
    weights = [given[f"{x}_proj_weight"] for x in "qkv"] if given["use_separate_proj_weight"] else weights.chunk(3)
    biases = [None] * 3 if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
    projected = map(F.linear, (query, key, value), weights, biases)  # (N, B, E)
    query, key, value = (
        x.unflatten(2, (given["num_heads"], -1)).permute(1, 2, 0, 3) for x in projected
    )  # (B, H, N, D)
    out = attention(
        replacement.config, query, key, value, attention_mask=key_mask, is_causal=is_causal,
        dropout_p=given["dropout_p"] if given["training"] else 0.0, seed=_running.modules[-1][2],
    )  # fmt: skip
    out = out.permute(2, 0, 1, 3).flatten(2)  # (Nq, B, E)
    return F.linear(out, given["out_proj_weight"], given["out_proj_bias"]), None


def _why_exact(replacement: SDPAReplacement, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> str:
    """Why a call stays exact, whatever its mask is; empty if the method can compute it."""
    config = replacement.config
    if not query.dim() == key.dim() == value.dim() == 4 or not query.shape[0] == key.shape[0] == value.shape[0]:
        return "query, key and value are not (B, H, N, D) with one B"
    q_len, kv_len = query.shape[2], key.shape[2]
    if is_causal and not config.causal:
        return f"{config.method} has no causal form"
    if is_causal and q_len != kv_len:  # PyTorch aligns the first query with the first key, this package the last ones
        return "causal, with another number of queries than of keys"
    if q_len != kv_len and not config.rectangular:
        return f"{config.method} needs as many queries as keys"
    least = replacement.min_length
    if least is None:
        least = crossover.crossover_length(
            config.method, query[:, :, :1].numel(), dtype=query.dtype, is_causal=is_causal, device=query.device
        )
    return f"fewer than {least} tokens" if min(q_len, kv_len) < least else ""


def _key_mask(mask: Tensor, batch: int, kv_len: int) -> tuple[Tensor | None, str]:
    """The mask of keys, bool (B, Nk), if a mask that broadcasts to (B, H, Nq, Nk) is one; otherwise the reason why not.

    Masks that are added to the scores are 0 for keys to attend to, and very negative for the others.
    """
    mask = mask[(None,) * (4 - mask.dim())]  # (B | 1, H | 1, Nq | 1, Nk | 1)
    for dim in (1, 2):  # a view that repeats one mask for all heads or queries has a stride of 0
        mask = mask.narrow(dim, 0, 1) if mask.stride(dim) == 0 else mask
    if mask.shape[1] != 1 or mask.shape[2] != 1:
        return None, "the mask is one of pairs of queries and keys"
    mask = mask[:, 0, 0]
    if mask.dtype != torch.bool:
        valid = mask == 0
        if not _only_masks(mask, valid):
            return None, "a bias is added to the scores"
        mask = valid
    return mask.expand(batch, kv_len), ""


@tracing.replaced_in_graphs(lambda mask, valid: False)  # a graph has no values to look at
def _only_masks(mask: Tensor, valid: Tensor) -> bool:
    return bool((valid | (mask <= _MASKED)).all())


@tracing.replaced_in_graphs(tracing.nothing)
def _count(replacement: SDPAReplacement, query: Tensor, key: Tensor, reason: str) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}"
    replacement.counts[_running.modules[-1][1], shapes, f"exact, because {reason}" if reason else "replaced"] += 1
