"""Methods against the formulas of their papers, written out with dense matrices, and what is particular to them.

The Nystromformer, whose formulas are in test_oracles.py, ScatterBrain, ApproxKMV, Reformer, EVA and feature maps.
"""

import math
from itertools import product
from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import normalize, scaled_dot_product_attention

import hf_efficient_attn as hea
from each import close, differs, refuses
from hf_efficient_attn.methods import approx_kmv, eva, get_method
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.features.maps import orthogonal_features
from hf_efficient_attn.ops.index import inverse
from hf_efficient_attn.ops.nystrom import DAMPING, damped_solve, find_segments, iterative_pinv, segment_sums
from hf_efficient_attn.ops.sampled_keys import hashing
from hf_efficient_attn.ops.sampled_keys.hashing import NearField, bucket_codes, plan_rounds, rounds_attention
from instances import inputs, numbers, padding_mask, relative_error

# The Nystromformer: pseudo-inverses, float16 and kernels of the convolution.

nystromformer = hea.functional.nystromformer_attention


def test_segments_are_summed_in_float32():
    x = numbers(2, 3, 700, 3, dtype=torch.bfloat16)
    ours = segment_sums(x, find_segments(None, 700, slice(0, 700), 3, x.device))
    assert ours.dtype == torch.float32
    close(ours, torch.stack([part.float().sum(2) for part in x.tensor_split(3, 2)], 2), 1e-4)


def test_iteration_converges_to_the_pseudo_inverse():
    """Rows and columns of empty segments stay 0 and do not slow down convergence."""
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
    assert torch.autograd.gradcheck(damped_solve, [matrix.requires_grad_(), right.requires_grad_()])


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
    for method in ("linformer", "flurka_linear"):
        assert hea.attention(method, *half[:2], 6e4 * half[2].sign(), init="gaussian").isfinite().all()


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
    words, given = rf"does not match .*kernel_size={size}.* and 2 heads", {"conv_weight": torch.zeros(shape)}
    refuses(words, nystromformer, *inputs(q_len=40), conv_kernel_size=size, **given)
    words = r"40 queries and 30 keys; set conv_kernel_size=0"
    refuses(words, nystromformer, *inputs(q_len=40, kv_len=30), conv_kernel_size=3)


# ScatterBrain against the estimate of its paper, which subtracts the features on the near field.

OPTIONS = {"block_size": 8, "num_features": 12}


def subtracted(query, key, value, near, *, scale: float, count: int = 12, seed: int = 0, allowed=None):
    """[near * (exp(q k) - phi(q) phi(k)) + phi(q) phi(k)] V, divided by the same with 1 for V: (B, H, N, Dv)."""
    directions = orthogonal_features(Draws(seed, query.device), count, query.shape[-1]).to(query.dtype)

    def phi(x):
        x = x * scale**0.5
        return torch.exp(x @ directions.t() - x.square().sum(-1, keepdim=True) / 2) / count**0.5

    features = phi(query) @ phi(key).transpose(2, 3)
    weights = features + torch.where(near, torch.exp(scale * query @ key.transpose(2, 3)) - features, 0.0)
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
    close(ours, subtracted(*tensors, near, scale=0.5, seed=3, allowed=allowed))
    exact = scaled_dot_product_attention(*tensors, **options)
    if is_causal:
        close(ours[:, :, :8], exact[:, :, :8])
    assert differs(ours, exact, 0.02 if is_causal else 0.05) or length == 9


