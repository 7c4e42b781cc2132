"""Attention over blocks on accelerators, with plain products in the place of the kernels of CUDA.

The stand-ins check what the kernels check: dtypes, shapes, alignment, the number of heads and batch entries.
"""

import itertools
import math

import pytest
import torch
from torch import Tensor

from hf_efficient_attn.ops import fused_attention
from hf_efficient_attn.ops.accelerator import use_backend
from hf_efficient_attn.ops.exact import exact_attention, mask_bias
from hf_efficient_attn.ops.partial import Partial, partial_attention, partial_attention_naive
from instances import numbers

_LIMIT = 6  # of heads and blocks, instead of 65,535


class Kernels:
    """Replacements of the CUDA kernels by plain operators. `calls` lists the kernels that were called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        assert query.dtype == key.dtype == value.dtype
        assert query.shape[:2] == key.shape[:2] == value.shape[:2] and key.shape[2] == value.shape[2]
        assert query.shape[3] == key.shape[3] and max(query.shape[:2]) <= _LIMIT
        for x in (query, key, value):
            assert x.stride(3) == 1 and x.shape[3] % 8 == 0
            assert all(x.stride(i) % 8 == 0 for i in range(3) if x.shape[i] > 1)

    def _check_flash(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        self._check(query, key, value)
        assert query.dtype in (torch.float16, torch.bfloat16)
        assert query.shape[3] == value.shape[3] <= 256

    def _weights(self, query: Tensor, key: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        scores = query.double() @ key.double().mT * scale
        if bias is not None:
            assert bias.dtype == query.dtype and bias.shape == scores.shape
            assert bias.stride(3) == 1 and all(bias.stride(i) % 8 == 0 for i in range(3) if bias.shape[i] > 1)
            scores = scores + bias.double()
        assert scores.isfinite().all()
        return scores

    def flash(self, query, key, value, dropout_p, is_causal, return_debug_mask, *, scale):
        self.calls.append("flash")
        assert (dropout_p, is_causal, return_debug_mask) == (0.0, False, False)
        self._check_flash(query, key, value)
        scores = self._weights(query, key, None, scale)
        out = (scores.softmax(-1) @ value.double()).to(query.dtype)
        return out, scores.logsumexp(-1).float(), None, None, query.shape[2], key.shape[2], None, None, None

    def efficient(self, query, key, value, bias, compute_log_sumexp, dropout_p, is_causal, *, scale):
        self.calls.append("efficient")
        assert (compute_log_sumexp, dropout_p, is_causal) == (True, 0.0, False)
        self._check(query, key, value)
        scores = self._weights(query, key, bias, scale)
        out = (scores.softmax(-1) @ value.double()).to(query.dtype)
        lse = torch.nn.functional.pad(scores.logsumexp(-1).float(), (0, -query.shape[2] % 32), value=torch.inf)
        return out.transpose(1, 2).contiguous().transpose(1, 2), lse, None, None

    def _gradients(self, grad_out, query, key, value, bias, out, lse, scale):
        assert grad_out.dtype == out.dtype == query.dtype and out.shape == grad_out.shape
        weights = (self._weights(query, key, bias, scale) - lse.double().unsqueeze(-1)).exp()
        delta = (grad_out.double() * out.double()).sum(-1, keepdim=True)
        scores = weights * (grad_out.double() @ value.double().mT - delta)
        grads = scores @ key.double() * scale, scores.mT @ query.double() * scale, weights.mT @ grad_out.double()
        return *(x.to(query.dtype) for x in grads), scores.to(query.dtype)

    def flash_backward(self, grad_out, query, key, value, out, lse, *rest, scale):
        self.calls.append("flash_backward")
        self._check_flash(query, key, value)
        assert rest[:6] == (None, None, query.shape[2], key.shape[2], 0.0, False)
        assert lse.is_contiguous() and lse.dtype == torch.float32 and lse.shape == query.shape[:3]
        return self._gradients(grad_out, query, key, value, None, out, lse, scale)[:3]

    def efficient_backward(self, grad_out, query, key, value, bias, out, lse, seed, offset, *rest, scale):
        self.calls.append("efficient_backward")
        self._check(query, key, value)
        dropout_p, wanted, is_causal = rest
        assert (dropout_p, is_causal, wanted[:3]) == (0.0, False, [True] * 3)
        assert lse.shape[2] == -(-query.shape[2] // 32) * 32 and lse.is_contiguous()
        grads = self._gradients(grad_out, query, key, value, bias, out, lse[..., : query.shape[2]], scale)
        return *grads[:3], grads[3] if wanted[3] else None


@pytest.fixture
def kernels(monkeypatch):
    """Run the form of CUDA on the CPU."""
    found = Kernels()
    monkeypatch.setattr(fused_attention, "_FLASH", found.flash)
    monkeypatch.setattr(fused_attention, "_FLASH_BACKWARD", found.flash_backward)
    monkeypatch.setattr(fused_attention, "_EFFICIENT", found.efficient)
    monkeypatch.setattr(fused_attention, "_EFFICIENT_BACKWARD", found.efficient_backward)
    monkeypatch.setattr(fused_attention, "_has_kernel", lambda x, scale: x.dtype != torch.float64 and scale != 0.0)
    monkeypatch.setattr(fused_attention, "_MAX_ENTRIES", _LIMIT)
    monkeypatch.setattr(fused_attention, "_GROUP_Q", 8)
    with use_backend("library"):
        yield found


def inputs(keys: int, bias: tuple[int, ...] | None, value_dim: int = 11, blocks: int = 4) -> list[Tensor]:
    """Query, key, value and bias. In the bias are log-weights, and some keys or pairs are excluded."""
    tensors = [numbers(3, blocks, 5, 11), numbers(3, keys, 13, 11, seed=1), numbers(3, keys, 13, value_dim, seed=2)]
    if bias is not None:
        added = 6.0 + 3.0 * numbers(*bias, seed=3)
        tensors.append(added.masked_fill(numbers(*bias, seed=4) > 0.8, -torch.inf))
        tensors[-1][-1, -1, -1] = -torch.inf  # a query without a key
    return tensors


def gradients(function, tensors: list[Tensor], both: bool) -> tuple[Partial, tuple[Tensor, ...]]:
    """Result of `function` and the gradients of all tensors, for a loss of the output, or of output and lse."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    query, key, value, *bias = leaves
    part = function(query, key, value, *bias, scale=0.4)
    loss = (part.out.double() * numbers(*part.out.shape, seed=7)).sum()
    if both:
        finite = part.lse.masked_fill(part.lse == -torch.inf, 0.0)
        loss = loss + (finite.double() * numbers(*part.lse.shape, seed=8)).sum()
    return Partial(*(x.detach() for x in part)), torch.autograd.grad(loss, leaves)


