"""Damaged and hostile checkpoints: each is refused in one line, and nothing is written or run."""

import json
import os
import pathlib
import pickle
import shutil
import struct
import zipfile

import pytest
import torch

from hf_efficient_attn import cli
from hf_efficient_attn.checkpoint import load_model, open_checkpoint
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.io.json import read_json, read_json_object, write_json
from tiny_models import tiny_model

ENTRY = "bert.encoder.layer.0.attention.self.query.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A valid checkpoint of a tiny BERT with a head, and files of a tokenizer."""
    folder = tmp_path_factory.mktemp("valid") / "whole"
    tiny_model("bert", head=True).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 128}')
    (folder / "vocab.txt").write_text("a\nb\n")
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("valid") / "sharded"
    tiny_model("bert", head=True).save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


def convert(*arguments):
    return cli.run(cli.app, ["convert", *map(str, arguments)], "hf-efficient-attn")


def tree(folder):
    """The contents of all files in a folder, without following links and pipes."""
    found = {}
    for path in sorted(folder.rglob("*")):
        size = path.lstat().st_size
        found[str(path)] = path.read_bytes() if path.is_file() and not path.is_symlink() and size < 2**24 else size
    return found


def assert_refused(folder, capsys, *options, message=""):
    """Check that the command refuses a checkpoint in one line and changes no file."""
    out_folder = folder.parent / "out"
    before = tree(folder.parent)
    assert convert(folder, "--method", "longformer", "-o", out_folder, *options) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and len(err) < 1000
    assert message in err, err
    assert tree(folder.parent) == before


def edit(folder, name="config.json", **changes):
    values = json.loads((folder / name).read_text())
    values.update(changes)
    (folder / name).write_text(json.dumps({k: v for k, v in values.items() if v != "DELETED"}))


