"""`recipes.compatibility` on a checkout of two test files, one of a model whose attention is silently wrong."""

import json
import textwrap

import pytest
import torch
from typer.testing import CliRunner

import hf_efficient_attn as hea
from hf_efficient_attn.integration import masks
from recipes.compatibility import __main__ as compatibility
from recipes.compatibility import checks, testers
from recipes.compatibility.testers import Case
from tiny_models import tiny_batch, tiny_class, tiny_config

runner = CliRunner()
TESTS = """
    import unittest
    import torch, transformers

    class Tester:
        def prepare_config_and_inputs_for_common(self):
            sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=40)
            return transformers.BertConfig(**sizes), {{"input_ids": torch.arange(4, 28).view(2, 12)}}

    class Base:
        all_model_classes = ()
        def _prepare_for_class(self, inputs, model_class):
            return inputs

    class {name}ModelTest(Base, unittest.TestCase):
        all_model_classes = (transformers.{name}Model, transformers.{name}ForMaskedLM)
        def setUp(self):
            self.model_tester = Tester()
"""


@pytest.fixture
def checkout(tmp_path):
    """A folder in the layout of Transformers' repository."""
    for name in ("Bert", "Mlp"):
        code = "ALL_ATTENTION_FUNCTIONS" if name == "Bert" else "no attention"
        for path, text in (
            (f"src/transformers/models/{name.lower()}/modeling_{name.lower()}.py", code),
            (f"tests/models/{name.lower()}/test_modeling_{name.lower()}.py", textwrap.dedent(TESTS).format(name=name)),
        ):
            file = tmp_path / "checkout" / path
            file.parent.mkdir(parents=True)
            file.write_text(text)
    return tmp_path / "checkout"


@pytest.mark.exhaustive
def test_run_writes_a_table(checkout, tmp_path):
    """Of a model that works, and of a file that cannot be run. The tests of a model without attention are not run."""
    for path in ("src/transformers/models/bad/modeling_bad.py", "tests/models/bad/test_modeling_bad.py"):
        (checkout / path).parent.mkdir(parents=True)
        (checkout / path).write_text("import a_package_that_is_missing  # ALL_ATTENTION_FUNCTIONS")
    command = ["run", "--transformers-source", str(checkout), "--output", str(tmp_path / "out"), "--methods", "linear"]
    done = runner.invoke(compatibility.app, [*command, "--workers", "2"])
    assert done.exit_code == 0, done.output
    assert "1 model types in 2 test files" in done.output
    assert "no result: bad/test_modeling_bad: ModuleNotFoundError" in done.output
    (row,) = json.loads((tmp_path / "out" / "bert-test_modeling_bert.json").read_text())["rows"]
    expected = {"class": "BertModel", "type": "bert", "method": "linear", "status": "works", "reason": ""}
    assert row == {**expected, "checks": ["forward", "padding", "save and load"]}
    table = tmp_path / "table.md"
    assert runner.invoke(compatibility.app, ["show", str(tmp_path / "out"), "--markdown", str(table)]).exit_code == 0
    assert "| `bert` | works |" in table.read_text()


def test_a_folder_without_tests_is_refused(tmp_path):
    with pytest.raises(hea.UnsupportedAttentionError, match="give a checkout of Transformers' repository"):
        testers.test_files(tmp_path)


def make(cls):
    return Case("Tiny", cls, tiny_config("gpt2"), {"input_ids": tiny_batch("gpt2", length=12)["input_ids"]}, None)


@pytest.mark.parametrize("method", ["kdeformer", "linear"])
def test_what_is_silently_wrong_is_found(method, monkeypatch):
    """A model whose module says that it is bidirectional, although exact attention is causal."""

    class Wrong(tiny_class("gpt2")):
        def forward(self, *args, **kwargs):
            if self.config._attn_implementation == method:
                kwargs["is_causal"] = False
            return super().forward(*args, **kwargs)

    read_mask = "hf_efficient_attn.integration.attention.read_mask"
    monkeypatch.setattr(read_mask, lambda name, mask: masks.read_mask(name, mask)._replace(is_causal=None))
    (found,) = checks.check(make(Wrong), method)
    assert found.status == checks.DIFFERS, found


def test_errors_and_models_without_attention(monkeypatch):
    class Failing(tiny_class("gpt2")):
        def forward(self, *args, **kwargs):
            if self.config._attn_implementation == "linear":
                raise RuntimeError("one\ntwo")
            return super().forward(*args, **kwargs)

    assert checks.check(make(Failing), "linear") == [(checks.FAILS, "RuntimeError: one", [])]
    found = checks.check(make(tiny_class("gpt2")), "linformer", "linear")
    assert [finding.status for finding in found] == [checks.REFUSED, checks.WORKS]
    never = Case("Never", Failing, tiny_config("gpt2"), {"input_ids": torch.zeros(1, 500, dtype=torch.long)}, None)
    assert checks.check(never, "linear")[0].status == checks.UNTESTED


def test_the_status_of_a_type_is_the_worst():
    rows = [
        {"status": status, "reason": "", "class": "A", "type": "a", "method": "linear"}
        for status in compatibility.ORDER
    ]
    assert [compatibility.worst(rows[: i + 1])["status"] for i in range(len(rows))] == list(compatibility.ORDER)
