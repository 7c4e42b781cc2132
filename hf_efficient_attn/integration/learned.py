"""Learned parameters of a method, as a submodule of every attention module that uses it.

They are created when a model is built or converted. They are trained, saved and loaded like all other parameters, under
the name `<attention module>.learned_parameters.<name>`, and are removed when the model is switched to another method.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedConfig, initialization

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration import model_kinds, models, settings
from hf_efficient_attn.methods import MethodConfig, get_method, learns, parameter_shapes

# Contains no "attention.key" or the like, because Transformers renames such parts in the keys of some checkpoints.
NAME = "learned_parameters"


class LearnedParameters(nn.Module):
    """The learned parameters of one method in one attention module.

    Call the module to get the tensors, rather than reading its attributes: hooks that load offloaded parameters, such
    as accelerate's, run only when a module is called.

    `sizes` are num_heads, num_kv_heads, head_dim, value_dim and max_length, as `initial_parameters` of a method takes
    them. Device and dtype are those of the parameters.
    """

    def __init__(self, method: MethodConfig, sizes: dict[str, int], device: Any, dtype: Any) -> None:
        super().__init__()
        self.method, self.sizes = method, sizes
        start = self.start_values()
        # Replicas of `torch.nn.DataParallel` have tensors of these names, and no parameters.
        self.names = tuple(start)
        for name, value in start.items():
            setattr(self, name, nn.Parameter(value.detach().to(device, dtype, copy=True)))

    def tensors(self) -> dict[str, Tensor]:
        """The parameters by name as they are stored, without running any hook."""
        return {name: getattr(self, name) for name in self.names}

    forward = tensors

    def start_values(self) -> dict[str, Tensor]:
        """The values that a conversion starts from: float32, on the CPU whatever the default device is."""
        with torch.device("cpu"):
            return get_method(self.method.method).initial_parameters(self.method, **self.sizes)

    def take(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Replace parameters by those of equal name and shape, or copy those that they start from; return these."""
        taken, starts_from = [], get_method(self.method.method).starts_from
        for name, parameter in self.tensors().items():
            old = tensors.get(name, tensors.get(starts_from.get(name, "")))
            if old is not None and old.shape == parameter.shape:
                taken.append(old if name in tensors else nn.Parameter(old.detach().to(parameter, copy=True)))
                setattr(self, name, taken[-1])
        return taken

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the parameters to the start values, except those that were loaded from a checkpoint."""
        for name, value in self.start_values().items():
            parameter = getattr(self, name)
            if parameter.device.type != "meta":
                initialization.copy_(parameter, value.to(parameter.device, parameter.dtype))


def learned_of(module: nn.Module) -> LearnedParameters | None:
    """The learned parameters of an attention module; None if it has none.

    If a PEFT config has "learned_parameters" in `modules_to_save`, a wrapper has one copy per adapter: the one in use.
    A batch for which PEFT chooses an adapter for each row is refused.
    """
    attached: Any = module._modules.get(NAME)
    if hasattr(attached, "modules_to_save"):
        # PEFT gives the names to hooks of the wrapper, for the time of a call.
        if any(getattr(hook, "keywords", {}).get("adapter_names") for hook in attached._forward_pre_hooks.values()):
            raise UnsupportedAttentionError(
                "adapter_names=[...]: attention computes a batch with the learned parameters of one adapter: call "
                "model.set_adapter(name), and then the model with the rows of that adapter"
            )
        active = () if attached.disable_adapters else attached.active_adapters
        copies = [attached.modules_to_save[name] for name in active if name in attached.modules_to_save]
        attached = (*copies, attached.original_module)[0]
    return attached if isinstance(attached, LearnedParameters) else None


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT has put adapters into a model or around it."""
    return any(type(module).__module__.startswith("peft.") for module in model.modules())


def _refuse_more_parameters(method: MethodConfig, model: nn.Module) -> None:
    """Refuse to add parameters to a model whose wrapper or adapters would not know them."""
    if has_adapters(model):
        raise UnsupportedAttentionError(
            f"{method.method} learns parameters, and the model has PEFT adapters, which do not save parameters "
            "that are added later: convert the model first, and call get_peft_model then, with "
            f"modules_to_save=[{NAME!r}] in the config of the adapter, so that it trains and saves them"
        )
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise UnsupportedAttentionError(
            f"{method.method} learns parameters, and the model is in DistributedDataParallel, which does not average "
            "gradients of parameters that are added later: convert the model first, and wrap it then"
        )


