"""The plugin `recipes.compatibility.common_tests` on a checkout with a few tests."""

import os
import subprocess
import sys
import textwrap

import pytest

from recipes.common.memory import ROOT

CHECKOUT = {
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


@pytest.mark.exhaustive  # a process of pytest in a process
@pytest.mark.parametrize(("method", "counts"), [("sdpa", ["3", "0", "1"]), ("linear", ["1", "1", "2"])])
def test_common_tests_are_counted_with_a_default_method(method, counts, tmp_path):
    """In a process, since the tests of the checkout are a package with the name `tests`."""
    for path, text in CHECKOUT.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "pytest", "-p", "recipes.compatibility.common_tests", "-o", "addopts="]
    command += ["--attention-method", method, "-p", "no:cacheprovider", "tests/models/bert/test_modeling_bert.py"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    lines = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in lines[2]] == ["bert", *counts], done.stdout
    assert ("1 refused:" in done.stdout and "output_attentions" in done.stdout) == (method == "linear")
