"""A folder that appears whole or not at all."""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterator

from hf_efficient_attn.checkpoint.values import short
from hf_efficient_attn.errors import UnsupportedAttentionError

# Drafts of this process; one of a process that died with the same number (as in containers) is not among them.
_ours: set[pathlib.Path] = set()


def check_output(output: "str | os.PathLike", source: pathlib.Path, force: bool) -> pathlib.Path:
    """Where the result goes -> its absolute path.

    Raises:
        UnsupportedAttentionError: something is there and `force` is False; what is there is no folder, or holds the
            source, the working directory or the home directory; or the place lies in the source.
    """
    text = os.fspath(output)
    if not text or "\0" in text:
        raise UnsupportedAttentionError(f"the output {short(text)} names no folder")
    given = pathlib.Path(text)
    path, source = given.resolve(), source.resolve()
    if path == source or path.is_relative_to(source):
        raise UnsupportedAttentionError(f"the output {short(text)} lies in the source: give a folder outside it")
    if source.is_relative_to(path):
        raise UnsupportedAttentionError(f"the output {short(text)} holds the source, which would be lost: give another")
    if given.is_symlink():
        raise UnsupportedAttentionError(f"the output {short(text)} is a symbolic link: give the folder it leads to")
    if path.exists() and not path.is_dir():
        raise UnsupportedAttentionError(f"the output {short(text)} is a file: give the name of a new folder")
    for kept in (pathlib.Path.cwd(), pathlib.Path.home()):
        if kept.resolve().is_relative_to(path):
            raise UnsupportedAttentionError(f"the output {short(text)} holds {kept}, which is not written over")
    if path.is_dir() and any(path.iterdir()) and not force:
        raise UnsupportedAttentionError(f"the output {short(text)} is there already; --force (force=True) replaces it")
    return path


@contextlib.contextmanager
def staged(output: pathlib.Path) -> Iterator[pathlib.Path]:
    """A new folder beside `output`, which takes its place when all went well and vanishes when not.

    Ctrl-C and SIGTERM count as not. A process that is killed outright leaves at most the draft, `.NAME.converting-PID`,
    which the next one for the same output removes.
    """
    made = _make_parents(output.parent)
    draft = output.with_name(f".{output.name}.converting-{os.getpid()}")
    old = output.with_name(f".{output.name}.replaced-{os.getpid()}")
    if draft in _ours:
        raise UnsupportedAttentionError(f"another conversion to {short(str(output))} is going on in this process")
    _ours.add(draft)
    try:
        with _terminated_as_exit():
            remove_leftovers(output)
            draft.mkdir()
            yield draft
            _swap(draft, output, old)
    finally:
        for path in (draft, old):
            if path.exists() and not (path == old and not output.exists()):
                shutil.rmtree(path, ignore_errors=True)
        _ours.discard(draft)
        for parent in made:
            with contextlib.suppress(OSError):  # not empty: the output is there
                parent.rmdir()


def _make_parents(folder: pathlib.Path) -> list[pathlib.Path]:
    """The folders that had to be made, innermost first."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir()
    return missing


def _swap(draft: pathlib.Path, output: pathlib.Path, old: pathlib.Path) -> None:
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


def remove_leftovers(output: pathlib.Path) -> None:
    """Drafts of processes that were killed; an old folder that was on its way out comes back if nothing is there."""
    pattern = re.compile(re.escape(f".{output.name}.") + r"(converting|replaced)-(\d{1,10})")
    for path in sorted(output.parent.iterdir()):
        found = pattern.fullmatch(path.name)
        if not found or path.is_symlink() or not path.is_dir():
            continue
        # Nobody else of this process converts to this output: `staged` has seen to it.
        if int(found[2]) != os.getpid() and _alive(int(found[2])):
            continue
        if found[1] == "replaced" and not output.exists():
            os.rename(path, output)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    if os.name == "nt":  # there is no harmless signal to ask with
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


@contextlib.contextmanager
def _terminated_as_exit() -> Iterator[None]:
    """SIGTERM ends the process as an exception does, so that drafts are removed on the way."""
    alone = threading.current_thread() is threading.main_thread()
    if not alone or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
