"""`hf-efficient-attn convert`: the files that it writes and keeps. It never writes over what others put there."""

import json
import os
import shutil

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hf_efficient_attn as hea
from each import refuses
from helpers.commands import command, interrupt, read, refused, run_json, same, shown, tensors, tree
from helpers.learned import shake
from hf_efficient_attn.checkpoint import load_model, open_checkpoint
from hf_efficient_attn.checkpoint.files import Output
from hf_efficient_attn.checkpoint.loading import quiet
from hf_efficient_attn.conversion import checkpoint as checkpoint_conversion
from hf_efficient_attn.conversion.checkpoint import convert_saved_model
from hf_efficient_attn.io.writing import replacing, write_results
from tiny_models import FAMILIES, SIZES, SMALL, output, tiny_batch, tiny_class, tiny_config, tiny_model

INDEX = "model.safetensors.index.json"
COMPANIONS = {
    "tokenizer_config.json": b'{"model_max_length": 128}',
    "tokenizer.json": b'{"version": "1.0"}\n',
    "special_tokens_map.json": b"{}",
    "vocab.txt": b"a\r\nb\xff\n",
    "merges.txt": b"a b\n",
    "chat_template.jinja": b"{{ messages }}",
    "preprocessor_config.json": b'{"size": 32}',
    "generation_config.json": b'{"max_new_tokens": 7}',
    "modules.json": b'[{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}, {"idx": 2, "path": "2_Dense"}]',
    "sentence_bert_config.json": b'{"max_seq_length": 128}',
    "1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}',
    "2_Dense/config.json": b"{}",
    "LICENSE": b"Do what you like.\n",
}


def save(folder, family, **options):
    with quiet():
        tiny_model(family, head=True).save_pretrained(folder, **options)
    return folder


@pytest.fixture
def source(tmp_path):
    return save(tmp_path / "source", "bert")


def linformer(source, output, **options):
    return convert_saved_model(source, output, "linformer", hyperparameters={"projection_dim": 8}, **options)


CONVERTED = [("bert", "longformer"), ("gpt2", "eva"), ("vit", "linformer")]
rest = [(family, name) for family in FAMILIES for name in ("longformer", "eva") if (family, name) not in CONVERTED]


@pytest.mark.parametrize(
    ("family", "method"), [*CONVERTED, *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in rest)]
)
def test_conversion_and_back(family, method, tmp_path):
    source, cls = save(tmp_path / "source", family), tiny_class(family, head=True)
    hyperparameters = {"proposal": "learned"} if method == "eva" else SMALL[method]
    done = convert_saved_model(source, tmp_path / "converted", method, hyperparameters=hyperparameters)
    after, before = tensors(tmp_path / "converted"), tensors(source)
    assert {name for name in after if name not in before} == set(done["parameters"]["new"])
    assert bool(done["parameters"]["new"]) == (method != "longformer")
    assert same(before, {name: after[name] for name in before})
    assert done["architecture"] == cls.__name__
    found, inputs = {}, tiny_batch(family)
    exec(done["load"], found)
    loaded = found["model"].eval()
    converted = hea.convert(cls.from_pretrained(source), method, **hyperparameters).eval()
    assert type(loaded) is cls and loaded.config._attn_implementation == method
    assert torch.equal(output(loaded, inputs), output(converted, inputs))
    back = convert_saved_model(tmp_path / "converted", tmp_path / "back", "sdpa")
    assert same(before, tensors(tmp_path / "back")) and read(tmp_path / "back") == read(source)
    assert back["parameters"]["dropped"] == done["parameters"]["new"] and not back["parameters"]["new"]
    assert back["load"].startswith("from transformers") and done["load"].startswith("import hf_efficient_attn")


