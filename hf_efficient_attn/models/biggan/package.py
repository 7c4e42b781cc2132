"""Method switching for models of the PyPI package pytorch-pretrained-biggan, without importing the package."""

import functools
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

_PACKAGE = "pytorch_pretrained_biggan"
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
        """Make the modules compute a method, in place; weights and their names stay unchanged.

        The output equals that of a `BigGANModel` with the same weights and method.

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
    return cls.__name__ == "SelfAttn" and cls.__module__.partition(".")[0] == _PACKAGE


def _forward(module: Any, method: MethodConfig, x: Tensor) -> Tensor:
    """Replace `SelfAttn.forward`: (B, C, height, width) -> (B, C, height, width)."""
    projections = [module.get_submodule(name) for name in _PROJECTIONS]
    out = pixel_attention(module, x, projections, functools.partial(_compute, method))
    return x + module.gamma * out


def _compute(
    method: MethodConfig,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    dropout: float,
) -> tuple[Tensor, None]:
    """Compute a method in the form of Transformers' attention interface.

    The seed is that of layer 0 of any model; in training mode the method draws from the global generators.

    Args:
        method: the method's configuration.
        module: the attention module.
        query: (B, 1, Nq, D).
        key: (B, 1, Nk, D).
        value: (B, 1, Nk, Dv).
        attention_mask: None.
        scaling: factor of the logits.
        dropout: dropout probability of the attention weights.

    Returns:
        (B, Nq, 1, Dv), None.
    """
    seed = None if module.training else layer_seed(0)
    out = attention(method, query, key, value, scale=scaling, dropout_p=dropout, seed=seed)
    return out.transpose(1, 2), None


register_foreign(PackageBigGAN())
