"""Converted checkpoints: what they keep, how other programs load them, and limits of the lengths of texts."""

import copy
import json
import os
import pickle
import re
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForMaskedLM

import converted
import hf_efficient_attn as hea
import tiny_models
from each import refuses
from helpers.commands import read, same, tensors
from hf_efficient_attn.checkpoint.limits import sentence_limit, set_limits
from hf_efficient_attn.checkpoint.loading import quiet
from hf_efficient_attn.conversion.checkpoint import convert_saved_model, describe, exact_lengths, num_positions
from hf_efficient_attn.models.t2t_vit import T2TViTConfig, T2TViTForImageClassification
from tiny_models import SMALL, T2T_VIT, output, reloaded, tiny_batch, tiny_class, tiny_config, tiny_model

# A checkpoint keeps its method through any number of saves, and nothing if it is exact.


@pytest.mark.parametrize("method", tiny_models.METHODS)
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_three_saves_and_loads(family, method, tmp_path):
    model = tiny_model(family, method, head=True)
    inputs = tiny_batch(family, padding="right")
    first, choice = output(model, inputs), model.config.efficient_attention
    assert choice.items() >= {"method": method, **SMALL[method], "version": 1}.items()
    auto = AutoModelForCausalLM if family in tiny_models.DECODERS else AutoModelForMaskedLM
    auto = AutoModelForImageClassification if family in tiny_models.IMAGES else auto
    for turn, cls in enumerate((tiny_class(family, head=True), auto, auto)):
        folder = tmp_path / str(turn)
        model.save_pretrained(folder)
        assert read(folder).items() >= {"attn_implementation": method, "efficient_attention": choice}.items()
        model = cls.from_pretrained(folder)
        assert (model.config._attn_implementation, model.config.efficient_attention) == (method, choice)
        assert torch.equal(output(model, inputs), first)
    if family in tiny_models.DECODERS:
        assert not {"attn_implementation", "efficient_attention"} & set(read(folder, "generation_config.json"))


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_back_to_exact_leaves_nothing_behind(family, tmp_path):
    model, inputs = tiny_model(family), tiny_batch(family)
    exact = output(model, inputs)
    model.save_pretrained(tmp_path / "exact")
    loaded = reloaded(hea.convert(model, "kdeformer", layers=[1], **SMALL["kdeformer"]), tmp_path / "ours")
    assert not torch.equal(output(loaded, inputs), exact)
    hea.convert(loaded, "sdpa").save_pretrained(tmp_path / "back")
    assert read(tmp_path / "back") == read(tmp_path / "exact")
    assert same(tensors(tmp_path / "back"), tensors(tmp_path / "exact")) and torch.equal(output(loaded, inputs), exact)
    # Loaded as exact, and switched without `convert`, it saves clean too.
    for options in ({"attn_implementation": "sdpa"}, {}):
        other = tiny_class(family).from_pretrained(tmp_path / "ours", **options)
        other.set_attn_implementation("sdpa")
        assert torch.equal(output(other, inputs), exact)
        other.save_pretrained(tmp_path / "other")
        assert read(tmp_path / "other") == read(tmp_path / "exact")


def test_every_hyperparameter_is_written_with_its_value(tmp_path):
    """If a later release changes a default, saved models keep the old value."""
    model = tiny_model("bert", seed=1)
    hea.convert(model, "kdeformer", num_samples=8).save_pretrained(tmp_path)
    written = read(tmp_path)["efficient_attention"]
    assert written == {**hea.KDEformerConfig(num_samples=8).to_dict(), "version": 1}
    assert "layers" not in written
    model.set_attn_implementation("performer")  # by name alone: its defaults
    model.save_pretrained(tmp_path)
    assert read(tmp_path)["efficient_attention"] == {**hea.PerformerConfig().to_dict(), "version": 1}
    mix = [{"layers": [1], "method": "performer", "num_features": 8}, {"layers": [0], "method": "linear"}]
    hea.convert(model, {"layers": mix}).save_pretrained(tmp_path)
    one, other = hea.PerformerConfig(num_features=8).to_dict(), hea.LinearConfig().to_dict()
    layers = [{"layers": [1], **one}, {"layers": [0], **other}]
    assert read(tmp_path)["efficient_attention"] == {"method": "performer", "layers": layers, "version": 1}


