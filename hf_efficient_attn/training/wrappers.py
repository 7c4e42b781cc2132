"""The model inside the wrappers of a training, and its learned parameters."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_efficient_attn.integration.learned import LearnedParameters


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and `torch.compile`."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        else:
            return model


def learned_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that the attention methods of a model learn, each once, by name."""
    inner = unwrap(model)
    ours = {id(p) for module in inner.modules() if isinstance(module, LearnedParameters) for p in module.parameters()}
    return {name: p for name, p in inner.named_parameters() if id(p) in ours}
