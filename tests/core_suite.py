"""The option `--core`: every test, but only with the first instance of every method.

A promise is still checked for every method, and only for fewer hyperparameters. It is meant for additional versions of
PyTorch and Transformers, where the whole suite would take too long.
"""

import pytest

from instances import INSTANCES, Instance

# The first instance of each method in the list.
_CORE = list({instance.method: instance for instance in reversed(INSTANCES)}.values())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--core", action="store_true", help="run each test with one instance of every method only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--core"):
        return
    selected, deselected = [], []
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        extra = any(isinstance(value, Instance) and value in INSTANCES and value not in _CORE for value in values)
        (deselected if extra else selected).append(item)
    config.hook.pytest_deselected(items=deselected)
    items[:] = selected
