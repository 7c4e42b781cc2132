"""Steps of a measurement within a limit of time, and partial results."""

import io

import pytest

from hf_efficient_attn.evaluation import progress
from hf_efficient_attn.evaluation.progress import Execution, Interrupted, Step, carry_out, partial_result


class Clock:
    """A clock that the test moves."""

    now = 0.0


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    clock = Clock()
    return clock


@pytest.mark.parametrize(
    ("seconds", "factor", "minutes", "done"),
    [
        ([10, 20, 40, 1], 1, None, 4),
        ([10, 20, 40, 1], 1, 1.0, 2),  # the last one would fit, but the third is more informative
        ([10, 20, 25], 2, 1.0, 2),  # the estimates are corrected by the steps that are done
        ([10, 20, 25], 0.5, 0.5, 3),
        ([100, 1], 0.01, 0.001, 1),  # the first one is always carried out
    ],
)
def test_steps_stop_before_the_limit(seconds, factor, minutes, done, clock):
    names = []
    for step in carry_out([Step(f"{i}", s) for i, s in enumerate(seconds)], Execution(minutes, _start=0.0)):
        clock.now += factor * step.cost
        names.append(step.name)
    assert names == [f"{i}" for i in range(done)]


def test_the_bar_is_in_proportion_to_the_estimates_and_removed(clock, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", terminal)
    steps = carry_out([Step("a", 10.0), Step("b", 30.0), Step("c", 60.0)], Execution(_start=0.0))
    for share in (0, 10, 40):
        clock.now += 10.0
        step = next(steps)
        assert f"{step.name}: {share:3}%" in terminal.getvalue().replace("\x1b", "").rpartition("\r")[2]
    steps.close()
    assert not terminal.getvalue().rpartition("\r")[2].strip()


def test_partial_results():
    with pytest.raises(Interrupted) as caught, partial_result(lambda: ["row"]):
        raise KeyboardInterrupt
    assert caught.value.result == ["row"]
    assert isinstance(caught.value, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt) as caught, partial_result(lambda: None):
        raise KeyboardInterrupt
    assert not isinstance(caught.value, Interrupted)
    with pytest.raises(Interrupted) as caught, partial_result(lambda: "outer"), partial_result(lambda: "inner"):
        raise KeyboardInterrupt
    assert caught.value.result == "inner"