def test_a_checkpoint_that_cannot_be_read_is_refused_with_the_reason(tmp_path):
    hea.convert(tiny_model("bert"), "longformer").save_pretrained(tmp_path)
    config = read(tmp_path)
    config["efficient_attention"] |= {"version": 3, "new_option": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for cls in (transformers.AutoModel, transformers.AutoConfig, transformers.BertModel, transformers.BertConfig):
        refuses("newer hf_efficient_attn.*upgrade", cls.from_pretrained, tmp_path)


def test_configs_and_models_copy_compare_and_pickle(tmp_path):
    config = tiny_config("llama", "longformer")
    choice = config.efficient_attention
    assert json.loads(json.dumps(choice)) == choice
    config.save_pretrained(tmp_path)
    for again in (
        copy.deepcopy(config),
        copy.copy(config),
        pickle.loads(pickle.dumps(config)),
        transformers.LlamaConfig.from_dict(config.to_dict()),
        transformers.LlamaConfig(**config.to_diff_dict()),
        transformers.AutoConfig.from_pretrained(tmp_path),
    ):
        assert (again._attn_implementation, again.efficient_attention) == ("longformer", choice)
        refuses("read-only", again.efficient_attention.update, window_size=3)
    assert repr(config).count("longformer") == 2
    settings = hea.EfficientAttentionConfig("longformer", SMALL["longformer"])
    assert settings.to_dict() == choice and len({settings, hea.EfficientAttentionConfig.from_dict(choice)}) == 1
    model, inputs = tiny_model("vit", "kdeformer"), tiny_batch("vit")
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(output(again, inputs), output(model, inputs))


# Converted checkpoints in plain Transformers, in sentence-transformers, and with another method.


@pytest.mark.exhaustive
def test_the_card_quotes_the_error_of_plain_transformers(tmp_path):
    """In a process that has not imported this package. It knows neither the method nor a model of this package."""
    converted.make(tmp_path / "bert", "bert", "kdeformer")
    tiny_t2t_vit(tmp_path)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for name, sentence in (("bert", 'ValueError: Specified `attn_implementation="kdeformer"` is'), ("out", "t2t_vit")):
        code = "import sys; from transformers import AutoModel; AutoModel.from_pretrained(sys.argv[1])"
        command = [sys.executable, "-c", code, str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
        quoted = re.search(r"^> (.*) \.\.\.$", (tmp_path / name / "README.md").read_text(), re.M)[1]
        assert done.returncode != 0 and quoted in done.stderr and sentence in quoted


def test_the_examples_of_the_card_run(tmp_path):
    converted.make(tmp_path, "bert", "kdeformer")
    text = (tmp_path / "README.md").read_text().replace("ORG/NAME", str(tmp_path))
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_sentence_transformers(minilm, tmp_path):
    """The embeddings equal the converted model's, whether its config or `model_kwargs` names the method."""
    library = pytest.importorskip("sentence_transformers")
    texts = ["A short sentence.", "Another, which is a little longer than the first one was."]
    batch = transformers.AutoTokenizer.from_pretrained(minilm)(texts, padding=True, return_tensors="pt")
    mask = batch["attention_mask"][..., None]
    model, found = transformers.BertModel.from_pretrained(minilm).eval(), []
    shutil.copytree(minilm, tmp_path / "out", copy_function=shutil.copyfile)
    exact = torch.nn.functional.normalize((output(model, batch) * mask).sum(1) / mask.sum(1))
    hea.convert(model, "linear")
    for options in ({"model_kwargs": {"attn_implementation": "linear"}}, {}):
        loaded = library.SentenceTransformer(str(tmp_path / "out"), device="cpu", **options)
        found.append(torch.tensor(loaded.encode(texts)))
        model.save_pretrained(tmp_path / "out")
    expected = torch.nn.functional.normalize((output(model, batch) * mask).sum(1) / mask.sum(1))
    assert all(torch.allclose(one, expected, atol=1e-5) for one in found)
    assert not torch.allclose(found[0], exact, atol=1e-5)


def test_a_checkpoint_loaded_with_another_method(tmp_path):
    """The parameters that the first method learned are reported as unused."""
    converted.make(tmp_path, "bert", "linformer")
    load = transformers.BertForMaskedLM.from_pretrained
    same, report = load(tmp_path, output_loading_info=True)
    names = {name for name, _ in same.named_parameters() if ".learned_parameters." in name}
    assert names and not report["unexpected_keys"]
    choice = {"attn_implementation": "longformer", "efficient_attention": {"window_size": 3}}
    other, report = load(tmp_path, output_loading_info=True, **choice)
    assert other.config.efficient_attention.items() >= {"method": "longformer", "window_size": 3}.items()
    assert set(report["unexpected_keys"]) == names
    assert not [name for name, _ in other.named_parameters() if ".learned_parameters." in name]
    load(tmp_path, attn_implementation="performer").save_pretrained(tmp_path / "performer")
    assert read(tmp_path / "performer")["efficient_attention"]["method"] == "performer"
    again = load(tmp_path / "performer", efficient_attention={"num_features": 8})
    assert again.config.efficient_attention["num_features"] == 8


def tiny_t2t_vit(folder):
    T2TViTForImageClassification(T2TViTConfig(**T2T_VIT)).save_pretrained(folder / "exact")
    chosen = {"num_samples": 8, "block_size": 8}
    return convert_saved_model(folder / "exact", folder / "out", "kdeformer", hyperparameters=chosen, layers=["t2t.0"])


def test_a_model_of_this_package_is_loaded_as_its_card_says(tmp_path):
    done = tiny_t2t_vit(tmp_path)
    assert done["load"].splitlines()[:2] == [
        "import hf_efficient_attn",
        "from transformers import AutoModelForImageClassification",
    ]
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'AutoModelForImageClassification.from_pretrained("ORG/NAME")' in card
    assert "- Layers: t2t.0; the other layers are exact." in card
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert loaded.config.efficient_attention["layers"] == ["t2t.0"]
    back = convert_saved_model(tmp_path / "out", tmp_path / "back", "sdpa")
    assert back["load"].startswith("import hf_efficient_attn\n")
    text = (tmp_path / "back" / "README.md").read_text()
    assert "the package `hf_efficient_attn`, which contains the model" in text and "import hf_efficient_attn\n" in text


# Limits of the lengths of texts.

NAME = "sentence_bert_config.json"
MODULES = [{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}]


def sentence_model(folder, family="bert", **files):
    """A tiny model with a tokenizer, and files of sentence-transformers."""
    with quiet():
        tiny_model(family).save_pretrained(folder)
        converted.tiny_tokenizer().save_pretrained(folder)
    pooling = {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 32}
    contents = {"modules.json": MODULES, "1_Pooling/config.json": pooling, **files}
    for name, values in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(values))
    return folder


def test_max_length_raises_every_limit(tmp_path):
    own = {
        "max_seq_length": 64,
        "do_lower_case": False,
        "tokenizer_args": {"model_max_length": 65, "x": 1},
        "processor_kwargs": {"model_max_length": 66},
        "processing_kwargs": {"text": {"max_length": 67, "padding": True}},
    }
    source = sentence_model(tmp_path / "source", **{NAME: own})
    tokenizer = read(source, "tokenizer.json")
    tokenizer["truncation"] = {"direction": "Right", "max_length": 69, "strategy": "LongestFirst", "stride": 0}
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    done = convert_saved_model(source, tmp_path / "out", "linear", max_length=300)
    for key, old in [("max_seq_length", 64), ("tokenizer_args.model_max_length", 65), ("truncation.max_length", 69)]:
        assert any(f"{key} 300 in place of {old}; the rest is unchanged" in note for note in done["notes"])
    assert {"file": NAME, "key": "max_seq_length", "before": 64, "after": 300} in done["limits"]
    assert {limit["before"] for limit in done["limits"]} == {*range(64, 68), 69, 128} and len(done["limits"]) == 6
    assert read(tmp_path / "out", NAME) == json.loads(re.sub("6[4-7]", "300", json.dumps(own)))
    assert read(tmp_path / "out", "tokenizer.json") == {
        **tokenizer, "truncation": {**tokenizer["truncation"], "max_length": 300}
    }  # fmt: skip
    assert read(source, NAME) == own


def test_a_position_table_in_a_dtype_of_its_own_is_repeated_as_it_is(tmp_path):
    model = tiny_model("roberta").bfloat16()
    table = model.embeddings.position_embeddings.float()
    torch.nn.init.normal_(table.weight)
    model.save_pretrained(tmp_path / "source")
    convert_saved_model(tmp_path / "source", tmp_path / "out", "nearfar", max_length=300)
    found = tensors(tmp_path / "out")["embeddings.position_embeddings.weight"]
    hea.extend_positions(model, 300)
    assert found.dtype == torch.float32 and torch.equal(found, table.weight)


def test_limits_that_are_not_set_or_larger(tmp_path):
    for number, (before, after) in enumerate(
        [({}, {}), ({"max_seq_length": None}, {"max_seq_length": None}), ({"max_seq_length": 300}, None),
         ({"max_seq_length": "64"}, None), ({"max_seq_length": 512}, {"max_seq_length": 300})]
    ):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / NAME).write_text(json.dumps(before))
        (folder / "tokenizer_config.json").write_text('{"model_max_length": 1000000000000000019884624838656}')
        (folder / "tokenizer.json").write_text('{"truncation": null}')
        changed = set_limits(folder, 300)
        # A text of more tokens than the model takes would be an error, so the larger limit of sentences shrinks.
        assert read(folder, NAME) == (before if after is None else after)
        assert [limit["before"] for limit in changed] == ([512] if after == {"max_seq_length": 300} else [])
        is_set = type(before.get("max_seq_length")) is int
        assert sentence_limit(folder)["file"] == (NAME if is_set else "tokenizer_config.json")


