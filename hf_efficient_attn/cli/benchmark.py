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
    from hf_efficient_attn.evaluation.progress import Execution

# How outputs are compared, for each task.
_AGREEMENT = {
    "embedding": "cosine of the mean-pooled embeddings with those of exact attention",
    "causal-lm": "perplexity divided by that of exact attention",
    "masked-lm": "share of the masked tokens (every seventh) whose best guess is that of exact attention",
    "text-to-text": "share of the decoder's tokens whose most likely successor is that of exact attention",
    "speech-to-text": "share of the decoder's tokens whose most likely successor is that of exact attention",
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
            "up to four times the model's maximum, as far as a minute, or --minutes, allows; for speech the only "
            "length that the model takes]",
        ),
    ] = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    data: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help='Text (.txt, .jsonl with "text", or gzipped), a folder or zip file of pictures, or for a model of '
            "speech a .wav file or a folder of them.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Inputs of a forward pass.")] = 1,
    rows: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            show_default=False,
            help="Inputs on which the agreement is measured. [default: 4 texts or excerpts of recordings, 32 pictures]",
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
    from hf_efficient_attn.evaluation.benchmark import benchmark_checkpoint, output_folder, write_benchmark
    from hf_efficient_attn.evaluation.comparison import Procedure
    from hf_efficient_attn.evaluation.timing import use_threads

    if setting and not methods:
        raise UnsupportedAttentionError("--set needs --methods: name the methods that the hyperparameter is for")
    chosen = parse_methods(methods, setting)
    folder = output_folder(source, output, card=card, force=force)
    procedure = Procedure(batch, rounds, memory, rows, parse_device(device), parse_dtype(dtype), new_tokens)
    if new_tokens == 1:
        raise UnsupportedAttentionError("--new-tokens 1: the first token comes with the prompt: give 2 or more, or 0")
    report = Report(is_silent=as_json, with_memory=memory, with_generation=new_tokens > 1)
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
    is_written = folder is not None and (status == 0 or not card)
    written = write_benchmark(result, folder, card=card, force=force) if folder is not None and is_written else []
    if as_json:
        print_json(result)
    else:
        report.conclude(result)
        for path in written:
            typer.echo(f"Written: {path}")
        if folder is not None and not is_written:
            typer.echo(f"Interrupted: {folder} is unchanged.")
    raise typer.Exit(status)


class Report:
    """Prints the rows of a benchmark as they are measured, and before them the estimate.

    Args:
        is_silent: whether to print nothing, for --json.
        with_memory: whether memory is measured.
        with_generation: whether the speed of generation is measured, if the model is a causal language model.

    Attributes:
        result: what is known before the measurements.
        label_width: of the longest label.
    """

    def __init__(self, *, is_silent: bool, with_memory: bool, with_generation: bool = False) -> None:
        self.is_silent, self._with_memory, self._with_generation = is_silent, with_memory, with_generation
        self._table: LiveTable | None = None
        self._is_explained = False
        self.result: dict[str, Any] = {}
        self.label_width = 0
        self._batch = 1

    def execution(self, minutes: float | None) -> "Execution":
        """The limit of time together with the functions that print."""
        from hf_efficient_attn.evaluation.progress import Execution

        if self.is_silent:
            return Execution(minutes)
        return Execution(minutes, on_begin=self.begin, on_estimate=typer.echo, on_row=self.add)

    def begin(self, result: dict[str, Any]) -> None:
        """Say what is compared."""
        from hf_efficient_attn.evaluation.comparison import chunk_label
        from hf_efficient_attn.evaluation.timing import describe

        labels = result["labels"]
        typer.echo(
            f"{result['source']} on {result['data']['name']}: {', '.join(labels)} against exact attention (sdpa)\n"
            f"{describe(result['machine'])}"
        )
        more = [] if result["chunk"] is None else [chunk_label(result["chunk"])]
        self.result, self.label_width = result, max(map(len, ["sdpa", *labels, *more]))

    def add(self, row: dict[str, Any]) -> None:
        """Print a row of "measurements"."""
        if self._table is None:
            typer.echo()
            headers = ["tokens", "attention", "seconds", "speed-up", *self._memory("MiB"), "error", "output"]
            headers += [*self._perplexity("perplexity"), self._agreement, *self._generation("first tok", "tok/s")]
            widths = [
                6,
                self.label_width,
                7,
                8,
                *self._memory(6),
                6,
                6,
                *self._perplexity(10),
                6,
                *self._generation(9, 6),
            ]
            self._table = LiveTable(headers, widths, left=["attention"])
        self._batch = row["batch"]
        cells = [row["length"], row["attention"], f"{row['seconds']:.3f}", f"{row['speed_up']:.2f}x"]
        cells += [*self._memory(_number(row["peak_memory_mib"], ".0f")), _number(row["error"], ".3f")]
        cells.append(_number(row["output_error"], ".3f"))
        cells += self._perplexity(_number(row["perplexity"], ".5g"))
        cells.append(_number(row["agreement"], ".4f"))
        cells += self._generation(_number(row["first_token_seconds"], ".3f"), _number(row["tokens_per_second"], ".1f"))
        self._table.add(cells)

    def _memory(self, value: Any) -> list[Any]:
        """A cell in the column of the memory, if there is one."""
        return [value] if self._with_memory else []

    def _perplexity(self, value: Any) -> list[Any]:
        """A cell in the column of the perplexity, if there is one."""
        return [value] if self.result["task"] in _PERPLEXITY else []

    def _generation(self, *values: Any) -> list[Any]:
        """The cells in the columns of the speed of generation, if there are such columns."""
        return list(values) if self._with_generation and self.result["task"] == "causal-lm" else []

    @property
    def _agreement(self) -> str:
        """The title of the last column: "cosine", "ratio" (of perplexities) or "top1"."""
        return str(self.result["agreement"]).removeprefix("perplexity_")

    def explain(self) -> None:
        """Explain the columns of the table, once."""
        if self._is_explained:
            return
        self._is_explained = True
        data, rows = self.result["data"]["name"], self.result["data"]["rows"]
        inputs = f"{rows} input{'s' * (rows > 1)} of {data}"
        of_batch = f" of {self._batch} inputs" if self._batch > 1 else ""
        lines = [
            f"seconds: median of the forward passes{of_batch}. "
            "speed-up: over exact attention in passes before and after, median.",
            *self._memory("MiB: peak of PyTorch's memory in a pass, without model and inputs."),
            "error: relative operator norm of the error of a layer's attention, averaged over heads and layers.",
            "output: relative error of the model's last hidden states (Frobenius norm), through all layers.",
            *self._perplexity(f"perplexity: {_PERPLEXITY.get(self.result['task'])}."),
            f"{self._agreement}: {_AGREEMENT[self.result['task']]}, over {inputs}.",
            *self._generation(
                "first tok: seconds to the first generated token. tok/s: tokens per second after it, with a cache"
                f"{of_batch and ', all inputs together'}. The new tokens are the last ones of the length."
            ),
        ]
        typer.echo("\n" + "\n".join(lines))

    def conclude(self, result: dict[str, Any]) -> None:
        """Explain the table, and say what follows from it."""
        self.explain()
        typer.echo()
        for sentence in [*result["notes"], *result["summary"], result["recommendation"]]:
            if sentence is not None:
                typer.echo(sentence)


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)
