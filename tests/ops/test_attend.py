"""`attend` against its readable form, with gradients; what the kernels of accelerators get; slices.

Dense products compute windows and biases of pairs in place of these kernels.
"""

import itertools

import pytest
import torch
from torch import Tensor

import hf_efficient_attn as hea
from each import Operators, attend_naive, close
from hf_efficient_attn.ops import attend as attend_module
from hf_efficient_attn.ops import slices
from hf_efficient_attn.ops.attend import Partial, attend
from hf_efficient_attn.ops.backends import cpu, efficient, flash, flash_window, fused, products
from hf_efficient_attn.ops.backends.backend import AttendCall, BlockBackend, BlockCall
from hf_efficient_attn.ops.windows import window_partial
from instances import inputs, numbers, padding_mask
from promises import Memory

BIASES = {
    "none": None, "of keys": (3, 4, 1, 33), "of shared keys": (3, 1, 1, 33), "of all heads": (1, 1, 1, 33),
    "of pairs": (1, 1, 7, 33), "of pairs of blocks": (1, 4, 7, 33),
}  # fmt: skip


def check(keys: str, bias: str, dims: tuple[int, int], with_lse: bool, dtype: torch.dtype, tolerance: float) -> None:
    shape = {"own": (3, 4, 33), "shared": (3, 1, 33), "overlapping": (3, 42)}[keys]
    leaves = [numbers(3, 4, 7, dims[0]), numbers(*shape, dims[0], seed=1), numbers(*shape, dims[1], seed=2)]
    if BIASES[bias] is not None:
        leaves.append(numbers(*BIASES[bias], seed=3))
        leaves[3][..., :5] = -torch.inf
    grad_out, grad_lse = numbers(3, 4, 7, dims[1], seed=4), numbers(3, 4, 7, seed=5)
    found = []
    for form, kind in ((attend, dtype), (attend_naive, torch.float64)):
        given = [x.to(kind) for x in leaves]
        given[3:] = [x.to(torch.promote_types(kind, torch.float32)) for x in given[3:]]
        given = [x.requires_grad_() for x in given]
        # Of (BH, 42, D) overlapping views (BH, 4, 33, D).
        query, key, value = given[0], *(x.unfold(1, 33, 3).mT if keys == "overlapping" else x for x in given[1:3])
        part = form(query, key, value, *given[3:], scale=0.3)
        loss = (part.out * grad_out.to(kind)).sum() + with_lse * (part.lse * grad_lse.to(kind)).sum()
        found.append([*part, *torch.autograd.grad(loss, given)])
    close([x.double() for x in found[0]], found[1], tolerance)


@pytest.mark.parametrize("keys", ["own", "shared", "overlapping"])
@pytest.mark.parametrize("bias", BIASES)
def test_output_lse_and_gradients(keys, bias):
    """The bias stays in float32: a log-weight of 5 in bfloat16 would be off by up to 2 %."""
    for dims, with_lse in itertools.product(((8, 8), (5, 11), (12, 7)), (False, True)):
        check(keys, bias, dims, with_lse, torch.float64, 1e-9)
        check(keys, bias, dims, with_lse, torch.float32, 3e-5)
    for dtype in (torch.bfloat16, torch.float16):
        check(keys, bias, (16, 16), True, dtype, 0.08)


