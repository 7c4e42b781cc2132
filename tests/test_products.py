"""Products in the input's dtype, few kernels on accelerators, and training without the features of all tokens."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import hf_efficient_attn as hea
from hf_efficient_attn.ops import feature_scan, precision
from hf_efficient_attn.ops.accelerator import use_backend
from hf_efficient_attn.ops.feature_attention import FeatureKernel
from hf_efficient_attn.ops.feature_scan import causal_feature_attention
from hf_efficient_attn.ops.features import key_state
from hf_efficient_attn.ops.landmarks import iterative_pinv
from hf_efficient_attn.ops.linear_attention import key_features, query_features, trained_linear_attention
from hf_efficient_attn.ops.partial import Partial, merge
from hf_efficient_attn.ops.precision import attention_dtype, product_dtype, sum_dtype
from instances import inputs, relative_error

FORMS = [
    ("linear", False), ("linear", True), ("performer", False), ("performer", True), ("nystromformer", False),
    ("linformer", False), ("flurka_linear", False), ("flurka_performer", False),
]  # fmt: skip


@pytest.fixture
def _half_products(monkeypatch):
    """Bfloat16 products whatever the processor is."""
    monkeypatch.setattr(precision, "_CPU_HAS_BFLOAT16", True)
    monkeypatch.setattr(precision, "_CPU_HAS_MATRIX_UNITS", True)


@pytest.mark.usefixtures("_half_products")
def test_dtype_of_products(monkeypatch):
    half, single, double = torch.bfloat16, torch.float32, torch.float64
    x = torch.ones(2)
    assert [product_dtype(x.to(t)) for t in (half, torch.float16, single, double)] == [half, single, single, double]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert product_dtype(x) == attention_dtype(x) == half
    finally:
        torch.set_float32_matmul_precision(before)
    on_device = x.to("meta", torch.float16)
    assert product_dtype(on_device) == torch.float16
    assert sum_dtype(on_device) == single
    monkeypatch.setattr(precision, "_CPU_HAS_MATRIX_UNITS", False)
    assert attention_dtype(x.to(half)) == single
    monkeypatch.setattr(precision, "_CPU_HAS_BFLOAT16", False)
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


@pytest.mark.parametrize(("method", "is_causal"), FORMS)
def test_library_form_equals_that_of_the_cpu(method, is_causal):
    tensors = [x.requires_grad_() for x in inputs(2, 1, 2200, 8, dtype=torch.float64)]
    mask = torch.arange(2200) < torch.tensor([[1900], [2200]])
    config = hea.method_info(method).config_class()

    def run() -> list[Tensor]:
        out = hea.attention(config, *tensors, attention_mask=mask, is_causal=is_causal)
        return [out, *torch.autograd.grad(out.square().sum(), tensors)]

    expected = run()
    with use_backend("library"):
        torch.testing.assert_close(run(), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_causal_performer_in_training(monkeypatch, dropout_p):
    """Computed segment by segment, gradients are those of all tokens together, and autograd keeps few numbers."""
    tensors = [x.requires_grad_() for x in inputs(1, 2, 300, 8, dtype=torch.float64)]
    config, saved = hea.PerformerConfig(num_features=32), {}

    def keep(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    def run(tokens: int) -> list[Tensor]:
        monkeypatch.setattr(feature_scan, "_SEGMENT_NUMEL", tokens * 2 * 32)
        saved.clear()
        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = hea.attention(config, *tensors, is_causal=True, dropout_p=dropout_p)
        torch.manual_seed(1)
        return [out, *torch.autograd.grad(out.square().sum(), tensors)]

    whole = run(300)
    blocks = run(128)
    # Less than the features of queries and keys alone.
    assert sum(saved.values()) < 2 * (2 * 300 * 32) * 8
    again = run(128)
    torch.testing.assert_close(again, blocks, rtol=0.0, atol=0.0)
    if dropout_p == 0.0:
        torch.testing.assert_close(blocks, whole)
        return
    # The masks differ from those of one block. Those of the backward pass are those of the forward pass.
    change = [torch.randn_like(x) for x in tensors]
    slope = sum((g * d).sum() for g, d in zip(blocks[1:], change, strict=True))
    values = []
    for step in (1e-6, -1e-6):
        torch.manual_seed(0)
        moved = [(x + step * d).detach().requires_grad_() for x, d in zip(tensors, change, strict=True)]
        values.append(hea.attention(config, *moved, is_causal=True, dropout_p=dropout_p).square().sum())
    torch.testing.assert_close((values[0] - values[1]) / 2e-6, slope, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["cpu", "library"])
def test_causal_performer_in_segments(monkeypatch, form):
    """Several segments and groups of features, and a state before them, are all tokens together."""
    monkeypatch.setattr(feature_scan, "_MAX_CHUNKS", 2)
    monkeypatch.setattr(feature_scan, "_SEGMENT_NUMEL", 256 * 2 * 20)
    monkeypatch.setattr(feature_scan, "_GROUP_NUMEL", 256 * 2 * 8)
    tensors = [x[0].requires_grad_() for x in inputs(1, 2, 600, 6, value_dim=5, dtype=torch.float64)]
    mask = torch.arange(600) % 7 != 3
    mask[:140] = False
    kernel = FeatureKernel(torch.randn(20, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), -0.4)

    def attend(start: int, end: int, state: Partial | None) -> tuple[Tensor, Partial]:
        query, key, value = (x[:, start:end] for x in tensors)
        own_mask = mask[start:end].expand(2, -1)
        keys, values, bias = kernel.scale_key(key, value, own_mask)
        after = key_state(keys[:, None], values[:, None], kernel.features, bias[:, None, None])
        options = {"kernel": kernel, "dropout_p": 0.0, "initial_state": state}
        return causal_feature_attention(query, key, value, own_mask, **options), Partial(*(x[:, 0] for x in after))

    def run(*cuts: int) -> list[Tensor]:
        outs, state = [], None
        for start, end in itertools.pairwise((0, *cuts, 600)):
            out, after = attend(start, end, state)
            outs.append(out)
            state = after if state is None else merge(state, after)
        out = torch.cat(outs, 1)
        return [out, *torch.autograd.grad(out.square().sum(), tensors)]

    # The readable form.
    query, (keys, values, bias) = kernel.scale_query(tensors[0]), kernel.scale_key(*tensors[1:], mask.expand(2, -1))
    logs = (query @ kernel.features.t())[:, :, None] + (keys @ kernel.features.t())[:, None]
    scores = (logs.logsumexp(3) + bias[:, None]).masked_fill(torch.ones(600, 600).triu(1).bool(), -1e30)
    expected = (scores.clamp(min=-1e30).softmax(2) * mask.cumsum(0).bool()[:, None]) @ values
    expected = [expected, *torch.autograd.grad(expected.square().sum(), tensors)]
    with use_backend(form):
        torch.testing.assert_close(run(), expected, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(run(300, 345), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("form", ["cpu", "library"])
def test_gradients_of_causal_linear_attention_with_a_state(form):
    """Those of autograd through the readable form, for the state before the tokens as well."""
    tensors = [x[0].requires_grad_() for x in inputs(1, 2, 300, 6, value_dim=5, dtype=torch.float64)]
    state = [x[0].abs().requires_grad_() for x in inputs(1, 2, 6, 5, dtype=torch.float64)[:1]]
    state.append(state[0].detach().sum(2).requires_grad_())
    mask = (torch.arange(300) % 7 != 3).expand(2, -1)

    def run(fast: bool) -> list[Tensor]:
        if fast:
            out = trained_linear_attention(*tensors, mask, *state, scale=0.7, is_causal=True)
        else:
            phi_q, phi_k = query_features(tensors[0], 0.7), key_features(tensors[1], mask)
            weights = (phi_q @ phi_k.mT).tril()
            total = weights.sum(2, keepdim=True) + phi_q @ state[1].unsqueeze(2)
            out = (weights @ tensors[2] + phi_q @ state[0]) / total
        return [out, *torch.autograd.grad(out.square().sum(), (*tensors, *state))]

    with use_backend(form):
        torch.testing.assert_close(run(True), run(False), rtol=1e-9, atol=1e-10)


def test_gradient_of_the_iteration():
    matrix = torch.rand(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: iterative_pinv(x, 4), matrix)
