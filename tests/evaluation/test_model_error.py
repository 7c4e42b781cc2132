"""`hea.attention_error` against dense attention, errors estimated from a few rows, and how often their bound fails."""

import copy
import json

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_efficient_attn as hea
from each import close, refuses
from helpers.commands import run
from helpers.encoder_decoders import tiny
from hf_efficient_attn.analysis.matrices import operator_norm
from hf_efficient_attn.evaluation import calibration, capture
from hf_efficient_attn.evaluation.model_error import LayerError, ModelError, exact_rows
from hf_efficient_attn.integration.inputs import read_mask
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.index import take
from hf_efficient_attn.ops.row_error import RowError, row_error, sample_rows
from hf_efficient_attn.training.distillation import Distillation
from hf_efficient_attn.training.finetuning import Finetuning, FinetuningOptions
from instances import inputs, numbers, padding_mask
from recipes.benchmarks import error_bound as recipe
from tiny_models import output, tiny_batch, tiny_model

KDEFORMER = hea.KDEformerConfig(block_size=4, num_samples=8, num_probes=4)


def dense_errors(model, batch, name):
    """Errors of all heads by the dense formula, from the calls of the attention function: one (B, H) for each call."""
    ours, errors = ALL_ATTENTION_FUNCTIONS[name], []

    def look(module, query, key, value, mask, **rest):
        out, _ = ours(module, query, key, value, mask, **rest)
        mask = read_mask(name, mask).keys
        causal = bool(getattr(module, "is_causal", True))
        options = {"attention_mask": mask, "is_causal": causal, "scale": rest.get("scaling")}
        exact = hea.analysis.exact_output(query, key, value, **options)
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
    model.encoder.layer[2] = model.encoder.layer[1]  # two calls of one module, with two sequences each
    assert [len(one.bound) for one in hea.attention_error(model, tiny_batch("bert")).layers] == [2, 4]


@pytest.mark.parametrize(("family", "method"), [("bert", "flurka_linear"), ("gpt2", "linear")])
def test_methods_that_pass_the_attention_function_by(family, method):
    """Of hidden states and of a recurrent state."""
    model = hea.convert(tiny_model(family), method, **({"projection_dim": 8} if method == "flurka_linear" else {}))
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


def test_padding_of_the_encoder_masks_no_token_of_the_decoder():
    """Also if both have as many: the figures are those without padding, of a decoder that is longer than the text."""
    exact, ids, mask = tiny("bart").eval(), tiny_batch("bert")["input_ids"] % 50 + 5, torch.ones(2, 70).long()
    mask[:, 8:], config = 0, hea.LinearConfig(feature_map="hedgehog")
    model = hea.convert(copy.deepcopy(exact), config)
    found = []
    for text in ({"input_ids": ids, "attention_mask": mask}, {"input_ids": ids[:, :8]}):
        batch = {**text, "decoder_input_ids": ids}
        errors = [calibration.measure_output_error(exact, batch, hea.EfficientAttentionConfig(config))]
        with capture.capture_attention(exact, lambda call, errors=errors: errors.append(call.errors(config).mean())):
            capture.forward(exact, batch)
        errors += [one.mean for one in hea.attention_error(model, batch, num_rows=None).layers]
        stages = Distillation(model, 1), Finetuning(model, exact, FinetuningOptions(steps=1))
        found.append(torch.tensor([*errors, *(one.loss for stage in stages for one in stage.measure(batch))]))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)


def test_sequences_without_a_token_do_not_count():
    model = hea.convert(tiny_model("bert"), KDEFORMER)
    batch = tiny_batch("bert", batch=3, padding="right")
    batch["attention_mask"][2] = 0
    assert hea.attention_error(model, batch).layers[0].estimate.shape == (2, 2)
    batch["attention_mask"][:] = 0
    refuses("no valid token", hea.attention_error, model, batch)


