"""Any PyTorch model: methods in place of `torch.nn.functional.scaled_dot_product_attention`.

Models of timm, torchvision, diffusers or open_clip, and your own, know nothing of Transformers. Their attention is a
call of `scaled_dot_product_attention` or of `torch.nn.MultiheadAttention`. While a model that `replace_sdpa` has
prepared runs, a `torch.overrides.TorchFunctionMode` of its thread sees these calls. Nothing is patched.
"""

import contextlib
import functools
import inspect
import itertools
import sys
import threading
import weakref
import zlib
from collections import Counter
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from hf_efficient_attn.errors import UnsupportedAttentionError, check_positive, shown
from hf_efficient_attn.methods import MethodConfig, attention, learns, make_config
from hf_efficient_attn.ops import tracing
from hf_efficient_attn.sdpa.choice import SHORT, Chooser

_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)
# The attribute in which the module that `torch.compile` returns holds the module that it was given.
_COMPILED = "_orig_mod"
_FUNCTION = (
    "autograd has changed since the forward of the module began, as in gradient checkpointing of a function: "
    "checkpoint a module instead"
)


class _Module(NamedTuple):
    """A module that is in its forward pass."""

    replacement: "SDPAReplacement"
    name: str
    # Of its draws in eval mode. In training, None: they come from the global generator, so that gradient checkpointing
    # draws the same again.
    seed: int | None
    frame: FrameType | None  # that calls its forward; None in a graph
    autograd: object  # `_autograd` before its forward


class _Running(threading.local):
    """The modules of this thread that are in their forward pass, the innermost one last."""

    def __init__(self) -> None:
        self.modules: list[_Module] = []


_running = _Running()
# The replacements by `key`.
_replacements: "weakref.WeakValueDictionary[str, SDPAReplacement]" = weakref.WeakValueDictionary()
_numbers = itertools.count()


class SDPAReplacement(contextlib.AbstractContextManager["SDPAReplacement", None]):
    """What `replace_sdpa` does in a model. As a context manager it ends the replacement.

    Attributes:
        config: the method.
        min_length: calls with fewer queries or keys stay exact. None: fewer than the length from which on the method is
            faster on this machine.
        counts: (module, shapes, outcome) -> number of calls. The outcome is "replaced", or why the call stayed exact.
        traced: (module, outcome) of the calls in graphs, such as those of `torch.compile`. How often a graph runs, and
            with which shapes, is not known.
    """

    def __init__(self, model: nn.Module, config: MethodConfig, min_length: int | None) -> None:
        self.config = config
        self.min_length = min_length
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.traced: list[tuple[str, str]] = []
        self.chooser = Chooser(config, min_length)
        self.mode = _Mode(self)
        self._handles: list[Any] = []
        self.__setstate__({})
        model = getattr(model, _COMPILED, model)
        for name, module in model.named_modules():
            # A layer without further layers, such as Linear, calls no attention; the model itself may do so.
            if module is model or next(module.children(), None) is not None:
                name = ".".join(x for x in name.split(".") if x != _COMPILED) or type(model).__name__
                seed = zlib.crc32(name.encode()) // 2
                self._handles.append(module.register_forward_pre_hook(functools.partial(self._enter, name, seed)))
                leave = functools.partial(self._leave, name)
                # Of several replacements the last one to enter is the first to leave.
                self._handles.append(module.register_forward_hook(leave, prepend=True, always_call=True))
        torch.compiler.reset()  # a graph does not notice that hooks are added or removed

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.key = str(next(_numbers))
        _replacements[self.key] = self

    def _enter(self, name: str, seed: int, module: nn.Module, *_: object) -> None:
        _forget_interrupted()
        if not any(one.replacement is self for one in _running.modules):
            self.mode.__enter__()
        _running.modules.append(_Module(self, name, None if module.training else seed, _caller(), _autograd()))

    def _leave(self, name: str, *_: object) -> None:
        # PyTorch calls this after every failure, also if another hook has failed before `_enter`.
        if not _running.modules or _running.modules[-1][:2] != (self, name):
            return
        _running.modules.pop()
        if not any(one.replacement is self for one in _running.modules):
            self.mode.__exit__(None, None, None)

    def report(self) -> str:
        """One line for each module, shape and outcome, with the number of calls.

        Calls in graphs, such as those of `torch.compile`, follow without numbers and shapes.
        """
        lines = [f"{n} x {': '.join(key)}" for key, n in self.counts.items()]
        lines += [f"in a graph, calls not counted: {': '.join(key)}" for key in self.traced]
        if self.min_length is None and any(SHORT in line for line in lines):
            method = self.config.switches_to or self.config.method
            lines.append(
                f"min_length was not given: it is the length from which on {method} is faster on this machine, which "
                f"`hf-efficient-attn crossover --method {method}` measures, and a built-in estimate before. "
                "Give min_length to replace shorter calls, too."
            )
        return "\n".join(lines) or (
            "no call of scaled_dot_product_attention or nn.MultiheadAttention: the model has not run, or computes "
            "attention itself (in timm, set TIMM_FUSED_ATTN=1 before the import)"
        )

    def remove(self) -> None:
        """Make all attention of the model exact again."""
        for handle in self._handles:
            handle.remove()
        if self._handles:
            torch.compiler.reset()
        self._handles.clear()
        _forget_interrupted()

    def __exit__(self, *_: object) -> None:
        self.remove()


