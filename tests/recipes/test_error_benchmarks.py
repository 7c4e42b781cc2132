"""The benchmarks of errors on real inputs, and of error against speed."""

import gzip

import pytest
import torch
from transformers import BertConfig, BertModel

import hf_efficient_attn as hea
from hf_efficient_attn import cli
from hf_efficient_attn.evaluation.model_error import LayerError, ModelError
from recipe_commands import run
from recipes.benchmarks import error, error_bound
from recipes.common import inputs as real_inputs
from tiny_recipes import write


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


@pytest.fixture
def book(tmp_path, minilm):
    """A data folder with one book."""
    words = "It was the best of times, it was the worst of times, it was the age of wisdom and of foolishness. " * 600
    write(tmp_path / "text" / "books" / "book.txt.gz", gzip.compress(words.encode()))
    return tmp_path


def test_error_command_on_minilm(book, table):
    rows, out = table(error, "--method longformer --budget 64,128 --seeds 1 --threads 1 --data", book)
    better, worse = sorted(rows, key=lambda row: float(row["error"]))
    assert (better["budget"], worse["budget"]) == ("128", "64")
    assert "minilm: 512 tokens, 6 layers, 12 heads of 32, 1 inputs" in out
    assert "| longformer | 64     |" in out and "| deviation |" in out
    # Longer text is concatenated windows. The last token of the short text is [SEP].
    short, longer = real_inputs.minilm_activations(book, 1), real_inputs.minilm_activations(book, 1, length=700)
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
    methods = ("linear", "kdeformer", "kdeformer:near_field=window", "nystromformer")
    monkeypatch.setattr(error, "METHODS", methods)
    # The causal form has a single near field.
    for causal, counts in (("", [1, 2, 1]), ("--causal", [1, 1, 0])):
        assert run(error, "--budget 8 --seeds 1", causal) == 0
        out = capsys.readouterr().out
        assert [out.count(f"\n| {name} ") for name in ("linear", "kdeformer", "nystromformer")] == counts
        assert ("mean of the values so far" in out) == bool(causal) and " * |" in out


# --- auto's bound ---


def test_heads_of_auto_above_the_bound_are_counted(monkeypatch, tmp_path, table):
    """A model of one layer with four heads: one exact, two within the bound of .1, one above it."""
    errors = torch.tensor([[1e-6, 0.04, 0.1, 0.2]], dtype=torch.float64)
    layer = LayerError(0, "layer", "auto", 60, errors, errors)
    monkeypatch.setattr(error_bound, "open_source", lambda *_: (torch.nn.Identity(), lambda tokens: iter([{}])))
    monkeypatch.setattr(hea, "convert", lambda model, config: model)
    monkeypatch.setattr(hea, "attention_error", lambda model, batch, *, num_rows: ModelError((layer,), num_rows))
    words = "--auto --source books --tokens 60 --check --data"
    (row,), out = table(error_bound, words, tmp_path, status=1)
    assert "| books | 60 | 4 | 75% | 1 | 33.33% |" in " ".join(out.split())
    assert (row["heads"], row["approximated"], row["missed"]) == ("4", "3", "1")
    errors[0, 3] = 0.1
    assert run(error_bound, words, tmp_path) == 0


# --- error against speed ---


def test_the_frontier():
    rows = [
        {"method": name, "ratio": ratio, "error": error}
        for name, ratio, error in (("a", 2, 0.1), ("b", 4, 0.3), ("c", 3, 0.3), ("d", 8, 0.5), ("e", 2, 0.2))
    ]
    assert [row["method"] for row in error.frontier(rows)] == ["d", "b", "a"]


def test_the_tradeoff_is_measured_and_drawn(activations, tmp_path, table):
    picture = tmp_path / "tradeoff.png"
    words = "--method longformer,linear --budget 4,16 --seeds 1 --rounds 1 --threads 1 --tradeoff"
    rows, printed = table(error, words, picture)
    names = [(row["method"], row["budget"]) for row in rows]
    assert names == [("longformer", "4"), ("linear", "4"), ("longformer", "16"), ("linear", "16")]
    assert float(rows[0]["error"]) > float(rows[2]["error"]) and all(float(row["ratio"]) > 0 for row in rows)
    assert "on the frontier" in printed and "2 heads of 8" in printed, "the first head of each of two layers"
    assert picture.stat().st_size > 10_000
