"""What all commands share: the application, exit status, errors, tables, common options, and parsing of methods."""

import dataclasses
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
from typer.core import TyperCommand, TyperGroup

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
        _load(self.package, self.libraries)
        return super().invoke(ctx)

    def get_help(self, ctx: Any) -> str:
        return _bold_titles(super().get_help(ctx))


class _MethodsCommand(_Command):
    """A command about methods only, which does without Transformers."""

    package, libraries = "hf_efficient_attn.methods", "PyTorch"


class _Group(TyperGroup):
    """The command without a subcommand."""

    def get_help(self, ctx: Any) -> str:
        return _bold_titles(super().get_help(ctx))


def _bold_titles(text: str) -> str:
    """Make the titles of a help text bold: "Usage:", "Options:" and so on, which are not indented."""
    return re.sub(r"(?m)^\w+:", lambda title: bold(title[0]), text)


app = typer.Typer(
    name="hf-efficient-attn", cls=_Group, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Sub-quadratic attention for Transformers: the methods, what they gain, and what they cost.",
    epilog="Example: hf-efficient-attn demo --method nearfar --length 512,4096",
)  # fmt: skip


def _load(package: str, libraries: str) -> None:
    """Import a part of this package with the libraries that it needs.

    A terminal shows what it waits for. Until then Ctrl-C ends the process at once; afterwards it raises
    KeyboardInterrupt, so that drafts of files are deleted and partial results are printed.
    """
    is_shown = package not in sys.modules and sys.stderr is not None and sys.stderr.isatty()
    message = f"Loading {libraries} ..."
    if is_shown:
        print(message, end="", file=sys.stderr, flush=True)
    importlib.import_module(package)
    if is_shown:
        print("\r" + " " * len(message), end="\r", file=sys.stderr, flush=True)
    if signal.getsignal(signal.SIGINT) is hf_efficient_attn.exit_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def command(example: str, *, needs_models: bool = True) -> Callable[[CommandT], CommandT]:
    """Add a function as a command of `app`, under its own name, with the option --import besides its own.

    The first paragraph of its docstring is its summary in the list of commands. Modules of commands import only typer,
    `errors` and each other, so that --help is fast; a function imports what it needs.

    Args:
        example: the arguments of the example at the end of its help.
        needs_models: whether it needs more than the methods, that is, Transformers.
    """

    def add(function: CommandT) -> CommandT:
        summary = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
        epilog = f"Example: hf-efficient-attn {example}"
        kind = _Command if needs_models else _MethodsCommand
        app.command(cls=kind, short_help=summary, epilog=epilog)(with_import(function))
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

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="Folder or hub id of a checkpoint.")]
Settings = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="A hyperparameter; method.key=value sets it for one method only."),
]
Threads = Annotated[int | None, typer.Option(metavar="N", min=1, help="Number of threads of PyTorch.")]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        show_default=False,
        help="Where PyTorch computes, such as cuda, cuda:1 or mps. [default: cpu]",
    ),
]
DTYPES = ("float32", "bfloat16", "float16")
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        show_default=False,
        help=f"Dtype of the model: {', '.join(DTYPES)}. [default: that of the checkpoint]",
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option(
        "--minutes",
        metavar="X",
        callback=check_minutes,
        help="End after about this time: leave out measurements that are not expected to fit.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Read pytorch_model.bin (weights only) if there are no safetensors.")
]
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
    except (KeyboardInterrupt, typer.Abort):
        return _complain("interrupted", 130)
    except _NothingCompleteError as error:
        return _complain(str(error), 130)
    except BrokenPipeError:
        _drop_output()  # the reader of the pipe has stopped
        return 1
    except UnsupportedAttentionError as error:
        return _complain(str(error), 2)
    except (OSError, MemoryError) as error:
        _drop_output()
        return _complain(str(error) or "out of memory", 1)
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


class _NothingCompleteError(Exception):
    """The user interrupted long work before any of it was complete; typer would replace a KeyboardInterrupt."""


def until_interrupted(work: Callable[[], ResultT]) -> tuple[ResultT, int]:
    """Do long work that Ctrl-C ends early, so that the command prints and writes what is complete.

    The command then ends with the status, by which `run` says that it was interrupted::

        result, status = until_interrupted(lambda: benchmark_checkpoint(source, methods, lengths))
        show(result)
        raise typer.Exit(status)

    Args:
        work: returns the result, or raises `evaluation.progress.Interrupted` with a partial one.

    Returns:
        the result or the partial result, and the exit status: 0 or 130. If nothing is complete, the command ends with
        an error that says so, and status 130.
    """
    from hf_efficient_attn.evaluation.progress import Interrupted

    try:
        return work(), 0
    except Interrupted as interruption:
        return interruption.result, 130
    except KeyboardInterrupt:
        raise _NothingCompleteError(
            "interrupted before the first measurement was complete: nothing was written"
        ) from None


