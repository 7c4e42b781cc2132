"""Converted checkpoints in a folder, with all files that `convert` and `benchmark --card` write."""

import json
import pathlib

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import hf_efficient_attn as hea
from hf_efficient_attn.checkpoint.loading import quiet
from hf_efficient_attn.hub import write_card
from tiny_models import IMAGES, SMALL, tiny_model

ORIGIN = {
    "base_model": "someone/tiny-bert",
    "license": "apache-2.0",
    "tags": ["exbert"],
    "pipeline_tag": "fill-mask",
    "language": ["en"],
    "hf_efficient_attn": hea.__version__,
    "install": "git+https://example.org/someone/hf_efficient_attn",
}


def origin(**changes) -> dict:
    return {**ORIGIN, **changes}


def benchmark(method: str = "kdeformer", layers=None, **changes) -> dict:
    """benchmark.json of exact attention, `method` at its small budget, and another method, at two lengths."""
    own = {**SMALL[method], **({} if layers is None else {"layers": layers})}
    rows = [
        ("sdpa", "sdpa", {}, 64, 0.01, 1.0, 10.0, 0.0, 1.0),
        (method, method, own, 64, 0.02, 0.5, 9.0, 0.125, 0.987654321),
        ("linear", "linear", {}, 64, 0.005, 2.0, None, 0.75, 0.25),
        ("sdpa", "sdpa", {}, 128, 0.04, 1.0, 40.0, 0.0, 1.0),
        (method, method, own, 128, 0.0321, 1.246, 18.0, 0.25, None),
    ]
    keys = ("attention", "method", "settings", "length", "seconds", "speed_up", "peak_memory_mib", "error", "agreement")
    measured = [{**dict(zip(keys, row, strict=True)), "batch": 2, "layer_errors": [row[7], row[7]]} for row in rows]
    return {
        "format": 1,
        "source": "OUT",
        "task": "masked-lm",
        "machine": {"cpu": "A CPU", "threads": 2, "device": "cpu", "dtype": "float32", "torch": "2.13.0"},
        "data": {"name": "book.txt", "rows": 8},
        "agreement": "top1",
        "measurements": measured,
        **changes,
    }


def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Words of the tiny models' vocabulary: w0 to w59, of which the first five are special."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = {**{name: i for i, name in enumerate(names)}, **{f"w{i}": i for i in range(5, 60)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), names, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=128, **special)


def tokenizer_for(family):
    tokenizer = tiny_tokenizer()
    if family == "bert":
        frame = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
        tokenizer.backend_tokenizer.post_processor = frame
    return tokenizer


def save(folder, model, family="bert"):
    """Save a model and its tokenizer or image processor -> the folder."""
    with quiet():  # some tests check what is printed
        model.save_pretrained(folder)
    if family in IMAGES:
        transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    else:
        tokenizer_for(family).save_pretrained(folder)
    return folder


def make(folder: pathlib.Path, family: str = "bert", method: str = "kdeformer", *, head=True, layers=None, card=True):
    """Save a tiny converted model, its tokenizer or image processor, efficient_attention.json and card -> the model."""
    model = tiny_model(family, head=head)
    hea.convert(model, method, layers=layers, **SMALL[method])
    save(folder, model, family)
    (folder / "efficient_attention.json").write_text(json.dumps(origin()))
    if card:
        write_card(folder)
    return model