def test_every_tensor_keeps_its_dtype_and_none_is_lost(source, tmp_path):
    state = load_file(source / "model.safetensors")
    for number, name in enumerate(sorted(state)):
        state[name] = state[name].to((torch.float16, torch.bfloat16, torch.float32)[number % 3])
    # Tensors of another head, and of an older version of Transformers.
    state["cls.seq_relationship.weight"] = torch.randn(2, 32, dtype=torch.float64)
    state["bert.embeddings.position_ids"] = torch.arange(128)[None]
    save_file(state, source / "model.safetensors", metadata={"format": "pt", "made": "by hand"})
    done = linformer(source, tmp_path / "out")
    written = tensors(tmp_path / "out")
    assert same(state, {name: written[name] for name in state})
    assert any("cls.seq_relationship.weight" in note for note in done["notes"])
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "made": "by hand"}
    # Learned parameters have the dtype of the others.
    tiny_model("bert").bfloat16().save_pretrained(tmp_path / "half")
    for dtype in ("bfloat16", "float32"):  # as which Transformers loads them
        (tmp_path / "half" / "config.json").write_text(json.dumps({**read(tmp_path / "half"), "dtype": dtype}))
        linformer(tmp_path / "half", tmp_path / "out", force=True)
        assert {tensor.dtype for tensor in tensors(tmp_path / "out").values()} == {torch.bfloat16}
        assert read(tmp_path / "out")["dtype"] == dtype


@pytest.mark.parametrize("prefixed", [True, False], ids=["more", "fewer"])
def test_tensor_names_with_another_prefix_than_those_of_the_class(prefixed, source, tmp_path):
    """A bare model whose tensors have the names of a model with a head, and the reverse."""
    state = load_file(source / "model.safetensors")
    if prefixed:
        (source / "config.json").write_text(json.dumps(read(source) | {"architectures": ["BertModel"]}))
    else:
        state = {name.removeprefix("bert."): tensor for name, tensor in state.items()}
        save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    done = linformer(source, tmp_path / "out", max_length=256)
    written = tensors(tmp_path / "out")
    new = [name for name in written if name not in state]
    assert len(new) == 2 and all(name.startswith("bert.") == prefixed for name in written if "encoder" in name)
    table = ("bert." if prefixed else "") + "embeddings.position_embeddings.weight"
    assert table in done["parameters"]["new"] and written[table].shape == (256, 32)
    _, report = getattr(transformers, done["architecture"]).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not [name for name in report["unexpected_keys"] if "learned" in name]
    assert not [name for name in report["missing_keys"] if "pooler" not in name]


def test_experts_stay_as_they_are_in_files(tmp_path):
    """Files have the experts of a layer one by one, and the model has all of them in one tensor."""
    config = transformers.MixtralConfig(**SIZES, vocab_size=60, num_key_value_heads=2, num_local_experts=2)
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "source")
    convert_saved_model(tmp_path / "source", tmp_path / "out", "eva", hyperparameters={"proposal": "learned"})
    before, after = tensors(tmp_path / "source"), tensors(tmp_path / "out")
    assert len(after) == len(before) + 4 and same(before, {name: after[name] for name in before})


