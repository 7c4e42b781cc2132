"""`hf-efficient-attn benchmark`."""

import pathlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_efficient_attn.cli import common
from hf_efficient_attn.errors import UnsupportedAttentionError

if TYPE_CHECKING:
    from hf_efficient_attn.evaluation.comparison import Procedure

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

_data = (
    'A text (.txt, .jsonl with "text", or gzipped), or a folder of texts; or a folder or zip file of pictures. '
    "Repeatable: inputs come from all texts in turn."
)
_methods = (
    "NAME or NAME:key=value; repeated or separated by commas. [default: the method of a converted checkpoint, or else "
    f"{common.DEFAULT_METHODS}]"
)
_lengths = (
    "Numbers of tokens; repeated or separated by commas. Pictures are resized to about as many. [default: up to four "
    "times the model's maximum, as far as a minute, or --minutes, allows]"
)
_rows = "Inputs on which the agreement is measured, a multiple of --batch. [default: 4 texts, 32 pictures]"
_new_tokens = (
    "The last N tokens of each length are generated, to measure the speed of generation of a causal language model; 0 "
    "measures none."
)
_card = "Write them into SOURCE, a converted folder, and update its model card."

Data = Annotated[list[pathlib.Path], typer.Option("--data", metavar="FILE", help=_data)]


@common.command(
    "benchmark bert-base-uncased --methods nearfar,longformer:window_size=64 "
    "--lengths 512,2048,8192 --data book.txt --output measured"
)
def benchmark(
    source: common.Source,
    methods: Annotated[list[str], common.names_option(_methods)] = [],  # noqa: B006 (typer copies it)
    lengths: Annotated[list[str], typer.Option(metavar="N", show_default=False, help=_lengths)] = [],  # noqa: B006
    setting: common.Settings = [],  # noqa: B006
    data: Annotated[list[pathlib.Path], typer.Option(metavar="FILE", show_default=False, help=_data)] = [],  # noqa: B006
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Inputs of a forward pass.")] = 1,
    rows: Annotated[int | None, typer.Option(metavar="N", min=1, show_default=False, help=_rows)] = None,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Measurements of each time.")] = 3,
    new_tokens: Annotated[int, typer.Option(metavar="N", min=0, help=_new_tokens)] = 8,
    minutes: common.Minutes = None,
    threads: common.Threads = None,
    device: common.Device = None,
    dtype: common.Dtype = None,
    memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Measure memory.")] = True,
    output: Annotated[
        pathlib.Path | None, typer.Option(metavar="FOLDER", help="Write benchmark.json and benchmark.png there.")
    ] = None,
    card: Annotated[bool, typer.Option("--card", help=_card)] = False,
    force: common.Force = False,
    allow_pickle: common.AllowPickle = False,
    as_json: common.Json = False,
) -> None:
    """Measure time, memory and error of methods in a model, and the length from which on they pay off."""
    from hf_efficient_attn.evaluation.comparison import Procedure
    from hf_efficient_attn.evaluation.pictures import draw_benchmark
    from hf_efficient_attn.hub.card import Facts, make_card, write_card
    from hf_efficient_attn.io.writing import check_folder, write_results

    given = source, common.parse_methods(methods, setting) or None, common.parse_lengths(lengths) or None
    if card and output is not None:
        raise UnsupportedAttentionError("with --card the results are written into SOURCE: leave --output out")
    output = Facts(source).folder if card else output
    if output is not None:
        check_folder(output, ("benchmark.json", "benchmark.png"), force=force)
        if card:
            make_card(output)  # refuses a README.md that cannot be kept before the work
    if rows is not None and rows % batch:
        raise UnsupportedAttentionError(f"--rows {rows} is not a number of whole batches: give a multiple of {batch}")
    if new_tokens == 1:
        raise UnsupportedAttentionError("--new-tokens 1: the first token comes with the prompt: give 2 or more, or 0")
    place, kind = common.parse_device(device), common.parse_dtype(dtype)
    report = Report(Procedure(batch, rounds, memory, rows, place, kind, new_tokens), is_silent=as_json)
    result, status = report.run(minutes, threads, *given, data=data, allow_pickle=allow_pickle)
    # A published card does not lose its measurements because of Ctrl-C.
    is_kept = card and status != 0
    written: list[pathlib.Path] = []
    if output is not None and not is_kept:
        # The files beside a card are published, and should not name the folder around the checkpoint.
        values = {**result, "source": str(result["source"]).rpartition("/")[2]} if card else result
        written = write_results(values, output, "benchmark", draw_benchmark, force=force)
        written += [write_card(output)] if card else []
    report.conclude(
        result, *(f"Written: {path}" for path in written), *[f"Interrupted: {output} is unchanged."] * is_kept
    )
    raise typer.Exit(status)


