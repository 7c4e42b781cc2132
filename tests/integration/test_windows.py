"""Layers with a sliding window of the model's own: they stay exact with their window, or the model is refused."""

import copy
import warnings

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from each import refuses
from helpers.model_types import sizes
from helpers.windowed_models import MIXED, WARNING, converted, exact_model
from hf_efficient_attn.conversion.checkpoint import convert_saved_model
from hf_efficient_attn.integration.exact import exact_layer
from instances import inputs
from processes import mesh
from promises import Memory
from tiny_models import SMALL, output


def batch(length: int, padding: str) -> dict:
    ids = torch.randint(5, 60, (2, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if padding != "none":
        third = length // 3
        mask[1, slice(0, third) if padding == "left" else slice(length - third, None)] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize(("name", "more"), [*((name, {}) for name in MIXED), ("Qwen2", {"is_causal": False})])
def test_the_output_and_gradients_are_those_of_sdpa(name, more, padding):
    """With a budget of the whole sequence in the full layers; lengths within and beyond the window and a block."""
    model = exact_model(name)
    other = converted(model)
    for length in (18, 21, 70, 300):
        inputs = {**batch(length, padding), **more}
        for one in (model, other):
            one.zero_grad()
            out = one(**inputs)[0][inputs["attention_mask"].bool()]
            (out * torch.linspace(-1, 1, out.shape[-1])).mean().backward()
            if one is model:
                expected = out
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        for (key, x), y in zip(other.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-4, msg=key)


def test_a_model_whose_layers_share_keys_keeps_some_logits():
    model, inputs = exact_model("Gemma4Text", "ForCausalLM"), batch(70, "left")
    expected, found = (output(one, inputs, logits_to_keep=3) for one in (model, converted(model)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Qwen2", "ModernBert"])
def test_every_way_of_switching_warns_once(name, tmp_path):
    model, inputs = exact_model(name), batch(70, "right")
    expected = output(converted(model, "nearfar"), inputs)
    model.save_pretrained(tmp_path / "exact")
    with pytest.warns(UserWarning, match=WARNING) as found:
        loaded = type(model).from_pretrained(tmp_path / "exact", attn_implementation="nearfar")
    (message,) = (str(x.message) for x in found if WARNING in str(x.message))
    assert [x for x in ("layers.0", "layers.1", "layers.2") if x in message] == ["layers.0", "layers.2"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(output(loaded, inputs), expected)
        loaded.set_attn_implementation("nearfar")
        assert torch.equal(output(hea.convert(copy.deepcopy(model), "nearfar", layers=[1]), inputs), expected)
    loaded.save_pretrained(tmp_path / "again")
    with pytest.warns(UserWarning, match=WARNING) as found:
        again = type(model).from_pretrained(tmp_path / "again")
        model.set_attn_implementation("nearfar")
    assert len([x for x in found if WARNING in str(x.message)]) == 2
    assert torch.equal(output(again, inputs), expected) and torch.equal(output(model, inputs), expected)


def test_what_is_refused():
    model = exact_model("Qwen2")
    for layers in ([0], [0, 1], ["layers.2"]):
        refuses(r"window of its own in layers\.[02].*layers\.1", hea.convert, model, "nearfar", layers=layers)
        assert model.config._attn_implementation == "sdpa"
    # A window of all positions is none, until the input is longer.
    for window in (None, 64):
        values = sizes(transformers.MistralConfig, sliding_window=window, max_position_embeddings=64)
        model = hea.convert(transformers.MistralModel(transformers.MistralConfig(**values)), "linear")
        output(model, batch(64, "none"))
    refuses("window of 64 keys and the sequence has 70", output, model, batch(70, "none"))
    model = converted(exact_model("Qwen2"), "linear")
    refuses(r"a sliding window in layers\.0\.self_attn", hea.sequence_parallel, model, mesh(1))


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_window_costs_what_it_is_long(is_causal):
    tensors, mask = inputs(1, 8, 5000, 4), torch.arange(5000)[None] < 4990
    options = {"is_causal": is_causal, "scale": None, "dropout_p": 0.0, "window": 40}
    with Memory() as largest:
        exact_layer(*tensors, mask, **options)
    assert largest.numel <= 256 * 400 + tensors[0].numel()
    with Memory() as largest:  # all heads share the mask
        hea.attention("nearfar", tensors[0][:, :, :99], *tensors[1:], attention_mask=mask, is_causal=True)
    assert largest.numel <= 99 * 5000


@pytest.mark.filterwarnings("ignore:at 300 tokens this choice saves nothing")
@pytest.mark.parametrize("name", ["Qwen2", "ModernBert"])
def test_errors_calibration_and_a_converted_checkpoint(name, tmp_path):
    model, inputs = exact_model(name), batch(300, "right")
    error = hea.attention_error(converted(model, "nearfar", **SMALL["nearfar"]), inputs)
    assert [layer.method for layer in error.layers] == ["sdpa", "nearfar", "sdpa"]
    assert hea.calibrate(model, [inputs], max_error=10.0, methods=["longformer"]).for_layer(0) is None
    model.save_pretrained(tmp_path / "exact")
    assert convert_saved_model(tmp_path / "exact", tmp_path / "converted", "nearfar")["layers"] == [1]
    assert "Layers: 1 of 3, counted from zero" in (tmp_path / "converted" / "README.md").read_text()
