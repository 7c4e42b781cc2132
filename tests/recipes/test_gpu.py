"""recipes.benchmarks.gpu on the CPU, and methods in onnxruntime."""

import json

import pytest
import torch

from hf_efficient_attn import cli
from hf_efficient_attn.methods import make_config
from recipes.benchmarks import attention, gpu
from recipes.common.memory import Case

ARGUMENTS = [
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--heads",
    "2",
    "--minutes",
    "5",
    "--method",
    "longformer,linformer",
]


def test_one_run(tmp_path, capsys):
    folder = tmp_path / "out"
    assert cli.run(gpu.app, [*ARGUMENTS, "--length", "64", "-o", str(folder)], "gpu") == 0
    result = json.loads((folder / "gpu.json").read_text())
    assert all(all(checks.values()) for checks in result["promises"].values())
    assert result["promises"]["longformer"].keys() - result["promises"]["linformer"].keys() == {
        "the future never leaks"
    }
    assert 0 < result["errors"]["longformer"] < result["errors"]["linformer"]
    rows = [(row["attention"], row["length"], row["backward"]) for row in result["times"]]
    names = ["exact, default", "longformer", "linformer"]
    assert rows == [(name, 64, backward) for backward in (False, True) for name in names]
    assert all(row["seconds"] > 0 and row["ratios"].keys() == {"default"} for row in result["times"])
    printed = capsys.readouterr().out
    assert (folder / "gpu.md").read_text() in printed and "All promises are kept by 2 methods." in printed
    assert (folder / "gpu.png").stat().st_size > 1000
    assert cli.run(gpu.app, [*ARGUMENTS, "-o", str(folder)], "gpu") == 2  # nothing is replaced without --force


def test_broken_promises_are_found(monkeypatch):
    real = gpu.hea.attention

    def leaking(config, query, key, value, *, attention_mask=None, is_causal=False):
        return real(config, query, key, value, is_causal=False)

    monkeypatch.setattr(gpu.hea, "attention", leaking)
    kept = gpu.promises(make_config("longformer", window_size=16), torch.device("cpu"))
    assert not kept["padding never leaks"] and not kept["the future never leaks"]


def test_exact_attention_on_mps_is_never_called_with_too_many_scores(monkeypatch):
    monkeypatch.setattr(gpu, "runs", lambda call, label: False)
    monkeypatch.setattr(gpu, "make_inputs", lambda case: ())
    called = []
    monkeypatch.setattr(gpu, "exact_kernels", lambda device: called.append(device.type) or ["default"])
    gpu.times({}, Case(8192, num_heads=16, device="mps"))
    assert called == ["mps"]
    gpu.times({}, Case(16384, num_heads=16, device="mps"))
    assert called == ["mps"]


def test_kernels_of_a_gpu():
    assert gpu.exact_kernels(torch.device("cuda"))[:3] == ["flash", "cuDNN", "memory-efficient"]
    assert gpu.exact_kernels(torch.device("mps")) == ["default"]


def test_methods_in_onnxruntime(capsys):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    arguments = ["--onnx", "--method", "linear", "--length", "64", "--heads", "2", "--rounds", "1"]
    assert cli.run(attention.app, arguments, "attention") == 0
    assert "| 64     | linear    |" in capsys.readouterr().out
    assert cli.run(attention.app, [*arguments, "--check"], "attention") == 2
    assert "--onnx has no goals" in capsys.readouterr().err
