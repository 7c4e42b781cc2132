"""Compare methods compiled by torch.compile with the same methods in eager mode.

    python -m recipes.benchmarks.compiled --length 2048,8192
    python -m recipes.benchmarks.compiled --dtype bfloat16 --check

Duration: about 10 minutes on 2 cores, most of it for compiling. Expected: the table of docs/speed.md. The compiler is
inductor, PyTorch's own, which needs a C++ compiler on CPUs. In every round the eager call runs before and after the
compiled one (`hf_efficient_attn.evaluation.timing`), and the table shows the median of eager time / compiled time. The
time of compiling is that of the first call. `--check` exits with status 1 if a compiled method is slower than in eager
mode; a loss of 5 % counts as noise.
"""

from typing import TYPE_CHECKING, Annotated

import torch
import typer
from torch.utils.benchmark import timer
from tqdm import tqdm

import hf_efficient_attn as hea
from hf_efficient_attn.cli import Settings, main_of, parse_dtype, parse_lengths, parse_methods, table
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.timing import UNSTEADY, paired, use_threads
from hf_efficient_attn.methods import MethodConfig, method_info
from recipes.benchmarks.attention import METHODS
from recipes.common import commands
from recipes.common.memory import Case, make_inputs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

app = commands.new_app()

GOAL = 0.95


def measure(config: MethodConfig, case: Case, rounds: int) -> dict[str, float | bool]:
    """Seconds of an eager and of a compiled call, their ratio, and seconds of compiling."""
    inputs = make_inputs(case)

    def eager() -> None:
        out = hea.attention(config, *inputs, is_causal=case.causal)
        if case.backward:
            torch.autograd.grad(out, inputs, torch.ones_like(out))

    torch.compiler.reset()
    attend = torch.compile(hea.attention, dynamic=False)

    def compiled() -> None:
        out = attend(config, *inputs, is_causal=case.causal)
        if case.backward:
            torch.autograd.grad(out, inputs, torch.ones_like(out))

    start = timer()
    compiled()
    compiling = timer() - start
    timing = paired(eager, {"compiled": compiled}, rounds)[1]["compiled"]
    return {
        "eager_seconds": timing.reference_seconds, "compiled_seconds": timing.seconds, "ratio": timing.ratio,
        "ratio_min": timing.ratio_min, "ratio_max": timing.ratio_max, "compile_seconds": compiling,
        "unsteady": timing.unsteady,
    }  # fmt: skip


def draw(rows: list[commands.Row]) -> "Figure":
    """Plot the ratio of every method as a bar, one panel for each length."""
    from matplotlib.figure import Figure

    lengths = sorted({row["length"] for row in rows})
    names = list(dict.fromkeys(row["method"] for row in rows))
    figure = Figure(figsize=(5 * len(lengths), 1 + 0.3 * len(names)), layout="constrained")
    for axes, length in zip(figure.subplots(1, len(lengths), squeeze=False)[0], lengths, strict=True):
        ratios = {row["method"]: row["ratio"] for row in rows if row["length"] == length}
        axes.barh(range(len(names)), [ratios.get(name, 0.0) for name in names])
        axes.set_yticks(range(len(names)), names, fontsize="x-small")
        axes.invert_yaxis()
        axes.axvline(1.0, color="0.3", linewidth=1)
        axes.set(title=f"{length} tokens", xlabel="eager time / compiled time")
    return figure


@app.command(epilog="Example: python -m recipes.benchmarks.compiled --length 2048 --method nearfar,longformer")
def main(
    length: commands.numbers_option("Tokens", "2048,8192") = [],  # noqa: B006 (typer copies it)
    method: commands.methods_option("all") = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    causal: Annotated[bool, typer.Option("--causal", help="Causal attention, for the methods that have it.")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="Include the backward pass.")] = False,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="float32, bfloat16 or float16.")] = "float32",
    threads: commands.Threads = 2,
    rounds: commands.Rounds = 5,
    check: commands.Check = False,
    csv: commands.Csv = None,
    plot: commands.Plot = None,
) -> None:
    """Measure how many times faster torch.compile makes every method on the CPU."""
    parse_dtype(dtype)
    commands.check_outputs(csv, plot)
    configs = parse_methods(method or METHODS, setting)
    configs = {label: one for label, one in configs.items() if not causal or method_info(one.method).causal}
    if not configs:
        raise UnsupportedAttentionError("none of the methods has a causal form: leave out --causal, or give others")
    rows = []
    lengths = parse_lengths(length) or [2048, 8192]
    with use_threads(threads), tqdm(total=len(lengths) * len(configs), disable=None, leave=False) as bar:
        for tokens in lengths:
            case = Case(tokens, dtype=dtype, threads=threads, causal=causal, backward=backward)
            for label, config in configs.items():
                bar.set_description(f"{label}, {tokens}")
                rows.append({"method": label, **case._asdict(), **measure(config, case, rounds)})
                bar.update()
    commands.write(rows, csv, plot, draw)
    lines = [
        (
            str(row["length"]), row["method"], f"{1000 * row['eager_seconds']:.1f}",
            f"{1000 * row['compiled_seconds']:.1f}", f"{row['ratio']:.2f}x",
            f"{row['ratio_min']:.2f}..{row['ratio_max']:.2f}", f"{row['compile_seconds']:.0f} s",
        )
        for row in rows
    ]  # fmt: skip
    typer.echo(table(("tokens", "attention", "eager ms", "compiled ms", "faster", "min..max", "compiling"), lines))
    if any(row["unsteady"] for row in rows):
        typer.echo(f"\n{UNSTEADY}")
    if check:
        commands.conclude(
            [commands.Verdict(f"{r['method']}, {r['length']}: eager / compiled", r["ratio"], GOAL, True) for r in rows]
        )


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.compiled")
