"""The Transformers models in a module, their configs, their attention modules, and the restoration of them all.

Whether a class asks the attention interface is read from its code. `model_kinds` lists the exceptions.

A layer with a sliding window of its model's own (`ModuleLocation.window`) stays exact, because a method would lose the
window. Its module says at its call how long it is, and its mask that it has one (`inputs.KeyMask.is_local`).
"""

import contextlib
import functools
import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration import model_kinds
from hf_efficient_attn.integration.configs import parts_of
from hf_efficient_attn.integration.inputs import PositionTable
from hf_efficient_attn.integration.layers import Layer, ModuleLocation, layer_of, stem_of
from hf_efficient_attn.integration.model_kinds import POSITION_TABLES, WINDOW, kind_at, kind_of
from hf_efficient_attn.integration.settings import EXACT, method_at, method_of, of_layer
from hf_efficient_attn.methods import MethodConfig


class AttentionModule(NamedTuple):
    """A module that computes attention."""

    module: nn.Module
    location: ModuleLocation
    config: PreTrainedConfig  # the config that applies to it
    owner: PreTrainedModel  # the innermost model that holds it

    @property
    def chosen(self) -> MethodConfig | None:
        """The method that the config chooses for the layer of the module; None for exact attention."""
        return method_at(self.config, method_of(self.config), self.location)

    @property
    def is_causal(self) -> bool:
        """Whether it is causal in every call: so says the module, or the call by its model (text models of CLIP)."""
        kind = type(self.owner)
        is_told = model_kinds.is_known_code(kind) and "is_causal=True" in inspect.getsource(kind.forward)
        return not self.location.is_cross and (getattr(self.module, "is_causal", None) is True or is_told)


def models_in(module: nn.Module) -> list[PreTrainedModel]:
    """The Transformers models in a module, itself included, outermost first."""
    return [m for m in module.modules() if isinstance(m, PreTrainedModel)]


def transformers_models(model: nn.Module) -> list[PreTrainedModel]:
    """The outermost Transformers models in a module, of which there must be one: the module itself if it is one."""
    models = models_in(model) if isinstance(model, nn.Module) else []
    inner = {id(part) for one in models for part in models_in(one)[1:]}
    found = [one for one in models if id(one) not in inner]
    if not found:
        raise UnsupportedAttentionError(_no_model(model))
    return found


def _no_model(value: object) -> str:
    """Why something holds no Transformers model, and what to give instead."""
    name = value.__name__ if isinstance(value, type) else f"a {type(value).__name__}"
    if isinstance(value, str):
        return f"{value!r} is a name and no model: load it first, for example with AutoModel.from_pretrained({value!r})"
    if isinstance(value, type):
        return f"{name} is a class and no model: make one, for example with {name}.from_pretrained"
    if isinstance(value, PreTrainedConfig):
        return f"{name} is a config and no model: make one with AutoModel.from_config(config)"
    other = "give its attribute model" if hasattr(value, "model") else "hea.replace_sdpa takes any PyTorch model"
    return f"{name} holds no Transformers model (a PreTrainedModel): {other}"


def configs_of(model: nn.Module) -> list[PreTrainedConfig]:
    """All configs of the Transformers models in a module, with their sub-configs, each once."""
    return with_parts([m.config for m in models_in(model)])


def with_parts(configs: Sequence[PreTrainedConfig]) -> list[PreTrainedConfig]:
    """Configs and all their sub-configs, each once."""
    found = list(configs)
    for config in found:
        found += parts_of(config).values()
    return list({id(config): config for config in found}.values())


def parts_of_own(model: nn.Module) -> list[tuple[PreTrainedModel, bool]]:
    """The parts with a config of their own, outermost first, and whether they name another method than their holder."""
    parents: dict[PreTrainedModel, PreTrainedModel] = {}
    for parent in models_in(model):  # the innermost last, which replaces the others
        parents |= dict.fromkeys(models_in(parent)[1:], parent)
    pairs = [(part, part.config, parent.config) for part, parent in parents.items()]
    return [(part, method_of(own) not in (None, method_of(outer))) for part, own, outer in pairs if own is not outer]


def exact_name(parts: Iterable[PreTrainedModel]) -> str:
    """The `attn_implementation` of exact attention that some models support."""
    return EXACT if all(part._supports_sdpa for part in parts) else "eager"


