"""Transformers' own common tests of models on the models of ours.

They are no part of an installed Transformers. Their file is in its source distribution: unpack that of the installed
version, install `parameterized`, and (4 minutes)

    HEA_TRANSFORMERS_SOURCE=FOLDER pytest -o addopts= tests/models/test_common_model_tests.py
"""

import importlib
import os
import pathlib
import sys
import types
import unittest

import pytest
import torch

from hf_efficient_attn.models.biggan import BigGANConfig, BigGANModel
from hf_efficient_attn.models.t2t_vit import T2TViTConfig, T2TViTForImageClassification, T2TViTModel

pytestmark = pytest.mark.slow
SOURCE = os.environ.get("HEA_TRANSFORMERS_SOURCE")
if SOURCE is None:
    pytest.skip("HEA_TRANSFORMERS_SOURCE names no unpacked source distribution", allow_module_level=True)
pytest.importorskip("parameterized", reason="Transformers' common tests need it")


def _common_tests():
    """tests/test_modeling_common.py of the source, with stand-ins for what it imports of export and generation."""
    for name, cls in (
        ("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"),
    ):
        module = types.ModuleType(f"transformers_tests.{name}")
        setattr(module, cls, type(cls, (), {}))
        sys.modules[module.__name__] = module
        sys.modules[f"transformers_tests.{name.partition('.')[0]}"] = types.ModuleType("transformers_tests")
    package = types.ModuleType("transformers_tests")
    package.__path__ = [str(pathlib.Path(SOURCE) / "tests")]
    sys.modules["transformers_tests"] = package
    return importlib.import_module("transformers_tests.test_modeling_common")


class Tester:
    """What the common tests ask about a model."""

    __test__ = False
    is_training, batch_size, num_hidden_layers, hidden_size = True, 3, 2, 32

    def __init__(self, config, inputs, **sizes):
        self.config, self.inputs = config, inputs
        self.__dict__.update(sizes)

    def get_config(self):
        return self.config()

    def prepare_config_and_inputs_for_common(self):
        return self.config(), self.inputs()


_COMMON = _common_tests()
# The tests of training pass over models without a loss, which they know by this list.
_COMMON.MODEL_MAPPING_NAMES = {**_COMMON.MODEL_MAPPING_NAMES, "t2t_vit": "T2TViTModel"}


class Common(_COMMON.ModelTesterMixin):
    test_resize_embeddings = False
    test_torch_exportable = False
    pipeline_model_mapping = types.MappingProxyType({})

    def _prepare_for_class(self, inputs, model_class, return_labels=False):
        labels = {"labels": torch.zeros(3, dtype=torch.long)} if return_labels else {}
        return {**inputs, **(labels if "For" in model_class.__name__ else {})}


class T2TViT(Common):
    tokens_type = "transformer"
    all_model_classes = (T2TViTModel, T2TViTForImageClassification)

    def setUp(self):
        self.model_tester = Tester(
            self.config, lambda: {"pixel_values": torch.rand(3, 3, 32, 32)}, num_attention_heads=4, seq_length=17
        )

    def config(self):
        return T2TViTConfig(
            image_size=32, t2t_strides=[2, 2, 2], hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=37, token_dim=16, num_labels=5, tokens_type=self.tokens_type,
        )  # fmt: skip

    def test_model_get_set_embeddings(self):
        """As in Transformers' own test of ViT: pictures have no table of embeddings."""
        for cls in self.all_model_classes:
            model = cls(self.config())
            assert isinstance(model.get_input_embeddings(), torch.nn.Module)
            assert model.get_output_embeddings() is None


class TestT2TViT(T2TViT, unittest.TestCase):
    pass


class TestT2TViTPerformer(T2TViT, unittest.TestCase):
    tokens_type = "performer"


class TestBigGAN(Common, unittest.TestCase):
    all_model_classes = (BigGANModel,)
    has_attentions = False

    def setUp(self):
        inputs = {"z": torch.randn(3, 8), "class_label": torch.tensor([1, 2, 3])}
        self.model_tester = Tester(self.config, lambda: dict(inputs), num_attention_heads=1, is_training=False)

    def config(self):
        return BigGANConfig(
            channel_width=4, num_classes=5, z_dim=8, class_embed_dim=8, output_dim=64, n_stats=5,
            layers=[[True, 16, 8], [True, 8, 4], [True, 4, 2], [True, 2, 1]], attention_layer_position=2,
        )  # fmt: skip

    def _nothing(self):
        self.skipTest("a generator of images has no hidden states of tokens and no table of input embeddings")

    test_hidden_states_output = test_retain_grad_hidden_states_attentions = _nothing
    test_model_outputs_equivalence = test_model_get_set_embeddings = _nothing

    def test_reverse_loading_mapping(self):
        self.skipTest("what was loaded from the package's names is saved under the model's own")
