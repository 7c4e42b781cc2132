"""Windows of text, masks, token losses, pairs of sentences, and the recipes mlm.py, clm.py and translation.py."""

import functools
import gzip
import json
import math

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import EvalPrediction

from hf_efficient_attn.io.reading import special_tokens
from recipes import clm, translation
from recipes.common import language
from recipes.common.data import text
from recipes.common.language import ModelArguments, TextArguments
from tiny_recipes import prose, refuses, train, write

KINDS = {True: language.MASKED, False: language.CAUSAL}


@functools.cache
def tokenizer_of(masked: bool):
    return language.train_tokenizer([prose(200, 0)], 300, KINDS[masked])


def test_documents_of_all_file_types(tmp_path, here):
    documents = [one for path in text.text_files([str(here / "corpus")]) for one in text.documents_of(path)]
    assert documents == [prose(100, 1), prose(50, 2), prose(5, 3)]
    notes = str(here / "corpus" / "notes.md")
    assert [path.name for path in text.text_files([notes, notes])] == ["notes.md"]
    lines = tmp_path / "lines.txt"
    lines.write_bytes("\ufeffone\r\ntwo\r\n\r\n \r\nthree\n".encode())
    assert list(text.documents_of(lines)) == ["one\ntwo\n\n \nthree\n"]
    rows = tmp_path / "rows.jsonl.gz"
    rows.write_bytes(gzip.compress(b'{"body": "first"}\n\n{"body": "  "}\n{"body": "second"}\n'))
    assert list(text.documents_of(rows, column="body")) == ["first", "second"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good \xff bad", "a.txt: not UTF-8 text .byte 5"),
        ("a.txt.gz", gzip.compress(b"text" * 99, mtime=0)[:-9], "a.txt.gz: damaged gzip file"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"body": "x", "id": 1}\n', r"line 1: no text in the field 'text' .fields: body, id.; give"),
        ("a.jsonl", b'{"text": 3}\n', "no text in the field 'text'"),
        ("empty.txt", b" \n", "is empty"),
        ("a.md", b"x", r"no \.txt, \.txt\.gz, \.jsonl, \.jsonl\.gz in this folder"),
    ],
)
def test_errors_name_the_file_and_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    refuses(message, TextArguments(text=[str(tmp_path)]).documents, evaluation=False)
    refuses(r"no such file or folder .give the id of a hub data set", text.text_files, [str(tmp_path / "nothing.txt")])


