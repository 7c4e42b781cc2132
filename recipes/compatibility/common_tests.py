"""A pytest plugin: Transformers' own common tests of models, with a method as the default of every model.

    cd CHECKOUT
    PYTHONPATH=ROOT python -m pytest -p recipes.compatibility.common_tests --attention-method kdeformer -o addopts= \
        tests/models/bert/test_modeling_bert.py tests/models/gpt2/test_modeling_gpt2.py ...

CHECKOUT is a checkout of Transformers' repository at the tag of the installed version, and ROOT one of this package. A
default applies wherever a test names no implementation, to models that support `sdpa`. Tests of implementations and of
graphs are left out. The last lines are a table of the tests that passed, that failed because the method refuses what
they ask for, and others, for each model, and the sentences of the refusals.

Duration: about two minutes for a model. Expected: the tables of docs/compatibility.md.
"""

import functools
import importlib
import re
from collections import Counter
from typing import Any

import pytest

from hf_efficient_attn.cli import table
from recipes.compatibility.testers import general

# Classes of Transformers' tests whose tests are run, by the modules that define them.
_COMMON = (("tests.test_modeling_common", "ModelTesterMixin"), ("tests.generation.test_utils", "GenerationTesterMixin"))
# Tests that name the implementations that they compare, and tests of graphs, which tests of our own cover.
_OTHERS = re.compile("sdpa|flash|flex_attention|eager_matches|export|compile|torchscript")
_REFUSAL = re.compile(r"UnsupportedAttentionError: (.+)")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the method."""
    parser.addoption("--attention-method", default="sdpa", help="Default attention of every model.")


def pytest_configure(config: pytest.Config) -> None:
    """Make the method the attention of every model in this process for which nobody names another."""
    from transformers.modeling_utils import PreTrainedModel

    import hf_efficient_attn  # noqa: F401 (registers the methods)

    method, choose = config.getoption("--attention-method"), PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(choose)
    def choose_method(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention is None and self._supports_sdpa:
            requested_attention = method
        return choose(self, requested_attention, *args, **kwargs)

    PreTrainedModel.get_correct_attn_implementation = choose_method  # type: ignore[method-assign]


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep the common tests alone."""
    mixins = [getattr(importlib.import_module(module), name) for module, name in _COMMON]
    items[:] = [
        item
        for item in items
        if item.cls is not None
        and any(hasattr(mixin, item.originalname) for mixin in mixins)
        and not _OTHERS.search(item.originalname)
    ]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table."""
    counts, sentences = Counter[tuple[str, str]](), Counter[str]()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            refusal = _REFUSAL.search(str(report.longrepr)) if outcome == "failed" else None
            model = report.nodeid.partition("::")[0].rpartition("test_modeling_")[2].removesuffix(".py")
            counts[model, "refused" if refusal else outcome] += 1
            sentences.update([general(refusal.group(1))] if refusal else [])
    models, kinds = list(dict.fromkeys(model for model, _ in counts)), ("passed", "refused", "failed")
    rows = [(model, *(counts[model, kind] for kind in kinds)) for model in models]
    rows.append(("all", *(sum(row[i] for row in rows) for i in (1, 2, 3))))
    terminalreporter.write_line("\n" + table(("model", *kinds), rows))
    for sentence, count in sentences.most_common():
        terminalreporter.write_line(f"{count} refused: {sentence}")