def attention_modules(model: nn.Module) -> Iterator[AttentionModule]:
    """The modules of a model that compute attention.

    Layers count from the innermost model that holds the module, so that they keep their numbers if their model becomes
    part of another. Names count from `model` without its head, as in `BartModel` of `BartForConditionalGeneration`. In
    a part that names its method itself, they also count from that part, which may have been converted alone.
    """
    head = f"{getattr(model, 'base_model_prefix', '')}."
    themselves = {part for part, names_method in parts_of_own(model) if names_method}
    owners: dict[str, tuple[str, PreTrainedModel | None, str]] = {}
    found: list[AttentionModule] = []
    for path, module in model.named_modules():
        prefix, owner, own = owners.get(path.rpartition(".")[0], ("", None, ""))
        if isinstance(module, PreTrainedModel):
            prefix, owner, own = path, module, path if module in themselves else own
        owners[path] = (prefix, owner, own)
        if owner is None or isinstance(module, PreTrainedModel) or not is_attention(module):
            continue
        name = path.removeprefix(prefix).removeprefix(".")
        is_named_cross = model_kinds.CROSS_ATTENTION.search(f"{name}.{type(module).__name__}") is not None
        is_cross = bool(getattr(module, "is_cross_attention", False)) or is_named_cross
        config = getattr(module, "config", None)
        config = config if isinstance(config, PreTrainedConfig) else owner.config
        layer, window = layer_of(module, name), None if is_cross else window_of(module, config)
        own_head = f"{getattr(model.get_submodule(own), 'base_model_prefix', '')}."
        own_name = path.removeprefix(f"{own}.").removeprefix(own_head) if own else ""
        location = ModuleLocation(layer, path.removeprefix(head), is_cross, layer, window, own_name)
        found.append(AttentionModule(module, location, config, owner))
    stacks = {(one.location.layer, stem_of(one.location.name)) for one in found}
    shared: list[Layer | None] = [layer for layer, _ in stacks if isinstance(layer, int)]
    for one in found:
        label = stem_of(one.location.name) if shared.count(one.location.layer) > 1 else one.location.layer
        yield one._replace(location=one.location._replace(label=label))


def is_attention(module: nn.Module) -> bool:
    """Whether a module is one that computes attention, through the interface or not."""
    says_so = isinstance(getattr(module, "is_causal", None), bool) or "Attention" in type(module).__name__
    return says_so or (not isinstance(module, PreTrainedModel) and uses_interface(type(module)))


def window_of(module: nn.Module, config: PreTrainedConfig) -> int | None:
    """The number of keys on one side to which an attention module is limited by its model; None if it sees all.

    A window that is as long as the model's positions is none.
    """
    if not uses_interface(type(module)):
        return None
    kind = layer_type(module, config)
    if (kind is not None and "sliding" not in kind) or getattr(module, "is_sliding", True) is False:
        return None
    size: Any = getattr(module, WINDOW, getattr(of_layer(config, module), WINDOW, None))
    if not isinstance(size, int) or isinstance(size, bool):
        return None
    positions = getattr(config, "max_position_embeddings", None)
    return None if isinstance(positions, int) and positions <= size else size


def layer_type(module: nn.Module, config: PreTrainedConfig) -> str | None:
    """What a config calls the layer of a module, such as "full_attention"; None if it says nothing."""
    types, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if isinstance(types, (list, tuple)) and isinstance(index, int) and 0 <= index < len(types):
        return str(types[index])
    return None


def knows_causality(module: nn.Module, owner: PreTrainedModel) -> bool:
    """Whether `is_causal` of an attention module is true: a model without `sdpa` can say anything there.

    Models with attention sinks have no `sdpa` because of these, and FlashAttention reads `is_causal` as well.
    """
    has_flash = owner._supports_flash_attn and passes_sinks(type(module))
    return bool(owner._supports_sdpa or has_flash or is_patched(module))


def passes_sinks(kind: type[nn.Module]) -> bool:
    """Whether a class of attention modules gives its `sinks`, which may be None, to the attention function."""
    return uses_interface(kind) and f"{model_kinds.SINKS}=self.sinks" in inspect.getsource(kind.forward)


def has_sinks(module: Any) -> bool:
    """Whether an attention module has sinks, and gives them to the attention function."""
    return passes_sinks(type(module)) and module.sinks is not None


def is_patched(module: nn.Module) -> bool:
    """Whether a module has its class from `patched`."""
    return type(module).__module__ == f"{__package__}.patched"


