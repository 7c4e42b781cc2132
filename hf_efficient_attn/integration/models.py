"""Finding the Transformers models in a module, their configs, and their attention modules and where these are."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration import windows
from hf_efficient_attn.integration.configs import method_of, parts_of, settings_of
from hf_efficient_attn.integration.layers import Layer, layer_of, stem_of
from hf_efficient_attn.integration.model_code import attention_arguments
from hf_efficient_attn.integration.settings import EfficientAttentionConfig
from hf_efficient_attn.integration.transaction import Snapshot
from hf_efficient_attn.methods import MethodConfig

_CROSS = ("cross", "encdec", "enc_dec", "encoder_attn")
# The attribute of an attention module that holds its `ModuleLocation`.
LOCATION = "_efficient_attention"


class ModuleLocation(NamedTuple):
    """Where an attention module is in its model.

    Attributes:
        layer: its layer, as `layers.layer_of` determines it.
        name: its name within the model.
        is_cross: whether its keys come from another model or stack.
        label: what reports and calibration call its layer: `layer`, or, if modules of several stacks have the same
            number, the part of the name up to it, such as "encoder.layers.0".
        window: the sliding window that its model gives it, as `windows.window_of` determines it; None for none.
        arguments: what its class gives to the attention function, as `model_code.attention_arguments` finds it; None
            before a switch. A graph cannot look for it.
    """

    layer: Layer | None
    name: str
    is_cross: bool
    label: Layer | None
    window: int | None = None
    arguments: frozenset[str] | None = None


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

    @property
    def chosen(self) -> MethodConfig | None:
        """The method that the config chooses for the layer of the module; None for exact attention."""
        return method_at(self.config, method_of(self.config), self.location)


def location_of(module: nn.Module) -> ModuleLocation:
    """The location that a switch wrote on the module, or else what the module itself says about it."""
    location: ModuleLocation | None = getattr(module, LOCATION, None)
    if location is not None:
        return location
    layer = layer_of(module, str(getattr(module, "layer_idx", "")))
    if layer is None:
        raise UnsupportedAttentionError(
            f"a {type(module).__name__} does not know its layer, because its model was switched by hand: use "
            "model.set_attn_implementation(name) or hf_efficient_attn.convert(model, name)"
        )
    return ModuleLocation(layer, f"layer {layer}", bool(getattr(module, "is_cross_attention", False)), layer)


def method_at(config: object, name: str | None, location: ModuleLocation) -> MethodConfig | None:
    """The method that a config which names it chooses for an attention module; None for exact attention."""
    if name is None or location.window is not None:  # layers with a window stay exact
        return None
    return settings_of(config, name).for_layer(location.layer, location.name)


def choose(models: Sequence[PreTrainedModel], settings: EfficientAttentionConfig) -> None:
    """Write a choice into all configs of models, in which nothing else changes yet."""
    for model in models:
        for config in configs_of(model):
            config._attn_implementation_internal = settings.method
            config.efficient_attention = settings


def snapshot(models: Sequence[PreTrainedModel]) -> Snapshot:
    """The present state of models and their configs, to be restored if a switch fails."""
    return Snapshot(models, [config for model in models for config in configs_of(model)])


def models_in(module: nn.Module) -> list[PreTrainedModel]:
    """The Transformers models in a module, itself included, outermost first."""
    return [m for m in module.modules() if isinstance(m, PreTrainedModel)]


def transformers_models(model: nn.Module) -> list[PreTrainedModel]:
    """The outermost Transformers models in a module: the module itself if it is one.

    Raises:
        UnsupportedAttentionError: it contains none.
    """
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
            waiting += parts_of(config).values()
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
        layer, arguments = layer_of(module, name), attention_arguments(type(module))
        window = None if is_cross else windows.window_of(module, config)
        location = ModuleLocation(layer, path.removeprefix(head), is_cross, layer, window, arguments)
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
