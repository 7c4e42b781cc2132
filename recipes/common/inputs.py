"""Real inputs of the benchmarks and analyses: activations of pretrained models, word vectors, questions and texts."""

import gzip
import importlib.util
import json
import pathlib
import statistics
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    AutoTokenizer,
    BertModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ViTForImageClassification,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import hf_efficient_attn as hea
from hf_efficient_attn.checkpoint.loading import no_progress_bar
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.demo import minilm_folder
from recipes.common.commands import existing
from recipes.common.data.image_tensors import Norm, centre_square, to_tensor
from recipes.common.data.images import decode

MINILM_TOKENS = 512  # the sequence length that MiniLM was trained with


class Activation(NamedTuple):
    """Inputs of one attention layer: query, key (B, H, N, D), value (B, H, N, Dv), and the factor of the scores."""

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float | None


def capture(load: Callable[[str], nn.Module], forward: Callable[[nn.Module], Any]) -> list[Activation]:
    """Record the inputs of every attention layer while a model runs with exact attention.

    Args:
        load: takes the name of an attention implementation and returns a model that uses it.
        forward: runs the model once.
    """
    found: list[Activation] = []

    def recording_attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        **rest: Any,
    ) -> tuple[Tensor, None]:
        found.append(Activation(len(found), query, key, value, scaling))
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **rest)

    name = "recipes_capture"
    AttentionInterface.register(name, recording_attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    with torch.inference_mode(), no_progress_bar():
        forward(load(name).eval())
    return found


def book_tokens(data: pathlib.Path, count: int, length: int) -> list[Tensor]:
    """The tokens (1, `length`) of MiniLM's tokenizer from each of `count` books."""
    books = sorted(existing(data / "text" / "books", "books").glob("*.txt.gz"))
    if not books:
        raise UnsupportedAttentionError(f"no books in {data / 'text' / 'books'}: the folder must hold *.txt.gz files")
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    found = []
    for book in books[:count]:
        # Skip the title page and the table of contents.
        with gzip.open(book, "rt", encoding="utf-8") as file:
            text = file.read()[9000 : 9000 + 40 * length]
        found.append(tokenizer(text, truncation=True, max_length=length, return_tensors="pt")["input_ids"])
    return found


def minilm_activations(data: pathlib.Path, count: int, length: int = MINILM_TOKENS) -> list[Activation]:
    """Activations of MiniLM on `length` tokens from each of `count` books.

    Longer sequences than the 512 tokens that MiniLM was trained with are made of windows of 512 tokens: each window is
    run on its own, and the queries, keys and values are concatenated.
    """
    found = []
    for ids in book_tokens(data, count, length):
        windows = [
            capture(
                lambda name: BertModel.from_pretrained(minilm_folder(), attn_implementation=name),
                lambda model, part=part: model(input_ids=part),
            )
            for part in ids.split(MINILM_TOKENS, 1)
        ]
        for layers in zip(*windows, strict=True):
            tensors = (torch.cat([getattr(w, name) for w in layers], 2) for name in ("query", "key", "value"))
            found.append(Activation(layers[0].layer, *tensors, layers[0].scale))
    return found


def deit_activations(data: pathlib.Path, count: int, pixels: int = 512) -> list[Activation]:
    """Activations of DeiT-tiny on `count` photographs of `pixels` x `pixels`, which have (pixels / 16)^2 + 1 tokens."""
    folder = existing(data / "models" / "deit-tiny-imagenet", "DeiT-tiny")
    images = existing(data / "images" / "imagenet1k-sample-original-100.zip", "photographs")
    if importlib.util.find_spec("PIL") is None:
        raise UnsupportedAttentionError("reading photographs needs Pillow: pip install pillow")
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    with zipfile.ZipFile(images) as archive:
        names = sorted(name for name in archive.namelist() if name.lower().endswith((".jpg", ".jpeg")))
        batches = [
            photograph(archive, name, pixels, settings) for name in names[:: max(1, len(names) // count)][:count]
        ]
    found = []
    for batch in batches:
        found += capture(
            lambda name: ViTForImageClassification.from_pretrained(folder, attn_implementation=name),
            lambda model, batch=batch: model(pixel_values=batch, interpolate_pos_encoding=True),
        )
    return found


def photograph(
    archive: zipfile.ZipFile, name: str, pixels: int, settings: Mapping[str, Any], crop: float = 1.0
) -> Tensor:
    """The central square of a photograph, resized and normalised: (1, 3, pixels, pixels).

    Args:
        archive: zip file of photographs.
        name: name of the photograph in the archive.
        pixels: side of the result.
        settings: contents of `preprocessor_config.json`.
        crop: side of the square, as a share of the shorter side of the photograph.
    """
    square = centre_square(decode(archive.read(name)), pixels, crop, settings["resample"])
    return to_tensor(square, Norm.of(settings))[None]


def exact_outputs(activations: Sequence[Activation], causal: bool = False) -> list[Tensor]:
    """Outputs of exact attention in float64, (B, H, N, Dv) each."""
    return [
        hea.analysis.exact_output(one.query, one.key, one.value, scale=one.scale, is_causal=causal)
        for one in activations
    ]


def mean_error(activations: Sequence[Activation], exact: Sequence[Tensor], causal: bool = False) -> float:
    """Error of answering every query with the mean of the values; if causal, of the values up to the query.

    Args:
        activations: inputs of the layers.
        exact: outputs of `exact_outputs` for the same inputs.
        causal: whether attention is causal.
    """
    found = []
    for one, truth in zip(activations, exact, strict=True):
        value = one.value.double()
        count = torch.arange(1, value.shape[2] + 1).unsqueeze(1)
        mean = value.cumsum(2) / count if causal else value.mean(2, keepdim=True).expand_as(value)
        found.append(hea.analysis.relative_error(mean, truth).operator.mean().item())
    return statistics.fmean(found)


def glove_vectors(data: pathlib.Path, count: int, seed: int | None = None) -> Tensor:
    """GloVe vectors, (count, 100) float32: the most frequent words, or with a seed a random choice of all words.

    Raises:
        UnsupportedAttentionError: the file is missing or holds fewer vectors.
    """
    path = existing(data / "wordvectors" / "glove100d_top32768_fp16.npy", "word vectors")
    vectors = torch.from_numpy(np.load(path)).float()
    if count > vectors.shape[0]:
        raise UnsupportedAttentionError(f"{path} holds {vectors.shape[0]} vectors, not {count}; ask for fewer tokens")
    if seed is None:
        return vectors[:count]
    return vectors[torch.randperm(vectors.shape[0], generator=torch.Generator().manual_seed(seed))[:count]]


def xquad_articles(data: pathlib.Path) -> list[list[dict[str, Any]]]:
    """The paragraphs of each article of XQuAD (English), with their questions."""
    path = existing(data / "squad" / "xquad.en.json.gz", "questions and paragraphs")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [article["paragraphs"] for article in json.load(file)["data"]]


def squad_texts(data: pathlib.Path, unit: str) -> list[str]:
    """The paragraphs of SQuAD if `unit` is "paragraph", or the joined paragraphs of each article if it is "article"."""
    found = [[paragraph["context"] for paragraph in article] for article in xquad_articles(data)]
    return [text for texts in found for text in texts] if unit == "paragraph" else [" ".join(texts) for texts in found]


def load_text_model(name: str, data: pathlib.Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, int]:
    """Model, tokenizer and longest sequence of "minilm" (a BERT) or "gpt2" (the GPT-2 in `models/gpt2-books`)."""
    folder = minilm_folder() if name == "minilm" else existing(data / "models" / "gpt2-books", "GPT-2")
    with no_progress_bar():
        return AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), MINILM_TOKENS


def text_activations(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, longest: int, texts: list[str], shortest: int
) -> Iterator[list[Activation] | None]:
    """Activations of every layer on each text, cut to `longest` tokens; None for a text shorter than `shortest`."""

    def load(implementation: str) -> PreTrainedModel:
        model.set_attn_implementation(implementation)
        return model

    for text in texts:
        ids = tokenizer(text, truncation=True, max_length=longest, return_tensors="pt")["input_ids"]
        yield None if ids.shape[1] < shortest else capture(load, lambda loaded, ids=ids: loaded(input_ids=ids))
