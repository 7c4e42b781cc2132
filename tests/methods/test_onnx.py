"""Export to ONNX: right for other lengths and masks than those of the example, or refused in a sentence."""

from collections import OrderedDict

import pytest
import torch
from torch.export import Dim

import hf_efficient_attn as hea
from each import refuses
from hf_efficient_attn.methods import methods_with, parameter_shapes
from hf_efficient_attn.ops import index
from instances import FIRST, HEADS, INSTANCES, inputs, padding_mask, parameters_of

# ONNX has no Cholesky decomposition, and no sort of the tokens that the convolution needs, which no row has.
EXPORTABLE = [i for i in INSTANCES if i.config().exportable and i.hyperparameters.get("pinv") != "solve"]
pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript")
CORE = [FIRST[name] for name in ("linear", "nystromformer", "performer")]


class Attention(torch.nn.Module):
    def __init__(self, instance, is_causal=False, seed=0):
        super().__init__()
        self.config, self.is_causal, self.seed = instance.config(), is_causal, seed
        self.output = torch.nn.Linear(8, 8)  # as in a model: operators with parameters follow the attention
        self.learned = torch.nn.ParameterDict(parameters_of(self.config, example(length=300)[2], num_kv_heads=HEADS))

    def forward(self, query, key, value, mask):
        options = {"attention_mask": mask, "is_causal": self.is_causal, "seed": self.seed}
        return self.output(hea.attention(self.config, query, key, value, parameters=dict(self.learned), **options))


def example(batch=2, length=40, seed=0):
    return *inputs(batch, HEADS, length, 8, seed=seed), padding_mask("holes", batch, length, seed)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing is kept of earlier calls, as in a new process."""
    monkeypatch.setattr(index, "_results", OrderedDict())
    parameter_shapes.cache_clear()


def test_only_tested_methods_are_exportable():
    assert methods_with("exportable") == sorted({instance.method for instance in EXPORTABLE})


@pytest.mark.parametrize(
    ("instance", "is_causal"),
    [pytest.param(i, c, marks=[pytest.mark.exhaustive] * (c or i not in CORE)) for i in EXPORTABLE for c in i.forms],
    ids=str,
)
def test_the_graph_is_right_for_other_lengths_and_masks(instance, is_causal, tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime computes the exported graph")
    module, path = Attention(instance, is_causal), tmp_path / "attention.onnx"
    sizes = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC}
    shapes = (sizes, sizes, sizes, {0: Dim.DYNAMIC, 1: Dim.DYNAMIC})
    with torch.set_grad_enabled(is_causal):  # without a gradient, as most do, and with one
        torch.onnx.export(module, example(), path, dynamo=True, dynamic_shapes=shapes, verbose=False)
    session = runtime.InferenceSession(path)
    for batch, length, seed in ((2, 40, 0), (2, 40, 1), (1, 9, 2), (3, 128, 3), (2, 131, 4), (2, 300, 5)):
        tensors = example(batch, length, seed)
        names = [entry.name for entry in session.get_inputs()]
        (found,) = session.run(None, {name: x.numpy() for name, x in zip(names, tensors, strict=True)})
        torch.testing.assert_close(torch.from_numpy(found), module(*tensors), atol=1e-5, rtol=1e-5)


REFUSED = [
    *(
        pytest.param("nystromformer", x, True, "set pinv='iterative'", marks=pytest.mark.exhaustive)
        for x in ({"pinv": "solve"}, {"conv_kernel_size": 3})
    ),
    ("performer", {}, True, r"call eval\(\) on the module that you export"),  # random features of training
    ("linear", {}, False, "leave dynamo=False out"),
    ("kdeformer", {}, False, "kdeformer cannot be exported to ONNX"),
]


@pytest.mark.parametrize(("method", "values", "dynamo", "message"), REFUSED)
def test_what_onnx_cannot_express_and_the_older_exporter_are_refused(method, values, dynamo, message, tmp_path):
    module = Attention(FIRST[method].row(**values), seed=None if method == "performer" else 0)
    given = module, example(), tmp_path / "attention.onnx"
    # PyTorch's new exporter turns the refusal into an error of its own.
    error = Exception if dynamo else hea.UnsupportedAttentionError
    refuses(message, torch.onnx.export, *given, dynamo=dynamo, verbose=False, error=error)
