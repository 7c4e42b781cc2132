"""Pairs of sentences in two languages, as data sets with the columns `source` and `target`."""

import random
from collections.abc import Iterable, Sequence

from datasets import Dataset, load_dataset

from hf_efficient_attn.io.text import read_text
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


def _pairs(found: Iterable[Sequence[str | None]]) -> Dataset:
    """The pairs without surrounding spaces. Those with an empty side are left out."""
    kept = [(a.strip(), b.strip()) for a, b in found if a and b and a.strip() and b.strip()]
    return Dataset.from_dict({"source": [a for a, _ in kept], "target": [b for _, b in kept]})


def pairs_of_files(source: Sequence[str], target: Sequence[str]) -> Dataset:
    """The lines of text files (.txt, also gzipped) and those of their translations, which must be as many."""
    sides = [
        [line for path in text_files(files) for line in read_text(path).removesuffix("\n").split("\n")]
        for files in (source, target)
    ]
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"{', '.join(source)} has {len(sides[0])} lines and {', '.join(target)} has {len(sides[1])}: line i of one "
            "must be the translation of line i of the other"
        )
    return _pairs(zip(*sides, strict=True))


def pairs_of_hub(name: str, subset: str | None, split: str, languages: tuple[str, str]) -> Dataset:
    """The pairs of a hub data set, whose rows have a "translation" with both languages, or a column for each."""
    rows = load_dataset(name, subset, split=split)
    found = rows["translation"] if "translation" in rows.column_names else rows
    known = sorted(found[0]) if len(found) else []
    if not set(languages) <= set(known):
        raise ValueError(
            f"{name}, split {split}: no {' and '.join(languages)} (there are {', '.join(known) or 'no rows'}); give "
            "--source_language and --target_language"
        )
    return _pairs([row[language] for language in languages] for row in found)


def english(number: int) -> str:
    """The words of a number below 100: "forty five"."""
    tens, ones = divmod(number, 10)
    return _ENGLISH[number] if tens < 2 else _ENGLISH_TENS[tens - 2] + (f" {_ENGLISH[ones]}" if ones else "")


def german(number: int) -> str:
    """The words of a number below 100, with spaces between them: "fünf und vierzig"."""
    tens, ones = divmod(number, 10)
    if tens < 2:
        return _GERMAN[number]
    return (f"{'ein' if ones == 1 else _GERMAN[ones]} und " if ones else "") + _GERMAN_TENS[tens - 2]


def number_lists(count: int, held_out: int) -> tuple[Dataset, Dataset]:
    """Generated pairs: lists of two to five English number words, and the German ones in the same or in reverse order.

    The first word of the source says which order. German puts the ones before the tens, so that a translation needs
    the words around each word and, in reverse, those at the other end of the list.

    Returns:
        `count` pairs to train on and `held_out` others to evaluate on, without a common source.
    """
    generator = random.Random(0)
    found: dict[str, str] = {}
    while len(found) < count + held_out:
        order = generator.choice(("forward", "backward"))
        numbers = [generator.randrange(100) for _ in range(generator.randint(2, 5))]
        target = numbers if order == "forward" else numbers[::-1]
        found[f"{order} {' , '.join(map(english, numbers))}"] = " , ".join(map(german, target))
    pairs = _pairs(found.items())
    return pairs.select(range(held_out, count + held_out)), pairs.select(range(held_out))
