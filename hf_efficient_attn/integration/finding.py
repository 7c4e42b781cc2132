"""Finding the Transformers models in a module, their configs, and their attention modules."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration import windows
from hf_efficient_attn.integration.attention import ModuleLocation
from hf_efficient_attn.integration.configs import parts_of
from hf_efficient_attn.integration.layers import Layer, layer_of, stem_of

_CROSS = ("cross", "encdec", "enc_dec", "encoder_attn")


class AttentionModule(NamedTuple):
    """A module that computes attention.

    Attributes:
        module: the module itself.
        location: where it is in its model.
        config: the config that applies to it.
        owner: the innermost model that holds it.
    """

    module: nn.Module
    location: ModuleLocation
    config: PreTrainedConfig
    owner: PreTrainedModel


def models_in(module: nn.Module) -> list[PreTrainedModel]:
    """The Transformers models in a module, itself included, outermost first."""
    return [m for m in module.modules() if isinstance(m, PreTrainedModel)]


def transformers_models(model: nn.Module) -> list[PreTrainedModel]:
    """The outermost Transformers models in a module: the module itself if it is one.

    Raises:
        UnsupportedAttentionError: it contains none.
    """
    if isinstance(model, PreTrainedModel):
        return [model]
    found: list[PreTrainedModel] = []
    waiting = [model] if isinstance(model, nn.Module) else []
    while waiting:
        module = waiting.pop()
        if isinstance(module, PreTrainedModel):
            found.append(module)
        else:
            waiting += list(module.children())
    if not found:
        raise UnsupportedAttentionError(_no_model(model))
    return found


def _no_model(value: object) -> str:
    """Why something holds no Transformers model, and what to give instead."""
    if isinstance(value, str):
        return f"{value!r} is a name and no model: load it first, for example with AutoModel.from_pretrained({value!r})"
    if isinstance(value, type):
        return f"{value.__name__} is a class and no model: make one, for example with {value.__name__}.from_pretrained"
    if isinstance(value, PreTrainedConfig):
        return f"a {type(value).__name__} is a config and no model: make one with AutoModel.from_config(config)"
    advice = ": give its attribute model" if isinstance(getattr(value, "model", None), PreTrainedModel) else ""
    return f"a {type(value).__name__} holds no Transformers model (a PreTrainedModel){advice}"


def configs_of(model: nn.Module) -> list[PreTrainedConfig]:
    """All configs of the Transformers models in a module, with their sub-configs, each once."""
    return with_parts([m.config for m in models_in(model)])


def with_parts(configs: Sequence[PreTrainedConfig]) -> list[PreTrainedConfig]:
    """Configs and all their sub-configs, each once."""
    found: dict[int, PreTrainedConfig] = {}
    waiting = list(configs)
    while waiting:
        config = waiting.pop(0)
        if id(config) not in found:
            found[id(config)] = config
            waiting += parts_of(config)
    return list(found.values())


def attention_modules(model: nn.Module) -> Iterator[AttentionModule]:
    """The modules of a model that compute attention.

    Layers count from the innermost model that holds the module, so that they keep their numbers if their model becomes
    part of another. Names count from `model`, without the prefix by which a model with a head holds the one without:
    they are the same in `BartModel` and in `BartForConditionalGeneration`.
    """
    head = f"{getattr(model, 'base_model_prefix', '')}."
    owners: dict[str, tuple[str, PreTrainedModel | None]] = {}
    found: list[AttentionModule] = []
    for path, module in model.named_modules():
        prefix, owner = owners.get(path.rpartition(".")[0], ("", None))
        owners[path] = (path, module) if isinstance(module, PreTrainedModel) else (prefix, owner)
        if owner is None or isinstance(module, PreTrainedModel) or not is_attention(module):
            continue
        name = path.removeprefix(prefix).removeprefix(".")
        is_cross = bool(getattr(module, "is_cross_attention", False)) or any(
            word in f"{name}.{type(module).__name__}".lower() for word in _CROSS
        )
        config = getattr(module, "config", None)
        config = config if isinstance(config, PreTrainedConfig) else owner.config
        layer = layer_of(module, name)
        window = None if is_cross else windows.window_of(module, config)
        location = ModuleLocation(layer, path.removeprefix(head), is_cross, layer, window)
        found.append(AttentionModule(module, location, config, owner))
    stacks: dict[Layer | None, set[str]] = {}
    for one in found:
        stacks.setdefault(one.location.layer, set()).add(stem_of(one.location.name))
    for one in found:
        layer, name = one.location.layer, one.location.name
        is_shared = isinstance(layer, int) and len(stacks[layer]) > 1
        yield one._replace(location=one.location._replace(label=stem_of(name))) if is_shared else one


def is_attention(module: nn.Module) -> bool:
    """Whether a module is one that computes attention, through the interface or not."""
    return isinstance(getattr(module, "is_causal", None), bool) or "Attention" in type(module).__name__
