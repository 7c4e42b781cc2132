"""Measure speed and memory of the methods relative to torch's exact attention.

    python -m recipes.benchmarks.attention --length 1024,2048,4096,8192,16384 --plot speed.png
    python -m recipes.benchmarks.attention --check
    python -m recipes.benchmarks.attention --dtype bfloat16 --check --no-memory
    python -m recipes.benchmarks.attention --short --check --no-memory
    python -m recipes.benchmarks.attention --device cuda

Duration: 8 and 10 minutes for the first two on 2 cores. Expected: the goals in `recipes/common/speed_goals.py`, which
`--check` compares with. docs/results.md has the tables.

Speed is a ratio. In every round exact attention runs before and after each method, in the same dtype, with the same
causality and the same passes (forward, or forward and backward). The ratio is the mean of the two times to the method's
time, so that slow changes of a busy machine cancel (`hf_efficient_attn.evaluation.timing`). The table shows the median,
minimum and maximum over the rounds. Memory is measured in a child process (`recipes.common.memory`). `--check` measures
all settings that have a goal, or those that the other options select, and exits with status 1 if a goal is missed.
Causal measurements omit methods without a causal form.

`--short` measures 512 tokens with a budget of 64 columns (`with_budget`) and 1,024 tokens with 128, one row and eight.

`--device cuda` measures bfloat16 and 16 heads by default, from 8,192 to 1,048,576 tokens, against PyTorch's flash
kernel, each in forward passes and in forward and backward passes. The clock waits for the device. Memory is what
`torch.accelerator.max_memory_allocated` records. A method that does not fit the device is left out, with a message.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from tqdm import tqdm

from hf_efficient_attn.cli import (
    Device,
    Settings,
    main_of,
    parse_device,
    parse_dtype,
    parse_lengths,
    parse_methods,
    table,
)
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.timing import UNSTEADY, Timing, paired, use_device, use_threads
from hf_efficient_attn.methods import MethodConfig, method_info
from recipes.common import commands
from recipes.common.memory import EXACT, Case, extra_memory, make_inputs, run_once
from recipes.common.speed_goals import GPU_GOALS, HALF_GOALS, SHORT_GOALS, SPEED_GOALS, Goals

if TYPE_CHECKING:
    from matplotlib.figure import Figure

app = commands.new_app()

# Without "auto": it decides by the data, and attention to random keys is exact.
METHODS = (
    "nearfar",
    "kdeformer",
    "hyperattention",
    "longformer",
    "linear",
    "performer",
    "performer:num_features=64",
    "nystromformer",
    "wildcat",
    "thinformer",
    "linformer",
    "reformer",
    "scatterbrain",
    "eva",
    "flurka_linear",
    "flurka_performer",
    "flurka_eva",
)
# Goals of the extra memory in the forward pass, as a multiple of the inputs: (length, causal) -> goal.
MEMORY_GOALS = {(16384, False): 2.5}
_NO_MEMORY_GOAL = ("reformer",)
# Length -> budget of --short, and its batch sizes.
SHORT_BUDGETS = {512: 64, 1024: 128}
SHORT_BATCHES = (1, 8)
USUAL = Case(0)


def measure(configs: Mapping[str, MethodConfig], case: Case, rounds: int, bar: tqdm | None = None) -> dict[str, Timing]:
    """Timings of exact attention, as `sdpa`, and of every method by label that fits the memory of the device."""
    inputs = make_inputs(case)

    def work(config: MethodConfig | None) -> Callable[[], None]:
        return lambda: run_once(config, inputs, case)

    calls = {label: work(config) for label, config in configs.items()}
    with use_device(torch.device(case.device)):
        if case.device != "cpu":
            calls = {label: call for label, call in calls.items() if _fits(call, f"{label}, {case.length:,} tokens")}
        exact, timed = paired(work(None), calls, rounds, bar)
    return {EXACT: exact, **timed}


def _fits(call: Callable[[], None], what: str) -> bool:
    """Whether the memory of an accelerator suffices for a call."""
    try:
        call()
    except torch.OutOfMemoryError:
        typer.echo(f"{what}: left out, since it does not fit the memory of the device", err=True)
        return False
    return True


def verdicts(rows: Sequence[commands.Row]) -> list[commands.Verdict]:
    """The measurements that have a goal."""
    found = []
    for row in rows:
        passes = "forward+backward" if row["backward"] else "forward"
        setting = f"{row['method']}, {row['length']}, {'causal ' if row['causal'] else ''}{passes}"
        goal = _goals_of(row).get(row["method"])
        if goal is not None:
            found.append(commands.Verdict(f"{setting}: times faster", row["ratio"], goal, True))
        most = None if row["backward"] else MEMORY_GOALS.get((row["length"], row["causal"]))
        measured = row["method"] not in (EXACT, *_NO_MEMORY_GOAL) and row["extra_memory"] is not None
        if most is not None and measured:
            found.append(commands.Verdict(f"{setting}: extra memory / inputs", row["extra_memory"], most, False))
    return found


def _goals_of(row: commands.Row) -> Mapping[str, float]:
    """The goals of a setting, by label of the method."""
    if row.get("budget") is not None:
        return SHORT_GOALS.get((row["length"], row["batch"], row["budget"]), {})
    return _goals(row.get("device", "cpu"), row.get("dtype", "float32")).get(
        (row["length"], row["causal"], row["backward"]), {}
    )


def _goals(device: str, dtype: str) -> Goals:
    if device != "cpu":
        return GPU_GOALS
    return HALF_GOALS if dtype == "bfloat16" else SPEED_GOALS


def draw(rows: Sequence[commands.Row]) -> "Figure":
    """Plot time and speed-up against length, in two panels for each causality and direction."""
    from matplotlib.figure import Figure

    settings = list(dict.fromkeys((row["causal"], row["backward"]) for row in rows))
    figure = Figure(figsize=(11, 4 * len(settings)), layout="constrained")
    panels = figure.subplots(len(settings), 2, squeeze=False)
    ticks = sorted({row["length"] for row in rows})
    for (causal, backward), pair in zip(settings, panels, strict=True):
        selected = [row for row in rows if (row["causal"], row["backward"]) == (causal, backward)]
        name = ("causal, " if causal else "") + ("forward+backward" if backward else "forward")
        for number, label in enumerate(dict.fromkeys(row["method"] for row in selected)):
            own = [row for row in selected if row["method"] == label]
            for axes, key in zip(pair, ("seconds", "ratio"), strict=True):
                axes.plot(
                    [r["length"] for r in own], [r[key] for r in own], marker="o", color=f"C{number}", label=label
                )
        for axes, what in zip(pair, ("seconds", "times faster than exact"), strict=True):
            axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=what, title=name)
            commands.label_ticks(axes, ticks)
            axes.grid(alpha=0.3)
        pair[0].legend(fontsize="small")
    return figure


def _format(row: commands.Row, memory: bool) -> tuple[str, ...]:
    cells = (
        row["length"],
        row["batch"],
        ("causal " if row["causal"] else "") + ("fwd+bwd" if row["backward"] else "fwd"),
        row["method"],
        f"{1000 * row['seconds']:.1f}",
        f"{row['ratio']:.1f}x",
        f"{row['ratio_min']:.1f}..{row['ratio_max']:.1f}",
    )
    return (*cells, "" if row["extra_memory"] is None else f"{row['extra_memory']:.2f}") if memory else cells


@app.command(
    epilog="Example: python -m recipes.benchmarks.attention --length 8192 --causal --set kdeformer.block_size=128"
)
def attention(
    length: commands.numbers_option("Tokens", "1024..16384; 8192..1048576 on accelerators") = [],  # noqa: B006 (typer copies it)
    method: commands.methods_option("all; performer with 64 features too") = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    causal: Annotated[bool | None, typer.Option("--causal/--bidirectional", help="[default: bidirectional]")] = None,
    backward: Annotated[
        bool | None,
        typer.Option(
            "--backward/--forward", help="Include the backward pass. [default: forward; both on accelerators]"
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE", help="float32, bfloat16 or float16. [default: float32, and bfloat16 on accelerators]"
        ),
    ] = None,
    short: Annotated[
        bool, typer.Option("--short", help="512 and 1,024 tokens with budgets of 64 and 128, one row and eight.")
    ] = False,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Batch size.")] = 1,
    heads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of heads. [default: 8, and 16 on accelerators]")
    ] = None,
    width: commands.HeadDim = 64,
    device: Device = None,
    threads: commands.Threads = 2,
    rounds: commands.Rounds = 5,
    seed: commands.Seed = 0,
    memory: commands.Memory = True,
    check: commands.Check = False,
    csv: commands.Csv = None,
    plot: commands.Plot = None,
) -> None:
    """Measure the methods on random inputs: time relative to exact attention, memory relative to the inputs."""
    where = str(parse_device(device))
    usual = _usual_sizes(where, dtype)
    sizes = usual._replace(batch=batch, num_heads=heads or usual.num_heads, head_dim=width, threads=threads)
    parse_dtype(sizes.dtype)
    if check and (sizes != usual or (short and sizes != USUAL)):
        raise UnsupportedAttentionError(f"--check: the goals hold for {USUAL if short else usual}; leave out others")
    if check and sizes.dtype == "float16":
        raise UnsupportedAttentionError("--check: there are no goals for float16; leave out --check or --dtype")
    if short and (length or batch != 1):
        raise UnsupportedAttentionError("--short chooses lengths and rows itself; leave out --length and --batch")
    commands.check_outputs(csv, plot)
    # --short replaces the hyperparameters that a budget sets.
    named = method or [name for name in METHODS if not (short and ":" in name)]
    configs, lengths = parse_methods(named, setting), parse_lengths(length)
    if short:
        pairs = itertools.product(SHORT_BUDGETS.items(), SHORT_BATCHES)
        cases = [(sizes._replace(length=tokens, batch=b), columns) for (tokens, columns), b in pairs]
        changes = {"causal": bool(causal), "backward": bool(backward)}
        cases = [(case._replace(seed=seed, **changes), columns) for case, columns in cases]
    else:
        found = _settings(lengths, causal, backward, check, sizes)
        cases = [(sizes._replace(length=n, causal=c, backward=b, seed=seed), None) for n, c, b in found]
    rows: list[dict[str, Any]] = []
    unsteady = False
    steps = len(cases) * len(configs) * rounds
    with use_threads(threads), tqdm(total=steps, unit="pair", disable=None, leave=False) as bar:
        for case, columns in cases:
            bar.set_description(f"{case.length}{' causal' * case.causal}{' backward' * case.backward}")
            usable = _usable(configs, case, columns)
            bar.update(rounds * (len(configs) - len(usable)))
            for name, timing in measure(usable, case, rounds, bar).items():
                unsteady = unsteady or timing.unsteady
                extra = extra_memory(usable.get(name), case) if memory else None
                rows.append(
                    {"method": name, **case._asdict(), "budget": columns, **timing._asdict(), "extra_memory": extra}
                )
    commands.write(rows, csv, plot, draw)
    headers = ("tokens", "rows", "pass", "attention", "ms", "times faster", "min..max", "extra memory / inputs")
    typer.echo(table(headers[: 8 if memory else 7], [_format(row, memory) for row in rows]))
    typer.echo(f"\n{sizes}; medians of {rounds} rounds; torch {torch.__version__}")
    if unsteady:
        typer.echo(UNSTEADY)
    if check:
        commands.conclude(verdicts(rows))


def _usual_sizes(device: str, dtype: str | None) -> Case:
    """The sizes for which the goals hold on a kind of device."""
    if device == "cpu":
        return Case(0, dtype=dtype or "float32")
    return Case(0, num_heads=16, dtype=dtype or "bfloat16", device=device)


def _usable(configs: Mapping[str, MethodConfig], case: Case, columns: int | None) -> dict[str, MethodConfig]:
    """The methods that have the causality, with a budget of `columns` if one is given."""
    found = {k: v for k, v in configs.items() if not case.causal or method_info(v.method).causal}
    if columns is None:
        return found
    return {label: config.with_budget(columns) for label, config in found.items()}


def _settings(
    lengths: list[int], causal: bool | None, backward: bool | None, check: bool, sizes: Case = USUAL
) -> list[tuple[int, bool, bool]]:
    """The settings (length, causal, backward); with `check`, those that have a goal and match the options."""
    if check:
        of_memory = MEMORY_GOALS if sizes == USUAL else {}
        known = dict.fromkeys([*_goals(sizes.device, sizes.dtype), *((*key, False) for key in of_memory)])
        return [
            (tokens, is_causal, with_backward)
            for tokens, is_causal, with_backward in known
            if (not lengths or tokens in lengths) and causal in (None, is_causal) and backward in (None, with_backward)
        ]
    on_cpu = sizes.device == "cpu"
    lengths = lengths or ([1024, 2048, 4096, 8192, 16384] if on_cpu else [2**n for n in range(13, 21)])
    passes = [bool(backward)] if on_cpu or backward is not None else [False, True]
    return list(itertools.product(lengths, [bool(causal)], passes))


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.attention")
