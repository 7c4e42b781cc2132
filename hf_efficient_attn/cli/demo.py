"""`hf-efficient-attn demo`."""

import pathlib
from typing import Annotated

import torch
import typer

from hf_efficient_attn.cli.common import Json, Settings, app, parse_lengths, parse_methods, print_json, table
from hf_efficient_attn.errors import UnsupportedAttentionError


@app.command(
    epilog="Example: hf-efficient-attn demo --method kdeformer --method kdeformer:near_field=window --length 1024,8192 "
    "--plot demo.png"
)
def demo(
    method: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="NAME or NAME:key=value; repeated or with commas. [default: kdeformer,longformer]",
        ),
    ] = ["kdeformer", "longformer"],  # noqa: B006 (typer copies it)
    length: Annotated[
        list[str],
        typer.Option(
            metavar="N",
            show_default=False,
            help="Tokens of a document, 512 to 16384; repeated or with commas. [default: 512,2048,8192]",
        ),
    ] = ["512,2048,8192"],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    plot: Annotated[
        pathlib.Path | None, typer.Option(metavar="FILE", help="Draw time and error against length.")
    ] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", min=1, help="Threads of PyTorch.")] = None,
    as_json: Json = False,
) -> None:
    """Exact attention against the methods, on a pretrained MiniLM and Python's own help texts; needs no network."""
    from hf_efficient_attn.evaluation.demo import draw, run_demo
    from hf_efficient_attn.integration.settings import EXACT
    from hf_efficient_attn.io.writing import check_picture

    configs, lengths = parse_methods(method, setting), parse_lengths(length)
    if not configs or not lengths:
        raise UnsupportedAttentionError("the demo needs at least one --method and one --length")
    if plot is not None:
        check_picture(plot)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        result = run_demo(configs, lengths)
    finally:
        torch.set_num_threads(before)
    if plot is not None:
        draw(result, plot)
    if as_json:
        return print_json(result)
    forms = {"seconds": "{:.3f}", "speed_up": "{:.2f}x", "error": "{:.3f}", "cosine": "{:.4f}"}
    rows = [
        (entry["tokens"], entry["method"], *(form.format(entry[key]) for key, form in forms.items()))
        for entry in result["measurements"]
    ]
    typer.echo(table(("tokens", "attention", "seconds", "speed-up", "error", "cosine"), rows))
    typer.echo(
        "\nseconds: median forward pass of the model. error: |H - H_exact| / |H_exact| of the last hidden states\n"
        "(Frobenius norm). cosine: of the mean-pooled embeddings. Means over the documents of a length.\n"
    )
    entry = result["search"][0]
    typer.echo(f"Search: {entry['questions']} questions among {entry['topics']} topics, against the lists of {EXACT}")
    rows = [
        (e["method"], e["tokens"], f"{e['same_first']} of {e['questions']}", f"{e['shared_five']:.2f} of 5")
        for e in result["search"]
    ]
    typer.echo(table(("attention", "tokens up to", "same first topic", "shared among the first five"), rows))
    typer.echo("\n" + "\n".join(result["summary"]))
    typer.echo(
        "MiniLM was trained on 512 positions; beyond them its table repeats, untrained. The reference is exact\n"
        "attention at the same length: the figures say how well a method stands in for it, not how good a long\n"
        "embedding is."
    )
    if plot is not None:
        typer.echo(f"Drawn: {plot}")
