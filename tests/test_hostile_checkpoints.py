"""Checkpoints from outside, broken or hostile: refused in one line, with nothing written, run or allocated."""

import io
import json
import os
import pathlib
import pickle
import resource
import shutil
import struct
import zipfile

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_efficient_attn import cli
from hf_efficient_attn.checkpoint import CheckedSource, load_model, open_checkpoint
from hf_efficient_attn.errors import UnsupportedAttentionError
from tiny_models import tiny_model

ENTRY = "bert.encoder.layer.0.attention.self.query.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A sound checkpoint of a tiny BERT with a head, with companions."""
    folder = tmp_path_factory.mktemp("sound") / "whole"
    tiny_model("bert", head=True).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 128}')
    (folder / "vocab.txt").write_text("a\nb\n")
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound") / "sharded"
    tiny_model("bert", head=True).save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


def convert(*arguments):
    return cli.run(cli.app, ["convert", *map(str, arguments)], "hf-efficient-attn")


def tree(folder):
    """Everything in a folder that a program could have changed, links and pipes not followed."""
    found = {}
    for path in sorted(folder.rglob("*")):
        size = path.lstat().st_size
        found[str(path)] = path.read_bytes() if path.is_file() and not path.is_symlink() and size < 2**24 else size
    return found


def assert_refused(folder, capsys, *options, said=""):
    """The command refuses, in one line, without a trace."""
    place = folder.parent / "out"
    before = tree(folder.parent)
    assert convert(folder, "--method", "longformer", "-o", place, *options) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and len(err) < 1000
    assert said in err, err
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


def in_header(change):
    def broken(folder):
        header, data = split(folder)
        join(folder, change(header) or header, data)

    return broken


def link(name, target):
    def broken(folder):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return broken


def instead(name, make):
    def broken(folder):
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return broken


def truncated(folder):
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw[:-100])


def twice_in_header(folder):
    header, data = split(folder)
    first = json.dumps(header)
    join(folder, (first[:-1] + f', "{ENTRY}": {json.dumps(header[ENTRY])}}}').encode(), data)


def drop_tensor(folder):
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    del state[ENTRY]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


class Bomb:
    def __reduce__(self):
        return os.mkdir, (str(pathlib.Path(os.environ["HEA_TEST_BOMB"])),)


def pickled(name, value=None):
    def broken(folder):
        (folder / "model.safetensors").unlink()
        if value is None:
            (folder / name).write_bytes(pickle.dumps(Bomb()))
        else:
            torch.save(value(), folder / name)

    return broken


