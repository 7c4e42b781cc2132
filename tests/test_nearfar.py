"""nearfar: landmarks, fitted weights and near keys, beyond what the promises check."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import hf_efficient_attn as hea
from hf_efficient_attn.ops import weighted_coreset
from instances import inputs, numbers, relative_error

nearfar = hea.functional.nearfar_attention


def _clustered(num_keys=600, num_clusters=30, dtype=torch.float32):
    """Keys around `num_clusters` centers, in an order that has nothing to do with the centers."""
    query, centers, value = numbers(1, 2, 600, 16), numbers(1, 2, num_clusters, 16, seed=1), numbers(1, 2, num_keys, 8)
    key = centers[:, :, torch.arange(num_keys) * 7 % num_clusters] + 0.3 * numbers(1, 2, num_keys, 16, seed=3)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _error(tensors, **hyperparameters):
    return relative_error(nearfar(*tensors, **hyperparameters), scaled_dot_product_attention(*tensors))


def test_means_of_clusters_are_better_landmarks_than_keys():
    tensors = _clustered()
    options = {"num_samples": 30, "block_size": 0, "num_probes": 0}
    assert _error(tensors, **options) < 0.9 * _error(tensors, **options, num_refinements=0)


def test_the_fit_lowers_the_error():
    """Nystrom weights suit all queries alike, fitted ones the queries that there are."""
    query, key, value = _clustered()
    tensors = 0.3 * query + 2.0 * query[:, :, :1], key, value
    options = {"num_samples": 30, "block_size": 0}
    assert _error(tensors, **options) < 0.5 * _error(tensors, **options, num_probes=0)


def test_heads_with_very_large_scores_attend_to_means_of_clusters():
    """Each head for itself: where scores are small, the fitted weights are better."""
    query, key, value = inputs(num_heads=4, q_len=400, head_dim=3, dtype=torch.float32)
    factor = torch.tensor([1.0, 6.0, 1.0, 6.0])[:, None, None]
    tensors = query * factor, key * factor, value
    options = {"num_samples": 128, "block_size": 0}
    out = nearfar(*tensors, **options)
    exact, without = scaled_dot_product_attention(*tensors), nearfar(*tensors, **options, num_probes=0)
    for head in range(4):
        error = relative_error(out[:, head], exact[:, head])
        assert error < (0.2 if head % 2 else 1.0) * relative_error(without[:, head], exact[:, head])
    alone = nearfar(*(x[:, :2] for x in tensors), **options)
    torch.testing.assert_close(out[:, :2], alone)


def _local(length=500):
    """Queries that attend mostly to the keys around them."""
    angle = torch.arange(length)[:, None] * torch.tensor([0.5, 0.11, 0.023])
    position = 3.0 * torch.cat((angle.sin(), angle.cos()), 1)[None, None]
    return position, position, numbers(1, 1, length, 6).float()


def test_near_keys_help_where_attention_is_local():
    options = {"num_samples": 24, "block_size": 8}
    assert _error(_local(), **options) < 0.8 * _error(_local(), num_samples=32, block_size=0)


def test_each_head_has_near_keys_only_where_they_hold_attention():
    """Others have more landmarks instead: those of a call without near keys."""
    length, options = 500, {"num_samples": 24, "block_size": 8}
    local, spread = _local(length), inputs(num_heads=3, q_len=length, head_dim=6, dtype=torch.float32)
    tensors = [torch.cat((b[:, :1], a, b[:, 1:]), 1) for a, b in zip(local, spread, strict=True)]
    out = nearfar(*tensors, **options)
    every, none = (nearfar(*tensors, **options, near_share=share) for share in (0.0, 1.0))
    torch.testing.assert_close(none, nearfar(*tensors, num_samples=32, block_size=0))
    torch.testing.assert_close(out[:, 1], every[:, 1])
    torch.testing.assert_close(out[:, [0, 2, 3]], none[:, [0, 2, 3]])
    assert not torch.allclose(every[:, [0, 2, 3]], none[:, [0, 2, 3]], atol=1e-3)
    assert not torch.allclose(every[:, 1], none[:, 1], atol=1e-3)


@pytest.mark.parametrize("block_size", [0, 8])
@pytest.mark.parametrize("content", ["few", "outlier", "large", "aligned", "smooth", "sparse"])
def test_float32_is_as_accurate_as_float64(content, block_size):
    tensors = inputs(q_len=200, head_dim=32, content=content, dtype=torch.float64)
    options = {"num_samples": 48, "block_size": block_size}
    assert relative_error(nearfar(*(x.float() for x in tensors), **options), nearfar(*tensors, **options)) < 1e-2


def test_the_mean_of_the_keys_has_no_effect():
    query, key, value = inputs(num_heads=2, q_len=120, head_dim=8, dtype=torch.float64)
    out = nearfar(query, key, value, num_samples=20, block_size=4)
    shifted = nearfar(query, key + 3.0, value, num_samples=20, block_size=4)
    torch.testing.assert_close(shifted, out, rtol=1e-6, atol=1e-6)


def test_linear_memory_with_a_gradient():
    """No tensor is larger than (N, landmarks) of all heads."""
    sizes = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                sizes.append(result.numel())
            return result

    tensors = [x.requires_grad_() for x in inputs(num_heads=1, q_len=1200, head_dim=8)]
    with Watch():
        nearfar(*tensors, num_samples=24, block_size=8).sum()
    assert max(sizes) <= 1200 * 24 * 8


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("content", "options"),
    [
        *(
            ("local", x)
            for x in ({}, {"block_size": 0}, {"num_probes": 0}, {"num_refinements": 0}, {"near_share": 1.0})
        ),
        # With an outlier Nystrom's weights without a fit are not determined by float64.
        *((content, x) for content in ("outlier", "aligned") for x in ({}, {"block_size": 0}, {"num_refinements": 0})),
    ],
    ids=str,
)
def test_the_form_is_the_readable_form(padded, content, options):
    if content == "local":
        spread = inputs(num_heads=2, q_len=150, head_dim=6)
        tensors = [torch.cat((a.double(), b.double()), 1) for a, b in zip(_local(150), spread, strict=True)]
    else:
        tensors = [x.double() for x in inputs(num_heads=2, q_len=150, head_dim=6, content=content)]
    mask = torch.arange(150)[None] % 5 > 0 if padded else None
    options = {"attention_mask": mask, "num_samples": 20, "block_size": 8, **options}
    out = nearfar(*tensors, **options)
    expected = hea.naive_attention("nearfar", *tensors, **options)
    valid = slice(None) if mask is None else mask[0]
    torch.testing.assert_close(out[:, :, valid], expected[:, :, valid], rtol=1e-8, atol=1e-8)


def test_sequences_with_fewer_keys_than_landmarks_are_exact():
    """In a batch whose other sequences are longer."""
    tensors = inputs(batch=2, num_heads=2, q_len=100, head_dim=6, dtype=torch.float64)
    mask = torch.ones(2, 100, dtype=torch.bool)
    mask[1, 17:] = False
    out = nearfar(*tensors, attention_mask=mask, num_samples=20, block_size=8)
    alone = nearfar(*(x[:1] for x in tensors), num_samples=20, block_size=8)
    exact = scaled_dot_product_attention(*(x[1:, :, :17] for x in tensors))
    torch.testing.assert_close(out[1:, :, :17], exact, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(out[:1], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("q_len", [7, 60])
def test_sequences_without_keys_have_the_output_zero(q_len, dtype):
    """In a batch with another sequence, whether the queries are the tokens of the keys or not. No gradient is NaN."""
    shape = {"batch": 2, "kv_len": 60, "num_heads": 2, "dtype": dtype}
    leaves = [x.requires_grad_() for x in inputs(q_len=q_len, **shape)]
    mask = torch.ones(2, 60, dtype=torch.bool)
    mask[0] = False
    out = nearfar(*leaves, attention_mask=mask, num_samples=20, block_size=8)
    grads = torch.autograd.grad(out.square().sum() + out.sum(), leaves)
    for x in (out, *grads):
        assert torch.equal(x[0], torch.zeros_like(x[0]))
        assert x[1].isfinite().all() and x[1].abs().max() > 0


@pytest.mark.parametrize("options", [{}, {"q_len": 20}, {"num_probes": 0}, {"num_refinements": 0}, {"scale": -0.4}])
def test_the_form_has_the_gradients_of_the_readable_form(options):
    options = {"num_samples": 14, "block_size": 6, "near_share": 0.0, **options}
    tensors = list(inputs(num_heads=2, q_len=90, head_dim=4, dtype=torch.float64))
    tensors[0] = tensors[0][:, :, : options.pop("q_len", 90)]
    leaves = [x.detach().requires_grad_() for x in tensors]
    grads = []
    for form in (hea.attention, hea.naive_attention):
        out = form("nearfar", *leaves, **options)
        grads.append(torch.autograd.grad((out * torch.linspace(0, 1, out.shape[2])[:, None]).sum(), leaves))
    for ours, other in zip(*grads, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-6, atol=1e-7)


def test_queries_that_attend_to_means_have_gradients():
    """With very large scores, and in a sequence with fewer keys than landmarks."""
    leaves = [x.requires_grad_() for x in inputs(batch=2, num_heads=1, q_len=60, head_dim=3, dtype=torch.float64)]
    mask = torch.ones(2, 60, dtype=torch.bool)
    mask[1, 9:] = False

    grads = []
    for form in (hea.attention, hea.naive_attention):
        query, key, value = leaves
        tensors = 4.0 * query, 4.0 * key, value
        out = form("nearfar", *tensors, attention_mask=mask, num_samples=10, block_size=2)
        grads.append(torch.autograd.grad((out * mask[:, None, :, None]).square().sum(), leaves))
    for ours, other in zip(*grads, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"block_size": 0}, {"num_probes": 0}, {"num_refinements": 0}], ids=str)
@pytest.mark.parametrize("logit", [100.0, 2500.0, 1e4])
@pytest.mark.parametrize("content", ["normal", "outlier", "aligned", "smooth"])
def test_gradients_with_very_large_scores_are_finite(content, logit, options):
    """In float16 with scores up to 100: with larger ones some gradients of exact attention do not fit either."""
    query, key, value = inputs(q_len=150, head_dim=16, content=content, dtype=torch.float64)
    key = key - key.mean(2, keepdim=True)
    factor = (logit / (query @ key.mT / 4.0).abs().max()) ** 0.5
    leaves = [(x * y).requires_grad_() for x, y in ((query, factor), (key, factor), (value, 1.0))]
    exact = scaled_dot_product_attention(*leaves).abs().max()
    for dtype in (torch.float32, torch.bfloat16, *([torch.float16] if logit == 100.0 else [])):
        out = nearfar(
            *(x.to(dtype) for x in leaves), **{"num_samples": 20, "block_size": 4, "num_probes": 9, **options}
        )
    # Weights that cancel are bounded, not small.
    assert out.isfinite().all() and out.abs().max() < 1e4 * exact
    weight = torch.linspace(0.5, 1.0, 150)[:, None] * (0.01 if dtype == torch.float16 else 1.0)
    grads = torch.autograd.grad((out.float() * weight).sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("block_size", [0, 4])
def test_unsafe_denominators_fall_back_query_by_query(monkeypatch, block_size):
    """First to the unfitted weights, then to the means of the clusters, whose weights are positive."""
    query, key, value = inputs(num_heads=2, q_len=100, head_dim=4)
    options = {"num_samples": 12, "block_size": block_size, "near_share": 0.0, "num_probes": 8}
    monkeypatch.setattr(weighted_coreset, "_linear_correction", lambda query, out, rows: 0.0)
    fitted = nearfar(query, key, value, **options)
    unfitted = nearfar(query, key, value, **{**options, "num_probes": 0})
    assert not torch.allclose(fitted, unfitted, atol=1e-3)
    monkeypatch.setattr(weighted_coreset, "FIT_RANGE", (2.0, 1.0))
    torch.testing.assert_close(nearfar(query, key, value, **options), unfitted)
    monkeypatch.setattr(weighted_coreset, "LEAST_DENOMINATOR", torch.inf)
    means = nearfar(query, key, value, **options)
    low, high = value.amin(2, keepdim=True), value.amax(2, keepdim=True)
    assert ((means >= low - 1e-5) & (means <= high + 1e-5)).all()
    assert not torch.allclose(means, unfitted, atol=1e-3)


@pytest.mark.parametrize("block_size", [0, 8])
def test_half_precision_adds_little_error(block_size):
    tensors = [x.to(torch.bfloat16) for x in _clustered()]
    tensors[1] = tensors[1] + 2.0  # keys far from 0
    exact = scaled_dot_product_attention(*(x.double() for x in tensors))
    options = {"num_samples": 60, "block_size": block_size, "near_share": 0.0}
    single, out = nearfar(*(x.float() for x in tensors), **options), nearfar(*tensors, **options)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, single.to(torch.bfloat16))
    rounding = relative_error(scaled_dot_product_attention(*tensors), exact)
    assert relative_error(out, exact) < relative_error(single, exact) + 3.0 * rounding


def test_a_call_is_few_operations():
    """12 heads of 32, 4,096 tokens."""
    tensors = [numbers(1, 12, 4096, 32, seed=i).float() for i in range(3)]
    count = 0

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal count
            count += 1
            return function(*args, **(kwargs or {}))

    nearfar(*tensors)
    with Count():
        nearfar(*tensors)
    assert count <= 400
