"""Ways of running a model: copies, threads, graphs, other precisions, offloaded weights, training.

docs/guides/running.md has a table of them.
"""

import copy
import importlib
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.export import Dim

import hf_efficient_attn as hea
from each import FEW, few_methods, refuses
from helpers.learned import LEARNING, learned_in, shake
from helpers.model_types import REFUSALS, SAMPLE, WORKS_AFTER_ALL, case
from helpers.windowed_models import converted, exact_model
from hf_efficient_attn.methods import methods_with
from instances import INSTANCES, inputs, padding_mask
from tiny_models import CAUSAL, DECODERS, METHODS, RANDOM, SMALL, generate, output, reloaded, tiny_batch, tiny_model

# What is enough for graphs in the core suite: sampled keys.
each_method = pytest.mark.parametrize(
    "method", ["kdeformer", *(pytest.param(x, marks=pytest.mark.exhaustive) for x in METHODS if x != "kdeformer")]
)


def pairs(*rows, core):
    """Pairs of a model and a method as parameters; those for which `core` is False are exhaustive."""
    marks = (() if core(*row) else pytest.mark.exhaustive for row in rows)
    return [pytest.param(*row, marks=mark, id="-".join(row)) for row, mark in zip(rows, marks, strict=True)]


def gradients(model, inputs: dict, call=None) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of a model, or of another call of it, and the gradients of its parameters."""
    model.zero_grad()
    torch.manual_seed(3)
    out = (model if call is None else call)(**inputs)[0]
    (out.float() * torch.linspace(-1, 1, out.shape[-1])).mean().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
    assert found[1].keys() >= expected[1].keys() and expected[1]  # a graph can have gradients of 0 in addition
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=10 * tolerance, atol=tolerance / 10, msg=name)


# Copies


def model_of(family: str, method: str):
    model = tiny_model(family, method)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():  # learned ones need not stay what a conversion starts from
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return model, tiny_batch(family, padding="left")


each_family = pytest.mark.parametrize("family", ["bert", "vit", "llama", "distilbert"])


def scaled(model: nn.Module, factor: float) -> nn.Module:
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


def copies_on(devices, tensors):
    """What `torch.nn.parallel.replicate` gives its replicas: here the i-th multiple of each parameter."""
    return [[x * (1.0 + i) if x.requires_grad else x for x in tensors] for i in devices]


@few_methods
@each_family
def test_replicas(family, method, monkeypatch):
    """As `torch.nn.DataParallel` computes: each replica in a thread, with tensors of its own and without parameters."""
    model, inputs = model_of(family, method)
    expected = [gradients(scaled(model, 1.0 + i), inputs) for i in range(3)]
    module = importlib.import_module("torch.nn.parallel.replicate")
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", lambda x, devices, detach=False: copies_on(devices, x))
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda replica: replica(**inputs)[0], module.replicate(model, [0, 1, 2])))
    torch.testing.assert_close(found, [out for out, _ in expected])
    model.zero_grad()
    sum((out * torch.linspace(-1, 1, out.shape[-1])).mean() for out in found).backward()
    for name, parameter in model.named_parameters():
        summands = [(1.0 + i) * grads[name] for i, (_, grads) in enumerate(expected) if name in grads]
        assert (parameter.grad is None) == (not summands), name
        if summands:
            torch.testing.assert_close(parameter.grad, sum(summands), rtol=1e-3, atol=1e-5, msg=name)
    torch.testing.assert_close(output(model, inputs), expected[0][0])  # the original is as before


@few_methods
@each_family
def test_deep_copies_and_functional_calls(family, method):
    model, inputs = model_of(family, method)
    before, expected, other = output(model, inputs), output(scaled(model, 2.0), inputs), copy.deepcopy(model)
    doubled = {name: p.detach() * 2.0 for name, p in model.named_parameters()}
    with torch.no_grad():
        assert torch.equal(torch.func.functional_call(model, doubled, (), inputs)[0], expected)
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    assert torch.equal(output(other, inputs), before)


# Graphs


# (batch, length). The last row of a batch has a third less.
LENGTHS = ((2, 70), (3, 70), (2, 40), (1, 128))


def example(family: str, batch: int, length: int) -> dict:
    inputs = tiny_batch(family, batch=batch, length=length)
    if family == "bert":
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][-1, length - length // 3 :] = 0
    return inputs


def exported(model: nn.Module, inputs: dict, shapes: dict, path):
    torch.export.save(torch.export.export(model, (), inputs, dynamic_shapes=shapes), path)
    return torch.export.load(path).module()


def in_onnx(model: nn.Module, inputs: dict, shapes: dict, path):
    pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime computes the exported graph")
    torch.onnx.export(model, (), path, kwargs=inputs, dynamo=True, dynamic_shapes=shapes, verbose=False)
    session = runtime.InferenceSession(path)
    return lambda **inputs: [torch.from_numpy(session.run(None, {name: x.numpy() for name, x in inputs.items()})[0])]


# tests/methods/test_onnx.py has one graph in the core suite.
@pytest.mark.parametrize("export", [exported, pytest.param(in_onnx, marks=pytest.mark.exhaustive)])
@each_method
@pytest.mark.parametrize("family", ["bert", pytest.param("vit", marks=pytest.mark.exhaustive)])
def test_an_exported_graph_of_dynamic_shapes(family, method, export, tmp_path):
    """One graph for other batches, and, if the inputs are texts, other lengths and masks."""
    if export is in_onnx and method not in methods_with("exportable"):
        pytest.skip("no ONNX of this method")
    model, given = tiny_model(family, method), example(family, 2, 70)
    sizes = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} if family == "bert" else {0: Dim.DYNAMIC}
    with torch.no_grad():
        loaded = export(model, given, dict.fromkeys(given, sizes), tmp_path / "model.pt2")
        for batch, length in LENGTHS:
            inputs = example(family, batch, length)
            torch.testing.assert_close(loaded(**inputs)[0], model(**inputs)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("way", ["dynamic", pytest.param("mark_dynamic", marks=pytest.mark.exhaustive)])
@each_method
def test_a_compiled_model_of_dynamic_lengths(method, way):
    """No length but the first one is compiled."""
    torch.compiler.reset()
    model, counter, graphs = tiny_model("bert", method), CompileCounter(), set()
    compiled = torch.compile(model, dynamic=True if way == "dynamic" else None, backend=counter)
    for length in (70, 40, 128, 90):
        inputs = example("bert", 2, length)
        for x in inputs.values() if way == "mark_dynamic" else ():
            torch._dynamo.mark_dynamic(x, 1)
        torch.testing.assert_close(output(compiled, inputs), output(model, inputs), atol=1e-4, rtol=1e-4)
        graphs.add(counter.frame_count)
    assert len(graphs) == 1 and graphs != {0}


COMPILED = [("modernbert", "linear"), *(("bert", x) for x in METHODS), *(("gpt2", x) for x in CAUSAL)]


# Of functions that the standard library caches, torch.compile says that it does not know what they are.
@pytest.mark.filterwarnings("error:Dynamo detected a call to a:UserWarning")
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("name", "method"),
    pairs(*COMPILED, core=lambda *row: row in [("modernbert", "linear"), ("bert", "eva"), ("gpt2", "linear")]),
)
def test_compiling_to_one_graph(name, method, backend):
    """Layers with windows, learned parameters, and the check of positions are in the graph."""
    torch.compiler.reset()
    if name == "modernbert":  # two of its three layers stay exact, with a window
        model, inputs = converted(exact_model("ModernBert"), method), tiny_batch("bert", padding="left")
    else:
        model = tiny_model(name, method, **{"n_layer" if name == "gpt2" else "num_hidden_layers": 1})
        inputs = tiny_batch(name, padding="none" if name == "gpt2" else "left")
    model.config.use_cache = False
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True if name == "gpt2" else None)
    assert_same(gradients(model, inputs, compiled), gradients(model, inputs))


# Other precisions, and weights elsewhere


@few_methods
@pytest.mark.parametrize("family", ["bert", "vit", "gpt2", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast_and_low_precision(family, method, dtype, tmp_path):
    model, inputs = tiny_model(family, method), tiny_batch(family, padding="left")
    expected = output(model, inputs)
    with torch.autocast("cpu", dtype=dtype):
        cast = output(model, inputs)
        model.train()(**inputs)[0].float().sum().backward()
    model.eval()
    similarity = torch.nn.functional.cosine_similarity(cast.float().flatten(1), expected.flatten(1)).min()
    assert torch.isfinite(cast).all()
    # Rounding can change the hash of a query and the keys that are sampled.
    assert similarity > (0.7 if method in RANDOM else 0.99)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    low = reloaded(model, tmp_path, dtype=dtype)
    assert low.dtype == dtype and low.config._attn_implementation == method
    inputs = {key: x.to(dtype) if x.is_floating_point() else x for key, x in inputs.items()}
    out = output(low, inputs)
    assert out.dtype == dtype and torch.isfinite(out).all()


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
    inputs, exact = tiny_batch(family), tiny_model(family, head=True)
    model = shake(hea.convert(copy.deepcopy(exact), method, **SMALL[method]))
    quantized = quantize(copy.deepcopy(model))
    learned, after = ({(n, key): x for n, m in learned_in(one).items() for key, x in m.state_dict().items()}
                      for one in (model, quantized))  # fmt: skip
    assert learned.keys() == after.keys() and all(torch.equal(x, after[key]) for key, x in learned.items())
    found, of_exact = output(quantized, inputs), output(quantize(copy.deepcopy(exact)), inputs)
    assert not torch.equal(found, output(model, inputs)), "nothing was quantized"
    # The method itself is untouched: switched back, the model is the quantized exact model; and converting a quantized
    # model is the same as quantizing a converted one, apart from parameters that are learned.
    assert torch.equal(output(hea.convert(copy.deepcopy(quantized), "sdpa"), inputs), of_exact)
    if not learned:
        assert torch.equal(output(hea.convert(quantize(copy.deepcopy(exact)), method, **SMALL[method]), inputs), found)
    if family in DECODERS:
        assert quantized.generate(**inputs, max_new_tokens=3, min_new_tokens=3).shape == (2, 73)


OFFLOADED = {**SMALL, **LEARNING}


@pytest.mark.parametrize(
    "method", [pytest.param(x, marks=() if x in (*FEW, *LEARNING) else pytest.mark.exhaustive) for x in OFFLOADED]
)
@pytest.mark.parametrize("family", ["bert", "vit", *DECODERS])
def test_an_offloaded_model(family, method, tmp_path):
    """Its modules are moved to memory only for their own forward; decoders generate."""
    accelerate, cpu = pytest.importorskip("accelerate"), torch.device("cpu")
    model = shake(hea.convert(tiny_model(family, head=True), {"method": method, **OFFLOADED[method]}))

    error = hea.attention_error(model, tiny_batch(family)).mean()

    def result(model):
        inputs = tiny_batch(family, padding="left")
        return generate(model, inputs, 6) if family in DECODERS else output(model, inputs)

    expected, on_cpu, folders = result(model), accelerate.cpu_offload(copy.deepcopy(model), cpu), tmp_path / "loaded"
    loaded = reloaded(model, tmp_path, device_map={"": "disk"}, offload_folder=folders)
    accelerate.disk_offload(model, tmp_path / "disk", cpu)
    assert all(p.device.type == "meta" for p in model.parameters())
    assert all(p.device.type == "meta" for m in learned_in(loaded).values() for p in m.parameters())
    for one in (loaded, on_cpu, model):
        assert torch.equal(result(one), expected)
    assert hea.attention_error(model, tiny_batch(family)).mean() == error
    refuses("is offloaded|has learned tables|cannot be extended", hea.extend_positions, model, 200)


# Training


@few_methods
def test_dropout_and_draws_in_training(method):
    options = {"hidden_dropout_prob": 0.0}
    plain, dropped = (tiny_model("bert", method, **options, attention_probs_dropout_prob=p) for p in (0.0, 0.5))
    inputs, state = tiny_batch("bert"), torch.get_rng_state()
    in_eval = output(plain, inputs)
    assert torch.equal(output(plain, inputs), in_eval) and torch.equal(output(dropped, inputs), in_eval)
    assert torch.equal(torch.get_rng_state(), state)
    plain.train()
    dropped.train()
    assert torch.equal(output(plain, inputs), output(plain, inputs)) is not (method in RANDOM)
    torch.manual_seed(0)
    in_training = output(dropped, inputs)
    assert (in_training - in_eval).abs().max() > 0.1
    torch.manual_seed(0)
    assert torch.equal(output(dropped, inputs), in_training)


@pytest.mark.parametrize("family", ["bert", *DECODERS])
@pytest.mark.parametrize("when", ["before", "after"])
def test_lora_on_queries_and_values(family, when, tmp_path):
    peft = pytest.importorskip("peft")
    targets = {"bert": ["query", "value"], "gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}[family]
    lora = peft.LoraConfig(r=2, target_modules=targets, fan_in_fan_out=family == "gpt2", init_lora_weights=False)
    base, inputs = tiny_model(family, "kdeformer" if when == "before" else None), tiny_batch(family)
    torch.manual_seed(1)
    model = peft.get_peft_model(base, lora)
    if when == "after":
        hea.convert(model, "kdeformer", **SMALL["kdeformer"])
    assert base.config._attn_implementation == "kdeformer"
    expected = output(model.eval(), inputs)
    model.train()(**inputs)[0].sum().backward()
    trained = [name for name, p in model.named_parameters() if p.grad is not None]
    assert trained and all("lora" in name for name in trained)
    assert any(p.grad.abs().sum() > 0 for p in model.parameters() if p.grad is not None)
    model.eval().save_pretrained(tmp_path / "adapter")
    fresh = tiny_model(family, "kdeformer")
    assert torch.equal(output(peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval(), inputs), expected)
    torch.testing.assert_close(output(model.merge_and_unload(), inputs), expected, atol=1e-3, rtol=1e-3)


# AIMv2 makes a causal mask for modules that call themselves bidirectional.
TYPES = ("Aimv2Text", "Bert", "Llama", "GPT2", "Bart", "ViT")
CHECKPOINTED = [(name, method) for name in SAMPLE if name not in REFUSALS for method in ("kdeformer", "linear")]
CHECKPOINTED += WORKS_AFTER_ALL
CHECKPOINTED += [("Bert", x) for x in METHODS if x not in ("kdeformer", "linear")]
CHECKPOINTED += [("Aimv2Text", x) for x in CAUSAL if x not in ("kdeformer", "linear")]


@pytest.mark.parametrize(
    ("name", "method"),
    pairs(*CHECKPOINTED, core=lambda x, y: (x in TYPES and y == "kdeformer") or (x in ("Bert", "T5") and y in FEW)),
)
def test_gradient_checkpointing(name, method):
    """Reentrant and not, the gradients are those without it."""
    model_class, config, inputs = case(name)
    if not model_class.supports_gradient_checkpointing:
        pytest.skip("the model has no gradient checkpointing")
    config.apply_spec_augment = False  # draws from NumPy
    torch.manual_seed(0)
    model = hea.convert(model_class(config), method, **SMALL[method]).train()
    inputs |= {"use_cache": False} if "decoder_input_ids" in inputs or hasattr(config, "use_cache") else {}
    expected = gradients(model, inputs)
    for reentrant in (False, True):
        with warnings.catch_warnings():  # Transformers 5.24 has another name for it
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        assert model.is_gradient_checkpointing
        assert_same(gradients(model, inputs), expected, 1e-5)


@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_draws_do_not_depend_on_the_gradient(instance, padding):
    """Reentrant checkpointing computes without a gradient first, and repeats the call from the same random state."""
    tensors, mask = inputs(q_len=200, value_dim=8), padding_mask(padding, 1, 200)
    for is_causal in (False, True) if instance.info.causal else (False,):
        outs = []
        for needs_grad in (False, True):
            torch.manual_seed(3)
            leaves = [x.detach().requires_grad_(needs_grad) for x in tensors]
            outs.append(instance(*leaves, mask, is_causal=is_causal, dropout_p=0.3, seed=None).detach())
        torch.testing.assert_close(*outs, rtol=1e-4, atol=1e-5)
