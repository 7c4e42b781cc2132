"""Converted checkpoints in plain Transformers, in pipelines, in sentence-transformers, and with another method."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
import transformers

import converted
import hf_efficient_attn as hea
from hf_efficient_attn.conversion.checkpoint import convert_checkpoint
from tiny_models import SMALL, output

WORDS = " ".join(f"w{5 + 7 * i % 55}" for i in range(70))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("auto", "sentence"),
    [
        ("AutoModelForMaskedLM", 'ValueError: Specified `attn_implementation="kdeformer"` is not supported.'),
        ("AutoModelForImageClassification", "t2t_vit"),
    ],
)
def test_the_card_quotes_the_error_of_plain_transformers(auto, sentence, tmp_path):
    """In a process that has not imported this package."""
    folder = tmp_path / "out"
    if auto == "AutoModelForMaskedLM":
        converted.make(folder, "bert", "kdeformer")
    else:
        tiny_t2t_vit(tmp_path)
    code = f"import sys; from transformers import {auto} as A; A.from_pretrained(sys.argv[1])"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, cwd=folder, env=environment
    )
    quoted = re.search(r"^> (.*) \.\.\.$", (folder / "README.md").read_text(), re.M)[1]
    assert done.returncode != 0 and quoted in done.stderr and sentence in quoted


def pipe(task, folder):
    """The pipeline of a folder. Pipelines put models into eval mode."""
    return transformers.pipeline(task, model=str(folder))


def test_pipelines_of_texts(tmp_path):
    ids = converted.tiny_tokenizer()(WORDS, return_tensors="pt")
    model = converted.make(tmp_path / "bert", "bert", "kdeformer", head=False)
    found = pipe("feature-extraction", tmp_path / "bert")
    assert found.model.config._attn_implementation == "kdeformer"
    assert torch.equal(torch.tensor(found(WORDS)), output(model, ids))
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = converted.make(tmp_path / "gpt2", "gpt2", "linear").generate(**ids, **options)[0, -6:].tolist()
    found = pipe("text-generation", tmp_path / "gpt2")(WORDS, **options, return_tensors=True)
    assert found[0]["generated_token_ids"][-6:] == expected


def test_image_classification(tmp_path):
    image = pytest.importorskip("PIL.Image")
    model = converted.make(tmp_path, "vit", "nystromformer")
    picture = image.effect_mandelbrot((32, 32), (-2, -1, 1, 1), 50).convert("RGB")
    processor = transformers.ViTImageProcessorPil.from_pretrained(tmp_path)
    expected = output(model, processor(picture, return_tensors="pt"))[0].softmax(-1)
    found = pipe("image-classification", tmp_path)(picture)
    # A pipeline can round differently: the order of its sums depends on how memory is aligned.
    scores = {f"LABEL_{index}": score for index, score in enumerate(expected.tolist())}
    assert {entry["label"]: entry["score"] for entry in found} == pytest.approx(scores, rel=1e-5)


def test_the_examples_of_the_card_run(tmp_path):
    converted.make(tmp_path, "bert", "kdeformer")
    text = (tmp_path / "README.md").read_text().replace("ORG/NAME", str(tmp_path))
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})


def test_sentence_transformers(minilm, tmp_path):
    """The embeddings are those of the converted model, whether its config or `model_kwargs` names the method."""
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


def test_parameters_of_another_method_are_reported_as_unused(tmp_path):
    converted.make(tmp_path, "bert", "linformer")
    load = transformers.BertForMaskedLM.from_pretrained
    same, report = load(tmp_path, output_loading_info=True)
    names = {name for name, _ in same.named_parameters() if ".learned_parameters." in name}
    assert names and not report["unexpected_keys"]
    choice = {"method": "longformer", **SMALL["longformer"]}
    options = {"attn_implementation": "longformer", "efficient_attention": choice}
    other, report = load(tmp_path, output_loading_info=True, **options)
    assert other.config._attn_implementation == "longformer"
    assert set(report["unexpected_keys"]) == names
    assert not [name for name, _ in other.named_parameters() if ".learned_parameters." in name]


def tiny_t2t_vit(folder):
    from hf_efficient_attn.models.t2t_vit import T2TViTConfig, T2TViTForImageClassification

    config = T2TViTConfig(
        image_size=32, t2t_strides=[2, 2, 2], hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, token_dim=16,
    )  # fmt: skip
    T2TViTForImageClassification(config).save_pretrained(folder / "exact")
    chosen = {"num_samples": 8, "block_size": 8}
    return convert_checkpoint(folder / "exact", folder / "out", "kdeformer", hyperparameters=chosen, layers=["t2t.0"])


def test_a_model_of_this_package_is_loaded_as_its_card_says(tmp_path):
    done = tiny_t2t_vit(tmp_path)
    assert done["load"].splitlines()[:2] == [
        "import hf_efficient_attn",
        "from transformers import AutoModelForImageClassification",
    ]
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'AutoModelForImageClassification.from_pretrained("ORG/NAME")' in card
    assert "- Layers: t2t.0; the other layers are exact." in card
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    assert loaded.config.efficient_attention["layers"] == ["t2t.0"]
    back = convert_checkpoint(tmp_path / "out", tmp_path / "back", "sdpa")
    assert back["load"].startswith("import hf_efficient_attn\n")
    text = (tmp_path / "back" / "README.md").read_text()
    assert "the package `hf_efficient_attn`, which contains the model" in text and "import hf_efficient_attn\n" in text
