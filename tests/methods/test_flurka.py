"""FLuRKA and the Linformer: formulas, tables, models that contract their hidden states, another implementation."""

import copy
import io
import re
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import hf_efficient_attn as hea
from each import Operators, close, differs, refuses
from hf_efficient_attn.methods import AttentionOptions, get_method
from hf_efficient_attn.methods.eva import naive
from instances import inputs, numbers, padding_mask
from tiny_models import ENCODERS, IMAGES, output, tiny_batch, tiny_model

KERNELS = {"flurka_linear": {}, "flurka_performer": {"num_features": 24}}
KERNELS["flurka_eva"] = {"window_size": 3, "num_landmarks": 5}
each_method = pytest.mark.parametrize("method", KERNELS)
# What holds for any attention to projected keys and values.
each_projection = pytest.mark.parametrize("method", [*KERNELS, "linformer"])


def options(method: str, **more) -> dict:
    return KERNELS.get(method, {}) | more


def start(method: str, length: int, **more) -> dict:
    """The tables that conversion starts from."""
    config = hea.method_info(method).config_class(**{"share": "none", **more})
    return get_method(method).initial_parameters(config, num_heads=3, head_dim=8, value_dim=8, max_length=length)


def formula(method: str, query, keys, values, seed: int = 0):
    """The kernel's attention to keys and values that are contracted already, or softmax attention."""
    if method == "linformer":
        return scaled_dot_product_attention(query, keys, values)
    if method != "flurka_eva":
        return hea.attention(method.removeprefix("flurka_"), query, keys, values, seed=seed, **options(method))
    config, scale = hea.EvaConfig(**KERNELS[method]), query.shape[-1] ** -0.5
    given = AttentionOptions(None, is_causal=False, scale=scale, dropout_p=0.0, seed=seed, parameters={})
    return naive(config, query, *(x.expand(len(query), -1, -1, -1) for x in (keys, values)), given, None)


@pytest.mark.parametrize("share", ["none", "kv"])
@each_projection
def test_formula_of_the_paper(method, share):
    """Eq. 2 of FLuRKA and Eq. 7 of the Linformer, for any tables made for the length of the sequence."""
    query, key, value = inputs(batch=2, num_heads=3, q_len=50, kv_len=70, value_dim=5, dtype=torch.float64)
    first, second = 0.3 * numbers(9, 70, seed=1), 0.3 * numbers(9, 70, seed=2)
    learned = {"key_projection": first} | ({} if share == "kv" else {"value_projection": second})
    ours = hea.attention(method, query, key, value, seed=4, **options(method, projection_dim=9, share=share), **learned)
    close(ours, formula(method, query, first @ key, (first if share == "kv" else second) @ value, seed=4))
    assert differs(ours.mean(2, keepdim=True).expand_as(ours), ours)


@each_projection
def test_as_many_projections_as_tokens_give_the_kernels_method(method):
    """Every projection is the mean of one token. With a Gaussian table it is another attention."""
    tensors, mask = inputs(batch=2, q_len=40, dtype=torch.float64), padding_mask("left", 2, 40)
    own = options(method)
    if method == "linformer":
        expected = scaled_dot_product_attention(*tensors, attn_mask=mask[:, None, None])
    else:
        expected = hea.attention(method.removeprefix("flurka_"), *tensors, attention_mask=mask, **own)
    for count in (40, 256):
        close(hea.attention(method, *tensors, attention_mask=mask, projection_dim=count, **own), expected, 1e-6)
    drawn = hea.attention(method, *tensors, attention_mask=mask, projection_dim=256, init="gaussian", **own)
    assert differs(drawn, expected, 0.1)


@pytest.mark.parametrize(("count", "length"), [(1, 5), (4, 12), (5, 13), (8, 3), (6, 6)])
@each_projection
def test_tables_of_means(method, count, length):
    tables = start(method, length, projection_dim=count)
    assert list(tables) == ["key_projection", "value_projection"]
    assert list(start(method, length, projection_dim=count, share="kv")) == ["key_projection"]
    x = numbers(length, 2)
    parts = [p.mean(0) if len(p) else p.sum(0) for p in x.tensor_split(count)]
    for table in tables.values():
        assert table.dtype == torch.float32
        close(table.double() @ x, torch.stack(parts), 1e-6)


