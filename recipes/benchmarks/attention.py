"""Measure speed and memory of the methods relative to torch's exact attention.

    python -m recipes.benchmarks.attention --length 1024,2048,4096,8192,16384
    python -m recipes.benchmarks.attention --check                        (also with --dtype bfloat16, or --short)
    python -m recipes.benchmarks.attention --auto --length 128,512,1024,2048,4096 --check
    python -m recipes.benchmarks.attention --compiled --dtype bfloat16 --check
    python -m recipes.benchmarks.attention --device cuda

Duration: 10 minutes on 2 cores. Expected: the goals in `recipes/common/speed_goals.py`, which `--check` compares with.
docs/results.md has the tables.

Speed is a ratio. In every round exact attention runs before and after each method, in the same dtype, with the same
causality and the same passes, so that slow changes of a busy machine cancel (`recipes.common.memory.paired`).
`--check` measures all settings that have a goal, or those that the other options select. Causal measurements omit
methods without a causal form.

`--auto` measures whether `auto` is ever slower than exact attention, or without a bound of the error (max_error=0) than
the faster of exact attention and `nearfar`. The inputs have 12 heads: normal random numbers, bidirectional (bert) and
causal (gpt2), in which hardly any head is within the bound, and the inputs of every second layer of MiniLM for a novel
(DATA/text/books), one after the other. Run it on an otherwise idle machine, after `hf-efficient-attn crossover` has
measured the machine. Expected: relative times of at most 1.05.

`--compiled` compares compiled methods with the same in eager mode, by inductor, which needs a C++ compiler on CPUs. The
time of compiling is that of the first call. Expected: no method slower than in eager mode.

`--onnx` compares the methods that export to ONNX with exact attention, all in onnxruntime.

`--device cuda` measures bfloat16 and 16 heads by default, against PyTorch's flash kernel, in forward passes and in
forward and backward passes. A method that does not fit the device is left out, with a message.
"""

import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm

import hf_efficient_attn as hea
from hf_efficient_attn.cli import Device, main_of, parse_device, parse_dtype, parse_lengths, parse_methods
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.timing import Timing, time_calls, use_device, use_threads
from hf_efficient_attn.methods import MethodConfig, method_info
from recipes.benchmarks.gpu import runs
from recipes.common import commands
from recipes.common.counting import compute
from recipes.common.inputs import capture, open_source
from recipes.common.memory import EXACT, Case, extra_memory, make_inputs, paired, run_once
from recipes.common.speed_goals import GPU_GOALS, HALF_GOALS, SHORT_GOALS, SPEED_GOALS, Goals

app = commands.new_app()

# Without "auto": it decides by the data, and attention to random keys is exact.
METHODS = (
    "nearfar", "kdeformer", "hyperattention", "longformer", "linear", "performer", "performer:num_features=64",
    "nystromformer", "wildcat", "thinformer", "linformer", "reformer", "scatterbrain", "eva", "flurka_linear",
    "flurka_performer", "flurka_eva",
)  # fmt: skip
ONNX_METHODS = ("nystromformer", "longformer", "linear", "performer", "performer:num_features=64")
# Goals of the extra memory in the forward pass, as a multiple of the inputs: (length, causal) -> goal.
MEMORY_GOALS = {(16384, False): 2.5}
_NO_MEMORY_GOAL = (EXACT, "reformer")
# The settings of --short.
SHORT_CASES = [{"length": n, "budget": b, "batch": rows} for n, b in ((512, 64), (1024, 128)) for rows in (1, 8)]
# The methods, cases, lengths and largest relative time of --auto.
UNBOUNDED = "auto (max_error=0)"
AUTO, AUTO_LENGTHS, AUTO_GOAL = ("nearfar", "auto", "auto:max_error=0"), [2**n for n in range(7, 15)], 1.05
AUTO_CASES: list[Any] = [{"source": "bert"}, {"source": "gpt2", "causal": True}, {"source": "minilm", "head_dim": 32}]
# Smallest eager time / compiled time: a loss of 5 % counts as noise.
COMPILED_GOAL = 0.95