class Report:
    """Prints the rows of a benchmark as they are measured, and then what they mean; if it is silent, only JSON."""

    def __init__(self, procedure: "Procedure", *, is_silent: bool) -> None:
        self.procedure, self._is_silent = procedure, is_silent
        self._columns: list[tuple[str, int, str, str]] = []  # title, width, key and format of the values
        self._num_rows = 0  # that are printed

    def run(self, minutes: float | None, threads: int | None, *given: Any, **options: Any) -> tuple[Any, int]:
        """The result of `benchmark_checkpoint` within a limit of time, whose rows are printed, and the exit status."""
        from hf_efficient_attn.evaluation.benchmark import benchmark_checkpoint
        from hf_efficient_attn.evaluation.progress import Execution

        printed = () if self._is_silent else (self.add, self.begin)
        options |= {"procedure": self.procedure, "execution": Execution(minutes, *printed)}
        return common.until_interrupted(lambda: benchmark_checkpoint(*given, **options), threads)

    def begin(self, result: dict[str, Any]) -> None:
        """Say what is compared, from what is known before the measurements."""
        from hf_efficient_attn.evaluation.comparison import chunk_label
        from hf_efficient_attn.evaluation.timing import describe

        labels, task = result["labels"], result["task"]
        methods = f"{', '.join(labels)} against exact attention (sdpa)"
        typer.echo(f"{result['source']} on {result['data']['name']}: {methods}\n{describe(result['machine'])}\n")
        chunks = [] if result["chunk"] is None else [chunk_label(result["chunk"])]
        # "cosine", "ratio" (of perplexities) or "top1".
        self._agreement = str(result["agreement"]).removeprefix("perplexity_")
        columns = [
            ("tokens", 6, "length", "{}"),
            ("attention", max(map(len, ["sdpa", *labels, *chunks])), "attention", "{}"),
            ("seconds", 7, "seconds", "{:.3f}"),
            ("speed-up", 8, "speed_up", "{:.2f}x"),
            ("MiB", 6, "peak_memory_mib", "{:.0f}"),
            ("error", 6, "error", "{:.3f}"),
            ("output", 6, "output_error", "{:.3f}"),
            ("perplexity", 10, "perplexity", "{:.5g}"),
            (self._agreement, 6, "agreement", "{:.4f}"),
            ("first tok", 9, "first_token_seconds", "{:.3f}"),
            ("tok/s", 6, "tokens_per_second", "{:.1f}"),
        ]
        absent = set() if self.procedure.memory else {"peak_memory_mib"}
        absent |= set() if self.procedure.errors else {"error"}
        absent |= set() if task in _PERPLEXITY else {"perplexity"}
        if task != "causal-lm" or self.procedure.new_tokens < 2:
            absent |= {"first_token_seconds", "tokens_per_second"}
        self._columns = [column for column in columns if column[2] not in absent]
        titles, widths, *_ = zip(*self._columns, strict=True)
        self._table = common.LiveTable(titles, widths, left=["attention"])

    def add(self, row: dict[str, Any]) -> None:
        """Print a row of "measurements"."""
        self._num_rows += 1
        self._table.add([None if row[key] is None else form.format(row[key]) for *_, key, form in self._columns])

    def conclude(self, result: dict[str, Any], *more: str) -> None:
        """Explain the columns of the table, and say what follows from it, and some more; or print JSON."""
        if self._is_silent:
            common.print_json(result)
            return
        task, rows = result["task"], result["data"]["rows"]
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
            "agreement": f"{self._agreement}: {_AGREEMENT[task]}, over {rows} input{'s' * (rows > 1)} of "
            f"{result['data']['name']}.",
            "tokens_per_second": "first tok: seconds to the first generated token. tok/s: tokens per second after it, "
            f"with a cache{of_batch and ', all inputs together'}. The new tokens are the last ones of the length.",
        }
        explained = [meanings[key] for *_, key, _ in self._columns if key in meanings]
        if self._num_rows > len(result["measurements"]):
            explained.append("Of two rows for the same tokens and attention, the later one counts.")
        sentences = [*result["notes"], *result["summary"], result["recommendation"], *more]
        typer.echo("\n".join(["", *explained, "", *filter(None, sentences)]))
