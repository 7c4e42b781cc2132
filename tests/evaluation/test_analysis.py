"""Measures of attention matrices on cases with known results, and the commands on small inputs."""

import math

import pytest
import torch

import hf_efficient_attn as hea
from each import refuses
from hf_efficient_attn import analysis
from hf_efficient_attn.analysis import matrices as dense
from hf_efficient_attn.analysis import sparsity as kernel_sparsity
from instances import numbers


def gaussian_kernel(query, key):
    """The kernel matrix of lemma 4.1 and assumption A of the KDEformer paper for one head: (n, d), (n, d) -> (n, n)."""
    query, key = query.double(), key.double()
    squares = key.square().sum(1)
    key = torch.cat((key, (squares.max() - squares).sqrt()[:, None]), 1)
    query = torch.cat((query, torch.zeros(len(query), 1, dtype=torch.float64)), 1)
    return torch.exp(-(query[:, None] - key[None]).square().sum(2) / (2 * math.sqrt(query.shape[1] - 1)))


def test_head_and_tail_of_the_kernel_matrix(monkeypatch):
    """The sums of every prefix, and the ratios of the n-th largest entry to the 2n-th and the next."""
    query, key = numbers(6, 23, 6), numbers(6, 23, 6, seed=1)
    found = analysis.head_to_tail(query.unflatten(0, (2, 3)), key.unflatten(0, (2, 3)), first=4)
    assert found.shape == (2, 3, 20) and found.dtype == torch.float64
    ratios = analysis.order_statistics_ratio(query, key)
    for h, head in enumerate(found.flatten(0, 1).tolist()):
        kernel = gaussian_kernel(query[h], key[h])
        for i in range(4, 24):
            entries = kernel[:i, :i].flatten().sort(descending=True).values
            assert head[i - 4] == pytest.approx((entries[i:].sum() / entries[:i].sum()).item())
        assert ratios.to_double[h].item() == pytest.approx((entries[22] / entries[45]).item())
        assert ratios.to_next[h].item() == pytest.approx((entries[22] / entries[23]).item())
    monkeypatch.setattr(kernel_sparsity, "_CHUNK_ENTRIES", 1100)  # two heads of 23 x 23 at a time
    assert torch.equal(found.flatten(0, 1), analysis.head_to_tail(query, key, first=4))


@pytest.mark.parametrize(
    ("query", "key", "options", "expected"),
    [
        # All entries are equal. The head has i of them and the tail i^2 - i.
        (torch.zeros(60, 4), torch.zeros(60, 4), {}, [i - 1 for i in range(50, 61)]),
        # |q_i - k_j|^2 is 2 s^2 off the diagonal and 0 on it. With scale 1/2 the entries are exp(-s^2 / 2) and 1.
        (3 * torch.eye(16), 3 * torch.eye(16), {"scale": 0.5, "first": 2}, [i * math.exp(-4.5) for i in range(1, 16)]),
        # The last query is 0, so the entries of its row are e^5000 times as large as the others: no underflow.
        (torch.tensor([100.0] * 7 + [0.0])[:, None], torch.zeros(8, 1), {"scale": 1.0, "first": 3}, [2, 3, 4, 5, 6, 0]),
    ],
    ids=["equal", "diagonal", "small"],
)
def test_head_to_tail_of_known_kernels(query, key, options, expected):
    assert analysis.head_to_tail(query, key, **options).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_softmax_matrix():
    query, key = numbers(2, 4, 5, 3), numbers(2, 2, 7, 3, seed=1)
    mask = torch.arange(7) < torch.tensor([[4], [7]])
    key[0, :, 4:] = torch.nan
    found = analysis.softmax_matrix(query, key, attention_mask=mask, is_causal=True)
    # The queries are the last five of seven positions.
    seen = mask[:, None, None] & (torch.arange(7) <= torch.arange(5)[:, None] + 2)
    weights = torch.exp(query @ key.nan_to_num(0.0).repeat_interleave(2, 1).mT / math.sqrt(3)) * seen
    assert torch.allclose(found, weights / weights.sum(3, keepdim=True), atol=1e-6)
    found = analysis.softmax_matrix(numbers(1, 1, 3, 2), numbers(1, 1, 2, 2), is_causal=True)
    assert found.sum(3).flatten().tolist() == pytest.approx([0.0, 1.0, 1.0])  # the first row has no key


def test_stable_rank_of_known_matrices():
    matrices = torch.stack([torch.eye(4), torch.ones(4, 4), torch.diag(torch.tensor([1.0, 2.0, 2.0, 0.0]))])
    assert analysis.stable_rank(matrices).tolist() == pytest.approx([4.0, 1.0, 9 / 4])
    assert analysis.stable_rank(torch.zeros(2, 3, 3)).tolist() == [0.0, 0.0]


NEAR_FIELDS = [
    hea.LongformerConfig(window_size=3),
    *(
        config_class(block_size=6, num_samples=0, near_field=near_field)
        for config_class in (hea.KDEformerConfig, hea.HyperAttentionConfig)
        for near_field in ("lsh", "window", "auto")
    ),
]


