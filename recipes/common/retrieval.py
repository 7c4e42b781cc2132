"""Search with the embeddings of MiniLM: texts and questions as tokens, embeddings, and the ranks of the right texts."""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import BertModel, PreTrainedModel, PreTrainedTokenizerBase

import hf_efficient_attn as hea
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.demo import minilm_folder
from hf_efficient_attn.io.reading import special_tokens
from hf_efficient_attn.io.text import read_text
from recipes.common.inputs import FRONT_MATTER, MINILM_TOKENS, book_paths, xquad_articles

# Of books: the tokens of a document, the documents of a book, and the passages of a document and their tokens.
DOCUMENT_TOKENS, _DOCUMENTS, _PASSAGES, _PASSAGE_TOKENS = 8000, 2, 8, 100
# More than a token has on average.
_CHARACTERS_PER_TOKEN = 10


class Corpus(NamedTuple):
    """Texts and questions as tokens without special ones, and the index of the text of each question (Q,)."""

    texts: list[list[int]]
    questions: list[list[int]]
    own: Tensor


def tokenized(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of each text without special ones."""
    found: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return found


def xquad(data: pathlib.Path, tokenizer: PreTrainedTokenizerBase, unit: str = "paragraph") -> Corpus:
    """XQuAD (English): its questions, and as texts each "paragraph" or each "article"."""
    articles = xquad_articles(data)
    texts = articles if unit == "article" else [[paragraph] for article in articles for paragraph in article]
    questions = [
        (qa["question"], i) for i, paragraphs in enumerate(texts) for paragraph in paragraphs for qa in paragraph["qas"]
    ]
    joined = [" ".join(paragraph["context"] for paragraph in paragraphs) for paragraphs in texts]
    asked = tokenized(tokenizer, [question for question, _ in questions])
    return Corpus(tokenized(tokenizer, joined), asked, torch.tensor([i for _, i in questions]))


def books(data: pathlib.Path, tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """Two documents of 8,000 tokens from each book, and eight passages of 100 tokens from each document as questions.

    Raises:
        UnsupportedAttentionError: there are no books, or one is too short.
    """
    texts: list[list[int]] = []
    for path in book_paths(data):
        text = read_text(path)[FRONT_MATTER:][: _CHARACTERS_PER_TOKEN * _DOCUMENTS * DOCUMENT_TOKENS]
        ids = tokenized(tokenizer, [text])[0]
        if len(ids) < _DOCUMENTS * DOCUMENT_TOKENS:
            raise UnsupportedAttentionError(f"{path} has fewer than {_DOCUMENTS * DOCUMENT_TOKENS:,} tokens of text")
        texts += [ids[start * DOCUMENT_TOKENS : (start + 1) * DOCUMENT_TOKENS] for start in range(_DOCUMENTS)]
    draw = torch.Generator().manual_seed(0)
    starts = torch.randint(DOCUMENT_TOKENS - _PASSAGE_TOKENS, (len(texts), _PASSAGES), generator=draw).tolist()
    questions = [
        text[start : start + _PASSAGE_TOKENS] for text, own in zip(texts, starts, strict=True) for start in own
    ]
    return Corpus(texts, questions, torch.arange(len(texts)).repeat_interleave(_PASSAGES))


def long_minilm(tokens: int) -> PreTrainedModel:
    """MiniLM, its position table repeated for more than 512 tokens."""
    return hea.extend_positions(BertModel.from_pretrained(minilm_folder()), max(tokens, MINILM_TOKENS))


@torch.inference_mode()
def embed(
    model: BertModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[list[int]], tokens: int = MINILM_TOKENS
) -> Tensor:
    """Normalised mean-pooled embeddings (texts, hidden size) of up to `tokens` tokens of each text."""
    before, after = special_tokens(tokenizer)
    room = tokens - len(before) - len(after)
    # Batches of texts of similar length, smaller ones for long texts.
    batch = max(1, 16 * MINILM_TOKENS // max(tokens, MINILM_TOKENS))
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    found: list[Tensor] = [torch.empty(0)] * len(texts)
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        inputs = tokenizer.pad({"input_ids": [[*before, *texts[i][:room], *after] for i in part]}, return_tensors="pt")
        states, mask = model(**inputs).last_hidden_state, inputs["attention_mask"].unsqueeze(-1)
        pooled = normalize((states * mask).sum(1) / mask.sum(1), dim=1)
        for i, embedding in zip(part, pooled, strict=True):
            found[i] = embedding
    return torch.stack(found)


def chunks(tokenizer: PreTrainedTokenizerBase, texts: Sequence[list[int]], size: int) -> tuple[list[list[int]], Tensor]:
    """The pieces of all texts with at most `size` tokens, special ones included, and the index of the text of each."""
    room = size - sum(map(len, special_tokens(tokenizer)))
    pieces = [(text[start : start + room], i) for i, text in enumerate(texts) for start in range(0, len(text), room)]
    return [piece for piece, _ in pieces], torch.tensor([i for _, i in pieces])


def similarities(questions: Tensor, pieces: Tensor, own: Tensor, count: int) -> dict[str, Tensor]:
    """How similar questions (Q, D) are to texts that consist of pieces (C, D): "mean of" and "best of" -> (Q, `count`).

    `own` (C,) has the index of the text of each piece.
    """
    mean = normalize(pieces.new_zeros(count, pieces.shape[1]).index_add(0, own, pieces), dim=1)
    similar = questions @ pieces.t()
    best = similar.new_full((len(questions), count), -1.0)
    return {
        "mean of": questions @ mean.t(),
        "best of": best.scatter_reduce(1, own.expand_as(similar), similar, "amax"),
    }


def ranks(similar: Tensor, own: Tensor) -> Tensor:
    """The rank (Q,) of each question's own text among all, from 1, by their similarities (Q, P); `own` (Q,)."""
    return 1 + (similar > similar.gather(1, own[:, None])).sum(1)