def replace_sdpa(
    model: nn.Module, method_or_config: str | MethodConfig, *, min_length: int | None = None, **hyperparameters: Any
) -> SDPAReplacement:
    """Compute the attention of any PyTorch model by a method of this package.

    Calls of `scaled_dot_product_attention` and `nn.MultiheadAttention` in the model's forward pass use the method where
    shapes, masks and causality allow it. All others stay exact; `report` says which and why. Nothing is saved with the
    weights. Other models and other threads are not affected. `torch.compile` may precede or follow: the replacement and
    its end drop the graphs of this process (`torch.compiler.reset`), so that compiled models are compiled again.

    Args:
        model: is changed in place: its modules get forward hooks.
        method_or_config: a name from `available_methods()`, or a config.
        min_length: calls with fewer queries or keys stay exact. None: fewer than the length from which on the method is
            faster on this machine (`hf-efficient-attn crossover`).
        **hyperparameters: replace those of the method or its config.

    Raises:
        UnsupportedAttentionError: `model` is no module, or one of TorchScript, which calls no Python; the method or a
            hyperparameter is unknown; `min_length` is negative or no integer; or the method has learned parameters.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedAttentionError(f"replace_sdpa: give a torch.nn.Module, not {shown(model)}")
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedAttentionError(
            "replace_sdpa: a model of TorchScript does not run Python, so that no call of attention in it can be seen: "
            "give the model that it was made from"
        )
    check_positive("min_length", 0 if min_length is None else min_length, least=0, advice="or None, the default")
    config = make_config(method_or_config, **hyperparameters)
    if learns(config):
        raise UnsupportedAttentionError(
            f"replace_sdpa: {config.method} has learned parameters, which this model does not contain: use a method "
            "without them, such as nearfar, or convert and distill a model of Transformers"
        )
    return SDPAReplacement(model, config, min_length)


def restore_sdpa(model: nn.Module) -> nn.Module:
    """End all replacements of `replace_sdpa` in a model, such as a copy, or a model that `torch.load` has read.

    A replacement that began with a larger model ends in all of it.

    Returns:
        The same model, whose attention is exact.

    Raises:
        UnsupportedAttentionError: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedAttentionError(f"restore_sdpa: give a torch.nn.Module, not {shown(model)}")
    for replacement in replacements_of(model):
        replacement.remove()
    return model


def replacements_of(model: nn.Module) -> list[SDPAReplacement]:
    """The replacements of `replace_sdpa` in a model, each once. A copy of the model has copies of them."""
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    owners = [getattr(getattr(hook, "func", None), "__self__", None) for hook in hooks]
    return list(dict.fromkeys(owner for owner in owners if isinstance(owner, SDPAReplacement)))


@tracing.replaced_in_graphs(lambda: None)
def _caller() -> FrameType | None:
    """The frame that calls the forward of a module, from a call in one of its hooks."""
    return sys._getframe(3)  # above this function, its decorator and the hook


@tracing.replaced_in_graphs(lambda: None)
def _autograd() -> object:
    """What gradient checkpointing changes: whether gradients are recorded, and the hooks for tensors that are saved."""
    return torch.is_grad_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(False)