@pytest.mark.parametrize("keys", ["own", "shared"])
def test_many_keys_with_growing_scores_and_a_block_without_any(keys):
    """More queries and keys than a tile of a kernel has: a sum that is kept must be scaled anew."""
    leaves = [numbers(2, 3, 150, 16), *(numbers(2, 3 if keys == "own" else 1, 300, 16, seed=n) for n in (1, 2))]
    leaves[1] *= torch.linspace(0.1, 4.0, 300).double().unsqueeze(1)
    bias = numbers(2, 3, 1, 300, seed=3)
    bias[0, 1] = -torch.inf
    grad_out, grad_lse = numbers(2, 3, 150, 16, seed=4), numbers(2, 3, 150, seed=5)
    found = []
    for form, dtype in ((attend, torch.float32), (attend_naive, torch.float64)):
        given = [x.to(dtype).requires_grad_() for x in (*leaves, bias)]
        out, lse = form(*given, scale=0.5)
        assert (out[0, 1] == 0).all() and (lse[0, 1] == -torch.inf).all()
        loss = (out * grad_out.to(dtype)).sum() + (lse * grad_lse.to(dtype)).masked_fill(lse == -torch.inf, 0.0).sum()
        found.append([x.double() for x in (out, lse, *torch.autograd.grad(loss, given))])
    close(*found, 1e-4)


@pytest.mark.parametrize("bias", ["none", "of keys"])
@pytest.mark.parametrize("value_dim", [8, 5, 11])
def test_the_layout_of_the_memory_has_no_influence(value_dim, bias):
    """Blocks of one query, whose numbers may have the layout that PyTorch calls channels-last, and keeps in padding."""
    tensors = [numbers(3, 4, n, d, seed=n + d) for n, d in ((1, 8), (33, 8), (33, value_dim), (1, value_dim))]
    given = [] if BIASES[bias] is None else [numbers(*BIASES[bias], seed=3).requires_grad_()]
    found = []
    for order in itertools.permutations(range(4)):
        back = [order.index(i) for i in range(4)]
        *leaves, grad = (x.permute(order).contiguous().permute(back) for x in tensors)
        leaves = [*(x.requires_grad_() for x in leaves), *given]
        out, lse = attend(*leaves, scale=0.3)
        found.append([out, lse, *torch.autograd.grad((out * grad).sum() + lse.sum(), leaves)])
    for results in found[1:]:
        close(results, found[0], 1e-12)


def test_dropout_keeps_the_mean_and_has_the_gradients_of_the_remaining_weights():
    query, key, value = (numbers(2, 3, n, 6, seed=n) for n in (5, 7, 7))

    def dropped(query, key, value):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return attend(query, key, value, scale=0.7, dropout_p=0.4).out

    assert torch.autograd.gradcheck(dropped, [x.requires_grad_() for x in (query, key, value)])
    query, key, value = (x.detach() for x in (query, key, value))
    many = attend(*(x.repeat(1000, 1, 1, 1) for x in (query, key, value)), scale=0.7, dropout_p=0.3)
    without = attend(query, key, value, scale=0.7)
    assert (many.out.unflatten(0, (1000, 2)).mean(0) - without.out).abs().max() < 0.15
    torch.testing.assert_close(many.lse[:2], without.lse)
    assert not torch.equal(many.out[:2], many.out[2:4])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-4), (torch.float16, 1e-4)])
