"""`hf-efficient-attn demo`."""

import pathlib
from typing import Annotated

import typer

from hf_efficient_attn.cli.benchmark import show
from hf_efficient_attn.cli.common import (
    Json,
    Settings,
    Threads,
    command,
    complete_methods,
    parse_lengths,
    parse_methods,
    print_json,
    table,
)
from hf_efficient_attn.errors import UnsupportedAttentionError

_LENGTHS = "512,2048,8192"


@command("demo --method kdeformer --method kdeformer:near_field=window --length 1024,8192 --plot demo.png")
def demo(
    method: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="NAME or NAME:key=value; repeated or separated by commas. [default: the default methods with a "
            "causal form; see `hf-efficient-attn methods`]",
            autocompletion=complete_methods,
        ),
    ] = [],  # noqa: B006 (typer copies it)
    length: Annotated[
        list[str],
        typer.Option(
            metavar="N",
            show_default=False,
            help=f"Numbers of tokens, 512 to 16384; repeated or separated by commas. [default: {_LENGTHS}]",
        ),
    ] = [_LENGTHS],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    plot: Annotated[
        pathlib.Path | None, typer.Option(metavar="FILE", help="Draw speed-up and error against length.")
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Compare methods with exact attention on a pretrained MiniLM and Python's documentation, without network access.

    It is the `benchmark` command for this model, with a search in addition.
    """
    from hf_efficient_attn.evaluation.benchmark import draw
    from hf_efficient_attn.evaluation.defaults import default_methods
    from hf_efficient_attn.evaluation.demo import run_demo
    from hf_efficient_attn.evaluation.timing import use_threads
    from hf_efficient_attn.io.writing import check_picture

    # Those that can be used in encoders and in decoders.
    methods, lengths = parse_methods(method or default_methods(is_causal=True), setting), parse_lengths(length)
    if not methods or not lengths:
        raise UnsupportedAttentionError("the demo needs at least one --method and one --length")
    if plot is not None:
        check_picture(plot)
    with use_threads(threads):
        result = run_demo(methods, lengths)
    if plot is not None:
        draw(result, plot)
    if as_json:
        return print_json(result)
    show(result)
    entries = result["search"]
    typer.echo(
        f"\nSearch: {entries[0]['questions']} questions in {entries[0]['topics']} topics of the documentation, in "
        "comparison with exact attention"
    )
    rows = [
        (e["attention"], e["tokens"], f"{e['same_first']} of {e['questions']}", f"{e['shared_five']:.2f} of 5")
        for e in entries
    ]
    typer.echo(table(("attention", "tokens up to", "same best topic", "common topics among the best five"), rows))
    typer.echo(
        "\nMiniLM was trained with 512 positions. The figures say how well a method replaces exact attention at the\n"
        "same length, not how good the embedding of a long text is."
    )
    if plot is not None:
        typer.echo(f"Written: {plot}")
