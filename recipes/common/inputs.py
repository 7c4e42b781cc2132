"""Real inputs of the benchmarks and analyses: activations of pretrained models, and texts to search by embeddings."""

import gzip
import json
import pathlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import (
    AutoModel,
    AutoModelForImageClassification,
    AutoTokenizer,
    BertModel,
    PreTrainedTokenizerBase,
    T5EncoderModel,
)

import hf_efficient_attn as hea
from hf_efficient_attn.checkpoint.loading import no_progress_bar
from hf_efficient_attn.cli.demo import minilm_folder
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.capture import capture_attention, forward
from hf_efficient_attn.io.reading import read_text, special_tokens
from hf_efficient_attn.ops.exact import biased_exact
from recipes.common.commands import existing
from recipes.common.data.image_tensors import Evaluation, Norm, preprocessor_settings
from recipes.common.data.images import Pictures, load

MINILM_TOKENS = 512  # the sequence length that MiniLM was trained with
# Characters before the text of a book: title page and contents.
FRONT_MATTER = 9000
SOURCES = ("books", "xquad", "photographs", "gpt2")
_INPUTS, _PATCH = 6, 16
_SMALL, _ORIGINALS = "imagenet1k-sample-256px.zip", "imagenet1k-sample-original-100.zip"

# Of books: the tokens of a document, the documents of a book, and the passages of a document and their tokens.
DOCUMENT_TOKENS, _DOCUMENTS, _PASSAGES, _PASSAGE_TOKENS = 8000, 2, 8, 100
# More than a token has on average.
_CHARACTERS_PER_TOKEN = 10

# The batches of a source with a number of tokens.
Load = Callable[[int], Iterator[Mapping[str, Any]]]


class Activation(NamedTuple):
    """Inputs of one attention layer.

    They are query, key (B, H, N, D), value (B, H, N, Dv), the factor of the scores, and the bias of the scores by
    distance (H, 2R + 1), or None.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float | None
    bias: Tensor | None = None


@torch.inference_mode()
def capture(model: nn.Module, inputs: Mapping[str, Any]) -> list[Activation]:
    """The inputs of every attention layer while a model runs once with exact attention."""
    found: list[Activation] = []
    with capture_attention(
        model,
        lambda call: found.append(
            Activation(len(found), call.query, call.key, call.value, call.scale, call.distance_bias)
        ),
    ):
        forward(model, inputs)
    return found


def book_paths(data: pathlib.Path, count: int | None = None) -> list[pathlib.Path]:
    """The files of the first `count` books; None for all. Raises UnsupportedAttentionError if there are none."""
    folder = existing(data / "text" / "books", "books")
    books = sorted(folder.glob("*.txt.gz"))
    if not books:
        raise UnsupportedAttentionError(f"no books in {folder}: the folder must hold *.txt.gz files")
    return books[:count]


def book_tokens(folder: pathlib.Path, data: pathlib.Path, count: int, length: int) -> list[Tensor]:
    """The tokens (1, `length`) of a folder's tokenizer from each of `count` books."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [read_text(book)[FRONT_MATTER : FRONT_MATTER + 40 * length] for book in book_paths(data, count)]
    return [tokenizer(text, truncation=True, max_length=length, return_tensors="pt")["input_ids"] for text in texts]


def minilm_activations(data: pathlib.Path, count: int, length: int = MINILM_TOKENS) -> list[Activation]:
    """Activations of MiniLM on `length` tokens from each of `count` books.

    Longer sequences than the 512 tokens that MiniLM was trained with are made of windows of 512 tokens: each window is
    run on its own, and the queries, keys and values are concatenated.
    """
    texts, found = book_tokens(minilm_folder(), data, count, length), []
    model, _ = text_model("minilm", data)
    for ids in texts:
        windows = [capture(model, {"input_ids": part}) for part in ids.split(MINILM_TOKENS, 1)]
        for layers in zip(*windows, strict=True):
            tensors = (torch.cat([window[i] for window in layers], 2) for i in (1, 2, 3))
            found.append(Activation(layers[0].layer, *tensors, layers[0].scale))
    return found


def t5_activations(folder: pathlib.Path, data: pathlib.Path, count: int, length: int) -> list[Activation]:
    """Activations of the encoder of a T5 on `length` tokens from each of `count` books."""
    with no_progress_bar():
        model, texts = T5EncoderModel.from_pretrained(folder).eval(), book_tokens(folder, data, count, length)
    return [one for ids in texts for one in capture(model, {"input_ids": ids})]