@pytest.mark.parametrize("config", NEAR_FIELDS, ids=repr)
def test_near_field_is_what_the_method_computes_without_samples(config):
    query, key, value = numbers(2, 2, 33, 8), numbers(2, 2, 33, 8, seed=1), numbers(2, 2, 33, 5, seed=2)
    mask = torch.arange(33) < torch.tensor([[33], [25]])
    for causal in (False, True):
        options = {"attention_mask": mask, "is_causal": causal, "seed": 3}
        pairs = analysis.near_field_pairs(config, query, key, **options)
        scores = (query @ key.transpose(2, 3) / math.sqrt(8)).masked_fill(~pairs, -torch.inf)
        expected = scores.softmax(3).nan_to_num(0.0) @ value
        assert torch.allclose(hea.attention(config, query, key, value, **options), expected, atol=1e-5)
        assert not pairs[1, :, :, 25:].any()


@pytest.mark.parametrize("method", ["kdeformer", "hyperattention"])
@pytest.mark.parametrize("padding", [0, 5])
def test_a_window_is_centered_on_its_queries_and_reaches_both_ends(method, padding):
    query, key, valid = numbers(1, 1, 33, 8), numbers(1, 1, 33, 8, seed=1), 33 - padding
    config = hea.method_info(method).config_class(block_size=8, num_samples=4, near_field="window")
    pairs = analysis.near_field_pairs(config, query, key, attention_mask=torch.arange(33)[None] < valid)[0, 0, :valid]
    windows = [tuple(row.nonzero().flatten().tolist()) for row in pairs]
    assert all(window == tuple(range(window[0], window[0] + 8)) for window in windows)
    first, *inner, last = sorted(set(windows))
    assert first[0] == 0 and last[-1] == valid - 1 and len(inner) > 1
    for window in inner:  # as many keys before its queries as after them
        queries = [i for i, own in enumerate(windows) if own == window]
        assert queries[0] - window[0] == window[-1] - queries[-1] > 0


def test_the_near_field_holds_most_of_the_stable_rank():
    # Eight well separated clusters of consecutive tokens: the softmax matrix is close to eight blocks of 1/8.
    points, options = 4.0 * torch.eye(8).repeat_interleave(8, 0)[None, None], {"scale": 0.5}
    config = hea.KDEformerConfig(block_size=8, num_hashes=20, near_field="lsh")
    whole, pairs = analysis.softmax_matrix(points, points, **options), analysis.near_field_pairs(config, points, points)
    found = whole.masked_fill(pairs, 0.0)
    assert analysis.stable_rank(whole).item() == pytest.approx(8.0, rel=0.1)
    assert analysis.stable_rank(found).item() < analysis.stable_rank(whole).item()


LOCAL = torch.ones(600, 600, dtype=torch.float64).tril(3).triu(-3)


