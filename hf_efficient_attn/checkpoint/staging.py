"""An output folder that is written as a whole, or not at all, and never at the cost of what others put there."""

import contextlib
import errno
import os
import pathlib
import shutil
import stat
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from hf_efficient_attn.checkpoint.files import refusing
from hf_efficient_attn.errors import UnsupportedAttentionError, shown
from hf_efficient_attn.io.writing import naming_errors

# The entries of a folder and its subfolders: their relative paths, and what identifies files and their contents.
Contents: TypeAlias = frozenset[tuple[str | int, ...]]


class Output(NamedTuple):
    """A folder that can be written.

    `path` is absolute. `draft` is the folder beside it, or beside the first of its parents that must be made, that
    becomes the output. `present` is what the output contains at the beginning, which may be replaced if `force` is
    True.
    """

    path: pathlib.Path
    draft: pathlib.Path
    present: Contents
    force: bool


def check_output(output: "str | os.PathLike[str]", source: pathlib.Path, *, force: bool) -> Output:
    """Check that an output folder can be written without damage to `source`, the folder that is read, or to others.

    `force` allows to replace an existing folder. The result has what the output contains at this moment: `staged`
    replaces nothing else. A folder that cannot be written, or would replace what must stay, is refused.
    """
    text = os.fspath(output)
    what = f"the output {shown(text)}"
    with refusing(f"{what} is not the name of a folder", PermissionError):
        text.encode()  # files of weights need names in UTF-8
        given, source = pathlib.Path(text), source.resolve()
        path = given.resolve()
        anchor = next(folder for folder in (*path.parents, path) if os.path.lexists(folder))
        draft = anchor / f".{path.name}.converting"
        for name in (path, draft):
            with contextlib.suppress(FileNotFoundError):
                name.lstat()  # fails for names that are too long, or below a file
        exists, is_folder, is_link = path.exists(), path.is_dir(), given.is_symlink()
    present = [folder for folder in (pathlib.Path.cwd(), pathlib.Path.home()) if folder.resolve().is_relative_to(path)]
    problems = {
        "is in the source: give a folder outside it": path.is_relative_to(source),
        "holds the source, which would be lost: give another": source.is_relative_to(path),
        "is a symbolic link: give the folder it leads to": is_link,
        "is a file: give the name of a new folder": exists and not is_folder,
        f"holds {present[0] if present else ''}, which is never replaced": bool(present),
        "exists already; --force (force=True) replaces it": is_folder and not force and any(path.iterdir()),
    }
    for problem, applies in problems.items():
        if applies:
            raise UnsupportedAttentionError(f"{what} {problem}")
    return Output(path, draft, _contents(path), force)


@contextlib.contextmanager
def staged(output: Output) -> Iterator[pathlib.Path]:
    """Write an output of `check_output` as a whole, or not at all.

    Yields a new, empty folder near it. When the `with` block ends it is renamed to the output; after an error it is
    deleted. A process that is killed leaves at most this folder, `.NAME.converting`. Refused is an output that is being
    written already. Something that has appeared or changed in its place during the work is left as it is.
    """
    path, draft = output.path, output.draft
    try:
        draft.mkdir()
    except FileExistsError as error:
        raise UnsupportedAttentionError(
            f"another conversion to {shown(str(path))} is running, or was killed: in that case delete {draft}"
        ) from error
    try:
        with naming_errors(f"the output {shown(str(path))}", "; nothing of it was kept"):
            yield draft
        path.parent.mkdir(parents=True, exist_ok=True)
        _rename(output)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _contents(folder: pathlib.Path) -> Contents:
    """Everything in a folder and its subfolders. A folder has its name only: what is in it has entries of its own."""
    found: set[tuple[str | int, ...]] = set()
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            identity = (status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns)
            found.add((str(path.relative_to(folder)), *(() if stat.S_ISDIR(status.st_mode) else identity)))
    return frozenset(found)


def _rename(output: Output) -> None:
    """Rename the draft to the output, in which nothing may have appeared or changed since the beginning.

    What is replaced is moved aside first and returns if an error occurs.
    """
    path, aside = output.path, output.path.with_name(f"{output.path.name}.replaced-{os.getpid()}")
    is_replaced = output.force and os.path.lexists(path)
    try:
        if is_replaced:
            os.rename(path, aside)
            if not (aside.is_dir() and _contents(aside) <= output.present):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        elif os.path.lexists(path):
            path.rmdir()  # fails if it is not empty
        os.rename(output.draft, path)
    except BaseException as error:
        if is_replaced and os.path.lexists(aside) and output.draft.exists():
            os.rename(aside, path)
        if isinstance(error, OSError) and error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise UnsupportedAttentionError(
                f"something else has written {shown(str(path))} during the conversion: it is left as it is, and the "
                "result is dropped; give another folder, or repeat the command with --force (force=True) to replace it"
            ) from error
        raise
    if is_replaced:
        shutil.rmtree(aside, ignore_errors=True)
