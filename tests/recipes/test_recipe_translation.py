"""Pairs of sentences, the tokenizer and the scores of recipes/translation.py, and the recipe itself."""

import gzip

import pytest
from datasets import Dataset

from recipes import translation
from recipes.common import language_models
from tiny_recipes import train, write


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
    (tmp_path / "a.en").write_text("one\ntwo\n\nfour\n", encoding="utf-8")
    with gzip.open(tmp_path / "a.de.gz", "wt", encoding="utf-8") as file:
        file.write("eins\nzwei\ndrei\n vier")
    given = [str(tmp_path / "a.en")], [str(tmp_path / "a.de.gz")]
    assert sides(translation.pairs_of_files(*given)) == [("one", "eins"), ("two", "zwei"), ("four", "vier")]
    (tmp_path / "b.de").write_text("eins\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"has 4 lines and .* has 1"):
        translation.pairs_of_files(given[0], [str(tmp_path / "b.de")])
    with pytest.raises(ValueError, match="no such file"):
        translation.pairs_of_files(given[0], [str(tmp_path / "c.de")])


@pytest.mark.parametrize("form", ["translation", "columns"])
def test_hub_pairs(form, monkeypatch):
    rows = [{"en": "one", "de": "eins"}, {"en": "two", "de": None}]
    data = Dataset.from_list([{"translation": row} for row in rows] if form == "translation" else rows)
    monkeypatch.setattr(translation, "load_dataset", lambda *args, **kwargs: data)
    assert sides(translation.pairs_of_hub("x/y", None, "train", ("en", "de"))) == [("one", "eins")]
    with pytest.raises(ValueError, match=r"no en and fr \(there are de, en\)"):
        translation.pairs_of_hub("x/y", None, "train", ("en", "fr"))


def test_tokenizer_ends_sentences():
    pairs, _ = translation.number_lists(200, 1)
    tokenizer = language_models.train_tokenizer([*pairs["source"], *pairs["target"]], 300, language_models.TRANSLATION)
    ids = tokenizer("zwei und dreißig , fünf")["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id and tokenizer.eos_token_id not in ids[:-1]
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "zwei und dreißig , fünf"


def test_scores():
    found = translation.scores(["drei und vierzig , elf", "neun"], ["drei und vierzig , elf", "zehn"])
    assert found["exact_match"] == 0.5 and 0 < found["bleu"] < 100 and 0 < found["chrf"] < 100
    assert translation.scores(["ein und zwanzig"], ["ein und zwanzig"])["chrf"] == pytest.approx(100)


def test_the_preset_trains_the_encoder_in_two_stages(here, tmp_path):
    pairs, _ = translation.number_lists(40, 1)
    files = []
    for side in ("source", "target"):
        write(tmp_path / side, "\n".join(pairs[side]))
        files += [f"--{side}", tmp_path / side]
    preset = "--generate 0 --eval_share 0.2 --preset nmt --variant flurka_linear --set projection_dim=4 share=none"
    report = train("translation", here, tmp_path / "out", *preset.split(), *files)
    switches = [(switch["from"], switch["to"]) for switch in report["switches"]]
    assert switches[-1] == ("linear", "flurka_linear") and report["efficient_attention"]["layers"] == ["encoder"]
    assert report["rows"] == {"train": 32, "eval": 8}
    assert set(report["baselines"]) == {"copy_bleu", "copy_chrf", "copy_exact_match"}
