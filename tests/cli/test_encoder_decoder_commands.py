"""`benchmark` and `analyze` of encoder-decoders, and calibration of Whisper."""

import json

import pytest
import torch

import hf_efficient_attn as hea
from commands import read, run_json, save, shown
from hf_efficient_attn.evaluation import memory
from hf_efficient_attn.evaluation.analyze import analyze
from test_distance_bias import needs_interface, t5
from test_encoder_decoder import inputs_of, tiny


@pytest.mark.parametrize("make", [lambda: tiny("bart"), pytest.param(t5, marks=needs_interface)], ids=["bart", "t5"])
def test_the_commands_take_both_stacks(make, text, tmp_path, capsys):
    """`benchmark` measures the encoder, and `analyze` names the layers of both stacks in a config for `convert`."""
    folder, out, file = save(tmp_path / "model", make(), "gpt2"), tmp_path / "out", tmp_path / "analysis.json"
    methods = "longformer:window_size=4" + (",nystromformer:num_landmarks=4" if make is not t5 else "")
    line = ("benchmark", folder, "--methods", methods, "--lengths", "40,80", "--rounds", 1, "--no-memory")
    found = run_json(capsys, *line, "--data", text)
    assert found["task"] == "text-to-text" and found["agreement"] == "top1"
    assert any("The methods are in the encoder" in note for note in found["notes"])
    rows = [row for row in found["measurements"] if row["attention"] != "sdpa"]
    assert len(rows) == 2 * (1 if make is t5 else 2)
    for row in rows:
        assert row["settings"]["layers"] == ["encoder"] and len(row["layer_errors"]) == 2
        assert min(row["layer_errors"]) > 0 and 0 <= row["agreement"] <= 1
    line = ("analyze", folder, "--data", text, "--length", 100, "--rows", 2, "--methods", "longformer")
    found = run_json(capsys, *line, "--budgets", "17,33", "--max-error", 9.0)
    names = [entry["name"] for entry in found["layers"]]
    assert len(set(names)) == 6 and sum(name.startswith("encoder.") for name in names) == 2
    assert {entry["layer"].split(".")[0] for entry in found["layers"]} == {"encoder", "decoder"}
    settings = hea.EfficientAttentionConfig.from_dict(found["calibrated"])
    assert {str(layer).split(".")[0] for layer in settings.named_layers()} <= {"encoder", "decoder"}
    hea.convert(make(), settings)
    file.write_text(json.dumps(found))
    shown(capsys, "convert", folder, "--config", file, "-o", out)
    line = ("convert", folder, "--method", "longformer", "--layers", "encoder", "-o", out, "--force")
    printed = shown(capsys, *line).out
    assert f"layers: {', '.join(entry['layer'] for entry in found['layers'][:2])}\n" in printed
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


def test_the_logits_of_a_decoder_take_little_memory(monkeypatch):
    """Less than logits of all positions of the encoder is free, and more than all that a layer of it makes."""
    monkeypatch.setattr(memory, "free_memory", lambda device: 100 << 20)
    model = tiny("bart", vocab_size=100_000)
    memory.check_memory(model, 1500)
    with pytest.raises(hea.UnsupportedAttentionError, match="GiB of memory"):
        memory.check_memory(model, 1500, 10_000)
