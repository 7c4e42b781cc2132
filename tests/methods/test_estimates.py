"""What is particular to three methods: the Nystromformer, ScatterBrain and ApproxKMV.

test_oracles.py has the formulas of the Nystromformer.
"""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import hf_efficient_attn as hea
from each import close, differs
from hf_efficient_attn.methods import approx_kmv, get_method
from hf_efficient_attn.ops.features import orthogonal_features
from hf_efficient_attn.ops.landmarks import DAMPING, damped_solve, find_segments, iterative_pinv, segment_sums
from instances import inputs, numbers, relative_error

# The Nystromformer: pseudo-inverses, float16 and kernels of the convolution.

nystromformer = hea.functional.nystromformer_attention


def test_segments_are_summed_in_float32():
    x = numbers(2, 3, 700, 3, dtype=torch.bfloat16)
    ours = segment_sums(x, find_segments(None, 700, slice(0, 700), 3, x.device))
    assert ours.dtype == torch.float32
    close(ours, torch.stack([part.float().sum(2) for part in x.tensor_split(3, 2)], 2), 1e-4)


def test_iteration_converges_to_the_pseudo_inverse():
    """Zero rows and columns of the matrix, which stand for empty segments, stay 0 and do not slow down convergence."""
    for count in (1, 2, 7, 20):
        matrix = (2.0 * numbers(4, count, count)).softmax(-1)
        exact = torch.linalg.pinv(matrix)
        errors = [relative_error(iterative_pinv(matrix, steps), exact) for steps in (2, 6, 10, 40)]
        assert errors[-1] < 1e-8
        assert count < 3 or errors[0] > errors[1] > errors[2] > errors[3]
    matrix = torch.zeros(2, 9, 7, dtype=torch.float64, requires_grad=True)
    iterative_pinv(matrix, 6).sum().backward()
    assert matrix.grad.isfinite().all()
    matrix.data[:, :5, :4] = (3.0 * numbers(2, 5, 4)).softmax(-1)
    ours = iterative_pinv(matrix, 30)
    close(ours, torch.linalg.pinv(matrix), 1e-8)
    assert not ours[:, 4:].any()


@pytest.mark.parametrize("rank", [1, 5, 8])
def test_solve_damps_small_singular_values(rank):
    """X = V diag(s / (s^2 + c)) U^T Y for the decomposition U diag(s) V^T of a matrix of any rank."""
    matrix = numbers(3, 8, rank) @ numbers(3, rank, 6, seed=1)
    right = numbers(3, 8, 2, seed=2)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    size = matrix.abs()
    damping = DAMPING * size.sum(1).amax(1) * size.sum(2).amax(1)
    expected = v.mT @ ((s / (s**2 + damping[:, None]))[:, :, None] * (u.mT @ right))
    close(damped_solve(matrix, right), expected)
    torch.testing.assert_close(damped_solve(matrix.float(), right.float()), expected.float(), rtol=1e-3, atol=1e-3)
    leaves = [matrix.requires_grad_(), right.requires_grad_()]
    assert torch.autograd.gradcheck(damped_solve, leaves)


def test_few_queries_are_exact():
    """With no more queries than landmarks, exact attention costs no more than the approximation."""
    for q_len in (16, 17):
        tensors = inputs(q_len=q_len, kv_len=200, dtype=torch.float64)
        ours, exact = nystromformer(*tensors, num_landmarks=16), scaled_dot_product_attention(*tensors)
        assert relative_error(ours, exact) < 1e-9 if q_len == 16 else relative_error(ours, exact) > 0.05


@pytest.mark.parametrize("size", [0, 3])
def test_float16_does_not_overflow(size):
    """Outputs on data without structure are far from averages of values. They are clamped to the float16 range."""
    query, key, value = inputs(num_heads=4, q_len=300, head_dim=16, spread=20.0)
    options = {"num_landmarks": 32, "conv_kernel_size": size}
    options |= {"conv_weight": torch.ones(4, size)} if size else {}
    full = nystromformer(query, key, 1000.0 * value, **options)
    half = [x.half() for x in (query, key, (1000.0 * value).clamp(-6e4, 6e4))]
    assert full.abs().max() > 65504
    assert nystromformer(*half, **options).isfinite().all()


