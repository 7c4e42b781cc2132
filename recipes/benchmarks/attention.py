"""Measure speed and memory of the methods relative to torch's exact attention.

    python -m recipes.benchmarks.attention --length 1024,2048,4096,8192,16384
    python -m recipes.benchmarks.attention --auto --length 128,512,1024,2048,4096
    python -m recipes.benchmarks.attention --device cuda

Duration: 10 minutes on 2 cores. Expected: the tables of docs/results.md.

Speed is a ratio. In every round exact attention runs before and after each method, in the same dtype, with the same
causality and the same passes, so that slow changes of a busy machine cancel (`recipes.common.memory.paired`). Causal
measurements omit methods without a causal form.

`--auto` measures whether `auto` is ever slower than exact attention, or without a bound of the error (max_error=0) than
the faster of exact attention and `nearfar`. The inputs have 12 heads: normal random numbers, bidirectional (bert) and
causal (gpt2), in which hardly any head is within the bound, and the inputs of every second layer of MiniLM for a novel
(DATA/text/books), one after the other. Run it on an otherwise idle machine, after `hf-efficient-attn crossover` has
measured the machine. Expected: relative times of at most 1.05.

`--onnx` compares the methods that export to ONNX with exact attention, all in onnxruntime, forward and bidirectional.

`--device cuda` measures bfloat16 and 16 heads by default, against PyTorch's flash kernel, in forward passes and in
forward and backward passes. A method that does not fit the device is left out, with a message.
"""

import itertools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tqdm import tqdm

from hf_efficient_attn.cli import Device, main_of, parse_device, parse_dtype, parse_lengths, parse_methods
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.timing import Timing, use_device, use_threads
from hf_efficient_attn.methods import MethodConfig, method_info
from recipes.benchmarks.gpu import runs
from recipes.common import commands
from recipes.common.counting import compute
from recipes.common.inputs import capture, open_source
from recipes.common.memory import EXACT, Case, extra_memory, make_inputs, paired, run_once

app = commands.new_app()

# Without "auto": it decides by the data, and attention to random keys is exact.
METHODS = (
    "nearfar", "kdeformer", "hyperattention", "longformer", "linear", "performer", "performer:num_features=64",
    "nystromformer", "wildcat", "thinformer", "linformer", "reformer", "scatterbrain", "eva", "flurka_linear",
    "flurka_performer", "flurka_eva",
)  # fmt: skip
ONNX_METHODS = ("nystromformer", "longformer", "linear", "performer", "performer:num_features=64")
# The settings of --short.
SHORT_CASES = [{"length": n, "budget": b, "batch": rows} for n, b in ((512, 64), (1024, 128)) for rows in (1, 8)]
# The methods, cases and lengths of --auto.
AUTO, AUTO_LENGTHS = ("nearfar", "auto", "auto:max_error=0"), [2**n for n in range(7, 15)]
AUTO_CASES: list[Any] = [{"source": "bert"}, {"source": "gpt2", "causal": True}, {"source": "minilm", "head_dim": 32}]

COLUMNS = {
    "tokens": "{length}", "rows": "{batch}", "pass": "{pass}", "attention": "{method}", "ms": "{ms:.1f}",
    "times faster": "{ratio:.1f}x", "min..max": "{ratio_min:.1f}..{ratio_max:.1f}",
    "extra memory / inputs": "{extra_memory:.2f}",
}  # fmt: skip
AUTO_COLUMNS = {
    "case": "{source}", "tokens": "{length}", "attention": "{method}", "ms": "{ms:.3g}",
    "time relative to exact": "{relative:.2f}",
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


class _Attention(torch.nn.Module):
    def __init__(self, config: MethodConfig | None) -> None:
        super().__init__()
        self.config = config

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return compute(self.config, (query, key, value))


def measure_onnx(configs: Mapping[str, MethodConfig], case: Case, rounds: int) -> dict[str, Timing]:
    """As `measure`, in onnxruntime."""
    import onnxruntime  # an optional dependency

    options, inputs = onnxruntime.SessionOptions(), make_inputs(case)
    options.intra_op_num_threads = case.threads

    def call(config: MethodConfig | None) -> Callable[[], Any]:
        sizes = ({2: torch.export.Dim.DYNAMIC},) * 3
        program = torch.onnx.export(_Attention(config).eval(), inputs, dynamic_shapes=sizes, verbose=False)
        session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), options)
        given = {one.name: x.numpy() for one, x in zip(session.get_inputs(), inputs, strict=True)}
        return lambda: session.run(None, given)

    exact, timed = paired(call(None), {label: call(config) for label, config in configs.items()}, rounds)
    return {EXACT: exact, **timed}


