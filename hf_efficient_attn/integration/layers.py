"""How the layers of a model are named, sorted and written in short, and which seed each of them has.

A layer is the first integer in the path of its attention module, or a name that the module has for itself
(`attention_layer`), such as T2T-ViT's "t2t.0" before layer 0 of the backbone.
"""

import functools
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

from torch import nn

from hf_efficient_attn.errors import UnsupportedAttentionError

Layer: TypeAlias = int | str
# Names are read from other people's files and appear in model cards and command lines.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*")


def layer_of(module: nn.Module, path: str) -> Layer | None:
    """The layer of an attention module: its own name for it, or the first integer in its path; None without either."""
    own = getattr(module, "attention_layer", None)
    if own is not None:
        return own
    return next((int(part) for part in path.split(".") if part.isdigit()), None)


def check_layer(layer: Any) -> Layer:
    """Check a layer and return it as a config stores it.

    Raises:
        UnsupportedAttentionError: it is neither a non-negative integer nor a name.
    """
    if isinstance(layer, str) and len(layer) < 65 and _NAME.fullmatch(layer):
        return layer
    if isinstance(layer, (bool, str)) or not hasattr(layer, "__index__") or int(layer) < 0:
        raise UnsupportedAttentionError(
            f"'layers' contains {layer!r}; a layer is a non-negative integer, or a name that the model uses, such as "
            "'t2t.0'"
        )
    return int(layer)


def in_order(layers: Iterable[Layer | None]) -> list[Any]:
    """Sort layers and drop repetitions: None first, then names, which come before the numbered layers, then numbers."""
    return sorted(dict.fromkeys(layers), key=lambda layer: (isinstance(layer, int), layer is not None, layer or 0))


def layer_seed(layer: Layer | None) -> int:
    """The seed of a layer's random draws in eval mode: different for each layer, equal in every process, below 2^31."""
    if isinstance(layer, str):
        # Computed by hand, because torch.compile does not trace the hash functions of the standard library.
        return 1000003 * (1001 + functools.reduce(lambda number, c: (31 * number + ord(c)) % 1000, layer, 0))
    return 1000003 * ((layer or 0) + 1)


def ranges(layers: Iterable[Layer]) -> str:
    """Write layers as `--layers` takes them: [0, 1, 2, 5, "t2t.0"] becomes "t2t.0,0-2,5"."""
    parts: list[list[Layer]] = []
    for layer in in_order(layers):
        if parts and isinstance(layer, int) and isinstance(parts[-1][-1], int) and layer == parts[-1][-1] + 1:
            parts[-1][1:] = [layer]
        else:
            parts.append([layer])
    return ",".join("-".join(map(str, part)) for part in parts)


def parse_layers(text: str) -> list[Layer]:
    """Read layers as `ranges` writes them: "t2t.0,0-5,8" becomes ["t2t.0", 0, 1, 2, 3, 4, 5, 8].

    Raises:
        UnsupportedAttentionError: a part is neither a layer nor a range of layers.
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
                f"--layers {text!r}: {part!r} is neither a layer nor a range of layers; write for example 0-5,8"
            )
    return in_order(found)
