"""A model of the time of a call on a GPU: what every kernel moves and multiplies, and two clocks.

The call runs on `meta` tensors, which have shapes but no numbers. A `TorchDispatchMode` sees every ATen operation after
composite ones are decomposed. Each is an `Operation` with the bytes that it must move at least, its products, and a
least time for what bytes and products do not show: radix sorts, scans, atomics, few thread blocks. A Triton kernel is
one operation, whose cost `recipes.common.kernel_costs` knows. Views cost time on the host only.

The time is that of two clocks, as on a device: the host issues operations one after another, and the device begins one
when it is issued and all earlier ones have ended. An operation that reads a number back makes the host wait. The call
is repeated, as in a benchmark, and the time is that of the last one.

What meta tensors cannot do is replaced while a call runs: `nonzero` finds everything in a list, one
number in each row of a matrix, and `_FOUND` in each row of a batch; a number that is read back is 0 or False; Triton
kernels apply; and `scaled_dot_product_attention` is the flash kernel, or the memory-efficient one in float32.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_efficient_attn.methods._shared import heads
from hf_efficient_attn.ops import exact
from hf_efficient_attn.ops.backends import launches
from recipes.common.kernel_costs import COSTS

_ATEN = torch.ops.aten
# As many clusters a query of the causal form of `nearfar` chooses on activations of GPT-2 and MiniLM.
_FOUND = 8
_FILLS = "new_", "zeros_like", "ones_like", "full_like"
_HALF = (torch.float16, torch.bfloat16)
# The argument "is_causal" of attention kernels.
_IS_CAUSAL = {
    "_scaled_dot_product_flash_attention": 4, "_scaled_dot_product_efficient_attention": 6,
    "_flash_attention_forward": 8, "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_efficient_attention_backward": 11,
}  # fmt: skip


class Machine(NamedTuple):
    """Constants of a device and its host, in seconds, bytes and floating-point operations.

    `op`, `view`, `call`, `strided`, `efficient`, `depth` and `atomics` are fitted to the times of
    docs/results.md on an H100. The others are from data sheets and published kernels. Nothing of `efficient_half`, of
    the kernels for gradients and of Triton's kernels was measured.
    """

    op: float = 20e-6  # host: an operation that launches a kernel, with the Python code around it
    view: float = 5e-6  # host: a view or an allocation
    call: float = 0.2e-3  # host: the checks and other Python code of a call
    sync: float = 15e-6  # host: reading a number back, besides waiting
    kernel: float = 2.5e-6  # the least time of a kernel
    bandwidth: float = 2.6e12
    strided: float = 0.8  # share of the bandwidth where an operand is broadcast or not contiguous
    half: float = 420e12  # products in half precision
    single: float = 45e12  # products in float32 without TF32
    double: float = 45e12
    flash: float = 480e12
    efficient: float = 35e12  # memory-efficient attention in float32
    efficient_half: float = 150e12
    backward: float = 0.7  # share of these rates in the backward of an attention kernel
    gathered: float = 150e12  # Triton kernels that read keys by index, in half precision
    contiguous: float = 350e12  # other Triton kernels, in half precision
    triton_single: float = 45e12  # Triton kernels in float32, by three products in TF32
    depth: float = 8e-9  # products with few tiles of results: seconds for each term of a sum
    atomics: float = 30e9  # per second
    # Of whole rows, by Triton kernels (not measured). FlashAttention-2 adds the gradients of queries so: on an H100
    # 4.3e9 numbers within 19 ms (Shah et al. 2024, 16,384 tokens, 64 dimensions), besides everything else.
    row_atomics: float = 200e9
    blocks: int = 132  # streaming multiprocessors


H100 = Machine()
# The host of the measured times, and a fast one.
HOSTS = {"measured": {}, "fast": {"op": 6e-6, "view": 1.5e-6, "call": 0.06e-3}}


class Operation(NamedTuple):
    """An operation on the device.

    Attributes:
        name: the name of the ATen operator or the Triton kernel.
        where: files and lines of the package, innermost first.
        moved: bytes.
        flops: floating-point operations of products.
        seconds: the time on the device.
        bound: what determines the time.
    """

    name: str
    where: str
    moved: float
    flops: float
    seconds: float
    bound: str


def _place() -> str:
    """The lines in the package that call an operation, from two functions at most."""
    found: list[str] = []
    frame = sys._getframe(2)
    while frame is not None and len(found) < 3:
        name = frame.f_code.co_filename
        if "/hf_efficient_attn/" in name and frame.f_code.co_name not in ("call", "sliced", "_recomputed"):
            found.append(f"{name.rsplit('/', 1)[1]}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)


def size_of(x: Tensor) -> float:
    """Bytes of the distinct numbers of a tensor: expanded and overlapping views repeat numbers."""
    numel = math.prod(n for n, s in zip(x.shape, x.stride(), strict=True) if s != 0)
    return float(min(numel * x.element_size(), x.untyped_storage().nbytes()))


class Recorder(TorchDispatchMode):
    """Records the operations that run in this context, and keeps both clocks."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine
        self.operations: list[Operation] = []
        self.host = self.device = 0.0
        self.syncs = 0
        self.share = 1.0  # of the bandwidth, for the next operation

    def begin(self) -> None:
        """Begin a call: forget the operations, keep the clocks."""
        self.operations = []
        self.syncs = 0
        self.host += self.machine.call

    def add(
        self, name: str, moved: float, flops: float = 0.0, rate: float = 1e30, least: float = 0.0, ops: float = 1.0
    ) -> None:
        """Add an operation with its least seconds on the device, and the number of operations on the host."""
        m = self.machine
        products = "float32" if rate <= m.single else "products"
        times = {
            "launch": m.kernel,
            "traffic": moved / (m.bandwidth * self.share),
            products: flops / rate,
            "latency": least,
        }
        bound = max(times, key=times.__getitem__)
        self.operations.append(Operation(name, _place(), moved, flops, times[bound], bound))
        self.share = 1.0
        self.host += m.op * ops
        self.device = max(self.device, self.host) + times[bound]

    def wait(self) -> None:
        """Read a number back."""
        self.host = max(self.host, self.device) + self.machine.sync
        self.syncs += 1

    def launch(self, call: launches.Launch) -> None:
        """Add a Triton kernel, in place of `launches.launch`."""
        m = self.machine
        cost = COSTS[call.name](call)
        is_half = any(x.dtype in _HALF for x in call.arguments.values() if isinstance(x, Tensor))
        rate = m.triton_single
        if is_half:
            rate = 1.0 / (cost.gathered / m.gathered + (1.0 - cost.gathered) / m.contiguous)
        self.add(call.name, cost.moved, cost.flops, rate, cost.atomics / m.row_atomics, ops=2)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name == "_local_scalar_dense":
            self.wait()
            return False if args[0].dtype == torch.bool else 0
        if name == "nonzero":
            self.add(name, size_of(args[0]), ops=4)
            self.wait()
            rows, columns = args[0].shape[:-1].numel(), args[0].shape[-1]
            found = args[0].numel() if args[0].ndim == 1 else rows * min(columns, _FOUND if args[0].ndim > 2 else 1)
            return torch.empty(found, args[0].ndim, dtype=torch.int64, device=args[0].device)
        out = func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if all(x.device.type == "cpu" for x in (*given, *outs)):
            return out
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if is_view or name in ("_unsafe_view", "detach", "alias") or name.startswith(("empty", "new_empty")):
            self.host += self.machine.view
        else:
            self._record(name, args, kwargs, given, outs)
        return out

    def _record(self, name: str, args: Any, kwargs: Any, given: list[Tensor], outs: list[Tensor]) -> None:
        if name.startswith(_FILLS):  # writes only
            given = []
        moved = sum(map(size_of, given)) + sum(map(size_of, outs))
        if any(y.numel() < outs[0].numel() or not y.is_contiguous() for y in given if y.ndim and outs):
            self.share = self.machine.strided
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            self._product(name, *given[-2:], moved)
        elif "attention" in name:
            self._attention(name, args, kwargs, given, moved)
        elif name.startswith(("linalg_cholesky_ex", "cholesky_inverse", "linalg_solve_triangular", "cholesky_solve")):
            size = outs[0].shape[-2] if name.startswith("linalg_s") else given[0].shape[-1]
            # The inverses of a batch are computed one after another.
            count = math.prod(given[0].shape[:-2]) if name == "cholesky_inverse" else 1
            self.add(name, moved, least=1.2e-6 * size * count if count > 1 else 2e-6 * size, ops=2 + count)
        else:
            self._simple(name, args, given, outs, moved)

    def _product(self, name: str, left: Tensor, right: Tensor, moved: float) -> None:
        m = self.machine
        batch = left.shape[0] if left.ndim == 3 else 1
        rows, depth, columns = left.shape[-2], left.shape[-1], right.shape[-1]
        rate = {torch.float32: m.single, torch.float64: m.double}.get(left.dtype, m.half)
        # Few tiles leave multiprocessors idle. The library may split the sum; assume half as good as that.
        tiles = batch * math.ceil(rows / 128) * math.ceil(columns / 128)
        serial = depth * m.depth * (2 if left.dtype == torch.float32 else 1) if tiles < m.blocks else 0.0
        self.add(name, moved, 2.0 * batch * rows * depth * columns, rate, serial)

    def _attention(self, name: str, args: Any, kwargs: Any, given: list[Tensor], moved: float) -> None:
        m = self.machine
        is_backward = "backward" in name
        query, key, value = given[1:4] if is_backward else given[:3]
        window = [kwargs.get(f"window_size_{side}") for side in ("left", "right")]
        if name.startswith("_flash_attention"):  # (B, N, H, D)
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        q_len, k_len, dim = query.shape[2], key.shape[2], max(query.shape[3], value.shape[3])
        if None not in window:  # a tile of queries, and half a tile of keys
            k_len = min(k_len, sum(window) + 1 + 128 + 64)
        is_half = query.dtype in _HALF
        if is_half and "efficient" not in name:
            blocks = math.prod(query.shape[:2]) * math.ceil(q_len / 128)
            wide = next(x for x in (32, 64, 96, 128, 192, 256) if x >= dim)
            flops = 4.0 * blocks * 128 * math.ceil(k_len / 128) * 128 * wide
            # The first and the last tiles of a block are not overlapped. Few blocks split the keys.
            rate = m.flash * (k_len / (k_len + 256)) * min(1.0, max(0.5, blocks / m.blocks))
        else:
            tile = 64 if dim <= 64 or is_half else 32
            blocks = math.prod(query.shape[:2]) * math.ceil(q_len / tile)
            wide = (64 if dim <= 64 else 128 * math.ceil(dim / 128)) if is_half else dim
            flops = 4.0 * blocks * tile * math.ceil(k_len / 64) * 64 * wide
            rate = m.efficient_half if is_half else m.efficient * (1.0 if dim <= 64 else 0.6)
            rate *= min(1.0, 0.62 * blocks / m.blocks)
        # Arguments that have their default are left out.
        if any(args[i] for i in (_IS_CAUSAL.get(name, len(args)),) if i < len(args)):
            flops /= 2
        if is_backward:
            flops *= 2.5
            rate *= m.backward
        self.add(name, moved, flops, rate, ops=2)

    def _simple(self, name: str, args: Any, given: list[Tensor], outs: list[Tensor], moved: float) -> None:
        m = self.machine
        x = given[0] if given else outs[0]
        rows, n = (x.numel() // max(1, x.shape[-1]), x.shape[-1]) if x.ndim else (1, 1)
        least, ops = 0.0, 1.0
        if name == "sort":
            dim = next((a for a in args[1:] if isinstance(a, int) and not isinstance(a, bool)), -1)
            n = x.shape[dim]
            rows = x.numel() // n
            wide = x.element_size() + 8
            if n <= 4096:
                moved, ops = 2 * moved, 2
            elif rows < 128:  # two radix sorts of everything: by number, and by row
                moved, least, ops = 2.0 * x.numel() * (wide * x.element_size() + 24) + moved, 12 * 4e-6, 4
            else:  # a thread block sorts each row
                least, ops = n * x.element_size() * wide * 2 / 40e9 * math.ceil(rows / m.blocks), 3
        elif name == "topk":
            is_split = rows * n >= 400_000
            passes = x.element_size() + 2 if is_split else 4 * x.element_size() + 2
            moved += size_of(x) * passes
            least, ops = 6 * 4e-6 if is_split else n / 1024 * passes * 0.6e-6, 3
        elif name in ("cumsum", "cummax", "cumprod", "logcumsumexp"):
            is_inner = args[1] % x.ndim == x.ndim - 1
            least = n / 1024 * 1.2e-6 * math.ceil(rows / 264) if is_inner else 0.0
        elif name.startswith(("index_add", "scatter_add", "scatter_reduce")):
            least, ops = given[-1].numel() / (m.atomics / 20 if "reduce" in name else m.atomics), 2
        elif name == "searchsorted":
            moved += given[1].numel() * 16.0 * math.log2(max(2, given[0].shape[-1]))
        elif name == "embedding_dense_backward":  # sorts the index
            index = given[1].numel()
            moved, least, ops = moved + 8 * 32.0 * index, 8 * 4e-6, 8
        elif name in ("embedding", "index_select", "gather", "index"):
            moved += min(size_of(x), sum(map(size_of, outs))) - size_of(x)
        elif name == "_softmax" and n > 1024:
            moved += size_of(x)
        if name in ("scatter_", "index_put_", "index_copy_", "index_fill_"):  # touch what is indexed only
            index = next(y for y in tree_leaves(args[1:]) if isinstance(y, Tensor))
            each = 1 if name == "scatter_" else x.numel() / max(1, x.shape[0])
            moved += 2 * (index.numel() * each * x.element_size() - size_of(x))
        self.add(name, moved, least=least, ops=ops)


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """PyTorch's function by the kernel that a GPU has for the dtype, on meta tensors."""
    given = [x if x.ndim == 4 else x.unsqueeze(0) for x in (query, key, value)]
    if query.dtype not in _HALF:
        out: Tensor = _ATEN._scaled_dot_product_efficient_attention(*given, None, False, 0.0, is_causal, scale=scale)[0]
    else:
        out = _ATEN._scaled_dot_product_flash_attention(*given, 0.0, is_causal, False, scale=scale)[0]
    return out.view(*query.shape[:-1], value.shape[-1])


@contextlib.contextmanager
def as_on_a_gpu(launch: Callable[[launches.Launch], None]) -> Iterator[None]:
    """Make the package take the branches of a GPU for meta tensors, with `launch` in place of Triton's launches."""
    replaced = {
        (launches, "takes"): lambda *x: all(y.dtype != torch.float64 for y in x),
        (launches, "passes_check"): lambda *_: True,
        (launches, "launch"): launch,
        (exact, "scaled_dot_product_attention"): sdpa,
        (heads, "scaled_dot_product_attention"): sdpa,
        (torch, "autocast"): lambda *_, **__: contextlib.nullcontext(),  # knows no meta device
        (torch, "is_autocast_enabled"): lambda *_: False,
    }
    with contextlib.ExitStack() as stack:
        for (module, name), function in replaced.items():
            stack.enter_context(mock.patch.object(module, name, function))
        yield


def simulate(call: Callable[[], Any], machine: Machine) -> tuple[float, Recorder]:
    """The seconds of a call in a loop, and a recorder with the operations of the last call."""
    recorder = Recorder(machine)
    ends = []
    with as_on_a_gpu(recorder.launch), recorder:
        for _ in range(3):  # the first call makes constants
            recorder.begin()
            call()
            ends.append(max(recorder.host, recorder.device))
    return ends[-1] - ends[-2], recorder
