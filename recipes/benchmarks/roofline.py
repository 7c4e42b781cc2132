"""Predict the time of methods on a GPU without one, and say where it goes.

    python -m recipes.benchmarks.roofline
    python -m recipes.benchmarks.roofline --methods nearfar --lengths 65536 --host fast --top 8

The model is `recipes.common.gpu_model`: bytes, products and launches of every operation on an NVIDIA H100. Exact
attention is PyTorch's FlashAttention, by the same model. Inputs are one sequence with 16 heads of 64. A row has the
milliseconds of a call, those of exact attention, the number of kernels that are launched, the gigabytes that they move,
and what bounds most of the time: "host" (the device waits for the next operation), "traffic", "products", "float32"
(products without tensor cores), "latency" or "launch" (kernels that are too short for the device).

`auto` is left out, since it computes what exact attention or `nearfar` computes. So are methods that read numbers back
which decide how much they compute, if they cannot run without numbers.

Duration: 4 minutes on one core; a training step takes twice as long. Expected: the table of docs/gpu.md. The model is
not a measurement: where both exist, they differ by up to a third, and for `reformer` by half.
"""

import collections
import pathlib
from collections.abc import Callable
from typing import Any, Literal

import torch
import typer
from tqdm import tqdm

import hf_efficient_attn as hea
from hf_efficient_attn.cli import main_of, parse_lengths, parse_methods
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.io.json import write_json
from hf_efficient_attn.io.writing import check_writable
from hf_efficient_attn.methods import MethodConfig, method_info
from recipes.common import commands, gpu_model
from recipes.common.gpu_model import H100, HOSTS, Machine, Recorder

__all__ = ["H100", "app", "predict"]
app = commands.new_app()

LENGTHS = [16384, 65536, 131072]
COLUMNS = {
    "method": "{method}", "causal": "{causal}", "tokens": "{tokens:,}", "ms": "{ms:.2f}", "flash ms": "{flash_ms:.2f}",
    "times faster": "{ratio:.2f}", "launches": "{launches}", "syncs": "{syncs}", "GB": "{gigabytes:.2f}",
    "bound": "{bound}",
}  # fmt: skip


def make_call(
    config: MethodConfig | None, length: int, dtype: str, *, causal: bool, backward: bool
) -> Callable[[], Any]:
    """A call of a method, or of exact attention for None, on tensors without numbers."""
    shape = (1, 16, length, 64)
    inputs = [torch.empty(shape, dtype=getattr(torch, dtype), device="meta", requires_grad=backward) for _ in range(3)]

    def call() -> None:
        if config is None:
            out = gpu_model.sdpa(*inputs, is_causal=causal)
        else:
            out = hea.attention(config, *inputs, is_causal=causal)
        if backward:
            torch.autograd.grad(out, inputs, torch.empty_like(out))

    return call


def predict(call: Callable[[], Any], machine: Machine) -> tuple[dict[str, Any], Recorder]:
    """The columns of a row that describe a call, and its operations."""
    seconds, recorder = gpu_model.simulate(call, machine)
    busy = collections.Counter[str]()
    for one in recorder.operations:
        busy[one.bound] += one.seconds  # type: ignore[assignment]
    is_waiting = sum(busy.values()) < 0.8 * seconds
    row = {
        "ms": 1000 * seconds, "launches": len(recorder.operations), "syncs": recorder.syncs,
        "gigabytes": sum(one.moved for one in recorder.operations) / 1e9,
        "bound": "host" if is_waiting else max(busy, key=busy.__getitem__),
    }  # fmt: skip
    return row, recorder


def costliest(recorder: Recorder, count: int) -> str:
    """A table of the operations that take most of the time, by name and place."""
    groups: dict[tuple[str, str], list[Any]] = {}
    for one in recorder.operations:
        entry = groups.setdefault((one.name, one.where), [0.0, 0, 0.0, 0.0, one.bound])
        for i, value in enumerate((one.seconds, 1, one.moved, one.flops)):
            entry[i] += value
    rows = [
        {"ms": 1e3 * s, "count": n, "name": name, "mb": moved / 1e6, "gf": flops / 1e9, "bound": bound, "where": where}
        for (name, where), (s, n, moved, flops, bound) in sorted(groups.items(), key=lambda x: -x[1][0])[:count]
    ]
    columns = {"ms": "{ms:.3f}", "launches": "{count}", "operation": "{name}", "MB": "{mb:.0f}", "GFLOP": "{gf:.1f}"}
    return commands.table_of(rows, columns | {"bound": "{bound}", "where": "{where}"})


@app.command(
    epilog="Example: python -m recipes.benchmarks.roofline --methods nearfar --lengths 65536 --host fast --top 8"
)
def roofline(
    methods: commands.methods_option("all but auto") = [],  # noqa: B006 (typer copies it)
    lengths: commands.numbers_option("Tokens", "16384,65536,131072") = [],  # noqa: B006
    causal: commands.option(
        bool | None, "Only causal forms, or only bidirectional ones.", "--causal/--bidirectional"
    ) = None,
    backward: commands.option(bool, "Predict forward and backward together.", "--backward") = False,
    dtype: commands.option(Literal["bfloat16", "float16", "float32"], "Dtype of the inputs.") = "bfloat16",
    host: commands.option(Literal["measured", "fast"], "20 microseconds an operation, or 6.") = "measured",
    top: commands.option(int, "Also show the N costliest operations of each call.", min=0) = 0,
    json: commands.option(
        pathlib.Path | None, "Write the rows to a JSON file.", metavar="FILE", callback=commands.checked(check_writable)
    ) = None,
    csv: commands.Csv = None,
) -> None:
    """Predict milliseconds, launches and traffic of methods on an NVIDIA H100."""
    configs = parse_methods(methods or [name for name in hea.available_methods() if name != "auto"])
    machine = H100._replace(**HOSTS[host])
    forms = [
        (label, config, is_causal, length)
        for label, config in configs.items()
        for is_causal in (False, True)
        for length in parse_lengths(lengths) or LENGTHS
        if causal in (None, is_causal) and (method_info(config.method).causal or not is_causal)
    ]
    if not forms:
        raise UnsupportedAttentionError("none of these methods has a causal form: leave out --causal")
    exact: dict[tuple[bool, int], float] = {}
    rows = []
    without: dict[str, None] = {}
    options = {"dtype": dtype, "backward": backward}
    for label, config, is_causal, length in tqdm(forms, disable=None, leave=False):
        if (is_causal, length) not in exact:
            flash = make_call(None, length, causal=is_causal, **options)
            exact[is_causal, length] = predict(flash, machine)[0]["ms"]
        try:
            row, recorder = predict(make_call(config, length, causal=is_causal, **options), machine)
        except NotImplementedError:
            without.setdefault(label)
            continue
        flash_ms = exact[is_causal, length]
        sizes = {"method": label, "causal": is_causal, "tokens": length}
        rows.append(sizes | row | {"flash_ms": flash_ms, "ratio": flash_ms / row["ms"]})
        if top:
            tqdm.write(
                f"{label}, {'causal, ' * is_causal}{length:,} tokens: {row['ms']:.2f} ms\n{costliest(recorder, top)}\n"
            )
    if without:
        typer.echo(f"Left out, since numbers decide what they compute: {', '.join(without)}", err=True)
    if json is not None:
        write_json(json, rows)
    what = "a training step" if backward else "a call"
    commands.report(rows, COLUMNS, f"Predicted for {what} on an H100 in {dtype}, {host} host; not measured.", csv=csv)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main_of(app, "python -m recipes.benchmarks.roofline")
