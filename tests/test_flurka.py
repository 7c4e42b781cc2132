"""FLuRKA: the paper's formula, hidden states contracted before their projection, its tables and shorter input."""

import copy
import io

import pytest
import torch
from torch.nn.functional import elu, linear, scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

import hf_efficient_attn as hea
import test_promises as promises
from hf_efficient_attn.methods import get_method
from hf_efficient_attn.ops.features import orthogonal_features
from hf_efficient_attn.ops.projections import contraction
from hf_efficient_attn.ops.random import normal
from instances import Instance, inputs, numbers, padding_mask, relative_error
from tiny_models import ENCODERS, IMAGES, output, tiny_batch, tiny_model

HEADS, WIDTH, FEATURES, WINDOW, CHUNKS = 3, 8, 24, 3, 5
KERNELS = {
    "flurka_linear": {},
    "flurka_performer": {"num_features": FEATURES},
    "flurka_eva": {"window_size": WINDOW, "num_landmarks": CHUNKS},
}
METHODS = tuple(KERNELS)
each_method = pytest.mark.parametrize("method", METHODS)
GAUSSIAN = [
    Instance(
        method,
        {"projection_dim": 16, "init": "gaussian", **more},
        small={"projection_dim": 4} | {key: value // 2 for key, value in more.items()},
        random=bool(more),
    )
    for method, more in KERNELS.items()
]
each_gaussian = pytest.mark.parametrize("instance", GAUSSIAN, ids=str)


def close(ours, other, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(ours, other, rtol=tolerance, atol=tolerance)


def options(method: str, **more) -> dict:
    return KERNELS[method] | more


def start(method: str, length: int, **more) -> dict:
    """The tables that conversion starts from."""
    sizes = {"heads": HEADS, "width": WIDTH, "value_width": WIDTH, "length": length}
    return get_method(method).parameters(hea.method_info(method).config_class(**more), **sizes)


def features(method: str, x, seed: int = 0):
    """phi, of queries or keys with the scale 1/sqrt(D) left to the caller."""
    if method == "flurka_linear":
        return elu(x) + 1.0
    directions = orthogonal_features(FEATURES, x.shape[-1], seed, x.device)
    return torch.exp(x @ directions.t() - x.square().sum(-1, keepdim=True) / 2) / FEATURES**0.5


def eva(query, keys, values, seed: int):
    """EVA's sums of m queries and n rows, which have no more windows than chunks, for (H, ., D) heads."""
    count, queries, tiles = keys.shape[1], query.shape[1], -(-keys.shape[1] // WINDOW)
    pieces, root = max(1, min(WINDOW, CHUNKS // tiles)), keys.shape[2] ** -0.25
    assert tiles <= CHUNKS
    drawn = normal((CHUNKS, *keys.shape[::2]), seed, 40, keys.device)
    window = torch.arange(queries) * count // queries // WINDOW
    near = window[:, None] == torch.arange(count) // WINDOW
    weights = torch.exp(root**2 * query @ keys.mT) * near
    numerator, denominator = weights @ values, weights.sum(-1)
    for number in range(tiles * pieces):
        tile, piece = divmod(number, pieces)
        start, stop = (min(count, tile * WINDOW + p * WINDOW // pieces) for p in (piece, piece + 1))
        if start == stop:
            continue
        rows, at = root * keys[:, start:stop], slice(start * queries // count, -(-stop * queries // count))
        omega = root * query[:, at].mean(1) + rows.mean(1) + drawn[number]
        xi = torch.exp((omega[:, None] * rows).sum(-1) - rows.square().sum(-1) / 2)[..., None]
        beta = (xi * values[:, start:stop]).sum(1) / xi.sum(1)
        weight = (stop - start) * torch.exp(root * (query * rows.mean(1)[:, None]).sum(-1)) * (window != tile)
        numerator, denominator = numerator + weight[..., None] * beta[:, None], denominator + weight
    return numerator / denominator[..., None]


def formula(method: str, query, keys, values, seed: int = 0, mask=None):
    """phi(q) (phi(k)^T v) / phi(q) sum phi(k), of rows that are contracted already; `mask` (..., N) of the queries."""
    if method == "flurka_eva":
        if query.ndim == 4:
            masks = [None] * len(query) if mask is None else mask
            keys, values = (x.expand(len(query), -1, -1, -1) for x in (keys, values))
            rows = zip(query, keys, values, masks, strict=True)
            return torch.stack([formula(method, q, k, v, seed, m) for q, k, v, m in rows])
        there = torch.ones(query.shape[1], dtype=torch.bool) if mask is None else mask
        out = query.new_zeros(*query.shape[:2], values.shape[-1])
        out[:, there] = eva(query[:, there], keys, values, seed)
        return out
    root = 1.0 if method == "flurka_linear" else query.shape[-1] ** -0.25
    phi_q, phi_k = (features(method, root * x, seed) for x in (query, keys))
    return phi_q @ (phi_k.mT @ values) / (phi_q @ phi_k.sum(-2).unsqueeze(-1))


# The formula.


@pytest.mark.parametrize("share", ["none", "kv"])
@each_method
def test_the_formula_of_the_paper(method, share):
    """Eq. 2 with any tables of as many columns as there are tokens."""
    query, key, value = inputs(batch=2, heads=HEADS, queries=50, keys=70, value_width=5, dtype=torch.float64)
    first, second = 0.3 * numbers(9, 70, seed=1), 0.3 * numbers(9, 70, seed=2)
    learned = {"key_projection": first} | ({} if share == "kv" else {"value_projection": second})
    ours = hea.attention(method, query, key, value, seed=4, **options(method, projection_dim=9, share=share), **learned)
    expected = formula(method, query, first @ key, (first if share == "kv" else second) @ value, seed=4)
    close(ours, expected)
    assert relative_error(ours, ours.mean(2, keepdim=True).expand_as(ours)) > 0.01


def test_many_features_are_the_linformer():
    """phi(q) . phi(k) goes to exp(q . k), so that the output goes to softmax over the rows."""
    row = inputs(heads=HEADS, queries=60, dtype=torch.float64, spread=0.4)
    tables = {"key_projection": 0.2 * numbers(9, 60, seed=1), "value_projection": 0.2 * numbers(9, 60, seed=2)}
    exact = hea.attention("linformer", *row, projection_dim=9, share="none", **tables)

    def error(count: int) -> float:
        config = hea.FlurkaPerformerConfig(projection_dim=9, num_features=count)
        return sum(relative_error(hea.attention(config, *row, seed=s, **tables), exact) for s in range(10)) / 10

    errors = [error(count) for count in (16, 256, 4096)]
    assert errors[0] > 1.5 * errors[1] > 3 * errors[2], errors
    assert errors[2] < 0.1


@pytest.mark.parametrize("kind", ["none", "left", "holes"])
def test_a_window_of_all_rows_is_the_linformer(kind):
    row, mask = inputs(batch=2, heads=HEADS, queries=60, dtype=torch.float64), padding_mask(kind, 2, 60)
    tables = {"key_projection": 0.2 * numbers(9, 70, seed=1), "value_projection": 0.2 * numbers(9, 70, seed=2)}
    exact = hea.attention("linformer", *row, attention_mask=mask, projection_dim=9, share="none", **tables)
    there = slice(None) if mask is None else mask[:, None].expand(-1, HEADS, -1)
    errors = []
    for window in (3, 9, 20):
        config = hea.FlurkaEvaConfig(projection_dim=9, window_size=window, num_landmarks=2)
        errors.append(relative_error(hea.attention(config, *row, attention_mask=mask, **tables)[there], exact[there]))
    assert errors[0] > 0.05
    assert max(errors[1:]) < 1e-12


@each_method
def test_as_many_rows_as_tokens_are_the_kernel_itself(method):
    """Means of segments of one token: the kernel's own method, of as many features."""
    row, mask = inputs(batch=2, queries=40, dtype=torch.float64), padding_mask("left", 2, 40)
    kernel = method.removeprefix("flurka_")
    own = options(method)
    expected = hea.attention(kernel, *row, attention_mask=mask, **own)
    for rows in (40, 256):
        close(hea.attention(method, *row, attention_mask=mask, projection_dim=rows, **own), expected, 1e-6)
    drawn = hea.attention(method, *row, attention_mask=mask, projection_dim=256, init="gaussian", **own)
    assert relative_error(drawn, expected) > 0.1


# Hidden states contracted before the projections to keys and values.


@pytest.mark.parametrize(("kind", "columns"), [("none", 70), ("none", 90), ("left", 70), ("right", 90), ("holes", 70)])
@each_method
def test_contracted_before_or_after_the_projections(method, kind, columns):
    """(E1 X) W_K + (E1 1) b_K = E1 (X W_K + 1 b_K), with or without padding and columns to spare."""
    hidden, size, rows = 12, HEADS * WIDTH, 9
    x, mask = numbers(2, 70, hidden, seed=3), padding_mask(kind, 2, 70)
    weights, biases = numbers(3, size, hidden, seed=4) * hidden**-0.5, numbers(3, size, seed=5)
    tables = [0.3 * numbers(rows, columns, seed=s) for s in (6, 7)]

    def heads(x):
        return x.unflatten(2, (HEADS, WIDTH)).transpose(1, 2)

    query, key, value = (heads(linear(x, w, b)) for w, b in zip(weights, biases, strict=True))
    learned = dict(zip(("key_projection", "value_projection"), tables, strict=True))
    after = hea.attention(
        method, query, key, value, attention_mask=mask, **options(method, projection_dim=rows), **learned
    )
    before, there = [], x if mask is None else x.masked_fill(~mask[:, :, None], 0.0)
    for table, w, b in zip(tables, weights[1:], biases[1:], strict=True):
        contracted = contraction(table, mask, 70, torch.float64)
        assert contracted.shown.all()
        projected = linear(contracted.rows(there[:, None])[:, 0], w) + contracted.sums()[:, :, None] * b
        before.append(heads(projected.expand(2, -1, -1)))
    close(formula(method, query, *before, mask=mask), after)
    # The bias counts: it is multiplied with E 1, not added once.
    wrong = [x - heads(((contraction(t, mask, 70, x.dtype).sums() - 1.0)[:, :, None] * b).expand(2, -1, -1))
             for x, t, b in zip(before, tables, biases[1:], strict=True)]  # fmt: skip
    assert relative_error(formula(method, query, *wrong, mask=mask), after) > 0.05
    if kind == "none" and columns == 70:
        by_hand = [heads(table @ x @ w.t() + table.sum(1)[:, None] * b)
                   for table, w, b in zip(tables, weights[1:], biases[1:], strict=True)]  # fmt: skip
        close(formula(method, query, *by_hand), after)


def test_sums_are_the_rows_of_ones():
    mask = padding_mask("holes", 3, 50)
    for table in (numbers(6, 60).abs(), numbers(6, 60)):
        for there in (mask, None):
            contracted = contraction(table, there, 50, torch.float64)
            ones = torch.ones(3, 50, dtype=torch.float64) if there is None else there.double()
            close(contracted.rows(ones[:, None, :, None])[:, 0, :, 0], contracted.sums().expand(3, -1))
    # Means stay means, of however many tokens.
    table = start("flurka_linear", 60, projection_dim=20)["key_projection"].double()
    sums = contraction(table, mask, 50, torch.float64)
    close(sums.sums(), sums.shown.double(), 1e-6)
    assert not sums.shown.all()


# Tables.


@each_method
def test_tables(method):
    means = start(method, 13, projection_dim=5)
    assert list(means) == list(hea.method_info(method).learned_parameters) == ["key_projection", "value_projection"]
    assert list(start(method, 13, projection_dim=5, share="kv")) == ["key_projection"]
    x = numbers(13, 2)
    for table in means.values():
        assert table.dtype == torch.float32
        close(table.double() @ x, torch.stack([p.mean(0) for p in x.tensor_split(5)]), 1e-6)
    drawn = {"projection_dim": 50, "init": "gaussian"}
    first, second = start(method, 4000, **drawn).values()
    for table in (first, second):
        assert table.shape == (50, 4000)
        assert table.mean().abs() < 4 / (50 * 50 * 4000) ** 0.5
        assert table.std().item() == pytest.approx(50**-0.5, rel=0.01)
    assert torch.corrcoef(torch.stack((first.flatten(), second.flatten())))[0, 1].abs() < 0.01
    assert torch.equal(start(method, 30, **drawn)["key_projection"], first[:, :30])
    assert not torch.equal(start(method, 30, **drawn, seed=1)["key_projection"], first[:, :30])
    assert start(method, 30, **drawn, max_length=70)["value_projection"].shape == (50, 70)


@each_method
def test_start_values_are_those_of_the_functional_form(method):
    row = inputs(heads=HEADS, queries=70, dtype=torch.float64)
    for more in ({}, {"init": "gaussian"}, {"share": "kv", "init": "gaussian", "seed": 2}):
        config = hea.method_info(method).config_class(projection_dim=9, **more)
        given = start(method, 70, projection_dim=9, **more)
        assert torch.equal(hea.attention(config, *row), hea.attention(config, *row, **given))


@each_method
def test_refusals(method):
    row = inputs(queries=40)
    with pytest.raises(hea.UnsupportedAttentionError, match=rf"{method}: 40 keys are more than the 30 .*length=40 or"):
        hea.attention(method, *row, max_length=30)
    for shape in ((5, 40), (40,), (1, 6, 40)):
        for name in ("key_projection", "value_projection"):
            with pytest.raises(hea.UnsupportedAttentionError, match=rf"{method}: {name} .*not suit projection_dim=6"):
                hea.attention(method, *row, projection_dim=6, **{name: numbers(*shape)})
    with pytest.raises(hea.UnsupportedAttentionError, match="no causal form"):
        hea.attention(method, *row, is_causal=True)


@pytest.mark.parametrize("kind", ["left", "right", "holes"])
@each_method
def test_means_of_segments_that_are_not_full(method, kind):
    """Segments of ten tokens, counted from the first that is there: the means of those that are left."""
    row, mask = inputs(batch=3, queries=70, dtype=torch.float64), padding_mask(kind, 3, 70, 4)
    out = hea.attention(method, *row, attention_mask=mask, **options(method, projection_dim=20, max_length=200))
    for b in range(3):
        query, key, value = (x[b] for x in row)
        means = [torch.stack([p.mean(1) for p in x[:, mask[b]].split(10, 1)], 1) for x in (key, value)]
        close(out[b], formula(method, query, *means, mask=mask[b]), 1e-6)


@each_method
def test_rows_without_weight_are_left_out(method):
    """A row of either table that is all zeros is no row, rather than one of a key of zeros."""
    row = inputs(queries=30, dtype=torch.float64)
    first, second = 0.3 * numbers(6, 30, seed=1), 0.3 * numbers(6, 30, seed=2)
    first[2], second[4] = 0.0, 0.0
    ours = hea.attention(method, *row, **options(method, projection_dim=6), key_projection=first,
                         value_projection=second)  # fmt: skip
    left = torch.tensor([0, 1, 3, 5])
    close(ours, formula(method, row[0], first[left] @ row[1], second[left] @ row[2]))


@each_method
def test_tables_learn(method):
    """Gradients by both tables agree with finite differences, of whole and of shorter input."""
    query, key, value = inputs(batch=2, heads=2, queries=9, width=3, dtype=torch.float64)
    mask = torch.arange(9) < torch.tensor([[9], [5]])
    leaves = [0.5 * numbers(4, 12, seed=s) for s in (1, 2)]

    def output(first, second):
        return hea.attention(method, query, key, value, attention_mask=mask, key_projection=first,
                             value_projection=second, **options(method, projection_dim=4))  # fmt: skip

    assert torch.autograd.gradcheck(output, [x.requires_grad_() for x in leaves])
    means = [x.requires_grad_() for x in (t.double().clone() for t in start(method, 12, projection_dim=4).values())]
    output(*means).square().sum().backward()
    for table in means:
        assert table.grad.isfinite().all()
        assert table.grad.abs().sum() > 0


def test_budgets():
    assert hea.FlurkaLinearConfig().with_budget(100).projection_dim == 100
    config = hea.FlurkaPerformerConfig(init="gaussian", seed=3).with_budget(101)
    assert (config.num_features, config.projection_dim, config.init, config.seed) == (50, 51, "gaussian", 3)
    with pytest.raises(hea.UnsupportedAttentionError, match="an integer of 2 or more"):
        hea.FlurkaPerformerConfig().with_budget(1)
    config = hea.FlurkaEvaConfig(proposal="mean", seed=3).with_budget(100)
    assert config == hea.FlurkaEvaConfig(
        window_size=16, num_landmarks=16, projection_dim=68, proposal="mean", seed=3
    )  # fmt: skip
    with pytest.raises(hea.UnsupportedAttentionError, match="an integer of 3 or more"):
        hea.FlurkaEvaConfig().with_budget(2)


def test_a_constant_value_comes_out():
    """Means keep constants, and the kernel's weights sum to 1."""
    query, key, _ = inputs(batch=2, queries=60, dtype=torch.float64)
    value, mask = torch.full_like(key, 3.0), padding_mask("left", 2, 60)
    for method in METHODS:
        sizes = options(method, projection_dim=7, max_length=100)
        out = hea.attention(method, query, key, value, attention_mask=mask, **sizes)
        # EVA has no output at queries that are not there.
        there = mask[:, None, :, None] if method == "flurka_eva" else True
        close(out, value * there, 1e-6)
    exact = scaled_dot_product_attention(query, key, value)
    close(exact, value)


# Promises, of Gaussian tables.


@pytest.mark.parametrize("kind", ["left", "holes", "empty"])
@each_gaussian
def test_gaussian_tables_keep_the_promises_of_masks(instance, kind):
    for length in (1, 7, 60):
        promises.check_shapes(instance, False, kind, batch=2, queries=length, value_width=5)
        promises.check_masked_keys(instance, False, kind, batch=2, queries=length)
        promises.check_batch(instance, False, kind, queries=length)


@each_gaussian
def test_gaussian_tables_keep_the_other_promises(instance):
    promises.check_masked_gradients(instance, False)
    promises.check_empty_rows(instance, False)
    promises.check_gradients(instance, False, 13, 3)
    promises.check_compiles(instance, False)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        promises.check_finite(
            Instance(instance.method, instance.hyperparameters, averages=False), False, dtype, 1e4, False
        )
    fixed = Instance(instance.method, {**instance.hyperparameters, "max_length": 300}, averages=False)
    for length, before, after in ((1, 0, 4), (10, 9, 20), (50, 30, 0), (130, 90, 80)):
        promises.check_padding_beside(fixed, False, length, before, after)
    for length in (1, 50, 200):
        promises.check_holes(fixed, False, length)


@pytest.mark.parametrize("kind", ["none", "left", "right", "holes"])
@each_gaussian
def test_gaussian_tables_are_those_of_the_readable_form(instance, kind):
    row, mask = inputs(batch=2, queries=60, value_width=5, dtype=torch.float64), padding_mask(kind, 2, 60)
    for more in ({}, {"max_length": 90}, {"share": "kv"}):
        config = instance.config(**more)
        close(hea.attention(config, *row, attention_mask=mask), hea.naive_attention(config, *row, attention_mask=mask))


# Models: hidden states contracted before the projections.

BUDGET = {"projection_dim": 9, "max_length": 96}
ENCODING = [*ENCODERS, *IMAGES]
each_encoder = pytest.mark.parametrize("family", ENCODING)


def converted(family: str, method: str, **more):
    """A tiny model with tables that are not means, so that rows do not sum to 1."""
    model = hea.convert(tiny_model(family), method, **{**BUDGET, **more}, **options(method))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_projection" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
            elif name.endswith("bias"):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def projected_first(model):
    """The same model with the forwards of Transformers, so that keys and values are contracted after the projection."""
    model = copy.deepcopy(model)
    found = [module for module in model.modules() if "forward" in vars(module)]
    for module in found:
        del module.forward
    return model, len(found)


def batch_of(family: str, padding: str, **more) -> dict:
    return tiny_batch(family, padding="none" if family in IMAGES else padding, **more)


def shown(family: str, inputs: dict, out):
    """Outputs at tokens that are there."""
    mask = inputs.get("attention_mask")
    return out if mask is None else out[mask.bool()]


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@each_method
@each_encoder
def test_models_contract_before_the_projections(family, method, padding):
    model, inputs = converted(family, method).double(), batch_of(family, padding)
    if family in IMAGES:
        inputs = {"pixel_values": inputs["pixel_values"].double()}
    after, count = projected_first(model)
    assert count == 2
    rows = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("key", "k_lin", "k_proj", "value", "v_lin", "v_proj"):
            module.register_forward_hook(lambda module, args, out: rows.append(args[0].shape[1]))
    ours, other = (shown(family, inputs, output(m, inputs)) for m in (model, after))
    close(ours, other, 1e-8)
    assert set(rows) == {BUDGET["projection_dim"], 1}
    exact = shown(family, inputs, output(hea.convert(copy.deepcopy(after), "sdpa"), inputs))
    assert relative_error(ours, exact) > 1e-3


@each_method
@each_encoder
def test_what_padding_holds_does_not_show_in_models(family, method):
    if family in IMAGES:
        pytest.skip("images have no padding")
    model, inputs = converted(family, method), batch_of(family, "right")
    other = dict(inputs, input_ids=torch.where(inputs["attention_mask"].bool(), inputs["input_ids"], 7))
    assert torch.equal(*(shown(family, x, output(model, x)) for x in (inputs, other)))


@each_method
@each_encoder
def test_gradients_of_contracted_models(family, method):
    model, inputs = converted(family, method).double().eval(), batch_of(family, "right")
    if family in IMAGES:
        inputs = {"pixel_values": inputs["pixel_values"].double()}
    after, _ = projected_first(model)
    for m in (model, after):
        shown(family, inputs, m(**inputs)[0]).square().sum().backward()
    for (name, ours), other in zip(model.named_parameters(), after.parameters(), strict=True):
        if "pooler" not in name:
            close(ours.grad, other.grad, 1e-6)
            assert "_projection" not in name or ours.grad.abs().sum() > 0


def test_contraction_goes_with_the_method():
    """Switching to anything else gives the module its own forward back; copies and pickles keep ours."""
    model, inputs = tiny_model("bert"), tiny_batch("bert", padding="left")
    plain, modules = output(model, inputs), [layer.attention.self for layer in model.encoder.layer]
    for other in ("sdpa", "linear", "eager"):
        hea.convert(model, "flurka_linear", **BUDGET)
        assert all("forward" in vars(module) for module in modules)
        expected = output(model, inputs)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        again = output(twin, inputs)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
        assert torch.equal(again, expected)
        file = io.BytesIO()
        torch.save(twin, file)
        file.seek(0)
        assert torch.equal(output(torch.load(file, weights_only=False), inputs), expected)
        # By hand: no method of ours, or another of ours.
        model.config._attn_implementation = "sdpa"
        assert torch.equal(output(model, inputs), plain)
        hea.convert(model, other)
        assert not any("forward" in vars(module) for module in modules)
        assert other != "sdpa" or torch.equal(output(model, inputs), plain)
    hea.convert(model, "flurka_linear", layers=[1], **BUDGET)
    assert ["forward" in vars(module) for module in modules] == [False, True]


def test_a_model_contracts_in_training_and_half_precision():
    model, inputs = converted("bert", "flurka_performer"), tiny_batch("bert", padding="right")
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(model.train()(**inputs)[0])
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    full = output(model.eval(), inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert relative_error(output(model, inputs), full) < 0.1
    half = output(model.to(torch.bfloat16), inputs)
    assert half.dtype == torch.bfloat16
    assert relative_error(half, full) < 0.1


def test_a_contracted_model_takes_adapters():
    """LoRA in place of the projections to keys and values is an affine map too."""
    peft = pytest.importorskip("peft")
    model, inputs = converted("bert", "flurka_linear").double(), tiny_batch("bert", padding="right")
    lora = peft.LoraConfig(target_modules=["key", "value"], r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(model), lora).eval()
    after, count = projected_first(adapted)
    assert count == 2
    ours, other, without = (shown("bert", inputs, output(m, inputs)) for m in (adapted, after, model))
    close(ours, other, 1e-8)
    assert relative_error(ours, without) > 1e-3


def test_a_contracted_model_under_gradient_checkpointing():
    model, inputs = converted("bert", "flurka_performer").train(), tiny_batch("bert", padding="left")
    grads = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        torch.manual_seed(0)
        model(**inputs)[0].square().mean().backward()
        grads.append([p.grad.clone() for name, p in model.named_parameters() if "pooler" not in name])
    for plain, again in zip(*grads, strict=True):
        torch.testing.assert_close(again, plain)


def test_a_contracted_model_refuses_what_cannot_be_kept():
    model, inputs = converted("bert", "flurka_linear"), tiny_batch("bert")
    with pytest.raises(hea.UnsupportedAttentionError, match="output_attentions"):
        model(**inputs, output_attentions=True)
    layer, hidden = model.encoder.layer[0].attention.self, numbers(1, 9, 32, dtype=torch.float32)
    with pytest.raises(hea.UnsupportedAttentionError, match=r"4-D .*cannot be kept"):
        layer(hidden, torch.ones(1, 1, 9, 9, dtype=torch.bool))
    with pytest.raises(hea.UnsupportedAttentionError, match="'position_bias'"):
        layer(hidden, position_bias=hidden)
    with pytest.raises(hea.UnsupportedAttentionError, match="97 keys are more than the 96"):
        model(**tiny_batch("bert", length=97))


@each_method
def test_a_contracted_model_compiles(method):
    model, inputs = converted("bert", method), tiny_batch("bert")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(output(compiled, inputs), output(model, inputs), rtol=1e-4, atol=1e-4)


def test_a_saved_model_contracts(tmp_path):
    model, inputs = converted("bert", "flurka_linear"), tiny_batch("bert", padding="left")
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert all("forward" in vars(layer.attention.self) for layer in loaded.encoder.layer)
    assert torch.equal(output(loaded, inputs), output(model, inputs))


def operations(model, inputs: dict) -> int:
    # PyTorch counts its fused attention on the CPU as nothing.
    fused = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *x, **options: sdpa_flop_count(*x[:3])}
    with FlopCounterMode(display=False, custom_mapping=fused) as counter:
        output(model, inputs)
    return counter.get_total_flops()


def test_fewer_operations_than_both_parents():
    """Claim 1: N > P (H + 2) > W > P > D, here 96 > 72 > 32 > 12 > 8; as many features as the head is wide."""
    inputs, rows, features = tiny_batch("bert", batch=1, length=96), {"projection_dim": 12}, {"num_features": 8}
    chunks = {"window_size": 3, "num_landmarks": 3}
    count = {
        method: operations(hea.convert(tiny_model("bert", num_attention_heads=4), method, **more), inputs)
        for method, more in {
            "flurka_linear": rows,
            "flurka_performer": rows | features,
            "flurka_eva": rows | chunks,
            "eva": chunks,
            "linear": {},
            "performer": features,
            "linformer": rows,
        }.items()
    }
    assert count["flurka_linear"] < min(count["linear"], count["linformer"])
    assert count["flurka_performer"] < min(count["performer"], count["linformer"])
    assert count["flurka_eva"] < min(count["eva"], count["linformer"])
