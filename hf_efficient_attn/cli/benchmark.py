"""`hf-efficient-attn benchmark`."""

import pathlib
from typing import Annotated, Any

import typer

from hf_efficient_attn.cli.common import Json, Settings, app, parse_lengths, parse_methods, print_json, table
from hf_efficient_attn.errors import UnsupportedAttentionError

_AGREEMENT = {
    "cosine": "cosine of the mean-pooled embeddings with those of exact attention",
    "perplexity_ratio": "perplexity over that of exact attention",
    "top1": "share of answers (classes, or tokens under a mask at every seventh place) that exact attention gives too",
}


@app.command(
    epilog="Example: hf-efficient-attn benchmark bert-base-uncased --methods kdeformer,longformer:window_size=64 "
    "--lengths 512,2048,8192 --data book.txt --output measured"
)
def benchmark(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Folder or hub id of a checkpoint.")],
    methods: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="NAME or NAME:key=value; repeated or with commas. [default: a converted checkpoint's own; else "
            "kdeformer, longformer and, unless causal, nystromformer]",
        ),
    ] = [],  # noqa: B006 (typer copies it)
    lengths: Annotated[
        list[str],
        typer.Option(
            metavar="N",
            show_default=False,
            help="Tokens; repeated or with commas. Pictures are resized to about so many. [default: up to four times "
            "what the model takes, as far as a minute goes]",
        ),
    ] = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    data: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help='Text (.txt, .jsonl with "text", gzipped too), or a folder or zip file of pictures.',
        ),
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Rows of a forward pass.")] = 1,
    rows: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, show_default=False, help="For agreement. [default: 4 texts, 32 pictures]"),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Paired measurements of each time.")] = 3,
    threads: Annotated[int | None, typer.Option(metavar="N", min=1, help="Threads of PyTorch.")] = None,
    memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Measure memory too.")] = True,
    output: Annotated[
        pathlib.Path | None, typer.Option(metavar="FOLDER", help="Write benchmark.json and benchmark.png there.")
    ] = None,
    card: Annotated[
        bool, typer.Option("--card", help="Write them into SOURCE, a converted folder, and renew its model card.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over earlier ones.")] = False,
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="Read weights of a .bin file too.")] = False,
    as_json: Json = False,
) -> None:
    """Time, memory and error of methods in your model on this machine, and the length at which they begin to pay."""
    from hf_efficient_attn.evaluation.benchmark import benchmark_checkpoint, check_place, write_benchmark

    if setting and not methods:
        raise UnsupportedAttentionError("--set: name the methods that it is for by --methods")
    chosen = parse_methods(methods, setting)
    place = check_place(source, output, card=card, force=force)
    result = benchmark_checkpoint(
        source, chosen or None, parse_lengths(lengths) or None, data=data, batch=batch, rows=rows, rounds=rounds,
        threads=threads, memory=memory, allow_pickle=allow_pickle,
    )  # fmt: skip
    written = [] if place is None else write_benchmark(result, place, card=card)
    if as_json:
        return print_json(result)
    _show(result)
    for path in written:
        typer.echo(f"Written: {path}")


def _show(result: dict[str, Any]) -> None:
    about = result["machine"]
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
        for row in result["measurements"]
    ]
    headers = ("tokens", "attention", "seconds", "speed-up", "MiB", "error", result["agreement"].replace("_", " "))
    typer.echo(table(headers, rows))
    typer.echo(
        f"\n{about['cpu']}, {about['threads']} threads, {about['device']}, {about['dtype']}, torch {about['torch']}; "
        f"batches of {result['measurements'][0]['batch']}.\n"
        "seconds: median forward pass. speed-up: over exact attention (sdpa) in the same rounds, median. MiB: what\n"
        "PyTorch holds at the peak of a pass, beside model and inputs. error: relative operator norm of a layer's\n"
        "output, mean over heads and layers.\n"
        f"{result['agreement'].replace('_', ' ')}: {_AGREEMENT[result['agreement']]}, over "
        f"{result['data']['rows']} rows of {result['data']['name']}.\n"
    )
    for sentence in [*result["notes"], *result["summary"]]:
        typer.echo(sentence)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