def settings(lengths: list[int], causal: bool, backward: bool | None, sizes: Case) -> list[Case]:
    """The cases without --short, --auto and --onnx: on an accelerator, both passes of more tokens."""
    on_cpu = sizes.device == "cpu"
    lengths = lengths or [2**n for n in (range(10, 15) if on_cpu else range(13, 21))]
    passes = [bool(backward)] if on_cpu or backward is not None else [False, True]
    return [sizes._replace(length=n, causal=causal, backward=b) for n, b in itertools.product(lengths, passes)]


@app.command(
    epilog="Example: python -m recipes.benchmarks.attention --length 8192 --causal --method kdeformer:block_size=128"
)
def attention(
    length: commands.numbers_option("Tokens", "1024..16384; 8192..1048576 on accelerators") = [],  # noqa: B006 (typer copies it)
    method: commands.methods_option("all; performer with 64 features too") = [],  # noqa: B006
    causal: commands.option(bool, "Causal attention.", "--causal/--bidirectional") = False,
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
    onnx: commands.option(bool, "Compare the methods with exact attention in onnxruntime.", "--onnx") = False,
    heads: commands.option(int | None, "Number of heads. [default: 8, and 16 on accelerators]", min=1) = None,
    width: commands.HeadDim = 64,
    device: Device = None,
    data: commands.Data = None,
    threads: commands.Threads = 2,
    rounds: commands.Rounds = 5,
    memory: commands.Memory = True,
    csv: commands.Csv = None,
) -> None:
    """Measure the methods on random inputs: time relative to exact attention, memory relative to the inputs."""
    where = str(parse_device(device))
    usual_heads, usual_dtype = (8, "float32") if where == "cpu" else (16, "bfloat16")
    sizes = Case(0, 1, heads or usual_heads, width, dtype or usual_dtype, threads, device=where)
    parse_dtype(sizes.dtype)
    if short and length:
        raise UnsupportedAttentionError("--short chooses the lengths itself; leave out --length")
    if short + auto + onnx > 1 or ((auto or onnx) and where != "cpu"):
        raise UnsupportedAttentionError("--short, --auto and --onnx exclude each other; the last two are for CPUs")
    if (auto or onnx) and (causal or backward is not None or (onnx and sizes.dtype != "float32")):
        raise UnsupportedAttentionError(
            "--auto and --onnx have forms of their own: leave out --causal and --backward, and --dtype with --onnx"
        )
    # --short replaces the hyperparameters that a budget sets.
    usual_methods = AUTO if auto else ONNX_METHODS if onnx else [x for x in METHODS if not (short and ":" in x)]
    named = method or usual_methods
    configs, lengths = parse_methods(named), parse_lengths(length)
    memory = memory and not (auto or onnx)
    columns = AUTO_COLUMNS if auto else COLUMNS if memory else dict([*COLUMNS.items()][:-1])
    if auto:
        sizes = sizes._replace(num_heads=heads or 12)
        pairs = itertools.product(AUTO_CASES, lengths or AUTO_LENGTHS)
        cases = [sizes._replace(length=n, **changes) for changes, n in pairs]
    elif short or onnx:
        sizes = sizes._replace(causal=causal, backward=bool(backward))
        found = SHORT_CASES if short else [{"length": n} for n in lengths or (2048, 8192)]
        cases = [sizes._replace(**changes) for changes in found]
    else:
        cases = settings(lengths, causal, backward, sizes)
    rows: list[dict[str, Any]] = []
    with use_threads(threads):
        for case in tqdm(cases, disable=None, leave=False):
            usable = {k: v for k, v in configs.items() if not case.causal or method_info(v.method).causal}
            if not usable:
                raise UnsupportedAttentionError("--causal: none of the methods has a causal form")
            if case.budget is not None:
                usable = {label: config.with_budget(case.budget) for label, config in usable.items()}
            timings = measure_onnx(usable, case, rounds) if onnx else measure(usable, case, rounds, data)
            for label, t in timings.items():
                row = {
                    "method": label,
                    **case._asdict(),
                    **t._asdict(),
                    "unsteady": t.unsteady,
                    "relative": 1 / t.ratio,
                }
                row["extra_memory"] = extra_memory(usable.get(label), case) if memory else None
                rows.append(row | {"pass": f"{'causal ' * case.causal}fwd{'+bwd' * case.backward}"})
    commands.report(rows, columns, commands.rounds_note(sizes, rounds), csv=csv)


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.attention")