def test_initial_kernels():
    tensors = inputs(num_heads=3, q_len=40, dtype=torch.float64)
    config = hea.NystromformerConfig(num_landmarks=8, conv_kernel_size=5)
    start = get_method("nystromformer").initial_parameters
    sizes = {"num_heads": 3, "head_dim": 8, "value_dim": 8, "max_length": 40}
    weight = start(config, **sizes)["conv_weight"]
    assert (tuple(weight.shape), weight.dtype, weight.abs().sum()) == ((3, 5), torch.float32, 0.0)
    assert start(hea.NystromformerConfig(), **sizes) == {}
    assert torch.equal(hea.attention(config, *tensors), nystromformer(*tensors, num_landmarks=8))


@pytest.mark.parametrize(("size", "shape"), [(3, (2, 5)), (3, (1, 3)), (0, (2, 3))])
def test_kernels_of_another_shape_are_refused(size, shape):
    tensors = inputs(num_heads=2, q_len=40)
    with pytest.raises(hea.UnsupportedAttentionError, match=rf"does not match .*kernel_size={size}.* and 2 heads"):
        nystromformer(*tensors, conv_kernel_size=size, conv_weight=torch.zeros(shape))
    with pytest.raises(hea.UnsupportedAttentionError, match=r"40 queries and 30 keys; set conv_kernel_size=0"):
        nystromformer(*inputs(q_len=40, kv_len=30), conv_kernel_size=3)


# ScatterBrain against the estimate of its paper, which subtracts the features on the near field.

OPTIONS = {"block_size": 8, "num_features": 12}


def paper(query, key, value, near, *, scale: float, count: int = 12, seed: int = 0, allowed=None):
    """[near * (exp(q k) - phi(q) phi(k)) + phi(q) phi(k)] V, divided by the same with 1 for V: (B, H, N, Dv)."""
    directions = orthogonal_features(count, query.shape[-1], seed, query.device).to(query.dtype)

    def phi(x):
        x = x * scale**0.5
        return torch.exp(x @ directions.t() - x.square().sum(-1, keepdim=True) / 2) / count**0.5

    features = phi(query) @ phi(key).transpose(2, 3)
    exact = torch.exp(scale * query @ key.transpose(2, 3))
    weights = features + torch.where(near, exact - features, 0.0)
    weights = weights if allowed is None else weights * allowed
    return weights @ value / weights.sum(-1, keepdim=True)


def same_block(length: int, size: int) -> torch.Tensor:
    block = torch.arange(length) // size
    return block[:, None] == block


@pytest.mark.parametrize("length", [9, 40, 45, 150])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_estimate_of_the_paper(length, is_causal):
    """In the causal form the near field is the own block of 4 tokens and the one before."""
    tensors = inputs(q_len=length, head_dim=6, value_dim=5, dtype=torch.float64, spread=0.8)
    options = {"scale": 0.5, "is_causal": is_causal}
    ours = hea.functional.scatterbrain_attention(*tensors, **OPTIONS, **options, seed=3)
    block = torch.arange(length) // 4
    near = block[:, None] - block <= 1 if is_causal else same_block(length, 8)
    allowed = torch.ones(length, length).tril() if is_causal else None
    close(ours, paper(*tensors, near, scale=0.5, seed=3, allowed=allowed))
    exact = scaled_dot_product_attention(*tensors, **options)
    if is_causal:
        close(ours[:, :, :8], exact[:, :, :8])
    assert differs(ours, exact, 0.02 if is_causal else 0.05) or length == 9