CONFIGS = {
    "not JSON": (raw_config("{"), "not valid JSON"),
    "empty": (raw_config(""), "not valid JSON"),
    "not an object": (raw_config("[1, 2]"), "JSON object"),
    "not UTF-8": (raw_config(b'{"model_type": "b\xffrt"}'), "UTF-8"),
    "half a character": (raw_config('{"model_type": "bert", "x": "\\ud800"}'), "half a character"),
    "NaN": (raw_config('{"model_type": "bert", "hidden_dropout_prob": NaN}'), "NaN"),
    "deep nesting": (raw_config('{"a":' * 200 + "1" + "}" * 200), "nested"),
    "very deep nesting": (raw_config("[" * 200_000), "nested"),
    "a key twice": (raw_config('{"model_type": "bert", "model_type": "gpt2"}'), "twice"),
    "digits": (raw_config('{"model_type": "bert", "hidden_size": ' + "9" * 10_000 + "}"), "not valid JSON"),
    "large": (raw_config(" " * (9 * 2**20)), "more than"),
    "a folder": (instead("config.json", os.mkdir), "no regular file"),
    "a pipe": (instead("config.json", os.mkfifo), "no regular file"),
    "a link outside": (link("config.json", "/etc/hostname"), "symbolic link"),
    "a link to nothing": (link("config.json", "nowhere"), "cannot be read"),
    "a link to itself": (link("config.json", "config.json"), "cannot be"),
    "no model_type": (config(model_type="DELETED"), "model_type"),
    "model_type of code elsewhere": (
        config(model_type="mine", auto_map={"AutoModel": "mine.Mine"}),
        "never run",
    ),
    "model_type a list": (config(model_type=["bert"]), "model_type"),
    "hidden_size 1e12": (config(hidden_size=10**12), "hidden_size"),
    "hidden_size 1e12 as a float": (config(hidden_size=1e12), "built"),
    "hidden_size 1e7": (config(hidden_size=10**7), ""),
    "hidden_size text": (config(hidden_size="32"), "built"),
    "hidden_size negative": (config(hidden_size=-32), ""),
    "hidden_size zero": (config(hidden_size=0), ""),
    "1e6 layers": (config(num_hidden_layers=10**6), "num_hidden_layers"),
    "60,000 layers": (config(num_hidden_layers=60_000), "far larger"),
    "3 layers of 2": (config(num_hidden_layers=3), "lacks"),
    "1 layer of 2": (config(num_hidden_layers=1, efficient_attention={"method": "linear", "layers": [1]}), "layers"),
    "vocabulary": (config(vocab_size=61), "where config.json asks"),
    "vocabulary 1e7": (config(vocab_size=10**7), "far larger"),
    "positions 1e9": (config(max_position_embeddings=10**9), "max_position_embeddings"),
    "positions 1e6": (config(max_position_embeddings=10**6), ""),
    "labels 1e9": (config(num_labels=10**9), "num_labels"),
    "architectures no list": (config(architectures="BertModel"), "architectures"),
    "architectures unknown": (config(architectures=["EvilModel"]), "EvilModel"),
    "architectures no model": (config(architectures=["AutoTokenizer"]), "AutoTokenizer"),
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
    "layers not there": (chosen(method="longformer", layers=[7]), "layers [7]"),
    "layers many": (chosen(method="longformer", layers=list(range(10_000))), "larger than any choice"),
    "layers nested": (chosen(layers=[{"layers": [{"layers": [0]}], "method": "linear"}]), ""),
    "newer format": (chosen(method="longformer", version=99), "newer"),
    "learned tables not there": (chosen(method="linformer", projection_dim=8), "lacks"),
    "learned tables too large": (chosen(method="linformer", projection_dim=2**20), "learn more"),
    "choice no dictionary": (config(efficient_attention=["longformer"]), "dictionary"),
    "long method": (chosen(method="k" * 1_000_000), "unknown attention method"),
    "long value": (chosen(method="longformer", window_size="k" * 1_000_000), "larger than any choice"),
    "tokenizer elsewhere": (
        lambda folder: edit(folder, "tokenizer_config.json", vocab_file="../../secret"),
        "leads out",
    ),
    "tokenizer no JSON": (instead("tokenizer_config.json", lambda path: path.write_text("{,")), "not valid JSON"),
    "tokenizer a link outside": (link("vocab.txt", "/etc/hostname"), "symbolic link"),
    "tokenizer a pipe": (instead("vocab.txt", os.mkfifo), "no regular file"),
    "modules elsewhere": (
        instead("modules.json", lambda path: path.write_text('[{"path": "../1_Pooling"}]')),
        "plain name",
    ),
    "card a link outside": (link("README.md", "/etc/hostname"), "symbolic link"),
    "card broken": (instead("README.md", lambda path: path.write_text("---\na: [\n---\n")), "README.md"),
    "a hole for a vocabulary": (lambda folder: os.truncate(folder / "vocab.txt", 2**40), "larger than any"),
    "origin no object": (instead("efficient_attention.json", lambda path: path.write_text("[]")), "JSON object"),
    "an adapter": (instead("adapter_config.json", lambda path: path.write_text("{}")), "adapter"),
}