def test_a_result_that_does_not_load_is_not_written(source, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_conversion, "_stored_name", lambda name, *others: name.replace("learned", "lost"))
    refuses("does not load again", linformer, source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_shards_stay_shards(tmp_path):
    source = save(tmp_path / "source", "bert", max_shard_size="30KB")
    names = sorted(path.name for path in source.glob("*.safetensors"))
    assert len(names) > 2
    linformer(source, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == names
    index = read(tmp_path / "out", INDEX)
    written = tensors(tmp_path / "out")
    assert index["weight_map"].keys() == written.keys()
    assert all(name in load_file(tmp_path / "out" / file) for name, file in index["weight_map"].items())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in written.values())
    transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    convert_saved_model(tmp_path / "out", tmp_path / "back", "sdpa")
    assert read(tmp_path / "back", INDEX) == read(source, INDEX)
    assert all(same(load_file(source / name), load_file(tmp_path / "back" / name)) for name in names)


def test_tokenizer_and_other_files_are_copied_unchanged(source, tmp_path, capsys):
    other = {"benchmark.json": b"{}", "README.md": b"---\nlicense: mit\n---\n", "pytorch_model.bin": b"", "a.py": b""}
    other |= {"onnx/model.onnx": b"", "tf_model.h5": b"", ".gitattributes": b""}
    for name, raw in {**COMPANIONS, **other}.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(raw)
    dense = "2_Dense/model.safetensors"
    save_file({"linear.weight": torch.ones(2, 2)}, source / dense)
    done = convert_saved_model(source, tmp_path / "out", "linear")
    assert all((tmp_path / "out" / name).read_bytes() == (source / name).read_bytes() for name in (*COMPANIONS, dense))
    ours = {"config.json", "model.safetensors", "efficient_attention.json", "README.md", dense}
    assert {entry["name"] for entry in done["files"]} == {*COMPANIONS, *ours}
    assert set(done["left_out"]) == {"pytorch_model.bin", "a.py", "onnx", "tf_model.h5"}
    assert (tmp_path / "out" / "README.md").read_bytes() != other["README.md"]
    # The command says the same.
    told = shown(capsys, "convert", source, "--method", "linear", "-o", tmp_path / "out", "--force").out.splitlines()
    assert told[0] == f"BertForMaskedLM of {source} -> {tmp_path / 'out'}"
    files = [[cell.strip() for cell in line.split("|")[1:-1]] for line in told if line.startswith("| ")]
    assert files == [["file", "bytes"], *([entry["name"], f"{entry['bytes']:,}"] for entry in done["files"])]
    assert [line for line in told if line.startswith("left out: ")] == [f"left out: {x}" for x in done["left_out"]]
    assert [line for line in told if line.startswith("note: ")] == [f"note: {note}" for note in done["notes"]]
    kept, new, dropped = (done["parameters"][name] for name in ("kept", "new", "dropped"))
    assert f"tensors: {kept} kept bit for bit, {len(new)} new or changed, {len(dropped)} dropped" in told
    assert told[-len(done["load"].splitlines()) :] == ["    " + line for line in done["load"].splitlines()]


def test_the_origin_is_carried_on(source, tmp_path, capsys):
    card = "---\nlicense: mit\nlanguage: en\ntags: [a, b]\npipeline_tag: fill-mask\n---\n# Mine\n"
    (source / "README.md").write_text(card)
    first, second, name = tmp_path / "first", tmp_path / "second", "efficient_attention.json"
    assert "give --base-model ORG/NAME" in shown(capsys, "convert", source, "--method", "linear", "-o", first).out
    origin = read(first, name)
    assert origin == {
        "license": "mit", "tags": ["a", "b"], "pipeline_tag": "fill-mask", "language": ["en"],
        "base_model": None, "max_length": None, "trained_positions": 128, "install": None,
        "hf_efficient_attn": hea.__version__,
    }  # fmt: skip
    (first / name).write_text(json.dumps({**origin, "install": "hf_efficient_attn==0.2.0"}))
    line = ("convert", first, "--method", "longformer", "-o", second)
    assert "--base-model" not in shown(capsys, *line, "--base-model", "some/bert").out
    assert read(second, name) == origin | {"base_model": "some/bert", "install": "hf_efficient_attn==0.2.0"}
    text = (second / "README.md").read_text()
    assert "base_model: some/bert" in text and "\npip install hf_efficient_attn==0.2.0\n" in text
    (first / name).write_text(json.dumps({**origin, "install": "../package"}))
    assert "efficient_attention.json: install: give" in refused(capsys, *line, "--force")


def test_extended_positions(tmp_path, capsys):
    source, note = save(tmp_path / "source", "roberta"), "the table of 128 positions is repeated {} times"
    (source / "tokenizer_config.json").write_text('{"model_max_length": 128, "unk_token": "[UNK]"}')

    def card(source, name, method, *options):
        out = shown(capsys, "convert", tmp_path / source, "--method", method, *options, "-o", tmp_path / name).out
        return (tmp_path / name / "README.md").read_text(), out

    text, out = card("source", "same", "linear", "--max-length", 128)
    assert "extended" not in text and "is repeated" not in out
    text, out = card("source", "first", "linformer:projection_dim=8", "--max-length", 320)
    assert note.format(2.5) in out and "model_max_length 320 in place of 128" in out
    assert "the position table was extended from 128 to 320 tokens" in text
    assert read(tmp_path / "first", "tokenizer_config.json") == {"model_max_length": 320, "unk_token": "[UNK]"}
    model = transformers.RobertaForMaskedLM.from_pretrained(tmp_path / "first")
    output(model, tiny_batch("roberta", length=320))
    reference = hea.extend_positions(transformers.RobertaForMaskedLM.from_pretrained(source), 320)
    assert same(hea.convert(reference, "linformer", projection_dim=8).state_dict(), model.state_dict())
    before, after = tensors(source), tensors(tmp_path / "first")
    changed = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    assert changed == ["roberta.embeddings.position_embeddings.weight"]
    # The second conversion compares with what was trained, not with the table that it finds.
    text, out = card("first", "second", "linear", "--max-length", 640)
    assert note.format(5) in out and "extended from 128 to 640 tokens" in text
    text, out = card("first", "third", "linear")
    assert "is repeated" not in out and "extended from 128 to 320 tokens" in text


def test_a_file_can_give_the_methods_of_the_layers(source, tmp_path, capsys):
    mix = [{"layers": [0], "method": "longformer", "window_size": 4}, {"layers": [1], "method": "linear"}]
    file = tmp_path / "mix.json"
    line = ("convert", source, "--config", file, "-o", tmp_path / "out")
    file.write_text(json.dumps({"layers": mix}))
    lines = "attention: longformer (window_size=4)\nlayers: 0\nattention: linear\nlayers: 1\n"
    assert lines in shown(capsys, *line).out
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path / "out").eval()
    converted = hea.convert(transformers.BertForMaskedLM.from_pretrained(source), {"layers": mix}).eval()
    assert loaded.config.efficient_attention == converted.config.efficient_attention
    assert torch.equal(output(loaded, tiny_batch("bert")), output(converted, tiny_batch("bert")))
    chosen = {"method": "longformer", "window_size": 4, "layers": [1], "calibrated_length": 70, "version": 2}
    file.write_text(json.dumps({"calibrated": chosen}))
    out = shown(capsys, *line, "--force").out
    assert "attention: longformer (window_size=4)\n" in out and "calibrated_length=" not in out
    assert "calibrated: on inputs of up to 70 tokens" in out


