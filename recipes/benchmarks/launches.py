"""Count the kernels, the traffic and the memory of the methods on an accelerator, without one.

    python -m recipes.benchmarks.launches
    python -m recipes.benchmarks.launches --method kdeformer --length 8192 --top 20

Duration: a minute for all methods; less for few lengths. Expected: at most 60 kernels per forward pass and 150 per
training step, the same at every length, and no synchronisation.

Everything is counted on meta tensors (`recipes.common.launches` says how), so that the figures are arithmetic and the
same on every machine. A kernel is one operator of torch that computes something, or one Triton kernel. The traffic is
what kernels read and write if each reads its arguments once. The peak is the memory of all tensors of the call except
its inputs, as a multiple of query + key + value. A training step is a forward and a backward pass. `--top` lists the
operators with the most kernels, with the lines of the package that call them; the lines of the backward pass that
autograd runs itself are listed as "autograd". Causal counts omit methods without a causal form, and `approx_kmv` cannot
be counted, since its work depends on the data.
"""

import math
from typing import Annotated, Any, NamedTuple

import typer
from tqdm import tqdm

from hf_efficient_attn.cli import Settings, main_of, parse_lengths, parse_methods, table
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.methods import MethodConfig, available_methods, method_info
from hf_efficient_attn.ops.accelerator import Backend
from recipes.common import commands
from recipes.common.launches import Launches, launches

app = commands.new_app()

# Without "auto", which is one of the others or exact, and "approx_kmv", whose work depends on the data.
METHODS = tuple(name for name in available_methods() if name not in ("auto", "approx_kmv"))
LENGTHS = (8192, 131_072)


class Setting(NamedTuple):
    """What is the same for all rows of the table."""

    is_causal: bool
    shape: tuple[int, int, int]
    form: Backend


def row(label: str, config: MethodConfig, length: int, how: Setting) -> dict[str, Any]:
    """The counts of a forward pass and of a training step, as one row of the table."""
    forward, step = (launches(config, length, backward=backward, **how._asdict()) for backward in (False, True))
    inputs = 3 * math.prod(how.shape) * length * 2
    return {
        "method": label,
        "length": length,
        "causal": how.is_causal,
        "form": how.form,
        "kernels": forward.kernels,
        "step_kernels": step.kernels,
        "gigabytes": forward.traffic / 1e9,
        "step_gigabytes": step.traffic / 1e9,
        "peak": forward.peak / inputs,
        "step_peak": step.peak / inputs,
        "synchronisations": forward.synchronisations.total(),
        "step_synchronisations": step.synchronisations.total(),
    }


def _row_or_warning(label: str, config: MethodConfig, length: int, how: Setting) -> dict[str, Any] | None:
    """The result of `row`, or None and a message if the method cannot be counted."""
    try:
        return row(label, config, length, how)
    except UnsupportedAttentionError as error:
        typer.echo(f"{label}, {length:,} tokens: {error}", err=True)
        return None


def _top(found: Launches, most: int) -> str:
    ranked = found.by_kernel.most_common(most)
    return table(("kernels", "operator", "called in"), [(n, kernel.operator, kernel.line) for kernel, n in ranked])


@app.command(epilog="Example: python -m recipes.benchmarks.launches --method kdeformer,eva --length 8192 --causal")
def run(
    length: commands.numbers_option("Tokens", "8192,131072") = [],  # noqa: B006 (typer copies it)
    method: commands.methods_option("all") = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    causal: Annotated[bool, typer.Option("--causal/--bidirectional", help="Causal attention.")] = False,
    backward: Annotated[
        bool, typer.Option("--backward/--forward", help="The pass whose operators --top lists.")
    ] = False,
    top: Annotated[int, typer.Option(metavar="N", min=0, help="List the N operators with the most kernels.")] = 0,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Batch size.")] = 1,
    heads: commands.NumHeads = 16,
    width: commands.HeadDim = 64,
    triton: Annotated[
        bool, typer.Option("--triton/--library", help="Our Triton kernels where there are some, or PyTorch's.")
    ] = False,
    csv: commands.Csv = None,
) -> None:
    """Count the kernels of each method in bfloat16 on meta tensors."""
    commands.check_outputs(csv, None)
    configs, lengths = parse_methods(method or METHODS, setting), parse_lengths(length) or list(LENGTHS)
    usable = {k: v for k, v in configs.items() if not causal or method_info(v.method).causal}
    if not usable:
        raise UnsupportedAttentionError(f"--causal: {', '.join(configs)} have no causal form; choose other methods")
    how = Setting(causal, (batch, heads, width), "triton" if triton else "library")
    rows = []
    cases = [(tokens, label) for tokens in lengths for label in usable]
    for tokens, label in tqdm(cases, disable=None, leave=False):
        found = _row_or_warning(label, usable[label], tokens, how)
        rows += [] if found is None else [found]
    if not rows:
        raise UnsupportedAttentionError("none of the methods can be counted; choose others")
    commands.write(rows, csv)
    headers = (
        "tokens", "attention", "kernels", "of a training step", "GB", "of a training step", "peak / inputs",
        "of a training step", "synchronisations",
    )  # fmt: skip
    cells = [
        (
            f"{r['length']:,}", r["method"], f"{r['kernels']:,}", f"{r['step_kernels']:,}", f"{r['gigabytes']:.2f}",
            f"{r['step_gigabytes']:.2f}", f"{r['peak']:.2f}", f"{r['step_peak']:.2f}", r["step_synchronisations"],
        )
        for r in rows
    ]  # fmt: skip
    typer.echo(table(headers, cells))
    kind = "causal" if causal else "bidirectional"
    sizes = f"batch {batch}, {heads} heads of dimension {width}, bfloat16"
    typer.echo(f"\n{kind}, {sizes}, counted on meta tensors in the form of the {how.form} kernels")
    if top:
        for tokens, label in ((r["length"], r["method"]) for r in rows):
            counted = launches(usable[label], tokens, backward=backward, **how._asdict())
            typer.echo(f"\n{label}, {tokens:,} tokens, {'training step' if backward else 'forward'}:")
            typer.echo(_top(counted, top))
            for name, number in counted.synchronisations.items():
                typer.echo(f"{number} synchronisations: {name}")


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.launches")
