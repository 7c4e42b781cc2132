"""The recipes that count auto's heads above the bound, measure what its decisions cost, and compare its speed."""

import csv

import pytest
import torch

import hf_efficient_attn as hea
from hf_efficient_attn import cli
from hf_efficient_attn.evaluation.model_error import LayerError, ModelError
from hf_efficient_attn.evaluation.timing import Timing
from recipes.benchmarks import auto as recipe
from recipes.benchmarks import never_slower


def run(*arguments):
    return cli.run(recipe.app, list(map(str, arguments)), "auto")


@pytest.fixture
def model(monkeypatch):
    """A model of one layer with four heads: one exact, two within the bound of .1, one above it."""
    errors = torch.tensor([[1e-6, 0.04, 0.1, 0.2]], dtype=torch.float64)
    layer = LayerError(0, "layer", "auto", 60, errors, errors)
    monkeypatch.setattr(recipe, "open_source", lambda *arguments: (torch.nn.Identity(), lambda tokens: iter([{}])))
    monkeypatch.setattr(hea, "convert", lambda model, config: model)
    monkeypatch.setattr(hea, "attention_error", lambda model, batch, *, num_rows: ModelError((layer,), num_rows))
    return layer


def test_heads_above_the_bound_are_counted(model, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(recipe, "cost_of", lambda tokens, head_dim: (0.01, 0.01))
    file = tmp_path / "heads.csv"
    assert run("--data", tmp_path, "--source", "books", "--tokens", "60", "--csv", file, "--check") == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "| books | 60 | 4 | 75 % | 1 | 33.33 % |" in out
    assert "2.0 %" in out
    with file.open() as opened:
        (row,) = csv.DictReader(opened)
    assert (row["heads"], row["approximated"], row["missed"]) == ("4", "3", "1")
    # With another bound no head is missed.
    assert run("--data", tmp_path, "--source", "books", "--tokens", "60", "--set", "max_error=0.3", "--check") == 0


def test_the_cost_is_measured():
    copies, rows = recipe.cost_of(1024, 32)
    assert 0.0 < copies < 10.0
    assert 0.0 < rows < 10.0


def test_what_is_refused(capsys):
    assert run("--source", "gpt2") == 2
    assert "not one of books, xquad, photographs" in capsys.readouterr().err


@pytest.mark.parametrize(("auto", "unbounded", "status"), [(1.04, 0.51, 0), (1.06, 0.5, 1), (1.0, 0.54, 1)])
def test_auto_may_be_slower_by_a_twentieth(auto, unbounded, status, monkeypatch, capsys):
    """Than exact attention, and without a bound than nearfar, which takes half of its time here."""
    times = iter([0.5, auto, unbounded])

    def compare(exact, work, rounds):
        exact(), work()
        return Timing(1.0, 1.0, 1.0 / next(times), 1.0, 1.0)

    monkeypatch.setattr(never_slower, "compare", compare)
    arguments = ["--case", "gpt2", "--dtype", "bfloat16", "--tokens", "40", "--check"]
    assert cli.run(never_slower.app, arguments, "never_slower") == status
    assert "| gpt2 | bfloat16 | 40" in " ".join(capsys.readouterr().out.split())


def test_the_speed_is_measured_on_real_inputs(data):
    layers = never_slower.layers_of("minilm", 64, data)
    assert len(layers) == 3
    assert layers[0][0].shape == (1, 12, 64, 32)
    row = never_slower.measure("minilm", layers, "float32", 1)
    assert all(row[name] > 0 for name in ("nearfar", "auto", never_slower.UNBOUNDED, "exact, ms"))


def test_unknown_cases_are_refused(capsys):
    assert cli.run(never_slower.app, ["--case", "t5"], "never_slower") == 2
    assert "--case 't5' is not one of bert, gpt2, minilm" in capsys.readouterr().err