class Snapshot(contextlib.AbstractContextManager["Snapshot", None]):
    """The classes and attributes of models, of their configs and of others at one moment, with dictionaries among them.

    That restores everything, because a switch to another method replaces attributes, and never writes into a tensor. As
    a context manager it restores them after an error.
    """

    def __init__(self, models: Sequence[nn.Module], configs: Sequence[PreTrainedConfig] = ()) -> None:
        modules = dict.fromkeys(module for model in models for module in model.modules())
        of_models = [config for model in models for config in configs_of(model)]
        self._classes = [(module, type(module)) for module in modules]
        self._saved: list[tuple[dict, dict]] = []
        for holder in (*modules, *of_models, *configs):
            attributes = vars(holder)
            inner = [value for value in attributes.values() if type(value) in (dict, OrderedDict)]
            self._saved += [(present, dict(present)) for present in (attributes, *inner)]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.restore()

    def restore(self) -> None:
        """Give every module and config the attributes that it had, in their order."""
        try:
            self._restore()
        except BaseException:  # for example a second Ctrl-C: restoring again from the start is always possible
            self._restore()
            raise

    def _restore(self) -> None:
        for module, kind in self._classes:
            module.__class__ = kind
        for present, saved in self._saved:
            # PyTorch may be iterating over one that has not changed, such as hooks.
            if [*present] != [*saved] or any(present[name] is not value for name, value in saved.items()):
                present.clear()
                present.update(saved)


def uses_interface(kind: type[nn.Module]) -> bool:
    """Whether a class, or one that it derives from, asks Transformers' attention interface, by its code."""
    return any(map(_asks_interface, kind.__mro__))


@functools.cache
def _asks_interface(kind: type) -> bool:
    functions = (inspect.unwrap(x) for x in vars(kind).values() if callable(x))
    return any(inspect.isfunction(x) and "ALL_ATTENTION_FUNCTIONS" in x.__code__.co_names for x in functions)


def matrix_needs(module: nn.Module, *, is_attention: bool) -> Iterator[str]:
    """What a module does that only a (queries, keys) matrix could keep, in words.

    Of modules around the attention modules, such as layers, only names that say "bias" count.
    """
    if kind_at(module).needs_matrix:
        yield kind_at(module).needs_matrix
    parts = (*module._parameters.items(), *module._modules.items())
    names = [name for name, part in parts if part is not None and model_kinds.POSITION_BIAS.search(name)]
    found = [f"a bias of relative positions ({name})" for name in names if is_attention or "bias" in name]
    if is_attention:
        changes = model_kinds.CHANGES_OF_SCORES.items()
        held = [(name, words) for name, words in changes if getattr(module, name, None) is not None]
        found += [f"{words} ({name})" for name, words in held if name != "sinks" or not has_sinks(module)]
    yield from (f"adds {what} to the scores of its attention" for what in found)


def attention_table(kind: type[nn.Module]) -> str | None:
    """The table, with an entry for "eager", from which a model takes its attention class; None without one."""
    for cls in (cls for cls in kind.__mro__ if issubclass(cls, PreTrainedModel)):
        if kind_of(cls).ignores_table:
            return None
        for name, value in vars(sys.modules[cls.__module__]).items():
            if name.endswith("_CLASSES") and isinstance(value, dict) and "eager" in value:
                return name
    return None


def hook_once(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Give a module a forward pre-hook that it does not have yet."""
    if hook not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(hook, with_kwargs=True)


def tables_of(parts: Sequence[PreTrainedModel]) -> dict[PreTrainedModel, tuple[PositionTable, ...]]:
    """The learned tables over token positions that each of some models holds itself, not through another one of them.

    Such an embedding has a usual name and as many entries as the config says, which does not count `offset`.
    """
    found: dict[int, tuple[PreTrainedModel, PositionTable]] = {}
    holders = ((part, module, name) for part in parts for module in part.modules() for name in POSITION_TABLES)
    for part, module, name in holders:
        table, count = getattr(module, name, None), getattr(part.config, "max_position_embeddings", None)
        if isinstance(table, nn.Embedding) and "Sinusoidal" not in type(table).__name__:
            extra = getattr(table, "offset", 0)
            if isinstance(extra, int) and table.num_embeddings - extra == count:
                found[id(table)] = part, PositionTable(module, name)
    return {part: tuple(table for owner, table in found.values() if owner is part) for part in parts}
