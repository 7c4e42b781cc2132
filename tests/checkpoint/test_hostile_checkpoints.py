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
from safetensors.torch import load_file, save_file

from each import refuses
from helpers.commands import refused, run_json, tree
from hf_efficient_attn.checkpoint import load_model, open_checkpoint
from hf_efficient_attn.io.json import read_json, read_json_object, write_json
from tiny_models import tiny_model

ENTRY = "bert.encoder.layer.0.attention.self.query.weight"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Valid checkpoints of a tiny BERT with a head: one with files of a tokenizer, and one in shards."""
    folder = tmp_path_factory.mktemp("valid")
    model = tiny_model("bert", head=True)
    model.save_pretrained(folder / "whole")
    (folder / "whole" / "tokenizer_config.json").write_text('{"model_max_length": 128}')
    (folder / "whole" / "vocab.txt").write_text("a\nb\n")
    model.save_pretrained(folder / "sharded", max_shard_size="30KB")
    assert len(list((folder / "sharded").glob("model-*.safetensors"))) > 2
    return folder


@pytest.fixture
def folder(sources, tmp_path):
    """A copy of the checkpoint in one file."""
    return shutil.copytree(sources / "whole", tmp_path / "in" / "whole")


@pytest.fixture(autouse=True)
def _no_code_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("HEA_TEST_BOMB", str(tmp_path / "exploded"))
    yield
    assert not (tmp_path / "exploded").exists()


# What damages a checkpoint: functions of its folder.


def edit(name, **changes):
    def damage(folder):
        values = {**json.loads((folder / name).read_text()), **changes}
        (folder / name).write_text(json.dumps({key: value for key, value in values.items() if value != "DELETED"}))

    return damage


def config(**changes):
    return edit("config.json", **changes)


def chosen(**values):
    return config(efficient_attention=values, attn_implementation=values.get("method", "longformer"))


def instead(name, make):
    """Put something else in the place of a file: bytes, a text, a link (of a path), or what a function makes."""

    def damage(folder):
        path = folder / name
        path.unlink(missing_ok=True)
        if isinstance(make, pathlib.Path):
            path.symlink_to(make)
        elif callable(make):
            make(path)
        else:
            path.write_bytes(make if isinstance(make, bytes) else make.encode())

    return damage


OUTSIDE = pathlib.Path("/etc/hostname")


def raw(change):
    """Change the bytes of the weights, given the length of the header, the header itself, and the data."""

    def damage(folder):
        content = (folder / WEIGHTS).read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        header, data, *claimed = change(json.loads(content[8 : 8 + length]), content[8 + length :])
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", claimed[0] if claimed else len(text)) + text + data)

    return damage


def entry(**changes):
    return raw(lambda header, data: ({**header, ENTRY: {**header[ENTRY], **changes}}, data))


def drop_tensor(folder):
    state = load_file(folder / WEIGHTS)
    del state[ENTRY]
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})


def file_of_first_tensor(name):
    """Another file name in the index of the shards."""

    def damage(folder):
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        edit(INDEX, weight_map={**weight_map, next(iter(weight_map)): name})(folder)

    return damage


class Bomb:
    def __reduce__(self):
        return os.mkdir, (str(pathlib.Path(os.environ["HEA_TEST_BOMB"])),)


def pickled(make, name="pytorch_model.bin"):
    """Put a pickle, which a function makes, in the place of the weights."""

    def damage(folder):
        (folder / WEIGHTS).unlink()
        make(folder / name)

    return damage


def bomb(path):
    path.write_bytes(pickle.dumps(Bomb()))


def bomb_archive(path):
    """A file in PyTorch's format whose pickle runs code."""
    torch.save({"a": torch.ones(2)}, path)
    with zipfile.ZipFile(path) as old:
        parts = {entry.filename: old.read(entry) for entry in old.infolist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, content in parts.items():
            new.writestr(name, pickle.dumps(Bomb()) if name.endswith("data.pkl") else content)


CASES = {
    "config not JSON": (instead("config.json", "{"), "not JSON"),
    "config not an object": (instead("config.json", "[1, 2]"), "JSON object"),
    "config not UTF-8": (instead("config.json", b'{"model_type": "b\xffrt"}'), "not JSON"),
    "config nested deeply": (instead("config.json", "[" * 200_000), "not JSON"),
    "config large": (instead("config.json", " " * (33 * 2**20)), "larger than"),
    "config a folder": (instead("config.json", os.mkdir), "not a regular file"),
    "config a link outside": (instead("config.json", OUTSIDE), "symbolic link"),
    "config a link to itself": (instead("config.json", pathlib.Path("config.json")), "cannot be"),
    "no model_type": (config(model_type="DELETED"), "model_type"),
    "code elsewhere": (config(model_type="mine", auto_map={"AutoModel": "mine.Mine"}), "never run"),
    "hidden_size 1e12": (config(hidden_size=10**12), "far larger"),
    "hidden_size zero": (config(hidden_size=0), ""),
    "1,000 layers": (config(num_hidden_layers=1_000), "far larger"),
    "3 layers of 2": (config(num_hidden_layers=3), "lacks"),
    "1 layer of 2": (config(num_hidden_layers=1, efficient_attention={"method": "linear", "layers": [1]}), "layers"),
    "vocabulary": (config(vocab_size=61), "where config.json asks"),
    "positions 1e9": (config(max_position_embeddings=10**9), "far larger"),
    "architectures not a list": (config(architectures="BertModel"), "no model"),
    "architectures unknown": (config(architectures=["../EvilModel"]), "EvilModel"),
    "architectures of another config": (config(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
    "quantised": (config(quantization_config={"quant_method": "gptq", "bits": 4}), "quantised"),
    "backbone elsewhere": (config(use_pretrained_backbone=True, backbone="evil/backbone"), "another model"),
    "kernels from the hub": (config(attn_implementation="kernels-community/flash-attn"), "unknown attention method"),
    "method unknown": (chosen(method="kdeformr"), "kdeformer"),
    "key unknown": (chosen(method="longformer", windowsize=3), "window_size"),
    "missing layers": (chosen(method="longformer", layers=[7]), "layers [7]"),
    "newer format": (chosen(method="longformer", version=99), "newer"),
    "missing learned parameters": (chosen(method="linformer", projection_dim=8), "lacks"),
    "learned parameters too large": (chosen(method="linformer", projection_dim=2**20), "would learn"),
    "settings not a dictionary": (config(efficient_attention=["longformer"]), "dictionary"),
    "long method": (chosen(method="k" * 1_000_000), "unknown attention method"),
    "tokenizer elsewhere": (edit("tokenizer_config.json", vocab_file="../../secret"), "leads out"),
    "tokenizer a link outside": (instead("vocab.txt", OUTSIDE), "symbolic link"),
    "tokenizer a pipe": (instead("vocab.txt", os.mkfifo), "not a regular file"),
    "modules elsewhere": (instead("modules.json", '[{"path": "../1_Pooling"}]'), "plain name"),
    "card a link outside": (instead("README.md", OUTSIDE), "symbolic link"),
    "card damaged": (instead("README.md", "---\na: [\n---\n"), "README.md"),
    "a sparse vocabulary of 1 TB": (lambda folder: os.truncate(folder / "vocab.txt", 2**40), "larger than"),
    "origin not an object": (instead("efficient_attention.json", "[]"), "JSON object"),
    "origin with another type": (instead("efficient_attention.json", '{"tags": [1]}'), "tags cannot be [1]"),
    "an adapter": (instead("adapter_config.json", "{}"), "adapter"),
    "weights truncated": (lambda folder: os.truncate(folder / WEIGHTS, 50_000), "damaged"),
    "weights a folder": (instead(WEIGHTS, os.mkdir), "not a regular file"),
    "header beyond the file": (raw(lambda header, data: (header, data, 2**63)), "damaged"),
    "header not JSON": (raw(lambda header, data: (b"{" * 64, b"")), "header"),
    "overlap": (entry(data_offsets=[0, 4096]), "damaged"),
    "dtype unknown": (entry(dtype="F33"), "damaged"),
    "integers for weights": (entry(dtype="I32"), "quantised"),
    "shape of another size": (entry(shape=[2**62, 2**62]), "damaged"),
    "shape of the same size": (entry(shape=[16, 64]), "where config.json asks"),
    "a missing tensor": (drop_tensor, "lacks"),
    "pickle": (pickled(bomb), "--allow-pickle"),
    "pickle of another name": (pickled(bomb, "model.ckpt"), "safetensors"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "no weights"),
    # Of a checkpoint in shards.
    "index not JSON": (instead(INDEX, "["), "not JSON"),
    "index empty": (edit(INDEX, weight_map={}), "weight_map"),
    "index a list": (edit(INDEX, weight_map=[1]), "weight_map"),
    "index elsewhere": (file_of_first_tensor("../whole/model.safetensors"), "plain name"),
    "index outside": (file_of_first_tensor("/etc/hostname"), "plain name"),
    "index backslash": (file_of_first_tensor("..\\model.safetensors"), "plain name"),
    "index of a pickle": (file_of_first_tensor("pytorch_model.bin"), "no safetensors file"),
    "index of a number": (file_of_first_tensor(3), "plain name"),
    "index of a missing file": (file_of_first_tensor("model-00009-of-00009.safetensors"), "cannot be read"),
    # With --allow-pickle.
    "allowed bomb": (pickled(bomb_archive), "damaged"),
    "allowed plain pickle": (pickled(bomb), "damaged"),
    "allowed nested": (pickled(lambda path: torch.save({"state": {}}, path)), "more than named tensors"),
    "allowed list": (pickled(lambda path: torch.save([torch.ones(2)], path)), "more than named tensors"),
    "allowed sparse": (pickled(lambda path: torch.save({"a": torch.eye(3).to_sparse()}, path)), "sparse"),
}


@pytest.mark.parametrize("case", CASES)
def test_damaged_checkpoints_are_refused_in_one_line_and_no_file_changes(case, sources, tmp_path, capsys):
    damage, message = CASES[case]
    kind = "sharded" if case.startswith("index") else "whole"
    folder = shutil.copytree(sources / kind, tmp_path / "in" / kind)
    damage(folder)
    before = tree(tmp_path)
    options = ["--allow-pickle"] if case.startswith("allowed") else []
    err = refused(capsys, "convert", folder, "--method", "longformer", "-o", tmp_path / "in" / "out", *options)
    assert message in err and len(err) < 1000 and tree(tmp_path) == before


@pytest.mark.parametrize(
    "source", ["", "../nowhere", "no such folder", "x" * 5000, "a\0b", "evil\n/name", "\udcff"], ids=range(7)
)
def test_sources_that_do_not_exist(source, tmp_path, capsys):
    refused(capsys, "convert", source, "--method", "longformer", "-o", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_file_or_an_empty_folder_is_not_a_source(tmp_path, sources):
    for path, message in ((sources / "whole" / "config.json", "is a file"), (tmp_path, r"no config\.json")):
        refuses(message, open_checkpoint, path)


def test_safetensors_are_preferred_to_pickles(folder, monkeypatch):
    bomb_archive(folder / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", None)
    checked = open_checkpoint(folder, allow_pickle=True)
    assert [path.name for path in checked.weights] == [WEIGHTS]
    assert "pytorch_model.bin" in checked.left_out
    load_model(checked)


def test_code_in_the_folder_is_neither_run_nor_copied(folder, tmp_path, capsys):
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    config(auto_map={"AutoModel": "evil.Evil", "AutoConfig": "evil.Config"}, _name_or_path="../../evil")(folder)
    done = run_json(capsys, "convert", folder, "--method", "longformer", "-o", tmp_path / "out")
    assert any("auto_map" in note for note in done["notes"])
    assert "evil.py" in done["left_out"] and not (tmp_path / "out" / "evil.py").exists()
    assert "evil" not in "".join(path.read_text() for path in (tmp_path / "out").glob("*.json"))


def test_links_inside_the_folder_are_followed(folder):
    (folder / WEIGHTS).rename(folder / "weights.dat")
    (folder / WEIGHTS).symlink_to("weights.dat")
    load_model(open_checkpoint(folder))


def test_json_files(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"name": "é \udc80"})  # a file name that is not UTF-8 contains lone surrogates
    assert path.read_bytes() == '{\n  "name": "é \\udc80"\n}\n'.encode()
    assert read_json_object(path) == {"name": "é \udc80"}
    refuses(r"a\.json is larger than 5 bytes", read_json, path, max_bytes=5)
    refuses(r"b\.json cannot be read: No such file", read_json, tmp_path / "b.json")