@pytest.mark.parametrize("scale", [0.125, -3.0])
def test_a_bias_in_further_dimensions_of_the_keys(dtype, tolerance, scale):
    """What the kernels of CUDA get: products with these dimensions are products and bias, -inf a very small number."""
    query, key, value = (numbers(2, 3, n, 11, seed=n).to(dtype) for n in (5, 9, 9))
    bias = 10.0 * numbers(2, 3, 9, seed=3).float()
    bias[0, 0, 0] = -torch.inf
    wide = fused.widen(query, key, value, bias, 0, scale)
    assert {x.shape[3] % 8 for x in wide} == {0}
    found = scale * (wide[0].double() @ wide[1].double().mT)
    expected = scale * (query.double() @ key.double().mT) + bias.double()[:, :, None]
    assert (found[0, 0, :, 0] < -1e3).all()
    found[0, 0, :, 0] = expected[0, 0, :, 0] = 0.0
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("blocks", [4, 1])
def test_the_kernels_of_cuda_accept_the_arguments(blocks, bias, dtype):
    """On meta tensors, for the order of the arguments and the shapes of results and gradients."""
    query, key, value = (x.to("meta", dtype) for x in (numbers(3, 4, 7, 8), *[numbers(3, blocks, 33, 8)] * 2))
    given = [query, key, value] + ([] if BIASES[bias] is None else [torch.zeros(BIASES[bias], device="meta")])
    given = [x.requires_grad_() for x in given]
    out, lse = attend(*given, scale=0.4)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (query.shape, dtype, query.shape[:3], torch.float32)
    for loss in (out.sum(), out.sum() + lse.sum()):
        for grad, x in zip(torch.autograd.grad(loss, given, retain_graph=True), given, strict=True):
            assert (grad.shape, grad.dtype) == (x.shape, x.dtype)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_keys_and_values_may_have_other_dtypes_than_queries(device):
    """The kernels take one dtype. The output has the dtype of the values, and a gradient that of its tensor."""
    of_calls: list[set[torch.dtype]] = []  # of query, key and value, forward and backward

    def see(operator, arguments, _):
        if "scaled_dot_product" in str(operator):
            of_calls.append({x.dtype for x in arguments["backward" in str(operator) :][:3]})

    for dtypes in itertools.permutations((torch.float32, torch.bfloat16, torch.float16)):
        tensors = numbers(3, 4, 7, 8), *[numbers(3, 4, 9, 8)] * 2
        given = [x.to(device, t) for x, t in zip(tensors, dtypes, strict=True)]
        given = [x.requires_grad_() for x in given]
        of_calls.clear()
        with Operators(see):
            out, lse = attend(*given, scale=0.4)
            grads = torch.autograd.grad(out.sum() + lse.sum(), given)
        assert len(of_calls) == 2 and {len(x) for x in of_calls} == {1}
        assert (out.dtype, lse.dtype, *(x.dtype for x in grads)) == (dtypes[2], torch.float32, *dtypes)


@pytest.mark.parametrize(
    ("device", "dtype", "changes", "expected"),
    [
        ("cpu", torch.float32, {}, "cpu"),
        ("cpu", torch.float64, {"bias": "pairs"}, "cpu"),
        ("cpu", torch.float32, {"dropout_p": 0.1}, "products"),
        ("cpu", torch.float32, {"is_exported": True}, "products"),
        ("cpu", torch.float32, {"bias": "pairs", "requires_grad": True}, "products"),
        ("cpu", torch.float32, {"bias": "keys", "requires_grad": True}, "cpu"),
        ("meta", torch.bfloat16, {"bias": "keys"}, "flash"),
        ("meta", torch.bfloat16, {"head_dim": 256}, "flash"),
        ("meta", torch.bfloat16, {"head_dim": 256, "bias": "keys"}, "efficient"),
        ("meta", torch.float32, {}, "efficient"),
        ("meta", torch.bfloat16, {"bias": "pairs"}, "efficient"),
        ("meta", torch.float32, {"bias": "pairs", "requires_grad": True}, "products"),
        ("meta", torch.float32, {"scale": 0.0}, "products"),
        ("meta", torch.float64, {}, "products"),
    ],
)
def test_the_first_backend_that_applies_computes_a_call(device, dtype, changes, expected):
    """On meta tensors the table chooses as on CUDA."""
    query, key = (torch.ones(2, 3, n, changes.get("head_dim", 8), dtype=dtype, device=device) for n in (5, 9))
    bias = None
    if "bias" in changes:
        rows = 1 if changes["bias"] == "keys" else 5
        bias = torch.ones(2, 3, rows, 9, device=device, requires_grad=changes.get("requires_grad", False))
    scale, dropout_p = changes.get("scale", 0.5), changes.get("dropout_p", 0.0)
    call = AttendCall(query, key, key, bias, scale, dropout_p, changes.get("is_exported", False))
    assert next(x.name for x in attend_module.BACKENDS if x.applies(call)) == expected