def parse_device(name: str | None) -> "torch.device":
    """Return the device for the value of --device, cpu if it is None.

    Raises:
        UnsupportedAttentionError: PyTorch does not know the device, or cannot compute on it here.
    """
    import torch

    try:
        device = torch.device("cpu" if name is None else name)
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError):
        found = ["cpu"]
        if torch.accelerator.is_available():
            kind = torch.accelerator.current_accelerator()
            found += [f"{kind}:{index}" for index in range(torch.accelerator.device_count())]
        raise UnsupportedAttentionError(
            f"--device {name}: PyTorch cannot compute there; on this machine it can use {', '.join(found)}"
        ) from None
    return device


def parse_dtype(name: str | None) -> "torch.dtype | None":
    """Return the dtype for the value of --dtype, None if it is None.

    Raises:
        UnsupportedAttentionError: models are not measured in that dtype.
    """
    import torch

    if name is None:
        return None
    if name not in DTYPES:
        raise UnsupportedAttentionError(f"--dtype {name!r} is not one of {', '.join(DTYPES)}")
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def is_styled() -> bool:
    """Whether stdout is a terminal that shows bold text; the environment variable NO_COLOR forbids it."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def bold(text: str) -> str:
    """The text in bold letters on a terminal, and unchanged elsewhere."""
    return typer.style(text, bold=True) if is_styled() else text


class LiveTable:
    """A Markdown table that is printed row by row; on a terminal, with a bold header.

    The header is printed at once. Rows can be added while a tqdm bar is shown on stderr. No cell is cut: a row with a
    cell that is wider than its column is longer than the others.

    Args:
        headers: the titles of the columns.
        widths: the expected width of the cells of each column; a title that is wider makes its column wider.
        left: the titles of the columns of text. They are aligned to the left, all others to the right, as numbers.
    """

    def __init__(self, headers: Sequence[str], widths: Sequence[int], *, left: Collection[str] = ()) -> None:
        self._widths = [max(len(title), width) for title, width in zip(headers, widths, strict=True)]
        self._signs = ["<" if title in left else ">" for title in headers]
        self._print([bold(cell) for cell in self._align(headers)])
        ends = {"<": "-", ">": ":"}
        columns = zip(self._widths, self._signs, strict=True)
        _print_line("|" + "|".join("-" * (width + 1) + ends[sign] for width, sign in columns) + "|")

    def add(self, cells: Sequence[Any]) -> None:
        """Print a row; None is an empty cell."""
        self._print(self._align(["" if cell is None else str(cell) for cell in cells]))

    def _align(self, cells: Sequence[str]) -> list[str]:
        columns = zip(cells, self._signs, self._widths, strict=True)
        return [f"{cell:{sign}{width}}" for cell, sign, width in columns]

    def _print(self, cells: Sequence[str]) -> None:
        _print_line("| " + " | ".join(cells) + " |")


def _print_line(line: str) -> None:
    """Print a line to stdout at once, above the progress bars of tqdm."""
    from tqdm import tqdm

    with tqdm.external_write_mode(file=sys.stdout):
        typer.echo(line)
        if sys.stdout is not None:
            sys.stdout.flush()


_NUMBER = re.compile(r"[<>~]?[-+]?[\d,]*\.?\d+(e[-+]?\d+)?( ?(x|%|s|B|kB|MB|GB|MiB))?")


def print_table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table as `LiveTable` does; columns that contain anything but numbers are aligned to the left."""
    lines = [["" if cell is None else str(cell) for cell in row] for row in rows]
    columns = list(zip(*lines, strict=True)) or [()] * len(headers)
    is_text = [any(cell and not _NUMBER.fullmatch(cell) for cell in column) for column in columns]
    left = [title for title, text in zip(headers, is_text, strict=True) if text]
    live = LiveTable(headers, [max(map(len, column), default=0) for column in columns], left=left)
    for line in lines:
        live.add(line)


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table with aligned columns."""
    lines = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["| " + " | ".join(f"{c:{w}}" for c, w in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([text[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *text[1:]])


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
    """Parse methods and hyperparameters from the command line.

    Args:
        methods: NAME or NAME:key=value:key=value, repeated or separated by commas.
        settings: method.key=value for one method, key=value for all methods that have the hyperparameter.

    Returns:
        label -> config.

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
            raise UnsupportedAttentionError(
                f"{name} is exact attention, with which methods are compared anyway: leave it out"
            )
        configs.append(make_config(name, **dict(map(_parse_pair, pairs))))
    for setting in settings:
        key, value = _parse_pair(setting)
        only, dot, key = key.rpartition(".")
        if dot:
            method_info(only)  # refuses unknown names
        matches = [
            config.method == only if dot else key in {spec.name for spec in dataclasses.fields(config)}
            for config in configs
        ]
        if not any(matches):
            chosen = ", ".join(dict.fromkeys(config.method for config in configs))
            names = dict.fromkeys(name for config in configs for name in config.hyperparameters())
            hint = "" if key in names else did_you_mean(key, names)
            raise UnsupportedAttentionError(f"--set {setting}: none of the chosen methods ({chosen}) has it.{hint}")
        configs = [
            make_config(config, **{key: value}) if is_match else config
            for config, is_match in zip(configs, matches, strict=True)
        ]
    return {method_label(config): config for config in configs}


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=2))
