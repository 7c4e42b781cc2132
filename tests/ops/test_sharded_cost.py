"""The command that counts what processes send."""

import csv

import pytest
import typer.testing

import hf_efficient_attn as hea
from recipes.benchmarks import sequence_parallel

HOW = sequence_parallel.Setting((1, 16, 16, 64), 8, False)


def test_summaries_do_not_grow_with_the_length():
    sent = {
        name: sequence_parallel.traffic(hea.method_info(name).config_class(), 8192, HOW)[0].total
        for name in ("linear", "performer", "linformer", "nystromformer", "longformer")
    }
    assert sent == {
        "linear": 16 * (64 * (64 + 8) + 1) * 4,
        "performer": 16 * (256 * (64 + 8) + 1) * 4,
        "linformer": 16 * 256 * (64 + 64) * 4,
        "nystromformer": 16 * 64 * (2 * 64 + 64 + 1) * 4,
        "longformer": 16 * 2 * 256 * (64 + 64) * 2,
    }


@pytest.mark.parametrize("kv_heads", [8, 1])
def test_tokens_for_heads(kv_heads):
    how = HOW._replace(shape=(1, 16, kv_heads, 64))
    forward, backward = sequence_parallel.traffic(None, 8192, how)
    # Fewer key heads than processes are sent in copies, one for each process.
    assert forward.total == backward.total == 8192 // 8 * (2 * 16 + 2 * max(8, kv_heads)) * 64 * 2
    assert forward.calls == 2


def test_commands(tmp_path):
    run = typer.testing.CliRunner().invoke
    done = run(sequence_parallel.app, ["--length", "8192", "--causal", "--csv", str(tmp_path / "sent.csv")])
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader((tmp_path / "sent.csv").open()))
    assert [row["method"] for row in rows] == [
        "linear", "longformer", "performer", "tokens for heads"
    ]  # fmt: skip