def test_from_one_method_to_another(source, tmp_path, capsys):
    convert_saved_model(source, tmp_path / "a", "linformer", hyperparameters={"projection_dim": 8, "share": "none"})
    model = shake(load_model(open_checkpoint(tmp_path / "a")))
    with quiet():
        model.save_pretrained(tmp_path / "a")
    trained = {name: tensor for name, tensor in tensors(tmp_path / "a").items() if "learned" in name}
    assert len(trained) == 4

    kept = convert_saved_model(tmp_path / "a", tmp_path / "same", "linformer", layers=[1], hyperparameters={"seed": 1})
    assert [name for name in trained if name not in tensors(tmp_path / "same")] == kept["parameters"]["dropped"]
    assert len(kept["parameters"]["dropped"]) == 2 and kept["settings"]["projection_dim"] == 8
    for name, tensor in tensors(tmp_path / "same").items():
        assert name not in trained or torch.equal(tensor, trained[name])

    out, err = shown(capsys, "convert", tmp_path / "a", "--method", "kdeformer", "-o", tmp_path / "other")
    assert "4 dropped" in out and err == ""
    assert not any("learned" in name for name in tensors(tmp_path / "other"))

    changed = convert_saved_model(tmp_path / "a", tmp_path / "b", "linformer", hyperparameters={"projection_dim": 4})
    assert set(changed["parameters"]["new"]) == set(trained)
    assert changed["settings"]["share"] == "none"
    refuses("learned tables", convert_saved_model, tmp_path / "a", tmp_path / "c", "linformer", max_length=256)
    convert_saved_model(tmp_path / "a", tmp_path / "c", "nystromformer", max_length=256)


