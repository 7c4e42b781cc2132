"""Transformers' own common tests of a model, once with exact attention and once with a method as the default.

A default applies wherever a test names no implementation: in `from_pretrained`, `from_config` and constructors. Tests
that ask for `sdpa` or `eager` get that. Only models that support `sdpa` get the default, as with `sdpa` itself.
"""

import functools
import importlib
import os
import pathlib
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hf_efficient_attn.cli import table
from recipes.compatibility.testers import general

EXACT = "sdpa"
# The files of the models of the table in docs/compatibility.md.
FILES = tuple(
    f"{name}/test_modeling_{name}"
    for name in (
        "bert", "roberta", "distilbert", "modernbert", "vit", "deit", "dinov2", "clip", "siglip", "gpt2", "llama",
        "qwen3", "mistral", "bart", "marian", "whisper", "wav2vec2",
    )
)  # fmt: skip
# Classes of Transformers' tests whose tests are run, by the modules that define them.
_COMMON = (("tests.test_modeling_common", "ModelTesterMixin"), ("tests.generation.test_utils", "GenerationTesterMixin"))
# Tests that name the implementations that they compare, and tests of graphs, which tests of our own cover.
_OTHERS = re.compile("sdpa|flash|flex_attention|eager_matches|export|compile|torchscript")
_REFUSAL = re.compile(r"UnsupportedAttentionError: (.+)")


class Outcome(NamedTuple):
    """What became of one test.

    Attributes:
        status: "passed", "skipped" or "failed".
        reason: the sentence of a refusal, or the error; empty if it passed.
        is_refused: whether it failed because a method refused what the test asks for.
    """

    status: str
    reason: str
    is_refused: bool


class _Recorder:
    """A pytest plugin: keeps the common tests alone, and records their outcomes by class and name."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        mixins = [getattr(importlib.import_module(module), name) for module, name in _COMMON]
        items[:] = [
            item
            for item in items
            if item.cls is not None
            and any(hasattr(mixin, item.originalname) for mixin in mixins)
            and not _OTHERS.search(item.originalname)
        ]

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.partition("::")[2].replace("::", ".")
        present = self.outcomes.get(name)
        if present is not None and present.status == "failed":
            return
        if report.outcome == "failed":
            text = str(report.longrepr)
            refusals = _REFUSAL.findall(text)
            errors = re.findall(r"^E +(\S.*)", text, re.MULTILINE)
            reason = refusals[0] if refusals else next(iter(errors), text.strip().splitlines()[-1])
            self.outcomes[name] = Outcome("failed", reason[:500], bool(refusals))
        elif present is None or report.outcome == "skipped":
            self.outcomes[name] = Outcome(report.outcome, "", False)


def run_common_tests(name: str, source: pathlib.Path, method: str) -> dict[str, list[Any]]:
    """Run the common tests of a file in this process.

    Args:
        name: of the test file, such as "bert/test_modeling_bert".
        source: the checkout.
        method: of this package, or "sdpa".

    Returns:
        The `Outcome` of every test, by class and name.
    """
    import pytest

    os.chdir(source)
    sys.path.insert(0, str(source))
    if method != EXACT:
        set_default(method)
    recorder = _Recorder()
    arguments = ["-q", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=short", f"tests/models/{name}.py"]
    pytest.main(arguments, plugins=[recorder])
    return {test: list(outcome) for test, outcome in recorder.outcomes.items()}


def set_default(method: str) -> None:
    """Make a method the attention of every model in this process for which nobody names another."""
    from transformers.modeling_utils import PreTrainedModel

    import hf_efficient_attn  # noqa: F401 (registers the methods)

    choose = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(choose)
    def choose_method(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention is None and self._supports_sdpa:
            requested_attention = method
        return choose(self, requested_attention, *args, **kwargs)

    PreTrainedModel.get_correct_attn_implementation = choose_method  # type: ignore[method-assign]


def compare(exact: Mapping[str, Sequence[Any]], ours: Mapping[str, Sequence[Any]]) -> dict[str, Outcome]:
    """The tests that pass with exact attention and not with a method."""
    lost = {}
    for test, (status, *_) in exact.items():
        outcome = Outcome(*ours.get(test, ("failed", "the test was not run", False)))
        if status == "passed" and outcome.status != "passed":
            lost[test] = outcome
    return lost


def summary(files: Sequence[Mapping[str, Any]]) -> str:
    """Counts of tests for every file, the reasons of those that a method loses, and all that are not refusals."""
    rows, reasons, others = [], Counter(), []
    names: dict[str, set[str]] = {}
    for file in files:
        if file.get("error"):
            others.append(f"no result: {file['file']}: {file['error']}")
            continue
        exact, ours = file["exact"], file["ours"]
        lost = compare(exact, ours)
        refused = {test: outcome for test, outcome in lost.items() if outcome.is_refused}
        passed = [sum(outcome[0] == "passed" for outcome in found.values()) for found in (exact, ours)]
        rows.append((file["file"].partition("/")[0], *passed, len(refused), len(lost) - len(refused)))
        for test, outcome in refused.items():
            reason = general(outcome.reason)
            reasons[reason] += 1
            names.setdefault(reason, set()).add(test.rpartition(".")[2])
        others += [
            f"{file['file'].partition('/')[0]}: {test}: {outcome.status}: {outcome.reason}"
            for test, outcome in lost.items()
            if not outcome.is_refused
        ]
    rows.append(("all", *(sum(row[column] for row in rows) for column in range(1, 5))))
    lines = [table(("model", "passed exactly", "passed", "refused", "otherwise"), rows), ""]
    lines += [
        f"{count} refused: {reason}\n    {', '.join(sorted(names[reason]))}" for reason, count in reasons.most_common()
    ]
    return "\n".join([*lines, *others])
