"""Time and memory of function calls, and the machine on which they are measured.

Inputs that do not fit in memory are refused before the work where that is certain, and one clear error otherwise.
"""

import contextlib
import functools
import itertools
import math
import os
import pathlib
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import transformers

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.version import __version__

Work = Callable[[], Any]

# A call that takes longer is not repeated to make its time exact.
LONG_SECONDS = 0.5
# A smaller speed-up is no gain.
MIN_SPEED_UP = 1.15
# What the messages of PyTorch's RuntimeErrors about memory on a CPU contain.
_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "calculation overflowed", "overflow when")
# On a busy machine two rounds can differ by this factor.
_BUSY = 1.5


class Timing(NamedTuple):
    """Medians over rounds, in seconds; the ratios are reference time / call time of single rounds."""

    seconds: float
    ratio: float
    ratio_min: float
    ratio_max: float

    @property
    def unsteady(self) -> bool:
        """Whether the ratios of two rounds differ by more than half."""
        return self.ratio_max > _BUSY * self.ratio_min

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest ratio; a single round may be as far off as rounds of a busy machine."""
        if self.ratio_min < self.ratio_max:
            return self.ratio_min, self.ratio_max
        return self.ratio / math.sqrt(_BUSY), self.ratio * math.sqrt(_BUSY)

    @property
    def is_gain(self) -> bool:
        """Whether the call is faster than the reference by more than chance: `MIN_SPEED_UP` times in each round."""
        return self.range[0] >= MIN_SPEED_UP


UNSTEADY = "Some rounds differ by more than half: the machine was busy, and the medians are unreliable. Run again."


def timer() -> float:
    """The time in seconds by the clock of `torch.utils.benchmark`, which waits for the work of a GPU."""
    from torch.utils.benchmark import timer as clock  # it imports setuptools, and the package imports this module

    return clock()


def time_calls(work: Work, number: int = 1) -> float:
    """Seconds per call, as a mean over `number` calls. On an accelerator, see `use_device`."""
    start = timer()
    for _ in range(number):
        work()
    return (timer() - start) / number


def calls_to_time(work: Work, first: float | None = None) -> int:
    """The number of calls that take 0.1 s together.

    `first` is the time of a first call, which fills memory and caches and does not count; None to make it here.
    """
    if first is None:
        first = time_calls(work)
    return 1 if first > LONG_SECONDS else max(1, min(50, round(0.1 / max(1e-9, time_calls(work)))))


def summary(pairs: Sequence[tuple[float, float]]) -> Timing:
    """Medians of pairs (seconds of a call, seconds of its reference)."""
    ratios = [reference / taken for taken, reference in pairs]
    seconds = statistics.median(taken for taken, _ in pairs)
    return Timing(seconds, statistics.median(ratios), min(ratios), max(ratios))


class _Clock:
    """A streamer that records when generation has the prompt, and each token after it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(timer())

    def end(self) -> None: ...


def time_generation(
    model: transformers.PreTrainedModel, input_ids: torch.Tensor, new_tokens: int, rounds: int
) -> tuple[float, float]:
    """Measure greedy generation of at least 2 tokens after prompts (B, N), with the cache that the model makes itself.

    Returns medians over rounds: the seconds to the first token, and the tokens per second after it, all inputs of the
    batch together.
    """
    options = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "do_sample": False, "num_beams": 1}
    first, later = [], []
    for prompt in (input_ids[:, :16], *[input_ids] * rounds):
        clock = _Clock()
        mask = torch.ones_like(prompt)
        model.generate(prompt, attention_mask=mask, streamer=clock, pad_token_id=0, **options)  # type: ignore[operator]
        start, token, *_, end = clock.times
        first.append(token - start)
        later.append(end - token)
    # What the first call of an operator takes does not count.
    return statistics.median(first[1:]), len(input_ids) * (new_tokens - 1) / max(statistics.median(later[1:]), 1e-9)