def test_configs_without_a_class_or_with_an_implementation_that_is_not_installed(tmp_path):
    source = tmp_path / "source"
    transformers.BertModel(tiny_config("bert"), add_pooling_layer=False).save_pretrained(source)
    config = read(source)
    del config["architectures"]
    (source / "config.json").write_text(json.dumps({**config, "attn_implementation": "flash_attention_2"}))
    done = convert_saved_model(source, tmp_path / "out", "linear")
    assert done["architecture"] == "BertModel" and "AutoModel" in done["notes"][0]
    assert any("no pooler" in note for note in done["notes"])
    assert same(tensors(source), tensors(tmp_path / "out"))  # a missing pooler is not added
    assert read(tmp_path / "out")["attn_implementation"] == "linear"


def test_old_checkpoints_with_a_pickle_and_settings_of_generation_in_the_config(tmp_path, capsys):
    source, out = save(tmp_path / "source", "gpt2"), tmp_path / "out"
    state = load_file(source / "model.safetensors")
    for name in ("model.safetensors", "generation_config.json"):
        (source / name).unlink()
    torch.save({**state, "lm_head.weight": state["transformer.wte.weight"]}, source / "pytorch_model.bin")
    generation = {"num_beams": 4, "temperature": 0.3}  # temperature has no effect without do_sample
    (source / "config.json").write_text(json.dumps(read(source) | generation))
    shown(capsys, "convert", source, "--method", "linear", "-o", out, "--allow-pickle")
    written = tensors(out)
    assert torch.equal(written.pop("lm_head.weight"), state["transformer.wte.weight"])
    assert same(state, written) and not list(out.glob("*.bin"))
    assert read(out, "generation_config.json").items() >= generation.items()


def test_hub_ids(source, tmp_path, monkeypatch, capsys):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (source / "README.md").write_text("---\nlicense: mit\n---\n")
    root, revision = tmp_path / "cache" / "models--org--tiny", "0" * 40
    snapshot = root / "snapshots" / revision
    for folder in (root / "blobs", root / "refs", snapshot):
        folder.mkdir(parents=True)
    (root / "refs" / "main").write_text(revision)
    for number, path in enumerate(sorted(source.iterdir())):
        shutil.copy(path, root / "blobs" / f"{number:040}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040}")
    shown(capsys, "convert", "org/tiny", "--method", "linear", "-o", tmp_path / "out")
    assert same(tensors(source), tensors(tmp_path / "out"))
    origin = read(tmp_path / "out", "efficient_attention.json")
    assert (origin["base_model"], origin["license"]) == ("org/tiny", "mit")
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))

    # Given as a folder, the snapshot is the same. Links out of the cache are refused.
    shown(capsys, "convert", snapshot, "--method", "linear", "-o", tmp_path / "folder")
    assert read(tmp_path / "folder", "efficient_attention.json") == origin
    more = ("--method", "linear", "-o", tmp_path / "other")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(source / "config.json")
    assert all("symbolic link" in refused(capsys, "convert", name, *more) for name in ("org/tiny", snapshot))
    assert "org/none" in refused(capsys, "convert", "org/none", *more) and not (tmp_path / "other").exists()


