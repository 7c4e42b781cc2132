"""Coresets: pivots, the regularized solve for the weights, candidates for pivots, and kernel halving."""

import itertools

import pytest
import torch
from torch import Tensor

from each import close
from hf_efficient_attn.ops import clusters, thinning
from hf_efficient_attn.ops.clusters import candidate_positions, nearest
from hf_efficient_attn.ops.draws import Draws, draw_sizes
from hf_efficient_attn.ops.nearfar.landmarks import draw_apart, gumbel_numbers
from hf_efficient_attn.ops.thinning import choose_pivots
from instances import CONTENTS, numbers, padding_mask

CONTENT = {"normal": lambda x, *_: [x], **CONTENTS}

CPU = torch.device("cpu")


def points_of(content: str, batch_heads: int = 6, count: int = 50, dim: int = 5) -> torch.Tensor:
    """Points (BH, C, D) of a kind, in float64."""
    x = numbers(1, batch_heads, count, dim)
    return CONTENT[content](x, x, x, torch.Generator().manual_seed(0))[-1][0].contiguous()


VALID = torch.arange(50) < torch.tensor([50, 41, 20, 5, 0, 1])[:, None]


def assert_different_valid(pivots: tuple[Tensor, Tensor], valid: torch.Tensor | None, count: int) -> None:
    """As many different valid candidates as there are, up to `count`."""
    valid = torch.ones(len(pivots[0]), 50, dtype=torch.bool) if valid is None else valid
    for index, selected, exists in zip(*pivots, valid, strict=True):
        chosen = index[selected]
        assert chosen.unique().numel() == len(chosen) == min(count, exists.sum())
        assert exists[chosen].all() and not index[~selected].any()


