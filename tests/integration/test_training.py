"""Training, compiling and low precision on converted models."""

import copy

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from each import few_methods
from tiny_models import (
    DECODERS,
    RANDOM,
    SMALL,
    output,
    tiny_batch,
    tiny_class,
    tiny_model,
)


@few_methods
def test_dropout_and_draws_in_training(method):
    model = tiny_model("bert", method, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    inputs = tiny_batch("bert")
    model.train()
    assert torch.equal(output(model, inputs), output(model, inputs)) is not (method in RANDOM)
    model.eval()
    state = torch.get_rng_state()
    assert torch.equal(output(model, inputs), output(model, inputs))
    assert torch.equal(torch.get_rng_state(), state)
    with_dropout = tiny_model("bert", method, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5)
    in_eval = output(with_dropout, inputs)
    assert torch.equal(in_eval, output(model, inputs))
    with_dropout.train()
    torch.manual_seed(0)
    in_training = output(with_dropout, inputs)
    assert (in_training - in_eval).abs().max() > 0.1
    torch.manual_seed(0)
    assert torch.equal(output(with_dropout, inputs), in_training)


def eager_and_compiled(family, model, inputs):
    """Output and gradients of a model, in eager mode and compiled to one graph."""
    torch.compiler.reset()
    if family in DECODERS:
        model.config.use_cache = False
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        out = call(**inputs)[0]
        (out * torch.linspace(-1, 1, out.shape[-1])).sum().backward()
        yield out.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.exhaustive
@few_methods
@pytest.mark.parametrize(("family", "padding"), [("bert", "left"), ("gpt2", "none")])
def test_compiling_to_one_graph(family, padding, method):
    layers = {"n_layer": 1} if family == "gpt2" else {"num_hidden_layers": 1}
    model, inputs = tiny_model(family, method, **layers), tiny_batch(family, padding=padding)
    (out, gradients), (compiled, compiled_gradients) = eager_and_compiled(family, model, inputs)
    torch.testing.assert_close(compiled, out, atol=1e-4, rtol=1e-4)
    for name, gradient in gradients.items():
        torch.testing.assert_close(compiled_gradients[name], gradient, atol=1e-3, rtol=1e-3, msg=name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_compiling_with_layers_that_stay_exact(family):
    model = hea.convert(tiny_model(family), "linear", layers=[1])
    (out, _), (compiled, _) = eager_and_compiled(family, model, tiny_batch(family, padding="left"))
    torch.testing.assert_close(compiled, out, atol=1e-4, rtol=1e-4)


def test_packed_sequences_are_refused_in_a_compiled_model():
    """Position values are not known while the graph is traced, so the check is part of the graph."""
    torch.compiler.reset()
    model, ids = tiny_model("llama", "linear", num_hidden_layers=1), tiny_batch("llama")["input_ids"]
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    plain = torch.arange(70).expand(2, -1)
    packed = torch.cat((torch.arange(30), torch.arange(40))).expand(2, -1)
    with torch.no_grad():
        compiled(ids, position_ids=plain, use_cache=False)
        with pytest.raises(RuntimeError, match="packed sequences"):
            compiled(ids, position_ids=packed, use_cache=False)


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
    model.save_pretrained(tmp_path)
    low = tiny_class(family).from_pretrained(tmp_path, dtype=dtype)
    assert low.dtype == dtype and low.config._attn_implementation == method
    inputs = {key: x.to(dtype) if x.is_floating_point() else x for key, x in inputs.items()}
    out = output(low, inputs)
    assert out.dtype == dtype and torch.isfinite(out).all()


@pytest.mark.parametrize("family", ["bert", *DECODERS])
@pytest.mark.parametrize("when", ["before", "after"])
def test_lora_on_queries_and_values(family, when, tmp_path):
    peft = pytest.importorskip("peft")
    targets = {"bert": ["query", "value"], "gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}[family]
    lora = peft.LoraConfig(r=2, target_modules=targets, fan_in_fan_out=family == "gpt2", init_lora_weights=False)
    base, inputs = tiny_model(family), tiny_batch(family)
    if when == "before":
        hea.convert(base, "kdeformer", **SMALL["kdeformer"])
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
    fresh = hea.convert(tiny_model(family), "kdeformer", **SMALL["kdeformer"])
    again = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
    assert torch.equal(output(again, inputs), expected)
    merged = model.merge_and_unload()
    torch.testing.assert_close(output(merged, inputs), expected, atol=1e-3, rtol=1e-3)


def test_the_trainer(tmp_path):
    pytest.importorskip("accelerate")
    model = tiny_model("bert", "kdeformer", head=True)
    examples = [{"input_ids": ids, "labels": ids} for ids in tiny_batch("bert", batch=6)["input_ids"]]
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", gradient_checkpointing=True,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=examples)
    before = copy.deepcopy(model.state_dict())
    trainer.train()
    assert any(not torch.equal(before[key], value) for key, value in model.state_dict().items())
    trainer.save_model(tmp_path / "saved")
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "saved")
    assert again.config.efficient_attention == model.config.efficient_attention
