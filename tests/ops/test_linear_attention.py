"""Linear attention and random features by Triton kernels, on a GPU or in Triton's interpreter.

They are compared with float64, and in the methods with plain operators.
"""

import pytest
import torch

import hf_efficient_attn as hea
from each import DEVICE, count_moved, needs_triton
from hf_efficient_attn.ops.backends import launches, linear_attention, random_features
from hf_efficient_attn.ops.backends.backend import FusedFeatures, LinearCall
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.features import maps
from instances import inputs, numbers
from recipes.common.kernel_costs import COSTS

pytestmark = needs_triton
HALF = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


def make(q_len, kv_len, dim, value_dim, dtype=torch.float32, masked=False, *, name="elu", causal=False, **how):
    """A call whose tensors have gradients. Masked keys and values are NaN.

    With the random features, "favor", which have the options `count` and `scale`, all keys of a head are masked.
    """
    sizes = ((q_len, dim), (kv_len, dim), (kv_len, value_dim))
    query, key, value = (numbers(3, *size, seed=i).to(DEVICE, dtype) for i, size in enumerate(sizes))
    if name == "elu":
        query[:, ::7] -= 60.0  # features of whole queries would underflow
    if name == "favor":
        features = maps.favor(how.pop("count", 70), how.pop("scale", 0.25), dim, Draws(3, torch.device(DEVICE))).fused
    else:
        features = FusedFeatures(name, dim, how.pop("factor", 1.0), *[lambda x: x] * 2)
    mask = None
    if masked:
        mask = (numbers(3, kv_len, seed=5) > -0.5).to(DEVICE)
        mask[0, : kv_len // 2] = False
        mask[1] &= name != "favor"
        key, value = (x.masked_fill(~mask.unsqueeze(2), torch.nan) for x in (key, value))
    return LinearCall(*(x.requires_grad_() for x in (query, key, value)), mask, features, causal, **how)


def attend(call):
    """By the kernels. Those of random features return no lse."""
    backend = linear_attention.BACKEND if call.features.directions is None else random_features.BACKEND
    return [x for x in backend.attend(call) if x.numel()]


def directions_naive(call):
    """The output in float64: the directions attend to the keys, and the queries to the directions."""
    scale, directions = call.features.scale, call.features.directions.double()
    query, key, value = (x.double() for x in call[:3])
    log = directions @ key.mT - 0.5 * abs(scale) * key.square().sum(2).unsqueeze(1)  # (BH, F, Nk)
    if call.key_mask is not None:
        log = log.masked_fill(~call.key_mask.unsqueeze(1), -1e30)
    logs = query @ directions.T * (1.0 if scale > 0 else -1.0) + log.logsumexp(2).unsqueeze(1)  # (BH, Nq, F)
    out = logs.softmax(2) @ (log.softmax(2) @ value)
    return [out if call.key_mask is None else out * call.key_mask.any(1).view(-1, 1, 1)]


def results(call, attend=attend):
    """Out, lse and the gradients, and which queries have no keys."""
    outs = attend(call)
    found = torch.autograd.grad(outs, call[:3], [numbers(*x.shape, seed=7).to(x) for x in outs])
    return *(x.masked_fill(x == -torch.inf, 0.0) for x in outs), *found, outs[-1] == -torch.inf


def check(call, tolerance):
    is_random = call.features.directions is not None
    assert not is_random or random_features.BACKEND.applies(call)
    naive = directions_naive if is_random else linear_attention.linear_attention_naive
    clean = [x.detach().double().nan_to_num(0.0).requires_grad_() for x in call[:3]]
    found, expected = results(call), results(LinearCall(*clean, *call[3:]), naive)
    assert torch.equal(found[-1], expected[-1])
    names = ("out", *(["lse"] * (not is_random)), "query", "key", "value")
    for x, y, name in zip(found, expected, names, strict=False):
        assert ((x.double() - y).abs().amax() / y.abs().amax().clamp(min=1.0)).item() < tolerance, name


FORMS = [{}, {"masked": True, "factor": 1.7}, {"causal": True}, {"causal": True, "masked": True, "factor": 0.6}]
FORMS += [{"causal": True, "masked": True, "distance": 70, "is_reversed": reverse} for reverse in (False, True)]


@pytest.mark.parametrize("form", FORMS)
def test_outputs_lse_and_gradients(kernels, form):
    check(make(300, 300 if "causal" in form else 97, 30, 17, **form), 1e-5)
    assert [x.name for x in kernels] == [
        "linear_state", "linear_output", "linear_query_gradient", "linear_state", "linear_key_gradient"
    ]  # fmt: skip


@pytest.mark.parametrize("form", [{}, {"masked": True}, {"scale": -0.3, "masked": True}])
def test_output_and_gradients_of_directions(kernels, form):
    check(make(130, 300, 30, 17, name="favor", **form), 1e-5)


FAVOR = {"name": "favor", "masked": True, "scale": 0.125, "count": 64}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("form", [{}, {"causal": True}, FAVOR])
def test_half_precision(kernels, form, dtype):
    check(make(*((130, 300, 64, 64) if form is FAVOR else (300, 300, 20, 40)), dtype, **form), HALF[dtype])


@pytest.mark.parametrize("name", maps.LEARNED)
@pytest.mark.parametrize("causal", [False, True])
def test_learned_features(kernels, name, causal):
    check(make(70, 70, 20, 16, masked=True, causal=causal, name=name), 1e-5)


SIZES = [("elu", (1, 1, 1, 1)), ("elu", (130, 64, 128, 128)), ("elu", (65, 300, 100, 3))]
SIZES += [("favor", (1, 1, 1, 1)), ("favor", (40, 64, 128, 100)), ("favor", (65, 20, 30, 128))]


@pytest.mark.parametrize(("name", "sizes"), SIZES)
def test_sizes(kernels, name, sizes):
    check(make(*sizes, torch.bfloat16, name=name), HALF[torch.bfloat16])


def test_weights_that_underflow_have_no_output_and_no_gradient(kernels):
    call = make(40, 50, 16, 16)
    with torch.no_grad():
        call.key.copy_(-80.0 - call.key.abs())
        call.key[0] = 1.0
    out, _, *grads, empty = results(call)
    assert not empty[0].any() and empty[1:].all() and (out[1:] == 0).all()
    assert all(x.isfinite().all() and (x[1:] == 0).all() and (x[0] != 0).any() for x in grads)


def test_range_of_float16(kernels):
    """The sums over 2,000 keys exceed 65,504."""
    call = make(10, 2000, 16, 16, torch.float16)
    with torch.no_grad():
        call.value.copy_(1000.0 + call.value)
    out, lse, *grads, _ = results(call)
    assert all(x.isfinite().all() for x in (out, lse, *grads)) and (out.double() / 1000.0 - 1.0).abs().max() < 0.01


METHODS = [
    ("linear", {}, False), ("linear", {"scale": 0.5}, True), ("linear", {"window_size": 30}, False),
    ("linear", {"window_size": 30}, True), ("linear", {"feature_map": "exp", "num_features": 6}, True),
    ("flurka_linear", {}, False), ("linear", {"feature_map": "t2r", "window_size": 20}, False),
    ("performer", {}, False), ("flurka_performer", {}, False),
]  # fmt: skip


@pytest.mark.parametrize(("method", "options", "causal"), METHODS)
def test_methods_with_and_without_kernels(kernels, monkeypatch, method, options, causal):
    scale = options.get("scale")
    config = hea.methods.make_config(method, **{k: x for k, x in options.items() if k != "scale"})
    tensors = [x.to(DEVICE).requires_grad_() for x in inputs(2, 3, 150, 12, dtype=torch.float32)]
    mask = (torch.arange(150) < torch.tensor([[150], [100]])).to(DEVICE)
    found = []
    for _ in range(2):
        out = hea.attention(config, *tensors, attention_mask=mask, is_causal=causal, scale=scale).transpose(1, 2)[mask]
        found.append((out, *torch.autograd.grad(out, tensors, numbers(*out.shape).to(out))))
        monkeypatch.setattr(launches, "takes", lambda *tensors: False)
    first, count = ("direction_", 3) if "performer" in method else ("linear_", 4)
    assert len({x.name for x in kernels if x.name.startswith(first)}) == count
    torch.testing.assert_close(*found, rtol=1e-4, atol=2e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts in the interpreter")
@pytest.mark.parametrize("form", [{}, {"causal": True}, {"name": "favor"}])
def test_costs_are_what_the_kernels_move(kernels, monkeypatch, form):
    moved = count_moved(monkeypatch)
    results(make(300, 300, 30, 17, torch.bfloat16, **form))
    assert moved[0] == sum(COSTS[x.name](x).moved for x in kernels)


@pytest.mark.parametrize("form", [{}, {"causal": True}, {"name": "favor"}, {"name": "favor", "masked": True}])
def test_the_check_on_first_use(kernels, form):
    backend = random_features if "name" in form else linear_attention
    linear_attention.check_attend(make(9, 9, 16, 16, **form), backend.BACKEND.attend, with_backward=True)


def test_directions_are_not_rounded(kernels):
    """Rounded once, the directions would change the output by more than the products do."""
    features = maps.favor(128, 0.125, 64, Draws(3, torch.device(DEVICE))).fused
    tensors = (numbers(2, 200, 64, seed=i).to(DEVICE, torch.float16) for i in range(3))
    call = LinearCall(*tensors, None, features, is_causal=False)
    (expected,) = directions_naive(call)
    errors = []
    for directions in (features.directions, features.directions.half().double()):
        out = random_features.BACKEND.attend(call._replace(features=features._replace(directions=directions))).out
        errors.append(((out - expected).norm() / expected.norm()).item())
    assert errors[0] < 4e-4 < errors[1]


@pytest.mark.parametrize("size", [60.0, -60.0])
def test_logs_beyond_the_range_of_float32(kernels, size):
    """Keys and queries whose features would overflow, or underflow for all keys."""
    call = make(40, 50, 16, 16, name="favor", scale=1.0)
    with torch.no_grad():
        call.key.mul_(abs(size))
        call.query.mul_(size)
    check(call, 1e-3)


def test_calls_that_the_kernels_leave_to_others_of_directions(kernels):
    call = make(9, 9, 16, 16, name="favor")
    assert random_features.BACKEND.applies(call)
    assert not random_features.BACKEND.applies(call._replace(is_causal=True))
    assert not random_features.BACKEND.applies(make(9, 9, 129, 16, name="favor"))
