"""What the commands refuse: each is one line on stderr, exit status 2, before anything is measured or written."""

import math
import pathlib
import shlex
import string

import pytest
import torch
import transformers
import yaml

import converted
from helpers.commands import TEXT, refused, save
from helpers.encoder_decoders import tiny
from hf_efficient_attn.evaluation import benchmark, crossover
from tiny_models import IMAGE, SIZES, tiny_model

ANALYZE = "analyze gpt2 --data words.txt"
CONVERT = "convert bert -o out"
PLAIN = "distill bert --data words.txt --length 40 --batch-size 2 --steps 6 --save-steps 3 -o out"
DISTILL = f"{PLAIN} --method linear --set feature_map=hedgehog --set num_features=16"
GIVE_EITHER = "give either --method NAME, or --config FILE"
NO_DEVICE = "PyTorch cannot compute there; on this machine it can use cpu"
DATA = yaml.safe_load_all(pathlib.Path(__file__).with_name("refusals.yaml").read_text(encoding="utf-8"))
FILES, TABLE = {"words.txt": TEXT, "few.txt": "w1 w2 w3 " * 40, **next(DATA)}, next(DATA)
REFUSALS = [tuple(string.Template(text).substitute(globals()) for text in pair) for pair in TABLE.items()]
# A folder in which nobody can make files, root included.
NO_FILES = "/proc"
if pathlib.Path(NO_FILES).is_dir():
    REFUSALS += [
        (f"{line} {NO_FILES}/out", f": no file can be made in {NO_FILES} (")
        for line in (
            f"{ANALYZE} --output", "benchmark gpt2 --output", f"{CONVERT} --method linear -o", f"{DISTILL} -o",
            "export-kernel nearfar -o",
        )
    ]  # fmt: skip


def test_a_place_for_lengths_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(crossover, "cache_file", lambda: tmp_path / "lengths.json")
    monkeypatch.setattr(crossover, "measure_crossover", None)
    (tmp_path / "lengths.json").mkdir()
    assert "lengths.json': it is a folder" in refused(capsys, "crossover", "--renew")


def test_a_card_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    converted.make(tmp_path)
    monkeypatch.setattr(benchmark, "benchmark_checkpoint", None)
    (tmp_path / "README.md").write_text((tmp_path / "README.md").read_text().replace("<!-- /hf_efficient_attn -->", ""))
    assert "must contain the lines" in refused(capsys, "benchmark", tmp_path, "--card")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The working folder of the commands, with `FILES` and checkpoints."""
    folder = tmp_path_factory.mktemp("refusals")
    spoiled = tiny_model("bert")
    with torch.no_grad():
        spoiled.encoder.layer[0].attention.self.value.bias.fill_(math.nan)
    models = {"bert": tiny_model("bert"), "bad": tiny_model("bert"), "half": tiny_model("bert").half(),
              "nan": spoiled, "gpt2": tiny_model("gpt2", head=True), "bart": tiny("bart"), "sound": tiny("whisper"),
              "grey": tiny_model("vit", num_channels=1), "deep": tiny_model("vit", num_channels=4),
              "odd": tiny_model("vit"), "wide": tiny_model("vit", image_size=(32, 64)),
              "video": transformers.VideoMAEModel(transformers.VideoMAEConfig(**SIZES, **IMAGE))}  # fmt: skip
    for name, model in models.items():
        save(folder / name, model, "gpt2" if name == "gpt2" else "bert")
    save(folder / "vit", tiny_model("vit", head=True), "vit")
    tiny_model("bert").save_pretrained(folder / "bare")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.mark.parametrize(("line", "message"), REFUSALS, ids=[line for line, _ in REFUSALS])
def test_refused_in_one_line(line, message, folder, monkeypatch, capsys):
    if line.startswith(("demo", "distill")):
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    random, verbosity = torch.get_rng_state(), transformers.logging.get_verbosity()
    assert message in refused(capsys, *shlex.split(line))
    assert sorted(folder.rglob("*")) == before
    assert torch.equal(torch.get_rng_state(), random) and transformers.logging.get_verbosity() == verbosity