@pytest.mark.parametrize("drop_short", [False, True])
@pytest.mark.parametrize("special", [((), ()), ((1,), (2,))])
def test_a_window_holds_one_document(drop_short, special):
    """Tokens encode their document and position: 1000 * document + position."""
    lengths = [50, 3, 0, 1, 8, 17]
    documents = [1000 * (i + 1) + np.arange(n, dtype=np.int32) for i, n in enumerate(lengths)]
    rows = text.windows(documents, 10, special, drop_short=drop_short)
    room, found = 10 - sum(map(len, special)), {}
    for number, row in enumerate(rows):
        ids = row["input_ids"]
        assert len(ids) == row["length"] <= 10 and row["row"] == number
        assert (len(ids) == 10) or not drop_short
        if special[0]:
            assert (ids[0], ids[-1]) == (1, 2)
            ids = ids[1:-1]
        assert len(ids) >= 2 and len(set(ids // 1000)) == 1
        found.setdefault(int(ids[0] // 1000) - 1, []).extend((ids % 1000).tolist())
    for i, length in enumerate(lengths):
        rest = length % room
        assert found.get(i, []) == list(range(length - rest if drop_short or rest < 2 else length))


def test_impossible_windows_are_refused():
    documents = [np.arange(20, dtype=np.int32)]
    refuses(r"--block_size 3 has no room", text.windows, documents, 3, ((1,), (2,)))
    refuses("no window of 32 .* document has 20.; leave out --drop_short", text.windows, documents, 32, drop_short=True)
    refuses("no document has any token", text.tokenize, [""], tokenizer_of(False))


def test_splits_are_disjoint_and_complete():
    documents = [np.arange(n, dtype=np.int32) for n in (100, 40, 7)]
    kept, tails = text.split_tails(documents, 0.05)
    assert [len(tail) for tail in tails] == [5, 2, 0]
    assert [[*left, *right] for left, right in zip(kept, tails, strict=True)] == [list(ids) for ids in documents]


def test_collating_identifies_padding_by_position():
    """A token of the first window equals the padding token and keeps its label."""
    batch = text.collate([{"input_ids": np.array([5, 0, 0])}, {"input_ids": np.array([7])}], pad_token_id=0)
    assert batch["input_ids"].tolist() == [[5, 0, 0], [7, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[5, 0, 0], [7, -100, -100]]


def masked_rows(**options):
    tokenizer = tokenizer_of(True)
    prefix, suffix = special_tokens(tokenizer)
    assert (prefix, suffix) == ((tokenizer.cls_token_id,), (tokenizer.sep_token_id,))
    documents = text.tokenize([prose(60, 4)], tokenizer)
    return text.MaskingCollator(tokenizer, **options), text.windows(documents, 64, (prefix, suffix))


def test_masks_depend_on_seed_epoch_and_window_only():
    collator, rows = masked_rows()
    state = torch.get_rng_state()
    first = collator([rows[0], rows[3]])
    assert torch.equal(torch.get_rng_state(), state)
    again = collator([rows[3], rows[1], rows[0]])
    assert torch.equal(first["input_ids"][0], again["input_ids"][2])
    assert torch.equal(first["labels"][1], again["labels"][0])
    once = collator.mask_once(rows)
    collator.epoch.fill_(1)
    assert not torch.equal(first["labels"], collator([rows[0], rows[3]])["labels"])
    assert torch.equal(first["labels"], collator([once[0], once[3]])["labels"]), "fixed masks do not change"
    assert not torch.equal(first["labels"], masked_rows(seed=1)[0]([rows[0], rows[3]])["labels"])
    # Also in a worker that lives longer than an epoch.
    loader = torch.utils.data.DataLoader(list(rows), 9, collate_fn=collator, num_workers=1, persistent_workers=True)
    assert not torch.equal(*[next(iter(loader))["labels"] for epoch in (1, 2) if collator.epoch.fill_(epoch)])
    # The share of masked tokens.
    collator, rows = masked_rows(probability=0.3)
    batch = collator(list(rows))
    masked = batch["labels"] != text.IGNORED
    original = text.pad(rows["input_ids"], collator.pad_token_id)
    special = torch.isin(original, collator.special)
    assert not (masked & special).any() and torch.equal(batch["labels"][masked], original[masked])
    assert abs(float(masked.sum() / (~special).sum()) - 0.3) < 0.05
    refuses(r"no mask token, .*clm\.py", text.MaskingCollator, tokenizer_of(False))


def plain_rows(count=5, size=64):
    return text.windows([np.random.default_rng(0).integers(0, 1000, count * size).astype(np.int32)], size)


def test_passages_are_repeated_at_their_distance():
    found = clm.repeated_passages(plain_rows(), distances=[8, 24], passage=6, block_size=64)
    firsts = {}
    for distance, rows in found.items():
        assert len(rows) == 5
        for i, row in enumerate(rows):
            positions = np.flatnonzero(row["labels"] != text.IGNORED).reshape(2, 5)
            assert (positions[1] - positions[0] == distance).all() and (np.diff(positions) == 1).all()
            start, ids, original = positions[0, 0] - 1, row["input_ids"], plain_rows()[i]["input_ids"]
            assert len(ids) == 64 and (ids[start : start + 6] == ids[start + distance : start + distance + 6]).all()
            assert (row["labels"][positions] == ids[positions]).all()
            assert (ids[: start + distance] == original[: start + distance]).all()
            assert (ids[start + distance + 6 :] == original[start + distance : 58]).all()
            assert firsts.setdefault(i, start) == start >= 1
    assert len(set(firsts.values())) > 1
    for distance, size, words in ((60, 64, "fit into windows of 64"), (8, 128, "no evaluation window has 128 tokens")):
        refuses(words, clm.repeated_passages, plain_rows(), distances=[distance], passage=6, block_size=size)


def small_model(model_type, masked, *overrides, **options):
    sizes = ["num_hidden_layers=1", "num_attention_heads=2", "hidden_size=16", *overrides]
    kind = ModelArguments(model_type=model_type, tokenizer="given", config_overrides=sizes, **options)
    return language.load_model(kind, tokenizer_of(masked), KINDS[masked])


@pytest.mark.parametrize("masked", [False, True])
def test_token_losses_equal_the_loss_of_the_model(masked):
    model = small_model("bert" if masked else "gpt2", masked).eval()
    ids = torch.randint(0, 300, (3, 20), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(torch.rand(3, 20, generator=torch.Generator().manual_seed(1)) < 0.5, -100)
    with torch.no_grad():
        output = model(input_ids=ids, labels=labels)
    nats, correct = language.token_losses(output.logits, labels, causal=not masked)
    figures = language.loss_figures(EvalPrediction((nats.numpy(), correct.numpy()), labels.numpy()), causal=not masked)
    assert figures["loss"] == pytest.approx(output.loss.item(), rel=1e-5)
    assert figures["perplexity"] == pytest.approx(math.exp(output.loss.item()), rel=1e-4)
    guessed = output.logits.argmax(-1)
    pairs = (guessed, labels) if masked else (guessed[:, :-1], labels[:, 1:])
    labelled = pairs[1] != -100
    assert figures["accuracy"] == pytest.approx((pairs[0] == pairs[1])[labelled].float().mean().item())
    assert figures["tokens"] == int(labelled.sum())
    if masked:
        of_a_step = language.masked_loss(output, labels, 7).item()
        assert of_a_step == pytest.approx(output.loss.item() * int(labelled.sum()) / 7, rel=1e-5)


def prediction(nats, labels) -> EvalPrediction:
    return EvalPrediction((np.asarray(nats, np.float32), np.zeros_like(nats, np.float32)), np.asarray(labels))


def test_figures_by_position_and_of_repeated_passages():
    """The second window ends after three tokens."""
    found = clm.position_figures(prediction([[0, 1, 2, 3, 4], [0, 11, 12, 0, 0]], [[1] * 5, [1, 1, 1, -100, -100]]), 2)
    assert found["loss_at_0_1"] == 6 and found["loss_at_2_3"] == pytest.approx(17 / 3) and found["loss_at_4_4"] == 4
    assert found["loss"] == pytest.approx(33 / 6) and found["tokens"] == 6
    labels = [[-100, 1, 1, -100, 1, 1], [-100, -100, 1, 1, 1, 1]]
    found = clm.repeat_figures(prediction([[9, 1, 3, 9, 2, 2], [9, 9, 5, 7, 0, 4]], labels))
    assert found == {"first": 4.0, "second": 2.0}


@pytest.mark.parametrize("model_type", ["bert", "roberta", "gpt2", "llama"])
def test_block_size_and_positions(model_type):
    # The first position of RoBERTa is padding_idx + 1, and this tokenizer pads with 0.
    positions = f"max_position_embeddings={65 if model_type == 'roberta' else 64}"
    masked, words = model_type in ("bert", "roberta"), TextArguments(text=["x"])
    model = small_model(model_type, masked, positions)
    assert words.size_for(model) == 64
    words.block_size = 65
    way = "config_overrides max_position_embeddings=65" if model_type == "llama" else "extend_positions 65"
    refuses(f"exceeds the model's 64 positions: give --{way}", words.size_for, model)
    if model_type != "llama":
        assert words.size_for(small_model(model_type, masked, positions, extend_positions=128)) == 65
        assert tokenizer_of(masked).model_max_length == 128


@pytest.mark.parametrize("kind", [language.MASKED, language.CAUSAL, language.TRANSLATION])
def test_trained_tokenizer_is_lossless(kind):
    tokenizer = language.train_tokenizer([prose(200, 0)], 300, kind)
    words = "Captain Ahab, at 7 o'clock: \u00e9t\u00e9!"
    ids = tokenizer(words)["input_ids"]
    assert len(tokenizer) == 300 and tokenizer.decode(ids, skip_special_tokens=True).strip() == words
    if kind is language.TRANSLATION:  # it ends sentences
        assert ids[-1] == tokenizer.eos_token_id and tokenizer.eos_token_id not in ids[:-1]
    refuses("a byte-level vocabulary needs", language.train_tokenizer, [words], 100, kind)


def test_losses_by_position_and_of_passages_are_reported(here, tmp_path, monkeypatch):
    for name, value in (("BUCKET", 16), ("PASSAGE", 8)):
        monkeypatch.setattr(clm, name, value)
    more = "--attention", "linear", "--eval_positions", "--distances", 8, 24, "--max_steps", 1
    figures = train("clm", here, tmp_path / "out", *more)["metrics"]
    buckets = [figures[f"eval_loss_at_{i}_{i + 15}"] for i in (0, 16, 32)]
    assert min(buckets) <= figures["eval_loss"] <= max(buckets)
    assert figures["eval_perplexity"] == pytest.approx(math.exp(figures["eval_loss"]))
    assert figures["eval_repeat_8_first"] == pytest.approx(figures["eval_repeat_24_first"], rel=1e-6)
    assert figures["eval_repeat_8_second"] != figures["eval_repeat_24_second"]
    refuses("--distances 7 is less than the 8 tokens", clm.CausalArguments, distances=[9, 7], error=ValueError)


@pytest.mark.slow
def test_books_model_copies_passages(data, tmp_path):
    """The figures of the checkpoint's metrics.json. The passages differ, and so do their losses a little."""
    model = data / "models" / "gpt2-books"
    words = f"--model {model} --text {data / 'text' / 'books'} --drop_short --block_size 2048 --max_eval_windows 24"
    words += f" --max_train_windows 1 --eval_only --eval_positions --use_cpu --output_dir {tmp_path / 'out'}"
    figures = clm.run(words.split())["metrics"]
    stated = json.loads((model / "metrics.json").read_text())
    assert figures["eval_loss"] == pytest.approx(stated["val"], abs=1e-3)
    for distance in ("256", "768", "1536"):
        assert figures[f"eval_repeat_{distance}_first"] == pytest.approx(stated["repeat_first"][distance], abs=0.2)
        assert figures[f"eval_repeat_{distance}_second"] == pytest.approx(stated["repeat_second"][distance], abs=0.4)


# --- translation ---


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


def test_translations_are_compared_with_their_own_references(here, tmp_path, monkeypatch):
    """Of a model without errors, also where batches are grouped by length."""
    exact = lambda trainer, model, batch, *_, **__: (None, batch["labels"], batch["labels"])  # noqa: E731
    monkeypatch.setattr(translation.transformers.Seq2SeqTrainer, "prediction_step", exact)
    more = "--train_sampling_strategy", "group_by_length", "--generate", 200, "--max_target_length", 40
    assert train("translation", here, tmp_path, *more)["metrics"]["eval_exact_match"] == 1.0
