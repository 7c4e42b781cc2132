"""The table of errors in half precision."""

import pytest
import torch

import hf_efficient_attn as hea
from instances import inputs
from recipe_commands import read_csv, run
from recipes.benchmarks import error as recipe
from recipes.common.inputs import Activation


def activation(dtype=torch.bfloat16, length=96, scale=None):
    return Activation(0, *inputs(1, 2, length, 16, dtype=dtype), scale)


@pytest.mark.parametrize("causal", [False, True])
def test_errors_of_a_method(causal):
    one = activation(scale=0.5)
    found = recipe.half_errors(hea.LongformerConfig(), one, 16, causal)
    tensors, doubled = one[1:4], [x.double() for x in one[1:4]]
    truth = torch.nn.functional.scaled_dot_product_attention(*doubled, is_causal=causal, scale=0.5)
    config = hea.LongformerConfig().with_budget(16)
    ours, reference = (hea.attention(config, *x, is_causal=causal, scale=0.5) for x in (tensors, doubled))

    def error(out, expected):
        difference = (out.double() - expected).norm(dim=(2, 3)) / expected.norm(dim=(2, 3))
        return pytest.approx(difference.mean().item())

    exact = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal, scale=0.5)
    assert found["exact"] == error(exact, truth)
    assert found["at"] == error(ours, reference)
    assert found["approximation"] == error(reference, truth)
    assert found["in_all"] == error(ours, truth)
    assert 0 < found["within"] <= 3 * found["exact"]
    assert 0 < found["at"] < 0.01 < found["approximation"]


@pytest.mark.parametrize(("within", "reached"), [(0.0029, True), (0.0031, False)])
def test_verdict(within, reached):
    row = {"method": "kdeformer", "dtype": "bfloat16", "exact": 0.001, "within": within}
    assert [verdict.reached for verdict in recipe.half_verdicts([row])] == [reached]


def test_command(tmp_path, capsys):
    path = tmp_path / "half.csv"
    arguments = ["--tokens", "64", "--budget", "16", "--inputs", "2", "--csv", str(path), "--check"]
    methods = ["--method", "nearfar,linear,nystromformer:pinv=solve"]
    assert run(recipe, *arguments, *methods, "--half", "bfloat16,float16") == 0
    out = capsys.readouterr().out
    rows = read_csv(path)
    names = ["nearfar", "linear", "nystromformer (pinv=solve)"]
    assert [(row["dtype"], row["method"]) for row in rows] == [(d, n) for d in ("bfloat16", "float16") for n in names]
    bfloat16, float16 = (float(row["exact"]) for row in rows[::3])
    assert float16 < bfloat16 / 4
    assert [bool(row["within"]) for row in rows[:3]] == [True, False, True]
    assert "random: 64 tokens, 1 layers, 8 heads of 64, 2 inputs; budget 16" in out
