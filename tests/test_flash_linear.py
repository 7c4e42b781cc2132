"""Causal sums by flash-linear-attention: its kernels in Triton's interpreter, and the forms that call it."""

import contextlib
import importlib.util
import sys
import types

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import hf_efficient_attn as hea
from hf_efficient_attn.methods._shared.registry import AttentionOptions, get_method
from hf_efficient_attn.ops import flash_linear
from hf_efficient_attn.ops.accelerator import use_backend
from instances import inputs, padding_mask


def sums_naive(
    phi_q: Tensor, phi_k: Tensor, value: Tensor, initial: Tensor | None = None, decay: Tensor | None = None
) -> Tensor:
    """The recurrence, token by token."""
    state = value.new_zeros(phi_k.shape[0], phi_k.shape[2], value.shape[2]) if initial is None else initial
    outs = []
    for i in range(value.shape[1]):
        if decay is not None:
            state = state * (-decay[:, i, None, None]).exp()
        state = state + phi_k[:, i, :, None] * value[:, i, None]
        outs.append((phi_q[:, i, None] @ state)[:, 0])
    return torch.stack(outs, 1)


@pytest.fixture
def interpreter(monkeypatch):
    """The package's kernels on the CPU. It asks for a CUDA device, and its autotuner for a clock, in vain."""
    if importlib.util.find_spec("fla") is None:
        pytest.skip("needs flash-linear-attention: pip install 'hf_efficient_attn[gpu-test]'")
    if torch.cuda.is_available():
        return
    from triton.runtime.autotuner import Autotuner

    monkeypatch.setattr(torch.cpu, "device", lambda index: contextlib.nullcontext(), raising=False)
    monkeypatch.setattr(Autotuner, "do_bench", lambda self, kernel_call, quantiles: [1.0] * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("has_decay", [False, True])
@pytest.mark.parametrize("has_initial", [False, True])
@pytest.mark.usefixtures("interpreter")
def test_the_kernels_compute_the_recurrence_and_its_gradient(dtype, has_decay, has_initial):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 131, 20), (3, 131, 20), (3, 131, 24)] + [(3, 20, 24)] * has_initial
    exact = [torch.rand(shape, generator=generator).to(dtype).double().requires_grad_() for shape in shapes]
    ours = [x.detach().to(device, dtype).requires_grad_() for x in exact]
    decay = torch.rand(3, 131, generator=generator) if has_decay else None
    if decay is not None:
        decay[:, 70] = 1e30  # as before the first token that is not masked
        decay[:, 80] = 300.0
    grad = torch.randn(3, 131, 24, generator=generator)
    out = flash_linear.causal_sums(
        *ours[:3], ours[3] if has_initial else None, None if decay is None else decay.to(device)
    )
    expected = sums_naive(*exact[:3], exact[3] if has_initial else None, None if decay is None else decay.double())
    tolerance = 2e-3 if dtype == torch.float16 or device == "cuda" else 2e-5
    out.backward(grad.to(out))
    expected.backward(grad.double())
    for name, got, wanted in [("out", out, expected)] + [
        (str(i), x.grad, y.grad) for i, (x, y) in enumerate(zip(ours, exact, strict=True))
    ]:
        error = (got.cpu().double() - wanted).norm() / wanted.norm()
        assert error < tolerance, f"{name}: {error}"


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The names of the functions of the package that are called. The recurrence takes their place."""
    called: list[str] = []

    def function(name: str):
        def compute(q, k, v, g=None, *, scale, initial_state, normalize=False):
            called.append(name)
            assert q.shape[2] == k.shape[2] == v.shape[2] == 1
            assert scale == 1.0
            state = None if initial_state is None else initial_state[:, 0].to(q.dtype)
            out = sums_naive(*(x[:, :, 0] for x in (q, k, v)), state, None if g is None else -g[..., 0].to(q.dtype))
            return out.unsqueeze(2), None

        return compute

    for name, attribute in (("linear_attn", "chunk_linear_attn"), ("simple_gla", "chunk_simple_gla")):
        module = types.ModuleType(f"fla.ops.{name}")
        setattr(module, attribute, function(attribute))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(flash_linear, "serves", lambda x, num_features: True)
    return called


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("method", ["linear", "performer"])
def test_methods_that_call_it(method, padding, calls, monkeypatch):
    """The output is that of the naive form, and the gradient that of the package's own scan, in float64."""
    tensors = [x.requires_grad_() for x in inputs(2, 2, 61, 8, value_dim=12, dtype=torch.float64)]
    mask = padding_mask(padding, 2, 61)
    grad = torch.randn(2, 2, 61, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def attend(form=hea.attention) -> Tensor:
        config = hea.method_info(method).config_class()
        return form(config, *tensors, attention_mask=mask, is_causal=True, scale=0.4, seed=3)

    out = attend()
    ours = [out.detach(), *torch.autograd.grad(out, tensors, grad)]
    with torch.no_grad(), use_backend("library"):
        torch.testing.assert_close(attend(), ours[0])
    assert calls == [{"linear": "chunk_linear_attn", "performer": "chunk_simple_gla"}[method]] * 2
    monkeypatch.setattr(flash_linear, "serves", lambda x, num_features: False)
    expected = [attend(hea.naive_attention).detach(), *torch.autograd.grad(attend(), tensors, grad)]
    for x, y in zip(ours, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)  # decays are float32


@pytest.mark.parametrize("method", ["linear", "performer"])
def test_a_state_of_earlier_tokens(method, calls):
    """The second half after the first one is the second half of the whole."""
    config = hea.method_info(method).config_class()
    query, key, value = inputs(2, 2, 40, 8, dtype=torch.float64)
    with use_backend("library"):
        whole = hea.attention(config, query, key, value, is_causal=True, seed=0)
        options = AttentionOptions(None, True, 8**-0.5, 0.0, 0, {})
        recurrence = get_method(method).recurrence
        first, second = ([x[:, :, half] for x in (query, key, value)] for half in (slice(25), slice(25, None)))
        state = recurrence.update(config, None, *first[1:], options)
        out = recurrence.forward(config, *second, options, state)
    torch.testing.assert_close(out, whole[:, :, 25:])
    assert len(calls) == 2


def test_what_the_package_serves(monkeypatch):
    """Only bfloat16 on GPUs, where Triton runs, if it is installed."""
    monkeypatch.setattr(flash_linear, "_is_installed", lambda: True)
    with FakeTensorMode():  # tensors of a device that need not exist
        half = torch.empty(2, 3, 4, dtype=torch.bfloat16, device="cuda")
        many = torch.empty(65_536, 1, 1, dtype=torch.bfloat16, device="cuda")
        with use_backend("library"):
            assert not flash_linear.serves(half, 64)
        with use_backend("triton"):
            assert flash_linear.serves(half, 64)
            assert not flash_linear.serves(half, 512)
            assert not flash_linear.serves(half.float(), 64)
            assert not flash_linear.serves(many, 64)
            assert not flash_linear.serves(torch.empty(2, 3, 4, dtype=torch.bfloat16), 64)
            monkeypatch.setattr(flash_linear, "_is_installed", lambda: False)
            assert not flash_linear.serves(half, 64)
