"""The recipes that count auto's heads above the bound, measure what its decisions cost, and compare its speed."""

import csv

import pytest
import torch

import hf_efficient_attn as hea
from hf_efficient_attn import cli
from hf_efficient_attn.evaluation.model_error import LayerError, ModelError
from hf_efficient_attn.evaluation.timing import Timing
from recipes.benchmarks import attention
from recipes.benchmarks import error_bound as recipe
from recipes.common.memory import Case


def run(*arguments):
    return cli.run(recipe.app, ["--auto", *map(str, arguments)], "error_bound")


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
    assert run("--budget", "64") == 2
    assert "leave out --rows, --budget and --method" in capsys.readouterr().err


@pytest.mark.parametrize(("auto", "unbounded", "status"), [(1.04, 0.51, 0), (1.06, 0.5, 1), (1.0, 0.54, 1)])
def test_auto_may_be_slower_by_a_twentieth(auto, unbounded, status, monkeypatch, capsys):
    """Than exact attention, and without a bound than nearfar, which takes half of its time here."""
    cases = []

    def measure(configs, case, rounds, bar, layers=()):
        cases.append((case.causal, case.source, len(layers)))
        times = {"sdpa": 1.0, "nearfar": 0.5, "auto": auto, attention.UNBOUNDED: unbounded}
        assert list(configs) == list(times)[1:]
        return {name: Timing(1.0, 1.0, 1.0 / time, 1.0, 1.0) for name, time in times.items()}

    monkeypatch.setattr(attention, "measure", measure)
    monkeypatch.setattr(attention, "_layers", lambda case, data: [()])
    arguments = ["--auto", "--dtype", "bfloat16", "--length", "40", "--check"]
    assert cli.run(attention.app, arguments, "attention") == status
    assert cases == [(False, "bert", 0), (True, "gpt2", 0), (False, "minilm", 1)]
    assert f"| minilm | 40 | auto | 1e+03 | {auto:.2f}" in " ".join(capsys.readouterr().out.split())


def test_the_speed_is_measured_on_real_inputs(data):
    case = Case(64, num_heads=12, head_dim=32, source="minilm")
    layers = attention._layers(case, data)
    assert len(layers) == 3
    assert layers[0][0].shape == (1, 12, 64, 32)
    configs = cli.parse_methods(attention.AUTO)
    with torch.no_grad():
        found = attention.measure(configs, case, 1, layers=layers)
    assert list(found) == ["sdpa", "nearfar", "auto", attention.UNBOUNDED]
    assert all(timing.seconds > 0 for timing in found.values())
