"""The causal form of nearfar: chunks of the past, landmarks, and clusters that every query chooses.

The promises compare it with its readable form.
"""

import pytest
import torch

from each import DEVICE, close, count_moved, needs_triton
from hf_efficient_attn.analysis import exact_output
from hf_efficient_attn.ops.backends import cluster_attention
from hf_efficient_attn.ops.nearfar import causal as causal_nearfar
from hf_efficient_attn.ops.nearfar.causal import causal_nearfar_attention, causal_nearfar_naive
from hf_efficient_attn.ops.nearfar.chunks import cluster_index, levels_of, members_of, split_columns
from instances import inputs, numbers, relative_error
from recipes.common import kernel_costs


def tensors(length, seed=0):
    """Query, key with a mean, and value: (4, N, 8), (4, N, 8), (4, N, 5)."""
    query, key, value = (x[0] for x in inputs(1, 4, length, value_dim=5, seed=seed, dtype=torch.float64))
    return 1.5 * query, 1.5 * key + 0.5, value


def causal(query, key, value, columns, scale=8**-0.5):
    return causal_nearfar_attention(query, key, value, split_columns(columns, scale))


def exact(*tensors, scale=None):
    return exact_output(*(x[None] for x in tensors), is_causal=True, scale=scale)[0]


@pytest.mark.parametrize("columns", range(1, 41))
def test_the_window_has_at_least_the_budget_and_clusters_fill_blocks(columns):
    options = split_columns(columns, 1.0)
    assert columns <= 2 * options.block_size <= 2 * columns + 16
    for chunk, leaf in levels_of(10_000, options):
        clusters = chunk // leaf
        assert chunk % leaf == 0 and clusters & (clusters - 1) == 0


def test_each_key_is_in_one_cluster_of_its_chunk():
    query, key, _ = tensors(300)
    levels = levels_of(300, split_columns(8, 1.0))
    assert [level.chunk for level in levels] == [4, 16, 64, 256]
    for (chunk, leaf), index in zip(levels, members_of(cluster_index(query, key, levels), 300, levels), strict=True):
        of_chunk = index.view(4, -1, chunk)
        assert index.shape[2] == leaf
        assert torch.equal(of_chunk.sort()[0].flatten(1), torch.arange(of_chunk[0].numel()).expand(4, -1))


@pytest.mark.parametrize("columns", [4, 20])
def test_the_output_depends_neither_on_later_tokens_nor_on_the_length(columns):
    """Around every boundary of blocks, spans and chunks, and for any later tokens."""
    block = split_columns(columns, 1.0).block_size
    given = [x[:2] for x in tensors(22 * block)]
    whole = causal(*given, columns)
    close(whole[:, : 2 * block], exact(*given)[:, : 2 * block])
    for cut in sorted({n * block + off for n in (1, 2, 3, 4, 5, 6, 8, 9, 16, 17, 18, 20, 21) for off in (-1, 0, 1)}):
        close(causal(*(x[:, :cut] for x in given), columns), whole[:, :cut], 1e-9)
        later = [torch.cat((x[:, :cut], 9.0 * numbers(2, x.shape[1] - cut, x.shape[2], seed=cut)), 1) for x in given]
        close(causal(*later, columns)[:, :cut], whole[:, :cut], 1e-9)


def test_later_tokens_of_any_size_change_nothing():
    """In float32, whose range the fourth powers of numbers exceed."""
    given = [x.float() for x in tensors(420)]
    expected = causal(*given, 32)[:, :300]
    close(causal(*[torch.cat((x[:, :300], 1e18 * x[:, 300:]), 1) for x in given], 32)[:, :300], expected, 1e-5)


@pytest.mark.parametrize("first", [1, 7, 8, 9, 30, 39, 40, 41, 72, 150, 199])
def test_the_last_queries_alone(first):
    """As in a prompt that is computed in chunks."""
    given = tensors(200)
    out = causal_nearfar_attention(*given, split_columns(16, 8**-0.5)._replace(first_query=first))
    close(out[:, first:], causal(*given, 16)[:, first:], 1e-9)


def test_a_constant_in_all_keys_and_equal_keys():
    """Softmax does not see a constant. Where all keys of a cluster are equal its landmark is exact."""
    query, key, value = tensors(200)
    close(causal(query, key + 5.0, value, 32), causal(query, key, value, 32), 1e-7)
    key = key[:, :1].expand_as(key)
    assert relative_error(causal(query, key, value, 32), exact(query, key, value)) < 1e-9


