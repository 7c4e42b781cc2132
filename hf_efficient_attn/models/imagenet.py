"""Names and indices of ImageNet's thousand classes (ILSVRC 2012), from the list in `imagenet_classes.txt`."""

import functools
from collections.abc import Iterable
from importlib import resources

import torch
from torch import Tensor

from hf_efficient_attn.errors import did_you_mean


@functools.cache
def imagenet_classes() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return (WordNet ID, synonyms) of every class, in the usual order."""
    text = resources.files(__package__).joinpath("imagenet_classes.txt").read_text(encoding="utf-8")
    lines = (line.split("\t") for line in text.splitlines() if not line.startswith("#"))
    return tuple((wordnet_id, tuple(synonyms.split("; "))) for wordnet_id, synonyms in lines)


@functools.cache
def _indices_by_name() -> dict[str, tuple[int, ...]]:
    """Map every WordNet ID and every synonym, in lower case, to the indices of its classes."""
    found: dict[str, set[int]] = {}
    for index, (wordnet_id, synonyms) in enumerate(imagenet_classes()):
        for name in (wordnet_id, *synonyms):
            found.setdefault(name.lower(), set()).add(index)
    # A synonym that several classes share stands for the class whose first name it is.
    firsts = [name.lower() for name in class_names()]
    unique = {name: (firsts.index(name),) for name in found if firsts.count(name) == 1}
    return {name: tuple(sorted(indices)) for name, indices in found.items()} | unique


def class_names() -> list[str]:
    """Return the first name of each of ImageNet's thousand classes, in the usual order.

    The names come from WordNet. Two of them, "crane" and "maillot", each name two classes.
    """
    return [synonyms[0] for _, synonyms in imagenet_classes()]


def imagenet_labels() -> list[str]:
    """Return the classes with all their synonyms: "great white shark, white shark, man-eater, ..."."""
    return [", ".join(synonyms) for _, synonyms in imagenet_classes()]


def class_index(name: str | int) -> int:
    """Return the index of one of ImageNet's classes, from 0 to 999.

    Args:
        name: a name or synonym, in any case, with spaces or underscores; a WordNet ID ("n01440764"); or the index
            itself. A name that several classes share stands for the class whose first name it is, if there is exactly
            one such class.

    Raises:
        ValueError: the name is unknown (the message suggests a similar one) or ambiguous, or the index is out of range.
    """
    classes = imagenet_classes()
    if isinstance(name, int):
        if name not in range(len(classes)):
            raise ValueError(f"ImageNet's classes are numbered from 0 to {len(classes) - 1}, got {name}")
        return name
    wanted = " ".join(str(name).replace("_", " ").lower().split())
    found = _indices_by_name().get(wanted, ())
    if len(found) == 1:
        return found[0]
    if found:
        options = "; ".join(f"{i} or {classes[i][0]!r}: {', '.join(classes[i][1])}" for i in found)
        raise ValueError(f"{name!r} names several of ImageNet's classes; give the number of one of them: {options}")
    hint = did_you_mean(wanted, _indices_by_name())
    raise ValueError(f"ImageNet has no class {name!r}.{hint} class_names() lists all of them")


def class_indices(names: Iterable[str | int]) -> Tensor:
    """Return the indices of several classes, each given as in `class_index`, for `BigGANModel`: (B,), int64.

    Raises:
        ValueError: as in `class_index`, or `names` is a single string.
    """
    if isinstance(names, str):
        raise ValueError(f"names must be a list such as [{names!r}]; for a single name use class_index")
    return torch.tensor([class_index(name) for name in names], dtype=torch.int64)
