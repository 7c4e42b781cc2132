"""Random features by Triton kernels, on a GPU or in Triton's interpreter: against float64, and in the methods."""

import importlib.util

import pytest
import torch

import hf_efficient_attn as hea
from hf_efficient_attn.ops.backends import launches, linear_attention, random_features
from hf_efficient_attn.ops.backends.backend import LinearCall
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.features.maps import favor
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


def make(q_len, kv_len, dim, value_dim, dtype=torch.float32, masked=False, *, count=70, scale=0.25):
    """A call whose tensors have gradients. Masked keys and values are NaN, and all keys of a head are masked."""
    sizes = ((q_len, dim), (kv_len, dim), (kv_len, value_dim))
    query, key, value = (numbers(2, *size, seed=i).to(DEVICE, dtype) for i, size in enumerate(sizes))
    mask = None
    if masked:
        mask = (numbers(2, kv_len, seed=5) > -0.5).to(DEVICE)
        mask[0, : kv_len // 2] = False
        mask[1] = False
        key, value = (x.masked_fill(~mask.unsqueeze(2), torch.nan) for x in (key, value))
    features = favor(count, scale, dim, Draws(3, torch.device(DEVICE))).fused
    return LinearCall(*(x.requires_grad_() for x in (query, key, value)), mask, features, is_causal=False)


def naive(call):
    """The output in float64: the directions attend to the keys, and the queries to the directions."""
    scale, directions = call.features.scale, call.features.directions.double()
    query, key, value = (x.double() for x in call[:3])
    log = directions @ key.mT - 0.5 * abs(scale) * key.square().sum(2).unsqueeze(1)  # (BH, F, Nk)
    if call.key_mask is not None:
        log = log.masked_fill(~call.key_mask.unsqueeze(1), -1e30)
    logs = query @ directions.T * (1.0 if scale > 0 else -1.0) + log.logsumexp(2).unsqueeze(1)  # (BH, Nq, F)
    out = logs.softmax(2) @ (log.softmax(2) @ value)
    return out if call.key_mask is None else out * call.key_mask.any(1).view(-1, 1, 1)


def results(call, attend):
    out = attend(call)
    return out, *torch.autograd.grad(out, call[:3], numbers(*out.shape, seed=7).to(out))


def check(call, tolerance):
    assert random_features.BACKEND.applies(call)
    clean = [x.detach().double().nan_to_num(0.0).requires_grad_() for x in call[:3]]
    expected = results(LinearCall(*clean, *call[3:]), naive)
    found = results(call, lambda call: random_features.BACKEND.attend(call).out)
    for x, y, name in zip(found, expected, ("out", "query", "key", "value"), strict=True):
        size = y.abs().amax().clamp(min=1.0)
        assert ((x.double() - y).abs().amax() / size).item() < tolerance, name


@pytest.mark.parametrize("form", [{}, {"masked": True}, {"scale": -0.3, "masked": True}])
def test_output_and_gradients(kernels, form):
    check(make(130, 300, 30, 17, **form), 1e-5)


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision(kernels, dtype):
    check(make(130, 300, 64, 64, dtype, masked=True, scale=0.125, count=64), HALF[dtype])


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (40, 64, 128, 100), (65, 20, 30, 128)])
def test_sizes(kernels, sizes):
    check(make(*sizes, torch.bfloat16), HALF[torch.bfloat16])


def test_directions_are_not_rounded(kernels):
    """Rounded once, the directions would change the output by more than the products do."""
    features = favor(128, 0.125, 64, Draws(3, torch.device(DEVICE))).fused
    tensors = (numbers(2, 200, 64, seed=i).to(DEVICE, torch.float16) for i in range(3))
    call = LinearCall(*tensors, None, features, is_causal=False)
    expected = naive(call)
    errors = []
    for directions in (features.directions, features.directions.half().double()):
        changed = call._replace(features=features._replace(directions=directions))
        out = random_features.BACKEND.attend(changed).out
        errors.append(((out - expected).norm() / expected.norm()).item())
    assert errors[0] < 4e-4 < errors[1]


@pytest.mark.parametrize("size", [60.0, -60.0])
def test_logs_beyond_the_range_of_float32(kernels, size):
    """Keys and queries whose features would overflow, or underflow for all keys."""
    call = make(40, 50, 16, 16, scale=1.0)
    with torch.no_grad():
        call.key.mul_(abs(size))
        call.query.mul_(size)
    check(call, 1e-3)


@pytest.mark.parametrize("method", ["performer", "flurka_performer"])
def test_methods_with_and_without_kernels(kernels, monkeypatch, method):
    tensors = [x.to(DEVICE).requires_grad_() for x in inputs(2, 3, 150, 12, dtype=torch.float32)]
    mask = torch.ones(2, 150, dtype=torch.bool, device=DEVICE)
    mask[1, 100:] = False
    found = []
    for _ in range(2):
        out = hea.attention(method, *tensors, attention_mask=mask)[mask[:, None].expand(-1, 3, -1)]
        found.append((out, *torch.autograd.grad(out, tensors, numbers(*out.shape).to(out))))
        monkeypatch.setattr(launches, "takes", lambda *tensors: False)
    assert len({x.name for x in kernels if x.name.startswith("direction_")}) == 3
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=2e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts in the interpreter")
def test_costs_are_what_the_kernels_move(kernels, monkeypatch):
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
    results(make(300, 300, 30, 17, torch.bfloat16), lambda call: random_features.BACKEND.attend(call).out)
    assert moved == sum(COSTS[x.name](x).moved for x in kernels)


@pytest.mark.parametrize("masked", [False, True])
def test_the_check_on_first_use(kernels, masked):
    call = make(9, 9, 16, 16, masked=masked)
    linear_attention.check_attend(call, random_features.BACKEND.attend, with_backward=True)


def test_calls_that_the_kernels_leave_to_others(kernels, monkeypatch):
    call = make(9, 9, 16, 16)
    assert random_features.BACKEND.applies(call)
    assert not random_features.BACKEND.applies(call._replace(is_causal=True))
    assert not random_features.BACKEND.applies(make(9, 9, 129, 16))
    monkeypatch.undo()
    monkeypatch.setenv("HEA_KERNELS", "plain")
    assert not random_features.BACKEND.applies(call)
