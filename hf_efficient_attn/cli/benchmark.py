"""`hf-efficient-attn benchmark`."""

import pathlib
from typing import Annotated, Any

import typer

from hf_efficient_attn.cli.common import (
    DEFAULT_METHODS,
    AllowPickle,
    Force,
    Json,
    Settings,
    Source,
    Threads,
    command,
    complete_methods,
    parse_lengths,
    parse_methods,
    print_json,
    table,
)
from hf_efficient_attn.errors import UnsupportedAttentionError

_AGREEMENT = {
    "cosine": "cosine of the mean-pooled embeddings with those of exact attention",
    "perplexity_ratio": "perplexity divided by that of exact attention",
    "top1": "share of answers that equal those of exact attention: classes, or tokens at the masked positions (every "
    "seventh)",
}


@command(
    "benchmark bert-base-uncased --methods kdeformer,longformer:window_size=64 "
    "--lengths 512,2048,8192 --data book.txt --output measured"
)
def benchmark(
    source: Source,
    methods: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="NAME or NAME:key=value; repeated or separated by commas. [default: the method of a converted "
            f"checkpoint, or else {DEFAULT_METHODS}]",
            autocompletion=complete_methods,
        ),
    ] = [],  # noqa: B006 (typer copies it)
    lengths: Annotated[
        list[str],
        typer.Option(
            metavar="N",
            show_default=False,
            help="Numbers of tokens; repeated or separated by commas. Pictures are resized to about as many. [default: "
            "up to four times the model's maximum, as far as a minute allows]",
        ),
    ] = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    data: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help='Text (.txt, .jsonl with "text", or gzipped), or a folder or zip file of pictures.',
        ),
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Inputs of a forward pass.")] = 1,
    rows: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            show_default=False,
            help="Inputs on which the agreement is measured. [default: 4 texts, 32 pictures]",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Measurements of each time.")] = 3,
    threads: Threads = None,
    memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Measure memory.")] = True,
    output: Annotated[
        pathlib.Path | None, typer.Option(metavar="FOLDER", help="Write benchmark.json and benchmark.png there.")
    ] = None,
    card: Annotated[
        bool, typer.Option("--card", help="Write them into SOURCE, a converted folder, and update its model card.")
    ] = False,
    force: Force = False,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
) -> None:
    """Measure time, memory and error of methods in a model, and the length from which on they pay off."""
    from hf_efficient_attn.evaluation.benchmark import benchmark_checkpoint, output_folder, write_benchmark
    from hf_efficient_attn.evaluation.comparison import Procedure
    from hf_efficient_attn.evaluation.timing import use_threads

    if setting and not methods:
        raise UnsupportedAttentionError("--set needs --methods: name the methods that the hyperparameter is for")
    chosen = parse_methods(methods, setting)
    folder = output_folder(source, output, card=card, force=force)
    with use_threads(threads):
        result = benchmark_checkpoint(
            source,
            chosen or None,
            parse_lengths(lengths) or None,
            data=data,
            rows=rows,
            procedure=Procedure(batch, rounds, memory),
            allow_pickle=allow_pickle,
        )
    written = [] if folder is None else write_benchmark(result, folder, card=card)
    if as_json:
        return print_json(result)
    show(result)
    for path in written:
        typer.echo(f"Written: {path}")


def show(result: dict[str, Any]) -> None:
    """Print the result of a benchmark as a table with explanations."""
    about, measurements, agreement = result["machine"], result["measurements"], result["agreement"].replace("_", " ")
    rows = [
        (
            row["length"],
            row["attention"],
            f"{row['seconds']:.3f}",
            f"{row['speed_up']:.2f}x",
            _number(row["peak_memory_mib"], ".0f"),
            _number(row["error"], ".3f"),
            _number(row["agreement"], ".4f"),
        )
        for row in measurements
    ]
    typer.echo(table(("tokens", "attention", "seconds", "speed-up", "MiB", "error", agreement), rows))
    typer.echo(
        f"\n{about['cpu']}, {about['threads']} threads, {about['device']}, {about['dtype']}, torch {about['torch']}; "
        f"batches of {measurements[0]['batch']}.\n"
        "seconds: median of the forward passes. speed-up: over exact attention (sdpa) in the same rounds, median.\n"
        "MiB: peak of PyTorch's memory in a pass, without model and inputs. error: relative operator norm of the\n"
        "error of a layer's output, averaged over heads and layers.\n"
        f"{agreement}: {_AGREEMENT[result['agreement']]}, over {result['data']['rows']} inputs of "
        f"{result['data']['name']}.\n"
    )
    for sentence in [*result["notes"], *result["summary"]]:
        typer.echo(sentence)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
