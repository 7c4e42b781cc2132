"""The table of exceptional models: its rows name classes of Transformers, and what they say of a class is true."""

import importlib
import inspect
import pathlib
import re

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

import hf_efficient_attn as hea
from helpers.model_types import mask_of, sizes
from hf_efficient_attn.integration import patched
from hf_efficient_attn.integration.learned import NAME
from hf_efficient_attn.integration.model_kinds import KINDS, ModelKind, kind_at, kind_of
from tiny_models import output

# The module of every class in the modeling files of Transformers.
CLASSES = {
    name: f"transformers.models.{path.parent.name}.{path.stem}"
    for path in sorted(pathlib.Path(transformers.__file__).parent.glob("models/*/modeling_*.py"))
    for name in re.findall(r"^class (\w+)", path.read_text(encoding="utf-8"), re.M)
}


def named(kind: ModelKind) -> list[str]:
    """The classes of Transformers that a row is for."""
    return [name for name in CLASSES if re.fullmatch(kind.classes, name)]


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.24"), reason="older versions lack some models")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.classes)
def test_a_row_is_for_classes_of_transformers_that_no_other_row_is_for(kind):
    assert named(kind)
    shared = {name: [one.classes for one in KINDS if re.fullmatch(one.classes, name)] for name in named(kind)}
    assert all(len(rows) == 1 for rows in shared.values()), shared


@pytest.mark.parametrize(
    "name", [name for kind in KINDS if kind.is_patched or kind.like_bert_in for name in named(kind)]
)
def test_a_patched_class_derives_from_the_class_of_its_name(name):
    cls = getattr(patched, name)
    assert cls.__module__ == patched.__name__
    assert CLASSES[name] in [base.__module__ for base in cls.__mro__ if base.__name__ == name]


@pytest.mark.parametrize("name", [name for kind in KINDS if kind.projections for name in named(kind)])
def test_projections_of_a_row_compute_what_the_class_computes(name):
    module = importlib.import_module(CLASSES[name])
    models = [x for x in vars(module).values() if inspect.isclass(x) and issubclass(x, PreTrainedModel)]
    config_class = next(x.config_class for x in models if x.config_class is not None)
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config_class(**sizes(config_class))).eval()
    hea.convert(model, "flurka_linear", projection_dim=8)
    attention = [x for x in model.modules() if type(x).__name__ == name]
    assert attention and all("forward" in vars(x) and NAME in x._modules for x in attention)
    ids = torch.randint(5, 60, (2, 40))
    is_text = model.main_input_name == "input_ids"
    text, picture = {"input_ids": ids, "attention_mask": mask_of(ids)}, {"pixel_values": torch.randn(2, 3, 32, 32)}
    inputs = text if is_text else picture
    found = output(model, inputs)
    for one in attention:
        del one.forward  # the class's own
    torch.testing.assert_close(found, output(model, inputs), atol=2e-5, rtol=2e-5)


def test_a_row_is_for_subclasses_where_that_is_asked_for():
    base = type("Gemma3TextModel", (torch.nn.Module,), {})
    derived = type("Derived", (base,), {})
    module = derived()
    for is_bidirectional in (False, True):
        module.config = transformers.Gemma3TextConfig(use_bidirectional_attention=is_bidirectional)
        assert kind_at(module) == (kind_of(base) if is_bidirectional else ModelKind(""))
    assert kind_of(derived) == kind_of(torch.nn.Linear) == ModelKind("")
