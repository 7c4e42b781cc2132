"""What a switch must know about the classes of a model: what their code says, and the exceptions that are listed here.

Whether a class asks the attention interface, and which arguments it gives to its attention function, is read from the
code of the class, because any model can differ in this. The other questions concern a few models of Transformers. All
classes of versions 5.12 and 5.24 were looked through for the lists.
"""

import copy
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from hf_efficient_attn.integration.settings import EXACT

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# Names of parameters and submodules from which models compute a bias of relative positions: `relative_attention_bias`
# (T5), `relative_position_bias` (Swin, BEiT), `linear_pos` and `pos_bias_u` (Conformer), `distance_embedding`, ...
_RELATIVE = re.compile(r"(^|_)rel(ative)?_|(^|_)pos(ition)?_bias|distance_embedding|^linear_pos$|^bias_[uv]$|alibi")
# Attributes by which attention modules change their scores otherwise; None means that they do not.
_CHANGES = {
    "sinks": "attention sinks",
    "attn_logit_softcapping": "a soft cap",
    "indexer": "a mask of the keys that each query selects",
}
# Methods by which attention classes make a (queries, keys) mask of their own: Doge, GLM 5.
_OWN_MASKS = ("prepare_dynamic_mask", "build_attention_mask_from_topk")
# Attention classes that read the keys of the cache's layers, models that compose their masks if their config has
# `use_bidirectional_attention`, and convolutions that find the padding in a (B, 1, Nq, Nk) mask (LASR's).
_READS_CACHE = {"DiffusionGemmaDecoderTextAttention"}
_COMPOSES_MASK = {"Gemma3TextModel", "Step3p7TextModel"}
_FINDS_PADDING = re.compile(r"(FastSpeech2Conformer|LasrEncoder|ParakeetEncoder)ConvolutionModule")
# Models that do not use the table of attention classes in their file.
_WITHOUT_TABLE = re.compile(r"GitVisionModel|(DeepseekOcr2|UnlimitedOcr)(VisionEncoder|Text(PreTrained)?Model)")
# Modules that pool by PyTorch's own attention, with a mask that they ask Transformers for.
_POOLS = {"Siglip2MultiheadAttentionPoolingHead"}


def uses_interface(kind: type[nn.Module]) -> bool:
    """Whether a class, or one that it derives from, asks Transformers' attention interface."""
    return any(True for _ in _attention_functions(kind))


def attention_arguments(kind: type[nn.Module]) -> frozenset[str]:
    """The names of the arguments that an attention class passes to its attention function, or that this reads.

    They are the strings in the code of the methods that ask the interface and of `eager_attention_forward` beside them,
    and the parameters of the latter. Some of the strings have other uses.
    """
    names: set[str] = set()
    for function in _attention_functions(kind):
        names |= _strings(function.__code__)
        eager = function.__globals__.get("eager_attention_forward")
        if inspect.isfunction(eager):
            names |= _strings(eager.__code__) | set(inspect.signature(eager).parameters)
    return frozenset(names)


def score_change(module: nn.Module, *, is_attention: bool) -> str | None:
    """What a module adds to the scores of attention besides the mask, in words; None if there is nothing.

    Of modules around the attention modules, such as layers, only names that say "bias" count.
    """
    parts = (*module._parameters.items(), *module._modules.items())
    names = [name for name, part in parts if part is not None and _RELATIVE.search(name)]
    found = [f"a bias of relative positions ({name})" for name in names if is_attention or "bias" in name]
    if is_attention:
        found += [f"{words} ({name})" for name, words in _CHANGES.items() if getattr(module, name, None) is not None]
    return found[0] if found else None


def own_mask(kind: type[nn.Module]) -> str | None:
    """The name of the method by which an attention class makes a (queries, keys) mask of its own; None without one."""
    return next((name for name in _OWN_MASKS if hasattr(kind, name)), None)


def reads_cache(kind: type[nn.Module]) -> bool:
    """Whether an attention class reads the keys of a cache's layers itself, instead of by the cache's `update`."""
    return not _READS_CACHE.isdisjoint(base.__name__ for base in kind.__mro__)


def composes_mask(model: nn.Module) -> bool:
    """Whether a model composes its masks by a function of its own, as its config asks for (EmbeddingGemma)."""
    names = {base.__name__ for base in type(model).__mro__}
    return not _COMPOSES_MASK.isdisjoint(names) and getattr(model.config, "use_bidirectional_attention", None) is True


def attention_table(kind: type[nn.Module]) -> str | None:
    """The table, with an entry for "eager", from which a model takes its attention class; None without one."""
    for cls in kind.__mro__:
        if _WITHOUT_TABLE.fullmatch(cls.__name__):
            return None
        for name, value in vars(sys.modules[cls.__module__]).items() if issubclass(cls, PreTrainedModel) else ():
            if name.endswith("_CLASSES") and isinstance(value, dict) and "eager" in value:
                return name
    return None


def adapt_mask_reader(module: Any) -> None:
    """Give a module that reads a mask outside of the attention interface what it can read, in place of (B, Nk).

    Convolutions get the mask as (B, 1, 1, Nk). For pooling, Transformers makes a mask for the implementation in the
    module's config, so that the module gets a config of exact attention.
    """
    name = type(module).__name__
    if _FINDS_PADDING.fullmatch(name):
        hook_once(module, _extend_mask)
    elif name in _POOLS and module.config._attn_implementation != EXACT:
        module.config = copy.copy(module.config)
        module.config._attn_implementation_internal = EXACT


def hook_once(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Give a module a forward pre-hook that it does not have yet."""
    if hook not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(hook, with_kwargs=True)


def _extend_mask(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A forward pre-hook: make the mask of the keys bool (B, 1, 1, Nk)."""
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        kwargs = {**kwargs, "attention_mask": mask[:, None, None, :].to(torch.bool)}
    return args, kwargs


def _attention_functions(kind: type[nn.Module]) -> Iterator[Any]:
    """The methods of a class and its bases that ask the interface."""
    for cls in kind.__mro__:
        for value in vars(cls).values():
            function = inspect.unwrap(value) if callable(value) else None
            if inspect.isfunction(function) and _INTERFACE in function.__code__.co_names:
                yield function


def _strings(code: CodeType) -> set[str]:
    """The strings in the code of a function, also in tuples and in functions and comprehensions inside it."""
    found: set[str] = set()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _strings(constant)
        found |= {item for item in (constant if isinstance(constant, tuple) else [constant]) if isinstance(item, str)}
    return found
