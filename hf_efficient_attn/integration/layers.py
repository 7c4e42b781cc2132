"""How the layers of a model are named, ordered, written in short and given their seeds.

A layer is the index that stands in the path of its attention module, or the name that the module says of itself
(`attention_layer`), such as T2T-ViT's "t2t.0" before the backbone's 0.
"""

import functools
import re
from collections.abc import Iterable
from typing import TypeAlias

from torch import nn

from hf_efficient_attn.errors import UnsupportedAttentionError

Layer: TypeAlias = int | str
# Names come out of files of others and go into model cards and command lines.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*")


def layer_of(module: nn.Module, path: str) -> Layer | None:
    """What an attention module says of itself, or else the first integer in its path; None where there is neither."""
    said = getattr(module, "attention_layer", None)
    if said is not None:
        return said
    return next((int(part) for part in path.split(".") if part.isdigit()), None)


def check_layer(layer) -> Layer:
    """A layer as it is kept in a config; raises UnsupportedAttentionError for what is none."""
    if isinstance(layer, str) and len(layer) < 65 and _NAME.fullmatch(layer):
        return layer
    if isinstance(layer, (bool, str)) or not hasattr(layer, "__index__") or int(layer) < 0:
        raise UnsupportedAttentionError(
            f"'layers' holds {layer!r}; a layer is a non-negative integer, or a name of the model's own such as 't2t.0'"
        )
    return int(layer)


def in_order(layers: Iterable[Layer | None]) -> list[Layer | None]:
    """Layers without repetition: one without a number, then names, which stand before the numbered ones, then these."""
    return sorted(dict.fromkeys(layers), key=lambda layer: (isinstance(layer, int), layer is not None, layer or 0))


def layer_seed(layer: Layer | None) -> int:
    """The seed of a layer's random draws in eval mode: its own, and the same in every process; below 2^31."""
    if isinstance(layer, str):
        # Not a hash of the standard library, which torch.compile does not trace.
        return 1000003 * (1001 + functools.reduce(lambda number, c: (31 * number + ord(c)) % 1000, layer, 0))
    return 1000003 * ((layer or 0) + 1)


def ranges(layers: Iterable[Layer]) -> str:
    """[0, 1, 2, 5, "t2t.0"] -> "t2t.0,0-2,5", as `--layers` takes it."""
    runs: list[list[Layer]] = []
    for layer in in_order(layers):
        if runs and isinstance(layer, int) and isinstance(runs[-1][-1], int) and layer == runs[-1][-1] + 1:
            runs[-1][1:] = [layer]
        else:
            runs.append([layer])
    return ",".join("-".join(map(str, run)) for run in runs)


def parse_layers(text: str) -> list[Layer]:
    """ "t2t.0,0-5,8" -> ["t2t.0", 0, 1, 2, 3, 4, 5, 8].

    Raises:
        UnsupportedAttentionError: a part that is no layer and no range of layers.
    """
    found: list[Layer] = []
    for part in (part.strip() for part in text.split(",")):
        first, dash, last = part.partition("-")
        ends = [first, last] if dash else [first, first]
        if all(end.isascii() and end.isdecimal() and len(end) < 6 for end in ends) and int(ends[0]) <= int(ends[1]):
            found += range(int(ends[0]), int(ends[1]) + 1)
        elif _NAME.fullmatch(part):
            found.append(part)
        else:
            raise UnsupportedAttentionError(
                f"--layers {text!r}: {part!r} is no layer and no range of layers; write such as 0-5,8"
            )
    return in_order(found)
