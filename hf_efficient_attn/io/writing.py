"""Files and pictures that commands write: asked for before the work, and whole or not there at all."""

import contextlib
import importlib.util
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hf_efficient_attn.errors import UnsupportedAttentionError


def check_drawing() -> None:
    """That pictures can be drawn; raises `UnsupportedAttentionError` if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedAttentionError("drawing needs matplotlib: pip install 'hf_efficient_attn[plots]'")


def check_picture(path: pathlib.Path) -> None:
    """That a picture can be written there, asked before the work rather than after it.

    Raises:
        UnsupportedAttentionError: matplotlib is not installed, does not know the format, or the folder does not exist.
    """
    check_drawing()
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in known:
        raise UnsupportedAttentionError(f"cannot draw to {str(path)!r}: its name must end in one of {', '.join(known)}")
    check_writable(path)


def check_writable(path: pathlib.Path) -> None:
    """That a file can be there; raises `UnsupportedAttentionError` if not."""
    if path.is_dir() or not path.parent.is_dir():
        raise UnsupportedAttentionError(f"cannot write {str(path)!r}: its folder must exist, and it must not be one")


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file beside `path` to write to, which takes its place when all went well and vanishes when not."""
    draft = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield draft
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def check_folder(folder: pathlib.Path, names: Sequence[str], *, force: bool) -> None:
    """That files of these names, some of them pictures, can be written into a folder, which may yet have to be made.

    Raises:
        UnsupportedAttentionError: one is there already and `force` is False, the folder's own folder does not exist, or
            matplotlib is not installed.
    """
    for name in names:
        if (folder / name).exists() and not force:
            raise UnsupportedAttentionError(f"{folder / name} is there already: give --force to write over it")
    if folder.exists() and not folder.is_dir():
        raise UnsupportedAttentionError(f"{folder} is not a folder")
    if not folder.absolute().parent.is_dir():
        raise UnsupportedAttentionError(f"cannot make the folder {folder}: {folder.absolute().parent} does not exist")
    check_drawing()


def write_results(
    result: Mapping[str, Any], folder: pathlib.Path, name: str, draw: Callable[[Mapping[str, Any], pathlib.Path], None]
) -> list[pathlib.Path]:
    """Write what was measured as <name>.json and the picture that `draw` makes of it as <name>.png; both paths."""
    folder.mkdir(exist_ok=True)
    written = [folder / f"{name}.json", folder / f"{name}.png"]
    draw(result, written[1])
    with replacing(written[0]) as draft:
        draft.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return written