def test_the_far_field_is_never_negative():
    """If the features overestimate a near key by far, the total minus the near field is nothing but rounding errors."""
    query, key, value = inputs(q_len=64, head_dim=64, num_heads=1, spread=0.1)
    value = value.abs()
    # One key is one of the features. exp(q . k) is about 1, but the product of features is exp(|k|^2 / 2) / 12.
    key[:, :, 0] = orthogonal_features(Draws(1, query.device), 12, 64)[0]
    near, options = same_block(64, 8), {"scale": 1.0, "seed": 1}
    ours = hea.functional.scatterbrain_attention(query, key, value, **OPTIONS, **options)
    truth = subtracted(*(x.double() for x in (query, key, value)), near, **options)
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
    query[:, :, 9] *= 0.7  # a sum of 1.02 in units of the kernel, below the least of 2 * eps = 1.2
    exact = scaled_dot_product_attention(query, key, value, scale=1.0)
    ours = attention((query, key, value))
    assert relative_error(ours, exact) > 1e-4
    close(ours[:, :, [7, 9]], exact[:, :, [7, 9]], 1e-4)


@pytest.mark.parametrize("num_samples", [64, 256])
def test_no_query_exceeds_the_budget(num_samples):
    assert 0 < torch.cat(keys_of_queries(clustered(), num_samples=num_samples)).max() <= num_samples


# Reformer: section 2 of the paper, in float64 and with (N, N) matrices, and shared queries and keys.

HEAD_DIM = 8
reformer = hea.functional.reformer_attention