@each_projection
def test_tables_of_a_gaussian(method):
    drawn = {"projection_dim": 50, "init": "gaussian"}
    first, second = start(method, 4000, **drawn).values()
    for table in (first, second):
        assert table.shape == (50, 4000)
        assert table.mean().abs() < 4 / (50 * 50 * 4000) ** 0.5
        assert table.std().item() == pytest.approx(50**-0.5, rel=0.01)
    assert torch.corrcoef(torch.stack((first.flatten(), second.flatten())))[0, 1].abs() < 0.01
    # Longer tables begin with the shorter ones. Another seed gives other tables. `max_length` sets their length.
    assert torch.equal(start(method, 30, **drawn)["key_projection"], first[:, :30])
    assert not torch.equal(start(method, 30, **drawn, seed=1)["key_projection"], first[:, :30])
    assert start(method, 30, **drawn, max_length=70)["value_projection"].shape == (50, 70)
    # They are what a call without tables uses.
    tensors = inputs(num_heads=3, q_len=70, dtype=torch.float64)
    given = {"projection_dim": 9, "share": "kv", "init": "gaussian", "seed": 2}
    config = hea.method_info(method).config_class(**given)
    assert torch.equal(hea.attention(config, *tensors), hea.attention(config, *tensors, **start(method, 70, **given)))


@each_projection
def test_refusals(method):
    tables = {"key_projection": numbers(6, 40), "value_projection": numbers(6, 39)}
    refused = [
        ({"max_length": 30}, "40 keys are more than the 30 .*length=40 or"),
        (tables, "40 keys are more than the 39 that value_projection"),
        *(({name: numbers(*shape)}, f"{name} .*not suit projection_dim=6")
          for shape, name in product(((5, 40), (40,), (1, 6, 40)), tables)),
    ]  # fmt: skip
    for given, message in refused:
        refuses(f"{method}: {message}", hea.attention, method, *inputs(q_len=40), projection_dim=6, **given)


@each_method
def test_projections_without_weight_are_left_out(method):
    """A projection whose weights are all 0 in either table is left out. It is not a key of zeros."""
    tensors = inputs(q_len=30, dtype=torch.float64)
    first, second = 0.3 * numbers(6, 30, seed=1), 0.3 * numbers(6, 30, seed=2)
    first[2], second[4] = 0.0, 0.0
    ours = hea.attention(method, *tensors, **options(method, projection_dim=6), key_projection=first,
                         value_projection=second)  # fmt: skip
    left = torch.tensor([0, 1, 3, 5])
    close(ours, formula(method, tensors[0], first[left] @ tensors[1], second[left] @ tensors[2]))


# --- the Linformer alone ---

linformer = hea.functional.linformer_attention


@pytest.mark.parametrize("length", [1, 30, 50])
def test_input_shorter_than_the_tables(length):
    """Projections of one sign stay weighted averages of the valid tokens. Others keep their Euclidean norm."""
    query, key, value = inputs(q_len=length, dtype=torch.float64)
    positive = numbers(1, 50).abs()
    weights = positive[:, :length] * (positive.sum() / positive[:, :length].sum())
    projected = [torch.cat((weights @ x, -2.0 * weights @ x), 2) for x in (key, value)]
    table = torch.cat((positive, -2.0 * positive))
    ours = linformer(query, key, value, projection_dim=2, key_projection=table)
    close(ours, scaled_dot_product_attention(query, *projected))
    # A projection whose weights sum to 0.
    table = torch.tensor([1.0, -1.0]).repeat(25) * torch.arange(50, 0, -1).repeat_interleave(2)[:50]
    table = table[None].double()
    part = table[:, :length]
    expected = part * (table.norm() / part.norm()) @ value
    out = linformer(query, key, value, projection_dim=1, key_projection=table)
    close(out, expected.expand_as(out))


# --- models, which contract their hidden states before the projections to keys and values ---

BUDGET = {"projection_dim": 9, "max_length": 96}


def converted(family: str, method: str):
    """A tiny model with random tables, whose weights do not sum to 1."""
    model = hea.convert(tiny_model(family), method, **BUDGET, **options(method))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_projection" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
            elif name.endswith("bias"):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def after_the_projections(model):
    """A copy without our `forward`: its modules run that of Transformers and contract keys and values."""
    after = copy.deepcopy(model)
    for module in after.modules():
        vars(module).pop("forward", None)
    return after


def at_valid_tokens(inputs: dict, out):
    mask = inputs.get("attention_mask")
    return out if mask is None else out[mask.bool()]


