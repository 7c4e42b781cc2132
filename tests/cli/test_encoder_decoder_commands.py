"""`benchmark` and `analyze` of encoder-decoders, and calibration of Whisper."""

import pytest
import torch

import hf_efficient_attn as hea
from commands import command, read, save, shown
from hf_efficient_attn.evaluation import memory
from hf_efficient_attn.evaluation.analyze import analyze
from hf_efficient_attn.evaluation.data import task_of
from test_distance_bias import needs_interface, t5
from test_encoder_decoder import inputs_of, tiny


def model_of(family: str):
    return t5() if family == "t5" else tiny(family)


@pytest.mark.parametrize("family", ["bart", pytest.param("t5", marks=[needs_interface, pytest.mark.exhaustive])])
def test_benchmark_measures_the_encoder(family, text, tmp_path, capsys):
    methods = "longformer:window_size=4" + ("" if family == "t5" else ",nystromformer:num_landmarks=4")
    folder, out = save(tmp_path / family, model_of(family), "gpt2"), tmp_path / "out"
    shown(capsys, "benchmark", folder, "--methods", methods, "--lengths", "40,80", "--rounds", 1, "--no-memory",
          "--data", text, "--output", out)  # fmt: skip
    found = read(out, "benchmark.json")
    assert found["task"] == "text-to-text" and found["agreement"] == "top1"
    assert any("The methods are in the encoder" in note for note in found["notes"])
    rows = [row for row in found["measurements"] if row["attention"] != "sdpa"]
    assert len(rows) == 2 * (1 if family == "t5" else 2)
    for row in rows:
        assert row["settings"]["layers"] == ["encoder"] and len(row["layer_errors"]) == 2
        assert min(row["layer_errors"]) > 0 and 0 <= row["agreement"] <= 1


@pytest.mark.parametrize(
    "family", [pytest.param("bart", marks=pytest.mark.exhaustive), pytest.param("t5", marks=needs_interface)]
)
def test_analyze_names_the_layers_of_both_stacks(family, text, tmp_path, capsys):
    folder, out = save(tmp_path / family, model_of(family), "gpt2"), tmp_path / "out"
    shown(capsys, "analyze", folder, "--data", text, "--length", 100, "--rows", 2, "--methods", "longformer",
          "--budgets", "17,33", "--max-error", 9.0, "--output", out)  # fmt: skip
    found = read(out, "analysis.json")
    names = [entry["name"] for entry in found["layers"]]
    assert len(set(names)) == 6 and sum(name.startswith("encoder.") for name in names) == 2
    assert {entry["layer"].split(".")[0] for entry in found["layers"]} == {"encoder", "decoder"}
    # The recommendation is a config that converts the model.
    settings = hea.EfficientAttentionConfig.from_dict(found["calibrated"])
    assert {str(layer).split(".")[0] for layer in settings.named_layers()} <= {"encoder", "decoder"}
    hea.convert(model_of(family), settings)
    assert command("convert", folder, "--config", out / "analysis.json", "-o", tmp_path / "converted") == 0


def test_convert_command_takes_names(tmp_path, capsys):
    folder, out = save(tmp_path / "bart", tiny("bart"), "gpt2"), tmp_path / "converted"
    line = ("convert", folder, "--method", "nystromformer", "--layers", "encoder", "-o", out)
    assert "encoder.layers.0, encoder.layers.1" in shown(capsys, *line).out
    assert read(out)["efficient_attention"]["layers"] == ["encoder"]


def test_whisper_is_calibrated_and_analyzed_from_batches():
    model, batch = tiny("whisper"), inputs_of("whisper")
    batch["decoder_input_ids"] = torch.randint(5, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    found = hea.calibrate(model, [batch], max_error=9.0, methods=["nystromformer"], budgets=[16])
    assert found.named_layers() == ["encoder.layers.0", "encoder.layers.1"]
    result = analyze(model, batch, methods=[hea.LongformerConfig()], budgets=[17], max_error=9.0)
    assert len(result["layers"]) == 6
    errors = hea.attention_error(hea.convert(model, found), batch)
    assert [one.layer for one in errors.layers if one.method != "sdpa"] == ["encoder.layers.0", "encoder.layers.1"]


def test_tasks():
    assert task_of(tiny("bart")) == "text-to-text" and task_of(tiny("bart").model) == "embedding"


def test_the_logits_of_a_decoder_take_little_memory(monkeypatch):
    """Less than logits of all positions of the encoder is free, and more than all that a layer of it makes."""
    monkeypatch.setattr(memory, "free_memory", lambda device: 100 << 20)
    model = tiny("bart", vocab_size=100_000)
    memory.check_memory(model, 1500)
    with pytest.raises(hea.UnsupportedAttentionError, match="GiB of memory"):
        memory.check_memory(model, 1500, 10_000)
