"""Measure speed and memory of the methods relative to torch's exact attention.

    python -m recipes.benchmarks.attention --length 1024,2048,4096,8192,16384 --plot speed.png
    python -m recipes.benchmarks.attention --check
    python -m recipes.benchmarks.attention --dtype bfloat16 --check --no-memory
    python -m recipes.benchmarks.attention --short --check --no-memory
    python -m recipes.benchmarks.attention --auto --length 128,512,1024,2048,4096 --check
    python -m recipes.benchmarks.attention --compiled --dtype bfloat16 --check
    python -m recipes.benchmarks.attention --device cuda

Duration: 8 and 10 minutes for the first two on 2 cores. Expected: the goals in `recipes/common/speed_goals.py`, which
`--check` compares with. docs/results.md has the tables.

Speed is a ratio. In every round exact attention runs before and after each method, in the same dtype, with the same
causality and the same passes (forward, or forward and backward). The ratio is the mean of the two times to the method's
time, so that slow changes of a busy machine cancel (`hf_efficient_attn.evaluation.timing`). The table shows the median,
minimum and maximum over the rounds. Memory is what PyTorch allocates in a call. `--check` measures all settings that
have a goal, or those that the other options select, and exits with status 1 if a goal is missed.
Causal measurements omit methods without a causal form.

`--short` measures 512 tokens with a budget of 64 columns (`with_budget`) and 1,024 tokens with 128, one row and eight.

`--auto` measures whether `auto` is ever slower than exact attention, or without a bound of the error (max_error=0) than
the faster of exact attention and `nearfar`; with a bound it is slower than `nearfar` wherever `nearfar` alone would
exceed it in some heads. The inputs have 12 heads: normal random numbers, bidirectional (bert) and causal (gpt2), in
which hardly any head is within the bound, and the inputs of every second layer of MiniLM for a novel (DATA/text/books),
one after the other. Run it on an otherwise idle machine, after `hf-efficient-attn crossover` has measured the machine.
Duration: a minute for up to 2,048 tokens and some minutes for 16,384. Expected: relative times of at most 1.05.

`--compiled` compares compiled methods with the same in eager mode, which runs before and after each compiled call. The
compiler is inductor, which needs a C++ compiler on CPUs. The time of compiling is that of the first call. Duration: 10
minutes, most of it for compiling. Expected: no method slower than in eager mode.

`--device cuda` measures bfloat16 and 16 heads by default, from 8,192 to 1,048,576 tokens, against PyTorch's flash
kernel, each in forward passes and in forward and backward passes. The clock waits for the device. A method that does
not fit the device is left out, with a message.
"""

import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import typer
from tqdm import tqdm

import hf_efficient_attn as hea
from hf_efficient_attn.cli import (
    Device,
    Settings,
    main_of,
    parse_device,
    parse_dtype,
    parse_lengths,
    parse_methods,
)
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.capture import capture_attention, forward
from hf_efficient_attn.evaluation.timing import UNSTEADY, Timing, paired, time_calls, use_device, use_threads
from hf_efficient_attn.methods import MethodConfig, method_info
from recipes.common import commands
from recipes.common.inputs import open_source
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
# The methods, lengths and largest relative time of --auto.
UNBOUNDED = "auto (max_error=0)"
AUTO, AUTO_LENGTHS, AUTO_GOAL = ("nearfar", "auto", "auto:max_error=0"), [2**n for n in range(7, 15)], 1.05
AUTO_CASES: dict[str, dict[str, Any]] = {"bert": {}, "gpt2": {"causal": True}, "minilm": {"head_dim": 32}}
# Smallest eager time / compiled time: a loss of 5 % counts as noise.
COMPILED_GOAL = 0.95


def measure(
    configs: Mapping[str, MethodConfig],
    case: Case,
    rounds: int,
    bar: tqdm | None = None,
    layers: Sequence[tuple[torch.Tensor, ...]] = (),
) -> dict[str, Timing]:
    """Timings of exact attention, as `sdpa`, and of every method by label that fits the memory of the device.

    With the inputs (B, H, N, D) of several layers a call computes one after the other; otherwise inputs are random.
    """
    layers = layers or [make_inputs(case)]

    def work(config: MethodConfig | None) -> Callable[[], None]:
        return lambda: [run_once(config, inputs, case) for inputs in layers]

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
    for setting, pair in zip(settings, panels, strict=True):
        selected = [row for row in rows if (row["causal"], row["backward"]) == setting]
        for axes, key, what in zip(pair, ("seconds", "ratio"), ("seconds", "times faster than exact"), strict=True):
            commands.lines(axes, selected, "length", key, "method")
            title = _described(selected[0])["pass"]
            axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=what, title=title)
            commands.label_ticks(axes, sorted({row["length"] for row in rows}))
            axes.grid(alpha=0.3)
        pair[0].legend(fontsize="small")
    return figure


