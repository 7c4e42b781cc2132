"""`benchmark` and `analyze` of Whisper, on random features and on recordings."""

import json
import shutil
import struct

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from hf_efficient_attn.evaluation.data import ModelData, task_of
from hf_efficient_attn.evaluation.memory import check_memory
from hf_efficient_attn.evaluation.speech import read_samples
from test_benchmark_command import _short, command  # noqa: F401 (a fixture)
from test_encoder_decoder import tiny

POSITIONS, RATE = 40, 16000
METHODS = "longformer:window_size=4,nystromformer:num_landmarks=4"


def write_wav(path, samples: torch.Tensor):
    """Write int16 samples, (samples,) or (samples, channels)."""
    channels = samples.shape[1] if samples.ndim == 2 else 1
    path.write_bytes(wav(samples.numpy().astype("<i2").tobytes(), channels=channels))
    return path


def noise(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-9000, 9000, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.int16)


def extractor(**changes):
    # An excerpt is one second, and has two frames for each position.
    return transformers.WhisperFeatureExtractor(
        **{"feature_size": 8, "chunk_length": 1, "hop_length": RATE // (2 * POSITIONS), **changes}
    )


@pytest.fixture
def whisper(tmp_path):
    folder = tmp_path / "whisper"
    tiny("whisper", max_source_positions=POSITIONS).save_pretrained(folder)
    extractor().save_pretrained(folder)
    return folder


@pytest.fixture
def recordings(tmp_path):
    """Two and a half seconds, and in a subfolder half a second: three excerpts."""
    folder = tmp_path / "recordings"
    (folder / "short").mkdir(parents=True)
    write_wav(folder / "a.wav", noise(5 * RATE // 2))
    write_wav(folder / "short" / "b.WAV", noise(RATE // 2, seed=1))
    (folder / "notes.txt").write_text("not a recording")
    return folder


def data_of(whisper, file, rows=4, **changes) -> ModelData:
    model = transformers.WhisperForConditionalGeneration.from_pretrained(whisper, **changes).eval()
    return ModelData(model, whisper, file, longest=POSITIONS, rows=rows)


def run(capsys, *arguments) -> str:
    """What a command prints."""
    capsys.readouterr()
    status = command(*arguments)
    out, err = capsys.readouterr()
    assert status == 0, err
    return out


def refused(capsys, message, *arguments):
    capsys.readouterr()
    assert command(*arguments) == 2, arguments
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert message in err
    return err


def test_tasks():
    model = tiny("whisper")
    assert task_of(model) == "speech-to-text" and task_of(model.model) == "embedding"
    # An encoder of speech without a decoder is refused, as before.
    with pytest.raises(hea.UnsupportedAttentionError, match="takes input_features"):
        task_of(transformers.WhisperForAudioClassification(model.config))


def test_benchmark_of_recordings_measures_the_encoder(whisper, recordings, tmp_path, capsys):
    out = tmp_path / "out"
    printed = run(
        capsys, "benchmark", whisper, "--methods", METHODS, "--rounds", 1, "--data", recordings, "--output", out
    )
    assert "share of the decoder's tokens" in printed and "tok/s" not in printed and "perplexity" not in printed
    assert "excerpts of 1 seconds; shorter ones are filled with silence. The decoder gets the first tokens" in printed
    found = json.loads((out / "benchmark.json").read_text())
    assert found["task"] == "speech-to-text" and found["agreement"] == "top1"
    assert found["data"] == {"name": "recordings", "rows": 3}
    assert "The methods are in the encoder. The decoder stays exact." in found["notes"]
    assert {row["length"] for row in found["measurements"]} == {POSITIONS}
    exact, *rows = found["measurements"]
    assert exact["agreement"] == 1.0 and len(rows) == 2
    for row in rows:
        assert row["settings"]["layers"] == ["encoder"] and len(row["layer_errors"]) == 2
        assert min(row["layer_errors"]) > 0 and 0 <= row["agreement"] <= 1
        assert row["first_token_seconds"] is None and row["perplexity"] is None


def test_benchmark_without_data_and_of_an_embedding_model(whisper, recordings, tmp_path, capsys):
    bare = tmp_path / "bare"
    tiny("whisper", max_source_positions=POSITIONS).model.save_pretrained(bare)
    arguments = "benchmark", bare, "--rounds", 1, "--json"
    found = json.loads(run(capsys, *arguments, "--methods", METHODS, "--dtype", "bfloat16"))
    assert found["task"] == "embedding" and found["data"]["name"] == "generated"
    assert {row["length"] for row in found["measurements"]} == {POSITIONS}
    assert all(row["error"] is None and row["agreement"] is None for row in found["measurements"])
    assert any("random features of speech" in note for note in found["notes"])
    extractor().save_pretrained(bare)
    found = json.loads(run(capsys, *arguments, "--methods", METHODS, "--data", recordings))
    assert found["agreement"] == "cosine" and found["measurements"][1]["agreement"] < 1


def test_analyze_of_recordings(whisper, recordings, tmp_path, capsys):
    out = tmp_path / "out"
    printed = run(capsys, "analyze", whisper, "--data", recordings, "--methods", "longformer", "--budgets", "17,33",
                  "--max-error", 9.0, "--output", out)  # fmt: skip
    assert f"recordings, 3 excerpts of {POSITIONS} tokens" in printed
    assert "errors at 2048 tokens" not in printed  # the model never takes as many
    found = json.loads((out / "analysis.json").read_text())
    assert found["tokens"] == POSITIONS and found["excerpt_seconds"] == 1 and found["pixels"] is None
    assert found["max_length"] is None and any("random ones" in note for note in found["notes"])
    names = [entry["name"] for entry in found["layers"]]
    assert len(set(names)) == 6 and sum(name.startswith("encoder.") for name in names) == 2
    run(capsys, "convert", whisper, "--config", out / "analysis.json", "-o", tmp_path / "converted")


def test_excerpts_are_those_of_the_feature_extractor(whisper, recordings):
    data = data_of(whisper, recordings)
    inputs = data.inputs(POSITIONS, 0, 8)
    features = inputs.values["input_features"]
    assert data.rows == 3 and inputs.tokens == POSITIONS and features.shape == (3, 8, 2 * POSITIONS)
    first, second = noise(5 * RATE // 2).float() / 2**15, noise(RATE // 2, seed=1).float() / 2**15
    for index, samples in enumerate([first[:RATE], first[RATE : 2 * RATE], second]):
        expected = extractor()(samples.numpy(), sampling_rate=RATE, return_tensors="pt")["input_features"][0]
        torch.testing.assert_close(features[index], expected)
    # A single file has its own excerpts only.
    assert data_of(whisper, recordings / "a.wav").rows == 2
    # Those that are kept are spread over the recordings.
    write_wav(recordings / "c.wav", noise(RATE, seed=2))
    few = data_of(whisper, recordings, rows=2)
    assert [path.name for path, *_ in few.speech.excerpts] == ["a.wav", "c.wav"]


def test_inputs_do_not_depend_on_the_batch_and_have_the_dtype_of_the_model(whisper, recordings):
    for file in (None, recordings):
        data = data_of(whisper, file, rows=3, dtype=torch.bfloat16)
        together = data.inputs(POSITIONS, 0, 3).values
        alone = [data.inputs(POSITIONS, index, 1).values for index in range(3)]
        assert together["input_features"].dtype == torch.bfloat16
        for name, values in together.items():
            assert torch.equal(values, torch.cat([one[name] for one in alone])) and len(values.unique(dim=0)) == 3


def test_the_decoder_begins_as_a_transcript_does(whisper):
    ids = data_of(whisper, None).inputs(POSITIONS, 0, 4).values["decoder_input_ids"]
    assert ids.shape == (4, 32) and ids[:, 0].tolist() == [2] * 4 and ids.max() < 60
    model = tiny("whisper", max_source_positions=POSITIONS, max_target_positions=9)
    model.generation_config.forced_decoder_ids = [[1, None], [3, 51], [2, 50]]
    ids = ModelData(model, whisper, None, longest=POSITIONS, rows=2).inputs(POSITIONS, 0, 2).values["decoder_input_ids"]
    assert ids.shape == (2, 9) and ids[:, :3].tolist() == [[2, 50, 51]] * 2
    assert not torch.equal(ids[0], ids[1])


def test_channels_are_averaged_and_read_from_any_sample(tmp_path):
    left, right = noise(500), noise(500, seed=1)
    path = write_wav(tmp_path / "stereo.wav", torch.stack([left, right], 1))
    expected = (left.float() + right.float()) / 2 / 2**15
    torch.testing.assert_close(read_samples(path, RATE, 0, 500), expected)
    torch.testing.assert_close(read_samples(path, RATE, 100, 50), expected[100:150])


def test_logits_do_not_count_for_each_position(monkeypatch):
    model = tiny("whisper", vocab_size=100_000, max_source_positions=1500)
    # Less than logits of 1,500 positions, and more than all that a layer of the encoder makes.
    monkeypatch.setattr("hf_efficient_attn.evaluation.memory.free_memory", lambda device: 100 << 20)
    check_memory(model, 1500)
    with pytest.raises(hea.UnsupportedAttentionError, match="GiB of memory"):
        check_memory(model, 1500, 10_000)


def wav(samples: bytes, *, channels=1, rate=RATE, bits=16, kind=1) -> bytes:
    form = struct.pack("<HHIIHH", kind, channels, rate, rate * channels * bits // 8, channels * bits // 8, bits)
    chunks = b"fmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", len(samples)) + samples
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


SECOND = wav(bytes(2 * RATE))
# Name -> content.
DAMAGED = {
    "text": b"no sound", "rest": SECOND[:2000], "end": SECOND[:-1], "header": SECOND[:20], "empty": wav(b""),
    "chunk": SECOND[:16] + struct.pack("<I", 1 << 30) + SECOND[20:],  # the length of the format's description
    "rate": wav(bytes(16000), rate=8000), "float": wav(bytes(400), bits=32, kind=3), "eight": wav(bytes(RATE), bits=8),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("text", "not a recording that can be used"),
        ("rest", "(the file ends too early): convert it"),
        ("end", "(the file ends too early): convert it"),
        ("header", "not a recording that can be used"),
        ("chunk", "(the file ends too early): convert it"),
        ("empty", "there is no sound in it"),
        ("rate", "(a sampling rate of 8,000 Hz, and the model takes 16,000 Hz): convert it, for example with: "
         "ffmpeg -i rate.wav -ar 16000 -ac 1 -c:a pcm_s16le converted.wav"),
        ("float", "convert it"),
        ("eight", "samples of 8 bits, where 16 are supported): convert it"),
        ("missing", "no recordings: give a .wav file that exists"),
    ],
)  # fmt: skip
def test_recordings_that_are_refused(kind, message, whisper, tmp_path, capsys):
    file = tmp_path / f"{kind}.wav"
    if kind in DAMAGED:
        file.write_bytes(DAMAGED[kind])
    assert file.name in refused(capsys, message, "benchmark", whisper, "--data", file)


def test_other_refusals(whisper, recordings, tmp_path, capsys):
    (tmp_path / "nothing").mkdir()
    plain = shutil.copytree(whisper, tmp_path / "plain")
    (plain / "preprocessor_config.json").unlink()
    broken = shutil.copytree(whisper, tmp_path / "broken")
    values = json.loads((broken / "preprocessor_config.json").read_text())
    (broken / "preprocessor_config.json").write_text(json.dumps({**values, "hop_length": 0}))
    foreign = shutil.copytree(whisper, tmp_path / "foreign")
    extractor(feature_size=80, hop_length=RATE // 200).save_pretrained(foreign)
    only = f"the model takes {POSITIONS} positions (1 seconds) only: give a length of {POSITIONS}"
    cases = [
        (["benchmark", whisper, "--data", recordings, "--lengths", "30"], only),
        (["benchmark", whisper, "--lengths", f"{POSITIONS},512"], f"takes {POSITIONS} positions (0.8 seconds) only"),
        (["analyze", whisper, "--data", recordings, "--length", 2048], only),
        (["benchmark", whisper, "--data", tmp_path / "nothing"], "nothing: no recordings: give a .wav file"),
        (["benchmark", whisper, "--data", recordings / "notes.txt"], "notes.txt: no recordings: give a .wav file"),
        (["benchmark", plain, "--data", recordings], "plain: its feature extractor cannot be loaded"),
        (["analyze", broken, "--data", recordings], "broken: its feature extractor cannot be loaded"),
        (["benchmark", foreign, "--data", recordings], "makes 200 frames of 80 features, and the model takes 80 of 8"),
        (["distill", whisper, "--data", recordings, "--method", "linformer", "-o", tmp_path / "new"], "takes speech"),
    ]
    for arguments, message in cases:
        refused(capsys, message, *arguments)
