"""Checks of files from untrusted sources, with errors of one line, and an output folder."""

import contextlib
import os
import pathlib
import shutil
import stat
from collections.abc import Iterator
from typing import Any, NoReturn

from hf_efficient_attn.errors import UnsupportedAttentionError, clean, refusing, shown
from hf_efficient_attn.io.json import read_json_object
from hf_efficient_attn.io.writing import check_takes_files, naming_errors


def short_name(path: pathlib.Path, inside: pathlib.Path) -> str:
    """Name a file for error messages: its path relative to the folder `inside`."""
    return clean(path.relative_to(inside).as_posix())


def regular_file(path: pathlib.Path, inside: pathlib.Path, max_bytes: int | None = None) -> os.stat_result:
    """Return the status of a regular file, or of a link to one, inside the folder `inside`.

    A path that does not exist, is no such file, is larger than `max_bytes` or leads out of the folder is refused.
    """
    name = short_name(path, inside)
    with refusing(f"{name} cannot be read"):
        target = path.resolve(strict=True)
        status = target.stat()
    if not target.is_relative_to(inside.resolve()):
        raise UnsupportedAttentionError(f"{name} is a symbolic link that leads out of its folder: put the file there")
    if not stat.S_ISREG(status.st_mode):
        raise UnsupportedAttentionError(f"{name} is not a regular file")
    if max_bytes is not None and status.st_size > max_bytes:
        raise UnsupportedAttentionError(f"{name} is larger than {max_bytes} bytes, the limit for such a file")
    return status


def plain_name(name: Any, what: str) -> str:
    """Return a value that the file `what` contains if it is a name without a path, on every system; else refuse it."""
    if not isinstance(name, str) or name in ("", ".", "..") or any(sign in name for sign in "/\\:\0"):
        raise UnsupportedAttentionError(f"{what} names {shown(name)}, which is not a plain name of a file beside it")
    return name


def read_object(path: pathlib.Path, inside: pathlib.Path) -> dict[str, Any]:
    """Read the JSON object in a regular file inside the folder `inside`; see `regular_file` and `read_json_object`."""
    regular_file(path, inside)
    return read_json_object(path, name=short_name(path, inside))


class Output:
    """A folder that can be written without damage to `source`, the folder that is read, or to others.

    What it contains when it is made may be replaced if `force` is True, and nothing else. A folder that cannot be
    written, or would replace what must stay, is refused. The attribute `path` is absolute.
    """

    def __init__(self, output: "str | os.PathLike[str]", source: pathlib.Path, *, force: bool) -> None:
        text = os.fspath(output)
        what = f"the output {shown(text)}"
        with refusing(f"{what} is not the name of a folder", PermissionError):
            text.encode()  # files of weights need names in UTF-8
            given, source = pathlib.Path(text), source.resolve()
            self.path = path = given.resolve()
            anchor = next(folder for folder in (*path.parents, path) if os.path.lexists(folder))
            # Beside the folder, or beside the first of its parents that must be made.
            self._draft = anchor / f".{path.name}.converting"
            for name in (path, self._draft):
                with contextlib.suppress(FileNotFoundError):
                    name.lstat()  # fails for names that are too long, or below a file
            exists, is_folder, is_link = path.exists(), path.is_dir(), given.is_symlink()
        inside = [x for x in (pathlib.Path.cwd(), pathlib.Path.home()) if x.resolve().is_relative_to(path)]
        problems = {
            "is in the source: give a folder outside it": path.is_relative_to(source),
            "holds the source, which would be lost: give another": source.is_relative_to(path),
            "is a symbolic link: give the folder it leads to": is_link,
            "is a file: give the name of a new folder": exists and not is_folder,
            f"holds {inside[0] if inside else ''}, which is never replaced": bool(inside),
            "is where a disk is mounted, and cannot be replaced as a whole: give a folder in it": path.is_mount(),
            "exists already; --force (force=True) replaces it": is_folder and not force and any(path.iterdir()),
        }
        for problem, applies in problems.items():
            if applies:
                raise UnsupportedAttentionError(f"{what} {problem}")
        if os.path.lexists(self._draft):
            self._refuse_draft()
        check_takes_files(anchor, what)
        self._present = _contents(path)

    @contextlib.contextmanager
    def staged(self) -> Iterator[pathlib.Path]:
        """Write the folder as a whole, or not at all.

        Yields a new, empty folder near it. When the `with` block ends it is renamed to the output; after an error it is
        deleted. A process that is killed leaves at most this folder, `.NAME.converting`. Refused is an output that is
        being written already. Something that has appeared or changed in its place during the work is left as it is.
        """
        try:
            self._draft.mkdir()
        except FileExistsError:
            self._refuse_draft()
        except OSError as error:  # without the name of the draft
            raise OSError(f"the output {shown(str(self.path))} cannot be written: {error.strerror}") from error
        try:
            with naming_errors(f"the output {shown(str(self.path))}", "; nothing of it was kept"):
                yield self._draft
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._rename()
        finally:
            shutil.rmtree(self._draft, ignore_errors=True)

    def _refuse_draft(self) -> NoReturn:
        raise UnsupportedAttentionError(
            f"another conversion to {shown(str(self.path))} is running, or was killed: in that case delete "
            f"{self._draft}"
        )

    def _rename(self) -> None:
        """Rename the draft to the output. What is replaced is moved aside first and returns if an error occurs."""
        path, aside = self.path, self.path.with_name(f"{self.path.name}.replaced-{os.getpid()}")
        try:
            if os.path.lexists(path):
                os.rename(path, aside)
                if not (aside.is_dir() and _contents(aside) <= self._present):
                    raise UnsupportedAttentionError(
                        f"something else has written {shown(str(path))} during the conversion: it is left as it is, "
                        "and the result is dropped; give another folder, or repeat the command with --force "
                        "(force=True) to replace it"
                    )
            os.rename(self._draft, path)
        except BaseException:
            if os.path.lexists(aside) and self._draft.exists():
                os.rename(aside, path)
            raise
        shutil.rmtree(aside, ignore_errors=True)


def _contents(folder: pathlib.Path) -> set[tuple[object, ...]]:
    """The relative paths of all that is in a folder, and what identifies the files and their contents."""
    found = ((path.relative_to(folder), path.lstat()) for path in folder.rglob("*"))
    return {(path, stat.S_ISDIR(x.st_mode) or (x.st_mode, x.st_ino, x.st_size, x.st_mtime_ns)) for path, x in found}