def test_the_far_field_is_never_negative():
    """If the features overestimate a near key by far, the total minus the near field is nothing but rounding errors."""
    query, key, value = inputs(q_len=64, head_dim=64, num_heads=1, spread=0.1)
    value = value.abs()
    # One key is one of the features. exp(q . k) is about 1, but the product of features is exp(|k|^2 / 2) / 12.
    key[:, :, 0] = orthogonal_features(12, 64, 1, query.device)[0]
    near, options = same_block(64, 8), {"scale": 1.0, "seed": 1}
    ours = hea.functional.scatterbrain_attention(query, key, value, **OPTIONS, **options)
    truth = paper(*(x.double() for x in (query, key, value)), near, **options)
    torch.testing.assert_close(ours[:, :, :8].double(), truth[:, :, :8], rtol=1e-5, atol=1e-5)


# ApproxKMV with an error bound, at lengths at which the approximation saves work.

LENGTH = 1536


def clustered(length: int = LENGTH, dtype=torch.float32):
    """Query, key and value (1, 1, N, .) in clusters of 16 tokens, where a query attends mostly to its own cluster."""
    centers = numbers(length // 16, 8)
    centers = (5.0 * centers / centers.norm(dim=1, keepdim=True)).repeat_interleave(16, 0)
    query, key = (centers + 0.1 * numbers(length, 8, seed=i) for i in (1, 2))
    value = numbers(length, 5, seed=3) + centers[:, :5]
    return tuple(x[None, None].to(dtype) for x in (query, key, value))


def attention(tensors, seed=0):
    return hea.attention("approx_kmv", *tensors, scale=1.0, seed=seed, error_percent=60)


def keys_of_queries(tensors, **hyperparameters):
    """How many keys the queries of the first head attend to after its plan; nothing if these are all, without parts."""
    config, (query, key, value) = hea.ApproxKMVConfig(**hyperparameters), (x[0, 0] for x in tensors)
    parts = approx_kmv._parts(config, approx_kmv._Head(query, key, value, scale=1.0, dropout_p=0.0, seed=0))
    return [(part.bias > -torch.inf).sum(1) for part in parts]


def test_it_saves_work_and_the_error_is_small():
    tensors = clustered()
    exact = scaled_dot_product_attention(*tensors, scale=1.0)
    assert 0 < torch.cat(keys_of_queries(tensors, error_percent=60)).sum() < 0.8 * LENGTH**2
    assert not keys_of_queries(tensors, error_percent=5)
    errors = [relative_error(attention(tensors, seed=s), exact) for s in range(3)]
    assert min(errors) > 1e-4
    assert max(errors) < 0.1
    # The values of a query's own cluster are most of its output.
    assert relative_error(tensors[2].mean(2, keepdim=True).expand_as(exact), exact) > 0.5


def test_the_fast_form_and_its_gradients_are_those_of_the_readable_form_with_an_error_bound():
    tensors = [x.requires_grad_() for x in clustered(dtype=torch.float64)]
    config, weight = hea.ApproxKMVConfig(error_percent=60), numbers(1, 1, LENGTH, 5, seed=9)
    outs = [f(config, *tensors, scale=1.0) for f in (hea.attention, hea.naive_attention)]
    close(*outs, 1e-8)
    assert relative_error(outs[0], scaled_dot_product_attention(*tensors, scale=1.0)) > 1e-4
    close(*(torch.autograd.grad((out * weight).sum(), tensors) for out in outs), 1e-7)


def test_queries_with_a_small_denominator_are_exact():
    query, key, value = clustered()
    query[:, :, 7] = -query[:, :, 7]
    query[:, :, 9] *= 0.2
    exact = scaled_dot_product_attention(query, key, value, scale=1.0)
    ours = attention((query, key, value))
    assert relative_error(ours, exact) > 1e-4
    close(ours[:, :, [7, 9]], exact[:, :, [7, 9]], 1e-4)


@pytest.mark.parametrize("num_samples", [64, 256])
def test_no_query_exceeds_the_budget(num_samples):
    assert 0 < torch.cat(keys_of_queries(clustered(), num_samples=num_samples)).max() <= num_samples
