"""Gradients of attention by oneDNN's products."""

import pytest
import torch

from hf_efficient_attn.ops import onednn
from hf_efficient_attn.ops import partial as partial_module
from hf_efficient_attn.ops.partial import partial_attention
from instances import numbers
from test_fused_attention import gradients, naive

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")


@pytest.fixture
def calls(monkeypatch):
    """Take products for small blocks, with several chunks, and count the backward passes."""
    seen = []
    run = partial_module.product_attention_backward
    monkeypatch.setattr(partial_module, "use_product", lambda *_: True)
    monkeypatch.setattr(partial_module, "product_attention_backward", lambda *x: seen.append(x[3]) or run(*x))
    monkeypatch.setattr(onednn, "_LEAST_NUMEL", 0)
    monkeypatch.setattr(onednn, "_PRODUCT_KEYS", 16)
    monkeypatch.setattr(onednn, "_PRODUCT_NUMEL", 16 * 10)
    return seen


@needs_onednn
@pytest.mark.parametrize("both", [False, True], ids=["out", "out and lse"])
@pytest.mark.parametrize("bias", [None, (2, 2, 1, 37), (2, 1, 1, 37), (1, 1, 1, 37)], ids=str)
@pytest.mark.parametrize("blocks", [(2, 2), (1, 1), (2, 1)], ids=str)
@pytest.mark.parametrize("size", [1.0, 60.0])
def test_gradients_by_products(calls, size, blocks, bias, both):
    """Of keys, values and biases that blocks or heads share, and for queries without a key."""
    tensors = [numbers(2, 2, 23, 5), size * numbers(2, blocks[0], 37, 5, seed=1), numbers(2, blocks[1], 37, 3, seed=2)]
    if bias is not None:
        excluded = numbers(*bias, seed=4) > 0.5
        excluded[-1, -1] = True
        tensors.append((6.0 + 3.0 * numbers(*bias, seed=3)).masked_fill(excluded, -torch.inf))
    single = [x.float() for x in tensors]
    part, grads = gradients(partial_attention, single, both)
    expected, expected_grads = gradients(naive, [x.double() for x in single], both)
    torch.testing.assert_close(part.out.double(), expected.out, rtol=1e-3, atol=1e-4)
    for ours, exact, x in zip(grads, expected_grads, single, strict=True):
        wanted = exact.masked_fill(x == -torch.inf, 0.0)
        assert (ours - wanted).abs().max() < 3e-5 * size * (1.0 + wanted.abs().max())
    assert calls == [bias is not None]


@needs_onednn
def test_a_bias_of_pairs_has_no_gradient_by_products(calls):
    tensors = [
        numbers(2, 1, 8, 4),
        numbers(2, 1, 9, 4, seed=1),
        numbers(2, 1, 9, 4, seed=2),
        numbers(2, 1, 8, 9, seed=3),
    ]
    _, grads = gradients(partial_attention, [x.float() for x in tensors], True)
    _, expected = gradients(naive, [x.double() for x in tensors], True)
    for ours, exact in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5)
    assert not calls
