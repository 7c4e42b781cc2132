"""Pairs of sentences, the tokenizer and the scores of recipes/translation.py, and the recipe itself."""

import gzip

import pytest
from datasets import Dataset

from recipes import translation
from tiny_recipes import refuses, write


def test_number_words():
    found = [(translation.english(number), translation.german(number)) for number in (0, 11, 21, 37, 80)]
    assert found[:2] == [("zero", "null"), ("eleven", "elf")]
    assert found[2:4] == [("twenty one", "ein und zwanzig"), ("thirty seven", "sieben und dreißig")]
    assert found[4] == ("eighty", "achtzig")


def sides(pairs) -> list[tuple[str, str]]:
    return list(zip(pairs["source"], pairs["target"], strict=True))


def test_generated_pairs_are_right_and_disjoint():
    numbers = {translation.english(n): translation.german(n) for n in range(100)}
    train, held = translation.number_lists(300, 50)
    assert (len(train), len(held)) == (300, 50) and not set(train["source"]) & set(held["source"])
    for source, target in sides(train):
        order, _, rest = source.partition(" ")
        expected = [numbers[words] for words in rest.split(" , ")]
        assert target.split(" , ") == (expected if order == "forward" else expected[::-1])
    assert {source.split()[0] for source in train["source"]} == {"forward", "backward"}
    # The pairs of the documented results.
    expected = ("backward five , thirty three , sixty five", "ein und fünfzig , zwei und sechzig , fünf und sechzig")
    assert all(side.startswith(start) for side, start in zip(sides(held)[0], expected, strict=True))


def test_files_of_pairs(tmp_path):
    write(tmp_path / "a.en", "one\ntwo\n\nfour\n")
    write(tmp_path / "a.de.gz", gzip.compress(b"eins\nzwei\ndrei\n vier"))
    write(tmp_path / "b.de", "eins\n")
    source, target = [str(tmp_path / "a.en")], [str(tmp_path / "a.de.gz")]
    pairs = [("one", "eins"), ("two", "zwei"), ("four", "vier")]
    assert sides(translation.pairs_of_files(source, target)) == pairs
    for name, message in (("b.de", r"has 4 lines and .* has 1"), ("c.de", "no such file")):
        refuses(message, translation.pairs_of_files, source, [str(tmp_path / name)])
    options = translation.TranslationArguments(source=source, target=target, eval_share=0.3)
    train, held = map(sides, translation.load_pairs(options))
    assert (len(train), len(held)) == (2, 1) and sorted(train + held) == sorted(pairs)


@pytest.mark.parametrize("form", ["translation", "columns"])
def test_hub_pairs(form, monkeypatch):
    rows = [{"en": "one", "de": "eins"}, {"en": "two", "de": None}]
    data = Dataset.from_list([{"translation": row} for row in rows] if form == "translation" else rows)
    monkeypatch.setattr(translation, "load_dataset", lambda *args, **kwargs: data)
    assert sides(translation.pairs_of_hub("x/y", None, "train", ("en", "de"))) == [("one", "eins")]
    refuses(r"no en and fr \(there are de, en\)", translation.pairs_of_hub, "x/y", None, "train", ("en", "fr"))


def test_scores():
    found = translation.scores(["drei und vierzig , elf", "neun"], ["drei und vierzig , elf", "zehn"])
    assert found["exact_match"] == 0.5 and 0 < found["bleu"] < 100 and 0 < found["chrf"] < 100
    assert translation.scores(["ein und zwanzig"], ["ein und zwanzig"])["chrf"] == pytest.approx(100)
