"""`hf-efficient-attn benchmark`."""

import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_efficient_attn.cli.common import (
    DEFAULT_METHODS,
    AllowPickle,
    Device,
    Dtype,
    Force,
    Json,
    LiveTable,
    Minutes,
    Settings,
    Source,
    Threads,
    command,
    complete_methods,
    parse_device,
    parse_dtype,
    parse_lengths,
    parse_methods,
    print_json,
    until_interrupted,
)
from hf_efficient_attn.errors import UnsupportedAttentionError

if TYPE_CHECKING:
    from hf_efficient_attn.evaluation.comparison import Procedure
    from hf_efficient_attn.evaluation.progress import Execution

# How outputs are compared, for each task.
_AGREEMENT = {
    "embedding": "cosine of the mean-pooled embeddings with those of exact attention",
    "causal-lm": "perplexity divided by that of exact attention",
    "masked-lm": "share of the masked tokens (every seventh) whose best guess is that of exact attention",
    "text-to-text": "share of the decoder's tokens whose most likely successor is that of exact attention",
    "image-classification": "share of the pictures whose first class is that of exact attention",
}
_PERPLEXITY = {
    "causal-lm": "the exponential of the mean loss of the tokens after the first",
    "masked-lm": "the exponential of the mean loss of the masked tokens",
}


@command(
    "benchmark bert-base-uncased --methods nearfar,longformer:window_size=64 "
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
            "up to four times the model's maximum, as far as a minute, or --minutes, allows]",
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
    new_tokens: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="The last N tokens of each length are generated, to measure the speed of generation of a causal "
            "language model; 0 measures none.",
        ),
    ] = 8,
    minutes: Minutes = None,
    threads: Threads = None,
    device: Device = None,
    dtype: Dtype = None,
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
    from hf_efficient_attn.evaluation.benchmark import benchmark_checkpoint
    from hf_efficient_attn.evaluation.comparison import Procedure
    from hf_efficient_attn.evaluation.pictures import draw_benchmark
    from hf_efficient_attn.evaluation.timing import use_threads
    from hf_efficient_attn.hub.card import write_card
    from hf_efficient_attn.io.writing import check_folder, write_results

    if setting and not methods:
        raise UnsupportedAttentionError("--set needs --methods: name the methods that the hyperparameter is for")
    chosen = parse_methods(methods, setting)
    if card and output is not None:
        raise UnsupportedAttentionError("with --card the results are written into SOURCE: leave --output out")
    if card:
        output = _converted_folder(source)
    if output is not None:
        check_folder(output, ("benchmark.json", "benchmark.png"), force=force)
    if new_tokens == 1:
        raise UnsupportedAttentionError("--new-tokens 1: the first token comes with the prompt: give 2 or more, or 0")
    procedure = Procedure(batch, rounds, memory, rows, parse_device(device), parse_dtype(dtype), new_tokens)
    report = Report(procedure, is_silent=as_json)
    with use_threads(threads):
        result, status = until_interrupted(
            lambda: benchmark_checkpoint(
                source,
                chosen or None,
                parse_lengths(lengths) or None,
                data=data,
                procedure=procedure,
                execution=report.execution(minutes),
                allow_pickle=allow_pickle,
            )
        )
    # A published card does not lose its measurements because of Ctrl-C.
    is_kept = card and status != 0
    written: list[pathlib.Path] = []
    if output is not None and not is_kept:
        # The files beside a card are published, and should not name the folder around the checkpoint.
        values = {**result, "source": str(result["source"]).rpartition("/")[2]} if card else result
        written = write_results(values, output, "benchmark", draw_benchmark, force=force)
        written += [write_card(output)] if card else []
    if as_json:
        print_json(result)
    else:
        report.conclude(result)
        for path in written:
            typer.echo(f"Written: {path}")
        if is_kept:
            typer.echo(f"Interrupted: {output} is unchanged.")
    raise typer.Exit(status)


def _converted_folder(source: str) -> pathlib.Path:
    """Return SOURCE as a path if it is the folder of a converted checkpoint, which --card needs."""
    from hf_efficient_attn.io.json import read_json_object

    config = pathlib.Path(source) / "config.json"
    if not config.is_file() or "efficient_attention" not in read_json_object(config):
        raise UnsupportedAttentionError(
            f"--card: {source!r} is not the folder of a converted checkpoint: make one with hf-efficient-attn convert"
        )
    return config.parent


