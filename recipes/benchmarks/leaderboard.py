"""Measure error, speed and memory of every method in real models: a page, a picture, and JSON for a leaderboard.

    python -m recipes.benchmarks.leaderboard --data DATA -o OUT
    python -m recipes.benchmarks.leaderboard --data DATA --model t5=FOLDER --lengths 512,2048 -o OUT

The models are MiniLM (a BERT encoder of sentences), DeiT-tiny (a ViT), gpt2-books (a small causal GPT-2), and each
`--model NAME=FOLDER`. Every method that a model can use has its default hyperparameters and no further training, so
methods that define their own attention (`linear`, `performer`, ...) have large errors here.
A row of leaderboard.json has these keys:

- "model", "task", "method", "hyperparameters", "tokens", "batch", "data"
- "output_error": of the last hidden states against exact attention, relative, Frobenius norm; null for "sdpa, chunks
  of N", where a text beyond the model's N positions is embedded as the mean of its pieces
- "layer_error": relative operator norm of the layers' outputs, mean over layers and heads
- "agreement", and "agreement_measure", which says what it is: the cosine of embeddings, the ratio of perplexities, ...
- "speed_up", "speed_up_min", "speed_up_max": time of exact attention over that of the method in the same round, for a
  forward pass of the whole model; median and extremes. "seconds" is the median time of the method
- "peak_memory_mib": of a forward pass, without model and inputs. "exact_peak_memory_mib": the same of exact attention
- "machine": processor, device, threads, dtype and versions

leaderboard.md has the rows as tables, the smallest error of the last hidden states first, and leaderboard.png shows
error and speed. Duration: half an hour on two idle cores. Expected: the leaderboard of docs/results.md.
"""

import contextlib
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import typer

import hf_efficient_attn as hea
from hf_efficient_attn.checkpoint import load_model, open_checkpoint
from hf_efficient_attn.cli import Device, main_of, parse_device, parse_lengths, parse_methods
from hf_efficient_attn.cli.demo import minilm_folder
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.benchmark import benchmark_checkpoint
from hf_efficient_attn.evaluation.capture import takes_pictures
from hf_efficient_attn.evaluation.comparison import Procedure
from hf_efficient_attn.evaluation.data import is_encoder_decoder
from hf_efficient_attn.evaluation.timing import use_threads
from hf_efficient_attn.integration.settings import EXACT
from hf_efficient_attn.io.json import write_json
from hf_efficient_attn.io.writing import check_folder, replacing
from hf_efficient_attn.methods import MethodConfig
from recipes.common import commands
from recipes.common.commands import existing
from recipes.common.inputs import book_paths, deit

app = commands.new_app()

PHOTOGRAPHS = "images/imagenet1k-sample-original-100.zip"
FILES = ("leaderboard.json", "leaderboard.md", "leaderboard.png")
TEXT_LENGTHS, PIXEL_LENGTHS = [512, 2048, 4096], [577, 1025]
_KEPT = (
    "output_error", "agreement", "speed_up", "speed_up_min", "speed_up_max", "seconds", "batch", "peak_memory_mib",
)  # fmt: skip
_COLUMNS = {
    "method": "{method}", "error": "{output_error:.3f}", "error of the layers": "{layer_error:.3f}",
    "agreement": "{agreement:.3f}", "times as fast": "{speed_up:.2f}", "memory, MiB": "{peak_memory_mib:.0f}",
}  # fmt: skip


def usable(folder: pathlib.Path, configs: Mapping[str, MethodConfig]) -> dict[str, MethodConfig]:
    """The methods that a model takes, in all layers or in its encoder."""
    found = {}
    for name, config in configs.items():
        model = load_model(open_checkpoint(folder))
        layers: list[int | str] | None = ["encoder"] if is_encoder_decoder(model) else None
        with contextlib.suppress(UnsupportedAttentionError):
            hea.convert(model, config, layers=layers)
            found[name] = config
    return found


