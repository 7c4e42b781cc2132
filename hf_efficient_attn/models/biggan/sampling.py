"""What goes into a BigGAN: noise from a truncated normal distribution, and the numbers of ImageNet's classes."""

import difflib
import functools
from collections.abc import Iterable
from importlib import resources

import numpy as np
import torch
from torch import Tensor

# The normal distribution is cut here, in standard deviations, before it is scaled (Brock et al. 2019, section 3.1).
CUT = 2.0


def truncated_noise(batch_size: int, dim: int = 128, truncation: float = 1.0, seed: int | None = None) -> Tensor:
    """Noise for `BigGANModel`: normal within 2 standard deviations, times `truncation`.

    With a seed these are the numbers of `truncated_noise_sample` in pytorch-pretrained-biggan, to 1e-6.

    Args:
        batch_size: rows.
        dim: columns, the model's `z_dim`.
        truncation: in (0, 1]; small values give likelier images that vary less.
        seed: None draws from PyTorch's global generator; with a number no global generator is touched.

    Returns:
        (batch_size, dim), float32, on the CPU.

    Raises:
        ValueError: a truncation outside (0, 1], or a size below 1.
    """
    check_truncation(truncation)
    if batch_size < 1 or dim < 1:
        raise ValueError(f"batch_size={batch_size} and dim={dim} must be at least 1")
    size = (batch_size, dim)
    if seed is None:
        uniform = torch.rand(size, dtype=torch.float64, device="cpu")
    else:
        uniform = torch.from_numpy(np.random.RandomState(seed).uniform(size=size))
    # The inverse of the distribution function of what is left between the cuts.
    low = torch.special.ndtr(torch.tensor(-CUT, dtype=torch.float64))
    return truncation * torch.special.ndtri(low + uniform * (1 - 2 * low)).float()


def check_truncation(truncation: float) -> None:
    if not 0 < truncation <= 1:
        raise ValueError(f"truncation must be above 0 and at most 1, not {truncation!r}")


@functools.cache
def _classes() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """(WordNet number, lemmas) of every class, in order."""
    text = resources.files(__package__).joinpath("imagenet_classes.txt").read_text(encoding="utf-8")
    rows = (line.split("\t") for line in text.splitlines() if not line.startswith("#"))
    return tuple((number, tuple(lemmas.split("; "))) for number, lemmas in rows)


@functools.cache
def _index() -> dict[str, tuple[int, ...]]:
    """Classes by WordNet number or lemma in lower case."""
    found: dict[str, list[int]] = {}
    for index, (number, lemmas) in enumerate(_classes()):
        for name in dict.fromkeys(key.lower() for key in (number, *lemmas)):
            found.setdefault(name, []).append(index)
    # What several classes may be called means the one that has it for its first name.
    for name, indices in found.items():
        first = [i for i in indices if _classes()[i][1][0].lower() == name]
        found[name] = first if len(first) == 1 else indices
    return {name: tuple(indices) for name, indices in found.items()}


def class_names() -> list[str]:
    """The first names of ImageNet's thousand classes (ILSVRC 2012), in their usual order.

    The names are WordNet's; "crane" and "maillot" stand there twice.
    """
    return [lemmas[0] for _, lemmas in _classes()]


def imagenet_labels() -> list[str]:
    """The same with all synonyms: "great white shark, white shark, man-eater, ..."."""
    return [", ".join(lemmas) for _, lemmas in _classes()]


def class_index(name: str | int) -> int:
    """Number of one of ImageNet's classes.

    Args:
        name: a name or synonym, in upper or lower case, with blanks or underscores; a WordNet number ("n01440764"); or
            the number itself. A name of several classes means the one whose first name it is, if there is one such.

    Returns:
        a number from 0 to 999.

    Raises:
        ValueError: a name that is unknown (the nearest ones are told) or that several classes have, a number outside.
    """
    if isinstance(name, int) and not isinstance(name, bool):
        if not 0 <= name < len(_classes()):
            raise ValueError(f"ImageNet's classes are numbered from 0 to {len(_classes()) - 1}, not {name}")
        return name
    if not isinstance(name, str):
        raise ValueError(f"a class is a name or a number, not {name!r}")
    wanted = " ".join(name.replace("_", " ").lower().split())
    found = _index().get(wanted, ())
    if len(found) == 1:
        return found[0]
    if found:
        several = "; ".join(f"{i} or {_classes()[i][0]!r}: {', '.join(_classes()[i][1])}" for i in found)
        raise ValueError(f"{name!r} may be several of ImageNet's classes; say which by its number: {several}")
    near = difflib.get_close_matches(wanted, list(_index()), n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise ValueError(f"ImageNet has no class {name!r}.{hint} class_names() lists them")


def class_indices(names: Iterable[str | int]) -> Tensor:
    """Numbers of several classes: (B,), int64, as `BigGANModel` takes them. Raises as `class_index` does."""
    if isinstance(names, str):
        raise ValueError(f"give a list of names, [{names!r}], or use class_index")
    return torch.tensor([class_index(name) for name in names], dtype=torch.int64)