def test_without_max_length_a_limit_below_the_positions_is_noted(tmp_path):
    source = sentence_model(tmp_path / "source", **{NAME: {"max_seq_length": 64}})
    note = f"texts are truncated at 64 tokens (max_seq_length in {NAME}), although the model takes 128"
    first = convert_saved_model(source, tmp_path / "first", "linear")
    assert any(note in text and "--max-length 128" in text for text in first["notes"]) and first["limits"] == []
    assert read(tmp_path / "first", NAME) == {"max_seq_length": 64}
    # What the note says works, and then there is nothing to note.
    second = convert_saved_model(tmp_path / "first", tmp_path / "second", "linear", max_length=128)
    assert read(tmp_path / "second", NAME) == {"max_seq_length": 128} and second["positions"] == 128
    third = convert_saved_model(tmp_path / "second", tmp_path / "third", "linear")
    assert not any("truncated" in text for text in [*second["notes"], *third["notes"]])
    assert sentence_limit(tmp_path / "third")["before"] == 128
    (source / NAME).write_text("[]")
    refuses(NAME, convert_saved_model, source, tmp_path / "no", "linear", max_length=300)
    assert not (tmp_path / "no").exists()


def test_rotary_positions_need_no_extension_up_to_what_the_model_takes(tmp_path):
    source = sentence_model(tmp_path / "source", "llama", **{NAME: {"max_seq_length": 64}})
    done = convert_saved_model(source, tmp_path / "out", "linear", max_length=128)
    assert read(tmp_path / "out", NAME) == {"max_seq_length": 128} and done["parameters"]["new"] == []
    words = r"--max-length 129: .*raise max_position_embeddings"
    refuses(words, convert_saved_model, source, tmp_path / "no", "linear", max_length=129)
    refuses(r"cannot be extended: .*interpolate_pos_encoding=True", hea.extend_positions, tiny_model("vit"), 300)


