"""Devices without float64, such as Apple's MPS: no method makes a float64 tensor there, and outputs stay the same.

Fake tensors on "mps" have no values and, on a machine without MPS, no gradients. So the methods also run on the CPU as
on a device without float64 (`ops/backends/devices.py`), with values and gradients.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hf_efficient_attn as hea
from each import FORMS
from hf_efficient_attn.ops import index
from hf_efficient_attn.ops.backends import devices
from instances import FIRST, VARIANTS, Instance, inputs, relative_error

aten = torch.ops.aten
SHAPE = {"batch": 2, "num_heads": 4, "num_kv_heads": 2, "q_len": 83, "head_dim": 12, "value_dim": 7}
# With this many hyperplanes float32 does not hold a rank and a position.
MANY_HASHES = [FIRST["kdeformer"].row(num_hashes=20, near_field="lsh"), FIRST["hyperattention"].row(num_hashes=20)]
EVERY = [
    *FORMS,
    *(pytest.param(i, c, id=f"{i}{'-causal' if c else ''}") for i in MANY_HASHES for c in (False, True)),
    *(pytest.param(i, False, id=f"variant {i}") for i in VARIANTS),
]
MASK = torch.arange(83) % 7 != torch.tensor([[2], [5]])
# A mask and a seed; None is a drawn seed.
CALLS = ((None, 0), (MASK, None))


class Float64(TorchDispatchMode):
    """Records operators with float64 results on a device.

    What `ops/backends/devices.py` computes on the CPU does not count.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.operators = device, list[str]()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        found = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.dtype == torch.float64]
        if any(x.device.type == self.device for x in found) and not any(_files_of_callers("devices.py")):
            self.operators.append(f"{operator} in {next(_files_of_callers('/hf_efficient_attn/'), 'a test')}")
        return result


def _files_of_callers(part: str) -> Iterator[str]:
    frame = sys._getframe(1)
    while frame is not None:
        if part in frame.f_code.co_filename:
            yield f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back


# Fake tensors on "mps".

REPLACED: dict[Callable, Callable] = {
    Tensor.__int__: aten._local_scalar_dense,
    Tensor.__invert__: torch.bitwise_not,
    Tensor.contiguous: lambda x: aten.clone(x, memory_format=torch.contiguous_format),
    Tensor.copy_: aten.copy_,
    Tensor.nonzero: aten.nonzero,
    Tensor.new_tensor: lambda x, values: torch.tensor(values, dtype=x.dtype, device=x.device),
}