def test_bfloat16_models_and_what_is_refused():
    bert = hea.convert(tiny_model("bert").to(torch.bfloat16), KDEFORMER)
    assert all(0.02 < one.mean < 1.0 for one in hea.attention_error(bert, tiny_batch("bert"), num_rows=None).layers)
    box = torch.nn.Sequential(tiny_model("vit"))
    refuses("ViTModel computes exact attention in every layer", hea.attention_error, box, tiny_batch("vit"))
    for num_rows in (0, -1, True, 2.5, "8"):
        refuses("num_rows", hea.attention_error, bert, tiny_batch("bert"), num_rows=num_rows)


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
    assert [(row["rows"], row["layer"]) for row in found] == [(8, "0"), (8, "1"), (16, "0"), (16, "1")]
    assert [(row["missed"], row["heads_missed"]) for row in found] == [(False, 1), (False, 1), (True, 2), (False, 0)]
    recipe.show_bounds([{**row, "rows": 8, "source": "books", "tokens": 60} for row in found])
    # One of four layers, half of the heads, and the median of bound / error.
    assert "| 4      | 25.00% | 50.00%       | 1.20" in capsys.readouterr().out


def test_methods_that_are_exact_are_refused(data, capsys):
    assert run(recipe, "--data", data, "--source", "gpt2", "--tokens", 30, "--method", "kdeformer") == 2
    assert "every method is exact here" in capsys.readouterr().err


# Errors of heads estimated from a few rows, against dense formulas.


def sample(heads, q_len, num_rows, query_mask=None, seed=0, num_heads=None):
    draws = Draws(seed, torch.device("cpu"))
    return sample_rows(heads, q_len, num_rows, query_mask, num_heads=num_heads or heads, draws=draws)


def row_error_naive(
    approximate: Tensor, exact: Tensor, valid: Tensor | None = None, population: Tensor | int | None = None
) -> RowError:
    """The readable form of `row_error`, head by head with singular value decompositions in float64."""
    estimates, bounds = torch.zeros(2, len(exact))
    for head in range(len(exact)):
        rows = slice(None) if valid is None else valid[head]
        e = exact[head, rows].double()
        difference = approximate[head, rows].double() - e
        p = len(e)
        if not difference.any():
            continue
        _, errors, directions = torch.linalg.svd(difference, full_matrices=False)
        _, sizes, exact_directions = torch.linalg.svd(e, full_matrices=False)
        ratio = (errors[0] / sizes[0]).item()
        s = (difference @ directions[0]).square() / errors[0] ** 2
        t = (e @ exact_directions[0]).square() / sizes[0] ** 2 if sizes[0] > 0 else torch.zeros_like(s)
        n = torch.inf if population is None else torch.as_tensor(population).flatten().expand(len(exact))[head].item()
        margin = 0.5 * p**-0.5 + (s - t).norm().item()
        estimates[head] = ratio
        bounds[head] = ratio * (1.0 + max(0.0, 1.0 - p / n) ** 0.5 * margin)
    return RowError(estimates, bounds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("population", [None, 100, "per head"], ids=str)
def test_the_fast_form_is_the_naive_form(dtype, population):
    exact = numbers(5, 40, 12)
    exact[:, :, 0] += 3.0
    difference = 0.1 * numbers(5, 40, 12, seed=1) * torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]).view(-1, 1, 1)
    difference[0, 3] *= 50.0  # one row has most of the error
    difference[1, :, 4] *= 6.0
    valid = torch.arange(40) < torch.tensor([40, 30, 40, 1, 0])[:, None]
    count = torch.tensor([60, 30, 80, 1, 0])[:, None] if population == "per head" else population
    exact, approximate = exact.to(dtype), (exact + difference).to(dtype)
    for mask in (None, valid):
        given = approximate, exact, mask, count if mask is not None or population != "per head" else None
        fast, naive = row_error(*given), row_error_naive(*given)
        assert fast.estimate.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(fast.estimate, naive.estimate, rtol=1e-3, atol=1e-6, check_dtype=False)
        torch.testing.assert_close(fast.bound, naive.bound, rtol=2e-2, atol=1e-6, check_dtype=False)
        assert (fast.bound >= fast.estimate).all()


