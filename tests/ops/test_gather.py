"""Attention to gathered keys, and the Triton kernels for it.

Without a GPU the kernels run in Triton's interpreter (see conftest.py), and without Triton these tests are skipped.
"""

import importlib.util
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import hf_efficient_attn as hea
from each import attend_naive
from hf_efficient_attn.ops import attend, tokens
from hf_efficient_attn.ops.tokens import GatheredKeys, gathered_attention, inverse
from instances import inputs, numbers, padding_mask, relative_error

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install 'hf_efficient_attn[gpu-test]'"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.3


class Case(NamedTuple):
    """The arguments of `gather_attend` for two heads."""

    query: Tensor
    key: Tensor
    value: Tensor
    index: Tensor
    log_weight: Tensor
    order: Tensor | None
    block_q: int

    def to(self, dtype: torch.dtype, index_dtype: torch.dtype = torch.int64) -> "Case":
        """On the device of the kernels, with gradients for query, key, value and log-weights."""
        rows = [x.detach().to(DEVICE, dtype).requires_grad_() for x in self[:3]]
        log_weight = self.log_weight.detach().to(DEVICE, torch.float32).requires_grad_()
        order = None if self.order is None else self.order.to(DEVICE, index_dtype)
        return Case(*rows, self.index.to(DEVICE, index_dtype), log_weight, order, self.block_q)


