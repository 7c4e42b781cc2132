"""Models that are not Transformers models and that `hf_efficient_attn.convert` can switch nevertheless.

A package of models (`models/biggan`) registers a handler, so that `convert` does not have to know the package.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from hf_efficient_attn.integration.settings import EfficientAttentionConfig


class ForeignHandler(Protocol):
    """What `convert` needs to switch the attention modules of a foreign package.

    Attributes:
        title: the kind of model as error messages name it, such as "a BigGAN of pytorch-pretrained-biggan".
    """

    title: str

    def find(self, model: nn.Module) -> list[nn.Module]:
        """Return the attention modules of the foreign package in `model`, an empty list where there are none."""

    def check_other(self, name: str) -> None:
        """Raise UnsupportedAttentionError unless `restore` gives the attention that `name` ("sdpa", ...) stands for."""

    def switch(self, modules: Sequence[nn.Module], settings: EfficientAttentionConfig) -> None:
        """Make the modules compute a method, in place; raise UnsupportedAttentionError before anything is changed."""

    def restore(self, modules: Sequence[nn.Module]) -> None:
        """Give the modules their own exact attention back."""


_HANDLERS: list[ForeignHandler] = []


def register_foreign(handler: ForeignHandler) -> None:
    """Make `convert` ask a handler for attention modules of a foreign package."""
    if handler not in _HANDLERS:
        _HANDLERS.append(handler)


def foreign_attention(model: nn.Module) -> list[tuple[ForeignHandler, list[nn.Module]]]:
    """Every handler that finds attention modules in the model, with those modules."""
    return [(handler, modules) for handler in _HANDLERS if (modules := handler.find(model))]