COLUMNS = {
    "tokens": "{length}", "rows": "{batch}", "pass": "{pass}", "attention": "{method}", "ms": "{ms:.1f}",
    "times faster": "{ratio:.1f}x", "min..max": "{ratio_min:.1f}..{ratio_max:.1f}",
    "extra memory / inputs": "{extra_memory:.2f}",
}  # fmt: skip
ONNX_COLUMNS = {
    "tokens": "{length}", "attention": "{method}", "ms": "{ms:.1f}", "exact ms": "{reference_ms:.1f}",
    "times faster": "{ratio:.2f}x", "min..max": "{ratio_min:.2f}..{ratio_max:.2f}",
}  # fmt: skip
AUTO_COLUMNS = {
    "case": "{source}", "tokens": "{length}", "attention": "{method}", "ms": "{ms:.3g}",
    "time relative to exact": "{relative:.2f}",
}  # fmt: skip
COMPILED_COLUMNS = {
    "tokens": "{length}", "attention": "{method}", "eager ms": "{reference_ms:.1f}", "compiled ms": "{ms:.1f}",
    "faster": "{ratio:.2f}x", "min..max": "{ratio_min:.2f}..{ratio_max:.2f}", "compiling": "{compile_seconds:.0f} s",
}  # fmt: skip


def measure(configs: Mapping[str, MethodConfig], case: Case, rounds: int, data: Any = None) -> dict[str, Timing]:
    """Timings of exact attention, as `sdpa`, and of every method by label that fits the memory of the device.

    Inputs are random, or those of MiniLM's layers for a book in the folder `data`: a call computes one after the other.
    """
    layers = minilm_layers(case, data) if case.source == "minilm" else [make_inputs(case)]

    def work(config: MethodConfig | None) -> Callable[[], None]:
        return lambda: [run_once(config, inputs, case) for inputs in layers]

    calls = {label: work(config) for label, config in configs.items()}
    with use_device(torch.device(case.device)):
        if case.device != "cpu":
            calls = {label: call for label, call in calls.items() if runs(call, f"{label}, {case.length:,} tokens")}
        exact, timed = paired(work(None), calls, rounds)
    return {EXACT: exact, **timed}


def minilm_layers(case: Case, data: pathlib.Path | None) -> list[tuple[torch.Tensor, ...]]:
    """Query, key and value of every second layer of MiniLM for a novel, in the dtype of the case."""
    model, load = open_source("books", commands.data_folder(data), case.length)
    layers = capture(model, next(load(case.length)))[::2]
    return [tuple(x.to(getattr(torch, case.dtype)) for x in layer[1:4]) for layer in layers]


def measure_compiled(config: MethodConfig, case: Case, rounds: int) -> dict[str, float]:
    """Seconds of a compiled and of an eager call, their ratio, and seconds of compiling, that is of the first call."""
    inputs = make_inputs(case)
    torch.compiler.reset()
    compiled = torch.compile(hea.attention, dynamic=False)

    def work(attend: Callable[..., torch.Tensor]) -> None:
        out = attend(config, *inputs, is_causal=case.causal)
        if case.backward:
            torch.autograd.grad(out, inputs, torch.ones_like(out))

    compiling = time_calls(lambda: work(compiled))
    timing = paired(lambda: work(hea.attention), {"": lambda: work(compiled)}, rounds)[1][""]
    return {"compile_seconds": compiling, **timing._asdict(), "unsteady": timing.unsteady}


class _Attention(torch.nn.Module):
    def __init__(self, config: MethodConfig | None) -> None:
        super().__init__()
        self.config = config

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return compute(self.config, (query, key, value))


def measure_onnx(configs: Mapping[str, MethodConfig], case: Case, rounds: int) -> dict[str, Timing]:
    """Timings of the methods in onnxruntime, relative to exact attention there."""
    import onnxruntime  # an optional dependency

    options, inputs = onnxruntime.SessionOptions(), make_inputs(case)
    options.intra_op_num_threads = case.threads

    def call(config: MethodConfig | None) -> Callable[[], Any]:
        sizes = ({2: torch.export.Dim.DYNAMIC},) * 3
        program = torch.onnx.export(_Attention(config).eval(), inputs, dynamic_shapes=sizes, verbose=False)
        session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), options)
        given = {one.name: x.numpy() for one, x in zip(session.get_inputs(), inputs, strict=True)}
        return lambda: session.run(None, given)

    return paired(call(None), {label: call(config) for label, config in configs.items()}, rounds)[1]


