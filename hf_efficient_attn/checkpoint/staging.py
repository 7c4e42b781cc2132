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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from hf_efficient_attn.checkpoint.files import check_encoding, short
from hf_efficient_attn.errors import UnsupportedAttentionError

# The drafts that this process is writing. A draft with its process id that is not among them is left from a process
# that was killed and had the same id, as happens in containers.
_active: set[pathlib.Path] = set()

# {path relative to a folder: what identifies the entry and its contents}.
Contents: TypeAlias = Mapping[str, tuple[int, ...]]


class Output(NamedTuple):
    """A folder that can be written.

    Attributes:
        path: Its absolute path.
        present: What the folder contains now and may be deleted; None if it does not exist.
        force: Whether the folder may be replaced.
    """

    path: pathlib.Path
    present: Contents | None
    force: bool


@dataclass
class Draft:
    """A folder under construction.

    Attributes:
        folder: The folder.
        kept: Where the files are that appeared in the output during the work; None if there are none.
    """

    folder: pathlib.Path
    kept: pathlib.Path | None = None


def check_output(output: "str | os.PathLike[str]", source: pathlib.Path, *, force: bool) -> Output:
    """Check that a folder can be written without damage to other files.

    Args:
        output: The folder that will be written.
        source: The folder that is read.
        force: Whether an existing folder may be replaced.

    Returns:
        The output, with what it contains at this moment. `staged` deletes nothing else.

    Raises:
        UnsupportedAttentionError: The output's name is not possible; it exists and `force` is False; it exists and is
            not a folder, or contains the source, the working directory or the home directory; or it is inside the
            source or a file.
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
    if path == source or path.is_relative_to(source):
        raise UnsupportedAttentionError(f"the output {short(text)} is in the source: give a folder outside it")
    if source.is_relative_to(path):
        raise UnsupportedAttentionError(f"the output {short(text)} holds the source, which would be lost: give another")
    if is_link:
        raise UnsupportedAttentionError(f"the output {short(text)} is a symbolic link: give the folder it leads to")
    if exists and not is_folder:
        raise UnsupportedAttentionError(f"the output {short(text)} is a file: give the name of a new folder")
    if not parent.is_dir():
        raise UnsupportedAttentionError(
            f"the output {short(text)} cannot be made: {short(str(parent))} is not a folder; give another"
        )
    for kept in (pathlib.Path.cwd(), pathlib.Path.home()):
        if kept.resolve().is_relative_to(path):
            raise UnsupportedAttentionError(f"the output {short(text)} holds {kept}, which is never replaced")
    if exists and not force and any(path.iterdir()):
        raise UnsupportedAttentionError(f"the output {short(text)} exists already; --force (force=True) replaces it")
    return Output(path, _contents(path) if exists else None, force)


@contextlib.contextmanager
def staged(output: Output) -> Iterator[Draft]:
    """Write a folder as a whole, or not at all.

    Args:
        output: The folder to write, as `check_output` returned it when the work began.

    Yields:
        A new, empty folder beside it. When the `with` block ends it is renamed to the output; after an error, Ctrl-C or
        SIGTERM it is deleted. Of a folder that is replaced, only what it contained at the beginning is deleted. A
        process that is killed leaves at most this folder, `.NAME.converting-PID`, and the next conversion to the same
        output deletes it.

    Raises:
        UnsupportedAttentionError: This process is already writing the same output; or something has appeared in its
            place during the work, and it may not be replaced.
        OSError: The folder cannot be written.
    """
    path = output.path
    folder = path.with_name(f".{path.name}.converting-{os.getpid()}")
    if folder in _active:
        raise UnsupportedAttentionError(f"another conversion to {short(str(path))} is running in this process")
    draft, created = Draft(folder), []
    _active.add(folder)
    try:
        with _exit_on_sigterm():
            with _blaming(str(path)):
                created = _make_parents(path.parent)
                if _remove_leftovers(path):
                    output = _after_return(output)
                folder.mkdir()
            with _naming(path):
                yield draft
            if output.force:
                draft.kept = _replace(folder, output)
            else:
                _add(folder, output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _active.discard(folder)
        for parent in created:
            with contextlib.suppress(OSError):  # not empty, since the output is in it
                parent.rmdir()


def _after_return(output: Output) -> Output:
    """The output, in which a folder exists again that a killed conversion was about to replace."""
    if not output.force:
        raise UnsupportedAttentionError(
            f"the output {short(str(output.path))} exists again: a conversion that was killed while it replaced this "
            "folder had moved it; --force (force=True) replaces it"
        )
    return output._replace(present=_contents(output.path))


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    """Name the output in errors about a full disk, some of which name nothing."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(
            f"the output {short(str(path))} cannot be written: {os.strerror(error.errno)}; nothing of it was kept"
        ) from error


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