def choose_pivots_naive(
    points: Tensor, valid: Tensor | None, num_pivots: int, *, draws: Draws, batch: int, block: int = 64
) -> tuple[Tensor, Tensor]:
    """The readable form of `choose_pivots`: one head at a time, with the residual of the whole kernel in float64."""
    batch_heads, num_candidates, _ = points.shape
    sizes, num_heads = draw_sizes(num_pivots, 8, 1, block), batch_heads // batch
    gumbel = thinning.gumbel(draws, len(sizes), num_candidates, num_heads, torch.float64)
    index = torch.zeros(batch_heads, num_pivots, dtype=torch.int64)
    selected = torch.zeros(batch_heads, num_pivots, dtype=torch.bool)
    for a in range(batch_heads):
        own = points[a].double()
        exists = torch.ones(num_candidates, dtype=torch.bool) if valid is None else valid[a]
        residual = torch.exp(-0.5 * (own[:, None] - own).square().sum(2))
        norm = own.square().sum(1)
        norm = (norm - norm[exists].amax()).clamp(min=thinning._LEAST) if exists.any() else norm
        chosen: list[int] = []
        for draw, size in enumerate(sizes):
            diagonal = residual.diagonal().clamp(min=0.0)
            scores = gumbel[draw, a % num_heads] + thinning._LAST
            new = diagonal > thinning.TOLERANCE[points.dtype]
            scores[new] = (diagonal.log() + norm + gumbel[draw, a % num_heads])[new]
            scores[~exists] = -torch.inf
            scores[chosen] = -torch.inf
            draws = [int(i) for i in scores.argsort(descending=True)[:size] if scores[i] > -torch.inf]
            chosen += draws
            used = [i for i in draws if new[i]]
            inverse = torch.linalg.pinv(residual[used][:, used], hermitian=True, rtol=1e-9)
            residual = residual - residual[:, used] @ inverse @ residual[used]
        index[a, : len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
        selected[a, : len(chosen)] = True
    return index, selected


@pytest.mark.parametrize("content", CONTENT)
def test_pivots_are_those_of_the_readable_form(content):
    points = points_of(content)
    for valid, count in itertools.product((None, VALID), (1, 8, 37)):
        ours = choose_pivots(points, valid, count, draws=Draws(3, CPU), batch=3)
        assert all(map(torch.equal, ours, choose_pivots_naive(points, valid, count, draws=Draws(3, CPU), batch=3)))
        assert_different_valid(ours, valid, count)


@pytest.mark.parametrize("factor", [1e-3, 1.0, 30.0, 100.0])
@pytest.mark.parametrize("content", CONTENT)
def test_pivots_in_float32_are_different_and_valid(content, factor):
    """Up to squared norms of some 1e5, where most kernel values are 0 or 1."""
    points = (points_of(content) * factor).float()
    for valid in (None, VALID):
        assert_different_valid(choose_pivots(points, valid, 37, draws=Draws(0, CPU), batch=1, block=16), valid, 37)


def test_first_pivot_has_the_probability_of_its_diagonal():
    points = numbers(1, 4, 2).mul(0.7)
    # Heads have independent numbers, so that many equal heads are many draws.
    index = choose_pivots(points.expand(20000, -1, -1), None, 1, draws=Draws(0, CPU), batch=1)[0]
    shares = index.flatten().bincount(minlength=4) / 20000
    torch.testing.assert_close(shares.double(), points[0].square().sum(1).softmax(0), atol=0.015, rtol=0.0)


@pytest.mark.parametrize("columns", [3, 100])  # by solves, and by the inverse
@pytest.mark.parametrize("needs_grad", [False, True])
def test_regularized_solve_of_an_indefinite_matrix(needs_grad, columns):
    """Rounding can make a kernel matrix indefinite by more than the ridge. The other heads keep the ridge."""
    points = points_of("normal", 1, 30)[0].float()
    kernel = torch.stack((torch.ones(30, 30), torch.exp(-0.5 * torch.cdist(points, points).square())))
    kernel[0, 0, 1] = kernel[0, 1, 0] = 1.05
    right = torch.ones(2, 30, columns)
    assert torch.linalg.cholesky_ex(kernel[0] + 1e-3 * torch.eye(30)).info > 0
    kernel.requires_grad_(needs_grad)
    out = clusters.regularized_solve(kernel, right, 1e-3)
    assert out.isfinite().all() and out[0].abs().max() < 10.0
    close(out[1], torch.linalg.solve(kernel[1] + 1e-3 * torch.eye(30), right[1]), 1e-2)
    if needs_grad:
        out.sum().backward()
        assert kernel.grad.isfinite().all()


def test_candidates_are_spread_over_the_valid_keys():
    for length, limit in ((10, 20), (20, 20), (41, 20)):
        position, valid = candidate_positions(torch.ones(1, length, dtype=torch.bool), limit)
        assert valid.all() and position.shape == (1, min(length, limit))
        gaps = position[0].diff()
        assert position[0, 0] == 0 and gaps.min() >= length // limit and gaps.max() <= -(-length // limit)
    mask = torch.rand(5, 60, generator=torch.Generator().manual_seed(0)) < torch.tensor([[0.9], [0.5], [0.2], [0], [2]])
    for position, valid, keys in zip(*candidate_positions(mask, 20), mask, strict=True):
        alone, _ = candidate_positions(keys[keys][None], 20)
        assert torch.equal(position[valid], keys.nonzero()[:, 0][alone[0]])
        assert valid.int().diff().max() <= 0  # the ones that exist come first
    points, landmarks = numbers(3, 40, 5).float(), numbers(3, 9, 5, seed=1).float()
    assert torch.equal(nearest(points, landmarks), torch.cdist(points, landmarks).argmin(2))


def test_a_draw_apart_does_not_repeat_a_cluster():
    """A hundred far clusters, and 64 points at once: the next draw sees which clusters are left."""
    points = (6.0 * numbers(1, 100, 5).float()).repeat(1, 10, 1) + 0.01 * numbers(1, 1000, 5, seed=1).float()
    gumbel = gumbel_numbers(256, 1000, Draws(0, CPU), points.dtype)
    chosen = draw_apart(points, torch.zeros(points.shape[:2]), gumbel, 256)
    assert (chosen[0] % 100).unique().numel() == 100
    assert chosen.unique().numel() == 256


# Kernel halving, for the Thinformer.


def thin(key, value, num_samples, mask=None, scale=0.3, seed=0, batch=1):
    return thinning.thin(key, value, mask, num_samples, scale=scale, draws=Draws(seed, CPU), batch=batch)


def counts(thinned, length):
    """The number of tokens that each token represents, (BH, N)."""
    return torch.zeros(len(thinned[0]), length).double().scatter_add_(1, thinned[0], thinned[1].exp())


@pytest.mark.parametrize("padding", ["none", "left", "holes", "empty"])
@pytest.mark.parametrize(("length", "num_samples"), [(2, 1), (50, 7), (50, 32), (50, 49), (64, 16), (999, 24)])
def test_every_valid_token_is_counted_once(length, num_samples, padding):
    mask = padding_mask(padding, 4, length)
    key, value = numbers(4, length, 6), numbers(4, length, 5, seed=1)
    thinned = thin(key, value, num_samples, mask)
    assert thinned[0].shape == (4, num_samples)
    found, valid = counts(thinned, length).round(decimals=9), torch.ones(4, length) if mask is None else mask
    torch.testing.assert_close(found.sum(1), valid.sum(1).double())
    assert not found[~valid.bool()].any(), "a masked token is kept"
    num_tokens = valid.sum(1)
    assert torch.equal((found > 0).sum(1), num_tokens.clamp(max=num_samples).long()), "a token is kept twice"
    # All kept tokens represent nearly the same number of tokens: their share, rounded down or up.
    assert (found.amax(1) <= -(-num_tokens // num_samples)).all()


def test_every_token_is_kept_equally_often():
    """The expected count of every token is 1, whatever the kernel, and also if counts differ."""
    length, num_samples, runs = 13, 4, 4000
    key, value = numbers(1, length, 4).mul(0.5), numbers(1, length, 4, seed=1)
    # The heads of a call have their own random numbers.
    mean = counts(thin(key.expand(runs, -1, -1), value.expand(runs, -1, -1), num_samples), length).mean(0)
    assert (mean - 1.0).abs().max() < 5 * (4.0 / runs) ** 0.5, mean


def test_halving_represents_the_tokens_better_than_fair_draws(monkeypatch):
    """The sums of the kernel over the kept tokens are closer to those over all tokens than without the walk."""
    length, num_samples = 600, 300
    key, value = numbers(10, length, 1).mul(0.5), numbers(10, length, 1, seed=1)
    kernel = (0.3 * key @ key.mT).exp() * (value @ value.mT + value.abs().amax((1, 2), keepdim=True) ** 2)

    def error():
        wrong = counts(thin(key, value, num_samples), length) - 1.0
        return torch.einsum("bi,bij,bj->b", wrong, kernel, wrong).sqrt().mean().item()

    ours, pair_kernel = error(), thinning._pair_kernel
    monkeypatch.setattr(thinning, "_pair_kernel", lambda *tensors: pair_kernel(*tensors).zero_())
    assert ours < 0.7 * error()


@pytest.mark.parametrize("g", [1, 2, 3])
@pytest.mark.parametrize("log4", [3, 4, 6])
def test_sizes_of_the_paper(log4, g):
    """KH-Compress(g) keeps 2^g sqrt(n) of n = 4^log4 tokens in log4 - g rounds with buckets of 4^(g + 1) 2^i tokens."""
    rounds = thinning._rounds(4**log4, 2**g * 2**log4)
    assert [2 * bucket for _, bucket in reversed(rounds)] == [4 ** (g + 1) * 2**i for i in range(log4 - g)]
    thinned = thin(numbers(2, 4**log4, 4), numbers(2, 4**log4, 4, seed=1), 2**g * 2**log4)
    torch.testing.assert_close(thinned[1].exp(), torch.full_like(thinned[1], 2.0 ** (log4 - g)))


def test_random_numbers_differ_between_heads_and_rounds_and_not_with_the_length():
    longer, shorter = (thinning.draw_numbers(Draws(5, CPU), n, 16, 3) for n in (200, 70))
    assert [x.shape for x in longer] == [(3, 16 * 2**i) for i in range(4)]
    assert len(shorter) == 3 and all(torch.equal(x, y) for x, y in zip(longer, shorter, strict=False))
    together = torch.cat(longer, 1)
    assert len(together.unique()) == together.numel() and together.abs().max() < 1
