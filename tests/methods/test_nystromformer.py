"""The Nystromformer: landmarks, pseudo-inverses, the convolution, and other implementations."""

import pytest
import torch
from nystrom_attention.nystrom_attention import NystromAttention, moore_penrose_iter_pinv
from torch.nn.functional import scaled_dot_product_attention
from transformers import NystromformerConfig as TheirConfig
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

import hf_efficient_attn as hea
from each import close
from hf_efficient_attn.methods import get_method
from hf_efficient_attn.ops.landmarks import (
    DAMPING,
    attention_to_few_keys,
    damped_solve,
    find_segments,
    iterative_pinv,
    segment_sums,
)
from instances import inputs, numbers, padding_mask, relative_error

NUM_HEADS, HEAD_DIM = 3, 8
nystromformer = hea.functional.nystromformer_attention


# --- landmarks ---


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("length", "count"), [(1, 1), (12, 4), (13, 4), (15, 4), (3, 7), (7, 7), (1, 5), (40, 1)])
def test_segment_sums_against_a_loop(length, count, dtype):
    x = numbers(2, 3, length, 3, dtype=dtype)
    segments = find_segments(None, length, slice(0, length), count, x.device)
    ours = segment_sums(x, segments)
    assert ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    parts = x.to(ours.dtype).tensor_split(count, 2)
    assert segments.sizes.tolist() == [[p.shape[2] for p in parts]]
    close(ours, torch.stack([p.sum(2) for p in parts], 2), 1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("kind", ["left", "right", "holes", "empty"])
@pytest.mark.parametrize(("length", "count"), [(1, 1), (13, 4), (40, 7), (5, 9)])
def test_masked_segments_are_those_of_the_valid_tokens(length, count, kind):
    """Also as the sum of the parts that several processes hold."""
    mask = padding_mask(kind, 3, length, 1)
    x = numbers(3, 2, length, 2).masked_fill(~mask[:, None, :, None], 0.0)
    whole = find_segments(mask, length, slice(0, length), count, x.device)
    ours = segment_sums(x, whole)
    for b in range(3):
        valid = x[b : b + 1, :, mask[b]]
        own = find_segments(None, valid.shape[2], slice(0, valid.shape[2]), count, x.device)
        close(ours[b : b + 1], segment_sums(valid, own))
        assert torch.equal(whole.sizes[b : b + 1], own.sizes)
        assert (whole.sizes[b] > 0).sum() == min(count, int(mask[b].sum()))
    shards = [slice(0, length // 3), slice(length // 3, length)]
    parts = [segment_sums(x[:, :, own], find_segments(mask, length, own, count, x.device)) for own in shards]
    close(parts[0] + parts[1], ours)


@pytest.mark.parametrize("value_width", [4, 3])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_attention_to_no_key_is_zero(value_width, dropout_p):
    query, key, value = numbers(2, 9, 4), numbers(2, 5, 4, seed=1), numbers(2, 5, value_width, seed=2)
    bias = torch.zeros(2, 5, dtype=torch.float64)
    bias[0] = -torch.inf
    bias[1, 3:] = -torch.inf
    options = {"scale": 0.5, "dropout_p": dropout_p, "dtype": torch.float64}
    torch.manual_seed(0)
    out = attention_to_few_keys(query, key, value, bias, **options)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    if not dropout_p:
        close(out[1], scaled_dot_product_attention(query[1], key[1, :3], value[1, :3], scale=0.5))
        # A solver returns its result with transposed strides.
        transposed = value.mT.contiguous().mT
        close(attention_to_few_keys(query, key, transposed, bias, **options), out)


# --- pseudo-inverses ---


def softmax_matrices(count: int, spread: float = 2.0, batch: int = 4):
    return (spread * numbers(batch, count, count)).softmax(-1)


@pytest.mark.parametrize("count", [1, 2, 7, 20])
def test_iteration_converges_to_the_pseudo_inverse(count):
    matrix = softmax_matrices(count)
    exact = torch.linalg.pinv(matrix)
    errors = [relative_error(iterative_pinv(matrix, steps), exact) for steps in (2, 6, 10, 40)]
    assert errors[-1] < 1e-8
    assert count < 3 or errors[0] > errors[1] > errors[2] > errors[3]


def test_iteration_with_zeros():
    """Zero rows and columns of the matrix, which stand for empty segments, stay 0 and do not slow down convergence."""
    matrix = torch.zeros(2, 9, 7, dtype=torch.float64)
    matrix[:, :5, :4] = (3.0 * numbers(2, 5, 4)).softmax(-1)
    ours = iterative_pinv(matrix, 30)
    close(ours, torch.linalg.pinv(matrix), 1e-8)
    close(ours[:, :4, :5], iterative_pinv(matrix[:, :5, :4], 30), 1e-12)
    assert torch.equal(ours[:, 4:], torch.zeros_like(ours[:, 4:]))
    assert torch.autograd.gradcheck(lambda x: iterative_pinv(x, 4), numbers(3, 4, 6).abs().requires_grad_())
    leaf = torch.zeros(1, 3, 3, dtype=torch.float64, requires_grad=True)
    iterative_pinv(leaf, 6).sum().backward()
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("steps", [0, 1, 6])
def test_iteration_of_nystrom_attention(steps):
    """The nystrom-attention package starts from the largest norms in the batch. For one matrix it is the same."""
    matrix = softmax_matrices(12)
    theirs = torch.cat([moore_penrose_iter_pinv(matrix[i : i + 1], steps) for i in range(4)])
    close(iterative_pinv(matrix, steps), theirs, 1e-10)
    if steps < 6:
        assert relative_error(moore_penrose_iter_pinv(matrix, steps), theirs) > 1e-3


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


# --- method ---


def test_many_steps_give_the_formula_of_the_paper():
    """Eq. 13 with the exact pseudo-inverse."""
    query, key, value = inputs(num_heads=NUM_HEADS, q_len=60, head_dim=HEAD_DIM, dtype=torch.float64, spread=1.5)
    means = [x.unflatten(2, (10, 6)).mean(3) for x in (query, key)]

    def softmax(q, k):
        return (q @ k.mT * HEAD_DIM**-0.5).softmax(-1)

    first, middle, last = softmax(query, means[1]), softmax(*means), softmax(means[0], key)
    exact = first @ torch.linalg.pinv(middle) @ last @ value
    assert relative_error(nystromformer(query, key, value, num_landmarks=10, pinv_iterations=30), exact) < 1e-6


@pytest.mark.parametrize("pinv", ["iterative", "solve"])
def test_few_landmarks_suffice_for_smooth_sequences(pinv):
    query, key = (0.15 * numbers(1, 4, 400, 8, seed=seed).cumsum(2) for seed in (0, 1))
    exact = scaled_dot_product_attention(query, key, query)
    errors = [relative_error(nystromformer(query, key, query, num_landmarks=n, pinv=pinv), exact) for n in (4, 16, 64)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[1] < 0.03
    assert relative_error(exact.mean(2, keepdim=True).expand_as(exact), exact) > 10 * errors[1]


@pytest.mark.parametrize("pinv", ["iterative", "solve"])
def test_batch_row_with_few_tokens_is_exact(pinv):
    """A batch row with no more valid tokens than landmarks is exact, whatever the other batch rows hold."""
    tensors = inputs(batch=3, q_len=80, dtype=torch.float64)
    mask = torch.zeros(3, 80, dtype=torch.bool)
    mask[0, 60:], mask[1, 3:80:4], mask[2] = True, True, True
    ours = nystromformer(*tensors, attention_mask=mask, num_landmarks=20, pinv=pinv)
    exact = scaled_dot_product_attention(*tensors, attn_mask=mask[:, None, None])
    close(ours[:2], exact[:2])
    assert relative_error(ours[2], exact[2]) > 0.05


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


# --- convolution ---


def test_convolution_by_hand():
    """With equal scores the output is the mean value plus the convolution, here with the kernel (1, 10, 100)."""
    zeros, value = torch.zeros(1, 1, 4, 2), torch.tensor([1.0, 2.0, 3.0, 6.0]).view(1, 1, 4, 1)
    kernel = torch.tensor([[1.0, 10.0, 100.0]])
    ours = nystromformer(zeros, zeros, value, conv_kernel_size=3, conv_weight=kernel, num_landmarks=2)
    assert ours.flatten().tolist() == pytest.approx([3 + 210, 3 + 321, 3 + 632, 3 + 63])
    mask = torch.tensor([[True, False, True, True]])
    ours = nystromformer(
        zeros, zeros, value, attention_mask=mask, conv_kernel_size=3, conv_weight=kernel, num_landmarks=2
    )
    mean = 10 / 3
    assert ours[0, 0, mask[0], 0].tolist() == pytest.approx([mean + 310, mean + 631, mean + 63])


def test_initial_kernels_and_their_gradient():
    tensors, kernel = inputs(num_heads=NUM_HEADS, q_len=40, dtype=torch.float64), numbers(NUM_HEADS, 5).requires_grad_()
    config = hea.NystromformerConfig(num_landmarks=8, conv_kernel_size=5)
    start = get_method("nystromformer").initial_parameters
    sizes = {"num_heads": NUM_HEADS, "head_dim": 8, "value_dim": 8, "max_length": 40}
    weight = start(config, **sizes)["conv_weight"]
    assert (tuple(weight.shape), weight.dtype, weight.abs().sum()) == ((NUM_HEADS, 5), torch.float32, 0.0)
    assert start(hea.NystromformerConfig(), **sizes) == {}
    without = nystromformer(*tensors, num_landmarks=8)
    assert torch.equal(hea.attention(config, *tensors), without)
    assert torch.autograd.gradcheck(lambda k: hea.attention(config, *tensors, conv_weight=k), [kernel], fast_mode=True)


@pytest.mark.parametrize(("size", "shape"), [(3, (2, 5)), (3, (1, 3)), (0, (2, 3))])
def test_kernels_of_another_shape_are_refused(size, shape):
    tensors = inputs(num_heads=2, q_len=40)
    with pytest.raises(hea.UnsupportedAttentionError, match=rf"does not match .*kernel_size={size}.* and 2 heads"):
        nystromformer(*tensors, conv_kernel_size=size, conv_weight=torch.zeros(shape))
    with pytest.raises(hea.UnsupportedAttentionError, match=r"40 queries and 30 keys; set conv_kernel_size=0"):
        nystromformer(*inputs(q_len=40, kv_len=30), conv_kernel_size=3)


# --- other implementations ---


@pytest.mark.parametrize("kernel_size", [None, 5])
@pytest.mark.parametrize(("length", "count"), [(64, 8), (96, 32)])
def test_nystromformer_of_transformers(length, count, kernel_size):
    """Transformers' own layer with the same weights.

    Its constructor does not accept a layer without a convolution, nor its forward the iteration that starts from the
    norms of each matrix. Both are set on the layer afterwards.
    """
    torch.manual_seed(0)
    size = NUM_HEADS * HEAD_DIM
    config = TheirConfig(
        hidden_size=size,
        num_attention_heads=NUM_HEADS,
        num_landmarks=count,
        segment_means_seq_len=length,
        conv_kernel_size=5,
    )
    layer = NystromformerSelfAttention(config).double().eval()
    layer.init_option, layer.conv_kernel_size = "exact", kernel_size
    hidden_states = 3.0 * numbers(2, length, size, seed=1)
    with torch.no_grad():
        theirs = layer(hidden_states)[0]
        tensors = [
            projection(hidden_states).unflatten(2, (NUM_HEADS, HEAD_DIM)).transpose(1, 2)
            for projection in (layer.query, layer.key, layer.value)
        ]
        options = {"num_landmarks": count}
        if kernel_size:
            options |= {"conv_kernel_size": kernel_size, "conv_weight": layer.conv.weight[:, 0, :, 0]}
        ours = nystromformer(*tensors, **options).transpose(1, 2).flatten(2)
        if kernel_size:
            assert (
                relative_error(nystromformer(*tensors, num_landmarks=count).transpose(1, 2).flatten(2), theirs) > 0.01
            )
    close(ours, theirs)
    assert relative_error(ours, ours.mean(1, keepdim=True).expand_as(ours)) > 0.1


def nystrom_attention_layer(heads: int, residual: bool, steps: int) -> NystromAttention:
    torch.manual_seed(0)
    layer = NystromAttention(
        heads * HEAD_DIM,
        dim_head=HEAD_DIM,
        heads=heads,
        num_landmarks=8,
        pinv_iterations=steps,
        residual=residual,
        residual_conv_kernel=5,
    )
    layer.to_out = torch.nn.Identity()
    return layer.double().eval()


@torch.no_grad()
def output_of(layer, hidden_states, **options):
    """The output of our method with the projections of `layer`."""
    tensors = [
        x.unflatten(2, (layer.heads, HEAD_DIM)).transpose(1, 2) for x in layer.to_qkv(hidden_states).chunk(3, -1)
    ]
    if layer.residual:
        options |= {"conv_kernel_size": 5, "conv_weight": layer.res_conv.weight[:, 0, :, 0]}
    return nystromformer(*tensors, **options).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("heads", "batch", "residual", "steps"), [(1, 1, False, 6), (1, 1, True, 6), (NUM_HEADS, 2, True, 40)]
)
def test_nystrom_attention(heads, batch, residual, steps):
    """One head of one batch row, since that package starts the iteration from norms of the whole batch.

    After convergence it does not matter where the iteration started.
    """
    layer, hidden_states = nystrom_attention_layer(heads, residual, steps), 3.0 * numbers(batch, 72, heads * HEAD_DIM)
    with torch.no_grad():
        theirs = layer(hidden_states)
    ours = output_of(layer, hidden_states, num_landmarks=8, pinv_iterations=steps)
    close(ours, theirs, 1e-9 if heads == 1 else 1e-6)
