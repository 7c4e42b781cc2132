"""Reading and writing JSON files. What cannot be read is refused with the name of the file."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.io.text import read_text

MAX_BYTES = 32 * 2**20


def read_json(path: pathlib.Path, *, max_bytes: int = MAX_BYTES, name: str | None = None) -> Any:
    """Read a JSON file; error messages call it `name`, by default its path.

    Raises:
        UnsupportedAttentionError: The file does not exist or cannot be read, is larger than `max_bytes`, or is not
            JSON in UTF-8.
    """
    name = str(path) if name is None else name
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise UnsupportedAttentionError(f"{name} cannot be read: {error.strerror}") from error
    if len(content) > max_bytes:
        raise UnsupportedAttentionError(f"{name} is larger than {max_bytes} bytes, the limit for such a file")
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsupportedAttentionError(f"{name}: not JSON ({error})") from error


def read_json_object(path: pathlib.Path, *, max_bytes: int = MAX_BYTES, name: str | None = None) -> dict[str, Any]:
    """Read a JSON file that contains an object, as `read_json` does; refuse other values."""
    return _object(read_json(path, max_bytes=max_bytes, name=name), name or str(path))


def _object(values: Any, where: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise UnsupportedAttentionError(f"{where}: a JSON object is expected, not {type(values).__name__}")
    return values


def read_json_lines(path: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read a JSON lines file, gzipped if its name ends in .gz.

    Args:
        path: The file. Empty lines are skipped.

    Yields:
        The number of the line, counted from 1, and the object in it.

    Raises:
        UnsupportedAttentionError: The file is not UTF-8 text, or a line does not contain a JSON object.
    """
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise UnsupportedAttentionError(f"{path}, line {number}: not JSON ({error.msg})") from None
        yield number, _object(values, f"{path}, line {number}")


def encode_json(value: Any) -> bytes:
    """Indented JSON in UTF-8. A lone surrogate, as in some file names, is escaped."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def write_json(path: pathlib.Path, value: Any) -> None:
    """Write a value as `encode_json` encodes it."""
    path.write_bytes(encode_json(value))
