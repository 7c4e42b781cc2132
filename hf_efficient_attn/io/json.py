"""Reading and writing JSON files. What cannot be read is refused with the name of the file."""

import ast
import contextlib
import json
import pathlib
from typing import Any

from hf_efficient_attn.errors import UnsupportedAttentionError, refusing

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
    with refusing(f"{name}: not JSON"):
        return json.loads(content.decode("utf-8"))


def read_json_object(path: pathlib.Path, *, max_bytes: int = MAX_BYTES, name: str | None = None) -> dict[str, Any]:
    """Read a JSON file that contains an object, as `read_json` does; refuse other values."""
    return as_object(read_json(path, max_bytes=max_bytes, name=name), name or str(path))


def as_object(values: Any, where: str) -> dict[str, Any]:
    """Return a JSON object as it is, and refuse other values; `where` is what the message calls their place."""
    if not isinstance(values, dict):
        raise UnsupportedAttentionError(f"{where}: a JSON object is expected, not {type(values).__name__}")
    return values


def parse_value(text: str) -> Any:
    """The value of a text on a command line: a number, list, Boolean or null as JSON or Python writes it, or itself."""
    for parse in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, TypeError):
            return parse(text)
    return text


def encode_json(value: Any) -> bytes:
    """Indented JSON in UTF-8. A lone surrogate, as in some file names, is escaped."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def write_json(path: pathlib.Path, value: Any) -> None:
    """Write a value as `encode_json` encodes it."""
    path.write_bytes(encode_json(value))
