"""`benchmark` and `analyze` of encoder-decoders, and calibration of Whisper."""

import json

import pytest
import torch

import hf_efficient_attn as hea
from hf_efficient_attn.evaluation import timing
from hf_efficient_attn.evaluation.analyze import analyze
from hf_efficient_attn.evaluation.data import task_of
from test_benchmark_command import TEXT, _short, command, tokenizer_for  # noqa: F401 (a fixture)
from test_distance_bias import needs_interface, t5
from test_encoder_decoder import inputs_of, tiny


@pytest.fixture
def made(tmp_path):
    """Checkpoints with a tokenizer of words, and a text."""
    (tmp_path / "words.txt").write_text(TEXT)

    def make(family: str):
        model = t5() if family == "t5" else tiny(family)
        model.save_pretrained(tmp_path / family)
        tokenizer_for("gpt2").save_pretrained(tmp_path / family)
        return tmp_path / family

    return make, tmp_path / "words.txt"


@pytest.mark.parametrize("family", ["bart", pytest.param("t5", marks=[needs_interface, pytest.mark.exhaustive])])
def test_benchmark_measures_the_encoder(family, made, tmp_path, capsys):
    make, text = made
    methods = "longformer:window_size=4" + ("" if family == "t5" else ",nystromformer:num_landmarks=4")
    out = tmp_path / "out"
    folder = make(family)
    capsys.readouterr()
    status = command("benchmark", folder, "--methods", methods, "--lengths", "40,80", "--rounds", 1, "--data", text,
                     "--output", out)  # fmt: skip
    assert status == 0, capsys.readouterr().err
    found = json.loads((out / "benchmark.json").read_text())
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
def test_analyze_names_the_layers_of_both_stacks(family, made, tmp_path, capsys):
    make, text = made
    out = tmp_path / "out"
    folder = make(family)
    capsys.readouterr()
    status = command("analyze", folder, "--data", text, "--length", 100, "--rows", 2, "--methods", "longformer",
                     "--budgets", "17,33", "--max-error", 9.0, "--output", out)  # fmt: skip
    assert status == 0, capsys.readouterr().err
    found = json.loads((out / "analysis.json").read_text())
    names = [entry["name"] for entry in found["layers"]]
    assert len(set(names)) == 6 and sum(name.startswith("encoder.") for name in names) == 2
    assert {entry["layer"].split(".")[0] for entry in found["layers"]} == {"encoder", "decoder"}
    # The recommendation is a config that converts the model.
    settings = hea.EfficientAttentionConfig.from_dict(found["calibrated"])
    model = t5() if family == "t5" else tiny(family)
    assert {str(layer).split(".")[0] for layer in settings.named_layers()} <= {"encoder", "decoder"}
    hea.convert(model, settings)
    assert command("convert", folder, "--config", out / "analysis.json", "-o", tmp_path / "converted") == 0


def test_convert_command_takes_names(made, tmp_path, capsys):
    folder = made[0]("bart")
    out = tmp_path / "converted"
    assert command("convert", folder, "--method", "nystromformer", "--layers", "encoder", "-o", out) == 0
    assert "encoder.layers.0, encoder.layers.1" in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text())["efficient_attention"]["layers"] == ["encoder"]
    capsys.readouterr()
    assert command("convert", folder, "--method", "linear", "--layers", "encodr", "-o", tmp_path / "other") == 2
    assert "'encoder', 'encoder.layers'" in capsys.readouterr().err


def test_whisper_is_calibrated_and_analyzed_from_batches():
    model, batch = tiny("whisper"), inputs_of("whisper")
    batch["decoder_input_ids"] = torch.randint(5, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    found = hea.calibrate(model, [batch], max_error=9.0, methods=["nystromformer"], budgets=[16])
    assert found.named_layers() == ["encoder.layers.0", "encoder.layers.1"]
    result = analyze(model, batch, methods=[hea.LongformerConfig()], budgets=[17], max_error=9.0)
    assert len(result["layers"]) == 6
    errors = hea.attention_error(hea.convert(model, found), batch)
    assert [one.layer for one in errors.layers if one.method != "sdpa"] == ["encoder.layers.0", "encoder.layers.1"]


def test_tasks_and_models_of_sound(tmp_path, capsys):
    assert task_of(tiny("bart")) == "text-to-text" and task_of(tiny("bart").model) == "embedding"
    tiny("whisper").save_pretrained(tmp_path / "sound")
    file = ("--data", tmp_path / "sound" / "config.json")
    for words in (
        ["benchmark"],
        ["analyze", *file],
        ["distill", "--method", "linformer", "-o", tmp_path / "out", *file],
    ):
        capsys.readouterr()
        assert command(words[0], tmp_path / "sound", *words[1:]) == 2
        assert "takes input_features. Supported are models of text" in capsys.readouterr().err


def test_the_logits_of_a_decoder_take_little_memory(monkeypatch):
    """Less than logits of all positions of the encoder is free, and more than all that a layer of it makes."""
    monkeypatch.setattr(timing, "free_memory", lambda device: 100 << 20)
    model = tiny("bart", vocab_size=100_000)
    timing.check_memory(model, 1500)
    with pytest.raises(hea.UnsupportedAttentionError, match="GiB of memory"):
        timing.check_memory(model, 1500, 10_000)