def test_the_methods_of_another_checkpoint(source, tmp_path, capsys):
    shown(capsys, "convert", source, "--method", "longformer:window_size=7", "--layers", "1", "-o", tmp_path / "one")
    config = tmp_path / "one" / "config.json"
    shown(capsys, "convert", source, "--config", config, "-o", tmp_path / "two")
    assert (tmp_path / "two" / "config.json").read_bytes() == config.read_bytes()
    kernel = {**read(tmp_path / "one", "config.json"), "attn_implementation": "org/longformer:longformer"}
    config.write_text(json.dumps(kernel))
    shown(capsys, "convert", source, "--config", config, "-o", tmp_path / "three")
    assert read(tmp_path / "two", "config.json") == read(tmp_path / "three", "config.json")
    for changes, words in (
        ({"efficient_attention": None}, "names no method: give config.json of a converted checkpoint"),
        ({"attn_implementation": {"text_config": "linear"}}, "names methods for parts"),
    ):
        config.write_text(json.dumps({**kernel, **changes}))
        assert words in refused(capsys, "convert", source, "--config", config, "-o", tmp_path / "four")


def test_the_report(source, tmp_path, capsys):
    line = ("convert", source, "--method", "linformer:projection_dim=8", "--set", "seed=3", "--layers", "1", "-o")
    state, verbosity = torch.get_rng_state(), transformers.logging.get_verbosity()
    out, err = shown(capsys, *line, tmp_path / "out")
    assert err == "" and "linformer (projection_dim=8" in out and "seed=3" in out and "layers: 1\n" in out
    assert torch.equal(torch.get_rng_state(), state) and transformers.logging.get_verbosity() == verbosity
    done = run_json(capsys, *line, tmp_path / "out", "--force")
    assert done["layers"] == done["settings"]["layers"] == [1] and done["settings"]["projection_dim"] == 8
    assert all(".layer.1." in name for name in done["parameters"]["new"])
    assert read(tmp_path / "out")["efficient_attention"]["layers"] == [1]


# Where `convert`, `benchmark` and `analyze` write: nothing of others is lost, and nothing is half-done.


@pytest.fixture
def convert(made):
    """convert(output, *options) -> the arguments of a conversion to that folder."""
    return lambda output, *options: ("convert", made("bert", True), "--method", "linear", "-o", output, *options)


def at_the_end(monkeypatch, action):
    """Do something when the conversion is complete but for its last renaming."""
    write_card = checkpoint_conversion.write_card

    def write_and_act(*arguments, **options):
        write_card(*arguments, **options)
        action()

    monkeypatch.setattr(checkpoint_conversion, "write_card", write_and_act)


