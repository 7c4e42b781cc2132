"""Parameters that a method learns, as a submodule of every attention module in which it stands.

They are made with the values that conversion starts from when a model is made or converted, are trained, saved and
loaded as any others, under the name `<attention module>.learned_parameters.<name>`, and go when the model is switched
to something else.
"""

import torch
from torch import nn
from transformers import initialization
from transformers.configuration_utils import PreTrainedConfig

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods.base import MethodConfig, get_method

# Free of "attention.key" and the like: Transformers renames such parts of the keys of some checkpoints on loading.
NAME = "learned_parameters"


class LearnedParameters(nn.Module):
    """The learned parameters of one method in one attention module.

    Args:
        method: the method's config.
        sizes: heads, width, value_width and length, as `Method.parameters` takes them.
        device, dtype: of the parameters; by default those in force, as for any module.
    """

    def __init__(self, method: MethodConfig, sizes: dict[str, int], device=None, dtype=None) -> None:
        super().__init__()
        self.method, self.sizes = method, sizes
        for name, value in self.start_values().items():
            empty = torch.empty(value.shape, device=device, dtype=dtype or torch.get_default_dtype())
            setattr(self, name, nn.Parameter(empty))
        self.reset_parameters()

    def start_values(self) -> dict[str, torch.Tensor]:
        """What conversion starts from, float32 on the CPU, whatever device is in force."""
        with torch.device("cpu"):
            return get_method(self.method.method).parameters(self.method, **self.sizes)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set those that were not loaded from a checkpoint to the start values."""
        for name, value in self.start_values().items():
            parameter = getattr(self, name)
            if parameter.device.type != "meta":
                initialization.copy_(parameter, value.to(parameter.device, parameter.dtype))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The parameters by name, as the functional form takes them."""
        return dict(self.named_parameters())

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{name}={tuple(p.shape)}" for name, p in self.named_parameters())
        return f"{self.method.method}: {shapes}"


def learned_tensors(module: nn.Module) -> dict[str, torch.Tensor] | None:
    """The learned parameters of an attention module by name; None where its method learns none."""
    learned = module._modules.get(NAME)
    return learned.tensors() if isinstance(learned, LearnedParameters) else None


def fit(module: nn.Module, method: MethodConfig | None, config: PreTrainedConfig, where: str) -> None:
    """Give an attention module the parameters that its method learns, and take away those of another method.

    What is there already for the same hyperparameters stays as it is.

    Raises:
        UnsupportedAttentionError: the sizes cannot be told from the module and its config.
    """
    present = module._modules.get(NAME)
    wanted = method is not None and get_method(method.method).parameters is not None
    if not wanted:
        if isinstance(present, LearnedParameters):
            delattr(module, NAME)
        return
    if isinstance(present, LearnedParameters) and present.method == method:
        return
    beside = next(module.parameters(), None)
    options = {} if beside is None else {"device": beside.device, "dtype": _floating(beside)}
    setattr(module, NAME, LearnedParameters(method, _sizes(module, method, config, where), **options))


def _floating(beside: nn.Parameter) -> torch.dtype:
    """The type of the parameters beside, or the default where they are quantised."""
    return beside.dtype if beside.is_floating_point() else torch.get_default_dtype()


def _sizes(module: nn.Module, method: MethodConfig, config: PreTrainedConfig, where: str) -> dict[str, int]:
    heads = _first(module, ("num_attention_heads", "num_heads", "n_heads"))
    heads = heads or _first(config, ("num_attention_heads", "n_head", "n_heads"))
    width = _first(module, ("head_dim", "attention_head_size")) or _first(config, ("head_dim",))
    hidden = _first(config, ("hidden_size", "n_embd", "dim"))
    if width is None and heads and hidden:
        width = hidden // heads
    length = _length(method, config)
    if not heads or not width or not length:
        lacking = "heads" if not heads else "width of a head" if not width else "longest sequence"
        raise UnsupportedAttentionError(
            f"{method.method}: the {lacking} of {where} cannot be told from {type(config).__name__}, so that its "
            "learned parameters cannot be made; methods without learned parameters do not need it"
        )
    return {"heads": heads, "width": width, "value_width": width, "length": length}


def _length(method: MethodConfig, config: PreTrainedConfig) -> int | None:
    """The longest sequence of a model: the method's own `max_length`, the position table, or an image's patches."""
    length = getattr(method, "max_length", 0) or _first(config, ("max_position_embeddings", "n_positions"))
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
