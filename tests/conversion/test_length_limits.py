"""What `convert` says and changes about lengths: limits of texts in files, and from where on a method is not exact."""

import json
import shutil

import pytest

import hf_efficient_attn as hea
from converted import tiny_tokenizer
from hf_efficient_attn import cli
from hf_efficient_attn.checkpoint.limits import find_limits, sentence_limit, set_limits
from hf_efficient_attn.checkpoint.loading import quiet
from hf_efficient_attn.conversion.checkpoint import convert_checkpoint
from hf_efficient_attn.conversion.report import describe, exact_lengths, num_positions
from hf_efficient_attn.errors import UnsupportedAttentionError
from instances import INSTANCES
from tiny_models import output, tiny_batch, tiny_model

MODULES = [{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}]


def sentence_model(folder, family="bert", **files):
    """A tiny model with a tokenizer, and files of sentence-transformers."""
    with quiet():
        tiny_model(family).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    contents = {
        "modules.json": MODULES,
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 32},
        **files,
    }
    for name, values in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(values))
    return folder


def read(folder, name):
    return json.loads((folder / name).read_text())


def convert(*arguments):
    return cli.run(cli.app, ["convert", *map(str, arguments)], "hf-efficient-attn")


# Limits of texts

NAMES = ["sentence_bert_config.json", "sentence_xlm-roberta_config.json"]


@pytest.mark.parametrize("name", NAMES)
def test_max_length_raises_every_limit(name, tmp_path, capsys):
    own = {
        "max_seq_length": 64,
        "do_lower_case": False,
        "tokenizer_args": {"model_max_length": 65, "x": 1},
        "processor_kwargs": {"model_max_length": 66},
        "processing_kwargs": {"text": {"max_length": 67, "padding": True}},
    }
    source = sentence_model(tmp_path / "source", **{name: own, f"1_Pooling/{NAMES[0]}": {"max_seq_length": 68}})
    tokenizer = read(source, "tokenizer.json")
    tokenizer["truncation"] = {"direction": "Right", "max_length": 69, "strategy": "LongestFirst", "stride": 0}
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    line = [source, "--method", "linear", "--max-length", 300]
    assert convert(*line, "-o", tmp_path / "out") == 0
    out = capsys.readouterr().out
    for key, old in [("max_seq_length", 64), ("tokenizer_args.model_max_length", 65), ("truncation.max_length", 69)]:
        assert f"{key} 300 in place of {old}; the rest is unchanged" in out
    assert read(tmp_path / "out", name) == {
        "max_seq_length": 300,
        "do_lower_case": False,
        "tokenizer_args": {"model_max_length": 300, "x": 1},
        "processor_kwargs": {"model_max_length": 300},
        "processing_kwargs": {"text": {"max_length": 300, "padding": True}},
    }
    assert read(tmp_path / "out", "tokenizer.json") == {
        **tokenizer, "truncation": {**tokenizer["truncation"], "max_length": 300}
    }  # fmt: skip
    assert read(tmp_path / "out", f"1_Pooling/{NAMES[0]}") == {"max_seq_length": 300}
    assert read(source, name) == own
    assert convert(*line, "-o", tmp_path / "again", "--json") == 0
    limits = json.loads(capsys.readouterr().out)["limits"]
    assert {"file": name, "key": "max_seq_length", "before": 64, "after": 300} in limits
    assert {"file": "tokenizer_config.json", "key": "model_max_length", "before": 128, "after": 300} in limits
    assert len(limits) == 7 and all(limit["after"] == 300 for limit in limits)


def test_limits_that_are_not_set_or_larger(tmp_path):
    for number, (before, after) in enumerate(
        [({}, {}), ({"max_seq_length": None}, {"max_seq_length": None}), ({"max_seq_length": 300}, None),
         ({"max_seq_length": "64"}, None), ({"max_seq_length": 512}, {"max_seq_length": 300})]
    ):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / NAMES[0]).write_text(json.dumps(before))
        (folder / "tokenizer_config.json").write_text('{"model_max_length": 1000000000000000019884624838656}')
        (folder / "tokenizer.json").write_text('{"truncation": null}')
        changed = set_limits(folder, 300)
        # A text of more tokens than the model takes would be an error, so the larger limit of sentences shrinks.
        assert read(folder, NAMES[0]) == (before if after is None else after)
        assert [limit["before"] for limit in changed] == ([512] if after == {"max_seq_length": 300} else [])
        assert len(find_limits(folder)) == 1 + (type(before.get("max_seq_length")) is int)


def test_the_limits_of_another_model_in_a_subfolder_stay(tmp_path):
    other = {"config.json": {"model_type": "bert"}, NAMES[0]: {"max_seq_length": 7}, "tokenizer_config.json": {}}
    for name, values in other.items():
        for part in ("", "query_0"):
            (tmp_path / part).mkdir(exist_ok=True)
            (tmp_path / part / name).write_text(json.dumps(values))
    assert [limit["file"] for limit in set_limits(tmp_path, 300)] == [NAMES[0]]
    assert read(tmp_path / "query_0", NAMES[0]) == {"max_seq_length": 7}