@pytest.mark.parametrize(
    "matrix",
    [numbers(*shape) for shape in ((9, 5), (5, 9), (2, 3, 40, 7), (600, 700), (2, 530, 520))]
    # Largest singular values that are close together, or far from the others.
    + [LOCAL / LOCAL.sum(1, keepdim=True), (3 * numbers(600, 600)).softmax(1), torch.eye(700)],
    ids=lambda matrix: f"{tuple(matrix.shape)}",
)
def test_operator_norm(matrix):
    expected, random = torch.linalg.matrix_norm(matrix.double(), ord=2), torch.get_rng_state()
    torch.testing.assert_close(dense.operator_norm(matrix), expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(dense.operator_norm(1e200 * matrix.double()), 1e200 * expected, rtol=1e-4, atol=0)
    assert torch.equal(torch.get_rng_state(), random)


def test_operator_norm_of_special_matrices():
    found = dense.operator_norm(torch.tensor([[[1.0, torch.nan], [0.0, 1.0]], [[3.0, 0.0], [0.0, 4.0]]]))
    assert found[0].isnan() and found[1] == pytest.approx(4.0)
    assert dense.operator_norm(torch.zeros(3, 0, 4)).tolist() == [0.0, 0.0, 0.0]
    assert dense.operator_norm(torch.zeros(2, 600, 600)).tolist() == [0.0, 0.0]


def test_relative_error():
    exact = torch.stack([torch.diag(torch.tensor([4.0, 1.0])), torch.diag(torch.tensor([0.0, 2.0])), torch.zeros(2, 2)])
    other = torch.stack([torch.diag(torch.tensor([4.0, 3.0])), torch.zeros(2, 2), torch.zeros(2, 2)])
    found = analysis.relative_error(other, exact)
    assert found.operator.tolist() == pytest.approx([0.5, 1.0, 0.0])
    assert found.frobenius.tolist() == pytest.approx([2 / math.sqrt(17), 1.0, 0.0])
    assert analysis.relative_error(torch.ones(1, 1), torch.zeros(1, 1)).operator.item() == math.inf


@pytest.mark.parametrize(("causal", "padded", "length"), [(False, True, 5), (True, False, 9), (True, True, 12)])
def test_exact_output_is_the_softmax_matrix_times_values(causal, padded, length, monkeypatch):
    monkeypatch.setattr(dense, "_CHUNK_QUERIES", 4)
    query, key, value = numbers(2, 4, length, 3), numbers(2, 2, 9, 3, seed=1), numbers(2, 2, 9, 6, seed=2)
    mask = None
    if padded:
        mask = torch.ones(2, 9, dtype=torch.bool)
        mask[0, :3] = mask[1] = False
        value[0, :, :3] = torch.nan
    options = {"attention_mask": mask, "is_causal": causal}
    found = analysis.exact_output(query, key, value, **options)
    expected = analysis.softmax_matrix(query, key, **options) @ value.nan_to_num(0).double().repeat_interleave(2, 1)
    assert torch.allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize(("causal", "padded"), [(False, True), (True, False)])
def test_attention_error_by_head_and_seed(causal, padded):
    mask = torch.arange(40) < torch.tensor([[30 if padded else 40], [40]])
    given = (numbers(2, 3, 40, 8, seed=i).masked_fill(~mask[:, None, :, None], torch.nan) for i in range(3))
    given = [x.requires_grad_() for x in given]
    masks = {"attention_mask": mask if padded else None, "is_causal": causal}
    options = {"block_size": 4, "num_samples": 4, **masks}
    found, other = (analysis.attention_error("hyperattention", *given, seed=seed, **options) for seed in (5, 6))
    exact = analysis.exact_output(*given, **masks)
    out = hea.attention("hyperattention", *given, seed=5, **options).double()
    out, exact = (x.masked_fill(~mask[:, None, :, None], 0.0) for x in (out, exact))
    error = torch.linalg.matrix_norm(out - exact, 2) / torch.linalg.matrix_norm(exact, 2)
    torch.testing.assert_close(found.operator, error.detach(), rtol=1e-6, atol=0)
    assert found.frobenius.shape == (2, 3) and (found.frobenius > 1e-3).all()
    assert not torch.equal(found.operator, other.operator) and not found.operator.requires_grad
    known = analysis.attention_error("hyperattention", *given, seed=5, exact=exact, **options)
    assert torch.allclose(found.operator, known.operator)
    assert all((x < 1e-5).all() for x in analysis.attention_error(hea.KDEformerConfig(block_size=40), *given, **masks))


T, Q, LONG = torch.zeros(60, 2), numbers(1, 1, 9, 4), torch.zeros(1, 1, 1, 1).expand(1, 1, 40000, 1)
REFUSALS = [
    *(
        (message, lambda measure=measure, given=given: measure(*given))
        for measure in (analysis.head_to_tail, analysis.order_statistics_ratio)
        for message, given in [
            ("of one shape", (torch.zeros(2, 3), torch.zeros(3, 3))),
            ("floating", (T.long(), T.long())),
            ("contains no numbers", (T[..., :0], T[..., :0])),
            ("4096 tokens or fewer", (torch.zeros(1, 1).expand(5000, 1),) * 2),
        ]
    ),
    *(("first", lambda first=first: analysis.head_to_tail(T, T, first=first)) for first in (0, 61, 2.0, True)),
    ("at least 2 tokens", lambda: analysis.order_statistics_ratio(T[:1], T[:1])),
    *(
        ("longformer", lambda method=method: analysis.near_field_pairs(method, Q, Q))
        for method in ("linear", "performer")
    ),
    ("smaller block_size", lambda: analysis.near_field_pairs("kdeformer", Q, Q)),
    ("12 GiB", lambda: analysis.softmax_matrix(LONG, LONG)),
    ("fewer tokens", lambda: analysis.near_field_pairs("kdeformer", LONG, LONG)),
    ("GiB", lambda: analysis.stable_rank(torch.zeros(1, 1, 1).expand(100, 3000, 3000))),
    ("floating", lambda: analysis.stable_rank(torch.zeros(3))),
    ("floating", lambda: analysis.stable_rank(torch.zeros(2, 2, dtype=torch.int64))),
    ("of one shape", lambda: analysis.relative_error(torch.zeros(3, 2), torch.zeros(2, 3))),
    ("kdeformr", lambda: analysis.attention_error("kdeformr", Q, Q, Q)),
    ("does not match key", lambda: analysis.exact_output(Q, Q, Q[:, :, :5])),
    ("must be bool", lambda: analysis.softmax_matrix(Q, Q, attention_mask=torch.ones(1, 9))),
    ("must divide", lambda: analysis.softmax_matrix(Q, Q.expand(1, 2, 9, 4))),
    ("length, head_dim", lambda: analysis.softmax_matrix(Q[0], Q[0])),
]


@pytest.mark.parametrize(("message", "call"), REFUSALS)
def test_refusals(message, call):
    refuses(message, call)
