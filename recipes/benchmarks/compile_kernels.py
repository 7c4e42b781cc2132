"""Compile the Triton kernels of the package for GPUs that need not be there, and list registers, spills and memory.

    pip install -e ".[gpu-test]"
    python -m recipes.benchmarks.compile_kernels [--capabilities 80,90,100] [--csv FILE]

Every row is a kernel of a call in `CALLS`, for a device of one compute capability. The exit code is 1 if a kernel in
half precision spills registers, or if one needs more than the 99 KiB of shared memory that devices of compute
capability 8.6 have. It takes about a second per row, and runs without TRITON_INTERPRET.
"""

import concurrent.futures
import contextlib
import multiprocessing
import os
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import typer
from torch import Tensor
from tqdm import tqdm

from hf_efficient_attn.cli import main_of, parse_lengths
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.ops.attend import BlockKeys, block_attention
from hf_efficient_attn.ops.backends import CLUSTER_BACKENDS, FEATURE_BACKENDS, launches
from hf_efficient_attn.ops.backends.backend import ClusterCall, ClusterRule, FusedFeatures, LinearCall
from hf_efficient_attn.ops.backends.launches import Launch
from recipes.common import commands

app = commands.new_app()
COLUMNS = {
    "call": "{call}", "kernel": "{kernel}", "capability": "{capability}", "registers": "{registers}",
    "spills": "{spills}", "shared": "{shared}", "per multiprocessor": "{per_multiprocessor}", "fault": "{fault}",
}  # fmt: skip
_SHARED = 99 << 10
_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}