WEIGHTS = {
    "truncated": (truncated, "damaged"),
    "empty": (instead("model.safetensors", lambda path: path.write_bytes(b"")), "cut off"),
    "no safetensors": (instead("model.safetensors", lambda path: path.write_bytes(b"PK\3\4" * 99)), "cut off"),
    "a folder": (instead("model.safetensors", os.mkdir), "no regular file"),
    "a pipe": (instead("model.safetensors", os.mkfifo), "no regular file"),
    "a link outside": (link("model.safetensors", "/etc/hostname"), "symbolic link"),
    "header beyond the file": (lambda folder: join(folder, *split(folder), length=2**40), "cut off"),
    "header of 2**63": (lambda folder: join(folder, *split(folder), length=2**63), "cut off"),
    "header no JSON": (lambda folder: join(folder, b"{" * 64, b""), "header"),
    "header a list": (lambda folder: join(folder, b"[]      ", b""), "no JSON object"),
    "header empty": (lambda folder: join(folder, b"{}      ", b""), "no tensors"),
    "a tensor twice": (twice_in_header, "twice"),
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
    "name with a line break": (in_header(lambda h: {f"a\n{k}": v for k, v in h.items() if k[0] != "_"}), "names a"),
    "renamed": (in_header(lambda h: {k.replace("query", "quarry"): v for k, v in h.items()}), "lacks"),
    "one lacks": (drop_tensor, "lacks"),
    "pickle": (pickled("pytorch_model.bin"), "--allow-pickle"),
    "pickle .pt": (pickled("model.pt"), "safetensors"),
    "pickle .ckpt": (pickled("model.ckpt"), "safetensors"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
    "another model": (config(model_type="gpt2", architectures=["GPT2Model"]), ""),
}

INDICES = {
    "no JSON": (instead("model.safetensors.index.json", lambda path: path.write_text("[")), "not valid JSON"),
    "no map": (lambda folder: edit(folder, "model.safetensors.index.json", weight_map={}), "weight_map"),
    "a list": (lambda folder: edit(folder, "model.safetensors.index.json", weight_map=[1]), "weight_map"),
    "elsewhere": ("../whole/model.safetensors", "plain name"),
    "absolute": ("/etc/hostname", "plain name"),
    "backslashes": ("..\\model.safetensors", "plain name"),
    "a pickle": ("pytorch_model.bin", "no .safetensors file"),
    "a number": (3, "plain name"),
    "not there": ("model-00009-of-00009.safetensors", "cannot be read"),
    "a wrong file": ("model-00001-of-", "lacks tensor"),
    "one lacks": (None, "says nothing"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_are_refused(case, whole, tmp_path, capsys):
    folder = shutil.copytree(whole, tmp_path / "in" / "whole")
    CONFIGS[case][0](folder)
    assert_refused(folder, capsys, said=CONFIGS[case][1])


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_are_refused(case, whole, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HEA_TEST_BOMB", str(tmp_path / "exploded"))
    folder = shutil.copytree(whole, tmp_path / "in" / "whole")
    WEIGHTS[case][0](folder)
    assert_refused(folder, capsys, said=WEIGHTS[case][1])
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("case", INDICES)
def test_indices_are_refused(case, sharded, tmp_path, capsys):
    folder = shutil.copytree(sharded, tmp_path / "in" / "sharded")
    change, said = INDICES[case]
    if callable(change):
        change(folder)
    else:
        name = "model.safetensors.index.json"
        places = json.loads((folder / name).read_text())["weight_map"]
        files = sorted(set(places.values()))
        first = next(key for key, file in places.items() if file == files[-1])
        places[first] = files[0] if change == "model-00001-of-" else change
        edit(folder, name, weight_map={k: v for k, v in places.items() if v is not None})
    assert_refused(folder, capsys, said=said)


@pytest.mark.parametrize(
    "source", ["", "nowhere/at/all", "../nowhere", "no such folder", "x" * 5000, "a\0b", "evil\n/name"], ids=range(7)
)
def test_sources_that_are_none(source, tmp_path, capsys):
    assert convert(source, "--method", "longformer", "-o", tmp_path / "out") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_or_an_empty_folder_is_no_source(tmp_path, whole):
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


def compressed(folder):
    torch.save({"a": torch.zeros(2**20)}, folder / "pytorch_model.bin")
    with zipfile.ZipFile(folder / "pytorch_model.bin") as old:
        parts = {entry.filename: old.read(entry) for entry in old.infolist()}
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as new:
        for name, raw in parts.items():
            new.writestr(name, raw)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (bomb_archive, "damaged"),
        (compressed, "compressed"),
        (lambda folder: (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb())), "1.6"),
        (lambda folder: torch.save({"state": {}}, folder / "pytorch_model.bin"), "more than named tensors"),
        (lambda folder: torch.save([torch.ones(2)], folder / "pytorch_model.bin"), "more than named tensors"),
        (lambda f: torch.save({"a": torch.ones(1).expand(2**40)}, f / "pytorch_model.bin"), "larger than the file"),
        (lambda f: torch.save({"a": torch.eye(3).to_sparse()}, f / "pytorch_model.bin"), "sparse"),
    ],
    ids=["bomb", "compressed", "plain pickle", "nested", "a list", "expanded", "sparse"],
)
def test_pickles_run_nothing_even_when_allowed(make, said, whole, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HEA_TEST_BOMB", str(tmp_path / "exploded"))
    folder = shutil.copytree(whole, tmp_path / "in" / "whole")
    (folder / "model.safetensors").unlink()
    make(folder)
    assert_refused(folder, capsys, "--allow-pickle", said=said)
    assert not (tmp_path / "exploded").exists()


def test_safetensors_are_taken_where_a_pickle_is_too(whole, tmp_path, monkeypatch):
    monkeypatch.setenv("HEA_TEST_BOMB", str(tmp_path / "exploded"))
    folder = shutil.copytree(whole, tmp_path / "in" / "whole")
    bomb_archive(folder)
    monkeypatch.setattr(torch, "load", None)
    checked = open_checkpoint(folder, allow_pickle=True)
    assert [path.name for path in checked.weights.files] == ["model.safetensors"]
    assert "pytorch_model.bin" in checked.left_out
    load_model(checked)
    assert not (tmp_path / "exploded").exists()


def test_code_that_comes_along_is_neither_run_nor_copied(whole, tmp_path, capsys):
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


# Fuzzing: whatever stands in the files, `open_checkpoint` returns or refuses.

HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 200),
    st.sampled_from([10**4, 2**16, 2**16 + 1, 10**6, 2**24, 2**31, 10**12, 2**63, 10**30, -(2**63), 10**5000]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["../x", "/etc/passwd", "a/b", "linear", "longformer", "kdeformr", "BertModel", "gelu", "\ud800"]),
    st.lists(st.integers(-1, 3), max_size=4),
    st.dictionaries(st.sampled_from(["method", "layers", "version", "seed", "a"]), st.integers(-1, 3), max_size=3),
    st.just({"method": "longformer", "layers": [0]}),
    st.just({"method": "linear", "version": 1}),
    st.just([[[[[[[[[[]]]]]]]]]]),
)
KEYS = ["attn_implementation", "efficient_attention", "auto_map", "architectures", "model_type", "hidden_size"]
KEYS += ["num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size", "max_position_embeddings"]
KEYS += [
    "type_vocab_size",
    "hidden_act",
    "layer_norm_eps",
    "dtype",
    "id2label",
    "num_labels",
    "chunk_size_feed_forward",
]
KEYS += ["quantization_config", "is_decoder", "add_cross_attention", "_attn_implementation", "sub_configs", "to_dict"]
KEYS += ["pruned_heads", "tie_word_embeddings", "transformers_version", "pad_token_id", "problem_type", "return_dict"]
EXAMPLES = settings(
    derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False
)


