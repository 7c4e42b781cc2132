"""Methods that each break one promise on purpose, to show that the check of that promise fails for them.

Each is a small change of the same correct dense attention. `broken(form)` registers one for the duration of a test.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.methods import MethodConfig, option, register_method
from instances import Instance, unregister


@dataclass(frozen=True, kw_only=True)
class BrokenConfig(MethodConfig):
    """Hyperparameters of the broken methods."""

    columns: int = option(8, "Budget.", minimum=1)
    seed: int = option(0, "Seed.", minimum=0)

    @property
    def exact_length(self) -> int:
        """What each of the methods claims."""
        return self.columns

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
    """Correct dense attention, from which all methods of this file are derived."""
    acc_dtype = torch.promote_types(query.dtype, torch.float32)
    scores = _scores(query.to(acc_dtype), key.to(acc_dtype), mask, is_causal, scale)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return (weights @ value.to(acc_dtype)).to(value.dtype)


def correct(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    return _dense(query, key, value, mask, is_causal, scale)


def centred_on_all_keys(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """The mean that is subtracted from the values includes masked keys."""
    mean = value.mean(2, keepdim=True)
    return _dense(query, key, value - mean, mask, is_causal, scale) + 2 * mean


def counts_masked_keys(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """Masked keys are zero and add nothing to the numerator, but they count in the denominator."""
    return _dense(query, key, value, None, is_causal, scale)


def reads_masked_queries(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """Subtracts from the queries their mean over all positions, including padding."""
    return _dense(query - query.mean(2, keepdim=True), key, value, mask, is_causal, scale)


def divides_by_the_norm_of_all_queries(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """The temperature is the norm of all queries, including those of padding."""
    return _dense(query / query.norm(), key, value, mask, is_causal, scale)


def maximum_over_the_sequence(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """The stabiliser of FAVOR+ as published: one maximum over all keys, and an epsilon that does not scale with it."""
    scores = _scores(query, key, mask, False, scale)
    weights = (scores - scores.amax((-2, -1), keepdim=True)).exp() + 1e-3
    if is_causal:
        weights = weights.tril()
    return weights / weights.sum(-1, keepdim=True) @ value


def sorts_the_sequence(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """Causal attention within blocks of a sort over the whole sequence, so later tokens determine the blocks."""
    rank = query[..., 0].argsort(-1).argsort(-1) // config.columns
    scores = _scores(query, key, mask, is_causal, scale)
    scores = scores.masked_fill(rank[..., :, None] != rank[..., None, :], -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ value


def ignores_causality(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    return _dense(query, key, value, mask, False, scale)


def depends_on_the_length(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    return _dense(query, key, value, mask, is_causal, scale) * (1 + 1 / query.shape[2])


def mixes_the_batch(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    return _dense(query, key - key.mean(0, keepdim=True), value, mask, is_causal, scale)


def draws_by_batch_index(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """Each sequence of a batch has its own random directions, so a sequence alone gets those of the first."""
    generator = torch.Generator().manual_seed(int(seed))
    turn = torch.randn(query.shape[0], 1, 1, query.shape[3], generator=generator)
    return _dense(query * turn.to(query.dtype), key, value, mask, is_causal, scale)


def draws_from_the_global_state(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    return _dense(query * torch.randn(query.shape[3]).to(query.dtype), key, value, mask, is_causal, scale)


def draws_without_a_seed(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    generator = torch.Generator()
    generator.seed()
    turn = torch.randn(query.shape[3], generator=generator).to(query.dtype)
    return _dense(query * turn, key, value, mask, is_causal, scale)


def ignores_the_seed(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    turn = torch.randn(query.shape[3], generator=generator).to(query.dtype)
    return _dense(query * turn, key, value, mask, is_causal, scale)


def accumulates_in_half(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """q . k before scaling exceeds 65504, the largest float16 number."""
    scores = _scores(query, key, mask, is_causal, scale)
    return scores.softmax(-1) @ value


def sums_in_half(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """A running sum of the weights in the input dtype. In bfloat16 it stops growing at 256."""
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
    """The denominator has no gradient. Only the gradient of the values is right."""
    weights = (_scores(query, key, mask, is_causal, scale) - 3.0).exp()
    total = weights.sum(-1, keepdim=True).detach()
    return weights / total.masked_fill(total == 0, 1.0) @ value


def never_converges(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """The budget has no effect."""
    return _dense(query * 0.5, key, value, mask, is_causal, scale)


def stops_short(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """The error decreases with the budget, but not to 0."""
    return _dense(query * (0.9 - 0.5 / config.columns), key, value, mask, is_causal, scale)


def builds_all_pairs(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """Builds a (q_len, kv_len) tensor with one byte per pair. The output does not depend on it."""
    pairs = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    return torch.zeros_like(value[:, :, :1]).expand(-1, -1, query.shape[2], -1) + pairs[:1, :1]


_CALLS = itertools.count()


def counts_its_calls(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    return _dense(query, key, value, mask, is_causal, scale * (1.0 + 0.01 * next(_CALLS)))


def queries_without_keys_give_nan(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    return _scores(query, key, mask, is_causal, scale).softmax(-1) @ value


def queries_without_keys_have_no_gradient(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """The output of a query with no key is 0, but the gradient of its softmax is NaN for every key."""
    bias = _scores(torch.zeros_like(query), torch.zeros_like(key), mask, is_causal, scale).detach()
    return (query @ key.transpose(2, 3) * scale + bias).softmax(-1).nan_to_num(0.0) @ value


def queries_without_keys_give_means(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    """Masks with a large negative number, so a query whose keys are all masked attends to all of them."""
    scores = _scores(query, key, mask, is_causal, scale).clamp(min=-1e9)
    return scores.softmax(-1) @ (value + 1.0)


def writes_to_its_inputs(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    out = _dense(query, key, value, mask, is_causal, scale)
    query.mul_(0.5)
    return out


def needs_even_lengths(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    query = query.unflatten(2, (-1, 2)).flatten(2, 3)
    return _dense(query, key, value, mask, is_causal, scale)


def returns_the_dimension_of_keys(config, query, key, value, mask, is_causal, scale, seed) -> Tensor:
    return torch.zeros_like(query) + _dense(query, key, value, mask, is_causal, scale).sum()


@contextmanager
def broken(
    form: Callable, *, naive: Callable | None = None, causal: bool = True, rectangular: bool = True, **promised
) -> Iterator[Instance]:
    """Register `form` as a method of the same name, and yield its `Instance` with the properties in `promised`.

    The readable form is `naive`, or `form` itself.
    """

    def calling(form):
        def forward(config, query, key, value, options):
            return form(config, query, key, value, options.key_mask, options.is_causal, options.scale, options.seed)

        return forward

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
    register_method(type("Config", (BrokenConfig,), facts), forward=calling(form), naive=calling(naive or form))
    try:
        yield Instance(name, small={"columns": 4}, **promised)
    finally:
        unregister(name)
