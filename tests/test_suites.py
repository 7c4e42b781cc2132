"""The option `--suite`: core and rest are disjoint and together all; the core has each value of each parameter."""

from instances import INSTANCES

# A module with tests of every kind. It is no test of this project, so its marks and parameters are known here.
MODULE = """
import pytest
from instances import INSTANCES

@pytest.fixture(params=["x", "y"])
def letter(request):
    return request.param

def test_plain(): pass

@pytest.mark.exhaustive
def test_long(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize(("b", "c"), [("p", False), ("p", True), ("q", False)])
def test_product(a, b, c): pass

@pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.skip(reason="no such thing")), 3])
@pytest.mark.parametrize("b", [1, 2])
def test_skipped(a, b): pass

@pytest.mark.parametrize("b", [1, 2])
def test_fixture(letter, b): pass

@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_method(instance): pass
"""


NAMES = ["plain", "long", "slow", "product", "skipped", "fixture", "method"]


def test_the_core_has_each_value_once_and_core_and_rest_are_all(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makepyfile(MODULE)
    pytester.makeini(
        "[pytest]\naddopts = -m 'not slow'\nmarkers =\n    slow: of minutes\n    exhaustive: not in the core"
    )

    def collect(suite: str) -> list[str]:
        """The ids of the tests without the file."""
        lines = pytester.runpytest_inprocess("--collect-only", "-q", "-p", "core_suite", "--suite", suite).outlines
        return [line.split("::", 1)[1] for line in lines if "::" in line]

    core, rest = collect("core"), collect("rest")
    assert sorted(core + rest) == sorted(collect("all")) and not set(core) & set(rest)
    assert len(core + rest) == 1 + 1 + 9 + 6 + 4 + len(INSTANCES)
    # {test: its parameters in the core suite}
    cases = {name: [x.partition("[")[2].rstrip("]") for x in core if x.startswith(f"test_{name}")] for name in NAMES}
    assert [len(cases[name]) for name in NAMES[:6]] == [1, 0, 0, 3, 3, 2]
    assert all(any(value in x for x in cases["product"]) for value in ("1", "2", "3", "p-False", "p-True", "q-False"))
    # A case that is skipped is taken only for a value that no other case has.
    assert sum(x.endswith("-2") for x in cases["skipped"]) == 1
    more = [instance.method for instance in INSTANCES if instance.core]
    methods = {instance.method for instance in INSTANCES}
    assert sorted(x.split("(")[0] for x in cases["method"]) == sorted([*methods, *more])
