"""An output folder that is replaced as a whole, or not at all."""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterator

from hf_efficient_attn.checkpoint.files import short
from hf_efficient_attn.errors import UnsupportedAttentionError

# The drafts that this process is writing. A draft with its process id that is not among them is left from a process
# that was killed and had the same id, as happens in containers.
_active: set[pathlib.Path] = set()


def check_output(output: "str | os.PathLike[str]", source: pathlib.Path, *, force: bool) -> pathlib.Path:
    """Check that a folder can be written without damage to other files.

    Args:
        output: The folder that will be written.
        source: The folder that is read.
        force: Whether an existing folder may be replaced.

    Returns:
        The absolute path of the output.

    Raises:
        UnsupportedAttentionError: The output exists and `force` is False; it exists and is not a folder, or contains
            the source, the working directory or the home directory; or it is inside the source.
    """
    text = os.fspath(output)
    if not text or "\0" in text:
        raise UnsupportedAttentionError(f"the output {short(text)} is not the name of a folder")
    given = pathlib.Path(text)
    path, source = given.resolve(), source.resolve()
    if path == source or path.is_relative_to(source):
        raise UnsupportedAttentionError(f"the output {short(text)} is in the source: give a folder outside it")
    if source.is_relative_to(path):
        raise UnsupportedAttentionError(f"the output {short(text)} holds the source, which would be lost: give another")
    if given.is_symlink():
        raise UnsupportedAttentionError(f"the output {short(text)} is a symbolic link: give the folder it leads to")
    if path.exists() and not path.is_dir():
        raise UnsupportedAttentionError(f"the output {short(text)} is a file: give the name of a new folder")
    for kept in (pathlib.Path.cwd(), pathlib.Path.home()):
        if kept.resolve().is_relative_to(path):
            raise UnsupportedAttentionError(f"the output {short(text)} holds {kept}, which is never replaced")
    if path.is_dir() and any(path.iterdir()) and not force:
        raise UnsupportedAttentionError(f"the output {short(text)} exists already; --force (force=True) replaces it")
    return path


@contextlib.contextmanager
def staged(output: pathlib.Path) -> Iterator[pathlib.Path]:
    """Replace a folder as a whole, or not at all.

    Args:
        output: The folder to write.

    Yields:
        A new, empty folder beside it. When the `with` block ends it is renamed to `output`; after an error, Ctrl-C or
        SIGTERM it is deleted. A process that is killed leaves at most this folder, `.NAME.converting-PID`, and the
        next conversion to the same output deletes it.

    Raises:
        UnsupportedAttentionError: This process is already writing the same output.
    """
    created = _make_parents(output.parent)
    draft = output.with_name(f".{output.name}.converting-{os.getpid()}")
    old = output.with_name(f".{output.name}.replaced-{os.getpid()}")
    if draft in _active:
        raise UnsupportedAttentionError(f"another conversion to {short(str(output))} is running in this process")
    _active.add(draft)
    try:
        with _exit_on_sigterm():
            _remove_leftovers(output)
            draft.mkdir()
            yield draft
            _swap(draft, output, old)
    finally:
        for path in (draft, old):
            if path.exists() and not (path == old and not output.exists()):
                shutil.rmtree(path, ignore_errors=True)
        _active.discard(draft)
        for parent in created:
            with contextlib.suppress(OSError):  # not empty, since the output is in it
                parent.rmdir()


def _make_parents(folder: pathlib.Path) -> list[pathlib.Path]:
    """Create a folder and its parents; return those that did not exist, innermost first."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir()
    return missing


def _swap(draft: pathlib.Path, output: pathlib.Path, old: pathlib.Path) -> None:
    """Rename the draft to the output; the previous output becomes `old`, or returns if an error occurs."""
    if not output.exists():
        os.rename(draft, output)
        return
    try:
        os.rename(output, old)
        os.rename(draft, output)
    except BaseException:
        if old.exists() and not output.exists():
            os.rename(old, output)
        raise


def _remove_leftovers(output: pathlib.Path) -> None:
    """Delete the drafts of killed processes. If the output is missing, the folder that was being replaced returns."""
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
        else:
            shutil.rmtree(path, ignore_errors=True)


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
