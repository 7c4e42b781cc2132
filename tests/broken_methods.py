"""Methods that each break one promise on purpose, to show that the check of that promise would notice.

All are small changes of the same correct dense attention. `broken(name)` registers one for as long as a test needs it.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.methods import MethodConfig, option, register_method, unregister
from instances import Instance


@dataclass(frozen=True, kw_only=True)
class BrokenConfig(MethodConfig):
    """A budget and a seed."""

    columns: int = option(8, "Budget.", minimum=1)
    seed: int = option(0, "Seed.", minimum=0)

    def with_budget(self, columns: int) -> "BrokenConfig":
        return dataclasses.replace(self, columns=columns)


def _scores(query, key, mask, is_causal, scale) -> Tensor:
    scores = query @ key.transpose(2, 3) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores


def _dense(query, key, value, mask, is_causal, scale) -> Tensor:
    """Correct dense attention: what all others here are changed from."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = _scores(query.to(wide), key.to(wide), mask, is_causal, scale)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return (weights @ value.to(wide)).to(value.dtype)


def correct(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    return _dense(query, key, value, mask, is_causal, scale)


def centred_on_all_keys(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """The mean that is taken off the values counts the keys that are not there."""
    mean = value.mean(2, keepdim=True)
    return _dense(query, key, value - mean, mask, is_causal, scale) + 2 * mean


def counts_masked_keys(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """Masked keys are zero, so they add nothing to the numerator, but they stay in the denominator."""
    return _dense(query, key, value, None, is_causal, scale)


def reads_masked_queries(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """Centres the queries on a mean over all positions, those of the padding included."""
    return _dense(query - query.mean(2, keepdim=True), key, value, mask, is_causal, scale)


def reads_masked_values(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """The norm of all queries at once, whatever stands in the padding, is the temperature."""
    return _dense(query / query.norm(), key, value, mask, is_causal, scale)


def maximum_over_the_sequence(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """FAVOR+'s stabiliser as published: one maximum over all keys, and an epsilon that then does not scale along."""
    scores = _scores(query, key, mask, False, scale)
    weights = (scores - scores.amax((-2, -1), keepdim=True)).exp() + 1e-3
    if is_causal:
        weights = weights.tril()
    return weights / weights.sum(-1, keepdim=True) @ value


def sorts_the_sequence(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """Causal attention within blocks of a sort over the whole sequence: who shares a block depends on what follows."""
    rank = query[..., 0].argsort(-1).argsort(-1) // config.columns
    scores = _scores(query, key, mask, is_causal, scale)
    scores = scores.masked_fill(rank[..., :, None] != rank[..., None, :], -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ value


def ignores_causality(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    return _dense(query, key, value, mask, False, scale)


def divides_by_the_length(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    return _dense(query, key, value, mask, is_causal, scale) * (1 + 1 / query.shape[2])


def mixes_the_batch(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    return _dense(query, key - key.mean(0, keepdim=True), value, mask, is_causal, scale)


def draws_by_batch_row(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """Its random directions differ from row to row, so that a row alone gets those of the first."""
    generator = torch.Generator().manual_seed(int(seed))
    turn = torch.randn(query.shape[0], 1, 1, query.shape[3], generator=generator)
    return _dense(query * turn.to(query.dtype), key, value, mask, is_causal, scale)


def draws_from_the_global_state(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    return _dense(query * torch.randn(query.shape[3]).to(query.dtype), key, value, mask, is_causal, scale)


def ignores_the_seed(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    turn = torch.randn(query.shape[3], generator=generator).to(query.dtype)
    return _dense(query * turn, key, value, mask, is_causal, scale)


def accumulates_in_half(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """q . k before the scale passes 65504, the largest float16."""
    scores = _scores(query, key, mask, is_causal, scale)
    return scores.softmax(-1) @ value


def sums_in_half(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """A running sum of the weights in the type of the input: at bfloat16 it stands still from 256 on."""
    weights = _scores(query.float(), key.float(), mask, is_causal, scale)
    weights = (weights - weights.amax(-1, keepdim=True)).exp().to(query.dtype)
    total = torch.zeros_like(weights[..., :1])
    for j in range(weights.shape[-1]):
        total = total + weights[..., j : j + 1]
    return (weights.float() @ value.float() / total.float()).to(value.dtype)


def never_subtracts_the_maximum(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    weights = _scores(query, key, mask, is_causal, scale).exp()
    return weights / weights.sum(-1, keepdim=True) @ value


def detaches_the_keys(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    return _dense(query, key.detach(), value, mask, is_causal, scale)


def forgets_the_denominator(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """The denominator gives no gradient: right as long as only the values are asked for."""
    weights = (_scores(query, key, mask, is_causal, scale) - 3.0).exp()
    total = weights.sum(-1, keepdim=True).detach()
    return weights / total.masked_fill(total == 0, 1.0) @ value


def never_converges(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """Its budget changes nothing."""
    return _dense(query * 0.5, key, value, mask, is_causal, scale)


def stops_short(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """Its error falls with the budget, but not to nothing."""
    return _dense(query * (0.9 - 0.5 / config.columns), key, value, mask, is_causal, scale)


def builds_all_pairs(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """Only one byte a pair, and on the way to an output that is right."""
    pairs = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    return torch.zeros_like(value[:, :, :1]).expand(-1, -1, query.shape[2], -1) + pairs[:1, :1]


def branches_on_values(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    if query.abs().max() > 1e6:
        query = query * 0.5
    return _dense(query, key, value, mask, is_causal, scale)


def empty_rows_are_nan(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    return _scores(query, key, mask, is_causal, scale).softmax(-1) @ value


def empty_rows_have_no_gradient(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """The output of an empty row is 0, but the gradient of its softmax is NaN, for every key."""
    bias = _scores(torch.zeros_like(query), torch.zeros_like(key), mask, is_causal, scale).detach()
    return (query @ key.transpose(2, 3) * scale + bias).softmax(-1).nan_to_num(0.0) @ value


def empty_rows_are_means(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """A large negative number in place of -inf: where nothing is left, all is left."""
    scores = _scores(query, key, mask, is_causal, scale).clamp(min=-1e9)
    return scores.softmax(-1) @ (value + 1.0)


def needs_even_lengths(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    query = query.unflatten(2, (-1, 2)).flatten(2, 3)
    return _dense(query, key, value, mask, is_causal, scale)


def returns_the_width_of_keys(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    return torch.zeros_like(query) + _dense(query, key, value, mask, is_causal, scale).sum()


@contextmanager
def broken(form: Callable, *, causal: bool = True, rectangular: bool = True, **promised) -> Iterator[Instance]:
    """`form` as a registered method named after it; yields its `Instance`, with what it claims in `promised`."""

    def forward(config, query, key, value, options):
        return form(config, query, key, value, options.key_mask, options.is_causal, options.scale, options.seed)

    name = form.__name__
    facts = {
        "method": name,
        "title": name,
        "paper": "none",
        "year": 2026,
        "causal": causal,
        "rectangular": rectangular,
        "summary": (form.__doc__ or name).splitlines()[0],
    }
    register_method(type("Config", (BrokenConfig,), facts), forward=forward, naive=forward)
    try:
        yield Instance(name, small={"columns": 4}, **promised)
    finally:
        unregister(name)