@tracing.replaced_in_graphs(lambda: None)
def _forget_interrupted() -> None:
    """Forget modules whose forward has ended without the hook of its end, which PyTorch does not call after Ctrl-C."""
    frame: FrameType | None = sys._getframe()
    frames: set[FrameType | None] = {None}
    while frame is not None:
        frames.add(frame)
        frame = frame.f_back
    _running.modules[:] = [one for one in _running.modules if one.frame in frames]
    active = {one.replacement for one in _running.modules}
    while isinstance(mode := _get_current_function_mode(), _Mode) and mode.replacement not in active:
        mode.__exit__(None, None, None)


class _Mode(TorchFunctionMode):
    """Sees the functions of PyTorch that a model calls."""

    def __init__(self, replacement: SDPAReplacement) -> None:
        super().__init__()
        self.replacement = replacement

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention or func is F.multi_head_attention_forward:
            _forget_interrupted()
            # If several replacements are active, the innermost one decides, and the others do not see what it calls.
            if _running.modules and _running.modules[-1].replacement is self.replacement:
                compute: Any = _attend if func is F.scaled_dot_product_attention else _multi_head
                return compute(self.replacement, *args, **kwargs)
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
    tensors = query, key, value
    choice = replacement.chooser.choose(tensors, attn_mask, dropout_p, is_causal, enable_gqa)
    if _count(replacement, query, key, choice.reason):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return attention(
        replacement.config, query, key, value, attention_mask=choice.key_mask, is_causal=choice.is_causal, scale=scale,
        dropout_p=dropout_p, seed=_running.modules[-1].seed,
    )  # fmt: skip


def _multi_head(replacement: SDPAReplacement, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """`multi_head_attention_forward`, with query (Nq, B, E), and key and value (Nk, B, E)."""
    call = _MULTI_HEAD.bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    choice = replacement.chooser.choose_multi_head(given)
    query, key, value = (given[x] for x in ("query", "key", "value"))
    if _count(replacement, query, key, choice.reason):
        return F.multi_head_attention_forward(*args, **kwargs)
    weights = given["in_proj_weight"]
    weights = [given[f"{x}_proj_weight"] for x in "qkv"] if given["use_separate_proj_weight"] else weights.chunk(3)
    biases = [None] * 3 if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
    projected = map(F.linear, (query, key, value), weights, biases)  # (N, B, E)
    heads = given["num_heads"], -1
    query, key, value = (x.unflatten(2, heads).permute(1, 2, 0, 3) for x in projected)  # (B, H, N, D)
    out = attention(
        replacement.config, query, key, value, attention_mask=choice.key_mask, is_causal=choice.is_causal,
        dropout_p=given["dropout_p"] if given["training"] else 0.0, seed=_running.modules[-1].seed,
    )  # fmt: skip
    out = out.permute(2, 0, 1, 3).flatten(2)  # (Nq, B, E)
    return F.linear(out, given["out_proj_weight"], given["out_proj_bias"]), None


def _outcome(reason: str) -> str:
    return f"exact, because {reason}" if reason else "replaced"


# So that torch.compile calls it when it makes a graph. PyTorch 2.11 does so with text only, not with objects.
@torch.compiler.assume_constant_result
def _record(replacement: str, name: str, outcome: str) -> None:
    traced = _replacements[replacement].traced
    if (name, outcome) not in traced:
        traced.append((name, outcome))


def _count_in_graph(replacement: SDPAReplacement, query: Tensor, key: Tensor, reason: str) -> str:
    _record(replacement.key, _running.modules[-1].name, _outcome(reason))
    return reason


@tracing.replaced_in_graphs(_count_in_graph)
def _count(replacement: SDPAReplacement, query: Tensor, key: Tensor, reason: str) -> str:
    """Count a call, and return why it stays exact, as it also does in a function that is checkpointed by itself.

    The backward pass computes the function again when the module is not in its forward pass, and thus exactly.
    """
    module = _running.modules[-1]
    if module.autograd != _autograd():
        reason = reason or _FUNCTION
    tensors = {"query": query, "key": key}
    shapes = ", ".join(f"{name} {'nested' if x.is_nested else tuple(x.shape)}" for name, x in tensors.items())
    replacement.counts[module.name, shapes, _outcome(reason)] += 1
    return reason
