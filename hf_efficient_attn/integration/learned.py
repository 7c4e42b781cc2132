"""Parameters that a method learns, as a submodule of every attention module in which it stands.

They are made with the values that conversion starts from when a model is made or converted, are trained, saved and
loaded as any others, under the name `<attention module>.learned_parameters.<name>`, and go when the model is switched
to something else.

With `share="layers"` there is one set of them for all layers of a model that have the same method. The first of these
layers holds it, and the others refer to it: one parameter under one name, so that nothing is counted, saved or trained
twice, or has to be tied again after loading. Transformers' own tying, of parameters of the same value under several
names, is for embeddings: it does nothing where a config has `tie_word_embeddings=False`, and takes a checkpoint without
learned parameters for a corrupted one.
"""

from typing import NamedTuple

import torch
from torch import nn
from transformers import initialization
from transformers.configuration_utils import PreTrainedConfig

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods import MethodConfig, get_method, learns

# Free of "attention.key" and the like: Transformers renames such parts of the keys of some checkpoints on loading.
NAME = "learned_parameters"


class LearnedParameters(nn.Module):
    """The learned parameters of one method in one attention module.

    Args:
        method: the method's config.
        sizes: num_heads, head_dim, value_dim and max_length, as `Method.initial_parameters` takes them.
        device, dtype: of the parameters; by default those in force, as for any module.
        leader: the module of another layer that holds the parameters of this one too; None for one that holds its own.
    """

    def __init__(
        self,
        method: MethodConfig,
        sizes: dict[str, int],
        device=None,
        dtype=None,
        leader: "LearnedParameters | None" = None,
    ) -> None:
        super().__init__()
        self.method, self.sizes = method, sizes
        # In a tuple, since a module that is an attribute of a module becomes a part of it.
        self._leader = () if leader is None else (leader,)
        if leader is not None:
            return
        for name, value in self.start_values().items():
            empty = torch.empty(value.shape, device=device, dtype=dtype or torch.get_default_dtype())
            setattr(self, name, nn.Parameter(empty))
        self.reset_parameters()

    @property
    def holder(self) -> "LearnedParameters":
        """The module that holds the parameters: this one or its leader."""
        return self._leader[0] if self._leader else self

    def start_values(self) -> dict[str, torch.Tensor]:
        """What conversion starts from, float32 on the CPU, whatever device is in force."""
        with torch.device("cpu"):
            return get_method(self.method.method).initial_parameters(self.method, **self.sizes)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set those that this module holds, and that were not loaded from a checkpoint, to the start values."""
        if self._leader:
            return
        for name, value in self.start_values().items():
            parameter = getattr(self, name)
            if parameter.device.type != "meta":
                initialization.copy_(parameter, value.to(parameter.device, parameter.dtype))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The parameters by name, as the functional form takes them."""
        return dict(self.holder.named_parameters())

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{name}={tuple(p.shape)}" for name, p in self.tensors().items())
        return f"{self.method.method}: {shapes}{', of another layer' if self._leader else ''}"


def learned_of(module: nn.Module) -> LearnedParameters | None:
    """The learned parameters of an attention module, None where it has none; those in use where PEFT wraps them.

    With "learned_parameters" in `modules_to_save` of a PEFT config, a wrapper holds a copy for every adapter.
    """
    there = module._modules.get(NAME)
    if isinstance(there, LearnedParameters) or not hasattr(there, "modules_to_save"):
        return there if isinstance(there, LearnedParameters) else None
    adapters = [] if there.disable_adapters else [a for a in there.active_adapters if a in there.modules_to_save]
    inner = there.modules_to_save[adapters[0]] if adapters else there.original_module
    return inner if isinstance(inner, LearnedParameters) else None


def learned_tensors(module: nn.Module) -> dict[str, torch.Tensor] | None:
    """The learned parameters of an attention module by name; None where its method learns none."""
    learned = learned_of(module)
    return None if learned is None else learned.tensors()


class Fitting(NamedTuple):
    """An attention module, its method (None where it is exact), its config, the model it is of, its name for errors."""

    module: nn.Module
    method: MethodConfig | None
    config: PreTrainedConfig
    model: nn.Module
    where: str


