"""What all commands share: the application, exit status, errors, tables, common options, and parsing of methods."""

import importlib
import inspect
import io
import json
import os
import pathlib
import pkgutil
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

import hf_efficient_attn
from hf_efficient_attn.cli.own_files import with_import
from hf_efficient_attn.errors import UnsupportedAttentionError, did_you_mean

if TYPE_CHECKING:
    import torch

    from hf_efficient_attn.methods import MethodConfig

ResultT = TypeVar("ResultT")
CommandT = TypeVar("CommandT", bound=Callable[..., None])


class _Command(TyperCommand):
    """A command that imports PyTorch and Transformers after its arguments have been checked, so not for --help."""

    package, libraries = "hf_efficient_attn._api", "PyTorch and Transformers"

    def invoke(self, ctx: Any) -> Any:
        """Import the libraries, and run the command.

        A terminal shows what it waits for. Until then Ctrl-C ends the process at once; afterwards it raises
        KeyboardInterrupt, so that drafts of files are deleted and partial results are printed.
        """
        message = f"Loading {self.libraries} ..."
        is_shown = self.package not in sys.modules and sys.stderr is not None and sys.stderr.isatty()
        if is_shown:
            print(message, end="", file=sys.stderr, flush=True)
        importlib.import_module(self.package)
        if is_shown:
            print("\r" + " " * len(message), end="\r", file=sys.stderr, flush=True)
        if signal.getsignal(signal.SIGINT) is hf_efficient_attn.exit_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return super().invoke(ctx)


class _MethodsCommand(_Command):
    """A command about methods only, which does without Transformers."""

    package, libraries = "hf_efficient_attn.methods", "PyTorch"


app = typer.Typer(
    name="hf-efficient-attn", rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Sub-quadratic attention for Transformers: the methods, what they gain, and what they cost.",
    epilog="Example: hf-efficient-attn demo --method nearfar --length 512,4096",
)  # fmt: skip


def command(example: str, *, needs_models: bool = True) -> Callable[[CommandT], CommandT]:
    """Add a function as a command of `app`, under its own name, with the option --import besides its own.

    The first paragraph of its docstring is its summary in the list of commands, and `example` has the arguments of the
    example at the end of its help. Modules of commands import only typer, `errors` and each other, so that --help is
    fast; a function imports what it needs. `needs_models` says whether that is more than the methods: Transformers.
    """

    def add(function: CommandT) -> CommandT:
        summary = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
        kind = _Command if needs_models else _MethodsCommand
        app.command(cls=kind, short_help=summary, epilog=f"Example: hf-efficient-attn {example}")(with_import(function))
        return function

    return add


def complete_methods(incomplete: str) -> list[str]:
    """What a shell can complete the value of an option for methods to; the last one in a list is completed."""
    chosen = incomplete.rpartition(",")[0]
    folder = pathlib.Path(__file__).parents[1] / "methods"  # one module per method; importing them takes seconds
    names = sorted(module.name for module in pkgutil.iter_modules([str(folder)]) if not module.name.startswith("_"))
    return [full for name in names if (full := f"{chosen},{name}" if chosen else name).startswith(incomplete)]


def check_minutes(value: float | None) -> float | None:
    """Refuse a limit of time that is not a positive number."""
    if value is not None and not 0 < value < float("inf"):
        raise typer.BadParameter(f"{value} is not a positive number of minutes.")
    return value


# What the help texts say about --methods.
DEFAULT_METHODS = "the default methods that support the model; `hf-efficient-attn methods` marks them"

DTYPES = ("float32", "bfloat16", "float16")

