"""Pairs of sentences in two languages: from text files, from a hub data set, or generated number words."""

import pathlib
import random
from collections.abc import Sequence
from typing import NamedTuple

from datasets import load_dataset

from hf_efficient_attn.io.reading import read_text
from recipes.common.data.text import text_files

_ENGLISH = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine",
    "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
_ENGLISH_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_GERMAN = [
    "null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun",
    "zehn", "elf", "zwölf", "dreizehn", "vierzehn", "fünfzehn", "sechzehn", "siebzehn", "achtzehn", "neunzehn",
]  # fmt: skip
_GERMAN_TENS = ["zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig"]
# Numbers of a generated list, and digits of the longest.
_LEAST, _MOST, _DIGITS = 2, 5, 2


class Pairs(NamedTuple):
    """Sentences and their translations, as many of one as of the other."""

    source: list[str]
    target: list[str]

    def part(self, indices: Sequence[int]) -> "Pairs":
        """The pairs with these indices."""
        return Pairs([self.source[i] for i in indices], [self.target[i] for i in indices])


def pairs_of_files(source: Sequence[str], target: Sequence[str]) -> Pairs:
    """The lines of text files (.txt, also gzipped) and those of their translations.

    Pairs in which a line is empty are left out.

    Raises:
        ValueError: a file does not exist, or the two sides have different numbers of lines.
    """
    sides = [[line for path in text_files(files) for line in _lines(path)] for files in (source, target)]
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"{', '.join(source)} has {len(sides[0])} lines and {', '.join(target)} has {len(sides[1])}: line i of one "
            "must be the translation of line i of the other"
        )
    kept = [(a.strip(), b.strip()) for a, b in zip(*sides, strict=True) if a.strip() and b.strip()]
    return Pairs([a for a, _ in kept], [b for _, b in kept])


def _lines(path: pathlib.Path) -> list[str]:
    lines = read_text(path).split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def pairs_of_hub(name: str, subset: str | None, split: str, languages: tuple[str, str]) -> Pairs:
    """The pairs of a hub data set, whose rows have a "translation" with both languages, or a column for each.

    Raises:
        ValueError: it has neither.
    """
    rows = load_dataset(name, subset, split=split)
    if "translation" in rows.column_names:
        found = rows["translation"]
        known = sorted(found[0]) if len(found) else []
        columns = [[row.get(language) for row in found] for language in languages if language in known]
    else:
        known = list(rows.column_names)
        columns = [list(rows[language]) for language in languages if language in known]
    if len(columns) < 2:
        raise ValueError(
            f"{name}, split {split}: no {' and '.join(languages)} (there are {', '.join(known) or 'no rows'}); give "
            "--source_language and --target_language"
        )
    kept = [(a.strip(), b.strip()) for a, b in zip(*columns, strict=True) if a and b and a.strip() and b.strip()]
    return Pairs([a for a, _ in kept], [b for _, b in kept])


def english(number: int) -> str:
    """The words of a number from 0 to 999: "three hundred forty five"."""
    if number < 20:
        return _ENGLISH[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _ENGLISH_TENS[tens - 2] + (f" {_ENGLISH[ones]}" if ones else "")
    hundreds, rest = divmod(number, 100)
    return f"{_ENGLISH[hundreds]} hundred" + (f" {english(rest)}" if rest else "")


def german(number: int) -> str:
    """The words of a number from 0 to 999, with spaces between them: "drei hundert fünf und vierzig"."""
    if number < 20:
        return _GERMAN[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        first = "ein" if ones == 1 else _GERMAN[ones]
        return f"{first} und {_GERMAN_TENS[tens - 2]}" if ones else _GERMAN_TENS[tens - 2]
    hundreds, rest = divmod(number, 100)
    first = "ein" if hundreds == 1 else _GERMAN[hundreds]
    return f"{first} hundert" + (f" {german(rest)}" if rest else "")


def number_lists(count: int, held_out: int, seed: int = 0) -> tuple[Pairs, Pairs]:
    """Generated pairs: lists of English number words, and the German ones in the same or in reverse order.

    The first word of the source says which order. German puts the ones before the tens, so that a translation needs
    the words around each word and, in reverse, those at the other end of the list.

    Args:
        count: number of pairs to train on.
        held_out: number of other pairs to evaluate on.
        seed: of the numbers.

    Returns:
        The two sets, without a common source.
    """
    generator = random.Random(seed)
    found: dict[str, str] = {}
    while len(found) < count + held_out:
        order = generator.choice(("forward", "backward"))
        numbers = [generator.randrange(10**_DIGITS) for _ in range(generator.randint(_LEAST, _MOST))]
        target = numbers if order == "forward" else numbers[::-1]
        found[f"{order} {' , '.join(map(english, numbers))}"] = " , ".join(map(german, target))
    pairs = Pairs(list(found), list(found.values()))
    return pairs.part(range(held_out, count + held_out)), pairs.part(range(held_out))
