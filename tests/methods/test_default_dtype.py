"""Another default dtype (`torch.set_default_dtype`), as while Transformers loads a model in half precision."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from attack_cases import PROMISES, attack
from each import each_form
from helpers.operators import Operators
from hf_efficient_attn.methods import learns
from hf_efficient_attn.methods._shared import registry
from hf_efficient_attn.ops import index
from instances import FIRST, INSTANCES, VARIANTS, Instance, inputs


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def results(instance: Instance, is_causal: bool) -> list[Tensor]:
    """Outputs and gradients with and without a mask, and with a drawn seed."""
    found: list[Tensor] = []
    for kind, seed in (("none", 0), ("holes", None)):
        leaves = [x.requires_grad_() for x in inputs(2, 4, 83, 12, num_kv_heads=2, value_dim=7)]
        torch.manual_seed(0)
        # Random numbers of the mask have the default dtype.
        mask = None if kind == "none" else torch.arange(83) % 7 != torch.tensor([[2], [5]])
        out = instance(*leaves, mask, is_causal=is_causal, seed=seed)
        found += [out, *torch.autograd.grad(out.sum(), leaves, materialize_grads=True)]
        with torch.no_grad():
            found.append(instance(*leaves, mask, is_causal=is_causal, seed=seed))
    return found


@each_form
def test_no_tensor_has_the_default_dtype(instance, is_causal, monkeypatch):
    monkeypatch.setattr(index, "_results", OrderedDict())
    expected, dtypes = results(instance, is_causal), set()

    def see(operator, arguments, result):
        dtypes.update(x.dtype for x in tree_leaves(result) if isinstance(x, Tensor))

    for dtype in (torch.float64, torch.bfloat16):  # float16 is one more half precision
        monkeypatch.setattr(index, "_results", OrderedDict())
        dtypes.clear()
        with default_dtype(dtype), Operators(see):
            found = results(instance, is_causal)
        assert all(torch.equal(ours, other) for ours, other in zip(found, expected, strict=True)), dtype
        # Some sums have float64 in any case.
        assert dtype not in dtypes or dtype == torch.float64


@pytest.mark.parametrize("instance", [i for i in INSTANCES + VARIANTS if learns(i.config())], ids=str)
def test_initial_parameters(instance):
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "value_dim": 8, "max_length": 83}
    make = registry.get_method(instance.method).initial_parameters
    expected = make(instance.config(), **sizes)
    with default_dtype(torch.bfloat16):
        found = make(instance.config(), **sizes)
    for name, x in expected.items():
        assert x.dtype == found[name].dtype == torch.float32 and torch.equal(x, found[name])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", FIRST)
def test_promises(method, dtype):
    """With any hyperparameters."""
    with default_dtype(dtype):
        for name, promise in PROMISES.items():
            if promise.applies(FIRST[method]):
                attack(name, FIRST[method], 2 if promise.share > 0.1 else 1)  # what takes seconds is rare