def test_every_query_finds_single_keys(monkeypatch):
    """Each query attends to the one key 500 positions before it, which landmarks do not tell from others."""
    topic = numbers(2, 16, 32)[:, torch.randint(16, (1200,), generator=torch.Generator().manual_seed(0))]
    key = 6.0 * torch.nn.functional.normalize(topic + numbers(2, 1200, 32, seed=1), dim=2)
    given = [x.float() for x in (key.roll(500, 1), key, numbers(2, 1200, 8, seed=2))]
    expected = exact(*given, scale=1.0)
    errors = []
    for least in (causal_nearfar._LEAST, 2.0):  # no cluster is chosen
        monkeypatch.setattr(causal_nearfar, "_LEAST", least)
        errors.append(relative_error(causal(*given, 96, scale=1.0)[:, 600:], expected[:, 600:]))
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.parametrize("seed", range(3))
def test_lengths_that_differ_by_orders_of_magnitude(seed):
    given = [x * 3.0 ** numbers(4, 60, 1, seed=10 + i) for i, x in enumerate(tensors(60, seed))]
    close(causal(*given, 4, scale=1.7), causal_nearfar_naive(*given, split_columns(4, 1.7)), 1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 15.0, 60.0])
def test_gradients_are_finite_where_nothing_but_a_chosen_cluster_counts(dtype, factor):
    """Without it the weights of landmarks are far below the smallest normal number."""
    leaves = [(factor * numbers(4, 700, 32, seed=i)).to(dtype).requires_grad_() for i in range(3)]
    out = causal(*leaves, 64, scale=32**-0.5)
    assert all(x.isfinite().all() for x in (out, *torch.autograd.grad(out.float().sum(), leaves)))


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_chooses_the_same_whatever_the_scale(dim, dtype):
    given = [numbers(2, 600, dim, seed=i).to(dtype) for i in range(3)]
    found, expected = (causal(*(x.to(t) for x in given), 16, scale=3 * dim**-0.5) for t in (dtype, torch.float64))
    assert relative_error(found, expected) < 2 * torch.finfo(dtype).eps


def of_kernels(length=300, dims=(16, 16), dtype=torch.float32):
    """Query, key and value that have peaked weights, so that queries choose different clusters."""
    return [(2.0 * numbers(2, length, n, seed=i)).to(DEVICE, dtype) for i, n in enumerate((dims[0], *dims))]


@needs_triton
@pytest.mark.parametrize(
    ("columns", "given", "first"),
    [
        (64, {}, 0),
        (33, {"length": 150, "dims": (20, 12)}, 0),  # blocks and clusters of odd sizes
        (64, {"length": 290}, 150),
        (16, {"length": 150, "dims": (32, 8)}, 0),  # four levels, of which the last has larger clusters
        (64, {"dtype": torch.bfloat16}, 0),
        (64, {"dtype": torch.float16}, 0),
    ],
)
def test_kernels_compute_the_same(columns, given, first, kernels):
    given = of_kernels(**given)
    options = split_columns(columns, 0.25, with_lse=True)._replace(first_query=first)
    out = causal_nearfar_attention(*given, options)
    assert [x.name for x in kernels] == ["cluster_landmarks", "cluster_attention"]
    expected = causal_nearfar_naive(*given, options)
    # A rounded score may change a choice.
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}[given[0].dtype]
    assert relative_error(out[:, first:], expected[:, first:]) < tolerance


@needs_triton
def test_calls_that_kernels_do_not_take(kernels):
    options = split_columns(64, 0.25)
    given = of_kernels()
    causal_nearfar_attention(*(x.requires_grad_() for x in given), options).sum().backward()
    causal_nearfar_attention(*(x.detach() for x in given), options._replace(dropout_p=0.1))
    assert not {x.name for x in kernels} & {"cluster_landmarks", "cluster_attention"}


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_check_of_the_kernels(dtype, kernels, monkeypatch):
    calls = []
    backend = cluster_attention.BACKEND._replace(applies=lambda call, plain: bool(calls.append((call, plain))))
    monkeypatch.setattr(causal_nearfar, "CLUSTER_BACKENDS", (backend,))
    causal_nearfar_attention(*of_kernels(dtype=dtype), split_columns(64, 0.25))
    ((call, plain),) = calls
    cluster_attention.check(call, plain)
    with pytest.raises(ArithmeticError, match="differs"):
        cluster_attention.check(call, lambda small: plain(small._replace(value=1.2 * small.value)))


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts in the interpreter")
def test_costs_are_what_the_kernels_move(kernels, monkeypatch):
    """Without chosen clusters, whose number the costs assume."""
    moved = count_moved(monkeypatch)
    monkeypatch.setattr(causal_nearfar, "_LEAST", 2.0)
    monkeypatch.setattr(kernel_costs, "_CHOSEN", 0)
    causal_nearfar_attention(*of_kernels(dtype=torch.bfloat16), split_columns(64, 0.25))
    assert moved[0] == pytest.approx(sum(kernel_costs.COSTS[x.name](x).moved for x in kernels), rel=0.1)
