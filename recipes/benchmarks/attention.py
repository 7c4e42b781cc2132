"""Measure speed and memory of the methods relative to torch's exact attention.

    python -m recipes.benchmarks.attention --length 1024,2048,4096,8192,16384 --plot speed.png
    python -m recipes.benchmarks.attention --check

Duration: 8 and 10 minutes on 2 cores. Expected: the goals below, which `--check` compares with. docs/results.md has the
table.

Speed is a ratio. In every round exact attention runs before and after each method, with the same causality and the same
passes (forward, or forward and backward). The ratio is the mean of the two times to the method's time, so that slow
changes of a busy machine cancel (`hf_efficient_attn.evaluation.timing`). The table shows the median, minimum and
maximum over the rounds. Memory is measured in a child process (`recipes.common.memory`). `--check` measures all
settings that have a goal, or those that the other options select, and exits with status 1 if a goal is missed. Causal
measurements omit methods without a causal form.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from tqdm import tqdm

from hf_efficient_attn.cli import Settings, main_of, parse_lengths, parse_methods, table
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.timing import UNSTEADY, Timing, paired, use_threads
from hf_efficient_attn.methods import MethodConfig, method_info
from recipes.common import commands
from recipes.common.memory import EXACT, Case, extra_memory, make_inputs, run_once

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
# Goals for the default sizes, in times faster than exact attention: (length, causal, backward) -> {label: goal}.
_PERFORMER = "performer (num_features=64)"
SPEED_GOALS: dict[tuple[int, bool, bool], dict[str, float]] = {
    (8192, False, False): {
        "nearfar": 9, "kdeformer": 10, "hyperattention": 10, "longformer": 9, "linear": 60, _PERFORMER: 30,
        "nystromformer": 32, "linformer": 9, "reformer": 8, "scatterbrain": 6, "eva": 7,
    },
    (16384, False, False): {
        "nearfar": 16, "kdeformer": 14, "hyperattention": 14, "longformer": 17, "linear": 60, _PERFORMER: 30,
        "nystromformer": 35, "linformer": 18, "reformer": 12, "scatterbrain": 8, "eva": 11,
    },
    (8192, False, True): {"kdeformer": 4, "hyperattention": 4, "longformer": 4, "linear": 20, _PERFORMER: 10},
    (8192, True, False): {
        "nearfar": 2.5, "kdeformer": 2, "hyperattention": 2, "longformer": 5, "linear": 12, _PERFORMER: 6,
        "performer": 1, "eva": 2.5,
    },
}  # fmt: skip
# Goals of the extra memory in the forward pass, as a multiple of the inputs: (length, causal) -> goal.
MEMORY_GOALS = {(16384, False): 2.5}
_NO_MEMORY_GOAL = ("reformer",)


def measure(configs: Mapping[str, MethodConfig], case: Case, rounds: int, bar: tqdm | None = None) -> dict[str, Timing]:
    """Timings of exact attention, as `sdpa`, and of every method by label."""
    inputs = make_inputs(case)

    def work(config: MethodConfig | None) -> Callable[[], None]:
        return lambda: run_once(config, inputs, case)

    exact, timed = paired(work(None), {label: work(config) for label, config in configs.items()}, rounds, bar)
    return {EXACT: exact, **timed}


def verdicts(rows: Sequence[commands.Row]) -> list[commands.Verdict]:
    """The measurements that have a goal."""
    found = []
    for row in rows:
        passes = "forward+backward" if row["backward"] else "forward"
        setting = f"{row['method']}, {row['length']}, {'causal ' if row['causal'] else ''}{passes}"
        goal = SPEED_GOALS.get((row["length"], row["causal"], row["backward"]), {}).get(row["method"])
        if goal is not None:
            found.append(commands.Verdict(f"{setting}: times faster", row["ratio"], goal, True))
        most = None if row["backward"] else MEMORY_GOALS.get((row["length"], row["causal"]))
        measured = row["method"] not in (EXACT, *_NO_MEMORY_GOAL) and row["extra_memory"] is not None
        if most is not None and measured:
            found.append(commands.Verdict(f"{setting}: extra memory / inputs", row["extra_memory"], most, False))
    return found


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
    length: commands.numbers_option("Tokens", "1024..16384") = [],  # noqa: B006 (typer copies it)
    method: commands.methods_option("all; performer with 64 features too") = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    causal: Annotated[bool | None, typer.Option("--causal/--bidirectional", help="[default: bidirectional]")] = None,
    backward: Annotated[
        bool | None, typer.Option("--backward/--forward", help="Include the backward pass. [default: forward]")
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="float32, bfloat16 or float16.")] = "float32",
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Batch size.")] = 1,
    heads: commands.NumHeads = 8,
    width: commands.HeadDim = 64,
    threads: commands.Threads = 2,
    rounds: commands.Rounds = 5,
    seed: commands.Seed = 0,
    memory: commands.Memory = True,
    check: commands.Check = False,
    csv: commands.Csv = None,
    plot: commands.Plot = None,
) -> None:
    """Measure the methods on random inputs: time relative to exact attention, memory relative to the inputs."""
    if dtype not in ("float32", "bfloat16", "float16"):
        raise UnsupportedAttentionError(f"--dtype {dtype!r} is not one of float32, bfloat16, float16")
    sizes = Case(0, batch, heads, width, dtype, threads)
    if check and sizes != Case(0):
        raise UnsupportedAttentionError(f"--check: the goals hold for {Case(0)}; leave out other sizes")
    commands.check_outputs(csv, plot)
    configs, lengths = parse_methods(method or METHODS, setting), parse_lengths(length)
    settings = _settings(lengths, causal, backward, check)
    rows: list[dict[str, Any]] = []
    unsteady = False
    steps = len(settings) * len(configs) * rounds
    with use_threads(threads), tqdm(total=steps, unit="pair", disable=None, leave=False) as bar:
        for tokens, is_causal, with_backward in settings:
            case = sizes._replace(length=tokens, causal=is_causal, backward=with_backward, seed=seed)
            bar.set_description(f"{tokens}{' causal' if is_causal else ''}{' backward' if with_backward else ''}")
            usable = {k: v for k, v in configs.items() if not is_causal or method_info(v.method).causal}
            bar.update(rounds * (len(configs) - len(usable)))
            for name, timing in measure(usable, case, rounds, bar).items():
                unsteady = unsteady or timing.unsteady
                extra = extra_memory(configs.get(name), case) if memory else None
                rows.append({"method": name, **case._asdict(), **timing._asdict(), "extra_memory": extra})
    commands.write(rows, csv, plot, draw)
    headers = ("tokens", "pass", "attention", "ms", "times faster", "min..max", "extra memory / inputs")
    typer.echo(table(headers[: 7 if memory else 6], [_format(row, memory) for row in rows]))
    typer.echo(f"\n{sizes}; medians of {rounds} rounds; torch {torch.__version__}")
    if unsteady:
        typer.echo(UNSTEADY)
    if check:
        commands.conclude(verdicts(rows))


def _settings(
    lengths: list[int], causal: bool | None, backward: bool | None, check: bool
) -> list[tuple[int, bool, bool]]:
    """The settings (length, causal, backward); with `check`, those that have a goal and match the options."""
    if check:
        known = dict.fromkeys([*SPEED_GOALS, *((*key, False) for key in MEMORY_GOALS)])
        return [
            (tokens, is_causal, with_backward)
            for tokens, is_causal, with_backward in known
            if (not lengths or tokens in lengths) and causal in (None, is_causal) and backward in (None, with_backward)
        ]
    lengths = lengths or [1024, 2048, 4096, 8192, 16384]
    return list(itertools.product(lengths, [bool(causal)], [bool(backward)]))


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.attention")