def pairs_of_rounds(plan: NearField) -> torch.Tensor:
    """The set P_i of every round: bool (BH, S, Nq, Nk)."""
    query_index, key_index = (inverse(x.flatten(0, 1)).view_as(x) for x in (plan.query_order, plan.key_order))
    start = plan.start.gather(2, query_index // plan.block_q).unsqueeze(3)
    pairs = (key_index.unsqueeze(2) >= start) & (key_index.unsqueeze(2) < start + plan.block_k)
    if isinstance(plan.num_keys, torch.Tensor):
        pairs &= (key_index < plan.num_keys[:, :, None]).unsqueeze(2)
    return pairs


def paper_attention(query, key, value, pairs, scale: float, shared: bool) -> torch.Tensor:
    """Eq. 5-7: o_i = sum_r exp(z(i, P_i^r) - z(i, P_i)) o_i^r, with m_ij^r = log N_ij, 10^5 if i = j, or infinity."""
    scores = scale * query @ key.transpose(1, 2)
    penalty = pairs.sum(1).clamp(min=1).double().log()
    if shared:
        penalty = penalty + 1e5 * torch.eye(scores.shape[1])
    logits = (scores - penalty).unsqueeze(1).masked_fill(~pairs, -torch.inf)
    z = logits.logsumexp(3, keepdim=True)
    rounds = (logits - z.masked_fill(z == -torch.inf, 0.0)).exp() @ value.unsqueeze(1)
    return ((z - z.logsumexp(1, keepdim=True)).exp().nan_to_num(0.0) * rounds).sum(1)


@pytest.mark.parametrize("padding", ["none", "left", "right", "holes", "empty"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("size", "rounds"), [(8, 1), (8, 2), (5, 3), (3, 6)])
def test_the_formulas_of_the_paper(size, rounds, shared, padding):
    tensors = inputs(batch=2, q_len=150, head_dim=HEAD_DIM, value_dim=5, dtype=torch.float64)
    mask = padding_mask(padding, 2, 150)
    options = {"block_size": size, "num_hashes": rounds, "shared_query_key": shared}
    ours = reformer(*tensors, attention_mask=mask, seed=3, **options)
    query, key, value = (x.flatten(0, 1) for x in tensors)
    flat_mask = None if mask is None else mask.repeat_interleave(2, 0)
    key, value = (x if mask is None else x.masked_fill(~flat_mask[:, :, None], 0.0) for x in (key, value))
    sizes = {"block_size": size, "rounds": rounds}
    plan = plan_rounds(query, query if shared else key, flat_mask, **sizes, draws=Draws(3, query.device))
    pairs = pairs_of_rounds(plan)
    assert (pairs.sum(1) > 1).any() == (rounds > 1), "no pair is in two rounds"
    key = normalize(query, dim=-1) if shared else key
    theirs = paper_attention(query, key, value, pairs, HEAD_DIM**-0.5, shared).unflatten(0, (2, 2))
    valid = torch.ones(2, 150, dtype=torch.bool) if mask is None else mask
    close(ours.transpose(1, 2)[valid], theirs.transpose(1, 2)[valid])


def test_a_bucket_is_a_pair_of_the_papers_hashes():
    x, turns = numbers(3, 90, HEAD_DIM), numbers(4, 2, 2, HEAD_DIM, seed=1)
    halves = torch.tensor([[4, 3]])
    codes = bucket_codes(x, turns, halves)
    for s in range(2):
        first, second = (x @ turns[:n, s, f].t() for f, n in ((0, 4), (1, 3)))
        first, second = (torch.cat((p, -p), -1).argmax(-1) for p in (first, second))
        assert torch.equal(codes[:, s], first * 6 + second)
    assert (codes.flatten().bincount(minlength=48) > 0).all()
    # The norm of a vector has no influence.
    assert torch.equal(bucket_codes(7.0 * x, turns, halves), codes)


@pytest.mark.parametrize("size", [1, 3, 64])
def test_number_of_buckets(size):
    """There are enough buckets for half a chunk each, and at most twice as many, or 4."""
    counts = torch.arange(1, 5000)
    most = len(hashing.rotations(5000, size, 1, 2, Draws(0, counts.device)))
    first, second = hashing.bucket_halves(counts[:, None], size, most).unbind(1)
    assert first.min() == second.min() == 1
    assert max(first.max(), second.max()) <= most
    buckets = (4 * first * second).flatten()
    assert (buckets * size >= 2 * counts).all()
    assert (buckets <= (4 * counts / size).clamp(min=4) + 4).all()


def test_chunks_of_queries_find_the_keys_of_their_buckets():
    """With clusters of very different sizes, chunk b of the queries is far from chunk b of the keys.

    Each cluster has another of the same size opposite to it, so that the mean is about 0.
    """
    centres = 8.0 * normalize(numbers(6, 16), dim=-1)
    centres, sizes = torch.cat((centres, -centres)), torch.arange(1, 7).repeat(2)
    of_query = torch.arange(12).repeat_interleave(sizes * 16)
    of_key = torch.arange(12).repeat_interleave((7 - sizes) * 16)
    shuffle = torch.randperm(672, generator=torch.Generator().manual_seed(0))
    query = (centres[of_query] + 0.3 * numbers(672, 16, seed=1))[None, None]
    key = (centres[of_key][shuffle] + 0.3 * numbers(672, 16, seed=2))[None, None]
    value = numbers(1, 1, 672, 16, seed=3)
    exact = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=1.0)
    ours = reformer(query, key, value, scale=1.0, block_size=64, num_hashes=2)
    assert relative_error(ours, exact) < 0.4
    plan = plan_rounds(query[0], key[0], None, block_size=64, rounds=2, draws=Draws(0, query.device))
    in_step = (torch.arange(11) * 64 - 32).clamp(0, 672 - 128).expand(1, 2, -1)
    by_number = rounds_attention(query[0], key[0], value[0], plan._replace(start=in_step), others=False, scale=1.0)
    assert relative_error(by_number, exact[0]) > 1.5 * relative_error(ours, exact)


def test_a_shift_of_all_keys_has_no_effect():
    """As in exact attention, adding a vector to all keys does not change the output."""
    query, key, value = inputs(batch=2, q_len=150, dtype=torch.float64)
    for mask in (None, padding_mask("holes", 2, 150)):
        close(*(reformer(query, x, value, attention_mask=mask, block_size=8) for x in (key, key + 20.0)))


def test_shared_queries_ignore_the_given_keys_and_their_own_token():
    query, key, value = inputs(q_len=100)
    options = {"shared_query_key": True, "block_size": 8}
    out = reformer(query, key.requires_grad_(), value.requires_grad_(), **options)
    assert torch.equal(reformer(query, 2 * key - 1, value, **options), out)
    assert not torch.autograd.grad(out.sum(), key, retain_graph=True)[0].any()
    # No output depends on the value of its own token,
    for i in (0, 50, 99):
        grad = torch.autograd.grad(out[:, :, i].sum(), value, retain_graph=True)[0]
        assert not grad[:, :, i].any() and grad.any()
    # except if there is no other token.
    assert torch.equal(reformer(query[:, :, :1], key[:, :, :1], value[:, :, :1], **options), value[:, :, :1])
    refuses(r"as many queries as values; got 50 and 100", reformer, query[:, :, :50], key, value, shared_query_key=True)


def test_budgets():
    assert hea.ReformerConfig().to_dict() == {
        "method": "reformer", "block_size": 64, "num_hashes": 2, "shared_query_key": False, "seed": 0
    }  # fmt: skip
    for columns, rounds in product((2, 3, 4, 7, 64, 1000), (1, 2, 5)):
        config = hea.ReformerConfig(num_hashes=rounds, shared_query_key=True, seed=3).with_budget(columns)
        assert columns - 2 * config.num_hashes < 2 * config.block_size * config.num_hashes <= columns
        assert config.num_hashes == min(rounds, columns // 2)
        assert config.shared_query_key and config.seed == 3


# EVA: the sums of the paper, with plain exponentials, and the properties that follow from them.


def estimate(query, key, value, scale: float, noise=None, maps=None):
    """Mean key of a chunk and the estimated value beta^_c(omega), computed token by token.

    With queries and keys (n, D) times sqrt(scale), omega = q~ + k~ + noise, or W_q q~ + W_k k~ + noise where `maps` is
    (W_q, W_k). The random feature is xi(x, omega) = exp(omega . x - |x|^2 / 2).
    """
    root = scale**0.5
    means = sum(query) / len(query), sum(key) / len(key)
    means = means if maps is None else [w @ x for w, x in zip(maps, means, strict=True)]
    omega = root * means[0] + root * means[1]
    omega = omega if noise is None else omega + noise
    xi = [math.exp(omega @ (root * k) - (root * k) @ (root * k) / 2) for k in key]
    return sum(key) / len(key), sum(x * v for x, v in zip(xi, value, strict=True)) / sum(xi)


def paper(query, key, value, scale: float, near, chunks, noises=None, maps=None):
    """The output of one head's queries by the paper's sums.

    near(i) is the set E of query i, and chunks(i) the list of its chunks as (start, stop).
    """
    outs = []
    for i, q in enumerate(query):
        numerator, denominator = torch.zeros(value.shape[1], dtype=torch.float64), 0.0
        for m in near(i):
            weight = math.exp(scale * q @ key[m])
            numerator, denominator = numerator + weight * value[m], denominator + weight
        for start, stop in chunks(i):
            chunk, noise = slice(start, stop), None if noises is None else noises[start, stop]
            mean, beta = estimate(query[chunk], key[chunk], value[chunk], scale, noise, maps)
            weight = (stop - start) * math.exp(scale * q @ mean)
            numerator, denominator = numerator + weight * beta, denominator + weight
        outs.append(numerator / denominator)
    return torch.stack(outs)


# (number of keys, window_size, num_landmarks, chunks of query i)
CASES = {
    "whole": (64, 16, 16, lambda i: [(s, s + 4) for s in range(0, 64, 4) if s // 16 != i // 16]),
    # Six windows of two chunks each; the last window and the last chunk are not full.
    "ragged": (42, 8, 12, lambda i: [(s, min(s + 4, 42)) for s in range(0, 42, 4) if s // 8 != i // 8]),
    # Twelve windows and three chunks. A query also sees the other half of its own chunk and of its own half.
    "chunks of four windows": (46, 4, 3, lambda i: [
        (s, min(s + size, 46))
        for size in (16, 8, 4)
        for s in range(0, 46, size)
        if s // size != i // size and (size == 16 or s // (2 * size) == i // (2 * size))
    ]),
}  # fmt: skip


def maps(num_heads: int, head_dim: int = 6) -> dict:
    """W_q and W_k of a learned proposal, by parameter name: (num_heads, head_dim, head_dim) each."""
    shape = (num_heads, head_dim, head_dim)
    return {"proposal_query": numbers(*shape, seed=8), "proposal_key": numbers(*shape, seed=9)}


@pytest.mark.parametrize("case", CASES)
def test_output_is_that_of_the_papers_sums(case):
    """omega of a chunk is mu, drawn around it, or learned. Every head has its own draw; batch rows share it."""
    count, window, landmarks, chunks = CASES[case]
    tensors = inputs(batch=2, q_len=count, head_dim=6, value_dim=5, dtype=torch.float64)
    config = hea.EvaConfig(window_size=window, num_landmarks=landmarks, proposal="learned", seed=5)
    learned = maps(num_heads=2)

    def near(i):
        """The keys of the window that holds position i."""
        return range(i // window * window, min(count, (i // window + 1) * window))

    def check(ours, **proposal):
        for b, head in ((0, 0), (0, 1), (1, 1)):
            given = {name: of_head(head) for name, of_head in proposal.items()}
            close(ours[b, head], paper(*(x[b, head] for x in tensors), 0.7, near, chunks, **given), 1e-10)

    ours = hea.attention(config, *tensors, scale=0.7, proposal="mean")
    check(ours)
    assert differs(ours, scaled_dot_product_attention(*tensors, scale=0.7), 0.05)
    # With the identity, where the maps start, the output is that of proposal="normal".
    plain = hea.attention(config, *tensors, scale=0.7, proposal="normal")
    assert torch.equal(hea.attention(config, *tensors, scale=0.7), plain)
    assert differs(hea.attention(config, *tensors, scale=0.7, **learned), plain, 1e-3)
    if case == "whole":
        drawn = Draws(5, ours.device).normal((16, 2, 6), 40)
        assert abs(drawn.std() - 1.0) < 0.15
        check(plain, noises=lambda head: {(s, s + 4): drawn[s // 4, head] for s in range(0, 64, 4)})
    with patch.object(eva, "chunk_noise", lambda *arguments: None):  # the draws are those of proposal="normal"
        ours = hea.attention(config, *tensors, scale=0.7, **learned)
    check(ours, maps=lambda head: [w[head] for w in learned.values()])


def test_maps_of_a_wrong_shape_are_refused():
    tensors = inputs(q_len=20, head_dim=6)
    for shape, name in product(((3, 6, 6), (2, 6, 5), (6, 6), (2, 2, 6, 6)), maps(num_heads=2)):
        with pytest.raises(hea.UnsupportedAttentionError, match=rf"eva: {name} .*2 heads with head_dim=6: give"):
            hea.attention("eva", *tensors, proposal="learned", **{name: numbers(*shape)})
    refuses(r"does not match .*proposal='normal'", hea.attention, "eva", *tensors, **maps(num_heads=2))


def test_causal_form_by_hand():
    """Blocks of 4 tokens: a query of block 6 sees blocks 6 and 5, and two summaries each of block 4 and blocks 0-3.

    Each half of a segment has one draw, which depends on the segment's level, and may be centred on learned maps.
    """
    tensors = inputs(num_heads=1, q_len=30, head_dim=6, dtype=torch.float64)
    segments = {2: [(0, 1)], 3: [(0, 2)], 4: [(0, 2), (2, 3)], 5: [(0, 4)], 6: [(0, 4), (4, 5)], 7: [(0, 4), (4, 6)]}

    def halves(first, last):
        middle = (first + last) * 2
        return [(4 * first, middle), (middle, 4 * last)]

    def chunks(i):
        return [half for segment in segments.get(i // 4, []) for half in halves(*segment)]

    noises = {}
    for first, last in {pair for pairs in segments.values() for pair in pairs}:
        drawn = Draws(2, tensors[0].device).normal((2, 1, 6), 41 + (last - first).bit_length() - 1)[:, 0]
        noises |= dict(zip(halves(first, last), drawn, strict=True))
    options = {"window_size": 8, "num_landmarks": 4, "seed": 2, "is_causal": True, "scale": 0.7}
    learned = maps(num_heads=1)
    both = [w[0] for w in learned.values()]
    outs = []
    for proposal, parameters, given in (
        ("mean", {}, (None, None)), ("normal", {}, (noises, None)), ("learned", learned, (noises, both))
    ):  # fmt: skip
        outs.append(hea.attention("eva", *tensors, **options, proposal=proposal, **parameters)[0, 0])
        one = [x[0, 0] for x in tensors]
        close(outs[-1], paper(*one, 0.7, lambda i: range(max(0, i // 4 - 1) * 4, i + 1), chunks, *given), 1e-10)
    assert differs(outs[1], outs[0], 1e-3) and differs(outs[2], outs[1], 1e-3)


# Feature maps. `forward` and `naive` share the functions that compute features, so comparing the two shows nothing.


def phi(x: torch.Tensor, feature_map: str, weight: torch.Tensor | None) -> torch.Tensor:
    """The features of tokens (B, H, N, D) with maps (H, D, F) or, for "t2r", (H, D + 1, F)."""
    if weight is None:
        return torch.where(x > 0, x + 1.0, x.exp())
    if feature_map == "t2r":
        return (x @ weight[:, :-1] + weight[:, -1:]).relu()
    y = x @ weight
    y = torch.cat([y, -y], -1)
    return y.exp() if feature_map == "exp" else y.exp() / y.exp().sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("method", "feature_map"), [("linear", "elu"), *product(("linear", "performer"), ("hedgehog", "t2r", "exp"))]
)
def test_attention_by_the_formula(method, feature_map):
    """Weights phi(q) . phi(k), in a window exp(scale q . k), and outside of it with the factor exp(far_log_weight).

    Performer has no window.
    """
    query, key, value = inputs(2, 2, 61, 6, value_dim=3, dtype=torch.float64, spread=0.6)
    both, options, scale = (None, None), {"feature_map": feature_map}, 0.5
    far_log_weight = torch.full((2,), -math.log(6), dtype=torch.float64)
    if feature_map != "elu":
        both = [0.7 * numbers(2, 6 + (feature_map == "t2r"), 5, seed=seed) for seed in (3, 4)]
        options |= {"num_features": 5, "query_map": both[0], "key_map": both[1]}
        far_log_weight = torch.tensor((0.7, -1.3), dtype=torch.float64)  # what may be learned
    if feature_map == "t2r":
        for one in both:
            one[:, -1].abs_().add_(1.0)  # so that some feature of every token is positive
    # A scale multiplies the queries, as in the softmax.
    features = phi(query * scale * 6**0.5, feature_map, both[0]) @ phi(key, feature_map, both[1]).mT
    exact, position = (scale * query @ key.mT).exp(), torch.arange(61)
    mask = padding_mask("right", 2, 61, seed=1)
    for window, is_causal in product((0, 4) if method == "linear" else (0,), (False, True)):
        weights, given = features, dict(options)
        if window:
            given |= {"window_size": window} | ({} if feature_map == "elu" else {"far_log_weight": far_log_weight})
            far = features * far_log_weight.exp()[:, None, None]
            weights = torch.where((position[:, None] - position).abs() <= window, exact, far)
        weights = weights * mask[:, None, None]
        weights = weights.tril() if is_causal else weights
        ours = hea.attention(method, query, key, value, attention_mask=mask, is_causal=is_causal, scale=scale, **given)
        close(ours.transpose(1, 2)[mask], (weights @ value / weights.sum(-1, keepdim=True)).transpose(1, 2)[mask])
