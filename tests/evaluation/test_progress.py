"""Steps of a measurement within a limit of time, and partial results."""

import io

import pytest

from hf_efficient_attn.evaluation import progress
from hf_efficient_attn.evaluation.progress import Execution, Interrupted, Step, Steps, duration, partial_result


class Clock:
    """A clock that the test moves."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def execution_of(clock, **options):
    return Execution(**options, _start=clock.now)


def carry_out(plan, execution, clock, actual):
    done = []
    with Steps(plan, execution) as steps:
        for step in steps:
            clock.now += actual(step)
            done.append(step.name)
    return done, steps.left_out


def test_steps_stop_before_the_limit(clock):
    plan = [Step("a", 10.0), Step("b", 20.0), Step("c", 40.0), Step("d", 1.0)]
    assert carry_out(plan, execution_of(clock), clock, lambda step: step.seconds) == (["a", "b", "c", "d"], [])
    # "d" would fit, but "c" is more informative.
    limited = execution_of(clock, minutes=1.0)
    assert carry_out(plan, limited, clock, lambda step: step.seconds) == (["a", "b"], ["c", "d"])


def test_estimates_are_corrected_by_the_steps_that_are_done(clock):
    plan = [Step("a", 10.0), Step("b", 20.0), Step("c", 25.0)]
    limited = execution_of(clock, minutes=1.0)
    assert carry_out(plan, limited, clock, lambda step: 2 * step.seconds) == (["a", "b"], ["c"])
    limited = execution_of(clock, minutes=0.5)
    assert carry_out(plan, limited, clock, lambda step: step.seconds / 2) == (["a", "b", "c"], [])


def test_the_first_step_is_always_carried_out(clock):
    limited = execution_of(clock, minutes=0.001)
    assert carry_out([Step("a", 100.0), Step("b", 1.0)], limited, clock, lambda step: 1.0) == (["a"], ["b"])


def test_the_estimate_is_told_before_the_work(clock):
    told = []
    Steps([Step("a", 100.0), Step("b", 80.0)], execution_of(clock, on_estimate=told.append))
    Steps([Step("a", 100.0)], execution_of(clock, minutes=1.0, on_estimate=told.append), "text")
    assert told == [
        "Expected: about 3 minutes for 2 measurements.",
        "Expected: about 2 minutes for 1 text, of which as many as fit in about 60 seconds.",
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_is_in_proportion_to_the_estimates(clock, monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    with Steps([Step("a", 10.0), Step("b", 30.0)], execution_of(clock)) as steps:
        shown = []
        for _ in steps:
            shown.append(steps._bar.n)
            steps.advance(0.5)
            shown.append(steps._bar.n)
        assert [*shown, steps._bar.n] == [0.0, 5.0, 10.0, 25.0, 40.0]
        assert "b: 100%" in str(steps._bar)


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


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 second"), (80, "80 seconds"), (100, "2 minutes"), (6000, "2 hours"), (5 * 86400, "5 days")],
)
def test_duration(seconds, text):
    assert duration(seconds) == f"about {text}"
