"""T5's bias of relative positions: the window that adds it, exact layers, decoding, gradients, memory and refusals."""

import copy
import inspect
import warnings

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import hf_efficient_attn as hea
from hf_efficient_attn.methods import methods_with, naive_attention
from hf_efficient_attn.ops.exact import bias_of, biased_exact

SIZES = {
    "vocab_size": 60, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "decoder_start_token_id": 0,
    "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
T5 = transformers.models.t5.modeling_t5
needs_interface = pytest.mark.skipif(
    "ALL_ATTENTION_FUNCTIONS" not in inspect.getsource(T5), reason="T5 of this version does not use the interface"
)


def t5(seed: int = 0, **changes):
    """A tiny T5 with a large bias, so that the output depends on it."""
    torch.manual_seed(seed)
    config = transformers.T5Config(**{**SIZES, **changes})
    model = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "relative_attention_bias" in name:
                parameter.copy_(torch.randn_like(parameter) * 2)
    model.generation_config.max_length = None
    return model


def inputs_of(length: int = 150, padded: bool = True) -> dict:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 60, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, length - 40 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :70].roll(1, 1)}


def logits(model, inputs: dict) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def encoded(model, inputs: dict) -> torch.Tensor:
    with torch.no_grad():
        return model.encoder(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state


def heads(length: int = 90, seed: int = 0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(2, 3, length, 8, generator=generator, dtype=dtype) for _ in range(3)]
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, :7], mask[1, 60:] = False, False
    return tensors, torch.randn(3, 31, generator=generator, dtype=dtype), mask


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("window", [0, 40, 500])
def test_the_window_adds_the_bias_like_its_naive_form(window, masked, is_causal):
    tensors, table, mask = heads()
    options = {"attention_mask": mask if masked else None, "is_causal": is_causal, "distance_bias": table}
    config = hea.LongformerConfig(window_size=window)
    found = hea.attention(config, *tensors, **options)
    torch.testing.assert_close(found, naive_attention(config, *tensors, **options), rtol=1e-9, atol=1e-9)
    without = hea.attention(config, *tensors, **{**options, "distance_bias": None})
    assert window == 0 or not torch.allclose(found, without, atol=1e-2)
    if window == 500:  # the whole sequence
        position = torch.arange(90)
        scores = tensors[0] @ tensors[1].mT / 8**0.5 + bias_of(table, position - position[:, None])
        allowed = (mask if masked else torch.ones_like(mask))[:, None, None]
        if is_causal:
            allowed = allowed & (position <= position[:, None])
        dense = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0) @ tensors[2]
        torch.testing.assert_close(found, dense)
        exact = biased_exact(
            *tensors, table, options["attention_mask"], is_causal=is_causal, scale=8**-0.5
        )  # fmt: skip
        torch.testing.assert_close(exact, dense)


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_of_the_window_with_a_bias(is_causal):
    tensors, table, _ = heads(7)
    tensors, table = [x[:, :1, :, :2].clone().requires_grad_() for x in tensors], table[:1, :5].clone()
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, :2] = False
    config = hea.LongformerConfig(window_size=2)

    def compute(query, key, value, table):
        return hea.attention(config, query, key, value, attention_mask=mask, is_causal=is_causal, distance_bias=table)

    assert torch.autograd.gradcheck(compute, (*tensors, table.requires_grad_()))


@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_with_a_bias_does_not_matter(is_causal):
    tensors, table, mask = heads(dtype=torch.float32)
    config = hea.LongformerConfig(window_size=9)
    options = {"attention_mask": mask, "is_causal": is_causal, "distance_bias": table}
    found = hea.attention(config, *tensors, **options)
    for x in tensors[1:]:
        x.masked_fill_(~mask[:, None, :, None], torch.nan)
    again = hea.attention(config, *tensors, **options)
    assert torch.equal(found, again) and found.isfinite().all()


def test_other_methods_refuse_a_bias():
    tensors, table, _ = heads()
    assert methods_with("adds_distance_bias") == ["longformer"]
    with pytest.raises(hea.UnsupportedAttentionError, match=r"kdeformer: it cannot add a bias .*longformer"):
        hea.attention("kdeformer", *tensors, distance_bias=table)
    with pytest.raises(hea.UnsupportedAttentionError, match="cannot add a bias"):
        hea.attention("longformer", *tensors, distance_bias=table, global_tokens=1)
    with pytest.raises(hea.UnsupportedAttentionError, match=r"distance_bias must be \(3, 2R \+ 1\)"):
        hea.attention("longformer", *tensors, distance_bias=table[:, :30])