class Row(NamedTuple):
    """A compiled kernel.

    Attributes:
        call: the name of the call that launches it.
        kernel: the name of the kernel.
        capability: the compute capability, times ten.
        dtype: of the first tensor.
        registers: registers of a thread.
        spills: bytes of registers that a thread spills.
        shared: bytes of shared memory of a program.
        per_multiprocessor: programs that a multiprocessor runs at a time.
    """

    call: str
    kernel: str
    capability: int
    dtype: str
    registers: int
    spills: int
    shared: int
    per_multiprocessor: int

    @property
    def is_fault(self) -> bool:
        """Whether it spills in half precision, or needs too much shared memory."""
        return self.shared > _SHARED or (self.spills > 0 and self.dtype != "float32")


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record the launches in this context instead of running them. The tensors may be on "meta"."""
    found: list[Launch] = []
    with mock.patch.multiple(launches, takes=lambda *_: True, passes_check=lambda *_: True, launch=found.append):
        yield found


def _of_blocks(form: str, dtype: torch.dtype, dim: int) -> None:
    """Call block attention, and its backward where there is one."""

    def of(shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    with_backward = dtype != torch.float32 or dim <= 128
    query, key, value = (of((16, 1000, dim), dtype).requires_grad_(with_backward) for _ in range(3))
    in_order = {"query_order": of((16, 1000)), "key_order": of((16, 1000))}
    fields: dict[str, Any] = {
        "window": {"window": (256, 256), "key_mask": of((1, 1000), torch.bool)},
        "range": {"start": of((16, 8)), "range_len": 256, "key_mask": of((16, 1000), torch.bool), **in_order},
        "causal": {"start": of((16, 8)), "range_len": 256, "window": (256, 0), "num_listed": of((16, 8))},
        "list": {"is_causal": True, "query_order": of((16, 1000))},
    }[form]
    listed = {"listed": of((16, 8, 64)), "log_weight": of((16, 8, 64), torch.float32).requires_grad_(with_backward)}
    found = block_attention(query, key, value, BlockKeys(128, **fields, **listed), scale=0.1)
    assert found is not None
    if with_backward:
        torch.autograd.grad((found.out.sum(), found.lse.sum()), (query, key, value))


def _of_features(name: str, causal: bool, dtype: torch.dtype, dim: int) -> None:
    """Call linear attention, or random features, and its backward."""
    tensors = [torch.empty(16, 1000, dim, dtype=dtype, device="meta", requires_grad=True) for _ in range(3)]
    mask = torch.empty(16, 1000, dtype=torch.bool, device="meta")
    number = torch.float32 if name == "exp" else dtype  # learned features come from float32 numbers
    features = FusedFeatures(name, dim, 1.0, *[lambda x: x.to(number)] * 2)
    if name == "favor":
        directions = torch.empty(256, dim, dtype=torch.float64, device="meta")
        features = features._replace(num_features=256, directions=directions)
    call = LinearCall(*tensors, mask, features, causal)
    backend = next(x for x in FEATURE_BACKENDS if x.applies(call))
    torch.autograd.grad(backend.attend(call).out.sum(), tensors)


def _of_clusters(dtype: torch.dtype, dim: int) -> None:
    """Call attention to chosen clusters of chunks of two levels."""
    tensors = [torch.empty(16, 1000, dim, dtype=dtype, device="meta") for _ in range(3)]
    members = torch.empty(16, 896 + 512, dtype=torch.int32, device="meta")
    blocks = [torch.empty(16, 7, dim, device="meta") for _ in range(2)]
    sizes = torch.empty(2, 2, dtype=torch.int32, device="meta")
    rule = ClusterRule(4, 0.25, 2.0, 1e-3, 6.0, 48, 0.005)
    call = ClusterCall(*tensors, members, *blocks, sizes, 128, ((128, 32), (512, 32)), rule, 0.1)
    CLUSTER_BACKENDS[0].attend(call)


_DTYPES = (torch.bfloat16, torch.float32)
# Maps the name of a call to a function that makes it, on "meta" tensors: a kernel adds its calls here.
CALLS: dict[str, Callable[[], None]] = {
    f"block attention, {form}, {str(dtype)[6:]}, {dim} dimensions": lambda x=(form, dtype, dim): _of_blocks(*x)
    for form in ("window", "range", "causal", "list")
    for dtype in _DTYPES
    for dim in (64, 128, 256)
}
CALLS |= {
    f"linear attention, {x[0]}{', causal' * x[1]}, {str(x[2])[6:]}, {x[3]} dimensions": lambda x=x: _of_features(*x)
    for causal in (False, True)
    for x in (
        *(("elu", causal, dtype, 64) for dtype in (*_DTYPES, torch.float16)),
        *((name, causal, torch.bfloat16, 128) for name in ("elu", "exp")),
    )
}


CALLS |= {
    f"random features, {str(dtype)[6:]}, {dim} dimensions": lambda x=("favor", False, dtype, dim): _of_features(*x)
    for dtype, dim in (*((x, 64) for x in (*_DTYPES, torch.float16)), (torch.bfloat16, 128))
}


CALLS |= {
    f"clusters, {str(dtype)[6:]}, {dim} dimensions": lambda x=(dtype, dim): _of_clusters(*x)
    for dtype in _DTYPES
    for dim in (64, 128, 256)
}


def compiled(name: str, call: Launch, capability: int) -> Row:
    """Compile a kernel as a launch would."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = call.kernel
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    aligned = {}
    for i, parameter in enumerate(kernel.arg_names):
        given = call.arguments.get(parameter, call.constants.get(parameter))
        if isinstance(given, Tensor):
            signature[parameter] = _TYPES[given.dtype]
            aligned[i,] = [["tt.divisibility", 16]]
        elif parameter in call.constants or given is None:
            signature[parameter] = "constexpr"
            constants[i,] = given
        else:
            signature[parameter] = "fp32" if isinstance(given, float) else "i32"
    options = {"num_warps": call.tile.num_warps, "num_stages": call.tile.num_stages}
    source = ASTSource(kernel, signature, constants, aligned)
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spills = _resources(found.asm["ptx"], capability)
    threads = 32 * call.tile.num_warps
    memory = (163 if capability == 80 else 227) << 10
    most = min(65536 // (registers * threads), memory // max(1, found.metadata.shared), 2048 // threads)
    first = next(x for x in call.arguments.values() if isinstance(x, Tensor))
    return Row(name, call.name, capability, str(first.dtype)[6:], registers, spills, found.metadata.shared, most)


def _resources(ptx: str, capability: int) -> tuple[int, int]:
    """Return the registers and the bytes of spills of a thread, as the assembler reports them."""
    import triton

    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    folder = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
    own = folder / "ptxas-blackwell"
    tool = own if capability >= 100 and own.exists() else folder / "ptxas"
    with tempfile.TemporaryDirectory() as scratch:
        path = pathlib.Path(scratch, "kernel.ptx")
        path.write_text(ptx, encoding="utf-8")
        command = [tool, "-v", f"--gpu-name={target[1]}", path, "-o", f"{scratch}/kernel.cubin"]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    numbers = (re.search(x, text) for x in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    registers, spills = (int(x[1]) for x in numbers if x is not None)
    return registers, spills


def rows_of(name: str, capabilities: list[int]) -> list[Row]:
    """Compile the kernels of a call for each compute capability."""
    with recorded() as found:
        CALLS[name]()
    return [compiled(name, x, capability) for x in found for capability in capabilities]


@app.command(epilog="Example: python -m recipes.benchmarks.compile_kernels --capabilities 90 --calls window")
def compile_kernels(
    capabilities: commands.numbers_option("Compute capabilities, times ten", "80,90,100") = [],  # noqa: B006
    calls: commands.option(str, "Only calls with this part of their name.") = "",
    csv: commands.Csv = None,
) -> None:
    """Compile the Triton kernels of the package for NVIDIA GPUs that need not be there."""
    names = [x for x in CALLS if calls in x]
    if not names:
        raise UnsupportedAttentionError(f"no call has {calls!r} in its name. The calls: {'; '.join(CALLS)}")
    chosen = parse_lengths(capabilities) or [80, 90, 100]
    # Processes that begin anew, since PyTorch and Triton have threads
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(len(names), os.cpu_count() or 1), context) as pool:
        found = pool.map(rows_of, names, [chosen] * len(names))
        rows = [x for some in tqdm(found, total=len(names), disable=None, leave=False) for x in some]
    shown = [x._asdict() | {"fault": "yes" if x.is_fault else ""} for x in rows]
    commands.report(shown, COLUMNS, "Bytes, not measured.", csv=csv)
    if any(x.is_fault for x in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.compile_kernels")
