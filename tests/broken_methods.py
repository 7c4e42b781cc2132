"""Methods that break a promise on purpose, to show that the checks of the promises can fail.

Each is correct dense attention with other arguments. `broken(name)` registers one for the duration of a test.
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

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float

    def dense(self) -> Tensor:
        """Correct attention."""
        dtype = torch.promote_types(self.query.dtype, torch.float32)
        scores = self.query.to(dtype) @ self.key.to(dtype).mT * self.scale
        pairs = torch.ones(scores.shape[2:], dtype=torch.bool)
        pairs = pairs.tril() if self.is_causal else pairs
        pairs = (pairs if self.mask is None else pairs & self.mask[:, None, None]).expand_as(scores)
        empty = ~pairs.any(-1, keepdim=True)
        weights = scores.masked_fill(~pairs & ~empty, -torch.inf).softmax(-1).masked_fill(empty, 0.0)
        return (weights @ self.value.to(dtype)).to(self.value.dtype)

    def turned(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Random factors for the features of the queries."""
        return {"query": self.query * torch.randn(self.query.shape[3], generator=generator).to(self.query.dtype)}


# The arguments that each method changes.
CHANGES: dict[str, Callable[[Call], dict]] = {
    "correct": lambda c: {},
    # Masked keys are zero and add nothing to the numerator, but they count in the denominator.
    "counts_masked_keys": lambda c: {"mask": None},
    "attends_to_masked_keys": lambda c: {"mask": None, "value": c.value + 1.0},
    # The mean of the queries includes padding.
    "reads_masked_queries": lambda c: {"query": c.query - c.query.mean(2, keepdim=True)},
    "ignores_causality": lambda c: {"is_causal": False},
    "depends_on_the_length": lambda c: {"value": c.value * (1 + 1 / c.query.shape[2])},
    "mixes_the_batch": lambda c: {"key": c.key - c.key.mean(0, keepdim=True)},
    "draws_from_the_global_state": lambda c: c.turned(),
    "ignores_the_seed": lambda c: c.turned(torch.Generator().manual_seed(5)),
    "detaches_the_keys": lambda c: {"key": c.key.detach()},
    "never_converges": lambda c: {"query": c.query * 0.5},
    "writes_to_its_inputs": lambda c: {"query": c.query.mul_(0.5)},
    "needs_even_lengths": lambda c: {"query": c.query.unflatten(2, (-1, 2)).flatten(2, 3)},
}


def form_of(name: str) -> Callable[..., Tensor]:
    """The function that computes a method, as `register_method` wants it."""

    def forward(config, query, key, value, options):
        call = Call(query, key, value, options.key_mask, options.is_causal, options.scale)
        return call._replace(**CHANGES[name](call)).dense()

    return forward


@contextmanager
def broken(name: str, *, naive: str | None = None, **promised) -> Iterator[Instance]:
    """Register a method, and yield its `Instance` with the properties in `promised`. `naive` is its readable form."""
    facts = {"method": name, "title": name, "paper": "none", "year": 2026, "summary": name}
    facts |= {"causal": True, "rectangular": True}
    config_class = type("Config", (BrokenConfig,), facts)
    register_method(config_class, forward=form_of(name), naive=form_of(naive or name))
    try:
        yield Instance(name, **promised)
    finally:
        unregister(name)
