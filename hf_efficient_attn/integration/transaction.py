"""Restoring models and their configs when a switch fails.

A switch to another attention method replaces attributes: parameters, submodules, forwards, hooks, entries of configs.
It never writes into a tensor. A `Snapshot` that was taken before therefore restores everything by references alone.
"""

from collections import OrderedDict
from collections.abc import Iterable

from torch import nn
from transformers.configuration_utils import PreTrainedConfig


class Snapshot:
    """The attributes of models and configs at one moment.

    For every module and config it holds a shallow copy of the attributes, and of the dictionaries among them
    (submodules, parameters, buffers, hooks).
    """

    def __init__(self, models: Iterable[nn.Module], configs: Iterable[PreTrainedConfig]) -> None:
        modules = dict.fromkeys(module for model in models for module in model.modules())
        self._saved: list[tuple[dict, dict]] = []
        for holder in (*modules, *configs):
            attributes = vars(holder)
            inner = [value for value in attributes.values() if type(value) in (dict, OrderedDict)]
            self._saved += [(present, dict(present)) for present in (attributes, *inner)]

    def restore(self) -> None:
        """Give every module and config the attributes that it had, in their order."""
        try:
            self._restore()
        except BaseException:
            # For example a second Ctrl-C. Restoring again from the start is always possible.
            self._restore()
            raise

    def _restore(self) -> None:
        for present, saved in self._saved:
            present.update(saved)
            for key in [key for key in present if key not in saved]:
                del present[key]
            if list(present) != list(saved):
                for key, value in saved.items():
                    # Moves the key to the end. It is missing from the dictionary only between these two statements.
                    del present[key]
                    present[key] = value