def test_a_model_in_the_folder_of_a_module(tmp_path):
    """An old layout of sentence-transformers: the Transformer has a folder like every other module."""
    inner = sentence_model(tmp_path / "whole" / "0_Transformer", **{NAME: {"max_seq_length": 64}})
    (tmp_path / "whole" / "modules.json").write_text(json.dumps([{"path": "0_Transformer"}]))
    refuses(r"no config\.json.*modules\.json", convert_saved_model, tmp_path / "whole", tmp_path / "out", "linear")
    convert_saved_model(inner, tmp_path / "out", "linear", max_length=300)
    assert read(tmp_path / "out", NAME) == {"max_seq_length": 300}


def test_where_texts_differ():
    model = tiny_model("bert")
    mix = [{"layers": [1], "method": "longformer", "window_size": 4}, {"layers": [0], "method": "linear"}]
    groups = exact_lengths(hea.convert(model, {"layers": mix}))
    assert groups == [
        {"layers": [0], "method": "linear", "settings": {}, "tokens": 0},
        {"layers": [1], "method": "longformer", "settings": {"window_size": 4}, "tokens": 5},
    ]
    assert describe(groups, num_positions(model)) == [
        "linear (layers 0): differs from exact attention at every length: measure it (hea.attention_error) or train it",
        "longformer (layers 1): up to 5 tokens are computed exactly, more are approximated",
    ]
    told = " ".join(describe(exact_lengths(hea.convert(model, "kdeformer")), num_positions(model)))
    assert told.startswith("kdeformer: ") and "the model takes 128 tokens, so its output does not change" in told
    assert exact_lengths(hea.convert(model, "sdpa")) == []
