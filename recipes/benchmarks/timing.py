"""Paired timing: every measured call between two runs of a reference, so that the drift of a busy machine cancels.

Clock and medians are those of torch.utils.benchmark.
"""

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.benchmark import timer

Work = Callable[[], Any]


class Timing(NamedTuple):
    """Medians of the rounds, in seconds; `ratio` is that of the reference to the call, a round at a time."""

    seconds: float
    reference_seconds: float
    ratio: float
    ratio_min: float
    ratio_max: float

    @property
    def unsteady(self) -> bool:
        """Whether some rounds differ by half or more."""
        return self.ratio_max > 1.5 * self.ratio_min


UNSTEADY = "Some rounds differ by half or more: the machine was busy, and the medians say little. Run it again."


def _time(work: Work, number: int) -> float:
    """Seconds of one of `number` calls."""
    start = timer()
    for _ in range(number):
        work()
    return (timer() - start) / number


def _calls_to_time(work: Work) -> int:
    """So many calls as take .1 s, after a first one that pays for memory and caches."""
    _time(work, 1)
    return max(1, min(50, round(0.1 / _time(work, 1))))


def paired(reference: Work, calls: Mapping[str, Work], rounds: int, bar=None) -> tuple[Timing, dict[str, Timing]]:
    """Times of the reference, and of every call beside it.

    Args:
        calls: label -> what to time.
        bar: a progress bar; it gets one step a round and call.
    """
    number = _calls_to_time(reference)
    numbers = {label: _calls_to_time(call) for label, call in calls.items()}
    notes: dict[str, list[tuple[float, float]]] = {label: [] for label in calls}
    references = []
    for _ in range(rounds):
        before = _time(reference, number)
        references.append(before)
        for label, call in calls.items():
            taken = _time(call, numbers[label])
            after = _time(reference, number)
            references.append(after)
            notes[label].append((taken, (before + after) / 2))
            before = after
            if bar is not None:
                bar.update()
    return summary([(x, x) for x in references]), {label: summary(note) for label, note in notes.items()}


def summary(notes: Sequence[tuple[float, float]]) -> Timing:
    """Pairs of the seconds of a call and of its reference -> their medians."""
    ratios = [reference / taken for taken, reference in notes]
    return Timing(
        statistics.median(taken for taken, _ in notes),
        statistics.median(reference for _, reference in notes),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
    )


@contextlib.contextmanager
def use_threads(count: int | None) -> Iterator[None]:
    """So many threads of PyTorch, and as many as before afterwards; None: as many as there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
