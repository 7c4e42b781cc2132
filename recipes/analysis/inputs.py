"""Real inputs of the analyses: word vectors, questions' paragraphs, and the activations of pretrained models."""

import pathlib
from collections.abc import Iterator

import torch
from torch import Tensor

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.demo import minilm_folder, quiet_loading
from recipes.benchmarks.error import Activation, capture, there
from recipes.benchmarks.tasks import xquad_articles


def glove_vectors(data: pathlib.Path, count: int, seed: int | None = None) -> Tensor:
    """GloVe vectors, (count, 100) float32: the most frequent words, or with a seed a random choice of all.

    Raises:
        UnsupportedAttentionError: the file is not there, or holds fewer vectors.
    """
    import numpy as np

    path = there(data / "wordvectors" / "glove100d_top32768_fp16.npy", "word vectors")
    vectors = torch.from_numpy(np.load(path)).float()
    if count > vectors.shape[0]:
        raise UnsupportedAttentionError(f"{path} holds {vectors.shape[0]} vectors, not {count}; ask for fewer tokens")
    if seed is None:
        return vectors[:count]
    return vectors[torch.randperm(vectors.shape[0], generator=torch.Generator().manual_seed(seed))[:count]]


def squad_texts(data: pathlib.Path, unit: str) -> list[str]:
    """Paragraphs of SQuAD, or all paragraphs of each article joined (`unit` "paragraph" or "article")."""
    found = [[paragraph["context"] for paragraph in article] for article in xquad_articles(data)]
    return [text for texts in found for text in texts] if unit == "paragraph" else [" ".join(texts) for texts in found]


def load_text_model(name: str, data: pathlib.Path):
    """Model, tokenizer and the longest sequence: "minilm" (BERT) or "gpt2" (the GPT-2 of `models/gpt2-books`)."""
    from transformers import AutoModel, AutoTokenizer

    folder = minilm_folder() if name == "minilm" else there(data / "models" / "gpt2-books", "GPT-2")
    with quiet_loading():
        return AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), 512


def text_activations(
    model, tokenizer, longest: int, texts: list[str], shortest: int
) -> Iterator[list[Activation] | None]:
    """The activations of every layer on each text cut to `longest` tokens; None where it has fewer than `shortest`."""

    def load(implementation: str):
        model.set_attn_implementation(implementation)
        return model

    for text in texts:
        ids = tokenizer(text, truncation=True, max_length=longest, return_tensors="pt")["input_ids"]
        yield None if ids.shape[1] < shortest else capture(load, lambda loaded, ids=ids: loaded(input_ids=ids))
