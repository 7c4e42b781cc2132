"""The option --import of every command: Python files that register methods of the user's own."""

import functools
import importlib.util
import inspect
import pathlib
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from hf_efficient_attn.errors import UnsupportedAttentionError

_help = "A Python file that registers a method of your own; repeatable."
_Files = Annotated[list[pathlib.Path], typer.Option("--import", metavar="FILE", show_default=False, help=_help)]


def with_import(function: Callable[..., None]) -> Callable[..., None]:
    """A command that first imports the files which its option --import names."""

    @functools.wraps(function)
    def command(own_files: list[pathlib.Path], **values: Any) -> None:
        for path in own_files:
            _import(path)
        function(**values)

    signature = inspect.signature(function)
    option = inspect.Parameter("own_files", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=[], annotation=_Files)
    vars(command)["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), option])
    command.__annotations__ = {**function.__annotations__, "own_files": _Files}
    return command


def _import(path: pathlib.Path) -> None:
    """Import a Python file; refuse one that does not exist, cannot be imported, or registers no method."""
    from hf_efficient_attn.methods import available_methods, get_method

    def refuse(problem: str) -> NoReturn:
        raise UnsupportedAttentionError(f"--import {path}: {problem}")

    file, name = path.resolve(), path.stem
    if path.suffix != ".py" or not file.is_file():
        refuse("there is no such file" if not path.exists() else "give a Python file, whose name ends in .py")
    if not name.isidentifier():
        refuse(f"Python cannot import a module with the name {name!r}: rename the file, for example to my_method.py")
    known = sys.modules.get(name) or importlib.util.find_spec(name)
    origin = getattr(known, "__file__", None) or getattr(known, "origin", None)
    if known is not None and (origin is None or pathlib.Path(origin).resolve() != file):
        refuse(f"another module has the name {name!r}: rename the file")
    if name in sys.modules:
        return
    before = {method: get_method(method) for method in available_methods()}
    sys.path.append(str(file.parent))  # also for what it imports from its folder; last, so that it hides nothing
    importlib.invalidate_caches()
    try:
        importlib.import_module(name)
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        where = f" in line {lines[-1]}" if lines else ""
        raise UnsupportedAttentionError(
            f"--import {path}: it cannot be imported, because of {type(error).__name__}{where}: {error}"
        ) from error
    if all(before.get(method) is get_method(method) for method in available_methods()):
        del sys.modules[name]
        refuse("it registers no method: it must call hea.register_method")