def test_without_max_length_a_limit_below_the_positions_is_noted(tmp_path):
    source = sentence_model(tmp_path / "source", **{NAMES[0]: {"max_seq_length": 64}})
    note = (
        "texts are truncated at 64 tokens (max_seq_length in sentence_bert_config.json), although the model takes 128"
    )
    first = convert_checkpoint(source, tmp_path / "first", "linear")
    assert any(note in text and "--max-length 128" in text for text in first["notes"]) and first["limits"] == []
    assert read(tmp_path / "first", NAMES[0]) == {"max_seq_length": 64}
    # What the note says works, and then there is nothing to note.
    second = convert_checkpoint(tmp_path / "first", tmp_path / "second", "linear", max_length=128)
    assert read(tmp_path / "second", NAMES[0]) == {"max_seq_length": 128} and second["positions"] == 128
    third = convert_checkpoint(tmp_path / "second", tmp_path / "third", "linear")
    assert not any("truncated" in text for text in [*second["notes"], *third["notes"]])
    assert sentence_limit(tmp_path / "third").tokens == 128
    (source / NAMES[0]).write_text("[]")
    with pytest.raises(UnsupportedAttentionError, match=NAMES[0]):
        convert_checkpoint(source, tmp_path / "no", "linear", max_length=300)
    assert not (tmp_path / "no").exists()


def test_rotary_positions_need_no_extension_up_to_what_the_model_takes(tmp_path):
    source = sentence_model(tmp_path / "source", "llama", **{NAMES[0]: {"max_seq_length": 64}})
    done = convert_checkpoint(source, tmp_path / "out", "linear", max_length=128)
    assert read(tmp_path / "out", NAMES[0]) == {"max_seq_length": 128} and done["parameters"]["new"] == []
    with pytest.raises(UnsupportedAttentionError, match="rotary positions"):
        convert_checkpoint(source, tmp_path / "no", "linear", max_length=129)


def test_a_model_in_the_folder_of_a_module(tmp_path, capsys):
    """An old layout of sentence-transformers: the Transformer has a folder like every other module."""
    whole, inner = tmp_path / "whole", tmp_path / "whole" / "0_Transformer"
    sentence_model(inner, **{NAMES[0]: {"max_seq_length": 64}})
    shutil.rmtree(inner / "1_Pooling")
    (inner / "modules.json").rename(whole / "modules.json")
    (whole / "modules.json").write_text(json.dumps([{"path": "0_Transformer"}, {"path": "1_Pooling"}]))
    assert convert(whole, "--method", "linear", "-o", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "no config.json" in error and "modules.json" in error
    assert convert(inner, "--method", "linear", "--max-length", 300, "-o", tmp_path / "out") == 0
    assert read(tmp_path / "out", NAMES[0]) == {"max_seq_length": 300}


def test_sentence_transformers_reads_the_whole_text(minilm, tmp_path):
    library = pytest.importorskip("sentence_transformers", reason="pip install sentence-transformers")
    source = shutil.copytree(minilm, tmp_path / "source")
    assert read(source, NAMES[0])["max_seq_length"] == 256
    chosen = {"window_size": 64}
    done = convert_checkpoint(source, tmp_path / "out", "longformer", hyperparameters=chosen, max_length=640)
    exec(done["load"], found := {})
    model = found["model"].to("cpu")
    assert isinstance(model, library.SentenceTransformer)
    assert model.max_seq_length == 640
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away", "from", "it"]
    start = " ".join(words[i % 14] for i in range(250))
    text = start + " " + " ".join(words[(i * i) % 13] for i in range(350))
    assert 590 < model.tokenizer(text, return_tensors="pt")["input_ids"].shape[1] < 640
    whole, cut = model.encode([text, start], convert_to_tensor=True)
    assert (whole @ cut).item() < 0.99
    before = library.SentenceTransformer(str(source), device="cpu").encode([text, start], convert_to_tensor=True)
    assert (before[0] @ before[1]).item() > 0.99  # there it was truncated


# From where on a method differs from exact attention


@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_every_method_says_up_to_where_it_is_exact(instance):
    assert instance.config().exact_length == instance.budget


def test_convert_says_where_texts_differ(tmp_path, capsys):
    with quiet():
        tiny_model("bert", head=True).save_pretrained(tmp_path / "source")
    for options, message in (
        (["--method", "longformer:window_size=7"], "longformer: up to 8 tokens are computed exactly"),
        (["--method", "linear"], "linear: differs from exact attention at every length"),
        (["--method", "kdeformer"], "the model takes 128 tokens, so its output does not change"),
    ):
        assert convert(tmp_path / "source", *options, "-o", tmp_path / "out", "--force") == 0
        assert message in capsys.readouterr().out
    assert convert(tmp_path / "source", "--method", "sdpa", "-o", tmp_path / "out", "--force", "--json") == 0
    assert json.loads(capsys.readouterr().out)["exact_up_to"] == []


def test_a_mix_of_methods():
    model = tiny_model("bert")
    mix = [{"layers": [1], "method": "longformer", "window_size": 4}, {"layers": [0], "method": "linear"}]
    groups = exact_lengths(hea.convert(model, {"layers": mix}))
    assert [group._asdict() for group in groups] == [
        {"layers": [0], "method": "linear", "settings": {}, "tokens": 0},
        {"layers": [1], "method": "longformer", "settings": {"window_size": 4}, "tokens": 5},
    ]
    assert describe(groups, num_positions(model)) == [
        "linear (layers 0): differs from exact attention at every length",
        "longformer (layers 1): up to 5 tokens are computed exactly, more are approximated",
    ]


def test_positions_are_counted_in_tokens():
    assert [num_positions(tiny_model(family)) for family in ("bert", "roberta", "gpt2", "llama", "vit")] == [
        128, 128, 128, 128, None
    ]  # fmt: skip
    ids = tiny_batch("roberta", length=128)
    output(tiny_model("roberta"), ids)