@contextlib.contextmanager
def use_threads(count: int | None) -> Iterator[None]:
    """Set the number of PyTorch's threads within the context; None leaves it as it is."""
    before = torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, before)
        torch.set_num_threads(count or before)
        yield


def use_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make an accelerator the current device within the context, so that the clock waits for its work."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)


def peak_of(work: Work, device: torch.device | None = None) -> int | None:
    """Peak memory of one call in bytes, without what PyTorch held before the call; None where it is not recorded.

    On an accelerator the allocator of PyTorch records it. On the CPU it is computed from the allocations and releases
    that the profiler records. It is the same in every run, unlike resident memory, which includes freed memory that the
    allocator keeps, up to 2.5 times as much. The memory that BLAS allocates for itself is not included.
    """
    if device is not None and device.type != "cpu":
        work()  # libraries allocate their workspaces in a first call
        try:
            torch.accelerator.reset_peak_memory_stats(device)
            before = torch.accelerator.memory_allocated(device)
            work()
            return torch.accelerator.max_memory_allocated(device) - before
        except RuntimeError:  # not recorded for this kind of device
            return None
    # The profiler reads this variable at its first start, which it otherwise reports on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        work()
    recorded = getattr(profile, "kineto_results", None)
    changes = [] if recorded is None else [e for e in recorded.events() if e.name() == "[memory]"]
    sizes: list[int] = [e.nbytes() for e in sorted(changes, key=lambda e: e.start_ns())]
    return max(0, *itertools.accumulate(sizes)) if sizes else None


def check_memory(model: transformers.PreTrainedModel, length: int, batch: int = 1) -> None:
    """Refuse a batch of inputs whose activations certainly do not fit in the memory of the model's device.

    The estimate is low: the hidden states, queries, keys and values of one layer, and the logits of a language model
    without an encoder; beside an encoder, the decoder's inputs are short. The model is on the device that computes.
    """
    width = 5 * (getattr(model.config, "hidden_size", None) or 1)
    head = model.get_output_embeddings()
    if isinstance(head, torch.nn.Linear) and not getattr(model.config, "is_encoder_decoder", False):
        width += head.out_features
    needed, free = batch * length * width * model.dtype.itemsize, free_memory(model.device)
    if needed > free:
        raise UnsupportedAttentionError(
            f"a batch of {batch:,} inputs of {length:,} tokens needs at least {needed / 2**30:,.0f} GiB of memory, and "
            f"{free / 2**30:,.1f} GiB are free: give fewer tokens or smaller batches"
        )


def free_memory(device: torch.device) -> float:
    """Bytes of memory that are free on a device; inf if the system does not tell."""
    known = pathlib.Path("/proc/meminfo")
    if device.type == "cpu":
        lines = known.read_text().splitlines() if known.exists() else []
        return next((float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), torch.inf)
    try:
        return torch.accelerator.get_memory_info(device)[0]
    except RuntimeError:  # not recorded for this kind of device
        return torch.inf


@contextlib.contextmanager
def memory_errors(advice: str) -> Iterator[None]:
    """Turn PyTorch's errors about memory into a MemoryError with advice, such as "give shorter lengths"."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        is_known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not is_known and not any(sign in str(error).lower() for sign in _SIGNS):
            raise
        raise MemoryError(f"the memory is not enough for this measurement: {advice}") from error


@functools.cache
def processor_name() -> str:
    """The processor's name according to the operating system."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine(model: torch.nn.Module) -> dict[str, Any]:
    """The processor, PyTorch's threads, the model's device and dtype, and the versions of the packages."""
    parameter = next(model.parameters())
    device = parameter.device
    return {
        "cpu": processor_name(),
        "threads": torch.get_num_threads(),
        "device": f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_efficient_attn": __version__,
    }


def describe(about: Mapping[str, Any]) -> str:
    """What `machine` says about the hardware and the dtype, in words."""
    threads = f"{about['threads']} thread{'s' * (about['threads'] != 1)}"
    return f"{about['cpu']}, {threads}, {about['device']}, {about['dtype']}"
