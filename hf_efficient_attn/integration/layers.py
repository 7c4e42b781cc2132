"""How the layers of a model are named, sorted and written in short, and where its attention modules are.

A layer is the first integer in the path of its attention module, or a name that the module has for itself
(`attention_layer`), such as T2T-ViT's "t2t.0" before layer 0 of the backbone. In an encoder-decoder, layer 0 of the
encoder and that of the decoder are both layer 0. A name selects modules by the beginning of their path in the model
without its head, or of their own name: "encoder", "encoder.layers.0", "decoder.layers.0.self_attn", "t2t".
"""

import itertools
import re
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from hf_efficient_attn.errors import UnsupportedAttentionError, shown

Layer: TypeAlias = int | str
# Names are read from other people's files and appear in model cards and command lines.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*")
# A number, or a range of numbers, with the beginning of a name before it or without.
_RANGE = re.compile(rf"(?P<before>({_NAME.pattern}\.)?)(?P<first>[0-9]{{1,5}})(-(?P<last>[0-9]{{1,5}}))?")
# The attribute of an attention module that holds its `ModuleLocation`.
LOCATION = "_efficient_attention"


def layer_of(module: nn.Module, path: str) -> Layer | None:
    """The layer of an attention module: its own name for it, or the first integer in its path; None without either."""
    return getattr(module, "attention_layer", next((int(part) for part in path.split(".") if part.isdigit()), None))


def is_selected(chosen: Layer, layer: Layer | None, path: str) -> bool:
    """Whether an item of `layers` selects the attention module of a layer, at a path in its model."""
    if not isinstance(chosen, str):
        return chosen == layer
    return f"{path}.".startswith(f"{chosen}.") or f"{layer}.".startswith(f"{chosen}.")


def stem_of(path: str) -> str:
    """The part of a path up to its first integer: "encoder.layers.0" of "encoder.layers.0.self_attn"."""
    found = re.match(r"(.*?\.)??\d+(?=\.|$)", path)
    return found[0] if found else path


class ModuleLocation(NamedTuple):
    """Where an attention module is in its model, and the sliding window that its model gives it."""

    layer: Layer | None  # as `layer_of` determines it
    name: str  # within the model
    is_cross: bool  # whether its keys come from another model or stack
    # What reports and calibration call its layer: `layer`, or, if modules of several stacks have the same number, the
    # part of the name up to it, such as "encoder.layers.0".
    label: Layer | None
    window: int | None = None  # as `models.window_of` determines it
    own_name: str = ""  # within the part of the model that names its method itself, if it is in one
    method: str = ""  # the implementation that its config named in the last switch to one of this package

    def is_selected(self, item: Layer) -> bool:
        """Whether an item of `layers` selects the module."""
        return any(is_selected(item, self.layer, name) for name in (self.name, self.own_name))


def names_of(paths: Iterable[str]) -> list[str]:
    """The names that select several layers: the beginnings of the paths that end before the first integer."""
    parts = [[*itertools.takewhile(lambda part: not part.isdigit(), path.split("."))] for path in paths]
    return sorted({".".join(before[:end]) for before in parts for end in range(1, len(before) + 1)})


def check_layer(layer: Any) -> Layer:
    """Check a layer, a non-negative integer or a name, and return it as a config stores it."""
    if isinstance(layer, str) and len(layer) < 65 and _NAME.fullmatch(layer):
        return layer
    if isinstance(layer, (bool, str)) or not hasattr(layer, "__index__") or int(layer) < 0:
        raise UnsupportedAttentionError(
            f"'layers' contains {shown(layer)}; a layer is a non-negative integer, or a name that the model uses, "
            "such as 'encoder' or 't2t.0'"
        )
    return int(layer)


def in_order(layers: Iterable[Layer | None]) -> list[Any]:
    """Sort layers and drop repetitions: None first, then names, which come before the numbered layers, then numbers."""
    return sorted(dict.fromkeys(layers), key=_order)


def _order(layer: Layer | None) -> tuple[Any, ...]:
    """The sort key of `in_order`: "encoder.layers.2" comes before "encoder.layers.10"."""
    parts = [(part.isdigit(), int(part) if part.isdigit() else part) for part in str(layer).split(".")]
    return isinstance(layer, int), layer is not None, parts


def ranges(layers: Iterable[Layer]) -> str:
    """Write layers as `--layers` takes them: [0, 1, 2, 5, "t2t.0"] becomes "t2t.0,0-2,5".

    Three or more names with successive numbers become a range too, such as "encoder.layers.0-5".
    """
    texts = [str(layer) for layer in in_order(layers)]

    def run_of(index: int) -> tuple[str, int]:
        """What is before a number, and the number minus the index, which is the same for successive numbers."""
        found = _RANGE.fullmatch(texts[index])
        return (found["before"], int(found["first"]) - index) if found else (texts[index], 0)

    words: list[str] = []
    for (before, _), group in itertools.groupby(range(len(texts)), run_of):
        run = [texts[index] for index in group]
        is_long = len(run) >= (3 if before else 2)  # fewer are written one by one
        words += [f"{run[0]}-{run[-1].removeprefix(before)}"] if is_long else run
    return ",".join(words)


def parse_layers(text: str) -> list[Layer]:
    """Read layers as `ranges` writes them: "t2t.0,0-5,8" becomes ["t2t.0", 0, 1, 2, 3, 4, 5, 8].

    A part that is neither a layer nor a range of layers is refused.
    """
    layers: list[Layer] = []
    for part in (part.strip() for part in text.split(",")):
        found = _RANGE.fullmatch(part)
        numbers = range(int(found["first"]), int(found["last"] or found["first"]) + 1) if found else ()
        if found and numbers:
            layers += [f"{found['before']}{number}" if found["before"] else number for number in numbers]
        elif _NAME.fullmatch(part):
            layers.append(part)
        else:
            raise UnsupportedAttentionError(
                f"--layers {text!r}: {part!r} is neither a layer nor a range of layers; write for example 0-5,8 or "
                "encoder"
            )
    return in_order(layers)
