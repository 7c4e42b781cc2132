"""What `convert` says and changes about lengths: limits of texts in files, and from where on a method is not exact."""

import json
import shutil

import pytest

import hf_efficient_attn as hea
from converted import tiny_tokenizer
from hf_efficient_attn.checkpoint.limits import sentence_limit, set_limits
from hf_efficient_attn.checkpoint.loading import quiet
from hf_efficient_attn.conversion.checkpoint import convert_checkpoint, describe, exact_lengths, num_positions
from hf_efficient_attn.errors import UnsupportedAttentionError
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


NAME = "sentence_bert_config.json"


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
    done = convert_checkpoint(source, tmp_path / "out", "linear", max_length=300)
    for key, old in [("max_seq_length", 64), ("tokenizer_args.model_max_length", 65), ("truncation.max_length", 69)]:
        assert any(f"{key} 300 in place of {old}; the rest is unchanged" in note for note in done["notes"])
    assert {"file": NAME, "key": "max_seq_length", "before": 64, "after": 300} in done["limits"]
    assert {limit["before"] for limit in done["limits"]} == {*range(64, 68), 69, 128} and len(done["limits"]) == 6
    assert read(tmp_path / "out", NAME) == {
        "max_seq_length": 300,
        "do_lower_case": False,
        "tokenizer_args": {"model_max_length": 300, "x": 1},
        "processor_kwargs": {"model_max_length": 300},
        "processing_kwargs": {"text": {"max_length": 300, "padding": True}},
    }
    assert read(tmp_path / "out", "tokenizer.json") == {
        **tokenizer, "truncation": {**tokenizer["truncation"], "max_length": 300}
    }  # fmt: skip
    assert read(source, NAME) == own


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
        assert sentence_limit(folder).file == (NAME if is_set else "tokenizer_config.json")


def test_without_max_length_a_limit_below_the_positions_is_noted(tmp_path):
    source = sentence_model(tmp_path / "source", **{NAME: {"max_seq_length": 64}})
    note = (
        "texts are truncated at 64 tokens (max_seq_length in sentence_bert_config.json), although the model takes 128"
    )
    first = convert_checkpoint(source, tmp_path / "first", "linear")
    assert any(note in text and "--max-length 128" in text for text in first["notes"]) and first["limits"] == []
    assert read(tmp_path / "first", NAME) == {"max_seq_length": 64}
    # What the note says works, and then there is nothing to note.
    second = convert_checkpoint(tmp_path / "first", tmp_path / "second", "linear", max_length=128)
    assert read(tmp_path / "second", NAME) == {"max_seq_length": 128} and second["positions"] == 128
    third = convert_checkpoint(tmp_path / "second", tmp_path / "third", "linear")
    assert not any("truncated" in text for text in [*second["notes"], *third["notes"]])
    assert sentence_limit(tmp_path / "third").tokens == 128
    (source / NAME).write_text("[]")
    with pytest.raises(UnsupportedAttentionError, match=NAME):
        convert_checkpoint(source, tmp_path / "no", "linear", max_length=300)
    assert not (tmp_path / "no").exists()


def test_rotary_positions_need_no_extension_up_to_what_the_model_takes(tmp_path):
    source = sentence_model(tmp_path / "source", "llama", **{NAME: {"max_seq_length": 64}})
    done = convert_checkpoint(source, tmp_path / "out", "linear", max_length=128)
    assert read(tmp_path / "out", NAME) == {"max_seq_length": 128} and done["parameters"]["new"] == []
    with pytest.raises(UnsupportedAttentionError, match=r"--max-length 129: .*raise max_position_embeddings"):
        convert_checkpoint(source, tmp_path / "no", "linear", max_length=129)
    with pytest.raises(UnsupportedAttentionError, match=r"cannot be extended: .*interpolate_pos_encoding=True"):
        hea.extend_positions(tiny_model("vit"), 300)


def test_a_model_in_the_folder_of_a_module(tmp_path):
    """An old layout of sentence-transformers: the Transformer has a folder like every other module."""
    inner = sentence_model(tmp_path / "whole" / "0_Transformer", **{NAME: {"max_seq_length": 64}})
    (tmp_path / "whole" / "modules.json").write_text(json.dumps([{"path": "0_Transformer"}]))
    with pytest.raises(UnsupportedAttentionError, match=r"no config\.json.*modules\.json"):
        convert_checkpoint(tmp_path / "whole", tmp_path / "out", "linear")
    convert_checkpoint(inner, tmp_path / "out", "linear", max_length=300)
    assert read(tmp_path / "out", NAME) == {"max_seq_length": 300}


@pytest.mark.exhaustive
def test_sentence_transformers_reads_the_whole_text(minilm, tmp_path):
    library = pytest.importorskip("sentence_transformers", reason="pip install sentence-transformers")
    source = shutil.copytree(minilm, tmp_path / "source")
    assert read(source, NAME)["max_seq_length"] == 256
    chosen = {"window_size": 64}
    done = convert_checkpoint(source, tmp_path / "out", "longformer", hyperparameters=chosen, max_length=640)
    exec(done["load"], found := {})
    model, before = found["model"].to("cpu"), library.SentenceTransformer(str(source), device="cpu")
    assert isinstance(model, library.SentenceTransformer) and model.max_seq_length == 640
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away", "from", "it"]
    start = " ".join(words[i % 14] for i in range(250))
    text = start + " " + " ".join(words[(i * i) % 13] for i in range(350))
    assert 590 < model.tokenizer(text, return_tensors="pt")["input_ids"].shape[1] < 640
    for one, is_truncated in ((model, False), (before, True)):
        whole, cut = one.encode([text, start], convert_to_tensor=True)
        assert ((whole @ cut).item() > 0.99) == is_truncated


# From where on a method differs from exact attention


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("longformer", "longformer: up to 8 tokens are computed exactly"),
        ("linear", "linear: differs from exact attention at every length"),
        ("kdeformer", "the model takes 128 tokens, so its output does not change"),
    ],
)
def test_where_texts_differ(method, message):
    model = hea.convert(tiny_model("bert"), method, **({"window_size": 7} if method == "longformer" else {}))
    assert any(message in text for text in describe(exact_lengths(model), num_positions(model)))
    assert exact_lengths(hea.convert(model, "sdpa")) == []


def test_a_mix_of_methods():
    model = tiny_model("bert")
    mix = [{"layers": [1], "method": "longformer", "window_size": 4}, {"layers": [0], "method": "linear"}]
    groups = exact_lengths(hea.convert(model, {"layers": mix}))
    assert groups == [
        {"layers": [0], "method": "linear", "settings": {}, "tokens": 0},
        {"layers": [1], "method": "longformer", "settings": {"window_size": 4}, "tokens": 5},
    ]
    assert describe(groups, num_positions(model)) == [
        "linear (layers 0): differs from exact attention at every length",
        "longformer (layers 1): up to 5 tokens are computed exactly, more are approximated",
    ]


def test_positions_are_counted_in_tokens():
    models = {family: tiny_model(family) for family in ("bert", "roberta", "gpt2", "llama", "vit")}
    assert [num_positions(model) for model in models.values()] == [128, 128, 128, 128, None]
    output(models["roberta"], tiny_batch("roberta", length=128))
