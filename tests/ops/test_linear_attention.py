"""Linear attention by Triton kernels, on a GPU or in Triton's interpreter: against float64, and in the methods."""

import importlib.util

import pytest
import torch

import hf_efficient_attn as hea
from hf_efficient_attn.ops.backends import launches, linear_attention
from hf_efficient_attn.ops.backends.backend import FusedFeatures, LinearCall
from hf_efficient_attn.ops.features import maps
from instances import inputs, numbers
from recipes.common.kernel_costs import COSTS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install 'hf_efficient_attn[gpu-test]'"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture
def kernels(monkeypatch):
    """Let the kernels take the tensors of the tests. Returns the list of their launches."""
    launched = []
    launch = launches.launch

    def record(call):
        launched.append(call)
        launch(call)

    monkeypatch.setattr(launches, "takes", lambda *tensors: True)
    monkeypatch.setattr(launches, "passes_check", lambda *_: True)
    monkeypatch.setattr(launches, "launch", record)
    return launched


def same(x):
    return x


def make(
    q_len, kv_len, dim, value_dim, dtype=torch.float32, masked=False, *, causal=False, name="elu", factor=1.0, **how
):
    """A call whose tensors have gradients, and whose masked keys and values are NaN."""
    sizes = ((q_len, dim), (kv_len, dim), (kv_len, value_dim))
    query, key, value = (numbers(3, *size, seed=i).to(DEVICE, dtype) for i, size in enumerate(sizes))
    if name == "elu":
        query[:, ::7] -= 60.0  # features of whole queries would underflow
    mask = None
    if masked:
        mask = (numbers(3, kv_len, seed=5) > -0.5).to(DEVICE)
        mask[0, : kv_len // 2] = False
        key, value = (x.masked_fill(~mask.unsqueeze(2), torch.nan) for x in (key, value))
    tensors = (x.requires_grad_() for x in (query, key, value))
    return LinearCall(*tensors, mask, FusedFeatures(name, dim, factor, same, same), causal, **how)


def results(call, attend):
    """Out, lse and the gradients, and which queries have no keys."""
    out, lse = attend(call)
    empty = lse == -torch.inf
    grads = [numbers(*x.shape, seed=7).to(x.device, x.dtype) for x in (out, lse)]
    found = torch.autograd.grad((out, lse), call[:3], grads)
    return out, lse.masked_fill(empty, 0.0), *found, empty


def check(call, tolerance):
    clean = [x.detach().double().nan_to_num(0.0).requires_grad_() for x in call[:3]]
    expected = results(LinearCall(*clean, *call[3:]), linear_attention.linear_attention_naive)
    found = results(call, linear_attention.BACKEND.attend)
    assert torch.equal(found[-1], expected[-1])
    for x, y, name in zip(found, expected, ("out", "lse", "query", "key", "value"), strict=False):
        size = y.abs().amax().clamp(min=1.0)
        assert ((x.double() - y).abs().amax() / size).item() < tolerance, name


FORMS = [{}, {"masked": True, "factor": 1.7}, {"causal": True}, {"causal": True, "masked": True, "factor": 0.6}]
FORMS += [{"causal": True, "masked": True, "distance": 70, "is_reversed": reverse} for reverse in (False, True)]


@pytest.mark.parametrize("form", FORMS)
def test_outputs_lse_and_gradients(kernels, form):
    check(make(300, 300 if "causal" in form else 97, 30, 17, **form), 1e-5)
    assert [x.name for x in kernels] == [
        "linear_state", "linear_output", "linear_query_gradient", "linear_state", "linear_key_gradient"
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("causal", [False, True])
def test_half_precision(kernels, causal, dtype):
    check(make(300, 300, 20, 40, dtype, causal=causal), HALF[dtype])


@pytest.mark.parametrize("name", maps.LEARNED)
@pytest.mark.parametrize("causal", [False, True])
def test_learned_features(kernels, name, causal):
    check(make(70, 70, 20, 16, masked=True, causal=causal, name=name), 1e-5)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (130, 64, 128, 128), (65, 300, 100, 3)])
def test_sizes(kernels, sizes):
    check(make(*sizes, torch.bfloat16), HALF[torch.bfloat16])


def test_weights_that_underflow_have_no_output_and_no_gradient(kernels):
    call = make(40, 50, 16, 16)
    with torch.no_grad():
        call.key.copy_(-80.0 - call.key.abs())
        call.key[0] = 1.0
    out, _, *grads, empty = results(call, linear_attention.BACKEND.attend)
    assert not empty[0].any() and empty[1:].all() and (out[1:] == 0).all()
    assert all(x.isfinite().all() and (x[1:] == 0).all() and (x[0] != 0).any() for x in grads)


def test_range_of_float16(kernels):
    """The sums over 2,000 keys exceed 65,504."""
    call = make(10, 2000, 16, 16, torch.float16)
    with torch.no_grad():
        call.value.copy_(1000.0 + call.value)
    out, lse, *grads, _ = results(call, linear_attention.BACKEND.attend)
    assert all(x.isfinite().all() for x in (out, lse, *grads)) and (out.double() / 1000.0 - 1.0).abs().max() < 0.01


METHODS = [
    ("linear", {}, False), ("linear", {"scale": 0.5}, True), ("linear", {"window_size": 30}, False),
    ("linear", {"window_size": 30}, True), ("linear", {"feature_map": "exp", "num_features": 6}, True),
    ("flurka_linear", {}, False), ("linear", {"feature_map": "t2r", "window_size": 20}, False),
]  # fmt: skip


@pytest.mark.parametrize(("method", "options", "causal"), METHODS)
def test_methods_with_and_without_kernels(kernels, monkeypatch, method, options, causal):
    scale = options.get("scale")
    config = hea.methods.make_config(method, **{k: x for k, x in options.items() if k != "scale"})
    tensors = [x.to(DEVICE).requires_grad_() for x in inputs(2, 3, 150, 12, dtype=torch.float32)]
    mask = torch.ones(2, 150, dtype=torch.bool, device=DEVICE)
    mask[1, 100:] = False
    found = []
    for _ in range(2):
        out = hea.attention(config, *tensors, attention_mask=mask, is_causal=causal, scale=scale)[
            mask[:, None].expand(-1, 3, -1)
        ]
        found.append((out, *torch.autograd.grad(out, tensors, numbers(*out.shape).to(out))))
        monkeypatch.setattr(launches, "takes", lambda *tensors: False)
    assert len({x.name for x in kernels if x.name.startswith("linear_")}) == 4
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts in the interpreter")
@pytest.mark.parametrize("form", [{"masked": False}, {"causal": True, "masked": False}])
def test_costs_are_what_the_kernels_move(kernels, monkeypatch, form):
    from triton.runtime.interpreter import InterpreterBuilder

    moved = 0

    def counted(function, position):
        def call(self, pointers, *arguments):
            nonlocal moved
            moved += int(arguments[position].data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
            return function(self, pointers, *arguments)

        return call

    for name, position in (("load", 0), ("store", 1)):
        function = getattr(InterpreterBuilder, f"create_masked_{name}")
        monkeypatch.setattr(InterpreterBuilder, f"create_masked_{name}", counted(function, position))
    results(make(300, 300, 30, 17, torch.bfloat16, **form), linear_attention.BACKEND.attend)
    assert moved == sum(COSTS[x.name](x).moved for x in kernels)


def test_the_check_on_first_use(kernels):
    for causal in (False, True):
        call = make(9, 9, 16, 16, causal=causal)
        linear_attention.check_attend(call, linear_attention.BACKEND.attend, with_backward=True)
