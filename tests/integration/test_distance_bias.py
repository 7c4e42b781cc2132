"""T5's bias of relative positions: the methods that add it, exact layers, decoding, gradients, memory and refusals.

The promises compare the methods with their readable forms, with a bias that has no gradient.
"""

import copy
import inspect
import pickle

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from each import refuses
from helpers.encoder_decoders import t5
from hf_efficient_attn.methods import methods_with, naive_attention
from hf_efficient_attn.ops.exact import bias_of, biased_exact
from instances import inputs, numbers
from promises import Memory
from tiny_models import cache_argument, reloaded, tiny_batch
from tiny_models import output as logits

# The decoder has cross attention.
pytestmark = pytest.mark.filterwarnings("ignore:.*stays exact")
T5 = transformers.models.t5.modeling_t5


def inputs_of(padding: str = "right") -> dict:
    inputs = tiny_batch("bert", length=150, padding=padding, seed=1)
    return {**inputs, "decoder_input_ids": inputs["input_ids"][:, :70].roll(1, 1)}


def encoded(model, inputs: dict) -> torch.Tensor:
    with torch.no_grad():
        return model.encoder(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state


def heads(length: int = 90, dtype=torch.float64):
    position = torch.arange(length)
    mask = (position >= torch.tensor([[7], [0]])) & (position < torch.tensor([[length], [60]]))
    return inputs(2, 3, length, 8, dtype=dtype), numbers(3, 31, dtype=dtype), mask


# Small budgets: every config approximates the tests' 90 tokens.
BIASED = {
    "longformer": hea.LongformerConfig(window_size=9),
    "nearfar": hea.NearFarConfig(block_size=16, num_samples=12, num_probes=24),
    "nearfar without near keys": hea.NearFarConfig(block_size=0, num_samples=12, num_probes=0),
    "kdeformer": hea.KDEformerConfig(block_size=12, num_samples=12),
    "kdeformer by hash": hea.KDEformerConfig(block_size=12, num_samples=12, near_field="lsh", draw="independent"),
    "hyperattention": hea.HyperAttentionConfig(block_size=12, num_samples=12),
    "scatterbrain": hea.ScatterbrainConfig(block_size=12, num_features=32),
}
CONFIGS = [config for name, config in BIASED.items() if " " not in name]
one_of_each = pytest.mark.parametrize("config", CONFIGS, ids=lambda x: x.method)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_exact_attention_and_a_window_of_the_whole_sequence_add_the_bias_to_the_scores(masked, is_causal):
    tensors, table, mask = heads()
    mask, position = mask if masked else torch.ones_like(mask), torch.arange(90)
    scores = tensors[0] @ tensors[1].mT / 8**0.5 + bias_of(table, position - position[:, None])
    allowed = mask[:, None, None] & ((position <= position[:, None]) | (not is_causal))
    dense = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0) @ tensors[2]
    options = {"attention_mask": mask if masked else None, "is_causal": is_causal}
    exact = biased_exact(*tensors, table, options["attention_mask"], is_causal=is_causal, scale=8**-0.5)
    torch.testing.assert_close(exact, dense)
    window = hea.attention("longformer", *tensors, distance_bias=table, window_size=500, **options)
    torch.testing.assert_close(window, dense)


def test_a_bias_by_distance_lowers_the_error_of_landmarks_to_that_without_one():
    """The mean bias of landmarks and the bias of the window both count: leaving out either is far worse."""
    tensors, _, _ = heads(400, dtype=torch.float32)
    distance = torch.arange(-64, 65).abs()
    table = -torch.tensor([[0.5], [1.0], [2.0]]) * (1 + distance).log() + torch.arange(-64, 65).sign() * 0.7
    config = hea.NearFarConfig().with_budget(96)

    def error(table, given):
        exact = biased_exact(*tensors, table, is_causal=False, scale=8**-0.5)
        return (hea.attention(config, *tensors, distance_bias=given) - exact).norm() / exact.norm()

    inside, outside = table.clone(), table.clone()
    inside[:, distance <= 32], outside[:, distance > 32] = 0.0, 0.0
    assert error(table, table) < 0.3 * min(error(table, None), error(table, inside), error(table, outside))