def rows_of(name: str, result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a model from what the command `benchmark` returns; exact attention is the first at each length."""
    rows, exact = [], {}
    for measured in result["measurements"]:
        method = measured["attention"]
        exact = measured if method == EXACT else exact
        rows.append({
            "model": name,
            "task": result["task"],
            "method": measured["attention"],
            "hyperparameters": measured["settings"],
            "tokens": measured["length"],
            **{key: measured[key] for key in _KEPT},
            "layer_error": measured["error"],
            "agreement_measure": result["agreement"],
            "exact_peak_memory_mib": exact["peak_memory_mib"],
            "data": result["data"]["name"],
            "machine": result["machine"],
        })  # fmt: skip
    return rows


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as tables in Markdown, one for each model and length."""
    parts = []
    for model, group in itertools.groupby(rows, lambda row: row["model"]):
        parts.append(f"## {model}")
        for tokens, some in itertools.groupby(group, lambda row: row["tokens"]):
            # The mean of the embeddings of chunks has no hidden states of its own.
            best = sorted(some, key=lambda row: (row["output_error"] is None, row["output_error"]))
            measure = best[0]["agreement_measure"]
            parts += [f"{tokens:,} tokens (agreement: {measure})", commands.table_of(best, _COLUMNS)]
    return "\n\n".join(parts) + "\n"


def draw(rows: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Draw error and speed at the longest inputs of each model: the lower right is the best corner."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(5 * len(models), 4.5), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        own = [row for row in rows if row["model"] == model and row["output_error"] is not None]
        longest = [row for row in own if row["tokens"] == own[-1]["tokens"] and row["method"] != EXACT]
        axes.set(title=f"{model}, {own[-1]['tokens']:,} tokens", xscale="log", yscale="log")
        axes.set(xlabel="times as fast as exact attention", ylabel="relative error of the last hidden states")
        axes.axvline(1.0, color="gray", linestyle=":")
        for row in longest:
            axes.plot(row["speed_up"], row["output_error"], "o", color="tab:blue")
            axes.annotate(row["method"], (row["speed_up"], row["output_error"]), (3, 3), textcoords="offset points")
    with replacing(path) as draft:
        figure.savefig(draft, dpi=120)


def write(rows: Sequence[Mapping[str, Any]], folder: pathlib.Path) -> None:
    """Write what is known."""
    folder.mkdir(exist_ok=True)
    write_json(folder / FILES[0], {"format": 1, "rows": list(rows)})
    (folder / FILES[1]).write_text(page(rows), encoding="utf-8")
    draw(rows, folder / FILES[2])


@app.command(epilog="Example: python -m recipes.benchmarks.leaderboard --model minilm --lengths 512 -o OUT")
def leaderboard(
    output: commands.option(pathlib.Path, "Where to write the results.", "--output", "-o", metavar="FOLDER"),
    data: commands.Data = None,
    model: commands.option(
        list[str], "minilm, deit, gpt2-books or NAME=FOLDER, repeatable. [default: the three models]"
    ) = [],  # noqa: B006 (typer copies it)
    lengths: commands.numbers_option("Tokens", "512, 2048, 4096; of pictures 577, 1025", "--lengths") = [],  # noqa: B006
    method: commands.methods_option("all") = [],  # noqa: B006
    rows: commands.option(int, "Inputs on which the agreement is measured.", min=1) = 4,
    rounds: commands.Rounds = 3,
    threads: commands.Threads = None,
    device: Device = None,
    force: commands.option(bool, "Replace the files of an earlier run.", "--force") = False,
) -> None:
    """Measure error, speed and memory of every method in real models."""
    check_folder(output, FILES, force=force)
    folder, found = commands.data_folder(data), list[dict[str, Any]]()
    configs = parse_methods(method or hea.available_methods())
    known = {"minilm": minilm_folder, "deit": lambda: deit(folder), "gpt2-books": lambda: folder / "models/gpt2-books"}
    chosen = dict(one.partition("=")[::2] for one in model or known)
    commands.check_known("--model", [name for name, path in chosen.items() if not path], known)
    with use_threads(threads):
        for name, path in chosen.items():
            source = pathlib.Path(path) if path else known[name]()
            own, is_image = usable(source, configs), takes_pictures(load_model(open_checkpoint(source)))
            sizes = parse_lengths(lengths) or (PIXEL_LENGTHS if is_image else TEXT_LENGTHS)
            examples = existing(folder / PHOTOGRAPHS, "photographs") if is_image else book_paths(folder, 1)[0]
            procedure = Procedure(rounds=rounds, rows=rows, device=parse_device(device), new_tokens=0)
            result = benchmark_checkpoint(source, own, sizes, data=examples, procedure=procedure)
            found += rows_of(name, result)
            write(found, output)
    typer.echo(page(found))


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.leaderboard")