@pytest.mark.parametrize("padding", ["none", "left"])
@each_method
@pytest.mark.parametrize("family", [*ENCODERS, *IMAGES])
def test_models_contract_before_the_projections(family, method, padding, monkeypatch):
    """Outputs and gradients are those of contraction after the projections. test_transformers.py changes padding."""
    model, inputs = converted(family, method).double().eval(), tiny_batch(family, padding=padding)
    if family in IMAGES:
        inputs = {"pixel_values": inputs["pixel_values"].double()}
    after, linear, lengths = after_the_projections(model), nn.Linear.forward, []
    names = re.compile(r".*\.(k|v|key|value)(_lin|_proj)?")
    seen = {module for name, module in model.named_modules() if names.fullmatch(name)}

    def see(module, x):
        lengths.extend([x.shape[1]] if module in seen else [])
        return linear(module, x)

    monkeypatch.setattr(nn.Linear, "forward", see)
    ours, other = (at_valid_tokens(inputs, m(**inputs)[0]) for m in (model, after))
    close(ours, other, 1e-8)
    assert set(lengths) == {BUDGET["projection_dim"], 1}
    for out in (ours, other):
        out.square().sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), after.named_parameters(), strict=True):
        if "pooler" not in name:
            close(mine.grad, theirs[1].grad, 1e-6)
            assert "_projection" not in name or mine.grad.abs().sum() > 0
    assert differs(ours, at_valid_tokens(inputs, output(hea.convert(copy.deepcopy(after), "sdpa"), inputs)), 1e-3)


@pytest.mark.parametrize("change", ["layer", "hook"])
def test_projections_that_are_no_linear_layers_come_before_the_contraction(change):
    model, inputs = converted("bert", "flurka_linear"), tiny_batch("bert", padding="left")
    for attention in (layer.attention.self for layer in model.encoder.layer):
        if change == "layer":
            attention.key = nn.Sequential(attention.key, nn.LeakyReLU(0.5))
        else:
            attention.value.register_forward_hook(lambda *call: call[2] * numbers(call[2].shape[1], 1).float())
    close(output(model, inputs), output(after_the_projections(model), inputs), 1e-5)


@each_method
def test_rounding_does_not_depend_on_where_tables_lie(method):
    """A loaded table begins anywhere in a file, and some libraries round a product with a vector by that."""
    model = converted("bert", method)
    products = (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.mv)
    memory = set()  # of what is multiplied with a vector

    def see(operator, args, _):
        if operator.overloadpacket in products and (args[0].shape[-2] == 1 or args[1].shape[-1] == 1):
            memory.update(x.untyped_storage().data_ptr() for x in args)

    tables = {x.untyped_storage().data_ptr() for name, x in model.named_parameters() if "_projection" in name}
    for batch, length in ((2, 70), (1, 96)):
        with Operators(see):
            output(model, tiny_batch("bert", batch, length))
        assert memory.isdisjoint(tables)


@each_method
def test_an_empty_batch_has_gradients(method):
    layer = converted("bert", method).encoder.layer[0].attention.self
    out = layer(torch.zeros(0, 9, 32))[0]
    out.sum().backward()
    assert out.shape == (0, 9, 32) and all(not x.grad.any() for x in layer.parameters())


def test_switching_to_another_method_ends_the_contraction(monkeypatch):
    """Switching gives every module its own `forward` back. Copies and pickles of the model keep ours."""
    model, inputs = tiny_model("bert"), tiny_batch("bert", padding="left")
    plain = output(model, inputs)
    hea.convert(model, "flurka_linear", **BUDGET)
    expected, twin, file = output(model, inputs), copy.deepcopy(model), io.BytesIO()
    model.encoder.layer[0].attention.self.value.weight.data.zero_()
    torch.save(twin, file)
    file.seek(0)
    for other in (twin, torch.load(file, weights_only=False)):
        assert torch.equal(output(other, inputs), expected)
    twin.config._attn_implementation = "sdpa"  # a change of the config by hand takes effect too
    assert torch.equal(output(twin, inputs), plain)
    for method, layers, own in (("sdpa", None, [False, False]), ("flurka_linear", [1], [False, True])):
        hea.convert(twin, method, layers=layers, **(BUDGET if layers else {}))
        assert ["forward" in vars(layer.attention.self) for layer in twin.encoder.layer] == own
    monkeypatch.setattr("hf_efficient_attn.ops.backends.devices._CPU_HAS_BFLOAT16", True)
    half = hea.convert(copy.deepcopy(model), "flurka_linear", compute_dtype="bfloat16", **BUDGET)
    assert not torch.equal(output(half, inputs), output(model, inputs))


def test_unsupported_arguments_of_a_module_are_refused():
    model, inputs = converted("bert", "flurka_linear"), tiny_batch("bert")
    layer, x = model.encoder.layer[0].attention.self, numbers(1, 9, 32, dtype=torch.float32)
    for message, call in (
        ("output_attentions", lambda: model(**inputs, output_attentions=True)),
        (r"4-D .*cannot be kept", lambda: layer(x, torch.ones(1, 1, 9, 9, dtype=torch.bool))),
        ("'position_bias'", lambda: layer(x, position_bias=x)),
        ("97 keys are more than the 96", lambda: model(**tiny_batch("bert", length=97))),
    ):
        refuses(message, call)
