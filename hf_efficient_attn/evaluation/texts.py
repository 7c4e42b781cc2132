"""The tokens of one or several texts, in an order from which inputs of one length are cut."""

import pathlib
from collections.abc import Callable, Sequence
from itertools import chain

import torch

from hf_efficient_attn.io.reading import text_of, texts_in

# Characters of a text that are tokenized per token that is needed: a token has about four.
_CHARACTERS_PER_TOKEN = 16


def read_texts(files: Sequence[pathlib.Path], length: int, rows: int) -> list[str]:
    """As many texts of files and folders as `rows` inputs of `length` tokens need, in an order drawn at random.

    The order does not depend on how many are needed. A single file is read as it is.
    """
    paths, texts, characters = [path for file in files for path in texts_in(file)], list[str](), 0
    for index in torch.randperm(len(paths), generator=torch.Generator().manual_seed(0)).tolist():
        texts.append(text_of(paths[index]))
        characters += len(texts[-1])
        if len(texts) >= rows and characters >= _CHARACTERS_PER_TOKEN * rows * length:
            break
    return texts


def tokens_of(texts: Sequence[str], encode: Callable[[str], Sequence[int]], length: int, rows: int) -> torch.Tensor:
    """The tokens of some texts, int64 (N,), more than `rows` inputs of `length` tokens need if there are as many.

    The first inputs are the first `length` tokens of each text, then come the second ones, and so on. What is left at
    the ends of the texts follows, so that many short texts make inputs, too.
    """
    # No text gives more characters than are needed, and long texts give equally many.
    left, limit = _CHARACTERS_PER_TOKEN * rows * length, 0
    for number, size in enumerate(sorted(map(len, texts))):
        limit = min(size, -(-left // (len(texts) - number)))
        left -= limit
    encoded = [encode(text[:limit]) for text in texts]
    counts = [len(tokens) // length for tokens in encoded]
    whole = (
        tokens[index * length : (index + 1) * length]
        for index in range(max(counts))
        for tokens, count in zip(encoded, counts, strict=True)
        if index < count
    )
    ends = (tokens[count * length :] for tokens, count in zip(encoded, counts, strict=True))
    return torch.tensor([*chain.from_iterable(whole), *chain.from_iterable(ends)], dtype=torch.int64)
