"""`hf-efficient-attn demo`."""

import pathlib
from typing import Annotated

import typer

from hf_efficient_attn.cli.benchmark import Report
from hf_efficient_attn.cli.common import (
    Device,
    Json,
    Minutes,
    Settings,
    Threads,
    command,
    complete_methods,
    parse_device,
    parse_lengths,
    parse_methods,
    print_json,
    until_interrupted,
)
from hf_efficient_attn.errors import UnsupportedAttentionError

_SHORTEST, _LONGEST = 512, 16384
# Less than a minute on two cores.
_LENGTHS = (512, 8192)
_PURPOSE = (
    "What long attention is for: inputs that cannot be split, such as large pictures, the prompts of language models, "
    "tagging and matching over a whole text, proteins, sound, and training on long inputs. For twice the length exact "
    "attention takes four times as long, and nearfar twice. MiniLM was trained with 512 positions: the figures say how "
    "well a method replaces exact attention at the same length, not how good the embedding of a long text is."
)


@command("demo --method nearfar --method kdeformer:near_field=window --length 1024,8192 --plot demo.png")
def demo(
    method: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="NAME or NAME:key=value; repeated or separated by commas. [default: auto, nearfar]",
            autocompletion=complete_methods,
        ),
    ] = [],  # noqa: B006 (typer copies it)
    length: Annotated[
        list[str],
        typer.Option(
            metavar="N",
            show_default=False,
            help="Numbers of tokens, 512 to 16384; repeated or separated by commas. [default: 512,8192]",
        ),
    ] = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    plot: Annotated[
        pathlib.Path | None, typer.Option(metavar="FILE", help="Draw speed-up and error against length.")
    ] = None,
    minutes: Minutes = None,
    threads: Threads = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Compare methods with exact attention on a pretrained MiniLM and Python's documentation, without network access.

    It is the `benchmark` command for this model, on one text of each length.
    """
    from hf_efficient_attn.evaluation import demo
    from hf_efficient_attn.evaluation.benchmark import benchmark_checkpoint
    from hf_efficient_attn.evaluation.comparison import Procedure
    from hf_efficient_attn.evaluation.defaults import default_methods
    from hf_efficient_attn.evaluation.pictures import draw_benchmark
    from hf_efficient_attn.evaluation.timing import use_threads
    from hf_efficient_attn.io.writing import check_picture

    methods, lengths = parse_methods(method or default_methods(purpose="demo"), setting), parse_lengths(length)
    if not methods or (length and not lengths):
        raise UnsupportedAttentionError("the demo needs at least one --method and one --length")
    for tokens in lengths:
        if not _SHORTEST <= tokens <= _LONGEST:
            raise UnsupportedAttentionError(f"a length of {tokens} is not between {_SHORTEST} and {_LONGEST} tokens")
    if plot is not None:
        check_picture(plot)
    procedure = Procedure(rounds=2, memory=False, rows=1, device=parse_device(device))
    report = Report(procedure, is_silent=as_json)
    execution = report.execution(minutes)
    with use_threads(threads):
        result, status = until_interrupted(
            lambda: benchmark_checkpoint(
                demo.minilm_folder(), methods, lengths or _LENGTHS, procedure=procedure, execution=execution
            )
        )
    if plot is not None:
        draw_benchmark(result, plot)
    if as_json:
        print_json(result)
    else:
        report.conclude(result)
        typer.echo(_PURPOSE)
        if plot is not None:
            typer.echo(f"Written: {plot}")
    raise typer.Exit(status)
