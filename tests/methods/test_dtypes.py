"""Devices without float64, such as Apple's MPS, and other default dtypes (`torch.set_default_dtype`).

Fake tensors on "mps" have no values and, on a machine without MPS, no gradients. So the methods also run on the CPU as
on a device without float64 (`ops/backends/devices.py`), with values and gradients. Transformers sets another default
dtype while it loads a model in half precision.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import hf_efficient_attn as hea
from attack_cases import PROMISES, attack
from each import FORMS, Operators, each_form
from hf_efficient_attn.methods import learns
from hf_efficient_attn.methods._shared import registry
from hf_efficient_attn.ops import index
from hf_efficient_attn.ops.backends import devices
from hf_efficient_attn.ops.backends.devices import from_float64, in_float64, wide_dtype
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.strata import strata, systematic_sample
from instances import FIRST, INSTANCES, VARIANTS, Instance, inputs, numbers, relative_error

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


@contextmanager
def float64_operators(device: str) -> Iterator[list[str]]:
    """The operators with float64 results on a device, without those of `ops/backends/devices.py`."""
    found: list[str] = []

    def see(operator, arguments, result):
        wide = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.dtype == torch.float64]
        if any(x.device.type == device for x in wide) and not any(_files_of_callers("devices.py")):
            found.append(f"{operator} in {next(_files_of_callers('/hf_efficient_attn/'), 'a test')}")

    with Operators(see):
        yield found


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
        with FakeTensorMode(), float64_operators("mps") as recorded, OfAnyDevice():
            # The same tensor stays the same.
            fakes = {id(x): _fake(x) for x in (*tensors, *more.values())}
            given = {name: fakes[id(x)] for name, x in more.items()}
            given |= {"attention_mask": None if mask is None else _fake(mask), "is_causal": is_causal, "seed": seed}
            try:
                out = hea.attention(instance.config(), *(fakes[id(x)] for x in tensors), **given)
                assert (out.device.type, out.dtype) == ("mps", torch.float32)
            except (DataDependentOutputException, DynamicOutputShapeException):
                pass  # the rest depends on values
        assert not recorded


def _fake(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="mps")


def test_fake_tensors_of_other_functions():
    q, k, v = (x[0, 0] for x in inputs(q_len=30))
    with FakeTensorMode(allow_non_fake_inputs=True), float64_operators("mps") as recorded, OfAnyDevice():
        query, key, value = (torch.empty(x.shape, device="mps") for x in (q, k, v))
        heads = [x[None, None] for x in (query, key, value)]
        found = [
            hea.kernel.kernel_matvec(query, key, value, bandwidth=1.0),
            hea.analysis.softmax_matrix(*heads[:2]),
            hea.analysis.exact_output(*heads),
        ]
    assert not recorded and {x.device.type for x in found} == {"mps"}


# The CPU as a device without float64.


@pytest.fixture
def nothing_is_kept(monkeypatch) -> Callable[[], None]:
    """A function that forgets the numbers that are kept of earlier calls. Those of before come back afterwards."""

    def forget() -> None:
        monkeypatch.setattr(index, "_results", OrderedDict())

    forget()
    return forget


@pytest.fixture
def without_float64(monkeypatch, nothing_is_kept) -> Callable[[], None]:
    """A function that lets the CPU have no float64."""

    def begin() -> None:
        nothing_is_kept()
        monkeypatch.setattr(devices, "WITHOUT_FLOAT64", ("cpu",))

    return begin


def results(instance: Instance, is_causal: bool) -> list[Tensor]:
    """Outputs and gradients with and without a mask, and with a drawn seed."""
    found: list[Tensor] = []
    for mask, seed in CALLS:
        torch.manual_seed(0)
        leaves = [x.requires_grad_() for x in inputs(**SHAPE)]
        out = instance(*leaves, mask, is_causal=is_causal, seed=seed)
        found += [out, *torch.autograd.grad(out.sum(), leaves, materialize_grads=True)]
        with torch.no_grad():
            found.append(instance(*leaves, mask, is_causal=is_causal, seed=seed))
    return found


@pytest.mark.parametrize(("instance", "is_causal"), EVERY)
def test_outputs_and_gradients_stay_the_same(instance, is_causal, without_float64):
    expected = results(instance, is_causal)
    without_float64()
    with float64_operators("cpu") as recorded:
        found = results(instance, is_causal)
    # A bias by distance of the tests is made in float64.
    assert not [operator for operator in recorded if not operator.endswith("a test")]
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


# What replaces float64: numbers from the CPU, and indices by integers.

CPU, MPS = torch.device("cpu"), torch.device("mps")


def test_devices_without_float64():
    assert (wide_dtype(CPU), wide_dtype(MPS)) == (torch.float64, torch.float32)
    assert devices.float64_device(MPS) == CPU
    assert devices.float64_device(torch.device("cuda", 1)) == torch.device("cuda", 1)


def test_numbers_are_rounded_towards_0(without_float64):
    without_float64()
    exact = torch.tensor([1.0 - 2.0**-40, 0.1, -0.1, -1.0 - 2.0**-40, 0.0, 2.0**-33], dtype=torch.float64)
    found = from_float64(lambda draws: exact)(Draws(0, CPU))
    assert found.dtype == torch.float32
    assert (found.abs() <= exact.abs()).all() and (found - exact).abs().max() < 1e-7
    assert found[0] < 1.0


def test_results_are_moved_back(without_float64):
    without_float64()

    def sums(x, *, factor):
        assert x.dtype == torch.float32
        yield x.double().sum() * factor, len(x)
        yield x.argmax(), None

    x = numbers(5).float()
    (total, count), (index, nothing) = in_float64(sums)(x, factor=2.0)
    assert (total.dtype, count, index.dtype, nothing) == (torch.float32, 5, torch.int64, None)
    assert list(in_float64(lambda: iter([3]))()) == [3]  # without a tensor


def test_an_offset_stays_in_its_stratum():
    """In float32, 5,000.9999 is 5,001."""
    offset = torch.tensor([[1e-9, 0.3, 1.0 - 2.0**-24]], dtype=torch.float32)
    number = torch.arange(100_000)[:, None]
    for available, count in ((100_000, 100_000), (torch.tensor(123_457), 1000), (700_001, torch.tensor(3001))):
        some = number[: int(count)]
        found, exact = (strata(some, x, available, count) for x in (offset, offset.double()))
        assert (found - exact).abs().max() <= (0 if available is count else 1)
        assert (found != exact).double().mean() < 1e-3
    assert torch.equal(strata(number, offset, 100_000, 100_000), number.expand(-1, 3))


@pytest.mark.parametrize("offset", [1e-9, 0.4, 1.0 - 2.0**-24])
def test_samples_of_all_keys_have_each_once(offset):
    probabilities = torch.zeros(1, 1, 6000, dtype=torch.float32)
    probabilities[..., 1000:] = 1.0
    index, log_weight = systematic_sample(probabilities, 5000, torch.tensor([[offset]], dtype=torch.float32))
    assert torch.equal(index[0, 0], torch.arange(1000, 6000)) and not log_weight.any()


def test_samples_are_those_of_float64():
    probabilities = numbers(2, 3, 5000).abs().float()
    probabilities *= 200 / probabilities.sum(2, keepdim=True)
    group, offset = torch.tensor([[0, 0, 1, 2]]), numbers(2, 4, seed=1).abs().frac().float()
    dtypes = (torch.float32, torch.float64)
    found, exact = (systematic_sample(probabilities.to(t), 200, offset.to(t), group) for t in dtypes)
    assert (found[0] == exact[0]).double().mean() > 0.995 and (found[0] - exact[0]).abs().max() <= 1


# Another default dtype.


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@each_form
def test_no_tensor_has_the_default_dtype(instance, is_causal, nothing_is_kept):
    expected, dtypes = results(instance, is_causal), set()

    def see(operator, arguments, result):
        dtypes.update(x.dtype for x in tree_leaves(result) if isinstance(x, Tensor))

    for dtype in (torch.float64, torch.bfloat16):  # float16 is one more half precision
        nothing_is_kept()
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