class Report:
    """Prints the rows of a benchmark as they are measured; nothing if it is silent."""

    def __init__(self, procedure: "Procedure", *, is_silent: bool) -> None:
        self._procedure, self._is_silent = procedure, is_silent
        self._table: LiveTable | None = None
        self._columns: list[tuple[str, int, str, str]] = []  # title, width, key and format of the values

    def execution(self, minutes: float | None) -> "Execution":
        """The limit of time together with the functions that print."""
        from hf_efficient_attn.evaluation.progress import Execution

        if self._is_silent:
            return Execution(minutes)
        return Execution(minutes, on_begin=self.begin, on_row=self.add)

    def begin(self, result: dict[str, Any]) -> None:
        """Say what is compared, from what is known before the measurements."""
        from hf_efficient_attn.evaluation.comparison import chunk_label
        from hf_efficient_attn.evaluation.timing import describe

        labels, task = result["labels"], result["task"]
        typer.echo(
            f"{result['source']} on {result['data']['name']}: {', '.join(labels)} against exact attention (sdpa)\n"
            f"{describe(result['machine'])}"
        )
        chunks = [] if result["chunk"] is None else [chunk_label(result["chunk"])]
        self._columns = [
            ("tokens", 6, "length", ""),
            ("attention", max(map(len, ["sdpa", *labels, *chunks])), "attention", ""),
            ("seconds", 7, "seconds", ".3f"),
            ("speed-up", 8, "speed_up", ".2f"),
        ]
        if self._procedure.memory:
            self._columns.append(("MiB", 6, "peak_memory_mib", ".0f"))
        self._columns += [("error", 6, "error", ".3f"), ("output", 6, "output_error", ".3f")]
        if task in _PERPLEXITY:
            self._columns.append(("perplexity", 10, "perplexity", ".5g"))
        # "cosine", "ratio" (of perplexities) or "top1".
        self._columns.append((result["agreement"].removeprefix("perplexity_"), 6, "agreement", ".4f"))
        if task == "causal-lm" and self._procedure.new_tokens > 1:
            self._columns += [
                ("first tok", 9, "first_token_seconds", ".3f"),
                ("tok/s", 6, "tokens_per_second", ".1f"),
            ]

    def add(self, row: dict[str, Any]) -> None:
        """Print a row of "measurements"."""
        if self._table is None:
            typer.echo()
            titles, widths, *_ = zip(*self._columns, strict=True)
            self._table = LiveTable(titles, widths, left=["attention"])
        self._table.add(
            [
                None if row[key] is None else format(row[key], form) + "x" * (key == "speed_up")
                for _, _, key, form in self._columns
            ]
        )

    def conclude(self, result: dict[str, Any]) -> None:
        """Explain the columns of the table, and say what follows from it."""
        task, rows = result["task"], result["data"]["rows"]
        inputs = f"{rows} input{'s' * (rows > 1)} of {result['data']['name']}"
        batch = result["measurements"][0]["batch"]
        of_batch = f" of {batch} inputs" if batch > 1 else ""
        meanings = {
            "seconds": f"seconds: median of the forward passes{of_batch}. speed-up: over exact attention in passes "
            "before and after, median.",
            "peak_memory_mib": "MiB: peak of PyTorch's memory in a pass, without model and inputs.",
            "error": "error: relative operator norm of the error of a layer's attention, averaged over heads and "
            "layers.",
            "output_error": "output: relative error of the model's last hidden states (Frobenius norm), through all "
            "layers.",
            "perplexity": f"perplexity: {_PERPLEXITY.get(task)}.",
            "agreement": f"{result['agreement'].removeprefix('perplexity_')}: {_AGREEMENT[task]}, over {inputs}.",
            "tokens_per_second": "first tok: seconds to the first generated token. tok/s: tokens per second after it, "
            f"with a cache{of_batch and ', all inputs together'}. The new tokens are the last ones of the length.",
        }
        explained = [meanings[key] for *_, key, _ in self._columns if key in meanings]
        sentences = [*result["notes"], *result["summary"], result["recommendation"]]
        typer.echo("\n".join(["", *explained, "", *filter(None, sentences)]))
