"""What all commands share: the application, exit status, errors, tables, common options, and parsing of methods."""

import functools
import importlib.util
import inspect
import io
import json
import os
import pathlib
import pkgutil
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

import hf_efficient_attn
from hf_efficient_attn.errors import UnsupportedAttentionError, did_you_mean

if TYPE_CHECKING:
    import torch

    from hf_efficient_attn.methods import MethodConfig

ResultT = TypeVar("ResultT")
CommandT = TypeVar("CommandT", bound=Callable[..., None])


class _Command(TyperCommand):
    """A command that imports PyTorch and Transformers after its arguments have been checked, so not for --help."""

    package = "hf_efficient_attn._api"

    def invoke(self, ctx: Any) -> Any:
        """Import the libraries, and run the command.

        Until then Ctrl-C ends the process at once; afterwards it raises KeyboardInterrupt, so that drafts of files are
        deleted and partial results are printed.
        """
        if sys.stderr is None or not sys.stderr.isatty():  # huggingface_hub then writes errors only
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
            os.environ.setdefault("HF_HUB_VERBOSITY", "error")
        elif self.package not in sys.modules:
            typer.echo("Loading PyTorch ...", err=True)
        importlib.import_module(self.package)
        if signal.getsignal(signal.SIGINT) is hf_efficient_attn.exit_at_once:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return super().invoke(ctx)


class _MethodsCommand(_Command):
    """A command about methods only, which does without Transformers."""

    package = "hf_efficient_attn.methods"