def big(value):
    """json.dumps, also of integers that Python does not print."""
    try:
        return json.dumps(value)
    except ValueError:
        return "1" + "0" * 5000


def dumps(values):
    return "{" + ", ".join(f"{json.dumps(key)}: {big(value)}" for key, value in values.items()) + "}"


@st.composite
def damaged(draw, raw, kinds=("flip", "cut", "insert", "repeat")):
    """Bytes with a few of them changed, lost or added."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(raw) - 1, 0)))
        kind = draw(st.sampled_from(kinds))
        if kind == "flip":
            raw = raw[:at] + draw(st.binary(min_size=1, max_size=3)) + raw[at + 1 :]
        elif kind == "cut":
            raw = raw[:at] + raw[at + draw(st.integers(1, 40)) :]
        elif kind == "insert":
            raw = raw[:at] + draw(st.sampled_from([b"{", b"}", b"[", b'"', b",", b"\0", b"9" * 30, b"\xff"])) + raw[at:]
        else:
            raw = raw[:at] + raw[max(at - 30, 0) :]
    return raw


@pytest.fixture(scope="module")
def fuzzed(whole, sharded, tmp_path_factory):
    """Copies to be broken, and the check that nothing but refusals comes out of them."""
    place = tmp_path_factory.mktemp("fuzzed")
    folders = {kind: shutil.copytree(source, place / kind) for kind, source in (("whole", whole), ("sharded", sharded))}
    names = sorted(place.rglob("*"))
    counts = {"good": 0, "refused": 0}

    def check(kind, name, raw, load=False):
        path = folders[kind] / name
        sound, said = path.read_bytes(), b""
        path.write_bytes(raw)
        try:
            checked = open_checkpoint(folders[kind])
            assert isinstance(checked, CheckedSource)
            if load:
                assert isinstance(load_model(checked), torch.nn.Module)
            counts["good"] += 1
        except UnsupportedAttentionError as error:
            counts["refused"] += 1
            said = str(error).encode()
        finally:
            assert path.read_bytes() == raw
            path.write_bytes(sound)
            assert sorted(place.rglob("*")) == names
        assert len(said) < 1000

    check.place = place
    check.counts = counts
    yield check
    # Neither was all refused, nor all taken.
    assert not sum(counts.values()) or min(counts.values()) >= 5


def changed_config(folder, changes):
    values = json.loads((folder / "config.json").read_text())
    return dumps({**values, **changes}).encode()


CHANGES = st.dictionaries(st.sampled_from(KEYS), HOSTILE, min_size=1, max_size=3)


@settings(EXAMPLES, max_examples=900)
@given(changes=CHANGES)
def test_fuzzed_configs(changes, whole, fuzzed):
    fuzzed("whole", "config.json", changed_config(whole, changes))


@settings(EXAMPLES, max_examples=300)
@given(data=st.data())
def test_fuzzed_bytes_of_configs(data, whole, fuzzed):
    fuzzed("whole", "config.json", data.draw(damaged((whole / "config.json").read_bytes())))


@settings(EXAMPLES, max_examples=500)
@given(data=st.data())
def test_fuzzed_headers(data, whole, fuzzed):
    header, rest = split(whole)
    names = [name for name in header if name != "__metadata__"]
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)):
        kind = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "entry", "gone", "renamed"]))
        if kind == "entry":
            header[name] = data.draw(HOSTILE)
        elif kind == "gone":
            header.pop(name)
        elif kind == "renamed":
            header[data.draw(st.text(max_size=5))] = header.pop(name)
        elif kind == "dtype":
            header[name]["dtype"] = data.draw(st.sampled_from(["F32", "I32", "F16", "F64", "BOOL", "F8_E4M3", "", 3]))
        else:
            numbers = st.sampled_from([0, 1, 32, 64, 1024, 4096, 2**31, 2**63, 2**64, -1, 1.5])
            header[name][kind] = data.draw(st.lists(numbers, max_size=3))
    text = dumps(header).encode()
    length = len(text) + data.draw(st.sampled_from([0, 0, 0, 1, -1, 8, 2**20, 2**60]))
    fuzzed("whole", "model.safetensors", struct.pack("<Q", length) + text + rest)


@settings(EXAMPLES, max_examples=300)
@given(data=st.data())
def test_fuzzed_bytes_of_safetensors(data, whole, fuzzed):
    raw = (whole / "model.safetensors").read_bytes()
    cut = data.draw(st.sampled_from([0, 0, 1, 100, 5000]))
    fuzzed("whole", "model.safetensors", data.draw(damaged(raw[:9000])) + raw[9000 : len(raw) - cut])


@settings(EXAMPLES, max_examples=400)
@given(data=st.data())
def test_fuzzed_indices(data, sharded, fuzzed):
    name = "model.safetensors.index.json"
    index = json.loads((sharded / name).read_text())
    places = index["weight_map"]
    files = sorted(set(places.values()))
    for key in data.draw(st.lists(st.sampled_from(sorted(places)), max_size=2, unique=True)):
        places[key] = data.draw(st.one_of(HOSTILE, st.sampled_from(files)))
    if data.draw(st.booleans()):
        index[data.draw(st.sampled_from(["metadata", "weight_map", "other"]))] = data.draw(HOSTILE)
    fuzzed("sharded", name, dumps(index).encode())


@settings(EXAMPLES, max_examples=250)
@given(changes=CHANGES)
def test_fuzzed_models(changes, whole, fuzzed):
    limit = resource.getrlimit(resource.RLIMIT_AS)
    if not pathlib.Path("/proc/self/statm").exists():
        pytest.skip("tells how much memory it has on Linux alone")
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    # What a hostile config would make the process take, it does not get.
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * 2**30, limit[1]))
    try:
        fuzzed("whole", "config.json", changed_config(whole, changes), load=True)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)


@settings(EXAMPLES, max_examples=60)
@given(changes=CHANGES)
def test_fuzzed_commands(changes, whole, fuzzed):
    folder, place = fuzzed.place / "whole", fuzzed.place / "out"
    sound = (folder / "config.json").read_bytes()
    (folder / "config.json").write_bytes(changed_config(whole, changes))
    before = tree(folder)
    said = io.StringIO()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.stderr", said)
            patch.setattr("sys.stdout", io.StringIO())
            status = convert(folder, "--method", "longformer", "-o", place)
        assert status in (0, 2)
        assert said.getvalue().count("\n") == (status == 2)
        assert place.exists() == (status == 0)
        assert tree(folder) == before
    finally:
        (folder / "config.json").write_bytes(sound)
        shutil.rmtree(place, ignore_errors=True)
    assert [path.name for path in fuzzed.place.iterdir() if path.name.startswith(".")] == []
