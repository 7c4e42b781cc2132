"""An output folder that is written as a whole, or not at all, and never at the cost of what others put there."""

import contextlib
import errno
import os
import pathlib
import re
import shutil
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from hf_efficient_attn.checkpoint.files import check_encoding, short
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.io.writing import naming_full_disk

# The drafts that this process is writing. A draft with its process id that is not among them is left from a process
# that was killed and had the same id, as happens in containers.
_active: set[pathlib.Path] = set()

# The entries of a folder and its subfolders: their relative paths, and what identifies files and their contents.
Contents: TypeAlias = frozenset[tuple[str | int, ...]]


@dataclass
class Output:
    """A folder that can be written.

    Attributes:
        path: Its absolute path.
        present: What it contains at the beginning and may be deleted.
        force: Whether it may be replaced.
        kept: Where the former folder is at the end, if anything appeared or changed in it during the work.
    """

    path: pathlib.Path
    present: Contents
    force: bool
    kept: pathlib.Path | None = None


def check_output(output: "str | os.PathLike[str]", source: pathlib.Path, *, force: bool) -> Output:
    """Check that an output folder can be written without damage to the source or to other files.

    Args:
        output: The folder that will be written.
        source: The folder that is read.
        force: Whether an existing folder may be replaced.

    Returns:
        The output, with what it contains at this moment. `staged` deletes nothing else.

    Raises:
        UnsupportedAttentionError: The folder cannot be written, or would replace what must stay.
    """
    text = os.fspath(output)
    if not text or "\0" in text:
        raise UnsupportedAttentionError(f"the output {short(text)} is not the name of a folder")
    given = pathlib.Path(text)
    check_encoding(given, f"the output {short(text)}")
    with _blaming(text):
        path, source = given.resolve(), source.resolve()
        check_encoding(path, f"the output {short(str(path))}")
        parent = next(folder for folder in (*path.parents, path) if os.path.lexists(folder))
        exists, is_folder, is_link = path.exists(), path.is_dir(), given.is_symlink()
    kept = [folder for folder in (pathlib.Path.cwd(), pathlib.Path.home()) if folder.resolve().is_relative_to(path)]
    problems = {
        "is in the source: give a folder outside it": path.is_relative_to(source),
        "holds the source, which would be lost: give another": source.is_relative_to(path),
        "is a symbolic link: give the folder it leads to": is_link,
        "is a file: give the name of a new folder": exists and not is_folder,
        f"cannot be made: {short(str(parent))} is not a folder; give another": not parent.is_dir(),
        f"holds {kept[0] if kept else ''}, which is never replaced": bool(kept),
        "exists already; --force (force=True) replaces it": is_folder and not force and any(path.iterdir()),
    }
    for problem, applies in problems.items():
        if applies:
            raise UnsupportedAttentionError(f"the output {short(text)} {problem}")
    return Output(path, _contents(path), force)