def fill(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_txt", ".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_existing_folders_are_replaced_only_with_force(convert, tmp_path, capsys):
    out = tmp_path / "out"
    fill(out, mine_txt="mine")
    assert "--force" in refused(capsys, *convert(out)) and tree(out) == {"mine.txt": b"mine"}
    assert command(*convert(out, "--force")) == 0
    assert not (out / "mine.txt").exists() and (out / "config.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "empty").mkdir()
    assert command(*convert(tmp_path / "empty")) == 0


@pytest.mark.parametrize(
    ("before", "options"),
    [(None, []), ({}, []), ({"old__old_txt": "old", "changed_txt": "old"}, ["--force"])],
    ids=["new", "empty", "replaced"],
)
def test_what_appears_during_the_work_is_not_lost(before, options, convert, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    if before is not None:
        out.mkdir()
        fill(out, **before)
    at_the_end(monkeypatch, lambda: fill(out, new_txt="mine", old__new_txt="mine", changed_txt="mine now"))
    error = refused(capsys, *convert(out, *options))
    assert "something else has written" in error and "--force" in error
    mine = {"new.txt": b"mine", "old": None, "old/new.txt": b"mine", "changed.txt": b"mine now"}
    assert tree(out) == mine | ({"old/old.txt": b"old"} if before else {})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("number", range(1, 4))
def test_nothing_is_lost_when_a_replacement_is_interrupted(number, convert, tmp_path, monkeypatch):
    fill(tmp_path / "out", old_txt="old")
    rename, calls = os.rename, iter(range(1, 10))
    monkeypatch.setattr(os, "rename", lambda *given: interrupt() if next(calls) == number else rename(*given))
    status = command(*convert(tmp_path / "out", "--force"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert status == (130 if number < 3 else 0)
    if status:
        assert tree(tmp_path / "out") == {"old.txt": b"old"}
    else:
        open_checkpoint(tmp_path / "out")


def test_two_conversions_to_the_same_folder(convert, tmp_path, capsys):
    """The first one is running, or was killed while it wrote."""
    at_work = tmp_path / ".out.converting"
    fill(at_work, half_txt="half")
    assert f"or was killed: in that case delete {at_work}" in refused(capsys, *convert(tmp_path / "out"))
    assert tree(tmp_path) == {at_work.name: None, f"{at_work.name}/half.txt": b"half"}
    refuses("or was killed", Output, tmp_path / "out", tmp_path / "source", force=False)  # before a long distillation
    assert command(*convert(tmp_path / "other")) == 0


def test_outputs_that_cannot_be_used_are_refused(tmp_path, monkeypatch):
    """They would damage other files, or are no names."""
    source = save(tmp_path / "above" / "source", "bert")
    fill(tmp_path, file="mine")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    before, no_name = tree(tmp_path), "the output .* is not the name of a folder.*"
    for folder, message in [
        (source, "in the source"),
        (source / ".." / "source" / "inside", "in the source"),
        (tmp_path / "above", "holds the source"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "link", "symbolic link"),
        (tmp_path / "work", "never replaced"),
        ("", "never replaced"),
        ("/", "holds"),
        ("\ud812x", f"{no_name}surrogates not allowed"),
        ("a\0b", f"{no_name}embedded null"),
        *(("x" * length, f"{no_name}File name too long") for length in (300, 245)),
        (tmp_path / "file/a/b/out", f"{no_name}Not a directory"),
    ]:
        refuses(message, checkpoint_conversion.convert_saved_model, source, folder, "linear", force=True)
    assert tree(tmp_path) == before


# 20,000 bytes are too few for the weights, and 600 for config.json.
@pytest.mark.parametrize("limit", [20_000, 600])
def test_a_full_disk_is_an_error_of_one_line(limit, convert, tmp_path, capsys):
    resource = pytest.importorskip("resource")
    before, line = resource.getrlimit(resource.RLIMIT_FSIZE), convert(tmp_path / "new" / "out")
    # Python ignores the signal that comes with this limit, so that writing fails as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        err = refused(capsys, *line, status=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert err.startswith("error: the output ")
    assert "out' cannot be written: " in err and "File too large" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_results_on_a_full_disk(tmp_path):
    path = tmp_path / "analysis.json"
    path.write_text("old")
    full = pytest.raises(OSError, match=r"analysis\.json cannot be written: .*No space left")
    with full, replacing(path) as draft:
        draft.symlink_to("/dev/full")
        draft.write_text("new")
    assert tree(tmp_path) == {"analysis.json": b"old"}


def test_results_do_not_replace_files_that_appeared_during_the_measurement(tmp_path):
    def draw(result, path):
        path.write_text(str(result["n"]))

    (tmp_path / "analysis.png").write_text("mine")
    written = write_results({"n": 1}, tmp_path, "analysis", draw, force=False)
    assert [path.name for path in written] == ["analysis-1.json", "analysis-1.png"]
    assert read(tmp_path, "analysis-1.json") == {"n": 1} and written[1].read_text() == "1"
    assert (tmp_path / "analysis.png").read_text() == "mine"
    assert write_results({"n": 3}, tmp_path, "analysis", draw)[1].read_text() == "3"

    def fail(result, path):
        raise OSError("no font")

    before = tree(tmp_path)
    refuses("no font", write_results, {}, tmp_path, "other", fail, force=False, error=OSError)
    assert tree(tmp_path) == before
