"""The command that counts what processes send."""

import pytest

import hf_efficient_attn as hea
from recipe_commands import read_csv, run
from recipes.benchmarks import sequence_parallel

HOW = sequence_parallel.Setting((1, 16, 16, 64), 8, False)


@pytest.mark.parametrize("length", [4096, 8192])
def test_summaries_do_not_grow_with_the_length(length):
    sent = {
        name: sequence_parallel.traffic(hea.method_info(name).config_class(), length, HOW).forward.total()
        for name in ("linear", "performer", "linformer", "nystromformer", "longformer")
    }
    assert sent == {
        "linear": 16 * (64 * (64 + 8) + 1) * 4,
        "performer": 16 * (256 * (64 + 8) + 1) * 4,
        "linformer": 16 * 256 * (64 + 64) * 4,
        "nystromformer": 16 * 64 * (2 * 64 + 64 + 1) * 4,
        "longformer": 16 * 2 * 256 * (64 + 64) * 2,
    }


@pytest.mark.parametrize("kv_heads", [16, 8, 4, 1])
def test_tokens_for_heads(kv_heads):
    how = HOW._replace(shape=(1, 16, kv_heads, 64))
    found = sequence_parallel.traffic(None, 65_536, how)
    # Fewer key heads than processes are sent in copies, one for each process.
    assert found.forward.total() == found.backward.total() == 65_536 // 8 * (2 * 16 + 2 * max(8, kv_heads)) * 64 * 2
    assert found.calls == 2


def test_commands(tmp_path):
    path = tmp_path / "sent.csv"
    assert run(sequence_parallel, "--length", 8192, "--causal", "--csv", path) == 0
    rows = read_csv(path)
    assert [row["method"] for row in rows] == ["linear", "longformer", "performer", "tokens for heads"]
