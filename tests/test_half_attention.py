"""Attention over blocks in half precision on the CPU: bfloat16 products, float16 in float32."""

import pytest
import torch
from torch import Tensor

import hf_efficient_attn as hea
from hf_efficient_attn.methods import attention_with_state, make_config
from hf_efficient_attn.ops import half_attention, precision
from hf_efficient_attn.ops import partial as partial_module
from hf_efficient_attn.ops.partial import partial_attention, partial_attention_naive
from instances import numbers
from test_fused_attention import gradients, naive

_BLOCKS, _QUERIES, _KEYS, _DIM = 5, 24, 40, 16


@pytest.fixture
def products(monkeypatch):
    """Take the form of processors with bfloat16 products and without AMX, for small blocks, with several chunks."""
    monkeypatch.setattr(precision, "_CPU_HAS_BFLOAT16", True)
    monkeypatch.setattr(precision, "_CPU_HAS_MATRIX_UNITS", False)
    monkeypatch.setattr(half_attention, "_LEAST_OF_BLOCK", 0)
    monkeypatch.setattr(half_attention, "_LEAST_NUMEL", 0)
    monkeypatch.setattr(half_attention, "_LEAST_ROWS", 1)
    calls = []
    for name in ("half_attention", "half_attention_backward"):
        run = getattr(half_attention, name)
        monkeypatch.setattr(partial_module, name, lambda *x, run=run, name=name: calls.append(name) or run(*x))
    return calls


def inputs(keys: int, bias: tuple[int, ...] | None, value_dim: int = _DIM) -> list[Tensor]:
    """Query, key, value and bias. The scores are up to 20, log-weights about 6 +- 3."""
    query, key = 5.0 * numbers(2, _BLOCKS, _QUERIES, _DIM), numbers(2, keys, _KEYS, _DIM, seed=1)
    tensors = [query.bfloat16(), key.bfloat16(), numbers(2, keys, _KEYS, value_dim, seed=2).bfloat16()]
    if bias is not None:
        excluded = numbers(*bias, seed=4) > 0.5
        excluded[-1, -1, -1] = True  # a query without a key
        added = 6.0 + 3.0 * numbers(*bias, seed=3) if bias[2] == 1 else torch.zeros(bias)
        tensors.append(added.float().masked_fill(excluded, -torch.inf))
    return tensors


BIASES = [None, (2, _BLOCKS, 1, _KEYS), (2, 1, 1, _KEYS), (1, 1, _QUERIES, _KEYS), (2, _BLOCKS, _QUERIES, _KEYS)]


def error(ours: Tensor, exact: Tensor) -> Tensor:
    """Relative to the norm, without what is infinite in both."""
    assert torch.equal(ours == -torch.inf, exact == -torch.inf)
    ours, exact = (x.double().masked_fill(x == -torch.inf, 0.0) for x in (ours, exact))
    return (ours - exact).norm() / exact.norm()


@pytest.mark.parametrize("chunk", [1 << 19, 1500, 500], ids=["whole", "blocks", "rows"])
@pytest.mark.parametrize("value_dim", [_DIM, 11])
@pytest.mark.parametrize("bias", BIASES, ids=str)
@pytest.mark.parametrize("keys", [_BLOCKS, 1])
def test_bfloat16_products_give_partial_attention(products, monkeypatch, keys, bias, value_dim, chunk):
    monkeypatch.setattr(half_attention, "_SCORES_NUMEL", chunk)
    given = inputs(keys, bias, value_dim)
    leaves = given[:3] if bias is not None and bias[2] > 1 else given
    rest = given[len(leaves) :]
    part, grads = gradients(lambda *x, scale: partial_attention(*x, *rest, scale=scale), leaves, True)
    expected, expected_grads = gradients(
        lambda *x, scale: naive(*x, *(y.double() for y in rest), scale=scale), [x.double() for x in leaves], True
    )
    assert part.out.dtype == torch.bfloat16 and part.lse.dtype == torch.float32
    assert error(part.out, expected.out) < 4e-3
    assert (part.lse - expected.lse).nan_to_num().abs().max() < 0.01  # as the mean of roundings of 0.004
    for got, wanted, x in zip(grads, expected_grads, leaves, strict=True):
        assert got.dtype == x.dtype
        assert error(got, wanted.masked_fill(x == -torch.inf, 0.0)) < 0.012
    assert products == ["half_attention", "half_attention_backward"]


def test_the_error_is_at_most_three_times_that_of_exact_attention(products):
    """Also if the scores are large, which one product with a bfloat16 result would round by up to 0.25."""
    for factor in (0.1, 1.0, 3.0, 10.0):
        query, key, value = inputs(_BLOCKS, None)
        query = query * factor
        ours = partial_attention(query, key, value, scale=0.25).out
        exact = partial_attention_naive(query.double(), key.double(), value.double(), scale=0.25).out
        same_dtype = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=0.25)
        assert error(ours, exact) <= 3.0 * error(same_dtype, exact)
    assert len(products) == 4


