"""Pairs of sentences, the tokenizer and the scores of recipes/translation.py, and the recipe itself."""

import gzip
import json

import pytest
from datasets import Dataset

from recipes import translation
from recipes.common import language_models

TINY = [
    "d_model=16", "encoder_layers=1", "decoder_layers=1", "encoder_attention_heads=2", "decoder_attention_heads=2",
    "encoder_ffn_dim=16", "decoder_ffn_dim=16", "max_position_embeddings=48",
]  # fmt: skip


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


def options_of(out, *more) -> list[str]:
    return [
        *("--generate", "60", "--eval_share", "0.1", "--model_type", "marian", "--train_tokenizer", "300"),
        *("--config_overrides", *TINY, "--max_source_length", "48", "--max_target_length", "12"),
        *("--max_steps", "4", "--per_device_train_batch_size", "4", "--use_cpu", "True", "--output_dir", str(out)),
        *("--logging_steps", "1", "--eval_strategy", "no", "--save_strategy", "no", *more),
    ]


def test_run_trains_and_evaluates_a_saved_model(tmp_path, capsys):
    out = tmp_path / "out"
    tables = "--set", "projection_dim=4", "share=none"
    report = translation.run(options_of(out, "--attention", "flurka_linear", *tables))
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["efficient_attention"]["layers"] == ["encoder"]
    assert metrics["efficient_attention"]["method"] == "flurka_linear"
    assert metrics["steps"] == 4 and metrics["rows"] == {"train": 60, "eval": 6}
    assert set(metrics["baselines"]) == {"copy_bleu", "copy_chrf", "copy_exact_match"}
    assert 0 <= metrics["metrics"]["eval_bleu"] <= 100 and 0 <= metrics["metrics"]["eval_exact_match"] <= 1
    assert (out / "learning_curve.png").stat().st_size > 1000 and "eval_chrf" in capsys.readouterr().out
    saved = options_of(tmp_path / "again", "--eval_only", "True", "--per_device_eval_batch_size", "4")
    start, end = saved.index("--model_type"), saved.index("--max_source_length")
    again = translation.run([*saved[:start], "--model", str(out), *saved[end:]])
    for name in ("eval_bleu", "eval_chrf"):
        assert again["metrics"][name] == pytest.approx(report["metrics"][name], rel=1e-4)
    assert again["efficient_attention"]["layers"] == ["encoder"]


def test_the_preset_trains_the_encoder_in_two_stages(tmp_path):
    source, target = tmp_path / "a.txt", tmp_path / "b.txt"
    pairs, _ = translation.number_lists(40, 1)
    source.write_text("\n".join(pairs["source"]), encoding="utf-8")
    target.write_text("\n".join(pairs["target"]), encoding="utf-8")
    files = "--source", str(source), "--target", str(target)
    options = options_of(
        tmp_path / "out", "--preset", "nmt", "--variant", "flurka_linear", "--set", "projection_dim=4", "share=none"
    )
    report = translation.run([*files, *options[2:], "--eval_share", "0.2"])
    switches = [(switch["from"], switch["to"]) for switch in report["switches"]]
    assert switches[-1] == ("linear", "flurka_linear") and report["efficient_attention"]["layers"] == ["encoder"]
    assert report["rows"] == {"train": 32, "eval": 8}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--attention", "nystromformer", "--layers", "decoder"], "has no causal form"),
        (["--attention", "linear", "--layers", "encodr"], "'encoder'"),
        (["--max_source_length", "64"], "exceeds the model's 48 positions"),
        (["--model_type", "bert"], "no encoder-decoder"),
        (["--source", "x"], "give the pairs with"),
        (["--eval_share", "1.5"], "between 0 and 1"),
        (["--config_overrides", "n_layer=2"], "config entry of marian"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused_before_the_first_step(more, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        translation.run(options_of(tmp_path / "out", *more))
