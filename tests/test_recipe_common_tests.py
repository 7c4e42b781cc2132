"""`recipes.compatibility common-tests` on a checkout with a few tests, and how their outcomes are compared."""

import os
import subprocess
import sys
import textwrap

from recipes.common.memory import ROOT
from recipes.compatibility import common_tests
from recipes.compatibility.common_tests import Outcome

CHECKOUT = {
    "src/transformers/models/bert/modeling_bert.py": "ALL_ATTENTION_FUNCTIONS",
    "tests/__init__.py": "",
    "tests/generation/__init__.py": "",
    "tests/models/__init__.py": "",
    "tests/models/bert/__init__.py": "",
    "tests/generation/test_utils.py": "class GenerationTesterMixin:\n    pass",
    "tests/test_modeling_common.py": """
        import torch

        class ModelTesterMixin:
            def test_sizes(self):
                self.assertEqual(self.outputs().last_hidden_state.shape, (1, 8, 32))

            def test_attentions(self):
                self.outputs(output_attentions=True)

            def test_default(self):
                self.assertEqual(self.model().config._attn_implementation, "sdpa")

            def test_eager_matches_other(self):
                self.fail()

            def test_wrong_everywhere(self):
                self.fail()
    """,
    "tests/models/bert/test_modeling_bert.py": """
        import unittest
        import torch, transformers
        from ...test_modeling_common import ModelTesterMixin

        class BertModelTest(ModelTesterMixin, unittest.TestCase):
            def model(self):
                sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=40)
                return transformers.BertModel(transformers.BertConfig(**sizes))

            def outputs(self, **kwargs):
                return self.model()(torch.arange(8)[None], **kwargs)

            def test_of_bert_alone(self):
                self.fail()
    """,
}


def test_the_command_runs_common_tests_with_both(tmp_path):
    """In a process, since the tests of the checkout are a package with the name `tests`."""
    source, output = tmp_path / "checkout", tmp_path / "out"
    for path, text in CHECKOUT.items():
        file = source / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "recipes.compatibility", "common-tests", "--transformers-source", str(source)]
    done = subprocess.run(
        [*command, "--output", str(output), "--method", "linear"], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in lines[2]] == ["bert", "3", "1", "1", "1"]
    assert "test_attentions" in done.stdout and "output_attentions" in done.stdout
    assert "bert: BertModelTest.test_default: failed: AssertionError" in done.stdout
    assert not list(output.glob("*.part"))


def test_tests_that_a_method_loses():
    exact = {"a": ["passed", "", False], "b": ["passed", "", False], "c": ["failed", "wrong", False],
             "d": ["passed", "", False], "e": ["passed", "", False]}  # fmt: skip
    ours = {"a": ["passed", "", False], "b": ["failed", "linear: no", True], "c": ["failed", "wrong", False],
            "d": ["skipped", "", False]}  # fmt: skip
    lost = common_tests.compare(exact, ours)
    assert lost == {
        "b": Outcome("failed", "linear: no", True),
        "d": Outcome("skipped", "", False),
        "e": Outcome("failed", "the test was not run", False),
    }
    text = common_tests.summary([{"file": "bert/test_modeling_bert", "exact": exact, "ours": ours}])
    assert "1 refused: ...: no" in text and "bert: e: failed: the test was not run" in text


def test_a_file_without_results_is_named():
    text = common_tests.summary([{"file": "vit/test_modeling_vit", "error": "sdpa: more than 5 seconds"}])
    assert "no result: vit/test_modeling_vit: sdpa: more than 5 seconds" in text
