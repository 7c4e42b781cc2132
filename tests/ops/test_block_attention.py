"""Block attention by Triton kernels against its readable form, with gradients, and in methods.

Without a GPU the kernels run in Triton's interpreter (see conftest.py), and without Triton those tests are skipped.
"""

import math
import warnings

import pytest
import torch
from torch import Tensor

import hf_efficient_attn as hea
from each import DEVICE, close, count_moved, needs_triton, refuses
from hf_efficient_attn.ops import attend as attend_module
from hf_efficient_attn.ops.attend import BlockKeys, block_attention
from hf_efficient_attn.ops.backends import block_attention as backend
from hf_efficient_attn.ops.backends import launches
from hf_efficient_attn.ops.backends.backend import BlockCall
from hf_efficient_attn.ops.backends.block_attention import block_attention_naive
from instances import inputs, numbers, padding_mask
from recipes.benchmarks.compile_kernels import CALLS, recorded
from recipes.common.kernel_costs import COSTS

SCALE = 0.3
SIZES = (45, 53, 30, 12, 17)
# Maps the name of a form to the fields of `BlockKeys` that it has, and whether a list is causal.
LIST = ("listed", "log_weight")
RANGE = ("query_order", "start", "key_order")
FORMS = {
    "window": (("window",), False),
    "masked window and list": (("window", "key_mask", *LIST), False),
    "window and causal list": (("window", *LIST, "num_listed"), True),
    "range": (RANGE, False),
    "masked range and list": ((*RANGE, "key_mask", *LIST), False),
    "window of ranges and list": (("start", "window", *LIST, "num_listed"), False),
    "window of sorted ranges": ((*RANGE, "window"), False),
    "causal list": (("query_order", *LIST), True),
    "list": (LIST, False),
}