@contextlib.contextmanager
def staged(output: Output) -> Iterator[pathlib.Path]:
    """Write a folder as a whole, or not at all.

    Args:
        output: The folder to write, as `check_output` returned it when the work began.

    Yields:
        A new, empty folder beside it. When the `with` block ends it is renamed to the output; after an error, Ctrl-C or
        SIGTERM it is deleted. A folder that is replaced is deleted only if nothing appeared or changed in it since the
        beginning. A process that is killed leaves at most this folder, `.NAME.converting-PID`, and the next conversion
        to the same output deletes it.

    Raises:
        UnsupportedAttentionError: This process is already writing the same output; or something has appeared in its
            place during the work, and it may not be replaced.
        OSError: The folder cannot be written.
    """
    path = output.path
    folder = path.with_name(f".{path.name}.converting-{os.getpid()}")
    if folder in _active:
        raise UnsupportedAttentionError(f"another conversion to {short(str(path))} is running in this process")
    created: list[pathlib.Path] = []
    _active.add(folder)
    try:
        with _exit_on_sigterm():
            with _blaming(str(path)):
                created = [parent for parent in path.parents if not parent.exists()]
                path.parent.mkdir(parents=True, exist_ok=True)
                if _remove_leftovers(path):
                    if not output.force:
                        raise UnsupportedAttentionError(
                            f"the output {short(str(path))} exists again: a conversion that was killed while it "
                            "replaced this folder had moved it; --force (force=True) replaces it"
                        )
                    output.present = _contents(path)
                folder.mkdir()
            with naming_full_disk(f"the output {short(str(path))}", "; nothing of it was kept"):
                yield folder
            if output.force:
                output.kept = _replace(folder, output)
            else:
                _add(folder, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _active.discard(folder)
        for parent in created:
            with contextlib.suppress(OSError):  # not empty, since the output is in it
                parent.rmdir()


@contextlib.contextmanager
def _blaming(output: str) -> Iterator[None]:
    """Turn errors about the path of the output into errors that name it."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # links in a circle, before Python 3.13; signs that no path can have
        if isinstance(error, UnsupportedAttentionError):
            raise
        raise UnsupportedAttentionError(f"the output {short(output)} is not the name of a folder: {error}") from error
    except OSError as error:
        text = f"the output {short(output)} cannot be made: {error.strerror}"
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EINVAL, errno.EILSEQ):
            raise UnsupportedAttentionError(f"{text}; give another") from error
        raise OSError(text) from error


def _contents(folder: pathlib.Path) -> Contents:
    """Everything in a folder and its subfolders. A folder has its name only: what is in it has entries of its own."""
    found: set[tuple[str | int, ...]] = set()
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            identity = (status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns)
            found.add((str(path.relative_to(folder)), *(() if stat.S_ISDIR(status.st_mode) else identity)))
    return frozenset(found)


def _add(folder: pathlib.Path, path: pathlib.Path) -> None:
    """Rename a draft to an output that did not exist or was empty, and fail if that is no longer so."""
    try:
        if os.name == "nt" and path.is_dir():
            path.rmdir()  # fails if it is not empty; on Windows a rename replaces no folder
        os.rename(folder, path)  # onto an empty folder at most
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        raise UnsupportedAttentionError(
            f"something else has written {short(str(path))} during the conversion: it is left as it is, and the "
            "result is dropped; give another folder, or --force (force=True) to replace it"
        ) from error


def _replace(folder: pathlib.Path, output: Output) -> pathlib.Path | None:
    """Rename a draft to an output, whose former contents return if an error occurs.

    Returns:
        Where the former output is, if anything in it is not what it contained at the beginning. Otherwise it is
        deleted, and None is returned.
    """
    path = output.path
    former = replaced = path.with_name(f".{path.name}.replaced-{os.getpid()}")
    try:
        if os.path.lexists(path):
            os.rename(path, replaced)
            if not (replaced.is_dir() and _contents(replaced) <= output.present):
                former = _free_name(path)  # no later conversion deletes what has this name
                os.rename(replaced, former)
        _add(folder, path)
    except BaseException as error:
        former = replaced if os.path.lexists(replaced) else former
        if folder.exists() and os.path.lexists(former):  # the draft has not become the output
            if not os.path.lexists(path):
                os.rename(former, path)
            else:
                safe = _free_name(path)
                os.rename(former, safe)
                raise UnsupportedAttentionError(f"{error}; what was there before is now {short(str(safe))}") from error
        raise
    if former == replaced:
        shutil.rmtree(replaced, ignore_errors=True)
        return None
    return former


def _free_name(path: pathlib.Path) -> pathlib.Path:
    """A name beside a path that nothing has."""
    names = (path.with_name(f"{path.name}.kept-{os.getpid()}" + "x" * number) for number in range(1000))
    return next(name for name in names if not os.path.lexists(name))


def _remove_leftovers(output: pathlib.Path) -> bool:
    """Delete the drafts of killed processes. If the output is missing, the folder that was being replaced returns.

    Returns:
        Whether it has returned.
    """
    has_returned = False
    pattern = re.compile(re.escape(f".{output.name}.") + r"(converting|replaced)-(\d{1,10})")
    for path in sorted(output.parent.iterdir()):
        found = pattern.fullmatch(path.name)
        # `staged` ensures that nothing else in this process writes to the output.
        if not found or path.is_symlink() or not path.is_dir() or _is_alive(int(found[2])):
            continue
        if found[1] == "replaced" and not output.exists():
            os.rename(path, output)
            has_returned = True
        else:
            shutil.rmtree(path, ignore_errors=True)
    return has_returned


def _is_alive(pid: int) -> bool:
    """Whether another process with this id exists."""
    if pid == os.getpid() or os.name == "nt":  # Windows has no signal that only asks
        return pid != os.getpid()
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM raise SystemExit, so that drafts are deleted, unless another handler is installed."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
