"""The model testers of Transformers: a tiny config and inputs for every architecture.

They are in the tests of its repository (tests/models/*/test_modeling_*.py), not in the installed package.
"""

import importlib
import pathlib
import re
import unittest
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from hf_efficient_attn.errors import UnsupportedAttentionError

# What a modeling file contains if its attention can be switched: it calls Transformers' attention interface, or it is
# made of other models, such as LLaVA.
_INTERFACE = re.compile(r"ALL_ATTENTION_FUNCTIONS|\bAuto\w+\.from_config\(")

# Names of classes, such as BertSelfAttention, and of methods.
_CLASS = re.compile(r"\b[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*[A-Z][A-Za-z0-9]*\b")
_METHOD = re.compile(r"(?<=attn_implementation=')(?!eager|sdpa)\w+|^\w+(?=: )")


class Case(NamedTuple):
    """A model class and what its tester knows about it."""

    name: str  # of the model class
    model_class: type[nn.Module]  # the class itself
    config: Any  # a tiny one
    inputs: dict[str, Any]  # arguments of the model's forward
    # Arguments of `generate`, without which some models fail; None if the model does not generate.
    generation: dict[str, Any] | None


def test_files(source: pathlib.Path) -> list[str]:
    """The test files of the models that use Transformers' attention interface, as "bert/test_modeling_bert"."""
    models = source / "src" / "transformers" / "models"
    uses = {
        file.parent.name
        for file in models.glob("*/modeling_*.py")
        if _INTERFACE.search(file.read_text(encoding="utf-8"))
    }
    files = sorted((source / "tests" / "models").glob("*/test_modeling_*.py"))
    found = [f"{file.parent.name}/{file.stem}" for file in files if file.parent.name in uses]
    if not found:
        raise UnsupportedAttentionError(
            f"{source} has no tests/models/*/test_modeling_*.py: give a checkout of Transformers' repository, in the "
            "installed version, with --transformers-source"
        )
    return found


def cases(name: str) -> Iterator[Case]:
    """Yield the first class of each tester of a test file, and its first class that generates.

    `name` is one of those that `test_files` returns for the checkout, whose folder is in the search path of modules.
    """
    module = importlib.import_module("tests.models." + name.replace("/", "."))
    seen = set()
    for test in vars(module).values():
        is_case = isinstance(test, type) and issubclass(test, unittest.TestCase) and hasattr(test, "all_model_classes")
        if not is_case or test.__module__ != module.__name__:
            continue
        instance = test("setUp")
        instance.setUp()
        if not all(hasattr(instance, name) for name in ("_prepare_for_class", "model_tester")):
            continue  # tests of a part, such as a backbone, which others test as well
        generating = tuple(getattr(instance, "all_generative_model_classes", ()) or ())
        for model_class in (*tuple(instance.all_model_classes or ())[:1], *generating[:1]):
            if model_class in seen:
                continue
            seen.add(model_class)
            config, inputs = instance.model_tester.prepare_config_and_inputs_for_common()
            generation = _generation(instance) if model_class in generating else None
            inputs = instance._prepare_for_class(inputs, model_class)
            yield Case(model_class.__name__, model_class, config, inputs, generation)


def _generation(instance: Any) -> dict[str, Any] | None:
    """Arguments of `generate`. Tokens that stand for pictures and the like are never generated."""
    if not hasattr(instance, "prepare_config_and_inputs_for_generate"):
        return None
    config, inputs = instance.prepare_config_and_inputs_for_generate()
    return {**inputs, **instance._get_logits_processor_kwargs(config=config)}


def general(reason: str) -> str:
    """The sentence of a refusal without the names of classes and methods, so that models can be counted by it."""
    return _CLASS.sub("...", _METHOD.sub("...", reason))
