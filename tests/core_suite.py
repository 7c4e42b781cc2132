"""The option `--suite`: "core" (the default), "rest", or "all" tests.

The core suite contains every test function, but of a parametrised one only so many cases that each value of each
parameter occurs: every promise is checked for every method, and every recipe, command and model runs. Of a method that
has several rows in `instances.py` it has the first. Tests with the mark `exhaustive` are not in it. The rest is exactly
the other tests, so core and rest together are all.

A test that is named on the command line (`file.py::test`) runs in any case, and so do those with the mark `slow`, if
`-m slow` asks for them.
"""

from collections import defaultdict
from collections.abc import Sequence

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--suite",
        choices=("core", "rest", "all"),
        default="core",
        help="core (default): every test, with each value of each parameter once; rest: all others; all: both",
    )


@pytest.hookimpl(trylast=True)  # after the skips of conftest.py and after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    suite = config.getoption("--suite")
    if suite == "all":
        return
    functions = defaultdict(list)
    for item in items:
        if item.get_closest_marker("exhaustive") is None and not _is_extra(item):
            functions[item.nodeid.split("[")[0]].append(item)
    core = {id(item) for cases in functions.values() for item in _cover(cases)}
    # What the command line names with "::", as a node id.
    named = tuple(_without_folder(argument) for argument in config.args if "::" in argument)
    kept = {True: [], False: []}
    for item in items:
        is_named = _without_folder(item.nodeid).startswith(named) or item.get_closest_marker("slow") is not None
        kept[is_named or (id(item) in core) == (suite == "core")].append(item)
    config.hook.pytest_deselected(items=kept[False])
    items[:] = kept[True]


def _without_folder(node: str) -> str:
    file, _, test = node.partition("::")
    return f"{file.rpartition('/')[2]}::{test}"


def _params(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _is_extra(item: pytest.Item) -> bool:
    """Whether a test is about a row of `instances.py` that is not in the core suite."""
    from instances import FIRST, INSTANCES, Instance  # late: see conftest.py

    rows = [x for x in _params(item).values() if isinstance(x, Instance) and x in INSTANCES]
    return any(not (row.core or row is FIRST[row.method]) for row in rows)


def _values(case: pytest.Item) -> set[tuple]:
    """The values of the parameters of a case. Parameters that are given together count as one."""
    params = _params(case)
    together = [mark.args[0] for mark in case.iter_markers("parametrize")]
    groups = [tuple(x.replace(",", " ").split()) if isinstance(x, str) else tuple(x) for x in together]
    groups += [(name,) for name in params if not any(name in group for group in groups)]  # of fixtures
    return {(group, tuple(id(params[name]) for name in group)) for group in groups}


def _cover(cases: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Few of the cases of a test function, in which each value of each parameter occurs.

    Cases that are skipped show nothing, so they are taken only for what nothing else has.
    """
    if not _params(cases[0]):
        return list(cases)
    kept, values = [], {case: _values(case) for case in cases}
    missing = set().union(*values.values())
    for skipped in (False, True):
        left = [case for case in cases if (case.get_closest_marker("skip") is not None) == skipped]
        while left and values[best := max(left, key=lambda case: len(values[case] & missing))] & missing:
            missing -= values[best]
            left.remove(best)
            kept.append(best)
    return kept
