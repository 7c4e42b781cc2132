"""The Nystromformer: pseudo-inverses, float16 and kernels of the convolution. test_oracles.py has its formulas."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import hf_efficient_attn as hea
from each import close
from hf_efficient_attn.methods import get_method
from hf_efficient_attn.ops.landmarks import DAMPING, damped_solve, find_segments, iterative_pinv, segment_sums
from instances import inputs, numbers, relative_error

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
