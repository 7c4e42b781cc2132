"""Models of the PyPI package pytorch-pretrained-biggan, switched in place; nothing here imports the package."""

import functools
from collections.abc import Sequence

from torch import Tensor, nn

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.layers import layer_seed
from hf_efficient_attn.integration.settings import EfficientAttentionConfig
from hf_efficient_attn.methods import MethodConfig, attention, get_method, learns, rectangular_methods
from hf_efficient_attn.models.biggan.attention import attend

_PACKAGE = "pytorch_pretrained_biggan"
_PROJECTIONS = ("snconv1x1_theta", "snconv1x1_phi", "snconv1x1_g", "snconv1x1_o_conv")


def package_attentions(model: nn.Module) -> list[nn.Module]:
    """The package's `SelfAttn` modules in a model; none in anything that is not of the package."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return [module for module in modules if any(_is_self_attention(kind) for kind in type(module).__mro__)]


def _is_self_attention(kind: type) -> bool:
    return kind.__name__ == "SelfAttn" and kind.__module__.partition(".")[0] == _PACKAGE


def switch_package(modules: Sequence[nn.Module], settings: EfficientAttentionConfig) -> None:
    """Let the package's attention modules compute a method, in place: weights and their names stay as they are.

    The output is that of a `BigGANModel` with the same weights and method.

    Raises:
        UnsupportedAttentionError: before anything is changed, for layers other than 0, and methods that need as many
            keys as queries or learn parameters.
    """
    if any(entry.layers not in (None, (0,)) for entry in settings.entries):
        raise UnsupportedAttentionError(
            f"a BigGAN of {_PACKAGE} has one attention layer, number 0: leave layers out, or give layers=[0]"
        )
    method = settings.entries[0].config
    info = get_method(method.method).info
    if not info.rectangular:
        raise UnsupportedAttentionError(
            f"BigGAN has a quarter as many keys as queries, and {method.method} needs as many of each. Methods that do "
            f"not: {', '.join(rectangular_methods())}"
        )
    if learns(method):
        raise UnsupportedAttentionError(
            f"{method.method} learns parameters, which a BigGAN of {_PACKAGE} has no way to save: use "
            "hf_efficient_attn.models.biggan.BigGANModel, whose from_pretrained reads the same folder"
        )
    for module in modules:
        module.forward = functools.partial(_forward, module, method)


def restore_package(modules: Sequence[nn.Module]) -> None:
    """Give the modules their own forward back."""
    for module in modules:
        present = vars(module).get("forward")
        if isinstance(present, functools.partial) and present.func is _forward:
            del module.forward


def _forward(module: nn.Module, method: MethodConfig, x: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, C, H, W), in place of `SelfAttn.forward`."""
    projections = [getattr(module, name) for name in _PROJECTIONS]
    return x + module.gamma * attend(module, x, projections, functools.partial(_compute, method))


def _compute(method, module, query, key, value, attention_mask, *, scaling, dropout) -> tuple[Tensor, None]:
    """As an attention function of Transformers: random in training, and else what layer 0 of any model draws."""
    seed = None if module.training else layer_seed(0)
    out = attention(method, query, key, value, scale=scaling, dropout_p=dropout, seed=seed)
    return out.transpose(1, 2), None


class PackageBigGAN:
    """What `hf_efficient_attn.convert` asks about models of the package; see `integration.foreign.ForeignHandler`."""

    title = f"a BigGAN of {_PACKAGE.replace('_', '-')}"
    find = staticmethod(package_attentions)
    switch = staticmethod(switch_package)
    restore = staticmethod(restore_package)

    @classmethod
    def check_other(cls, name: str) -> None:
        """Refuse exact implementations that are not the package's own."""
        if name not in ("sdpa", "eager"):
            raise UnsupportedAttentionError(
                f"{cls.title} has its own exact attention and no {name!r}: 'sdpa' goes back to it"
            )
