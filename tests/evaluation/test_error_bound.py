"""The recipe that measures how often the bound of `hea.attention_error` fails."""

import csv

import pytest
import torch

import hf_efficient_attn as hea
from hf_efficient_attn import cli
from hf_efficient_attn.evaluation.model_error import LayerError, ModelError
from recipes.benchmarks import error_bound as recipe


def run(*arguments):
    return cli.run(recipe.app, list(map(str, arguments)), "error_bound")


def test_misses_are_counted(monkeypatch, capsys):
    """Two layers with two heads each; the third has no error and is left out."""
    exact = [[[0.2, 0.4]], [[0.1, 0.1]], [[0.0, 0.0]]]
    bounds = {8: [[[0.3, 0.39]], [[0.05, 0.2]], [[0.0, 0.0]]], 16: [[[0.1, 0.3]], [[0.2, 0.2]], [[0.0, 0.0]]]}

    def layers(values):
        tensors = [torch.tensor(value, dtype=torch.float64) for value in values]
        return tuple(LayerError(i, f"{i}", "kdeformer", 60, x, x) for i, x in enumerate(tensors))

    def attention_error(model, batch, *, num_rows, seed=0):
        return ModelError(layers(exact if num_rows is None else bounds[num_rows]), num_rows)

    monkeypatch.setattr(hea, "attention_error", attention_error)
    found = recipe.compare(torch.nn.Identity(), {}, [8, 16], 1)
    assert [(row["rows"], row["layer"], row["missed"], row["heads_missed"]) for row in found] == [
        (8, "0", False, 1),
        (8, "1", False, 1),
        (16, "0", True, 2),
        (16, "1", False, 0),
    ]
    (verdict,) = recipe.show_bounds([{**row, "rows": 8, "source": "books", "tokens": 60} for row in found])
    assert verdict.figure == 0.25
    # One of four layers, half of the heads, and the median of bound / error.
    assert "| 4      | 25.00% | 50.00%       | 1.20" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_the_command_on_gpt2(data, tmp_path, capsys):
    file = tmp_path / "bounds.csv"
    few = ("--tokens", 160, "--budget", 32, "--rows", "32,64", "--seeds", 1, "--method", "kdeformer,nystromformer")
    assert run("--data", data, "--source", "gpt2", *few, "--csv", file, "--check") == 0
    out = capsys.readouterr().out
    assert "| gpt2   | 160    | 32   | 24     |" in out  # six books, four layers, and only the causal method
    assert "64 rows" in out
    with file.open() as opened:
        rows = list(csv.DictReader(opened))
    assert len(rows) == 48
    assert {row["method"] for row in rows} == {"kdeformer, 32"}


def test_what_is_refused(data, capsys):
    assert run("--source", "newspapers") == 2
    assert "not one of books, xquad" in capsys.readouterr().err
    assert run("--data", data, "--source", "gpt2", "--tokens", 30, "--method", "kdeformer") == 2
    assert "every method is exact at these lengths" in capsys.readouterr().err
