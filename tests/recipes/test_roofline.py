"""The model of the time on a GPU: every method on the branches of a GPU, the clocks, and the command."""

import json

import pytest
import torch

import hf_efficient_attn as hea
from helpers.commands import run
from hf_efficient_attn.methods import make_config, method_info
from recipes.benchmarks import roofline
from recipes.common import gpu_model
from recipes.common.gpu_model import H100

METHODS = [name for name in hea.available_methods() if name not in ("auto", "flurka_eva")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_on_the_branches_of_a_gpu(method, causal, backward, dtype):
    if causal and not method_info(method).causal:
        pytest.skip("has no causal form")
    call = roofline.make_call(make_config(method), 3000, dtype, causal=causal, backward=backward)
    row, recorder = roofline.predict(call, H100)
    assert row["launches"] == len(recorder.operations) >= 1
    # At least the inputs are read and the output is written.
    assert row["gigabytes"] * 1e9 >= 4 * 16 * 3000 * 64 * (4 if dtype == "float32" else 2)
    # Such a call can be captured in a CUDA graph.
    assert causal or method == "approx_kmv" or row["syncs"] == 0
    host = H100.call + row["launches"] * H100.op
    assert row["ms"] > 0 and (row["bound"] != "host" or row["ms"] > 900 * host)


def test_exact_attention_takes_the_time_that_was_measured():
    for length, measured in {16384: 2.25, 65536: 37.1, 131072: 147.0}.items():
        forms = ({"causal": x, "backward": y} for x, y in ((False, False), (True, False), (False, True)))
        calls = (roofline.make_call(None, length, "bfloat16", **form) for form in forms)
        ms, causal_ms, training_ms = (roofline.predict(call, H100)[0]["ms"] for call in calls)
        assert abs(ms / measured - 1.0) < 0.05
        assert abs(causal_ms / ms - 0.5) < 0.1 and 3.0 < training_ms / ms < 5.0


def test_the_time_is_that_of_two_clocks():
    small, large = (torch.empty(n, device="meta") for n in (8, 1 << 28))
    machine = H100._replace(call=0.0, view=0.0)

    def seconds(call):
        return gpu_model.simulate(call, machine)[0]

    traffic = 2 * large.nbytes / machine.bandwidth
    assert seconds(lambda: [small + 1.0 for _ in range(50)]) == pytest.approx(50 * machine.op)
    assert seconds(lambda: large + 1.0) == pytest.approx(traffic)
    # The device works while the host issues the next operations, but not while the host waits for a number.
    found = seconds(lambda: [large + 1.0, *(small + 1.0 for _ in range(9))])
    assert found == pytest.approx(traffic + 9 * machine.kernel)
    waits = [large + 1.0, small]
    assert seconds(lambda: [large + 1.0, waits[1][0].item()]) == pytest.approx(traffic + machine.sync + machine.op)


def test_the_command_writes_what_it_predicts(tmp_path, capsys):
    file = tmp_path / "gpu.json"
    words = "--methods linear,linformer --lengths 512,4096 --host fast --top 2 --json"
    assert run(roofline, words, file) == 0
    rows = json.loads(file.read_text())
    found = [(row["method"], row["causal"], row["tokens"]) for row in rows]
    forms = [("linear", False), ("linear", True), ("linformer", False)]
    assert found == [(*form, tokens) for form in forms for tokens in (512, 4096)]
    assert all(row["ratio"] == row["flash_ms"] / row["ms"] and row["bound"] for row in rows)
    printed = capsys.readouterr()
    assert "times faster" in printed.out and "not measured" in printed.out
    assert run(roofline, "--methods linformer --causal") == 2
