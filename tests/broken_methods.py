"""Methods that each break one promise on purpose, to show that the check of that promise fails for them.

Each is a small change of the same correct dense attention. `broken(name)` registers one for the duration of a test.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

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


class Call(NamedTuple):
    """The arguments of a call: query (B, H, Nq, D), key (B, H, Nk, D), value (B, H, Nk, Dv), mask bool (B, Nk)."""

    config: BrokenConfig
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float
    seed: int

    def scores(self) -> Tensor:
        scores = self.query @ self.key.mT * self.scale
        pairs = torch.ones(scores.shape[2:], dtype=torch.bool)
        pairs = pairs.tril() if self.is_causal else pairs
        return scores.masked_fill(~(pairs if self.mask is None else pairs & self.mask[:, None, None]), -torch.inf)

    def dense(self, **changes) -> Tensor:
        """Correct dense attention, from which all methods of this file are derived."""
        call = self._replace(**changes)
        dtype = torch.promote_types(call.query.dtype, torch.float32)
        scores = call._replace(query=call.query.to(dtype), key=call.key.to(dtype)).scores()
        empty = (scores == -torch.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
        return (weights @ call.value.to(dtype)).to(call.value.dtype)

    def turned(self, generator: torch.Generator | None, *shape: int) -> Tensor:
        """Dense attention of queries whose features have random factors."""
        return self.dense(query=self.query * torch.randn(*shape, generator=generator).to(self.query.dtype))


def sorts_the_sequence(c: Call) -> Tensor:
    """Causal attention within blocks of a sort over the whole sequence, so later tokens determine the blocks."""
    rank = c.query[..., 0].argsort(-1).argsort(-1) // c.config.columns
    scores = c.scores().masked_fill(rank[..., :, None] != rank[..., None, :], -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ c.value


def sums_in_half(c: Call) -> Tensor:
    """A running sum of the weights in the input dtype. In bfloat16 it stops growing at 256."""
    weights = c._replace(query=c.query.float(), key=c.key.float()).scores()
    weights = (weights - weights.amax(-1, keepdim=True)).exp().to(c.query.dtype)
    total = torch.zeros_like(weights[..., :1])
    for j in range(weights.shape[-1]):
        total = total + weights[..., j : j + 1]
    return (weights.float() @ c.value.float() / total.float()).to(c.value.dtype)


def builds_all_pairs(c: Call) -> Tensor:
    """Builds a (q_len, kv_len) tensor with one byte per pair. The output does not depend on it."""
    pairs = torch.ones(c.query.shape[2], c.key.shape[2], dtype=torch.bool)
    return torch.zeros_like(c.value[:, :, :1]).expand(-1, -1, c.query.shape[2], -1) + pairs[:1, :1]


def writes_to_its_inputs(c: Call) -> Tensor:
    out = c.dense()
    c.query.mul_(0.5)
    return out


METHODS: dict[str, Callable[[Call], Tensor]] = {
    "correct": lambda c: c.dense(),
    # Masked keys are zero and add nothing to the numerator, but they count in the denominator.
    "counts_masked_keys": lambda c: c.dense(mask=None),
    # The mean of the queries includes padding.
    "reads_masked_queries": lambda c: c.dense(query=c.query - c.query.mean(2, keepdim=True)),
    "ignores_causality": lambda c: c.dense(is_causal=False),
    "depends_on_the_length": lambda c: c.dense() * (1 + 1 / c.query.shape[2]),
    "mixes_the_batch": lambda c: c.dense(key=c.key - c.key.mean(0, keepdim=True)),
    "draws_from_the_global_state": lambda c: c.turned(None, c.query.shape[3]),
    "ignores_the_seed": lambda c: c.turned(torch.Generator().manual_seed(5), c.query.shape[3]),
    # q . k before scaling exceeds 65504, the largest float16 number.
    "accumulates_in_half": lambda c: c.scores().softmax(-1) @ c.value,
    "detaches_the_keys": lambda c: c.dense(key=c.key.detach()),
    # The budget has no effect, or the error decreases with it, but not to 0.
    "never_converges": lambda c: c.dense(query=c.query * 0.5),
    "stops_short": lambda c: c.dense(query=c.query * (0.9 - 0.5 / c.config.columns)),
    "queries_without_keys_give_nan": lambda c: c.scores().softmax(-1) @ c.value,
    # Masks with a large negative number, so a query whose keys are all masked attends to all of them.
    "queries_without_keys_give_means": lambda c: c.scores().clamp(min=-1e9).softmax(-1) @ (c.value + 1.0),
    "needs_even_lengths": lambda c: c.dense(query=c.query.unflatten(2, (-1, 2)).flatten(2, 3)),
}
METHODS |= {form.__name__: form for form in (sorts_the_sequence, sums_in_half, builds_all_pairs, writes_to_its_inputs)}


def form_of(name: str) -> Callable[..., Tensor]:
    """The function that computes a method, as `register_method` wants it."""

    def forward(config, query, key, value, options):
        call = Call(config, query, key, value, options.key_mask, options.is_causal, options.scale, options.seed)
        return METHODS[name](call)

    return forward


@contextmanager
def broken(name: str, *, naive: str | None = None, causal: bool = True, **promised) -> Iterator[Instance]:
    """Register a method, and yield its `Instance` with the properties in `promised`. `naive` is its readable form."""
    facts = {"method": name, "title": name, "paper": "none", "year": 2026, "summary": name}
    facts |= {"causal": causal, "rectangular": True}
    config_class = type("Config", (BrokenConfig,), facts)
    register_method(config_class, forward=form_of(name), naive=form_of(naive or name))
    try:
        yield Instance(name, **promised)
    finally:
        unregister(name)