class OfAnyDevice(TorchFunctionMode):
    """Calls operators in place of functions that PyTorch refuses on fake tensors of a device it was not built for."""

    def __torch_function__(self, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__getitem__:
            view, index = _view(*args)
            return aten.index(view, index) if index else view
        if function is Tensor.__setitem__:
            view, index = _view(*args[:2])
            value = args[2]
            if not isinstance(value, Tensor):
                value = torch.full((), value, dtype=view.dtype, device=view.device)
            return aten.index_put_(view, index, value) if index else aten.copy_(view, value)
        return REPLACED.get(function, function)(*args, **(kwargs or {}))


def _view(x: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """The view of x by the numbers, slices and None of an index, and its tensors by dimension."""
    index, dim, tensors = index if isinstance(index, tuple) else (index,), 0, list[Tensor | None]()
    rest = x.ndim - sum(0 if part is None or part is ... else _num_dims(part) for part in index)
    for part in index:
        if part is None:
            x = x.unsqueeze(dim)
        elif isinstance(part, slice):
            x = aten.slice(x, dim, part.start, part.stop, part.step or 1)
        elif isinstance(part, int):
            x, dim = aten.select(x, dim, part), dim - 1
        elif isinstance(part, Tensor):
            tensors += [None] * (dim - sum(1 if t is None else _num_dims(t) for t in tensors)) + [part]
        dim += rest if part is ... else _num_dims(part) if isinstance(part, Tensor) else 1
    return x, tensors


def _num_dims(part: Any) -> int:
    return part.ndim if isinstance(part, Tensor) and part.dtype == torch.bool else 1


@pytest.mark.parametrize(("instance", "is_causal"), EVERY)
def test_fake_tensors_on_mps(instance, is_causal):
    for mask, seed in CALLS:
        tensors, more = instance.adapt(*inputs(**SHAPE), mask)
        with FakeTensorMode(), Float64("mps") as recorded, OfAnyDevice():
            # The same tensor stays the same.
            fakes = {id(x): _fake(x) for x in (*tensors, *more.values())}
            given = {name: fakes[id(x)] for name, x in more.items()}
            given |= {"attention_mask": None if mask is None else _fake(mask), "is_causal": is_causal, "seed": seed}
            try:
                out = hea.attention(instance.config(), *(fakes[id(x)] for x in tensors), **given)
                assert (out.device.type, out.dtype) == ("mps", torch.float32)
            except (DataDependentOutputException, DynamicOutputShapeException):
                pass  # the rest depends on values
        assert not recorded.operators


def _fake(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="mps")


def test_fake_tensors_of_other_functions():
    q, k, v = (x[0, 0] for x in inputs(q_len=30))
    with FakeTensorMode(allow_non_fake_inputs=True), Float64("mps") as recorded, OfAnyDevice():
        query, key, value = (torch.empty(x.shape, device="mps") for x in (q, k, v))
        heads = [x[None, None] for x in (query, key, value)]
        found = [
            hea.kernel.kernel_matvec(query, key, value, bandwidth=1.0),
            hea.analysis.softmax_matrix(*heads[:2]),
            hea.analysis.exact_output(*heads),
        ]
    assert not recorded.operators and {x.device.type for x in found} == {"mps"}


# The CPU as a device without float64.


@pytest.fixture
def without_float64(monkeypatch) -> Callable[[], None]:
    """A function that lets the CPU have no float64. Kept numbers of before are not used, and not kept afterwards."""
    monkeypatch.setattr(index, "_results", OrderedDict())

    def begin() -> None:
        monkeypatch.setattr(index, "_results", OrderedDict())
        monkeypatch.setattr(devices, "WITHOUT_FLOAT64", ("cpu",))

    return begin


def results(instance: Instance, is_causal: bool) -> list[Tensor]:
    """Outputs at valid queries, and gradients, with and without a mask and with a drawn seed."""
    found = []
    for mask, seed in CALLS:
        torch.manual_seed(0)
        leaves = [x.requires_grad_() for x in inputs(**SHAPE)]
        out = instance(*leaves, mask, is_causal=is_causal, seed=seed)
        out = out if mask is None else out.masked_fill(~mask[:, None, :, None], 0.0)
        found += [out, *torch.autograd.grad(out.sum(), leaves, materialize_grads=True)]
    return found


@pytest.mark.parametrize(("instance", "is_causal"), EVERY)
def test_outputs_and_gradients_stay_the_same(instance, is_causal, without_float64):
    expected = results(instance, is_causal)
    without_float64()
    with Float64("cpu") as recorded:
        found = results(instance, is_causal)
    # A bias by distance of the tests is made in float64.
    assert not [operator for operator in recorded.operators if not operator.endswith("a test")]
    assert max(relative_error(ours, other) for ours, other in zip(found, expected, strict=True)) < 2e-4


@pytest.mark.parametrize("instance", FIRST.values(), ids=str)
def test_numbers_of_other_sizes(instance, without_float64):
    given = [inputs(q_len=150, content=content) for content in ("few", "large", "tiny")]
    expected = [instance(*tensors) for tensors in given]
    without_float64()
    for tensors, other in zip(given, expected, strict=True):
        assert relative_error(instance(*tensors), other) < 1e-3


@pytest.mark.parametrize("name", ["hyperattention", "kdeformer", "nearfar"])
def test_long_sequences_keep_their_draws(name, without_float64):
    """float32 would round the offsets of far samples."""
    given = inputs(num_heads=1, q_len=4096)
    expected = FIRST[name](*given, is_causal=True)
    without_float64()
    assert relative_error(FIRST[name](*given, is_causal=True), expected) < 2e-4
