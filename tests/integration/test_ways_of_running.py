"""The second table in docs/guides/running.md: exported and compiled graphs, int8 weights, offloaded models."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn
from torch.export import Dim

import hf_efficient_attn as hea
from each import few_methods
from hf_efficient_attn.methods import methods_with
from test_learned import learned_in, shake
from tiny_models import DECODERS, METHODS, SMALL, output, tiny_batch, tiny_model

# What is enough for graphs in the core suite: sampled keys.
CHOSEN = ("kdeformer",)
EXPORTABLE = methods_with("exportable")
# (batch, length). The last row of a batch has a third less.
LENGTHS = ((2, 70), (3, 70), (2, 40), (1, 128))


each_method = pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in CHOSEN else pytest.mark.exhaustive) for name in METHODS]
)


class Positional(nn.Module):
    """A model whose inputs are positional and whose output is its first tensor, as exporters want it."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs):
        return self.model(**dict(zip(self.names, inputs, strict=True)))[0]


def text(batch: int, length: int) -> tuple:
    inputs = tiny_batch("bert", batch=batch, length=length)["input_ids"]
    mask = torch.ones_like(inputs)
    mask[-1, length - length // 3 :] = 0
    return inputs, mask


def pictures(batch: int, _: int) -> tuple:
    return tuple(tiny_batch("vit", batch=batch).values())


MODELS = {"bert": (text, ("input_ids", "attention_mask")), "vit": (pictures, ("pixel_values",))}


def saved_and_loaded(program) -> nn.Module:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


@each_method
@pytest.mark.parametrize("family", ["bert", pytest.param("vit", marks=pytest.mark.exhaustive)])
def test_an_exported_graph_of_dynamic_shapes(family, method):
    """One graph for other batches, and, if the inputs are texts, other lengths and masks."""
    make, names = MODELS[family]
    model = Positional(tiny_model(family, method), names)
    sizes = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} if family == "bert" else {0: Dim.DYNAMIC}
    with torch.no_grad():
        program = torch.export.export(model, make(2, 70), dynamic_shapes=((sizes,) * len(names),))
        loaded = saved_and_loaded(program)
        for batch, length in LENGTHS:
            inputs = make(batch, length)
            torch.testing.assert_close(loaded(*inputs), model(*inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.exhaustive  # tests/methods/test_onnx.py has one graph in the core suite
@pytest.mark.parametrize("method", EXPORTABLE)
@pytest.mark.parametrize("family", MODELS)
def test_a_model_in_onnx(family, method, tmp_path):
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime computes the exported graph")
    make, names = MODELS[family]
    model, path = Positional(tiny_model(family, method), names), tmp_path / "model.onnx"
    sizes = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} if family == "bert" else {0: Dim.DYNAMIC}
    shapes = ((sizes,) * len(names),)
    torch.onnx.export(model, make(2, 70), path, dynamo=True, dynamic_shapes=shapes, verbose=False)
    session = runtime.InferenceSession(path)
    for batch, length in LENGTHS:
        inputs = make(batch, length)
        given = {entry.name: x.numpy() for entry, x in zip(session.get_inputs(), inputs, strict=True)}
        (found,) = session.run(None, given)
        torch.testing.assert_close(
            torch.from_numpy(found), output(model.model, dict(zip(names, inputs, strict=True))), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("way", ["dynamic", pytest.param("mark_dynamic", marks=pytest.mark.exhaustive)])
@each_method
def test_a_compiled_model_of_dynamic_lengths(method, way):
    """No length but the first one is compiled."""
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    model = tiny_model("bert", method)
    compiled = torch.compile(model, dynamic=True if way == "dynamic" else None, backend=backend)
    first = 0
    with torch.no_grad():
        for length in (70, 40, 128, 90):
            ids, mask = text(2, length)
            for x in (ids, mask) if way == "mark_dynamic" else ():
                torch._dynamo.mark_dynamic(x, 1)
            found = compiled(input_ids=ids, attention_mask=mask)[0]
            first = first or len(graphs)
            expected = model(input_ids=ids, attention_mask=mask)[0]
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert len(graphs) == first > 0


def dynamic_int8(model: nn.Module) -> nn.Module:
    """int8 weights and activations of all linear layers, by PyTorch itself."""
    quantization = pytest.importorskip("torch.ao.quantization")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it names its successor, torchao
        return quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def weight_only_int8(model: nn.Module) -> nn.Module:
    """int8 weights of all linear layers, by torchao."""
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


@pytest.mark.parametrize("quantize", [dynamic_int8, weight_only_int8])
@each_method
@pytest.mark.parametrize("family", ["bert", "vit", *DECODERS])
def test_int8_weights(family, method, quantize):
    if family in DECODERS and not hea.method_info(method).causal:
        pytest.skip("no causal form, and a decoder")
    inputs, exact = tiny_batch(family), tiny_model(family, head=True)
    model = hea.convert(copy.deepcopy(exact), method, **SMALL[method])
    shake(model)
    learned = {name: dict(module.state_dict()) for name, module in learned_in(model).items()}
    quantized = quantize(copy.deepcopy(model))
    after = {name: dict(module.state_dict()) for name, module in learned_in(quantized).items()}
    assert learned.keys() == after.keys()
    for name, tensors in learned.items():
        assert all(torch.equal(tensor, after[name][key]) for key, tensor in tensors.items())
    found, of_exact = output(quantized, inputs), output(quantize(copy.deepcopy(exact)), inputs)
    assert not torch.equal(found, output(model, inputs)), "nothing was quantized"
    # The method itself is untouched: switched back, the model is the quantized exact model; and converting a quantized
    # model is the same as quantizing a converted one, apart from parameters that are learned.
    assert torch.equal(output(hea.convert(copy.deepcopy(quantized), "sdpa"), inputs), of_exact)
    if not learned:
        other = hea.convert(quantize(copy.deepcopy(exact)), method, **SMALL[method])
        assert torch.equal(output(other, inputs), found)
    if family in DECODERS:
        assert quantized.generate(**inputs, max_new_tokens=3, min_new_tokens=3).shape == (2, 73)


@pytest.mark.parametrize("family", DECODERS)
@few_methods
def test_an_offloaded_decoder_generates_the_same(family, method, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model, inputs = tiny_model(family, method, head=True), tiny_batch(family, padding="left")
    options = {**inputs, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    expected = model.generate(**options)
    on_cpu = accelerate.cpu_offload(copy.deepcopy(model), torch.device("cpu"))
    assert torch.equal(on_cpu.generate(**options), expected)
    accelerate.disk_offload(model, tmp_path, torch.device("cpu"))
    assert all(p.device.type == "meta" for p in model.parameters())
    assert torch.equal(model.generate(**options), expected)