@pytest.mark.parametrize(("name", "is_causal"), [*((name, False) for name in BIASED), ("longformer", True)])
def test_gradients_with_a_bias_equal_those_of_the_naive_forms(name, is_causal):
    tensors, table, _ = heads()
    # Every query has a valid key: the readable form has no gradient at others.
    tensors, found, mask = [x.requires_grad_() for x in (*tensors, table)], [], torch.arange(90).expand(2, -1) % 3 != 1
    for form in (hea.attention, naive_attention):
        out = form(BIASED[name], *tensors[:3], attention_mask=mask, is_causal=is_causal, distance_bias=tensors[3])
        found.append(torch.autograd.grad((out[mask[:, None].expand(-1, 3, -1)] ** 2).sum(), tensors))
    for fast, naive in zip(*found, strict=True):
        assert naive.abs().max() > 1e-3
        torch.testing.assert_close(fast, naive, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", BIASED.values(), ids=BIASED)
def test_a_bias_of_thousands_in_half_precision(config, dtype):
    tensors, table, mask = heads(dtype=torch.float32)
    given = ((x * 30).to(dtype) for x in tensors)
    assert hea.attention(config, *given, attention_mask=mask, distance_bias=(table * 1e3).to(dtype)).isfinite().all()


def test_other_methods_refuse_a_bias():
    tensors, table, _ = heads()
    assert methods_with("adds_distance_bias") == sorted({config.method for config in BIASED.values()})
    biased = {"distance_bias": table}
    refuses(r"linear: it cannot add a bias .*longformer, nearfar", hea.attention, "linear", *tensors, **biased)
    words = r"nearfar: .* of causal attention. .* can: longformer$"
    refuses(words, hea.attention, "nearfar", *tensors, **biased, is_causal=True)
    refuses("cannot add a bias", hea.attention, "longformer", *tensors, **biased, global_tokens=1)
    refuses(r"distance_bias must be \(3, 2R \+ 1\)", hea.attention, "longformer", *tensors, distance_bias=table[:, :30])


def test_a_small_window_equals_t5_with_a_mask_of_the_window():
    """The reference is T5's own attention with a dense mask, in which the bias beyond the window does not occur."""
    model, inputs = t5(), inputs_of()
    position = torch.arange(150)
    mask = ((position - position[:, None]).abs() <= 30)[None, None] & inputs["attention_mask"].bool()[:, None, None]
    reference = copy.deepcopy(model)
    with torch.no_grad():
        dense = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        expected = reference.encoder(inputs["input_ids"], dense).last_hidden_state
    hea.convert(model, "longformer", layers=["encoder"], window_size=30)
    valid = inputs["attention_mask"].bool()
    torch.testing.assert_close(encoded(model, inputs)[valid], expected[valid], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layers", [None, ["encoder"]], ids=str)
def test_generation_and_saving(layers, tmp_path):
    model, inputs = t5(), inputs_of()
    source = {key: inputs[key] for key in ("input_ids", "attention_mask")}
    hea.convert(model, "longformer", layers=layers, window_size=6)
    options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    for beams in (1, 3):
        cached = model.generate(**source, **options, num_beams=beams)
        assert torch.equal(cached, model.generate(**source, **options, num_beams=beams, use_cache=False))
    assert torch.equal(logits(reloaded(model, tmp_path), inputs), logits(model, inputs))


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", ["T5", "UMT5"])
def test_an_exact_decoder_with_a_static_cache_and_one_graph_for_all_tokens(kind, compiles):
    torch.compiler.reset()
    model, inputs = hea.convert(t5(kind), "longformer", layers=["encoder"]), inputs_of()
    ids = inputs.pop("decoder_input_ids")[:, :40]
    expected = logits(model, {**inputs, "decoder_input_ids": ids})
    cache = transformers.StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=60)
    given = {cache_argument(): transformers.EncoderDecoderCache(cache, transformers.DynamicCache())}
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        given["encoder_outputs"] = model.encoder(**inputs)
        found = [model(decoder_input_ids=ids[:, :35], **inputs, **given).logits]
        step = torch.compile(model.forward, fullgraph=True, backend="aot_eager", disable=not compiles)
        found += [step(decoder_input_ids=ids[:, i : i + 1], **inputs, **given).logits for i in range(35, 40)]
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("part", [*BIASED, "exact"])
def test_memory_is_linear(part):
    """No (Nq, Nk) tensor is made: neither a bias, nor the zeros that T5 makes for cross attention."""
    model, sizes = t5(), []
    if part == "exact":  # the encoder is exact, in blocks of queries
        hea.convert(model, "longformer", layers=["decoder"], window_size=16)
    else:
        hea.convert(model, BIASED[part], layers=["encoder"])
    for length in (2048, 4096):
        ids = torch.randint(2, 60, (1, length))
        with Memory() as largest, torch.no_grad():
            model(input_ids=ids, decoder_input_ids=ids[:, : 8 if part == "exact" else 512])
        sizes.append(largest.numel)
    assert sizes[1] <= 2.1 * sizes[0] and sizes[1] < 4096 * 4096


def test_refusals_name_what_can_be_used():
    model = t5()
    for method, words in (
        (
            "nearfar",
            r"in causal attention: choose only its encoder \(layers=\['encoder'\]\), or use longformer with default",
        ),
        ("linear", r"cannot keep: use hyperattention, kdeformer, longformer, nearfar, scatterbrain with default"),
        ({"method": "longformer", "global_tokens": 1}, r"use .*longformer.* with default hyperparameters"),
    ):
        refuses(f"bias of relative positions.*{words}", hea.convert, model, method)
    assert model.config._attn_implementation == "sdpa" or model.config.efficient_attention is None
    assert hea.convert(t5(), "longformer", layers=["encoder"]).config.efficient_attention["layers"] == ["encoder"]


def test_cross_attention_has_no_bias_and_takes_any_method():
    model, inputs = t5(), inputs_of()
    expected = logits(model, inputs)
    hea.convert(model, "linear", layers=[f"decoder.block.{i}.layer.1" for i in range(2)])
    assert not torch.allclose(logits(model, inputs), expected, atol=1e-3)


def test_errors_and_calibration_with_a_bias(timed_by_columns):
    model, inputs = t5(), inputs_of()
    found = hea.calibrate(model, [inputs], max_error=9.0, methods=["longformer"], budgets=[17])
    assert found.named_layers() == [f"{stack}.block.{i}" for stack in ("decoder", "encoder") for i in range(2)]
    whole = hea.attention_error(hea.convert(model, "longformer", window_size=150), inputs, num_rows=None)
    small = hea.attention_error(hea.convert(model, "longformer", window_size=5), inputs, num_rows=None)
    assert whole.max() < 1e-3 < small.mean()


@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("kind", ["T5", "MT5", "UMT5", "Pop2Piano"])
def test_t5_and_its_relatives(kind, padding):
    """A window of the whole sequence is exact, in all layers or in one of the stacks."""
    module = inspect.getmodule(getattr(transformers, f"{kind}PreTrainedModel"))
    if kind == "UMT5" and "position_bias=position_bias" not in inspect.getsource(module.UMT5Attention):
        pytest.skip("UMT5 of this version adds the bias to the mask")
    model, inputs = t5(kind), inputs_of(padding)
    expected = logits(model, inputs)
    for layers in (["encoder"], ["decoder"], None):
        hea.convert(model, "longformer", layers=layers, window_size=150)
        found = logits(model, inputs)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits(pickle.loads(pickle.dumps(copy.deepcopy(model))), inputs), found)
        hea.convert(model, "longformer", layers=layers, window_size=8)
        assert not torch.allclose(logits(model, inputs), expected, atol=1e-2)
    hea.convert(model, "nearfar", layers=["encoder"], block_size=16, num_samples=12)
    assert not torch.allclose(logits(model, inputs), expected, atol=1e-3)
    hea.convert(model, "sdpa")
    torch.testing.assert_close(logits(model, inputs), expected, rtol=1e-5, atol=1e-5)