def test_with_all_rows_the_estimate_is_the_error_at_any_size():
    exact, approximate = numbers(3, 50, 8), numbers(3, 50, 8, seed=1)
    rows = sample(3, 50, 80)
    assert torch.equal(rows.queries, torch.arange(50).expand(3, -1))
    found = row_error(take(approximate, rows.queries), take(exact, rows.queries), rows.valid, rows.population)
    expected = operator_norm(approximate - exact) / operator_norm(exact)
    torch.testing.assert_close(found.estimate, expected, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(found.bound, found.estimate)
    for size in (1e-30, 1e-10, 1e10, 1e30):
        scaled = row_error((size * approximate).float(), (size * exact).float())
        torch.testing.assert_close(scaled.estimate.double(), expected, rtol=1e-4, atol=0.0)
    zero = torch.zeros(1, 20, 6)
    assert row_error(zero, zero).bound.item() == 0.0
    assert row_error(zero + 1.0, zero).estimate.item() == torch.inf


def test_rows_are_spread_and_not_repeated():
    for q_len, num_rows in ((100, 7), (7, 7), (5, 9), (1, 3), (1000, 128)):
        rows = sample(3, q_len, num_rows).queries
        count = min(q_len, num_rows)
        assert rows.shape == (3, count)
        stratum = rows.double() * count / q_len
        assert ((stratum - torch.arange(count)).abs() <= 1.0).all() and (rows.sort()[0].diff() > 0).all()
    assert len({tuple(row) for s in (0, 1) for row in sample(3, 100, 7, seed=s).queries.tolist()}) == 6


@pytest.mark.parametrize("kind", ["left", "right", "holes", "empty", "one"])
def test_only_queries_of_the_mask_are_sampled(kind):
    mask = padding_mask(kind, 4, 60, seed=3).repeat_interleave(2, 0)
    rows = sample(8, 60, 10, mask, num_heads=2)
    for queries, valid, allowed in zip(rows.queries, rows.valid, mask, strict=True):
        taken = queries[valid]
        assert taken.unique().numel() == len(taken) == min(10, allowed.sum()) and allowed[taken].all()
    assert torch.equal(rows.population, mask.sum(1, keepdim=True))
    alone = sample(2, 60, 10, mask[2:4])
    assert torch.equal(alone.queries[alone.valid], rows.queries[2:4][rows.valid[2:4]])
    # Padding on the right samples the queries that the sequence has without it.
    assert torch.equal(sample(2, 60, 10, (torch.arange(60) < 40).expand(2, -1)).queries, sample(2, 40, 10).queries)


@pytest.mark.parametrize("padding", ["none", "left", "holes", "empty"])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "is_causal"), [(50, 50, False), (30, 50, False), (50, 50, True), (30, 50, True), (50, 30, True)]
)
def test_exact_rows_are_rows_of_exact_attention(q_len, kv_len, is_causal, padding):
    query, key, value = inputs(2, 2, q_len, kv_len=kv_len, value_dim=5, dtype=torch.float64)
    mask = padding_mask(padding, 2, kv_len)
    dense = hea.analysis.exact_output(query, key, value, attention_mask=mask, is_causal=is_causal).flatten(0, 1)
    key_mask = None if mask is None else mask.repeat_interleave(2, 0)
    rows = sample(4, q_len, 37, key_mask if q_len == kv_len else None, seed=1, num_heads=2)
    flat = (x.flatten(0, 1) for x in (query, key, value))
    close(exact_rows(*flat, rows, key_mask, is_causal=is_causal, scale=8**-0.5), take(dense, rows.queries))


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_the_bound_holds_where_the_estimate_does_not(rank):
    """Errors of low rank whose rows differ in size. Rows with rarer, larger errors need more rows."""
    exact = numbers(200, 1000, 16) + 2.0
    sizes = torch.exp(0.3 * numbers(200, 1000, 1, seed=1))
    errors = 0.1 * sizes * numbers(200, 1000, rank, seed=2) @ numbers(200, rank, 16, seed=3)
    rows = sample(200, 1000, 96, seed=5)
    found = row_error(take(exact + errors, rows.queries), take(exact, rows.queries), rows.valid, rows.population)
    true = operator_norm(errors) / operator_norm(exact)
    assert (found.estimate < true).double().mean() > 0.1
    assert (found.bound < true).double().mean() <= 0.02
    assert (found.bound / true).median() < 1.5
