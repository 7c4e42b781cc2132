"""Methods that break a promise on purpose, to show that the checks of the promises can fail.

Each is correct dense attention with other arguments. `broken(name)` registers one for the duration of a test.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_efficient_attn.methods import MethodConfig, option, register_method
from instances import Instance, unregister


@dataclass(frozen=True, kw_only=True)
class BrokenConfig(MethodConfig):
    columns: int = option(8, "Budget.", minimum=1)
    seed: int = option(0, "Seed.", minimum=0)

    @property
    def exact_length(self) -> int:
        """What each of the methods claims."""
        return self.columns

    def with_budget(self, columns: int) -> "BrokenConfig":
        return dataclasses.replace(self, columns=columns)


def dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """Correct attention: query (B, H, Nq, D), key (B, H, Nk, D), value (B, H, Nk, Dv), mask bool (B, Nk)."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(dtype) @ key.to(dtype).mT * scale
    pairs = torch.ones(scores.shape[2:], dtype=torch.bool)
    pairs = pairs.tril() if is_causal else pairs
    pairs = (pairs if mask is None else pairs & mask[:, None, None]).expand_as(scores)
    empty = ~pairs.any(-1, keepdim=True)
    weights = scores.masked_fill(~pairs & ~empty, -torch.inf).softmax(-1).masked_fill(empty, 0.0)
    return (weights @ value.to(dtype)).to(value.dtype)


def turned(query: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Queries whose features have random factors."""
    return query * torch.randn(query.shape[3], generator=generator).to(query.dtype)


# The arguments of `dense` that each method changes: f(query, key, value).
CHANGES: dict[str, Callable[..., dict]] = {
    "correct": lambda q, k, v: {},
    # Masked keys are zero and add nothing to the numerator, but they count in the denominator.
    "counts_masked_keys": lambda q, k, v: {"mask": None},
    "attends_to_masked_keys": lambda q, k, v: {"mask": None, "value": v + 1.0},
    # The mean of the queries includes padding.
    "reads_masked_queries": lambda q, k, v: {"query": q - q.mean(2, keepdim=True)},
    "ignores_causality": lambda q, k, v: {"is_causal": False},
    "depends_on_the_length": lambda q, k, v: {"value": v * (1 + 1 / q.shape[2])},
    "mixes_the_batch": lambda q, k, v: {"key": k - k.mean(0, keepdim=True)},
    "draws_from_the_global_state": lambda q, k, v: {"query": turned(q)},
    "ignores_the_seed": lambda q, k, v: {"query": turned(q, torch.Generator().manual_seed(5))},
    "multiplies_in_half_precision": lambda q, k, v: {"query": q + 0.0 * (q @ k.mT).sum(-1, keepdim=True)},
    "detaches_the_keys": lambda q, k, v: {"key": k.detach()},
    "never_converges": lambda q, k, v: {"query": q * 0.5},
    "writes_to_its_inputs": lambda q, k, v: {"query": q.mul_(0.5)},
    "needs_even_lengths": lambda q, k, v: {"query": q.unflatten(2, (-1, 2)).flatten(2, 3)},
}


def form_of(name: str) -> Callable[..., Tensor]:
    """The function that computes a method, as `register_method` wants it."""

    def forward(config, query, key, value, options):
        arguments = {"query": query, "key": key, "value": value, "mask": options.key_mask}
        arguments |= {"is_causal": options.is_causal, "scale": options.scale, **CHANGES[name](query, key, value)}
        return dense(**arguments)

    return forward


@contextmanager
def broken(name: str, *, naive: str | None = None, **promised) -> Iterator[Instance]:
    """Register a method, and yield its `Instance` with the properties in `promised`. `naive` is its readable form."""
    facts = {"method": name, "title": name, "paper": "none", "year": 2026, "summary": name}
    facts |= {"causal": True, "rectangular": True}
    register_method(type("Config", (BrokenConfig,), facts), forward=form_of(name), naive=form_of(naive or name))
    try:
        yield Instance(name, **promised)
    finally:
        unregister(name)