def case(*sizes: int, ordered: bool = True, dtype: torch.dtype = torch.float32) -> Case:
    """A case in float64, of numbers that `dtype` has, where a fifth of the entries is unused.

    `sizes` are q_len, kv_len, head_dim, value_dim, and the numbers of queries and of keys of a block.
    """
    q_len, kv_len, head_dim, value_dim, block_q, block_k = sizes
    shapes = (2, q_len, head_dim), (2, kv_len, head_dim), (2, kv_len, value_dim)
    rows = [numbers(*shape, seed=i).to(dtype).double().requires_grad_() for i, shape in enumerate(shapes)]
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(kv_len, (2, -(-q_len // block_q), block_k), generator=generator)
    log_weight = numbers(*index.shape, seed=3).float().double()
    log_weight[torch.rand(*index.shape, generator=generator) < 0.2] = -torch.inf
    log_weight[..., 0] = 0.0
    order = torch.rand(2, q_len, generator=generator).argsort(1) if ordered else None
    return Case(*rows, index, log_weight.requires_grad_(), order, block_q)


def reference(given: Case) -> tuple[Tensor, Tensor]:
    """Out and lse by `attend_naive`, block by block, with gathered keys."""
    outs, lses = [], []
    for a in range(2):
        order = torch.arange(given.query.shape[1]) if given.order is None else given.order[a]
        results = [
            attend_naive(given.query[a, rows], given.key[a, keys], given.value[a, keys], bias, scale=SCALE)
            for rows, keys, bias in zip(order.split(given.block_q), given.index[a], given.log_weight[a], strict=True)
        ]
        rank = inverse(order[None])[0]
        outs.append(torch.cat([x.out for x in results])[rank])
        lses.append(torch.cat([x.lse for x in results])[rank])
    return torch.stack(outs), torch.stack(lses)


def gather_attend(given: "Case") -> tuple[Tensor, Tensor]:
    """Out and lse by the kernels."""
    from hf_efficient_attn.ops import triton_gather

    return triton_gather.gather_attend(*given, SCALE)


def gather_by_operators(given: "Case") -> tuple[Tensor]:
    """Out by PyTorch's operators."""
    gathered = GatheredKeys(given.index, given.log_weight.unsqueeze(2).double(), given.block_q, given.order)
    return (gathered_attention(*given[:3], gathered, scale=SCALE),)


def gradients(given: Case, *outs: Tensor) -> tuple[Tensor, ...]:
    grads = [numbers(*x.shape, seed=5).to(x.device, x.dtype) for x in outs]
    return torch.autograd.grad(outs, (*given[:3], given.log_weight), grads)


SIZES = (45, 53, 20, 12, 17, 37)
CASES = [
    (SIZES, True),
    ((45, 53, 16, 33, 32, 70), False),
    # Blocks that two programs process, in a backward tile of 32 or 128 queries, and more dimensions than 128.
    ((150, 53, 130, 12, 140, 9), True),
    ((1, 1, 1, 1, 1, 1), True),
    ((40, 53, 20, 12, 50, 37), True),
]


@pytest.mark.parametrize(
    ("form", "dtype", "tolerance"),
    [
        pytest.param(gather_attend, torch.float32, 2e-6, marks=needs_triton, id="float32"),
        pytest.param(gather_attend, torch.float16, 2e-3, marks=needs_triton, id="float16"),
        pytest.param(gather_attend, torch.bfloat16, 2e-2, marks=needs_triton, id="bfloat16"),
        pytest.param(gather_by_operators, torch.float64, 1e-9, id="operators"),
    ],
)
@pytest.mark.parametrize(("sizes", "ordered"), CASES)
def test_attention_to_gathered_keys(sizes, ordered, form, dtype, tolerance):
    given = case(*sizes, ordered=ordered, dtype=dtype)
    ours = given if dtype == torch.float64 else given.to(dtype, torch.int32 if ordered else torch.int64)
    (out, *lse), expected = form(ours), reference(given)
    assert out.dtype == dtype and relative_error(out.cpu(), expected[0]) < tolerance
    if lse:
        assert lse[0].dtype == torch.float32
        torch.testing.assert_close(lse[0].cpu().double(), expected[1], atol=2e-5, rtol=1e-6)
    wanted = gradients(given, *expected[: 1 + len(lse)])
    for grad, exact in zip(gradients(ours, out, *lse), wanted, strict=True):
        # The softmax of one key is constant.
        assert relative_error(grad.cpu(), exact) < tolerance if exact.norm() > 1e-9 else grad.norm() < tolerance


@needs_triton
def test_unused_entries_are_not_read_and_queries_without_keys_get_zero():
    given = case(*SIZES).to(torch.float32)
    with torch.no_grad():
        given.log_weight[0, 1] = -torch.inf
        given.log_weight[given.index == 7] = -torch.inf
        given.key[:, 7], given.value[:, 7] = torch.nan, torch.nan
    out, lse = gather_attend(given)
    empty = torch.zeros(2, 45, dtype=torch.bool, device=DEVICE)
    empty[0, given.order[0, 17:34]] = True
    assert torch.equal(lse == -torch.inf, empty) and not out[empty].any()
    assert out.isfinite().all() and out[~empty].any()
    grads = torch.autograd.grad((out.sum(), lse[~empty].sum()), (*given[:3], given.log_weight))
    assert all(x.isfinite().all() for x in grads)
    assert not grads[0][empty].any() and not grads[1][:, 7].any() and not grads[2][:, 7].any()
    assert not grads[3][given.log_weight == -torch.inf].any()


@needs_triton
@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize("method", ["kdeformer", "hyperattention"])
def test_methods_by_triton_are_those_by_other_kernels(method, mask, monkeypatch):
    config = hea.method_info(method).config_class(block_size=16, num_samples=24)
    key_mask = padding_mask(mask, 2, 75)
    rows = [x.to(DEVICE).requires_grad_() for x in inputs(batch=2, q_len=75, value_dim=5)]
    grad = numbers(2, 2, 75, 5).float().to(DEVICE)
    if key_mask is not None:
        key_mask = key_mask.to(DEVICE)
        grad = grad * key_mask[:, None, :, None]  # outputs of masked tokens are not used
    results = []
    for applies in (False, True):
        monkeypatch.setattr(tokens, "triton_applies", lambda *_, applies=applies: applies)
        out = hea.attention(config, *rows, attention_mask=key_mask)
        results.append((out * (grad != 0), *torch.autograd.grad(out, rows, grad)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("why", ["cpu", "float64", "dimensions", "deterministic"])
def test_what_the_kernels_do_not_compute(why, monkeypatch):
    class OnGpu:
        is_cuda, requires_grad, device = why != "cpu", True, torch.device("cuda", 0)
        dtype = torch.float64 if why == "float64" else torch.float32
        shape = (2, 45, 257 if why == "dimensions" else 20)

    monkeypatch.setattr(attend, "_HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    torch.use_deterministic_algorithms(why == "deterministic")
    try:
        assert not attend.triton_applies(OnGpu(), OnGpu())
    finally:
        torch.use_deterministic_algorithms(False)
    OnGpu.is_cuda, OnGpu.dtype, OnGpu.shape = True, torch.float32, (2, 45, 256)
    assert attend.triton_applies(OnGpu(), OnGpu())
