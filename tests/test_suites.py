"""The option `--suite`: core and rest are disjoint and together all; the core has each value of each parameter."""

import pytest

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


class Recorder:
    """A plugin that records the collected tests."""

    def pytest_collection_finish(self, session):
        self.names = [item.nodeid.split("::", 1)[1] for item in session.items]


@pytest.fixture
def collect(tmp_path, monkeypatch):
    """Collect the tests of the module above: their ids without the file."""
    (tmp_path / "test_module_of_every_kind.py").write_text(MODULE)
    marks = "slow: of minutes\n    exhaustive: not in the core"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naddopts = -m 'not slow'\nmarkers =\n    {marks}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def collected(*arguments: str) -> list[str]:
        recorder = Recorder()
        options = ("--collect-only", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "core_suite")
        assert pytest.main([*options, *arguments], plugins=[recorder]) == 0
        return recorder.names

    return collected


def test_the_core_has_each_value_once_and_core_and_rest_are_all(collect):
    core, rest = collect(), collect("--suite", "rest")
    assert sorted(core + rest) == sorted(collect("--suite", "all")) and not set(core) & set(rest)
    assert len(core + rest) == 1 + 1 + 9 + 6 + 4 + len(INSTANCES)
    assert "test_plain" in core and "test_long" not in core and "test_slow" not in core
    product = [name for name in core if name.startswith("test_product")]
    assert len(product) == 3
    for value in ("1", "2", "3", "p-False", "p-True", "q-False"):
        assert any(value in name.split("[")[1] for name in product)
    # A case that is skipped is taken only for a value that no other case has.
    skipped = [name for name in core if name.startswith("test_skipped")]
    assert len(skipped) == 3 and sum("-2]" in name for name in skipped) == 1
    assert len([name for name in core if name.startswith("test_fixture")]) == 2
    methods = [name.split("[")[1].split("(")[0].rstrip("]") for name in core if name.startswith("test_method")]
    more = [instance.method for instance in INSTANCES if instance.core]
    assert sorted(methods) == sorted([*{instance.method for instance in INSTANCES}, *more])
