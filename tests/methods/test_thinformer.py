"""Kernel halving and the Thinformer."""

import pytest
import torch

from hf_efficient_attn.ops import thinning
from instances import numbers, padding_mask


def thin(key, value, num_samples, mask=None, scale=0.3, seed=0, batch=1):
    return thinning.thin(key, value, mask, num_samples, scale=scale, seed=seed, batch=batch)


def counts(thinned, length):
    """How many tokens each token stands for, (BH, N)."""
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
    # The kept tokens stand for nearly equal numbers: the places of a group hold floor or ceil of their share.
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
    longer, shorter = (thinning.draw_numbers(n, 16, 3, 5, torch.device("cpu")) for n in (200, 70))
    assert [x.shape for x in longer] == [(3, 16 * 2**i) for i in range(4)]
    assert len(shorter) == 3 and all(torch.equal(x, y) for x, y in zip(longer, shorter, strict=False))
    together = torch.cat(longer, 1)
    assert len(together.unique()) == together.numel() and together.abs().max() < 1