def naive(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, *, scale: float) -> Partial:
    """`partial_attention_naive` with finite gradients for queries without a key."""
    finite = None if bias is None else bias.clamp(min=-1e4)
    part = partial_attention_naive(query, key, value, finite, scale=scale)
    empty = part.lse < -5e3
    return Partial(part.out.masked_fill(empty.unsqueeze(-1), 0.0), part.lse.masked_fill(empty, -torch.inf))


BIASES = [None, (3, 4, 1, 13), (3, 1, 1, 13), (1, 1, 1, 13), (3, 4, 5, 13), (1, 1, 5, 13), (3, 1, 5, 13)]


@pytest.mark.parametrize("both", [False, True], ids=["out", "out and lse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("bias", BIASES, ids=str)
@pytest.mark.parametrize("keys", [4, 1])
def test_the_kernels_give_partial_attention(kernels, keys, bias, dtype, both):
    tensors = inputs(keys, bias)
    acc_dtype = torch.promote_types(dtype, torch.float32)
    given = [x.to(acc_dtype if i == 3 else dtype) for i, x in enumerate(tensors)]
    part, grads = gradients(partial_attention, given, both)
    expected, expected_grads = gradients(naive, [x.double() for x in given], both)
    eps = max(torch.finfo(dtype).eps, 1e-6)  # the kernels have float32 statistics and log-weights of about 10
    assert part.out.dtype == dtype and part.lse.dtype == acc_dtype
    torch.testing.assert_close(part.out.double(), expected.out, rtol=2 * eps, atol=2 * eps)
    # With the bias in the dtype of the queries the lse of bfloat16 would be wrong by 0.02.
    lse_eps = 1e-4 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(part.lse.double(), expected.lse, rtol=lse_eps, atol=lse_eps)
    for got, wanted, x in zip(grads, expected_grads, given, strict=True):
        assert got.dtype == x.dtype and got.is_contiguous()
        wanted = wanted.masked_fill(x == -torch.inf, 0.0)
        torch.testing.assert_close(got.double(), wanted, rtol=8 * eps, atol=8 * eps * max(1.0, wanted.abs().max()))
    pairs = bias is not None and bias[2] > 1
    names = {"flash"} if dtype.itemsize == 2 and not pairs else {"efficient"} if dtype != torch.float64 else set()
    assert {name.removesuffix("_backward") for name in kernels.calls} == names


def test_a_mask_of_pairs_stays_in_half_precision(kernels):
    """Only 0 and -inf: the kernel takes it without a wider copy of queries, keys and values."""
    query, key, value, _ = (x.bfloat16() for x in inputs(4, (1, 1, 5, 13)))
    pairs = torch.arange(13) <= 3 * torch.arange(5)[:, None]
    bias = mask_bias(pairs, query.dtype)[None, None].expand(3, -1, -1, -1)
    assert bias.dtype == torch.bfloat16
    part = partial_attention(query, key, value, bias, scale=0.4)
    expected = partial_attention_naive(query.double(), key.double(), value.double(), bias.double(), scale=0.4)
    torch.testing.assert_close(part.out.double(), expected.out, rtol=0.01, atol=0.01)
    torch.testing.assert_close(part.lse.double(), expected.lse, rtol=1e-5, atol=1e-5)
    assert kernels.calls == ["efficient"]


@pytest.mark.parametrize(("heads", "blocks"), [(3, 15), (14, 7), (13, 1)])
@pytest.mark.parametrize("value_dim", [11, 16])
def test_calls_of_at_most_so_many_entries(kernels, heads, blocks, value_dim):
    tensors = [numbers(heads, blocks, 5, 16), numbers(heads, blocks, 6, 16, seed=1)]
    tensors = [*tensors, numbers(heads, blocks, 6, value_dim, seed=2), numbers(heads, blocks, 1, 6, seed=3)]
    given = [x.float() for x in tensors]
    part, grads = gradients(partial_attention, given, True)
    expected, expected_grads = gradients(naive, [x.double() for x in given], True)
    for got, wanted in zip((*part, *grads), (*expected, *expected_grads), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    calls = math.ceil(heads / _LIMIT) * math.ceil(blocks / _LIMIT)
    assert kernels.calls == ["efficient"] * calls + ["efficient_backward"] * calls


def test_padded_copies_are_made_of_a_part_of_the_blocks(kernels, monkeypatch):
    monkeypatch.setattr(fused_attention, "_COPIED_NUMEL", 3 * 13 * 16)
    query, key, value, bias = (x.bfloat16() for x in inputs(4, (3, 4, 1, 13)))
    whole = partial_attention(query, key, value, bias.float(), scale=0.4)
    assert kernels.calls == ["flash"] * 2
    monkeypatch.setattr(fused_attention, "_COPIED_NUMEL", 1 << 20)
    for ours, other in zip(whole, partial_attention(query, key, value, bias.float(), scale=0.4), strict=True):
        assert torch.equal(ours, other)
    assert len(kernels.calls) == 3


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-3, 20.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_any_scale(kernels, dtype, scale):
    query, key, value, bias = inputs(4, (3, 4, 1, 13))
    query, key, value = ((x / max(1.0, scale)).to(dtype) for x in (query, key, value))
    part = partial_attention(query, key, value, bias.float(), scale=scale)
    expected = naive(query.double(), key.double(), value.double(), bias.float().double(), scale=scale)
    torch.testing.assert_close(part.out.double(), expected.out, rtol=0.01, atol=0.01)
    torch.testing.assert_close(part.lse.double(), expected.lse, rtol=1e-3, atol=1e-4)


def test_overlapping_views_are_not_copied(kernels, monkeypatch):
    """As in a window. The views have whole numbers of 16 bytes between rows, so that the kernel can load them."""
    x = numbers(2, 64, 16).bfloat16()
    views = x.unfold(1, 24, 8).transpose(2, 3)
    seen = []

    def flash(query, key, *rest, **options):
        seen.append(key)
        return kernels.flash(query, key, *rest, **options)

    monkeypatch.setattr(fused_attention, "_FLASH", flash)
    partial_attention(x[:, : 8 * views.shape[1]].unflatten(1, (-1, 8)), views, views, scale=0.3)
    assert seen[0].data_ptr() == x.data_ptr() and seen[0].stride() == views.stride()


def test_groups_of_queries_with_the_same_keys(kernels):
    """Each group has a copy of the gradient of the keys; all copies together are no larger than the queries."""
    sizes = itertools.product((1, 3, 12, 128, 1000), (1, 64, 256), (1, 16, 4096, 100_000))
    for blocks, block_q, num_keys in sizes:
        query, key = torch.empty(2, blocks, block_q, 8, device="meta"), torch.empty(2, 1, num_keys, 8, device="meta")
        groups = fused_attention._num_groups(query, key)
        assert blocks % groups == 0
        assert groups == 1 or groups * num_keys <= blocks * block_q
    assert fused_attention._num_groups(torch.empty(1, 128, 64, 8), torch.empty(1, 1, 64, 8)) > 16


@pytest.mark.parametrize("is_causal", [False, True])
def test_exact_attention_by_the_kernels(kernels, is_causal):
    query, key, value = (numbers(2, 30, 8, seed=i).bfloat16() for i in range(3))
    mask = torch.arange(30) < torch.tensor([[30], [17]])
    got = exact_attention(query, key, value, mask, is_causal=is_causal, scale=0.3)
    with use_backend("cpu"):
        wanted = exact_attention(*(x.double() for x in (query, key, value)), mask, is_causal=is_causal, scale=0.3)
    torch.testing.assert_close(got.double(), wanted, rtol=0.01, atol=0.01)


def test_without_kernels_there_are_plain_products():
    """Other devices and float64, and the whole backward pass against finite differences."""
    query, key, value, bias = inputs(4, (3, 4, 1, 13))
    bias = bias.masked_fill(bias == -torch.inf, 1.0)
    with use_backend("library"):
        leaves = [x[:2, :2].clone().requires_grad_() for x in (query, key, value, bias)]
        assert torch.autograd.gradcheck(lambda *x: tuple(partial_attention(*x, scale=0.4)), leaves)


def test_compiled(kernels):
    """The operator of the graph runs the same kernels, and the strides are those that the graph expects."""
    query, key, value, bias = inputs(4, (3, 4, 1, 13))
    given = [query.bfloat16(), key.bfloat16(), value.bfloat16(), bias.float()]

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(*tensors):
        part = partial_attention(*tensors, scale=0.4)
        return Partial(part.out.view(-1, 11), part.lse)

    part = run(*given)
    expected = partial_attention(*given, scale=0.4)
    assert torch.equal(part.out.view_as(expected.out), expected.out) and torch.equal(part.lse, expected.lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("bias", [None, (3, 4, 1, 13), (3, 1, 5, 13)], ids=str)
@pytest.mark.parametrize("keys", [4, 1])
def test_the_kernels_of_torch_accept_the_arguments(keys, bias, dtype):
    """On meta tensors, for the order of the arguments and the shapes of the results."""
    acc_dtype = torch.promote_types(dtype, torch.float32)
    tensors = [x.to("meta", acc_dtype if i == 3 else dtype) for i, x in enumerate(inputs(keys, bias))]
    padded = [*tensors, None][:4]
    out, lse = fused_attention.fused_attention(*padded, 0.4)
    assert out.shape == (3, 4, 5, 11) and lse.shape == (3, 4, 5) and (out.dtype, lse.dtype) == (dtype, acc_dtype)
    for grad_lse in (None, lse):
        grads = fused_attention.fused_attention_backward((out, grad_lse), tuple(padded), (out, lse), 0.4, True)
        for grad, x in zip(grads, padded, strict=True):
            assert (grad is None) == (x is None)
            assert grad is None or (grad.shape, grad.dtype) == (x.shape, x.dtype)
