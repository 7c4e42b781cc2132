"""`hea.attention_error` against dense attention on the same inputs, and how often its bound fails."""

import json

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_efficient_attn as hea
from commands import run
from each import refuses
from hf_efficient_attn.evaluation.model_error import LayerError, ModelError
from hf_efficient_attn.integration.masks import read_mask
from recipes.benchmarks import error_bound as recipe
from test_encoder_decoder import tiny
from tiny_models import output, tiny_batch, tiny_model

KDEFORMER = hea.KDEformerConfig(block_size=4, num_samples=8, num_probes=4)


def dense_errors(model, batch, name):
    """Errors of all heads by the dense formula, from the calls of the attention function: one (B, H) for each call."""
    ours, errors = ALL_ATTENTION_FUNCTIONS[name], []

    def look(module, query, key, value, mask, **rest):
        out, _ = ours(module, query, key, value, mask, **rest)
        mask = read_mask(name, mask).keys
        causal = bool(getattr(module, "is_causal", True))
        exact = hea.analysis.exact_output(
            query, key, value, attention_mask=mask, is_causal=causal, scale=rest.get("scaling")
        )
        given = out.transpose(1, 2).double()
        if mask is not None:
            given, exact = (x.masked_fill(~mask[:, None, :, None], 0.0) for x in (given, exact))
        errors.append(hea.analysis.relative_error(given, exact).operator)
        return out, None

    ALL_ATTENTION_FUNCTIONS[name] = look
    try:
        output(model, batch)
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]
    return errors


@pytest.mark.parametrize(
    ("family", "padding"), [("bert", "right"), ("gpt2", "left"), ("llama", "none"), ("vit", "none")]
)
def test_with_all_rows_it_is_the_error_of_the_running_model(family, padding):
    model, batch = hea.convert(tiny_model(family), KDEFORMER), tiny_batch(family, padding=padding)
    found = hea.attention_error(model, batch, num_rows=None)
    expected = dense_errors(model, batch, "kdeformer")
    assert [one.layer for one in found.layers] == [0, 1]
    assert {one.method for one in found.layers} == {"kdeformer"}
    for one, errors in zip(found.layers, expected, strict=True):
        torch.testing.assert_close(one.estimate, errors, rtol=2e-3, atol=1e-5)
        torch.testing.assert_close(one.bound, one.estimate)
    assert found.max() == max(one.bound.max() for one in found.layers) > 0.05
    assert found.mean() == pytest.approx(sum(errors.mean().item() for errors in expected) / 2, rel=1e-3)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_sample_of_rows_estimates_it(family):
    model, batch = hea.convert(tiny_model(family), KDEFORMER), tiny_batch(family, batch=8, length=120, padding="right")
    whole = hea.attention_error(model, batch, num_rows=None)
    some = [hea.attention_error(model, batch, num_rows=32, seed=seed) for seed in (0, 1)]
    assert not torch.equal(some[0].layers[0].estimate, some[1].layers[0].estimate)
    for sample in some:
        for part, all_rows in zip(sample.layers, whole.layers, strict=True):
            assert part.mean == pytest.approx(all_rows.mean, rel=0.2)
            assert part.mean_bound > all_rows.mean
            assert (part.bound > part.estimate).all()
            assert (part.bound >= all_rows.estimate).double().mean() >= 0.9


def test_methods_and_exact_layers_of_one_model_are_told_apart():
    mix = [{"layers": [1], **KDEFORMER.to_dict()}, {"layers": [2], "method": "nystromformer", "num_landmarks": 8}]
    model = hea.convert(tiny_model("bert", num_hidden_layers=3), hea.EfficientAttentionConfig(layers=mix))
    found = hea.attention_error(model, tiny_batch("bert"))
    assert [(one.layer, one.method) for one in found.layers] == [(0, "sdpa"), (1, "kdeformer"), (2, "nystromformer")]
    assert (found.layers[0].bound == 0).all()
    assert all(one.mean > 0.01 for one in found.layers[1:])
    assert found.mean() == pytest.approx((found.layers[1].mean + found.layers[2].mean) / 2)


@pytest.mark.parametrize(("family", "method"), [("bert", "flurka_linear"), ("gpt2", "linear")])
def test_methods_that_pass_the_attention_function_by(family, method):
    """Of hidden states and of a recurrent state."""
    options = {"projection_dim": 8} if method == "flurka_linear" else {}
    model = hea.convert(tiny_model(family), method, **options)
    batch = tiny_batch("bert")
    before = output(model, batch)
    found = hea.attention_error(model, batch)
    assert [one.method for one in found.layers] == [method] * 2
    assert all(0.1 < one.mean < torch.inf for one in found.layers)
    forwards = [vars(module).get("forward") for module in model.modules()]
    assert any(forwards) == (method == "flurka_linear")
    assert torch.equal(output(model, batch), before)