_dtypes = f"Dtype of the model: {', '.join(DTYPES)}. [default: that of the checkpoint]"
_minutes = "End after about this time: leave out measurements that are not expected to fit."
_pickle = "Read pytorch_model.bin (weights only) if there are no safetensors."
_place = "Where PyTorch computes, such as cuda, cuda:1 or mps. [default: cpu]"
_settings = "A hyperparameter; method.key=value sets it for one method only."

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="Folder or hub id of a checkpoint.")]
Settings = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help=_settings)]
Threads = Annotated[int | None, typer.Option(metavar="N", min=1, help="Number of threads of PyTorch.")]
Device = Annotated[str | None, typer.Option("--device", metavar="DEVICE", show_default=False, help=_place)]
Dtype = Annotated[str | None, typer.Option("--dtype", metavar="TYPE", show_default=False, help=_dtypes)]
Minutes = Annotated[float | None, typer.Option("--minutes", metavar="X", callback=check_minutes, help=_minutes)]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help=_pickle)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def run(application: typer.Typer, arguments: Sequence[str] | None, name: str) -> int:
    """Run a typer application and return its exit status; an expected error becomes one line on stderr."""
    try:
        status = application(args=arguments, prog_name=name, standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
        if status == 130:  # Ctrl-C; older versions of typer raise Abort
            raise typer.Abort
        return status if isinstance(status, int) else 0
    except (KeyboardInterrupt, typer.Abort) as error:
        return _complain(str(error) or "interrupted", 130)
    except UnsupportedAttentionError as error:
        return _complain(str(error), 2)
    except (OSError, MemoryError) as error:
        _drop_output()
        # The reader of a closed pipe has stopped, which is no error.
        return 1 if isinstance(error, BrokenPipeError) else _complain(str(error) or "out of memory", 1)
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's exceptions for an invalid command line have it
            raise
        context = getattr(error, "ctx", None)
        message = error.format_message().rstrip(".")
        if message.startswith("No such option") and (context is None or context.parent is None):
            message += "; options other than --help and --version come after the name of a command"
        end = "" if message.endswith("?") else "."
        return _complain(f"{message}{end} Try: {context.command_path if context else name} --help", 2)


def _drop_output() -> None:
    """Discard output that cannot be written; otherwise Python reports it again when the process ends."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str, status: int) -> int:
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    return status


def main_of(application: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> None:
    """Run a typer application and end the process with its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # for names that the terminal's encoding does not have
    sys.exit(run(application, arguments, name))


def until_interrupted(work: Callable[[], ResultT]) -> tuple[ResultT, int]:
    """Do long work that Ctrl-C ends early, so that the command prints and writes what is complete.

    `work` raises `evaluation.progress.Interrupted` with the partial result. The command shows the result and ends with
    `typer.Exit(status)`, by which `run` says that it was interrupted.

    Returns:
        The result or the partial result, and the exit status: 0 or 130. If nothing is complete, the command ends with
        an error that says so, and status 130.
    """
    from hf_efficient_attn.evaluation.progress import Interrupted

    try:
        return work(), 0
    except Interrupted as interruption:
        return interruption.result, 130
    except KeyboardInterrupt:
        raise typer.Abort("interrupted before the first measurement was complete: nothing was written") from None


def parse_device(name: str | None) -> "torch.device":
    """Return the device for the value of --device, cpu if it is None; refuse one on which PyTorch cannot compute."""
    import torch

    try:
        device = torch.device("cpu" if name is None else name)
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError):
        kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        usable = ["cpu", *(f"{kind}:{index}" for index in range(torch.accelerator.device_count() if kind else 0))]
        raise UnsupportedAttentionError(
            f"--device {name}: PyTorch cannot compute there; on this machine it can use {', '.join(usable)}"
        ) from None
    return device


def parse_dtype(name: str | None) -> "torch.dtype | None":
    """Return the dtype for the value of --dtype, None if it is None; refuse one in which models are not measured."""
    import torch

    if name is not None and name not in DTYPES:
        raise UnsupportedAttentionError(f"--dtype {name!r} is not one of {', '.join(DTYPES)}")
    return None if name is None else getattr(torch, name)


