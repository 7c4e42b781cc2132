"""Export to ONNX: right for other lengths and masks than those of the example, or refused in a sentence."""

import pytest
import torch
from torch.export import Dim

import hf_efficient_attn as hea
from hf_efficient_attn.methods import get_method, learns, methods_with
from tiny_models import SMALL, tiny_batch, tiny_model

EXPORTABLE = [
    ("linear", {}),
    ("longformer", {"window_size": 16}),
    ("longformer", {"window_size": 16, "global_tokens": 2}),
    ("linear", {"window_size": 16}),
    ("linear", {"feature_map": "hedgehog", "num_features": 12}),
    ("linear", {"feature_map": "t2r", "num_features": 12}),
    ("linear", {"feature_map": "exp", "num_features": 12, "window_size": 16}),
    ("performer", {"num_features": 12}),
    ("nystromformer", {"num_landmarks": 16}),
    ("linformer", {"projection_dim": 8}),
    ("flurka_linear", {"projection_dim": 8}),
    ("flurka_performer", {"projection_dim": 8, "num_features": 12}),
]
NAMES = [f"{method}-{'-'.join(map(str, values.values()))}" for method, values in EXPORTABLE]
CORE = [0, 8, 9]  # of these rows


class Attention(torch.nn.Module):
    def __init__(self, method, hyperparameters, is_causal):
        super().__init__()
        self.config = hea.method_info(method).config_class(**hyperparameters)
        self.is_causal = is_causal
        sizes = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "value_dim": 8, "max_length": 300}
        learned = get_method(method).initial_parameters(self.config, **sizes) if learns(self.config) else {}
        self.learned = torch.nn.ParameterDict({name: x + 0.1 * torch.randn_like(x) for name, x in learned.items()})

    def forward(self, query, key, value, mask):
        parameters, options = dict(self.learned), {"attention_mask": mask, "is_causal": self.is_causal}
        return hea.attention(self.config, query, key, value, parameters=parameters, **options)


def inputs(batch, length, seed):
    generator = torch.Generator().manual_seed(seed)
    row = [torch.randn(batch, 2, length, 8, generator=generator) for _ in range(3)]
    return *row, torch.rand(batch, length, generator=generator) > 0.3


def test_only_tested_methods_are_exportable():
    assert methods_with("exportable") == sorted({name for name, _ in EXPORTABLE})


@pytest.mark.parametrize(
    "is_causal", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["bidirectional", "causal"]
)
@pytest.mark.parametrize(
    ("method", "hyperparameters"),
    [pytest.param(*row, marks=[] if i in CORE else pytest.mark.exhaustive) for i, row in enumerate(EXPORTABLE)],
    ids=NAMES,
)
def test_the_graph_is_right_for_other_lengths_and_masks(method, hyperparameters, is_causal, tmp_path):
    if is_causal and not hea.method_info(method).causal:
        pytest.skip("no causal form")
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime computes the exported graph")
    module, path = Attention(method, hyperparameters, is_causal), tmp_path / "attention.onnx"
    sizes = {0: Dim.DYNAMIC, 2: Dim.DYNAMIC}
    shapes = (sizes, sizes, sizes, {0: Dim.DYNAMIC, 1: Dim.DYNAMIC})
    torch.onnx.export(module, inputs(2, 40, 0), path, dynamo=True, dynamic_shapes=shapes, verbose=False)
    session = runtime.InferenceSession(path)
    for batch, length, seed in ((2, 40, 0), (2, 40, 1), (1, 9, 2), (3, 128, 3), (2, 131, 4), (2, 300, 5)):
        tensors = inputs(batch, length, seed)
        names = [entry.name for entry in session.get_inputs()]
        (found,) = session.run(None, {name: x.numpy() for name, x in zip(names, tensors, strict=True)})
        torch.testing.assert_close(torch.from_numpy(found), module(*tensors), atol=1e-5, rtol=1e-5)


def causes(error):
    while error is not None:
        yield error
        error = error.__cause__


@pytest.mark.parametrize(
    "method", ["kdeformer", *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("eva", "reformer"))]
)
def test_other_methods_are_refused_in_a_sentence(method, tmp_path):
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript")
    model = tiny_model("bert", method)
    batch = tuple(tiny_batch("bert", padding="right").values())  # token ids and mask
    with pytest.raises(Exception) as caught:
        torch.onnx.export(model, batch, tmp_path / "model.onnx", dynamo=True, verbose=False)
    (refusal,) = [error for error in causes(caught.value) if isinstance(error, hea.UnsupportedAttentionError)]
    assert f"{method} cannot be exported to ONNX" in str(refusal)
    assert " or ".join(methods_with("exportable")) in str(refusal)
    assert str(refusal) in str(caught.value)  # the exporter shows it
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("values", [{"pinv": "solve"}, {"conv_kernel_size": 3}])
def test_a_nystromformer_that_onnx_cannot_express_is_refused(values, tmp_path):
    module = Attention("nystromformer", {"num_landmarks": 8, **values}, is_causal=False)
    with pytest.raises(Exception) as caught:
        torch.onnx.export(module, inputs(2, 40, 0), tmp_path / "attention.onnx", dynamo=True, verbose=False)
    assert any("set pinv='iterative'" in str(error) for error in causes(caught.value))


@pytest.mark.parametrize(
    ("method", "message"), [("linear", "leave dynamo=False out"), ("kdeformer", "kdeformer cannot be exported to ONNX")]
)
def test_the_older_exporter_is_refused(method, message, tmp_path):
    module = Attention(method, SMALL[method], is_causal=False)
    with pytest.raises(hea.UnsupportedAttentionError, match=message):
        torch.onnx.export(module, inputs(2, 40, 0), tmp_path / "attention.onnx", dynamo=False)


def test_torch_export_is_not_refused():
    module = Attention("kdeformer", SMALL["kdeformer"], is_causal=False)
    tensors = inputs(1, 70, 0)
    program = torch.export.export(module, tensors)
    torch.testing.assert_close(program.module()(*tensors), module(*tensors))
