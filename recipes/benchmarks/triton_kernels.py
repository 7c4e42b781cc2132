"""Compile the Triton kernels for GPUs, without one, and print their registers, spills and shared memory.

    python -m recipes.benchmarks.triton_kernels
    python -m recipes.benchmarks.triton_kernels --dtype float32 --width 64,128,256 --block 32,128

The kernels are those of attention to gathered keys ("forward" and "backward") and of kernel halving ("differences" and
"decisions" of buckets of 256 pairs).

Needs Triton (extra `gpu-test`), not a GPU: Triton brings the assembler of CUDA, `ptxas`. Duration: a minute. Expected:
no bytes are spilled in half precision, and programs use at most 99 KiB of shared memory; otherwise `--check` exits with
status 1.

A register that a thread needs beyond the 255 that it can have is spilled to memory. "sm" is the compute capability: 80
is that of an A100, 90 of an H100, 100 of a B200. All devices from 8.0 on have at least 99 KiB of shared memory for a
program.
"""

import pathlib
import re
import subprocess
import tempfile
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from tqdm import tqdm

from hf_efficient_attn.cli import main_of, parse_lengths, split_list, table
from hf_efficient_attn.errors import UnsupportedAttentionError
from recipes.common import commands

if TYPE_CHECKING:
    from triton import JITFunction

app = commands.new_app()

ARCHITECTURES = (80, 90, 100)
MOST_SHARED_KIB = 99
_DTYPES = {"float32": ("fp32", 4), "float16": ("fp16", 2), "bfloat16": ("bf16", 2)}
# The types of the kernels' arguments. Those that are not listed are pointers to numbers of the inputs' dtype.
_TYPES = {
    **dict.fromkeys(("index", "order", "seed", "kept"), "*i64"),
    "plan": "*fp64",
    **dict.fromkeys(("log_weight", "lse", "grad_lse", "grad_key", "grad_value", "grad_log_weight"), "*fp32"),
    **dict.fromkeys(("norm", "largest", "difference"), "*fp32"),
    **dict.fromkeys(("query_head", "query_row", "key_head", "key_row", "value_head", "value_row"), "i32"),
    **dict.fromkeys(("q_len", "kv_len", "block_q", "num_blocks", "num_keys", "chunks"), "i32"),
    **dict.fromkeys(("index_head", "plan_part", "plan_head", "num_pairs", "bucket", "num_buckets", "num_heads"), "i32"),
    **dict.fromkeys(("stream", "first_number"), "i32"),
    "mixed_stream": "i64",
    "scale": "fp32",
}
# `thinformer` fills buckets of up to about so many pairs.
_BUCKET = 256


class Case(NamedTuple):
    """Which kernel is compiled, and for what."""

    kernel: str
    dtype: str
    width: int
    block: int
    architecture: int


class Program(NamedTuple):
    """A kernel with its constants, and the options of the compiler."""

    kernel: "JITFunction[Any]"
    constants: dict[str, Any]
    tile: tuple[int, int]
    num_warps: int
    num_stages: int


def _gather_attend(case: Case) -> Program:
    """Attention to gathered keys or its gradient, for blocks of `case.block` queries."""
    import triton

    from hf_efficient_attn.ops import triton_gather as kernels

    backward = case.kernel == "backward"
    tiling = kernels.tiling(case.block, case.width, _DTYPES[case.dtype][1], backward)
    constants = {
        **dict.fromkeys(("HEAD_DIM", "VALUE_DIM"), case.width),
        **dict.fromkeys(("PADDED_HEAD_DIM", "PADDED_VALUE_DIM"), triton.next_power_of_2(case.width)),
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "HAS_ORDER": True,
        "PRECISION": "ieee",
        "UPCAST": False,
        "WITH_LOG_WEIGHT": True,
    }
    kernel = kernels._backward_kernel if backward else kernels._forward_kernel
    return Program(kernel, constants, (tiling.block_m, tiling.block_n), tiling.num_warps, tiling.num_stages)


def _halving(case: Case) -> Program:
    """The differences of the pairs of a bucket, or the decisions about them, for buckets of `case.block` pairs."""
    import triton

    from hf_efficient_attn.ops import triton_thinning as kernels

    itemsize = _DTYPES[case.dtype][1]
    warps = kernels.warps_of(case.block, itemsize)
    if case.kernel == "decisions":
        size = triton.next_power_of_2(case.block)
        return Program(kernels._decision_kernel, {"BUCKET": size}, (1, size), warps[1], 3)
    block = kernels.block_of(case.block)
    constants = {**dict.fromkeys(("HEAD_DIM", "VALUE_DIM"), case.width), "STEP": kernels.step_of(itemsize)}
    constants |= {"BLOCK": block, "UPCAST": False}
    return Program(kernels._difference_kernel, constants, (block, block), warps[0], 1)


# By which function the kernels are described.
_KERNELS = {"forward": _gather_attend, "backward": _gather_attend, "differences": _halving, "decisions": _halving}


