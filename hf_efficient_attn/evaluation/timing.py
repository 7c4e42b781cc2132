"""Time and memory of calls, and the machine on which they were measured.

Time is paired: every measured call stands between two runs of a reference, so that the drift of a busy machine cancels.
Clock and medians are those of torch.utils.benchmark.
"""

import contextlib
import itertools
import os
import pathlib
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.benchmark import timer

from hf_efficient_attn.version import __version__

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


def peak_bytes() -> int:
    """Greatest resident memory of this process so far.

    Linux counts the peak of the parent into a child's `ru_maxrss`, but not into `VmHWM`.
    """
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource  # Unix alone has it

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_of(work: Work) -> int | None:
    """Bytes that PyTorch holds at the peak of one call, beside what it held before; None where it does not tell.

    Every allocation and release, as the profiler records them: the same in every run, unlike resident memory, which
    counts what the allocator keeps, and to 2.5 times as much. What BLAS takes for itself is not in it.
    """
    before = os.environ.get("KINETO_LOG_LEVEL")
    # Read at the profiler's first start, which it would announce on stderr.
    os.environ["KINETO_LOG_LEVEL"] = before or "99"
    try:
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            work()
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]
    recorded = getattr(profile, "kineto_results", None)
    changes = [] if recorded is None else [e for e in recorded.events() if e.name() == "[memory]"]
    if not changes:
        return None
    return max(0, *itertools.accumulate(e.nbytes() for e in sorted(changes, key=lambda e: e.start_ns())))


def machine(model: torch.nn.Module) -> dict[str, Any]:
    """The processor, the threads of PyTorch, where and in what type the model is, and the versions."""
    import transformers

    parameter = next(model.parameters())
    return {
        "cpu": _processor(),
        "threads": torch.get_num_threads(),
        "device": str(parameter.device),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_efficient_attn": __version__,
    }


def _processor() -> str:
    """The processor's name, as the system tells it."""
    table = pathlib.Path("/proc/cpuinfo")
    if table.exists():
        for line in table.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