@one_of_each
def test_an_encoder_with_each_method(config, tmp_path):
    """Saved, loaded, padded and trained, with a gradient of the bias; within its budget the encoder is exact."""
    model, inputs = t5(), inputs_of()
    valid, expected = inputs["attention_mask"].bool(), encoded(model, inputs)
    hea.convert(model, config.with_budget(301), layers=["encoder"])
    torch.testing.assert_close(encoded(model, inputs)[valid], expected[valid], rtol=1e-4, atol=1e-4)
    found = encoded(hea.convert(model, config, layers=["encoder"]), inputs)
    assert 0.01 < (found - expected)[valid].norm() / expected[valid].norm() < 1.0
    assert torch.equal(encoded(reloaded(model, tmp_path), inputs), found)
    ids = inputs["input_ids"].masked_fill(~valid, 7)  # other padding
    assert torch.equal(encoded(model, {**inputs, "input_ids": ids})[valid], found[valid])
    model.train()(input_ids=ids, attention_mask=inputs["attention_mask"], labels=ids[:, :20].clone()).loss.backward()
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert model.get_parameter(name).grad.abs().max() > 0


@pytest.mark.exhaustive
@one_of_each
def test_compiled(config):
    torch.compiler.reset()  # PyTorch counts what other tests have compiled
    model, inputs = hea.convert(t5(), config, layers=["encoder"]), inputs_of()
    expected = encoded(model, inputs)
    with torch.no_grad():
        compiled = torch.compile(model.encoder, fullgraph=True, backend="aot_eager")
        found = compiled(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