def measure_compiled(config: MethodConfig, case: Case, rounds: int) -> dict[str, float]:
    """Seconds of an eager and of a compiled call, their ratio, and seconds of compiling, that is of the first call."""
    inputs = make_inputs(case)
    torch.compiler.reset()
    compiled = torch.compile(hea.attention, dynamic=False)

    def work(attend: Callable[..., torch.Tensor]) -> None:
        out = attend(config, *inputs, is_causal=case.causal)
        if case.backward:
            torch.autograd.grad(out, inputs, torch.ones_like(out))

    compiling = time_calls(lambda: work(compiled))
    timing = paired(lambda: work(hea.attention), {"": lambda: work(compiled)}, rounds)[1][""]
    return {"eager_seconds": timing.reference_seconds, "compile_seconds": compiling, **timing._asdict()}


def _layers(case: Case, data: pathlib.Path | None) -> list[tuple[torch.Tensor, ...]]:
    """Query, key and value of every second layer of MiniLM for a novel, in the dtype of the case."""
    found: list[tuple[torch.Tensor, ...]] = []
    model, load = open_source("books", commands.data_folder(data), case.length)
    with capture_attention(model, lambda call: found.append((call.query, call.key, call.value))):
        forward(model, next(load(case.length)))
    return [tuple(x.to(getattr(torch, case.dtype)) for x in layer) for layer in found[::2]]