def test_cross_attention_that_stays_exact():
    model, ids = tiny("bart").eval(), tiny_batch("bert")["input_ids"] % 50 + 5
    with pytest.warns(UserWarning, match="cross attention stays exact"):
        found = hea.attention_error(hea.convert(model, KDEFORMER), {"input_ids": ids, "decoder_input_ids": ids[:, :40]})
    methods = {one.name.removeprefix("model."): one.method for one in found.layers}
    assert {name for name, method in methods.items() if method == "sdpa"} == {
        f"decoder.layers.{layer}.encoder_attn" for layer in (0, 1)
    }


def test_sequences_without_a_token_do_not_count():
    model = hea.convert(tiny_model("bert"), KDEFORMER)
    batch = tiny_batch("bert", batch=3, padding="right")
    batch["attention_mask"][2] = 0
    found = hea.attention_error(model, batch)
    assert found.layers[0].estimate.shape == (2, 2)
    batch["attention_mask"][:] = 0
    refuses("no valid token", hea.attention_error, model, batch)


def test_bfloat16_models_and_other_models_in_a_container():
    bert = hea.convert(tiny_model("bert").to(torch.bfloat16), KDEFORMER)
    found = hea.attention_error(bert, tiny_batch("bert"), num_rows=None)
    assert all(0.02 < one.mean < 1.0 for one in found.layers)
    box = torch.nn.Sequential(tiny_model("vit"))
    refuses("ViTModel computes exact attention in every layer", hea.attention_error, box, tiny_batch("vit"))


@pytest.mark.parametrize("num_rows", [0, -1, True, 2.5, "8"])
def test_impossible_numbers_of_rows_are_refused(num_rows):
    refuses("num_rows", hea.attention_error, tiny_model("bert", "kdeformer"), tiny_batch("bert"), num_rows=num_rows)


def test_table_and_plain_values():
    found = hea.attention_error(hea.convert(tiny_model("bert"), KDEFORMER, layers=[0]), tiny_batch("bert"), num_rows=16)
    lines = str(found).splitlines()
    assert lines[0].split() == ["layer", "method", "tokens", "error", "bound", "worst", "head"]
    first = found.layers[0]
    assert lines[1].split()[:5] == ["0", "kdeformer", "70", f"{first.mean:.3f}", f"{first.mean_bound:.3f}"]
    assert lines[1].endswith(f"({first.worst_head})")
    assert lines[2].split()[:4] == ["1", "sdpa", "70", "0.000"]
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["num_rows"] == 16
    assert plain["layers"][0]["estimate"] == first.estimate.tolist()
    assert first.bound.amax(0)[first.worst_head] == first.bound.max()


# The recipe that measures how often the bound fails.


def test_misses_are_counted(monkeypatch, capsys):
    """Two layers with two heads each; the third has no error and is left out."""
    exact = [[[0.2, 0.4]], [[0.1, 0.1]], [[0.0, 0.0]]]
    bounds = {8: [[[0.3, 0.39]], [[0.05, 0.2]], [[0.0, 0.0]]], 16: [[[0.1, 0.3]], [[0.2, 0.2]], [[0.0, 0.0]]]}

    def layers(values):
        tensors = [torch.tensor(value, dtype=torch.float64) for value in values]
        return tuple(LayerError(i, f"{i}", "kdeformer", 60, x, x) for i, x in enumerate(tensors))

    def attention_error(model, batch, *, num_rows, seed=0):
        return ModelError(layers(exact if num_rows is None else bounds[num_rows]), num_rows)

    monkeypatch.setattr(hea, "attention_error", attention_error)
    found = recipe.compare(torch.nn.Identity(), {}, [8, 16], 1)
    assert [(row["rows"], row["layer"], row["missed"], row["heads_missed"]) for row in found] == [
        (8, "0", False, 1),
        (8, "1", False, 1),
        (16, "0", True, 2),
        (16, "1", False, 0),
    ]
    (verdict,) = recipe.show_bounds([{**row, "rows": 8, "source": "books", "tokens": 60} for row in found])
    assert verdict.figure == 0.25
    # One of four layers, half of the heads, and the median of bound / error.
    assert "| 4      | 25.00% | 50.00%       | 1.20" in capsys.readouterr().out


def test_methods_that_are_exact_are_refused(data, capsys):
    assert run(recipe, "--data", data, "--source", "gpt2", "--tokens", 30, "--method", "kdeformer") == 2
    assert "every method is exact here" in capsys.readouterr().err