_import_help = "A Python file that registers a method of your own; repeatable."
_Files = Annotated[list[pathlib.Path], typer.Option("--import", metavar="FILE", show_default=False, help=_import_help)]

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
        @functools.wraps(function)
        def importing(own_files: list[pathlib.Path], **values: Any) -> None:
            for path in own_files:
                if problem := _import_file(path.resolve()):
                    raise UnsupportedAttentionError(f"--import {path}: {problem}")
            function(**values)

        signature = inspect.signature(function)
        option = inspect.Parameter("own_files", inspect.Parameter.KEYWORD_ONLY, default=[], annotation=_Files)
        vars(importing)["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), option])
        importing.__annotations__ = {**function.__annotations__, "own_files": _Files}
        summary = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
        kind = _Command if needs_models else _MethodsCommand
        app.command(cls=kind, short_help=summary, epilog=f"Example: hf-efficient-attn {example}")(importing)
        return function

    return add


def _import_file(file: pathlib.Path) -> str | None:
    """Import a Python file; return what is wrong with it, if it cannot be imported or registers no method."""
    from hf_efficient_attn.methods import available_methods, get_method

    name = file.stem
    if file.suffix != ".py" or not file.is_file() or not name.isidentifier():
        return "give an existing Python file with a name that Python can import, such as my_method.py"
    known = sys.modules.get(name) or importlib.util.find_spec(name)
    origin = getattr(known, "__file__", None) or getattr(known, "origin", None)
    if known is not None and (origin is None or pathlib.Path(origin).resolve() != file):
        return f"another module has the name {name!r}: rename the file"
    if name in sys.modules:
        return None
    before = {method: get_method(method) for method in available_methods()}
    sys.path.append(str(file.parent))  # also for what it imports from its folder; last, so that it hides nothing
    importlib.invalidate_caches()
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 (of the user's code)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        where = f" in line {lines[-1]}" if lines else ""
        return f"it cannot be imported, because of {type(error).__name__}{where}: {error}"
    is_known = all(before.get(method) is get_method(method) for method in available_methods())
    return "it registers no method: it must call hea.register_method" if is_known else None


def complete_methods(incomplete: str) -> list[str]:
    """What a shell can complete the value of an option for methods to; the last one in a list is completed."""
    chosen = incomplete.rpartition(",")[0]
    folder = pathlib.Path(__file__).parents[1] / "methods"  # one module per method; importing them takes seconds
    names = sorted(module.name for module in pkgutil.iter_modules([str(folder)]) if not module.name.startswith("_"))
    return [full for name in names if (full := f"{chosen},{name}" if chosen else name).startswith(incomplete)]


def names_option(text: str) -> Any:
    """An option that takes names of methods, which a shell can complete."""
    return typer.Option(metavar="NAME", show_default=False, help=text, autocompletion=complete_methods)


# What the help texts say about --methods.
DEFAULT_METHODS = "the default methods that support the model; `hf-efficient-attn methods` marks them"

DTYPES = ("float32", "bfloat16", "float16")

_dtypes = f"Dtype of the model: {', '.join(DTYPES)}. [default: that of the checkpoint]"
_minutes = "End after about this time: measure everything a little first, and leave out what is not expected to fit."
_pickle = "Read pytorch_model.bin (weights only) if there are no safetensors."
_place = "Where PyTorch computes, such as cuda, cuda:1 or mps. [default: cpu]"
_settings = "A hyperparameter; method.key=value sets it for one method only."
_setting = "A hyperparameter of the method; repeatable."
_layers = "Layers to convert, by number or name ('encoder'); the others stay exact. [default: all]"
_base = "Hub id of the original model for the card, if SOURCE is a folder."

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="Folder or hub id of a checkpoint.")]
Settings = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help=_settings)]
Threads = Annotated[int | None, typer.Option(metavar="N", min=1, help="Number of threads of PyTorch.")]
Device = Annotated[str | None, typer.Option("--device", metavar="DEVICE", show_default=False, help=_place)]
Dtype = Annotated[str | None, typer.Option("--dtype", metavar="TYPE", show_default=False, help=_dtypes)]
Minutes = Annotated[float | None, typer.Option("--minutes", metavar="X", min=1e-9, help=_minutes)]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help=_pickle)]
# The options of commands that convert a checkpoint.
Output = Annotated[pathlib.Path, typer.Option("--output", "-o", metavar="FOLDER", help="A new folder.")]
MethodSettings = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help=_setting)]
Layers = Annotated[str | None, typer.Option("--layers", metavar="0-5,8", help=_layers)]
BaseModel = Annotated[str | None, typer.Option("--base-model", metavar="ORG/NAME", help=_base)]
ForceFolder = Annotated[bool, typer.Option("--force", help="Replace the output folder if it exists.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def run(application: typer.Typer, arguments: Sequence[str] | None, name: str) -> int:
    """Run a typer application and return its exit status; an expected error becomes one line on stderr."""
    try:
        status = application(args=arguments, prog_name=name, standalone_mode=False)
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
        context, message = getattr(error, "ctx", None), error.format_message().rstrip(".")
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


def until_interrupted(work: Callable[[], ResultT], threads: int | None) -> tuple[ResultT, int]:
    """Do long work that Ctrl-C ends early. Returns the result, or its complete part, and the exit status, 0 or 130.

    `threads` is the value of --threads. `work` raises `evaluation.progress.Interrupted` with the partial result. If
    nothing is complete, the command ends with an error that says so.
    """
    from hf_efficient_attn.evaluation.progress import Interrupted
    from hf_efficient_attn.evaluation.timing import use_threads

    try:
        with use_threads(threads):
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
        torch.ones(1, dtype=torch.float32, device=device).item()
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
    """The text in bold letters, which `typer.echo` writes to a terminal only; the variable NO_COLOR forbids it."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if is_plain else typer.style(text, bold=True)


class LiveTable:
    """A Markdown table that is printed row by row; on a terminal, with a bold header.

    `widths` are the expected widths of the cells; a row with a wider cell is longer than the others. The columns with
    the titles in `left` are aligned to the left, all others to the right, as numbers.
    """

    def __init__(self, headers: Sequence[str], widths: Sequence[int], *, left: Collection[str] = ()) -> None:
        both = zip(headers, widths, strict=True)
        self._columns = [("<" if title in left else ">", max(len(title), width)) for title, width in both]
        self._print(bold(_row(headers, self._columns)))
        self._print(_rule(self._columns))

    def add(self, cells: Sequence[Any]) -> None:
        """Print a row; None is an empty cell."""
        self._print(_row(cells, self._columns))

    def _print(self, line: str) -> None:
        """Print a line to stdout at once, above the progress bars of tqdm."""
        from tqdm import tqdm

        with tqdm.external_write_mode(file=sys.stdout):
            typer.echo(line)


def _row(cells: Sequence[Any], columns: Iterable[tuple[str, int]]) -> str:
    """A line of a table whose columns have the given alignments (< or >) and widths."""
    texts = ["" if cell is None else str(cell) for cell in cells]
    aligned = [f"{text:{sign}{width}}" for text, (sign, width) in zip(texts, columns, strict=True)]
    return f"| {' | '.join(aligned)} |"


def _rule(columns: Iterable[tuple[str, int]]) -> str:
    """The line below the header, which tells Markdown how the columns are aligned."""
    return f"|{'|'.join('-' * (width + 1) + ('-' if sign == '<' else ':') for sign, width in columns)}|"


def table(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table whose columns are aligned to the left; None is an empty cell."""
    texts = [["" if cell is None else str(cell) for cell in line] for line in (headers, *rows)]
    columns = [("<", max(map(len, cells))) for cells in zip(*texts, strict=True)]
    first, *others = (_row(line, columns) for line in texts)
    return "\n".join([first, _rule(columns), *others])


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


def parse_pair(text: str) -> tuple[str, Any]:
    """Parse key=value, the value as `parse_value` does."""
    from hf_efficient_attn.io.json import parse_value

    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UnsupportedAttentionError(f"{text!r} sets no hyperparameter; write key=value")
    return key.strip(), parse_value(value)


def parse_methods(methods: Iterable[str], settings: Iterable[str] = ()) -> "dict[str, MethodConfig]":
    """Parse methods, NAME or NAME:key=value:key=value, repeated or separated by commas: label -> config.

    A setting is method.key=value for one method, or key=value for all methods that have the hyperparameter. An unknown
    method or hyperparameter, and a setting that applies to no method, are refused.
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
        configs.append(make_config(name, **dict(map(parse_pair, pairs))))
    for setting in settings:
        key, value = parse_pair(setting)
        only, dot, key = key.rpartition(".")
        if dot:
            method_info(only)  # refuses unknown names
        matches = [config.method == only if dot else key in config.hyperparameters() for config in configs]
        if not any(matches):
            chosen = ", ".join(dict.fromkeys(config.method for config in configs)) or "none: --set needs --methods"
            names = dict.fromkeys(name for config in configs for name in config.hyperparameters())
            hint = "" if key in names else did_you_mean(key, names) or f" They have: {', '.join(names) or 'none'}."
            raise UnsupportedAttentionError(f"--set {setting}: none of the chosen methods ({chosen}) has it.{hint}")
        both = zip(configs, matches, strict=True)
        configs = [make_config(config, **{key: value}) if is_match else config for config, is_match in both]
    return {method_label(config): config for config in configs}


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=2))