def test_a_backend_that_is_added_to_the_table_computes_forward_and_backward(monkeypatch):
    """With the calls of a kernel whose backward is another one's, as for a user's device."""
    calls = []
    kernel = cpu.BACKEND
    own = kernel._replace(
        name="own",
        forward=lambda call: calls.append("forward") or kernel.forward(call),
        backward=lambda *given: calls.append("backward") or kernel.backward(*given),
    )
    monkeypatch.setattr(attend_module, "BACKENDS", (own, *attend_module.BACKENDS))
    query, key = (numbers(2, 3, n, 6, seed=n).requires_grad_() for n in (5, 7))
    found = torch.autograd.grad(attend(query, key, key, scale=0.7).out.sin().sum(), (query, key))
    assert calls == ["forward", "backward"]
    monkeypatch.setattr(attend_module, "BACKENDS", (products.BACKEND,))
    expected = torch.autograd.grad(attend(query, key, key, scale=0.7).out.sin().sum(), (query, key))
    close(list(found), list(expected), 1e-12)


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize(
    ("config", "num_heads", "length", "limit"),
    [
        (hea.KDEformerConfig(block_size=2048, num_samples=2048), 2, 2048, 1 << 20),  # exact at this length
        (hea.KDEformerConfig(block_size=64, num_samples=64, near_field="window"), 16, 512, 1 << 18),
        (hea.EvaConfig(window_size=64, num_landmarks=32), 16, 512, 1 << 18),
        (hea.LongformerConfig(window_size=64), 16, 512, 1 << 18),
    ],
    ids=["exact", "kdeformer", "eva", "longformer"],
)
def test_plain_products_stay_within_the_limit_of_a_slice(config, num_heads, length, limit, dropout_p, monkeypatch):
    """They hold the weights of all pairs: with dropout, and on devices without a kernel."""
    monkeypatch.setattr(slices, "CPU_NUMEL", limit)
    if not dropout_p:
        monkeypatch.setattr(attend_module, "BACKENDS", (products.BACKEND,))
    tensors = inputs(num_heads=num_heads, q_len=length, head_dim=4, value_dim=5)
    with Memory() as memory:
        hea.attention(config, *tensors, dropout_p=dropout_p)
    assert memory.numel <= limit


def test_a_slice_draws_the_same_in_the_backward_pass():
    x = torch.ones(6, 50, requires_grad=True)
    out = slices.sliced(lambda x: torch.nn.functional.dropout(x, 0.5), x, size=2, draws=True)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_backward_pass_of_a_slice_calls_no_kernel_again(checkpointed, monkeypatch):
    """Unless gradient checkpointing computes the whole call again, which must keep nothing."""
    calls, backend = [], cpu.BACKEND
    counted = backend._replace(forward=lambda call: calls.append(0) or backend.forward(call))
    monkeypatch.setattr(attend_module, "BACKENDS", (counted, products.BACKEND))
    tensors = [numbers(4, 1, 20, 6, seed=seed).requires_grad_() for seed in range(3)]

    def two_parts(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        first, second = (attend(query, key[..., half, :], value[..., half, :], scale=0.5)
                         for half in (slice(10), slice(10, 20)))  # fmt: skip
        return attend_module.merge(first, second).out

    def call(*tensors: Tensor) -> Tensor:
        return slices.sliced(two_parts, *tensors, size=2)

    expected = torch.autograd.grad(two_parts(*tensors).sin().sum(), tensors)
    calls.clear()
    out = torch.utils.checkpoint.checkpoint(call, *tensors, use_reentrant=False) if checkpointed else call(*tensors)
    assert len(calls) == 4
    for _ in range(2):  # also a second backward pass of the same graph
        torch.testing.assert_close(torch.autograd.grad(out.sin().sum(), tensors, retain_graph=True), expected)
        assert checkpointed or len(calls) == 4


# Windows and biases of pairs by the kernels of accelerators.


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