def make_call(form: str, sizes: tuple[int, ...] = SIZES, dtype: torch.dtype = torch.float32) -> BlockCall:
    """A call of two heads, of numbers that `dtype` has, in float64.

    `sizes` are q_len, kv_len, head_dim, value_dim, and the number of queries of a block. The second block of the first
    head has no key. The ranges of the others begin anywhere, and may end after the last key.
    """
    q_len, kv_len, head_dim, value_dim, block_q = sizes
    shapes = (2, q_len, head_dim), (2, kv_len, head_dim), (2, kv_len, value_dim)
    rows = [numbers(*shape, seed=i).to(dtype).double() for i, shape in enumerate(shapes)]
    draw = torch.Generator().manual_seed(0)
    blocks = -(-q_len // block_q)
    start = torch.randint(kv_len, (2, blocks), generator=draw)
    listed = torch.randint(kv_len, (2, blocks, 38), generator=draw)
    log_weight = numbers(2, blocks, 38, seed=3)
    log_weight[torch.rand(2, blocks, 38, generator=draw) < 0.2] = -torch.inf
    if blocks > 1:
        start[0, 1], log_weight[0, 1] = kv_len, -torch.inf
    fields = {
        "query_order": torch.rand(2, q_len, generator=draw).argsort(1),
        "window": (9, 4),
        "start": start,
        "key_order": torch.rand(2, kv_len, generator=draw).argsort(1),
        "key_mask": torch.rand(2 if "range" in form else 1, kv_len, generator=draw) < 0.8,
        "listed": listed,
        "log_weight": log_weight.float().double(),
        "num_listed": torch.randint(39, (2, blocks), generator=draw),
    }
    names, is_causal = FORMS[form]
    keys = BlockKeys(block_q, range_len=20, is_causal=is_causal, **{name: fields[name] for name in names})
    return BlockCall(*rows, keys, SCALE, 0.0)


def on_device(call: BlockCall, dtype: torch.dtype) -> tuple[BlockCall, list[Tensor]]:
    """The call with float32 log-weights, and its tensors that have gradients."""
    leaves = [x.to(DEVICE, dtype).requires_grad_() for x in call[:3]]
    keys = BlockKeys(*(x.to(DEVICE) if isinstance(x, Tensor) else x for x in call.keys))
    if keys.log_weight is not None:
        leaves.append(keys.log_weight.to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_())
        keys = keys._replace(log_weight=leaves[3])
    return BlockCall(*leaves[:3], keys, SCALE, 0.0), leaves


def with_gradients(form, call: BlockCall, dtype: torch.dtype) -> list[Tensor]:
    """Out, lse with 0 in place of -inf, where it is -inf, and the gradients."""
    call, leaves = on_device(call, dtype)
    out, lse = form(call)
    empty = lse == -torch.inf
    grads = [numbers(*x.shape, seed=5).to(x.device, x.dtype) for x in (out, lse)]
    found = torch.autograd.grad((out, lse), leaves, grads)
    return [x.detach().cpu() for x in (out, lse.masked_fill(empty, 0.0), empty, *found)]


def by_kernels(call: BlockCall):
    found = block_attention(*call[:4], scale=call.scale)
    assert found.out.dtype == call.value.dtype and found.lse.dtype == torch.float32
    return found


def compare(call: BlockCall, dtype: torch.dtype, tolerance: float) -> None:
    expected = with_gradients(block_attention_naive, call, torch.float64)
    found = with_gradients(by_kernels, call, dtype)
    assert torch.equal(found.pop(2), expected.pop(2))
    for ours, exact in zip(found, expected, strict=True):
        assert (ours.double() - exact).norm() <= tolerance * exact.norm().clamp(min=0.1)


@needs_triton
@pytest.mark.parametrize(
    ("form", "sizes", "dtype", "tolerance"),
    [
        *((form, SIZES, torch.float32, 3e-6) for form in FORMS),
        ("masked range and list", SIZES, torch.bfloat16, 2e-2),
        ("window and causal list", SIZES, torch.float16, 2e-3),
        ("window of ranges and list", (150, 70, 130, 12, 140), torch.float16, 2e-3),
        ("masked window and list", (70, 150, 16, 33, 70), torch.bfloat16, 2e-2),
        ("masked range and list", (40, 53, 256, 200, 40), torch.float16, 2e-3),
        ("masked range and list", (1, 1, 1, 1, 1), torch.float32, 3e-6),
        ("range", (20, 300, 8, 8, 1), torch.float32, 3e-6),
    ],
)
def test_forms_sizes_and_dtypes_against_the_readable_form(form, sizes, dtype, tolerance, kernels):
    compare(make_call(form, sizes, dtype), dtype, tolerance)


def test_the_readable_form_query_by_query():
    for form, (_, is_causal) in FORMS.items():
        call = make_call(form)
        query, key, value, keys, *_ = call
        out, lse = block_attention_naive(call)
        for a, i in [(0, 3), (0, 18), (0, 30), (1, 20), (1, 44)]:
            weights = torch.zeros(53, dtype=torch.float64)
            rank = i if keys.query_order is None else keys.query_order[a].tolist().index(i)
            block = rank // keys.block_q
            near = set()
            if keys.start is not None or keys.window is not None:
                first = 0 if keys.start is None else int(keys.start[a, block])
                for index in range(first, min(53, first + 20) if keys.start is not None else 53):
                    j = index if keys.key_order is None else int(keys.key_order[a, index])
                    if keys.window is None or i - keys.window[0] <= j <= i + keys.window[1]:
                        near.add(j)
                        weights[j] += keys.key_mask is None or bool(keys.key_mask[a % len(keys.key_mask), index])
            if keys.listed is not None:
                count = 38 if keys.num_listed is None else int(keys.num_listed[a, block])
                pairs = zip(keys.listed[a, block, :count].tolist(), keys.log_weight[a, block].tolist(), strict=False)
                for j, log_weight in pairs:
                    if not (is_causal and j > i) and not (keys.start is None and j in near):
                        weights[j] += math.exp(log_weight)
            weights *= (key[a] @ query[a, i] * SCALE).exp()
            total = weights.sum()
            close(out[a, i], weights @ value[a] / total if total else torch.zeros(12, dtype=torch.float64))
            close(lse[a, i], total.log())


@needs_triton
def test_unused_keys_are_not_read(kernels):
    """Masked keys that no block lists with a weight may be NaN."""
    call, _ = on_device(make_call("masked range and list"), torch.float32)
    keys = call.keys
    with torch.no_grad():
        used = torch.zeros_like(keys.key_mask).scatter_(1, keys.key_order, keys.key_mask)
        for a in range(2):
            used[a, keys.listed[a][keys.log_weight[a] > -torch.inf]] = True
        used[:, 7] = False
        keys.log_weight[keys.listed == 7] = -torch.inf
        keys.key_mask[keys.key_order == 7] = False
        call.key[~used], call.value[~used] = torch.nan, torch.nan
    out, lse = by_kernels(call)
    assert not used.all() and out.isfinite().all() and not out[lse == -torch.inf].any()
    grads = torch.autograd.grad((out.sum(), lse[lse > -torch.inf].sum()), (*call[:3], keys.log_weight))
    assert all(x.isfinite().all() for x in grads)
    assert not grads[1][~used].any() and not grads[2][~used].any()
    assert not grads[3][keys.log_weight == -torch.inf].any()


METHODS = [
    ("kdeformer", {}, False),
    ("hyperattention", {"columns": "all"}, False),
    ("kdeformer", {"near_field": "lsh", "draw": "independent"}, False),
    ("kdeformer", {}, True),
    ("kdeformer", {"near_field": "lsh"}, True),
    ("hyperattention", {"num_samples": 0}, True),
    ("reformer", {}, False),
    ("nearfar", {"num_groups": 8, "near_share": 0.0}, False),
    ("nearfar", {}, True),
]


@needs_triton
@pytest.mark.parametrize("mask", ["none", "holes"])
@pytest.mark.parametrize(("method", "options", "is_causal"), METHODS)
def test_methods_with_and_without_the_kernels(method, options, is_causal, mask, kernels, monkeypatch):
    sizes = {"block_size": 8} if method == "reformer" else {"block_size": 16, "num_samples": 12}
    config = hea.method_info(method).config_class(**sizes | options)
    key_mask = padding_mask(mask, 2, 101)
    rows = [x.to(DEVICE).requires_grad_() for x in inputs(batch=2, q_len=101, value_dim=5)]
    grad = numbers(2, 2, 101, 5).float().to(DEVICE)
    if key_mask is not None:
        key_mask = key_mask.to(DEVICE)
        grad = grad * key_mask[:, None, :, None]  # outputs of masked tokens are not used
    results = []
    for backends in ((), (backend.BACKEND,)):
        monkeypatch.setattr(attend_module, "BLOCK_BACKENDS", backends)
        assert not kernels
        out = hea.attention(config, *rows, attention_mask=key_mask, is_causal=is_causal)
        results.append((out * (grad != 0), *torch.autograd.grad(out, rows, grad)))
    # The keys of bidirectional nearfar are all listed.
    of_keys = set() if method == "nearfar" and not is_causal else {"block_key_gradients"}
    assert {call.name for call in kernels} == {"block_forward", "block_query_gradients"} | of_keys
    torch.testing.assert_close(*results, atol=2e-5, rtol=1e-4)


@needs_triton
@pytest.mark.parametrize("form", ["masked window and list", "masked range and list", "list"])
def test_a_check_that_fails_leaves_the_kernels_out(form, monkeypatch):
    monkeypatch.setattr(launches, "takes", lambda *x: True)
    call, _ = on_device(make_call(form), torch.float32)
    run = launches.launch
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setattr(launches, "_results", {})
        assert backend.BACKEND.applies(call)
    for wrong in backend._KERNELS[: 2 if form == "list" else 3]:  # one kernel computes nothing
        monkeypatch.setattr(launches, "_results", {})
        monkeypatch.setattr(launches, "launch", lambda x, wrong=wrong: None if x.name == wrong else run(x))
        with pytest.warns(UserWarning, match="kernels for block attention are left out"):
            assert not backend.BACKEND.applies(call)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert block_attention(*call[:4], scale=SCALE) is None


@pytest.mark.parametrize("why", ["cpu", "float64", "dimensions", "deterministic", "plain"])
def test_what_the_kernels_do_not_compute(why, monkeypatch):
    class OnGpu:
        is_cuda, requires_grad, device = why != "cpu", True, torch.device("cuda", 0)
        dtype = torch.float64 if why == "float64" else torch.float32
        shape = (2, 45, 257 if why == "dimensions" else 20)

    monkeypatch.setattr(launches, "_IS_INSTALLED", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setenv("HEA_KERNELS", "plain" if why == "plain" else "")
    torch.use_deterministic_algorithms(why == "deterministic")
    try:
        assert not launches.takes(OnGpu(), OnGpu())
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setenv("HEA_KERNELS", "")
    OnGpu.is_cuda, OnGpu.dtype, OnGpu.shape = True, torch.float32, (2, 45, 256)
    assert launches.takes(OnGpu(), OnGpu())
    monkeypatch.setenv("HEA_KERNELS", "none")
    refuses("HEA_KERNELS=none", launches.takes, OnGpu(), error=ValueError)


@needs_triton
@pytest.mark.skipif(DEVICE == "cuda", reason="counts what the interpreter reads")
@pytest.mark.parametrize("form", ["window", "masked window and list", "window of ranges and list", "list"])
def test_costs_are_what_the_kernels_read_and_write(form, kernels, monkeypatch):
    from triton.runtime.interpreter import InterpreterBuilder

    moved, added = count_moved(monkeypatch), [0]
    add = InterpreterBuilder.create_atomic_rmw

    def counted_add(self, op, ptr, value, mask, *given):
        added[0] += int(mask.data.sum())
        return add(self, op, ptr, value, mask, *given)

    monkeypatch.setattr(InterpreterBuilder, "create_atomic_rmw", counted_add)
    run, checked = launches.launch, set()

    def launch(call):
        moved[0] = added[0] = 0
        run(call)
        cost = COSTS[call.name](call)
        assert moved[0] == pytest.approx(cost.moved, rel=0.1), call.name
        assert added[0] == pytest.approx(cost.atomics, rel=0.02), call.name
        checked.add(call.name)

    monkeypatch.setattr(launches, "launch", launch)
    call, leaves = on_device(make_call(form, (256, 256, 32, 32, 64)), torch.float32)
    keys = call.keys  # all ranges are whole, and all listed keys are used
    if keys.start is not None:
        keys = keys._replace(start=(torch.arange(4) * 60).repeat(2, 1), num_listed=torch.full((2, 4), 19))
    if keys.key_mask is not None:
        keys = keys._replace(key_mask=torch.ones_like(keys.key_mask))
    if keys.log_weight is not None:
        keys = keys._replace(log_weight=leaves[3].detach().clamp(min=-9.0).requires_grad_())
        leaves[3] = keys.log_weight
    out, lse = by_kernels(call._replace(keys=keys))
    torch.autograd.grad((out, lse), leaves, (out.detach(), lse.detach()))
    assert len(checked) == (2 if form == "list" else 3)


@pytest.mark.parametrize("call", CALLS)
def test_calls_that_are_compiled(call):
    """Every launch has a cost. Gradients in float32 of more than 128 dimensions fit no device."""
    with recorded() as found:
        CALLS[call]()
    assert found and {x.name for x in found} <= COSTS.keys()
    if call.startswith("block attention"):
        count = 1 if call.endswith("float32, 256 dimensions") else 2 if ", list," in call else 3
        assert [x.name for x in found] == [*backend._KERNELS[:count]]