@needs_interface
@pytest.mark.parametrize("layers", [None, ["encoder"], ["decoder"]], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_a_window_of_the_whole_sequence_is_exact(layers, padded):
    model, inputs = t5(), inputs_of(padded=padded)
    expected = logits(model, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hea.convert(model, "longformer", layers=layers, window_size=150)
        torch.testing.assert_close(logits(model, inputs), expected, rtol=1e-4, atol=1e-4)
        hea.convert(model, "longformer", layers=layers, window_size=8)
        assert not torch.allclose(logits(model, inputs), expected, atol=1e-2)
    hea.convert(model, "sdpa")
    torch.testing.assert_close(logits(model, inputs), expected, rtol=1e-5, atol=1e-5)


@needs_interface
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


@needs_interface
@pytest.mark.parametrize("layers", [None, ["encoder"]], ids=str)
def test_generation_saving_and_training(layers, tmp_path):
    model, inputs = t5(), inputs_of()
    source = {key: inputs[key] for key in ("input_ids", "attention_mask")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hea.convert(model, "longformer", layers=layers, window_size=6)
        options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
        for beams in (1, 3):
            cached = model.generate(**source, **options, num_beams=beams)
            assert torch.equal(cached, model.generate(**source, **options, num_beams=beams, use_cache=False))
        model.save_pretrained(tmp_path)
        again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path)
        assert torch.equal(logits(again, inputs), logits(model, inputs))
        gradients = []
        for checkpointing in (None, False, True):
            trained = copy.deepcopy(model).train()
            if checkpointing is not None:
                trained.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            trained(**source, labels=inputs["input_ids"][:, :20].clone()).loss.backward()
            gradients.append({name: p.grad for name, p in trained.named_parameters()})
    name = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert gradients[0][name].abs().max() > 0
    for other in gradients[1:]:
        for key, value in gradients[0].items():
            torch.testing.assert_close(other[key], value, rtol=1e-4, atol=1e-5)


class _Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // max(1, x.element_size()))
        return out


@needs_interface
@pytest.mark.parametrize("part", ["encoder", "exact"])
def test_memory_is_linear(part):
    """No (Nq, Nk) tensor is made: neither a bias, nor the zeros that T5 makes for cross attention."""
    model, sizes = t5(), []
    layers = ["encoder"] if part == "encoder" else ["decoder"]  # the encoder is exact, in blocks of queries
    hea.convert(model, "longformer", layers=layers, window_size=16)
    for length in (2048, 4096):
        ids = torch.randint(2, 60, (1, length))
        with _Largest() as largest, torch.no_grad():
            model(input_ids=ids, decoder_input_ids=ids[:, :1024] if part == "encoder" else ids[:, :8])
        sizes.append(largest.numel)
    assert sizes[1] <= 2.1 * sizes[0] and sizes[1] < 4096 * 4096


@needs_interface
def test_refusals_name_what_can_be_used():
    model = t5()
    for method, values in (("kdeformer", {}), ("linear", {}), ("longformer", {"global_tokens": 1})):
        with pytest.raises(hea.UnsupportedAttentionError, match=r"bias of relative positions.*use longformer without"):
            hea.convert(model, method, **values)
    assert model.config._attn_implementation == "sdpa" or model.config.efficient_attention is None
    assert hea.convert(t5(), "longformer", layers=["encoder"]).config.efficient_attention["layers"] == ["encoder"]


@needs_interface
def test_cross_attention_has_no_bias_and_takes_any_method():
    model, inputs = t5(), inputs_of()
    expected = logits(model, inputs)
    layers = [f"decoder.block.{i}.layer.1" for i in range(2)]
    hea.convert(model, "linear", layers=layers)
    assert not torch.allclose(logits(model, inputs), expected, atol=1e-3)


@needs_interface
def test_errors_and_calibration_with_a_bias():
    model, inputs = t5(), inputs_of()
    found = hea.calibrate(model, [inputs], max_error=9.0, methods=["longformer"], budgets=[17])
    assert found.named_layers() == [f"{stack}.block.{i}" for stack in ("decoder", "encoder") for i in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = hea.attention_error(hea.convert(model, "longformer", window_size=150), inputs, num_rows=None)
        small = hea.attention_error(hea.convert(model, "longformer", window_size=5), inputs, num_rows=None)
    assert whole.max() < 1e-3 < small.mean()


@needs_interface
@pytest.mark.parametrize("kind", ["mt5", "pop2piano"])
def test_relatives_of_t5(kind):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES)
    name = "MT5EncoderModel" if kind == "mt5" else "Pop2PianoForConditionalGeneration"
    model = getattr(transformers, name)(config).eval()
    stack = model.get_encoder() if hasattr(model, "get_encoder") else model.encoder
    ids = torch.randint(2, 60, (2, 60))
    with torch.no_grad():
        expected = stack(input_ids=ids).last_hidden_state
        hea.convert(model, "longformer", layers=["encoder"], window_size=60)
        torch.testing.assert_close(stack(input_ids=ids).last_hidden_state, expected, rtol=1e-4, atol=1e-4)


@needs_interface
@pytest.mark.exhaustive
def test_compiled():
    model, inputs = hea.convert(t5(), "longformer", layers=["encoder"], window_size=6), inputs_of()
    expected = encoded(model, inputs)
    with torch.no_grad():
        compiled = torch.compile(model.encoder, fullgraph=True)
        found = compiled(inputs["input_ids"], inputs["attention_mask"]).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
