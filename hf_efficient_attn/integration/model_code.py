"""What the code of a model's classes says about its attention, found without running it."""

import inspect
import re
from collections.abc import Iterator
from types import CodeType
from typing import Any, TypeGuard

from torch import nn

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
_ARGUMENTS: dict[type[nn.Module], frozenset[str]] = {}
# Names of parameters and submodules from which models compute a bias of relative positions: `relative_attention_bias`
# (T5), `relative_position_bias` (Swin, BEiT), `linear_pos` and `pos_bias_u` (Conformer), `distance_embedding`, ...
_RELATIVE = re.compile(r"(^|_)rel(ative)?_|(^|_)pos(ition)?_bias|distance_embedding|^linear_pos$|^bias_[uv]$|alibi")
# Attributes by which attention modules change their scores otherwise; None means that they do not.
_CHANGES = {
    "sinks": "attention sinks",
    "attn_logit_softcapping": "a soft cap",
    "indexer": "a mask of the keys that each query selects",
}


def uses_interface(kind: type[nn.Module]) -> bool:
    """Whether a class, or one that it derives from, asks Transformers' attention interface."""
    return any(True for _ in _attention_functions(kind))


def own_mask(kind: type[nn.Module]) -> str | None:
    """The name of the method by which an attention class makes a (queries, keys) mask of its own; None without one."""
    for function in _attention_functions(kind):
        for name in function.__code__.co_names:
            if "mask" in name and inspect.isfunction(getattr(kind, name, None)):
                return name
    return None


def reads_cache(kind: type[nn.Module]) -> bool:
    """Whether an attention class reads the keys of a cache's layers itself, instead of by the cache's `update`.

    Classes for self-attention and cross attention read only those of cross attention, after they have asked the cache
    whether it has them (`is_updated`).
    """
    if not uses_interface(kind):
        return False
    own = (vars(base) for base in kind.__mro__ if base not in nn.Module.__mro__)
    functions = [x for attributes in own for x in attributes.values() if inspect.isfunction(x)]
    names = (set(inspect.unwrap(function).__code__.co_names) for function in functions)
    return any({"layers", "keys"} <= found and "is_updated" not in found for found in names)


def score_change(module: nn.Module, *, is_attention: bool) -> str | None:
    """What a module adds to the scores of attention besides the mask, in words; None if there is nothing.

    Args:
        module: an attention module that asks the interface, or another module of the same model, such as a layer.
        is_attention: which of the two. Of other modules only names that say "bias" count.
    """
    parts = (*module._parameters.items(), *module._modules.items())
    names = [name for name, part in parts if part is not None and _RELATIVE.search(name)]
    found = [f"a bias of relative positions ({name})" for name in names if is_attention or "bias" in name]
    if is_attention:
        found += [f"{words} ({name})" for name, words in _CHANGES.items() if getattr(module, name, None) is not None]
    return found[0] if found else None


def composes_mask(model: nn.Module) -> bool:
    """Whether a model composes its masks by a function of its own, as its config asks for (EmbeddingGemma)."""
    name, forward = "use_bidirectional_attention", inspect.unwrap(type(model).forward)
    if getattr(model.config, name, None) is not True or not inspect.isfunction(forward):
        return False
    return name in forward.__code__.co_names and "or_mask_function" in _strings(forward.__code__)


def attention_arguments(kind: type[nn.Module]) -> frozenset[str]:
    """The names of the arguments that an attention class passes to its attention function, or that this reads.

    They are the strings in the code of the methods that ask the interface and of `eager_attention_forward` beside them,
    and the parameters of the latter. Some of the strings have other uses.
    """
    # Not `functools.cache`, which torch.compile ignores. `models.switch` fills the dictionary before a graph is traced.
    if kind not in _ARGUMENTS:
        names: set[str] = set()
        for function in _attention_functions(kind):
            names |= _strings(function.__code__)
            eager = function.__globals__.get("eager_attention_forward")
            if inspect.isfunction(eager):
                names |= _strings(eager.__code__) | set(inspect.signature(eager).parameters)
        _ARGUMENTS[kind] = frozenset(names)
    return _ARGUMENTS[kind]


def attention_table(kind: type[nn.Module]) -> str | None:
    """The table from which a model takes its attention class by the name of the implementation; None without one.

    Such a table has an entry for "eager". It is found by following the classes that the constructors name.
    """
    waiting, seen = [kind], {kind}
    while waiting:
        current = waiting.pop()
        for cls in current.__mro__:
            if cls.__module__.startswith("torch.") or not inspect.isfunction(vars(cls).get("__init__")):
                continue
            constructor = inspect.unwrap(vars(cls)["__init__"])
            for name in _names(constructor.__code__):
                value = constructor.__globals__.get(name)
                if isinstance(value, dict) and "eager" in value and all(map(_is_module_class, value.values())):
                    return name
                if _is_module_class(value) and value not in seen:
                    seen.add(value)
                    waiting.append(value)
    return None


def _attention_functions(kind: type[nn.Module]) -> Iterator[Any]:
    """The methods of a class and its bases that ask the interface."""
    for cls in kind.__mro__:
        for value in vars(cls).values():
            function = inspect.unwrap(value) if callable(value) else None
            if inspect.isfunction(function) and _INTERFACE in function.__code__.co_names:
                yield function


def _is_module_class(value: object) -> TypeGuard[type[nn.Module]]:
    return inspect.isclass(value) and issubclass(value, nn.Module)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of the functions and comprehensions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _names(code: CodeType) -> set[str]:
    return {name for inner in _codes(code) for name in inner.co_names}


def _strings(code: CodeType) -> set[str]:
    constants = [constant for inner in _codes(code) for constant in inner.co_consts]
    constants += [item for constant in constants if isinstance(constant, tuple) for item in constant]
    return {constant for constant in constants if isinstance(constant, str)}