def speed_goals(case: Case) -> Goals:
    """The goals on the device of a case and in its dtype."""
    if case.device != "cpu":
        return GPU_GOALS
    return HALF_GOALS if case.dtype == "bfloat16" else SPEED_GOALS


def verdicts(rows: Sequence[commands.Row]) -> list[commands.Verdict]:
    """The measurements that have a goal."""
    found = []
    for row in rows:
        case = Case(**{name: row[name] for name in Case._fields})
        setting = f"{row['method']}, {case.length}, {_passes(row)}"
        if case.budget is None:
            goals = speed_goals(case).get((case.length, case.causal, case.backward), {})
        else:
            goals = SHORT_GOALS.get((case.length, case.batch, case.budget), {})
        if row["method"] in goals:
            found.append(commands.Verdict(f"{setting}: times faster", row["ratio"], goals[row["method"]], True))
        most = None if case.backward else MEMORY_GOALS.get((case.length, case.causal))
        if None not in (most, row["extra_memory"]) and row["method"] not in _NO_MEMORY_GOAL:
            found.append(commands.Verdict(f"{setting}: extra memory / inputs", row["extra_memory"], most, False))
    return found


def auto_verdicts(rows: Sequence[commands.Row]) -> list[commands.Verdict]:
    """The time of auto relative to exact attention, and without a bound to the faster of exact and nearfar."""
    times = {(row["source"], row["length"], row["method"]): row["relative"] for row in rows}
    relative = {key: time for key, time in times.items() if key[2] == "auto"}
    for key, time in times.items():
        if key[2] == UNBOUNDED:
            relative[key] = time / min(1.0, times.get((*key[:2], "nearfar"), 1.0))
    return [commands.Verdict(f"{s}, {n} tokens: {m}", t, AUTO_GOAL, False) for (s, n, m), t in relative.items()]


def compiled_verdicts(rows: Sequence[commands.Row]) -> list[commands.Verdict]:
    """How many times faster compiled methods are than in eager mode."""
    return commands.compared(rows, "{method}, {length}: eager / compiled", "ratio", lambda row: COMPILED_GOAL)


def settings(lengths: list[int], causal: bool | None, backward: bool | None, check: bool, sizes: Case) -> list[Case]:
    """The cases without --short, --auto and --compiled; with `check` those that have a goal and match the options."""
    if check:
        chosen = [
            (n, c, b)
            for n, c, b in speed_goals(sizes)
            if (not lengths or n in lengths) and causal in (None, c) and backward in (None, b)
        ]
    else:
        on_cpu = sizes.device == "cpu"
        lengths = lengths or [2**n for n in (range(10, 15) if on_cpu else range(13, 21))]
        passes = [bool(backward)] if on_cpu or backward is not None else [False, True]
        chosen = list(itertools.product(lengths, [bool(causal)], passes))
    return [sizes._replace(length=n, causal=c, backward=b) for n, c, b in chosen]


def _passes(row: commands.Row) -> str:
    return ("causal " if row["causal"] else "") + ("fwd+bwd" if row["backward"] else "fwd")


