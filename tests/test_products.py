"""Products in the input's dtype, few kernels on accelerators, and training without the features of all tokens."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import hf_efficient_attn as hea
from hf_efficient_attn.ops import attend
from hf_efficient_attn.ops.attend import product_dtype, sum_dtype
from hf_efficient_attn.ops.landmarks import iterative_pinv
from instances import inputs, relative_error

FORMS = [
    ("linear", False), ("linear", True), ("performer", False), ("performer", True), ("nystromformer", False),
    ("linformer", False), ("flurka_linear", False), ("flurka_performer", False),
]  # fmt: skip


@pytest.fixture
def _half_products(monkeypatch):
    """Bfloat16 products whatever the processor is."""
    monkeypatch.setattr(attend, "_CPU_HAS_BFLOAT16", True)


@pytest.mark.usefixtures("_half_products")
def test_dtype_of_products(monkeypatch):
    half, single, double = torch.bfloat16, torch.float32, torch.float64
    x = torch.ones(2)
    assert [product_dtype(x.to(t)) for t in (half, torch.float16, single, double)] == [half, single, single, double]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert product_dtype(x) == half
    finally:
        torch.set_float32_matmul_precision(before)
    on_device = x.to("meta", torch.float16)
    assert product_dtype(on_device) == torch.float16
    assert sum_dtype(on_device) == single
    monkeypatch.setattr(attend, "_CPU_HAS_BFLOAT16", False)
    assert product_dtype(x.to(half)) == single


@pytest.mark.usefixtures("_half_products")
@pytest.mark.parametrize(("method", "is_causal"), [form for form in FORMS if "performer" not in form[0]])
def test_error_of_bfloat16_products(method, is_causal):
    """Against float64, at most three times that of exact attention in bfloat16, and not the one of float32 products."""
    query, key, value = inputs(1, 2, 1500, 64, dtype=torch.bfloat16)
    double = [x.double() for x in (query, key, value)]
    config = hea.method_info(method).config_class()
    with torch.no_grad():
        exact = scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        limit = 3 * relative_error(exact, scaled_dot_product_attention(*double, is_causal=is_causal))
        reference = hea.attention(config, *double, is_causal=is_causal)
        out = hea.attention(config, query, key, value, is_causal=is_causal)
        single = hea.attention(config, *(x.float() for x in (query, key, value)), is_causal=is_causal)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, reference) < limit
    assert not torch.equal(out, single.bfloat16())


def test_gradient_of_the_iteration():
    matrix = torch.rand(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: iterative_pinv(x, 4), matrix)
