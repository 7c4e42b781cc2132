"""Windows and biases of pairs by the kernels of accelerators, computed by dense products in their place."""

import pytest
import torch
from torch import Tensor

import hf_efficient_attn as hea
from each import attend_naive, close
from hf_efficient_attn.ops import attend as attend_module
from hf_efficient_attn.ops.attend import Partial, attend
from hf_efficient_attn.ops.backends import efficient, flash, flash_window
from hf_efficient_attn.ops.backends.backend import BlockBackend, BlockCall
from hf_efficient_attn.ops.windows import window_partial
from instances import inputs, numbers, padding_mask


def window_mask(length: int, left: int, right: int) -> Tensor:
    distance = torch.arange(length) - torch.arange(length)[:, None]
    return (distance >= -left) & (distance <= right)


def dense(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output and lse of tensors as the kernels take them: of equal width, a multiple of 8, with contiguous rows."""
    assert query.shape[3] == key.shape[3] == value.shape[3] and query.shape[3] % 8 == 0
    assert {x.stride(3) for x in (query, key, value)} == {1}
    scores = query @ key.mT * scale + bias
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def dense_backward(grad, inputs, out, lse, bias, scale):
    query, key, value = inputs
    weights = (query @ key.mT * scale + bias - lse.unsqueeze(3)).exp()
    of_scores = weights * (grad @ value.mT - (grad * out).sum(3, keepdim=True)) * scale
    return of_scores @ key, of_scores.mT @ query, weights.mT @ grad


@pytest.fixture
def flash_window_by_products(monkeypatch):
    """FlashAttention's window by `dense`: (B, N, H, D), and a window that includes both ends."""

    def bias(length: int, left: int, right: int) -> Tensor:
        return torch.zeros(length, length).masked_fill_(~window_mask(length, left, right), -torch.inf)

    def kernel(*given, scale, window_size_left, window_size_right):
        calls.append("forward")
        assert given[3:] == (None, None, given[0].shape[1], given[1].shape[1], 0.0, False, False)
        pairs = bias(given[5], window_size_left, window_size_right)
        out, lse = dense(*(x.transpose(1, 2) for x in given[:3]), pairs, scale)
        return out.transpose(1, 2).contiguous(), lse, None, None, None

    def backward(*given, scale, window_size_left, window_size_right):
        calls.append("backward")
        assert given[6:12] == (None, None, given[1].shape[1], given[2].shape[1], 0.0, False)
        grad, *tensors, out = (x.transpose(1, 2) for x in given[:5])
        pairs = bias(given[8], window_size_left, window_size_right)
        return [x.transpose(1, 2) for x in dense_backward(grad, tensors, out, given[5], pairs, scale)]

    calls: list[str] = []
    monkeypatch.setattr(flash_window, "_KERNEL", kernel)
    monkeypatch.setattr(flash_window, "_KERNEL_BACKWARD", backward)
    monkeypatch.setattr(flash, "applies", lambda call: call.dropout_p == 0.0)
    monkeypatch.setattr(attend_module, "runs_block_kernels", lambda device: True)
    return calls


@pytest.mark.parametrize(("dim", "value_dim"), [(8, 8), (30, 40), (16, 5)])
@pytest.mark.parametrize("with_lse", [False, True])
def test_the_window_of_flash_attention(with_lse, dim, value_dim, flash_window_by_products):
    leaves = [numbers(3, 41, n, seed=n + i) for i, n in enumerate((dim, dim, value_dim))]
    bias = torch.zeros(41, 41).masked_fill(~window_mask(41, 5, 2), -torch.inf)
    found = []
    for dtype in (torch.float32, torch.float64):
        given = [x.to(dtype).requires_grad_() for x in leaves]
        if dtype == torch.float32:
            out, lse = window_partial(*given, left=5, right=2, scale=0.3)
        else:
            out, lse = (x[:, 0] for x in attend_naive(*(x[:, None] for x in given), bias.double(), scale=0.3))
        loss = out.sin().sum() + (lse.cos().sum() if with_lse else 0.0)
        found.append([x.double() for x in (out, lse, *torch.autograd.grad(loss, given))])
    assert flash_window_by_products == ["forward", "backward"]
    close(found[0], found[1], 1e-5)


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_global", [0, 3, 90])
def test_longformer_by_the_window_of_flash_attention(num_global, is_causal, needs_grad, flash_window_by_products):
    config = hea.LongformerConfig(window_size=6, global_tokens=num_global)
    given = [x.requires_grad_(needs_grad) for x in inputs(batch=2, num_heads=2, q_len=80)]
    mask = torch.ones(2, 80, dtype=torch.bool)  # with a mask other kernels compute it
    found = []
    for key_mask in (None, mask):
        out = hea.attention(config, *given, attention_mask=key_mask, is_causal=is_causal)
        found.append([out, *(torch.autograd.grad(out.sin().sum(), given) if needs_grad else ())])
    assert flash_window_by_products == (["forward", "backward"][: 1 + needs_grad] if num_global < 80 else [])
    close(found[0], found[1], 1e-5)


def test_the_kernel_of_the_window_accepts_the_arguments():
    """On meta tensors, for the order of the arguments and the shapes of results and gradients."""
    for dims in ((64, 64), (30, 40), (252, 254)):
        shapes = [(6, 300, n) for n in (dims[0], *dims)]
        given = [torch.empty(x, dtype=torch.bfloat16, device="meta", requires_grad=True) for x in shapes]
        with torch.profiler.profile() as profile:
            out, lse = window_partial(*given, left=20, right=20, scale=0.1)
            grads = torch.autograd.grad(out.sum() + lse.sum(), given)
        names = {x.name for x in profile.events()}
        assert {"aten::_flash_attention_forward", "aten::_flash_attention_backward"} <= names
        assert (out.shape, lse.shape, lse.dtype) == ((6, 300, dims[1]), (6, 300), torch.float32)
        assert [(x.shape, x.dtype) for x in grads] == [(x.shape, x.dtype) for x in given]


def by_blocks(call: BlockCall) -> Partial:
    """Compute `block_attention` with a window and a list by dense matrices."""
    query, key, value, keys, scale, _ = call
    length = query.shape[1]
    assert keys.block_q == length and keys.start is keys.query_order is keys.key_order is None
    valid = keys.key_mask[:, None] if keys.key_mask is not None else torch.ones(1, 1, length, dtype=torch.bool)
    bias = torch.zeros(len(query), length, length).masked_fill(~(window_mask(length, *keys.window) & valid), -torch.inf)
    if keys.listed is not None:
        assert keys.listed.shape == keys.log_weight.shape == (len(query), 1, keys.listed.shape[2])
        weight = torch.full((len(query), 1, length), -torch.inf).scatter(2, keys.listed, keys.log_weight)
        weight = weight.expand(-1, length, -1)
        earlier = window_mask(length, length, 0 if keys.is_causal else length)
        bias = torch.maximum(bias, weight.masked_fill(~earlier, -torch.inf))
    return Partial(*(x[:, 0] for x in attend(query[:, None], key[:, None], value[:, None], bias[:, None], scale=scale)))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("side", [None, "left", "holes"])
@pytest.mark.parametrize("num_global", [0, 3])
def test_longformer_by_block_attention(num_global, side, is_causal, monkeypatch):
    """The window and the global tokens are one call for all sequences, whatever their masks."""
    calls = []
    backend = BlockBackend("dense", lambda call: True, lambda call: calls.append(0) or by_blocks(call), None)
    config = hea.LongformerConfig(window_size=6, global_tokens=num_global)
    given = inputs(batch=2, num_heads=2, q_len=80)
    call = {"attention_mask": None if side is None else padding_mask(side, 2, 80), "is_causal": is_causal}
    expected = hea.attention(config, *given, **call)
    monkeypatch.setattr(attend_module, "BLOCK_BACKENDS", (backend,))
    monkeypatch.setattr(attend_module, "runs_block_kernels", lambda device: True)
    close(hea.attention(config, *given, **call), expected, 1e-5)
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("shape", [(3, 4, 7, 33), (1, 1, 7, 33)])
def test_a_bias_of_pairs_by_the_memory_efficient_kernel(shape, blocks, dtype, monkeypatch):
    """A float32 bias is not rounded. Rows of the mask are aligned, and a query without a pair gets 0."""

    def kernel(query, key, value, mask, *_, scale):
        assert mask.dtype == query.dtype and mask.stride(2) % 8 == 0
        assert mask.shape == (*query.shape[:3], key.shape[2]) and mask.isfinite().all()
        return *dense(query, key, value, mask, scale), None, None

    def backward(grad, query, key, value, mask, out, lse, *_, scale):
        return *dense_backward(grad, (query, key, value), out, lse[..., : query.shape[2]], mask, scale), None

    monkeypatch.setattr(efficient, "_KERNEL", kernel)
    monkeypatch.setattr(efficient, "_KERNEL_BACKWARD", backward)
    monkeypatch.setattr(attend_module, "BACKENDS", (efficient.BACKEND._replace(applies=lambda call: True),))
    leaves = [x.to(dtype) for x in (numbers(3, 4, 7, 8), numbers(3, blocks, 33, 8), numbers(3, blocks, 33, 5, seed=1))]
    bias = numbers(*shape, seed=3).float()
    bias[..., 0, :] = bias[..., :3] = -torch.inf
    found = []
    for form, kind in ((attend, dtype), (attend_naive, torch.float64)):
        given = [x.to(kind).requires_grad_() for x in leaves]
        out, lse = form(*given, bias if kind == dtype else bias.double(), scale=0.3)
        assert (out[..., 0, :] == 0).all() and (lse[..., 0] == -torch.inf).all()
        grads = torch.autograd.grad(out.sin().sum() + lse[..., 1:].cos().sum(), given)
        assert [x.dtype for x in grads] == [kind] * 3
        found.append([x.double() for x in (out, lse, *grads)])
    close(found[0], found[1], 1e-5 if dtype == torch.float32 else 2e-2)