def fit(fittings: list[Fitting]) -> None:
    """Give attention modules the parameters that their methods learn, and take away those of other methods.

    What is there already for the same hyperparameters stays as it is. The modules are all those of a model, in order.

    Raises:
        UnsupportedAttentionError: the sizes cannot be told from a module and its config.
    """
    wanted = [x.method is not None and learns(x.method) for x in fittings]
    sizes = [_sizes(*x[:3], x.where) if learns else None for x, learns in zip(fittings, wanted, strict=True)]
    present = [learned_of(x.module) for x in fittings]
    groups = [_group(*pair) if pair[1] else None for pair in zip(fittings, sizes, strict=True)]
    # What the layers of a group have shared until now, whichever of them will hold it.
    shared: dict[tuple, LearnedParameters] = {}
    for there, x, group in zip(present, fittings, groups, strict=True):
        if group is not None and there is not None and there.method == x.method:
            shared.setdefault(group, there.holder)
    leaders: dict[tuple, LearnedParameters] = {}
    for x, size, there, group in zip(fittings, sizes, present, groups, strict=True):
        ours = there is not None
        if size is None:
            if ours:
                delattr(x.module, NAME)
            continue
        leader = leaders.get(group)
        if not (ours and there.method == x.method and there.holder is (leader or there)):
            beside = next(x.module.parameters(), None)
            options = {} if beside is None else {"device": beside.device, "dtype": _floating(beside)}
            there = LearnedParameters(x.method, size, **options, leader=leader)
            if leader is None and group in shared:
                for name, parameter in shared[group].tensors().items():
                    setattr(there, name, parameter)
            setattr(x.module, NAME, there)
        if group is not None:
            leaders.setdefault(group, there)


def _group(fitting: Fitting, sizes: dict[str, int]) -> tuple | None:
    """What layers that share their parameters have in common; None where every layer has its own."""
    if getattr(fitting.method, "share", None) != "layers":
        return None
    return id(fitting.model), fitting.method, *sizes.values()


def _floating(beside: nn.Parameter) -> torch.dtype:
    """The type of the parameters beside, or the default where they are quantised."""
    return beside.dtype if beside.is_floating_point() else torch.get_default_dtype()


def _sizes(module: nn.Module, method: MethodConfig, config: PreTrainedConfig, where: str) -> dict[str, int]:
    heads = _first(module, ("num_attention_heads", "num_heads", "n_heads"))
    heads = heads or _first(config, ("num_attention_heads", "n_head", "n_heads"))
    width = _first(module, ("head_dim", "attention_head_size")) or _first(config, ("head_dim",))
    value_width = _first(module, ("value_head_dim",))
    hidden = _first(config, ("hidden_size", "n_embd", "dim"))
    if width is None and heads and hidden:
        width = hidden // heads
    length = _length(method, module, config)
    if not heads or not width or not length:
        lacking = "heads" if not heads else "width of a head" if not width else "longest sequence"
        raise UnsupportedAttentionError(
            f"{method.method}: the {lacking} of {where} cannot be told from {type(config).__name__}, so that its "
            "learned parameters cannot be made; methods without learned parameters do not need it"
        )
    return {"num_heads": heads, "head_dim": width, "value_dim": value_width or width, "max_length": length}


def _length(method: MethodConfig, module: nn.Module, config: PreTrainedConfig) -> int | None:
    """The most keys of a module: by the method's own `max_length`, what the module says, the table of positions, or the
    patches of an image.
    """
    length = getattr(method, "max_length", 0) or _first(module, ("max_tokens",))
    length = length or _first(config, ("max_position_embeddings", "n_positions"))
    if length:
        return length
    image, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if image is None or patch is None:
        return None
    height, width = (_pair(image)[i] // _pair(patch)[i] for i in (0, 1))
    # A class token, and the distillation token of DeiT; one row too many does no harm.
    return height * width + 2


def _pair(size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


def _first(holder, names: tuple[str, ...]) -> int | None:
    """The first of these attributes that is a positive integer."""
    for name in names:
        value = getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
