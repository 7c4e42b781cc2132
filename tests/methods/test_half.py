"""The table of errors in half precision."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import hf_efficient_attn as hea
from instances import inputs
from recipe_commands import read_csv, run
from recipes.benchmarks import error as recipe
from recipes.common.inputs import Activation


@pytest.mark.parametrize("causal", [False, True])
def test_errors_of_a_method(causal):
    tensors, options = inputs(1, 2, 96, 16, dtype=torch.bfloat16), {"is_causal": causal, "scale": 0.5}
    found = recipe.half_errors(hea.LongformerConfig(), Activation(0, *tensors, 0.5), 16, causal)
    given, config = (tensors, [x.double() for x in tensors]), hea.LongformerConfig().with_budget(16)
    half, truth = (scaled_dot_product_attention(*x, **options) for x in given)
    ours, reference = (hea.attention(config, *x, **options) for x in given)
    pairs = {
        "exact": (half, truth),
        "at": (ours, reference),
        "approximation": (reference, truth),
        "in_all": (ours, truth),
    }
    for name, (out, expected) in pairs.items():
        errors = (out.double() - expected).norm(dim=(2, 3)) / expected.norm(dim=(2, 3))
        assert found[name] == pytest.approx(errors.mean().item())
    assert 0 < found["within"] <= 3 * found["exact"] and 0 < found["at"] < 0.01 < found["approximation"]


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
