"""Method switching for models of the PyPI package pytorch-pretrained-biggan, without importing the package."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration import own_forward
from hf_efficient_attn.integration.foreign import register_foreign
from hf_efficient_attn.integration.layers import layer_seed
from hf_efficient_attn.integration.refusals import check_methods
from hf_efficient_attn.integration.settings import EXACT_IMPLEMENTATIONS, EfficientAttentionConfig
from hf_efficient_attn.methods import MethodConfig, attention, learns
from hf_efficient_attn.models.biggan.modeling_biggan import pixel_attention

_PROJECTIONS = ("snconv1x1_theta", "snconv1x1_phi", "snconv1x1_g", "snconv1x1_o_conv")


class PackageBigGAN:
    """Handler with which `hf_efficient_attn.convert` switches the package's models; see `ForeignHandler`."""

    title = "a BigGAN of pytorch-pretrained-biggan"

    def find(self, model: nn.Module) -> list[nn.Module]:
        """Return the package's `SelfAttn` modules in `model`, an empty list for any other model."""
        modules = model.modules() if isinstance(model, nn.Module) else ()
        return [module for module in modules if any(_is_self_attention(cls) for cls in type(module).__mro__)]

    def check_other(self, name: str) -> None:
        """Raise UnsupportedAttentionError unless `name` is an exact attention that stands for the package's own."""
        if name not in EXACT_IMPLEMENTATIONS:
            raise UnsupportedAttentionError(
                f"{self.title} has its own exact attention and no {name!r}: 'sdpa' goes back to it"
            )

    def switch(self, modules: Sequence[nn.Module], settings: EfficientAttentionConfig) -> None:
        """Make the modules compute a method, in place, with the output of a `BigGANModel` with the same weights.

        Raises:
            UnsupportedAttentionError: before anything is changed, if the settings name a layer other than 0, or the
                method needs as many keys as queries or learns parameters.
        """
        if any(entry.layers not in (None, (0,)) for entry in settings.entries):
            raise UnsupportedAttentionError(
                f"{self.title} has one attention layer, number 0: leave layers out, or give layers=[0]"
            )
        method = settings.entries[0].config
        check_methods([method], is_causal=False, is_rectangular=True, model=self.title, allow_learned=True)
        if learns(method):
            raise UnsupportedAttentionError(
                f"{method.method} learns parameters, and {self.title} cannot save them: use "
                "hf_efficient_attn.models.biggan.BigGANModel, whose from_pretrained reads the same folder"
            )
        for module in modules:
            own_forward.give(module, own_forward.bind(module, _forward, method))

    def restore(self, modules: Sequence[nn.Module]) -> None:
        """Give the modules their own forward back."""
        for module in modules:
            if own_forward.computes(own_forward.own_forward(module), _forward):
                own_forward.take(module)


def _is_self_attention(cls: type) -> bool:
    return cls.__name__ == "SelfAttn" and cls.__module__.partition(".")[0] == "pytorch_pretrained_biggan"


def _forward(module: Any, method: MethodConfig, x: Tensor) -> Tensor:
    """Replace `SelfAttn.forward`: (B, C, height, width) -> (B, C, height, width).

    The seed is that of layer 0 of any model; in training mode the method draws from the global generators.
    """
    seed = None if module.training else layer_seed(0)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(method, query, key, value, scale=1.0, seed=seed).transpose(1, 2)

    return x + module.gamma * pixel_attention(x, [module.get_submodule(name) for name in _PROJECTIONS], attend)


register_foreign(PackageBigGAN())
