"""Long measurements: rows as they finish, a limit of time, and partial results after an interruption.

A measurement is a list of steps, and `carry_out` goes through them. The caller does the work of each step.
"""

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tqdm import tqdm


class Interrupted(KeyboardInterrupt):
    """The user interrupted a measurement after some rows; `result` is known so far, in the form of the complete one."""

    def __init__(self, result: Any) -> None:
        super().__init__("interrupted")
        self.result = result


@contextlib.contextmanager
def partial_result(result: Callable[[], Any]) -> Iterator[None]:
    """Turn a KeyboardInterrupt within the context into `Interrupted` with the partial result that `result` returns.

    If it returns None, because there is none yet, the KeyboardInterrupt goes on as it is.
    """
    try:
        yield
    except KeyboardInterrupt as interruption:
        known = None if isinstance(interruption, Interrupted) else result()
        if known is None:
            raise
        raise Interrupted(known) from None


@dataclass(frozen=True)
class Execution:
    """How a measurement is carried out and followed. The time limit counts from the creation of the object."""

    minutes: float | None = None  # a step that is not expected to end in this time is left out; None for no limit
    on_row: Callable[[Any], None] = lambda row: None  # called with every row of the result as soon as it is complete
    # Called once before the steps with what is known of the result by then, such as the names of methods.
    on_begin: Callable[[Any], None] = lambda about: None
    _start: float = field(default_factory=time.monotonic, repr=False)

    def seconds_left(self) -> float:
        """Seconds until the limit; inf if there is none."""
        return float("inf") if self.minutes is None else 60 * self.minutes - (time.monotonic() - self._start)


class Step(NamedTuple):
    """A part of a measurement: its name, its estimated cost in any unit, and what the caller needs to do it.

    A measurement with a limit of time has stages: first a little of everything, then more of everything.
    """

    name: str
    cost: float
    key: Any = None
    stage: int = 0


def carry_out(plan: Sequence[Step], execution: Execution) -> Generator[Step, None, None]:
    """Yield steps until the time limit, with a progress bar in proportion to their costs.

    The first step is always carried out. A stage ends at its first other step that is not expected to end in time, at
    the pace of the steps before it; then comes the next stage. A step is done when the next one is requested.
    """
    layout = "{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    begin, done, over = time.monotonic(), 0.0, -1
    with tqdm(total=sum(step.cost for step in plan) or 1.0, bar_format=layout, disable=None, leave=False) as bar:
        for step in plan:
            if done and (time.monotonic() - begin) / done * step.cost > execution.seconds_left():
                over = step.stage
            if step.stage == over:
                continue
            bar.set_description(step.name)
            yield step
            done += step.cost
            bar.update(step.cost)