@app.command(
    epilog="Example: python -m recipes.benchmarks.attention --length 8192 --causal --method kdeformer:block_size=128"
)
def attention(
    length: commands.numbers_option("Tokens", "1024..16384; 8192..1048576 on accelerators") = [],  # noqa: B006 (typer copies it)
    method: commands.methods_option("all; performer with 64 features too") = [],  # noqa: B006
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
    onnx: commands.option(bool, "Compare the methods with exact attention in onnxruntime.", "--onnx") = False,
    heads: commands.option(int | None, "Number of heads. [default: 8, and 16 on accelerators]", min=1) = None,
    width: commands.HeadDim = 64,
    device: Device = None,
    data: commands.Data = None,
    threads: commands.Threads = 2,
    rounds: commands.Rounds = 5,
    memory: commands.Memory = True,
    check: commands.Check = False,
    csv: commands.Csv = None,
) -> None:
    """Measure the methods on random inputs: time relative to exact attention, memory relative to the inputs."""
    where = str(parse_device(device))
    # The sizes for which the goals hold on this kind of device.
    usual = Case(0, dtype=dtype or "float32")
    if where != "cpu":
        usual = Case(0, num_heads=16, dtype=dtype or "bfloat16", device=where)
    sizes = usual._replace(num_heads=heads or usual.num_heads, head_dim=width, threads=threads)
    parse_dtype(sizes.dtype)
    if check and onnx:
        raise UnsupportedAttentionError("--check: --onnx has no goals; leave out one of them")
    has_goals = check and not (auto or compiled)
    if has_goals and (sizes != usual or (short and usual != Case(0))):
        raise UnsupportedAttentionError(f"--check: the goals hold for {Case(0) if short else usual}; leave out others")
    if has_goals and sizes.dtype == "float16":
        raise UnsupportedAttentionError("--check: there are no goals for float16; leave out --check or --dtype")
    if short and length:
        raise UnsupportedAttentionError("--short chooses the lengths itself; leave out --length")
    if short + auto + compiled + onnx > 1 or ((auto or compiled or onnx) and where != "cpu"):
        raise UnsupportedAttentionError(
            "--short, --auto, --compiled and --onnx exclude each other; the last three are for CPUs"
        )
    # --short replaces the hyperparameters that a budget sets.
    usual_methods = AUTO if auto else ONNX_METHODS if onnx else [x for x in METHODS if not (short and ":" in x)]
    named = method or usual_methods
    configs, lengths = parse_methods(named), parse_lengths(length)
    columns, verdicts_of = COLUMNS if memory else dict([*COLUMNS.items()][:-1]), verdicts
    if auto:
        sizes, columns, verdicts_of, memory = sizes._replace(num_heads=heads or 12), AUTO_COLUMNS, auto_verdicts, False
        pairs = itertools.product(AUTO_CASES, lengths or AUTO_LENGTHS)
        cases = [sizes._replace(length=n, **changes) for changes, n in pairs]
    elif short or compiled or onnx:
        sizes = sizes._replace(causal=bool(causal), backward=bool(backward))
        found = SHORT_CASES if short else [{"length": n} for n in lengths or (2048, 8192)]
        cases = [sizes._replace(**changes) for changes in found]
        if compiled:
            columns, verdicts_of, memory = COMPILED_COLUMNS, compiled_verdicts, False
        elif onnx:
            columns, memory = ONNX_COLUMNS, False
    else:
        cases = settings(lengths, causal, backward, check, sizes)
    rows: list[dict[str, Any]] = []
    with use_threads(threads):
        for case in tqdm(cases, disable=None, leave=False):
            usable = {k: v for k, v in configs.items() if not case.causal or method_info(v.method).causal}
            if not usable:
                raise UnsupportedAttentionError("--causal: none of the methods has a causal form")
            if case.budget is not None:
                usable = {label: config.with_budget(case.budget) for label, config in usable.items()}
            if compiled:
                timed = {label: measure_compiled(config, case, rounds) for label, config in usable.items()}
            else:
                timings = measure_onnx(usable, case, rounds) if onnx else measure(usable, case, rounds, data)
                timed = {label: t._asdict() | {"unsteady": t.unsteady} for label, t in timings.items()}
            for label, timing in timed.items():
                row = {"method": label, **case._asdict(), **timing, "relative": 1.0 / timing["ratio"]}
                row["extra_memory"] = extra_memory(usable.get(label), case) if memory else None
                rows.append(row | {"pass": _passes(row)})
    note = commands.rounds_note(sizes, rounds)
    commands.report(rows, columns, note, csv=csv, verdicts=verdicts_of if check else None)


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.attention")