def refuse_lost_parameters(model: nn.Module, names: Iterable[str], prefix: str) -> None:
    """Refuse an adapter whose learned parameters a model does not have: PEFT would leave them out in silence.

    `names` are those of all tensors that are loaded, and `prefix` is that of the model.
    """
    names = [name for name in names if name.startswith(prefix) and f".{NAME}." in name]
    if not names or not has_adapters(model):
        return
    modules = dict(model.named_modules())
    for name in names:
        path = name.removeprefix(prefix).partition(f".{NAME}.")[0]
        learned = learned_of(modules[path]) if path in modules else None
        if learned is None or name.rpartition(".")[2] not in learned.names:
            found = "has none" if learned is None else f"has those of {learned.method}"
            raise UnsupportedAttentionError(
                f"the adapter has learned parameters of attention, and {type(model).__name__} {found} at {path}: "
                "load the model again, convert it as it was when the adapter was made, with the same method and "
                "hyperparameters (hf_efficient_attn.convert), and load the adapter then"
            )


def attach(found: models.AttentionModule, method: MethodConfig | None, holder: nn.Module | None = None) -> None:
    """Give an attention module the learned parameters of a method, unless it has parameters of equal hyperparameters.

    With others of the same method, it keeps the parameters whose start values these do not change. A module whose sizes
    cannot be determined, or whose parameters are offloaded, is refused, and so is one in a `holder`, the whole model,
    that takes no more parameters.
    """
    current, needs = learned_of(found.module), method is not None and learns(method)
    if current is not None and not needs:
        delattr(found.module, NAME)
    elif method is not None and needs and (current is None or current.method != method):
        _refuse_more_parameters(method, found.module if holder is None else holder)
        beside = next(found.module.parameters(), torch.empty(0))
        if beside.device.type == "meta" and any(hasattr(module, "_hf_hook") for module in found.module.modules()):
            raise UnsupportedAttentionError(
                f"{type(found.owner).__name__} at {found.location.name} is offloaded: convert the model first, which "
                "adds learned parameters, and offload it then"
            )
        # The default type beside quantised parameters.
        dtype = beside.dtype if beside.is_floating_point() else torch.get_default_dtype()
        new = LearnedParameters(method, _sizes(found, method), beside.device, dtype)
        if current is not None and current.method.method == method.method:
            starts, old = new.start_values(), current.start_values()
            same = [name for name in starts.keys() & old if torch.equal(starts[name], old[name])]
            new.take({name: current.tensors()[name] for name in same})
        setattr(found.module, NAME, new)


def _sizes(found: models.AttentionModule, method: MethodConfig) -> dict[str, int]:
    """The sizes that determine the learned parameters of a module, by the module or else by its config."""
    config = settings.of_layer(found.config, found.module)

    def first(*names: str) -> int | None:
        return settings.first_number(found.module, *names) or settings.first_number(config, *names)

    num_heads = first("num_attention_heads", "num_heads", "n_heads", "n_head")
    # With multi-head latent attention (DeepSeek-V2), `head_dim` is the rotary part, and values have another size.
    head_dim = first("qk_head_dim", "head_dim", "attention_head_size")
    hidden_size = settings.first_number(config, "hidden_size", "n_embd", "dim")
    if head_dim is None and num_heads and hidden_size:
        head_dim = hidden_size // num_heads
    max_length: int | None = 1
    # Tables that contract tokens are made for a length. Feature maps belong to heads, and fit any length.
    if parameter_shapes(method) != parameter_shapes(method, max_length=2):
        lengths = ("max_tokens", "max_position_embeddings", "n_positions", "max_source_positions")
        max_length = getattr(method, "max_length", 0) or first(*lengths) or _num_patches(config)
    if not num_heads or not head_dim or not max_length:
        missing, instead = "number or the size of the heads", "use a method without learned parameters"
        if num_heads and head_dim:
            missing, instead = "longest sequence", "give max_length=N, the number of tokens of your longest sequence"
        raise UnsupportedAttentionError(
            f"{method.method}: the {missing} of {type(found.owner).__name__} at {found.location.name} cannot be "
            f"determined from {type(found.config).__name__}, so that its learned parameters cannot be made: {instead}"
        )
    return {
        "num_heads": num_heads,
        "num_kv_heads": first("num_key_value_heads") or num_heads,
        "head_dim": head_dim * model_kinds.kind_at(found.module).size_of_keys,
        "value_dim": first("value_head_dim", "v_head_dim") or head_dim,
        "max_length": max_length,
    }


def _num_patches(config: PreTrainedConfig) -> int | None:
    """The patches of a picture, a class token, and DeiT's distillation token or other tokens; None for videos."""
    sizes: Any = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if None in sizes or hasattr(config, "tubelet_size"):
        return None
    (height, width), (patch_height, patch_width) = ((x, x) if isinstance(x, int) else tuple(x) for x in sizes)
    names = ("num_register_tokens", "num_detection_tokens", "n_cls_tokens", "num_summary_tokens")
    others = 1 + sum(getattr(config, name, 0) for name in names)
    return (height // patch_height) * (width // patch_width) + max(2, others)