def split(folder):
    """(header, data) of the checkpoint's safetensors."""
    raw = (folder / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join(folder, header, data, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    start = struct.pack("<Q", len(text) if length is None else length)
    (folder / "model.safetensors").write_bytes(start + text + data)


def header_edit(folder, name=ENTRY, **changes):
    header, data = split(folder)
    header[name].update(changes)
    join(folder, header, data)


def raw_config(text):
    return lambda folder: (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())


def config(**changes):
    return lambda folder: edit(folder, **changes)


def chosen(**values):
    return config(efficient_attention=values, attn_implementation=values.get("method", "longformer"))


def link(name, target):
    def damage(folder):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return damage


def instead(name, make):
    def damage(folder):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return damage


def truncated(folder):
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw[:-100])


def drop_tensor(folder):
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    del state[ENTRY]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


class Bomb:
    def __reduce__(self):
        return os.mkdir, (str(pathlib.Path(os.environ["HEA_TEST_BOMB"])),)


def pickled(name, value=None):
    def damage(folder):
        (folder / "model.safetensors").unlink()
        if value is None:
            (folder / name).write_bytes(pickle.dumps(Bomb()))
        else:
            torch.save(value(), folder / name)

    return damage


CONFIGS = {
    "not JSON": (raw_config("{"), "not JSON"),
    "empty": (raw_config(""), "not JSON"),
    "not an object": (raw_config("[1, 2]"), "JSON object"),
    "not UTF-8": (raw_config(b'{"model_type": "b\xffrt"}'), "not JSON"),
    "deep nesting": (raw_config("[" * 200_000), "not JSON"),
    "large": (raw_config(" " * (33 * 2**20)), "larger than"),
    "a folder": (instead("config.json", os.mkdir), "not a regular file"),
    "a pipe": (instead("config.json", os.mkfifo), "not a regular file"),
    "a link outside": (link("config.json", "/etc/hostname"), "symbolic link"),
    "a link to nothing": (link("config.json", "nowhere"), "cannot be read"),
    "a link to itself": (link("config.json", "config.json"), "cannot be"),
    "no model_type": (config(model_type="DELETED"), "model_type"),
    "model_type of code elsewhere": (
        config(model_type="mine", auto_map={"AutoModel": "mine.Mine"}),
        "never run",
    ),
    "model_type a list": (config(model_type=["bert"]), "model_type"),
    "hidden_size 1e12": (config(hidden_size=10**12), "far larger"),
    "hidden_size 1e12 as a float": (config(hidden_size=1e12), "built"),
    "hidden_size 1e7": (config(hidden_size=10**7), ""),
    "hidden_size text": (config(hidden_size="32"), "built"),
    "hidden_size negative": (config(hidden_size=-32), ""),
    "hidden_size zero": (config(hidden_size=0), ""),
    "1e6 layers": (config(num_hidden_layers=10**6), "far larger"),
    "60,000 layers": (config(num_hidden_layers=60_000), "far larger"),
    "3 layers of 2": (config(num_hidden_layers=3), "lacks"),
    "1 layer of 2": (config(num_hidden_layers=1, efficient_attention={"method": "linear", "layers": [1]}), "layers"),
    "vocabulary": (config(vocab_size=61), "where config.json asks"),
    "vocabulary 1e7": (config(vocab_size=10**7), "far larger"),
    "positions 1e9": (config(max_position_embeddings=10**9), "far larger"),
    "positions 1e6": (config(max_position_embeddings=10**6), ""),
    "architectures not a list": (config(architectures="BertModel"), "no model class"),
    "architectures unknown": (config(architectures=["EvilModel"]), "EvilModel"),
    "architectures not a model": (config(architectures=["AutoTokenizer"]), "AutoTokenizer"),
    "architectures of another config": (config(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
    "architectures with a path": (config(architectures=["../../BertModel"]), "no model class"),
    "quantised": (config(quantization_config={"quant_method": "gptq", "bits": 4}), "quantised"),
    "backbone elsewhere": (config(use_pretrained_backbone=True, backbone="evil/backbone"), "another model"),
    "kernels from the hub": (config(attn_implementation="kernels-community/flash-attn"), "unknown attention method"),
    "method unknown": (chosen(method="kdeformr"), "kdeformer"),
    "method no text": (chosen(method=3), ""),
    "key unknown": (chosen(method="longformer", windowsize=3), "window_size"),
    "value out of range": (chosen(method="longformer", window_size=-3), "at least"),
    "layers text": (chosen(method="longformer", layers="0-3"), "layers"),
    "layers negative": (chosen(method="longformer", layers=[-1]), "non-negative"),
    "layers twice": (chosen(method="longformer", layers=[1, 1]), "more than once"),
    "missing layers": (chosen(method="longformer", layers=[7]), "layers [7]"),
    "layers nested": (chosen(layers=[{"layers": [{"layers": [0]}], "method": "linear"}]), ""),
    "newer format": (chosen(method="longformer", version=99), "newer"),
    "missing learned parameters": (chosen(method="linformer", projection_dim=8), "lacks"),
    "learned parameters too large": (chosen(method="linformer", projection_dim=2**20), "far larger"),
    "settings not a dictionary": (config(efficient_attention=["longformer"]), "dictionary"),
    "long method": (chosen(method="k" * 1_000_000), "unknown attention method"),
    "long value": (chosen(method="longformer", window_size="k" * 1_000_000), "window_size"),
    "tokenizer elsewhere": (
        lambda folder: edit(folder, "tokenizer_config.json", vocab_file="../../secret"),
        "leads out",
    ),
    "tokenizer not JSON": (instead("tokenizer_config.json", lambda path: path.write_text("{,")), "not JSON"),
    "tokenizer a link outside": (link("vocab.txt", "/etc/hostname"), "symbolic link"),
    "tokenizer a pipe": (instead("vocab.txt", os.mkfifo), "not a regular file"),
    "modules elsewhere": (
        instead("modules.json", lambda path: path.write_text('[{"path": "../1_Pooling"}]')),
        "plain name",
    ),
    "card a link outside": (link("README.md", "/etc/hostname"), "symbolic link"),
    "card damaged": (instead("README.md", lambda path: path.write_text("---\na: [\n---\n")), "README.md"),
    "a sparse vocabulary of 1 TB": (lambda folder: os.truncate(folder / "vocab.txt", 2**40), "larger than"),
    "origin not an object": (instead("efficient_attention.json", lambda path: path.write_text("[]")), "JSON object"),
    "an adapter": (instead("adapter_config.json", lambda path: path.write_text("{}")), "adapter"),
}

WEIGHTS = {
    "truncated": (truncated, "damaged"),
    "empty": (instead("model.safetensors", lambda path: path.write_bytes(b"")), "damaged"),
    "not safetensors": (instead("model.safetensors", lambda path: path.write_bytes(b"PK\3\4" * 99)), "damaged"),
    "a folder": (instead("model.safetensors", os.mkdir), "not a regular file"),
    "a pipe": (instead("model.safetensors", os.mkfifo), "not a regular file"),
    "a link outside": (link("model.safetensors", "/etc/hostname"), "symbolic link"),
    "header beyond the file": (lambda folder: join(folder, *split(folder), length=2**40), "damaged"),
    "header of 2**63": (lambda folder: join(folder, *split(folder), length=2**63), "damaged"),
    "header not JSON": (lambda folder: join(folder, b"{" * 64, b""), "header"),
    "header a list": (lambda folder: join(folder, b"[]      ", b""), "damaged"),
    "header empty": (lambda folder: join(folder, b"{}      ", b""), "lacks"),
    "overlap": (lambda folder: header_edit(folder, data_offsets=[0, 4096]), "damaged"),
    "out of range": (lambda folder: header_edit(folder, data_offsets=[2**40, 2**40 + 4096]), "damaged"),
    "backwards": (lambda folder: header_edit(folder, data_offsets=[4096, 0]), "damaged"),
    "negative": (lambda folder: header_edit(folder, data_offsets=[-4096, 0]), "damaged"),
    "dtype unknown": (lambda folder: header_edit(folder, dtype="F33"), "damaged"),
    "dtype of another size": (lambda folder: header_edit(folder, dtype="F16"), "damaged"),
    "integers for weights": (lambda folder: header_edit(folder, dtype="I32"), "quantised"),
    "shape of another size": (lambda folder: header_edit(folder, shape=[32, 33]), "damaged"),
    "shape of the same size": (lambda folder: header_edit(folder, shape=[16, 64]), "where config.json asks"),
    "shape huge": (lambda folder: header_edit(folder, shape=[2**62, 2**62]), "damaged"),
    "a missing tensor": (drop_tensor, "lacks"),
    "pickle": (pickled("pytorch_model.bin"), "--allow-pickle"),
    "pickle .pt": (pickled("model.pt"), "safetensors"),
    "pickle .ckpt": (pickled("model.ckpt"), "safetensors"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
    "another model": (config(model_type="gpt2", architectures=["GPT2Model"]), ""),
}

INDICES = {
    "not JSON": (instead("model.safetensors.index.json", lambda path: path.write_text("[")), "not JSON"),
    "no map": (lambda folder: edit(folder, "model.safetensors.index.json", weight_map={}), "weight_map"),
    "a list": (lambda folder: edit(folder, "model.safetensors.index.json", weight_map=[1]), "weight_map"),
    "elsewhere": ("../whole/model.safetensors", "plain name"),
    "absolute": ("/etc/hostname", "plain name"),
    "backslashes": ("..\\model.safetensors", "plain name"),
    "a pickle": ("pytorch_model.bin", "not a .safetensors file"),
    "a number": (3, "plain name"),
    "a missing file": ("model-00009-of-00009.safetensors", "cannot be read"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_are_refused(case, whole, tmp_path, capsys):
    folder = shutil.copytree(whole, tmp_path / "in" / "whole")
    CONFIGS[case][0](folder)
    assert_refused(folder, capsys, message=CONFIGS[case][1])


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_are_refused(case, whole, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HEA_TEST_BOMB", str(tmp_path / "exploded"))
    folder = shutil.copytree(whole, tmp_path / "in" / "whole")
    WEIGHTS[case][0](folder)
    assert_refused(folder, capsys, message=WEIGHTS[case][1])
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("case", INDICES)
def test_indices_are_refused(case, sharded, tmp_path, capsys):
    folder = shutil.copytree(sharded, tmp_path / "in" / "sharded")
    change, message = INDICES[case]
    if callable(change):
        change(folder)
    else:
        name = "model.safetensors.index.json"
        weight_map = json.loads((folder / name).read_text())["weight_map"]
        edit(folder, name, weight_map={**weight_map, next(iter(weight_map)): change})
    assert_refused(folder, capsys, message=message)


@pytest.mark.parametrize(
    "source", ["", "nowhere/at/all", "../nowhere", "no such folder", "x" * 5000, "a\0b", "evil\n/name"], ids=range(7)
)
def test_sources_that_do_not_exist(source, tmp_path, capsys):
    assert convert(source, "--method", "longformer", "-o", tmp_path / "out") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_or_an_empty_folder_is_not_a_source(tmp_path, whole):
    with pytest.raises(UnsupportedAttentionError, match="is a file"):
        open_checkpoint(whole / "config.json")
    with pytest.raises(UnsupportedAttentionError, match=r"no config\.json"):
        open_checkpoint(tmp_path)


def bomb_archive(folder):
    """A file in PyTorch's format whose pickle runs code."""
    torch.save({"a": torch.ones(2)}, folder / "pytorch_model.bin")
    with zipfile.ZipFile(folder / "pytorch_model.bin") as old:
        parts = {entry.filename: old.read(entry) for entry in old.infolist()}
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as new:
        for name, raw in parts.items():
            new.writestr(name, pickle.dumps(Bomb()) if name.endswith("data.pkl") else raw)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (bomb_archive, "damaged"),
        (lambda folder: (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb())), "damaged"),
        (lambda folder: torch.save({"state": {}}, folder / "pytorch_model.bin"), "more than named tensors"),
        (lambda folder: torch.save([torch.ones(2)], folder / "pytorch_model.bin"), "more than named tensors"),
        (lambda f: torch.save({"a": torch.eye(3).to_sparse()}, f / "pytorch_model.bin"), "sparse"),
    ],
    ids=["bomb", "plain pickle", "nested", "a list", "sparse"],
)
def test_pickles_run_no_code_even_when_allowed(make, message, whole, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HEA_TEST_BOMB", str(tmp_path / "exploded"))
    folder = shutil.copytree(whole, tmp_path / "in" / "whole")
    (folder / "model.safetensors").unlink()
    make(folder)
    assert_refused(folder, capsys, "--allow-pickle", message=message)
    assert not (tmp_path / "exploded").exists()


def test_safetensors_are_preferred_to_pickles(whole, tmp_path, monkeypatch):
    monkeypatch.setenv("HEA_TEST_BOMB", str(tmp_path / "exploded"))
    folder = shutil.copytree(whole, tmp_path / "in" / "whole")
    bomb_archive(folder)
    monkeypatch.setattr(torch, "load", None)
    checked = open_checkpoint(folder, allow_pickle=True)
    assert [path.name for path in checked.weights.files] == ["model.safetensors"]
    assert "pytorch_model.bin" in checked.left_out
    load_model(checked)
    assert not (tmp_path / "exploded").exists()


def test_code_in_the_folder_is_neither_run_nor_copied(whole, tmp_path, capsys):
    folder = shutil.copytree(whole, tmp_path / "in" / "whole")
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    edit(folder, auto_map={"AutoModel": "evil.Evil", "AutoConfig": "evil.Config"}, _name_or_path="../../evil")
    assert convert(folder, "--method", "longformer", "-o", tmp_path / "out", "--json") == 0
    done = json.loads(capsys.readouterr().out)
    assert any("auto_map" in note for note in done["notes"])
    assert "evil.py" in done["left_out"]
    written = "".join(path.read_text() for path in (tmp_path / "out").glob("*.json"))
    assert "evil" not in written
    assert not (tmp_path / "out" / "evil.py").exists()


def test_links_inside_the_folder_are_followed(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "whole")
    (folder / "model.safetensors").rename(folder / "weights.dat")
    (folder / "model.safetensors").symlink_to("weights.dat")
    load_model(open_checkpoint(folder))


def test_json_files(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"name": "é \udc80"})  # a file name that is not UTF-8 contains lone surrogates
    assert path.read_bytes() == '{\n  "name": "é \\udc80"\n}\n'.encode()
    assert read_json_object(path) == {"name": "é \udc80"}
    with pytest.raises(UnsupportedAttentionError, match=r"a\.json is larger than 5 bytes"):
        read_json(path, max_bytes=5)
    with pytest.raises(UnsupportedAttentionError, match=r"b\.json cannot be read: No such file"):
        read_json(tmp_path / "b.json")