def compiled(case: Case) -> dict[str, Any]:
    """Compile a kernel, for D = Dv and aligned tensors: the case, and the resources of its program as a row."""
    import triton
    from triton.backends.compiler import GPUTarget

    described = _KERNELS[case.kernel](case)
    kernel, constants = described.kernel, described.constants
    names = kernel.arg_names
    signature = {x: "constexpr" if x in constants else _TYPES.get(x, f"*{_DTYPES[case.dtype][0]}") for x in names}
    # Addresses and strides are multiples of 16, as for PyTorch's own tensors.
    aligned = [x for x, kind in signature.items() if kind.startswith("*") or x.endswith(("_head", "_row", "_len"))]
    source = triton.compiler.ASTSource(
        kernel,
        signature,
        {(names.index(x),): value for x, value in constants.items() if x in names},
        {(names.index(x),): [["tt.divisibility", 16]] for x in aligned},
    )
    options = {"num_warps": described.num_warps, "num_stages": described.num_stages}
    program = triton.compile(source, target=GPUTarget("cuda", case.architecture, 32), options=options)
    registers, spilled = _assembled(program.asm["ptx"], case.architecture)
    return {
        **case._asdict(),
        "tile": " x ".join(map(str, described.tile)),
        "num_warps": described.num_warps,
        "registers": registers,
        "spilled": spilled,
        "shared": program.metadata.shared,
    }


def _assembled(ptx: str, architecture: int) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills, as the assembler reports them."""
    import triton

    folder = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    assembler = folder / ("ptxas-blackwell" if architecture >= 100 else "ptxas")
    target = f"sm_{architecture}{'a' if architecture >= 90 else ''}"
    with tempfile.TemporaryDirectory() as scratch:
        path = pathlib.Path(scratch, "kernel.ptx")
        path.write_text(ptx, encoding="utf-8")
        command = [assembler, "-v", f"--gpu-name={target}", path, "-o", path.with_suffix(".cubin")]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", report)
    spilled = re.search(r"(\d+) bytes spill stores", report)
    if registers is None or spilled is None:
        raise RuntimeError(f"ptxas reports neither registers nor spills of the kernel: {report}")
    return int(registers[1]), int(spilled[1])


def _check_triton() -> None:
    """Refuse to run without Triton, or with its interpreter, which compiles nothing."""
    try:
        import triton

        from hf_efficient_attn.ops import triton_gather as kernels
    except ImportError as error:
        raise UnsupportedAttentionError(
            f"Triton cannot be imported ({error}): pip install 'hf_efficient_attn[gpu-test]'"
        ) from error
    if not isinstance(kernels._forward_kernel, triton.JITFunction):
        raise UnsupportedAttentionError("Triton's interpreter compiles nothing: unset TRITON_INTERPRET")


@app.command(epilog="Example: python -m recipes.benchmarks.triton_kernels --dtype bfloat16 --width 64 --check")
def run(
    width: commands.numbers_option("Dimensions of queries, keys and values", "64,128") = [],  # noqa: B006
    block: commands.numbers_option("Queries of a block", "128") = [],  # noqa: B006
    dtype: Annotated[str, typer.Option(metavar="LIST", help="Of queries, keys and values.")] = "bfloat16,float16",
    check: Annotated[bool, typer.Option("--check", help="Exit with status 1 if a register is spilled.")] = False,
    csv: commands.Csv = None,
) -> None:
    """Compile the Triton kernels for three GPUs and print what they need."""
    commands.check_outputs(csv, None)
    dtypes, widths, blocks = split_list([dtype]), parse_lengths(width) or [64, 128], parse_lengths(block) or [128]
    if unknown := [x for x in dtypes if x not in _DTYPES]:
        raise UnsupportedAttentionError(f"--dtype: no {', '.join(unknown)} here; choose from {', '.join(_DTYPES)}")
    if max(widths) > 256:
        raise UnsupportedAttentionError(f"--width: the kernels have at most 256 dimensions; {max(widths)} is larger")
    _check_triton()
    sizes = [(x, d, q) for x in dtypes for d in widths for q in blocks]
    buckets = [(x, d, _BUCKET) for x in dtypes for d in widths]
    cases = [Case(kernel, *x, a) for kernel in ("forward", "backward") for x in sizes for a in ARCHITECTURES]
    cases += [Case("differences", *x, a) for x in buckets for a in ARCHITECTURES]
    cases += [Case("decisions", dtypes[0], widths[0], _BUCKET, a) for a in ARCHITECTURES]  # they read no key or value
    rows = [compiled(case) for case in tqdm(cases, disable=None, leave=False)]
    commands.write(rows, csv)
    headers = ("kernel", "dtype", "D", "block", "sm", "tile", "warps", "registers", "bytes spilled", "shared KiB")
    cells = [
        (
            r["kernel"], r["dtype"], r["width"], r["block"], r["architecture"], r["tile"], r["num_warps"],
            r["registers"], r["spilled"], f"{r['shared'] / 1024:.0f}",
        )
        for r in rows
    ]  # fmt: skip
    typer.echo(table(headers, cells))
    if check:
        spilled, shared = max(r["spilled"] for r in rows), max(r["shared"] for r in rows)
        commands.conclude(
            [
                commands.Verdict("bytes spilled", spilled, 0, at_least=False),
                commands.Verdict("KiB of shared memory", shared / 1024, MOST_SHARED_KIB, at_least=False),
            ]
        )


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.triton_kernels")