@app.command(
    epilog="Example: python -m recipes.benchmarks.attention --length 8192 --causal --set kdeformer.block_size=128"
)
def attention(
    length: commands.numbers_option("Tokens", "1024..16384; 8192..1048576 on accelerators") = [],  # noqa: B006 (typer copies it)
    method: commands.methods_option("all; performer with 64 features too") = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    causal: commands.option(bool | None, "[default: bidirectional]", "--causal/--bidirectional") = None,
    backward: commands.option(
        bool | None, "Include the backward pass. [default: forward; both on accelerators]", "--backward/--forward"
    ) = None,
    dtype: commands.option(
        str | None, "float32, bfloat16 or float16. [default: float32, and bfloat16 on accelerators]", metavar="TYPE"
    ) = None,
    short: commands.option(
        bool, "512 and 1,024 tokens with budgets of 64 and 128, one row and eight.", "--short"
    ) = False,
    auto: commands.option(
        bool, "auto and nearfar, on random inputs and on those of MiniLM (--data).", "--auto"
    ) = False,
    compiled: commands.option(
        bool, "Compare methods in torch.compile with the same in eager mode.", "--compiled"
    ) = False,
    batch: commands.option(int, "Batch size.", min=1) = 1,
    heads: commands.option(int | None, "Number of heads. [default: 8, and 16 on accelerators]", min=1) = None,
    width: commands.HeadDim = 64,
    device: Device = None,
    data: commands.Data = None,
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
    sizes = usual._replace(batch=batch, num_heads=heads or usual.num_heads, head_dim=width, threads=threads, seed=seed)
    parse_dtype(sizes.dtype)
    has_goals = check and not (auto or compiled)
    if has_goals and (sizes._replace(seed=0) != usual or (short and usual != USUAL)):
        raise UnsupportedAttentionError(f"--check: the goals hold for {USUAL if short else usual}; leave out others")
    if has_goals and sizes.dtype == "float16":
        raise UnsupportedAttentionError("--check: there are no goals for float16; leave out --check or --dtype")
    if short and (length or batch != 1):
        raise UnsupportedAttentionError("--short chooses lengths and rows itself; leave out --length and --batch")
    if short + auto + compiled > 1 or ((auto or compiled) and where != "cpu"):
        raise UnsupportedAttentionError("--short, --auto and --compiled exclude each other; the last two are for CPUs")
    commands.check_outputs(csv, plot)
    # --short replaces the hyperparameters that a budget sets.
    named = method or (AUTO if auto else [name for name in METHODS if not (short and ":" in name)])
    configs, lengths = parse_methods(named, setting), parse_lengths(length)
    if compiled:
        case = sizes._replace(causal=bool(causal), backward=bool(backward))
        compare_compiled(configs, [case._replace(length=n) for n in lengths or (2048, 8192)], rounds, check, csv)
        return
    cases: list[tuple[Case, int | None]]
    if short:
        pairs = itertools.product(SHORT_BUDGETS.items(), SHORT_BATCHES)
        sizes = sizes._replace(causal=bool(causal), backward=bool(backward))
        cases = [(sizes._replace(length=tokens, batch=b), columns) for (tokens, columns), b in pairs]
    elif auto:
        sizes, memory = sizes._replace(num_heads=heads or 12), False
        pairs = itertools.product(AUTO_CASES.items(), lengths or AUTO_LENGTHS)
        cases = [(sizes._replace(length=n, source=name, **changes), None) for (name, changes), n in pairs]
    else:
        found = _settings(lengths, causal, backward, check, sizes)
        cases = [(sizes._replace(length=n, causal=c, backward=b), None) for n, c, b in found]
    rows: list[dict[str, Any]] = []
    steps = len(cases) * len(configs) * rounds
    with use_threads(threads), tqdm(total=steps, unit="pair", disable=None, leave=False) as bar:
        for case, columns in cases:
            bar.set_description(f"{case.length}{' causal' * case.causal}{' backward' * case.backward}")
            usable = _usable(configs, case, columns)
            bar.update(rounds * (len(configs) - len(usable)))
            options = {"layers": _layers(case, data)} if case.source == "minilm" else {}
            for name, timing in measure(usable, case, rounds, bar, **options).items():
                extra = extra_memory(usable.get(name), case) if memory else None
                times = {**timing._asdict(), "relative": 1.0 / timing.ratio, "unsteady": timing.unsteady}
                rows.append({"method": name, **case._asdict(), "budget": columns, **times, "extra_memory": extra})
    commands.write(rows, csv, plot, draw)
    commands.show(map(_described, rows), AUTO_COLUMNS if auto else COLUMNS if memory else dict([*COLUMNS.items()][:-1]))
    typer.echo(f"\n{sizes}; medians of {rounds} rounds; torch {torch.__version__}")
    if any(row["unsteady"] for row in rows):
        typer.echo(UNSTEADY)
    if check:
        commands.conclude(auto_verdicts(rows) if auto else verdicts(rows))


def _described(row: commands.Row) -> commands.Row:
    passes = ("causal " if row["causal"] else "") + ("fwd+bwd" if row["backward"] else "fwd")
    return {**row, "ms": 1000 * row["seconds"], "pass": passes}


COLUMNS = {
    "tokens": "{length}", "rows": "{batch}", "pass": "{pass}", "attention": "{method}", "ms": "{ms:.1f}",
    "times faster": "{ratio:.1f}x", "min..max": "{ratio_min:.1f}..{ratio_max:.1f}",
    "extra memory / inputs": "{extra_memory:.2f}",
}  # fmt: skip
AUTO_COLUMNS = {
    "case": "{source}", "tokens": "{length}", "attention": "{method}", "ms": "{ms:.3g}",
    "time relative to exact": "{relative:.2f}",
}  # fmt: skip


def auto_verdicts(rows: Sequence[commands.Row]) -> list[commands.Verdict]:
    """The time of auto relative to exact attention, and without a bound to the faster of exact and nearfar."""
    found = []
    for key in dict.fromkeys((row["source"], row["length"]) for row in rows):
        times = {row["method"]: row["relative"] for row in rows if (row["source"], row["length"]) == key}
        bounds = {"auto": 1.0, UNBOUNDED: min(1.0, times.get("nearfar", 1.0))}
        found += [
            commands.Verdict(f"{key[0]}, {key[1]} tokens: {name}", times[name] / bound, AUTO_GOAL, at_least=False)
            for name, bound in bounds.items()
            if name in times
        ]
    return found


def compare_compiled(
    configs: Mapping[str, MethodConfig], cases: Sequence[Case], rounds: int, check: bool, csv: pathlib.Path | None
) -> None:
    """Measure how many times faster torch.compile makes every method, and print the table."""
    configs = _usable(configs, cases[0], None)
    if not configs:
        raise UnsupportedAttentionError("none of the methods has a causal form: leave out --causal, or give others")
    rows = []
    with use_threads(cases[0].threads), tqdm(total=len(cases) * len(configs), disable=None, leave=False) as bar:
        for case, (label, config) in itertools.product(cases, configs.items()):
            bar.set_description(f"{label}, {case.length}")
            rows.append({"method": label, **case._asdict(), **measure_compiled(config, case, rounds)})
            bar.update()
    commands.write(rows, csv)
    for row in rows:
        row |= {"eager": 1000 * row["eager_seconds"], "ms": 1000 * row["seconds"]}
    columns = {
        "tokens": "{length}", "attention": "{method}", "eager ms": "{eager:.1f}", "compiled ms": "{ms:.1f}",
        "faster": "{ratio:.2f}x", "min..max": "{ratio_min:.2f}..{ratio_max:.2f}",
        "compiling": "{compile_seconds:.0f} s",
    }  # fmt: skip
    commands.show(rows, columns)
    if check:
        what = "{method}, {length}: eager / compiled"
        commands.conclude(commands.compared(rows, what, "ratio", lambda row: COMPILED_GOAL))


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
