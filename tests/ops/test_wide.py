"""float64, and what replaces it: numbers from the CPU, and indices by integers."""

import pytest
import torch

from hf_efficient_attn.ops.backends import devices
from hf_efficient_attn.ops.backends.devices import from_float64, in_float64, wide_dtype
from hf_efficient_attn.ops.draws import Draws
from hf_efficient_attn.ops.strata import strata, systematic_sample
from instances import numbers

CPU, MPS = torch.device("cpu"), torch.device("mps")


@pytest.fixture
def without_float64(monkeypatch):
    monkeypatch.setattr(devices, "WITHOUT_FLOAT64", ("cpu",))


def test_devices_without_float64():
    assert (wide_dtype(CPU), wide_dtype(MPS)) == (torch.float64, torch.float32)
    assert devices.float64_device(MPS) == CPU
    assert devices.float64_device(torch.device("cuda", 1)) == torch.device("cuda", 1)


def test_numbers_are_rounded_towards_0(without_float64):
    exact = torch.tensor([1.0 - 2.0**-40, 0.1, -0.1, -1.0 - 2.0**-40, 0.0, 2.0**-33], dtype=torch.float64)
    found = from_float64(lambda draws: exact)(Draws(0, CPU))
    assert found.dtype == torch.float32
    assert (found.abs() <= exact.abs()).all() and (found - exact).abs().max() < 1e-7
    assert found[0] < 1.0


def test_results_are_moved_back(without_float64):
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