def alibi(num_heads: int, largest: int) -> Tensor:
    """The bias of ALiBi (Press et al., ICLR 2022) in its bidirectional form: (H, 2R + 1) for R = `largest`."""
    slopes = 2.0 ** (-8.0 * torch.arange(1, num_heads + 1) / num_heads)
    return -slopes[:, None] * torch.arange(-largest, largest + 1).abs()


def deit(data: pathlib.Path) -> pathlib.Path:
    """The folder of DeiT-tiny."""
    return existing(data / "models" / "deit-tiny-imagenet", "DeiT-tiny")


def opened(data: pathlib.Path, name: str) -> Pictures:
    """The pictures of a zip file without splits."""
    return load(str(existing(data / "images" / name, "photographs")))[""]


def photographs(
    data: pathlib.Path, pixels: int, batch: int = 20, crop: float = 224 / 256
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of pictures (b, 3, pixels, pixels) and classes (b,): 1,000 pictures at 224 pixels, otherwise 100.

    The central square with `crop` of the shorter side is resized. As in the evaluation of DeiT, the shorter side is by
    default 8/7 of `pixels` (256 for 224).
    """
    pictures = opened(data, _SMALL if pixels == 224 else _ORIGINALS)
    transform = Evaluation(pixels, Norm.of(preprocessor_settings(str(deit(data)))), crop)
    yield from picture_batches(pictures, range(len(pictures)), imagenet_classes(data), transform, batch)


def imagenet_classes(data: pathlib.Path) -> dict[str, int]:
    """The classes of WordNet numbers, with which file names begin: their ranks among the thousand of ImageNet."""
    return {name: index for index, name in enumerate(opened(data, _SMALL).class_names())}


def picture_batches(
    pictures: Pictures, chosen: Sequence[int], classes: Mapping[str, int], transform: Evaluation, batch: int = 20
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of chosen pictures (b, 3, P, P) and their classes (b,)."""
    for start in range(0, len(chosen), batch):
        part = chosen[start : start + batch]
        numbers = torch.tensor([classes[pictures.classes[i]] for i in part])
        yield torch.stack([transform(pictures.open(i)) for i in part]), numbers


def deit_activations(data: pathlib.Path, count: int, pixels: int = 512) -> list[Activation]:
    """Activations of DeiT-tiny on `count` photographs of `pixels` x `pixels`, which have (pixels / 16)^2 + 1 tokens."""
    pictures, norm = opened(data, _ORIGINALS), Norm.of(preprocessor_settings(str(deit(data))))
    with no_progress_bar():
        model, activations = AutoModelForImageClassification.from_pretrained(deit(data)).eval(), list[Activation]()
    for i in range(0, len(pictures), max(1, len(pictures) // count))[:count]:
        batch = Evaluation(pixels, norm, 1.0)(pictures.open(i))[None]
        activations += capture(model, {"pixel_values": batch, "interpolate_pos_encoding": True})
    return activations


def open_source(source: str, data: pathlib.Path, longest: int) -> tuple[nn.Module, Load]:
    """The model of a source, and a function that returns its inputs of up to `longest` tokens.

    The sources are novels or XQuAD in MiniLM, photographs in DeiT-tiny, and novels in GPT-2.
    """
    if source == "photographs":

        def load_photographs(tokens: int) -> Iterator[Mapping[str, Any]]:
            pictures, _ = next(photographs(data, _PATCH * round(tokens**0.5), batch=_INPUTS))
            for picture in pictures.split(1):
                yield {"pixel_values": picture, "interpolate_pos_encoding": True}

        with no_progress_bar():
            return AutoModelForImageClassification.from_pretrained(deit(data)).eval(), load_photographs
    model, tokenizer = text_model("gpt2" if source == "gpt2" else "minilm", data)
    if source != "gpt2" and longest > MINILM_TOKENS:
        hea.extend_positions(model, longest)
    if source == "xquad":
        articles = [" ".join(part["context"] for part in article) for article in xquad_articles(data)]
        texts = [" ".join(articles[i::_INPUTS]) for i in range(_INPUTS)]
    else:
        texts = [read_text(book)[-8 * longest :] for book in book_paths(data, _INPUTS)]

    def load_texts(tokens: int) -> Iterator[Mapping[str, Any]]:
        for text in texts:
            ids = tokenizer(text[: 16 * tokens], truncation=True, max_length=tokens, return_tensors="pt")["input_ids"]
            if ids.shape[1] == tokens:
                yield {"input_ids": ids}

    return model, load_texts


def text_model(name: str, data: pathlib.Path) -> tuple[Any, Any]:
    """Model and tokenizer of "minilm" (a BERT) or "gpt2" (the GPT-2 in `models/gpt2-books`)."""
    folder = minilm_folder() if name == "minilm" else existing(data / "models" / "gpt2-books", "GPT-2")
    with no_progress_bar():
        return AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def exact_outputs(activations: Sequence[Activation], causal: bool = False) -> list[Tensor]:
    """Outputs of exact attention in float64, (B, H, N, Dv) each."""
    return [
        hea.analysis.exact_output(*one[1:4], scale=one.scale, is_causal=causal)
        if one.bias is None
        else biased_exact(
            *(x.double() for x in one[1:4]), one.bias, is_causal=causal, scale=one.scale or one.query.shape[3] ** -0.5
        )
        for one in activations
    ]


def mean_error(activations: Sequence[Activation], exact: Sequence[Tensor], causal: bool = False) -> float:
    """Error of answering every query with the mean of the values; if causal, of the values up to the query.

    `exact` has the outputs of `exact_outputs` for the same inputs.
    """
    found = []
    for one, truth in zip(activations, exact, strict=True):
        value = one.value.double()
        count = torch.arange(1, value.shape[2] + 1).unsqueeze(1)
        mean = value.cumsum(2) / count if causal else value.mean(2, keepdim=True).expand_as(value)
        found.append(hea.analysis.relative_error(mean, truth).operator.mean().item())
    return statistics.fmean(found)


def xquad_articles(data: pathlib.Path) -> list[list[dict[str, Any]]]:
    """The paragraphs of each article of XQuAD (English), with their questions."""
    path = existing(data / "squad" / "xquad.en.json.gz", "questions and paragraphs")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [article["paragraphs"] for article in json.load(file)["data"]]


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
    questions = [(qa["question"], i) for i, parts in enumerate(texts) for paragraph in parts for qa in paragraph["qas"]]
    joined = [" ".join(paragraph["context"] for paragraph in paragraphs) for paragraphs in texts]
    asked = tokenized(tokenizer, [question for question, _ in questions])
    return Corpus(tokenized(tokenizer, joined), asked, torch.tensor([i for _, i in questions]))


def books(data: pathlib.Path, tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """Two documents of 8,000 tokens from each book, and as questions eight passages of 100 tokens from each of them."""
    texts: list[list[int]] = []
    for path in book_paths(data):
        text = read_text(path)[FRONT_MATTER:][: _CHARACTERS_PER_TOKEN * _DOCUMENTS * DOCUMENT_TOKENS]
        ids = tokenized(tokenizer, [text])[0]
        if len(ids) < _DOCUMENTS * DOCUMENT_TOKENS:
            raise UnsupportedAttentionError(f"{path} has fewer than {_DOCUMENTS * DOCUMENT_TOKENS:,} tokens of text")
        texts += [ids[start * DOCUMENT_TOKENS : (start + 1) * DOCUMENT_TOKENS] for start in range(_DOCUMENTS)]
    draw = torch.Generator().manual_seed(0)
    starts = torch.randint(DOCUMENT_TOKENS - _PASSAGE_TOKENS, (len(texts), _PASSAGES), generator=draw).tolist()
    questions = [text[start : start + _PASSAGE_TOKENS] for text, at in zip(texts, starts, strict=True) for start in at]
    return Corpus(texts, questions, torch.arange(len(texts)).repeat_interleave(_PASSAGES))


def long_minilm(tokens: int) -> transformers.PreTrainedModel:
    """MiniLM, its position table repeated for more than 512 tokens."""
    return hea.extend_positions(BertModel.from_pretrained(minilm_folder()), max(tokens, MINILM_TOKENS))


@torch.inference_mode()
def embed(model: BertModel, tokenizer: Any, texts: Sequence[list[int]], tokens: int = MINILM_TOKENS) -> Tensor:
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
    return {"mean of": questions @ mean.t(), "best of": best.scatter_reduce(1, own.expand_as(similar), similar, "amax")}


def ranks(similar: Tensor, own: Tensor) -> Tensor:
    """The rank (Q,) of each question's own text among all, from 1, by their similarities (Q, P); `own` (Q,).

    NaN, of a method that fails, counts as larger than all numbers, so that nothing seems to be found.
    """
    return 1 + (~(similar <= similar.gather(1, own[:, None]))).sum(1)