def _make_parents(folder: pathlib.Path) -> list[pathlib.Path]:
    """Create a folder and its parents; return those that did not exist, innermost first."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
    return missing


def _contents(folder: pathlib.Path) -> Contents:
    """Everything in a folder and its subfolders."""
    found = {}
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(parent, name)
            with contextlib.suppress(FileNotFoundError):
                found[os.path.relpath(path, folder)] = _identity(path)
    return found


def _identity(path: str) -> tuple[int, ...]:
    """What tells an entry of a folder from another one of the same name, or with other contents."""
    status = os.lstat(path)
    if stat.S_ISDIR(status.st_mode):  # what is in it has entries of its own
        return (stat.S_IFMT(status.st_mode),)
    return stat.S_IFMT(status.st_mode), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _add(folder: pathlib.Path, output: Output) -> None:
    """Rename a draft to an output that did not exist or was empty, and fail if that is no longer so."""
    path, made = output.path, False
    try:
        if os.name == "nt":  # here a rename fails if anything is in its place
            if output.present is not None:
                path.rmdir()
        elif output.present is None:
            path.mkdir()  # fails if anything is in its place
            made = True
        os.rename(folder, path)  # onto an empty folder; fails if it is not empty any more
    except BaseException as error:
        if made:
            with contextlib.suppress(OSError):  # not empty any more
                path.rmdir()
        if isinstance(error, OSError) and error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise UnsupportedAttentionError(
                f"something else has written {short(str(path))} during the conversion: it is left as it is, and the "
                "result is dropped; give another folder, or --force (force=True) to replace it"
            ) from error
        raise


def _replace(folder: pathlib.Path, output: Output) -> pathlib.Path | None:
    """Rename a draft to an output, and delete what the output contained at the beginning.

    The output returns if an error occurs.

    Returns:
        The folder with everything else that was in the output; None if there was nothing else.
    """
    path, present = output.path, output.present or {}
    replaced = path.with_name(f".{path.name}.replaced-{os.getpid()}")
    if not os.path.lexists(path):
        _add(folder, output._replace(present=None))
        return None
    kept = replaced
    try:
        os.rename(path, replaced)
        if not (replaced.is_dir() and _contents(replaced).items() <= present.items()):
            # No later conversion deletes what has this name.
            kept = _free_name(path)
            os.rename(replaced, kept)
        _add(folder, output._replace(present=None))
        _delete(kept, present)
    except BaseException as error:
        if not folder.exists():  # the draft has become the output
            _delete(kept, present)
            raise
        kept = replaced if os.path.lexists(replaced) else kept
        if not os.path.lexists(path):
            os.rename(kept, path)
        elif os.path.lexists(kept):
            safe = _free_name(path)
            os.rename(kept, safe)
            raise UnsupportedAttentionError(f"{error}; what was there before is now {short(str(safe))}") from error
        raise
    return kept if os.path.lexists(kept) else None


def _free_name(path: pathlib.Path) -> pathlib.Path:
    """A name beside a path that nothing has."""
    names = (path.with_name(f"{path.name}.kept-{os.getpid()}" + "x" * number) for number in range(1000))
    return next(name for name in names if not os.path.lexists(name))


def _delete(folder: pathlib.Path, present: Contents) -> None:
    """Delete a folder with these contents. Whatever else is in it stays."""
    if not folder.is_dir():
        return
    for parent, folders, files in os.walk(folder, topdown=False):
        for name in (*files, *folders):
            path = os.path.join(parent, name)
            with contextlib.suppress(OSError):  # folders that are not empty
                if stat.S_ISDIR(os.lstat(path).st_mode):
                    os.rmdir(path)
                elif _identity(path) == present.get(os.path.relpath(path, folder)):
                    os.unlink(path)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _remove_leftovers(output: pathlib.Path) -> bool:
    """Delete the drafts of killed processes. If the output is missing, the folder that was being replaced returns.

    Returns:
        Whether it has returned.
    """
    has_returned = False
    pattern = re.compile(re.escape(f".{output.name}.") + r"(converting|replaced)-(\d{1,10})")
    for path in sorted(output.parent.iterdir()):
        found = pattern.fullmatch(path.name)
        if not found or path.is_symlink() or not path.is_dir():
            continue
        # `staged` ensures that nothing else in this process writes to the output.
        if int(found[2]) != os.getpid() and _is_alive(int(found[2])):
            continue
        if found[1] == "replaced" and not output.exists():
            os.rename(path, output)
            has_returned = True
        else:
            shutil.rmtree(path, ignore_errors=True)
    return has_returned


def _is_alive(pid: int) -> bool:
    """Whether a process exists."""
    if os.name == "nt":  # Windows has no signal that only asks
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
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