def test_a_bias_of_pairs_that_is_no_mask_is_not_rounded(products):
    query, key, value, bias = inputs(_BLOCKS, (2, _BLOCKS, _QUERIES, _KEYS))
    bias = bias.clamp(min=-3.0)
    part = partial_attention(query, key, value, bias, scale=0.25)
    exact = partial_attention_naive(query.double(), key.double(), value.double(), bias.double(), scale=0.25)
    assert error(part.lse, exact.lse) < 1e-5
    assert not products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_medium_precision_selects_bfloat16_products(products, dtype):
    given = [x.to(dtype) for x in inputs(_BLOCKS, (2, _BLOCKS, 1, _KEYS))]
    given[3] = given[3].float()
    high, _ = gradients(partial_attention, given, True)
    before = len(products)
    precision_of_user = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        part, grads = gradients(partial_attention, given, True)
    finally:
        torch.set_float32_matmul_precision(precision_of_user)
    heads = 2 if dtype == torch.float32 else 1  # copied one at a time
    assert products[before:] == ["half_attention"] * heads + ["half_attention_backward"]
    assert before == (0 if dtype == torch.float32 else 2)
    assert [x.dtype for x in (*part, *grads)] == [dtype, torch.float32, *(x.dtype for x in given)]
    assert error(part.out, high.out) < 4e-3


def test_with_amx_the_fused_kernel_runs(products, monkeypatch):
    monkeypatch.setattr(precision, "_CPU_HAS_MATRIX_UNITS", True)
    query, key, value = inputs(_BLOCKS, None)
    partial_attention(query, key, value, scale=0.25)
    assert not products
    partial_attention(query, key, value[..., :8], scale=0.25)  # which needs as many dimensions of the values
    assert products == ["half_attention"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_without_products_of_the_dtype_they_run_in_float32(products, monkeypatch, dtype):
    """One head at a time, and the result is as accurate as its dtype."""
    monkeypatch.setattr(precision, "_CPU_HAS_BFLOAT16", False)
    seen = []
    run = partial_module._forward_on_cpu
    monkeypatch.setattr(partial_module, "_forward_on_cpu", lambda *x: seen.append((x[0].dtype, len(x[0]))) or run(*x))
    query, key, value, bias = inputs(1, (2, 1, 1, _KEYS))
    query, key, value = (x.to(dtype) for x in (query, key, value))
    part = partial_attention(query, key, value, bias, scale=0.25)
    exact = naive(query.double(), key.double(), value.double(), bias.double(), scale=0.25)
    assert part.out.dtype == dtype and error(part.out, exact.out) < torch.finfo(dtype).eps
    assert part.lse.dtype == torch.float32 and error(part.lse, exact.lse) < 1e-6
    assert seen == [(torch.float32, 1)] * 2 and not products


@pytest.mark.parametrize("method", hea.available_methods())
def test_compute_dtype_is_that_of_a_call_with_bfloat16(monkeypatch, method):
    """The output is float32, and the inputs keep their gradients and their dtype."""
    monkeypatch.setattr(precision, "_CPU_HAS_BFLOAT16", True)
    options = {"is_causal": hea.method_info(method).causal}
    tensors = [numbers(1, 2, 80, 8, seed=i).float().requires_grad_() for i in range(3)]
    config = make_config(method, compute_dtype="bfloat16")
    assert make_config(method).from_dict(config.to_dict()) == config
    ours = hea.attention(config, *tensors, **options)
    grads = torch.autograd.grad(ours.sum(), tensors)
    assert {x.dtype for x in (ours, *grads)} == {torch.float32}
    assert torch.equal(ours, hea.attention(method, *(x.bfloat16() for x in tensors), **options).float())
    for given in ([x.double() for x in tensors], [x.half() for x in tensors]):
        assert torch.equal(hea.attention(config, *given, **options), hea.attention(method, *given, **options))
    monkeypatch.setattr(precision, "_CPU_HAS_BFLOAT16", False)
    assert torch.equal(hea.attention(config, *tensors, **options), hea.attention(method, *tensors, **options))


def test_compute_dtype_of_a_state(monkeypatch):
    monkeypatch.setattr(precision, "_CPU_HAS_BFLOAT16", True)
    tensors = [numbers(1, 2, 30, 8, seed=i).float() for i in range(3)]
    config, state, outs = make_config("linear", compute_dtype="bfloat16"), None, []
    for part in zip(*(x.split([17, 12, 1], 2) for x in tensors), strict=True):
        out, state = attention_with_state(config, state, *part)
        outs.append(out)
    whole = hea.attention(config, *tensors, is_causal=True)
    assert whole.dtype == outs[0].dtype == torch.float32
    torch.testing.assert_close(torch.cat(outs, 2), whole, rtol=0.02, atol=0.02)
    assert not torch.equal(whole, hea.attention("linear", *tensors, is_causal=True))


@pytest.mark.parametrize("size", [30.0, 1e3])
def test_scores_whose_rounding_is_large(size):
    """bfloat16 rounds a score of 32,000 by up to 64. Weights relative to such a maximum would overflow."""
    query, key, value = (numbers(2, 3, 64, 16, seed=s) for s in range(3))
    leaves = [x.bfloat16().requires_grad_() for x in (3 * size * query, size * key, value)]
    part = partial_attention(*leaves, scale=0.25)
    with torch.no_grad():
        exact = partial_attention_naive(*(x.double() for x in leaves), scale=0.25)
    assert part.lse.abs().max() > 1e4
    assert error(part.lse, exact.lse) < 1e-3
    assert error(part.out, exact.out) < 0.02
    grads = torch.autograd.grad(part.out.float().square().sum() + part.lse.sum(), leaves)
    assert all(x.isfinite().all() for x in grads)
