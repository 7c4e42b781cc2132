"""`hf-efficient-attn demo` on a tiny model in place of MiniLM: what it prints, and what an interruption leaves."""

import json

import pytest

from hf_efficient_attn import cli
from hf_efficient_attn.checkpoint.loading import quiet
from hf_efficient_attn.evaluation import comparison, demo
from test_benchmark_command import NOTHING_COMPLETE, _short, tokenizer_for  # noqa: F401 (a fixture)
from tiny_models import tiny_model

METHODS = ("--method", "longformer:window_size=4,linear")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    with quiet():
        tiny_model("bert").save_pretrained(folder)
        tokenizer_for("bert").save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _tiny(folder, monkeypatch):
    monkeypatch.setattr(demo, "minilm_folder", lambda: folder)


def run(capsys, *arguments, status=0):
    capsys.readouterr()
    assert cli.run(cli.app, ["demo", *METHODS, *arguments], "hf-efficient-attn") == status
    return capsys.readouterr()


def cells(out):
    """The rows of all tables, without their headers."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("|")]
    return [row for row in rows if not row[0].startswith("-") and row[0] not in ("tokens", "attention")]


def test_tables(capsys):
    out, err = run(capsys, "--length", "512,600")
    assert err == ""
    labels = ["sdpa", "longformer (window_size=4)", "linear"]
    rows = cells(out)
    labels.append("sdpa, chunks of 128")
    assert [row[:2] for row in rows] == [[length, label] for length in ("512", "600") for label in labels]
    before, _, after = out.partition("| tokens")
    assert before.endswith(", cpu, float32\n\n")
    assert "MiB" not in out
    assert "split it" in after and "cannot be split" in after


def test_an_interruption_before_the_first_row(tmp_path, capsys, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison.LengthComparison, "measure", interrupt)
    assert run(capsys, "--length", "512", "--plot", tmp_path / "demo.png", status=130).err == NOTHING_COMPLETE
    assert not list(tmp_path.iterdir())


def test_a_limit_of_time(capsys):
    result = json.loads(run(capsys, "--length", "512", "--minutes", "0.000001", "--json").out)
    assert [row["attention"] for row in result["measurements"]] == ["sdpa"]
    assert result["left_out"][-1] == "sdpa, chunks of 128 at 512 tokens"
