"""Checks of where commands write their results, made before the work, and atomic writing of the results."""

import contextlib
import importlib.util
import itertools
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from safetensors import SafetensorError

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.io.json import write_json


def check_drawing() -> None:
    """Check that figures can be drawn; raise `UnsupportedAttentionError` if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedAttentionError("drawing needs matplotlib: pip install matplotlib")


def check_picture(path: pathlib.Path) -> None:
    """Refuse a path to which no figure can be written, such as one with a format that matplotlib does not know."""
    check_drawing()
    from matplotlib.backend_bases import FigureCanvasBase  # an optional dependency

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in known:
        raise UnsupportedAttentionError(f"cannot draw to {str(path)!r}: its name must end in one of {', '.join(known)}")
    check_writable(path)


def check_writable(path: pathlib.Path) -> None:
    """Check that a file can be written to a path; raise `UnsupportedAttentionError` if not."""
    if path.is_dir():
        raise UnsupportedAttentionError(f"cannot write {str(path)!r}: it is a folder")
    if not path.parent.is_dir():
        raise UnsupportedAttentionError(f"cannot write {str(path)!r}: its folder must exist")
    check_takes_files(path.parent, repr(str(path)))


def check_takes_files(folder: pathlib.Path, what: str) -> None:
    """Refuse a folder in which no file can be made, by making one; `what` would be written there.

    Of a folder that does not exist yet, the first of its parents that exists is tried.
    """
    absolute = folder.absolute()
    anchor = next(path for path in (absolute, *absolute.parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=anchor):  # permissions alone do not tell: a whole disk can be read-only
            pass
    except OSError as error:
        raise UnsupportedAttentionError(
            f"cannot write {what}: no file can be made in {anchor} ({error.strerror or error}): give another folder"
        ) from error


def check_folder(folder: pathlib.Path, names: Sequence[str], *, force: bool) -> None:
    """Refuse a folder into which the files `names` and figures cannot be written. It is made later if necessary.

    Its parent must exist. Without `force` the files must not exist.
    """
    for name in names:
        if (folder / name).exists() and not force:
            raise UnsupportedAttentionError(f"{folder / name} exists already: give --force to replace it")
        if (folder / name).is_dir():
            raise UnsupportedAttentionError(f"cannot write {str(folder / name)!r}: it is a folder")
    if folder.exists() and not folder.is_dir():
        raise UnsupportedAttentionError(f"{folder} is not a folder")
    if not folder.absolute().parent.is_dir():
        raise UnsupportedAttentionError(f"cannot make the folder {folder}: {folder.absolute().parent} does not exist")
    check_takes_files(folder, " and ".join(names[:2]))
    check_drawing()


@contextlib.contextmanager
def naming_errors(what: str, remark: str = "") -> Iterator[None]:
    """Let errors of writing say what could not be written: those about a full disk name nothing."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # the latter contains errors of the system, as text
        raise OSError(f"{what} cannot be written: {error}{remark}") from error


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Replace a file as a whole, or not at all.

    Yields a temporary file beside it. When the `with` block ends it is renamed to `path`; after an error it is deleted.
    """
    draft = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        with naming_errors(str(path)):
            yield draft
            os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def write_results(
    result: Mapping[str, Any] | Callable[[pathlib.Path], Mapping[str, Any]],
    folder: pathlib.Path,
    name: str,
    draw: Callable[[Mapping[str, Any], pathlib.Path], None],
    *,
    force: bool = True,
) -> list[pathlib.Path]:
    """Write measurements and a figure of them to `name`.json and `name`.png in a folder, and return the two paths.

    The folder is made if it does not exist. `result` are the measurements, as plain values, or a function that returns
    them for the path of their JSON file. `draw` draws them to a file, as a whole or not at all. Without `force`, files
    that have appeared since `check_folder` stay, and the results get another name: `name`-1.json, ...
    """
    folder.mkdir(exist_ok=True)
    stems = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(1)))
    pairs = ([folder / f"{stem}.json", folder / f"{stem}.png"] for stem in stems)
    written = next(pair for pair in pairs if force or not any(map(os.path.lexists, pair)))
    values = result(written[0]) if callable(result) else result
    draw(values, written[1])
    with replacing(written[0]) as draft:
        write_json(draft, values)
    return written