def bold(text: str) -> str:
    """The text in bold letters on a terminal, and unchanged elsewhere; the environment variable NO_COLOR forbids it."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    is_styled = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return typer.style(text, bold=True) if is_styled else text


class LiveTable:
    """A Markdown table that is printed row by row; on a terminal, with a bold header.

    The header is printed at once. Rows can be added while a tqdm bar is shown on stderr. `widths` are the expected
    widths of the cells. A wider title makes its column wider; a row with a wider cell is longer than the others. The
    columns with the titles in `left` are aligned to the left, all others to the right, as numbers.
    """

    def __init__(self, headers: Sequence[str], widths: Sequence[int], *, left: Collection[str] = ()) -> None:
        self._columns = [
            ("<" if title in left else ">", max(len(title), width))
            for title, width in zip(headers, widths, strict=True)
        ]
        _print_line(_row(headers, self._columns, bold))
        _print_line(_rule(self._columns))

    def add(self, cells: Sequence[Any]) -> None:
        """Print a row; None is an empty cell."""
        _print_line(_row(cells, self._columns))


def _row(cells: Sequence[Any], columns: Iterable[tuple[str, int]], style: Callable[[str], str] = str) -> str:
    """A line of a table whose columns have the given alignments (< or >) and widths."""
    texts = ["" if cell is None else str(cell) for cell in cells]
    aligned = [f"{text:{sign}{width}}" for text, (sign, width) in zip(texts, columns, strict=True)]
    return f"| {' | '.join(map(style, aligned))} |"


def _rule(columns: Iterable[tuple[str, int]]) -> str:
    """The line below the header, which tells Markdown how the columns are aligned."""
    return f"|{'|'.join('-' * (width + 1) + ('-' if sign == '<' else ':') for sign, width in columns)}|"


def _print_line(line: str) -> None:
    """Print a line to stdout at once, above the progress bars of tqdm."""
    from tqdm import tqdm

    with tqdm.external_write_mode(file=sys.stdout):
        typer.echo(line)
        if sys.stdout is not None:
            sys.stdout.flush()


_NUMBER = re.compile(r"[<>~]?[-+]?[\d,]*\.?\d+(e[-+]?\d+)?( ?(x|%|s|B|kB|MB|GB|MiB))?")


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]], *, is_printed: bool = False) -> str:
    """A Markdown table with aligned columns; `print_table` aligns numbers to the right and makes the header bold."""
    lines, columns = list(rows), []
    for title, *cells in zip(headers, *lines, strict=True):
        texts = ["" if cell is None else str(cell) for cell in cells]
        are_numbers = is_printed and texts and all(_NUMBER.fullmatch(text) for text in texts if text)
        columns.append((">" if are_numbers else "<", max(map(len, [title, *texts]))))
    header = _row(headers, columns, bold if is_printed else str)
    return "\n".join([header, _rule(columns), *(_row(line, columns) for line in lines)])


def print_table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table whose numbers are aligned to the right, on a terminal with a bold header."""
    typer.echo(table(headers, rows, is_printed=True))


def split_list(values: Iterable[str]) -> list[str]:
    """The values of an option that can be repeated and can contain comma-separated lists."""
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def parse_lengths(values: Iterable[str]) -> list[int]:
    """Parse positive integers from repeated options and comma-separated lists, without duplicates."""
    lengths = []
    for text in split_list(values):
        if not text.isdecimal() or len(text) > 20 or int(text) < 1:
            raise UnsupportedAttentionError(f"{text!r} is not a number of tokens; give integers such as 512,4096")
        lengths.append(int(text))
    return list(dict.fromkeys(lengths))


def parse_layers(text: str) -> "list[int | str]":
    """Parse the value of --layers: "0-2,8" becomes [0, 1, 2, 8]; see `integration.layers.parse_layers`."""
    from hf_efficient_attn.integration.layers import parse_layers

    return parse_layers(text)


def _parse_pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UnsupportedAttentionError(f"{text!r} sets no hyperparameter; write key=value")
    try:
        # JSON has no numbers such as .05.
        return key.strip(), float(value) if value.lstrip("+-").startswith(".") else json.loads(value)
    except ValueError:
        return key.strip(), value


def parse_methods(methods: Iterable[str], settings: Iterable[str] = ()) -> "dict[str, MethodConfig]":
    """Parse methods, NAME or NAME:key=value:key=value, repeated or separated by commas: label -> config.

    A setting is method.key=value for one method, or key=value for all methods that have the hyperparameter.

    Raises:
        UnsupportedAttentionError: an unknown method or hyperparameter, or a setting that applies to no method.
    """
    from hf_efficient_attn.evaluation.defaults import method_label
    from hf_efficient_attn.integration.settings import EXACT_IMPLEMENTATIONS
    from hf_efficient_attn.methods import make_config, method_info

    configs = []
    for text in split_list(methods):
        name, *pairs = text.split(":")
        if name in EXACT_IMPLEMENTATIONS:
            why = "is exact attention, with which methods are compared anyway: leave it out"
            raise UnsupportedAttentionError(f"{name} {why}")
        configs.append(make_config(name, **dict(map(_parse_pair, pairs))))
    for setting in settings:
        key, value = _parse_pair(setting)
        only, dot, key = key.rpartition(".")
        if dot:
            method_info(only)  # refuses unknown names
        matches = [config.method == only if dot else key in config.hyperparameters() for config in configs]
        if not any(matches):
            chosen = ", ".join(dict.fromkeys(config.method for config in configs))
            names = dict.fromkeys(name for config in configs for name in config.hyperparameters())
            hint = "" if key in names else did_you_mean(key, names)
            raise UnsupportedAttentionError(f"--set {setting}: none of the chosen methods ({chosen}) has it.{hint}")
        both = zip(configs, matches, strict=True)
        configs = [make_config(config, **{key: value}) if is_match else config for config, is_match in both]
    return {method_label(config): config for config in configs}


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=2))
