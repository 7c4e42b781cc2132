"""Texts and pictures out of files: what comes from outside is checked, and refused with its name."""

import gzip
import io
import json
import pathlib
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from hf_efficient_attn.errors import UnsupportedAttentionError

_PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")


def read_text(path: pathlib.Path) -> str:
    """A UTF-8 text, gzipped if its name ends in .gz; line ends become \\n."""
    try:
        with gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb") as file:
            return file.read().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UnsupportedAttentionError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UnsupportedAttentionError(f"{path}: damaged gzip file ({error})") from None


def json_rows(path: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, row) of a JSON lines file."""
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UnsupportedAttentionError(f"{path}, line {number}: not JSON ({error.msg})") from None
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise UnsupportedAttentionError(f"{path}, line {number}: a JSON object is expected, not {kind}")
        yield number, row


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object out of a file; raises `UnsupportedAttentionError` for anything else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsupportedAttentionError(f"{path}: not JSON ({error})") from None
    if not isinstance(values, dict):
        raise UnsupportedAttentionError(f"{path}: a JSON object is expected, not {type(values).__name__}")
    return values


def special_tokens(tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a tokenizer puts before and after a text: ([CLS],) and ([SEP],) of BERT, nothing of GPT-2."""
    inside = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for at in range(len(whole) - len(inside) + 1):
        if whole[at : at + len(inside)] == inside:
            return tuple(whole[:at]), tuple(whole[at + len(inside) :])
    raise UnsupportedAttentionError(
        f"{type(tokenizer).__name__} changes a text when it adds special tokens; use another tokenizer"
    )


def decode(content: bytes):
    """The bytes of a picture file -> a Pillow image in RGB.

    Colours under transparency are kept, as `convert` does; 16-bit grey keeps its 8 upper bits, which `convert` would
    clip to white.
    """
    from PIL import Image, ImageOps

    picture = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    if picture.mode.startswith("I;16"):
        import numpy as np

        picture = Image.fromarray((np.asarray(picture) >> 8).astype("uint8"))
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    return picture.convert("RGB")


def text_of(path: pathlib.Path) -> str:
    """The text of a file; the fields "text" of JSON lines (.jsonl, .jsonl.gz) laid end to end, a blank line between.

    Raises:
        UnsupportedAttentionError: not UTF-8, a damaged file, a row without "text", no text at all.
    """
    if not path.is_file():
        raise UnsupportedAttentionError(f"{path}: no such file; texts are .txt, .txt.gz, .jsonl or .jsonl.gz files")
    if path.name.lower().endswith((".jsonl", ".jsonl.gz")):
        parts = []
        for number, row in json_rows(path):
            if not isinstance(row.get("text"), str):
                names = ", ".join(map(str, row)) or "none"
                raise UnsupportedAttentionError(f'{path}, line {number}: no string "text" (fields: {names})')
            parts.append(row["text"])
        text = "\n\n".join(parts)
    else:
        text = read_text(path)
    if not text.strip():
        raise UnsupportedAttentionError(f"{path}: there is no text in it")
    return text


def pictures_of(path: pathlib.Path) -> list[tuple[str, Callable[[], bytes]]]:
    """(name, reader of the bytes) of every picture in a folder and those below it, or in a zip file, by name.

    Raises:
        UnsupportedAttentionError: neither a folder nor a zip file, or no pictures in it.
    """
    found: list[tuple[str, Callable[[], bytes]]]
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.suffix.lower() in _PICTURES and file.is_file()]
        found = [(str(file), file.read_bytes) for file in sorted(files)]
    elif zipfile.is_zipfile(path):
        archive = zipfile.ZipFile(path)
        names = [name for name in archive.namelist() if name.lower().endswith(_PICTURES)]
        found = [(f"{path}, {name}", lambda name=name: archive.read(name)) for name in sorted(names)]
    else:
        raise UnsupportedAttentionError(f"{path}: pictures come from a folder or a zip file")
    if not found:
        raise UnsupportedAttentionError(f"{path}: no pictures in it ({', '.join(_PICTURES)})")
    return found


def open_picture(name: str, read: Callable[[], bytes]):
    """A picture of `pictures_of` as a Pillow image in RGB.

    Raises:
        UnsupportedAttentionError: it cannot be read.
    """
    try:
        return decode(read())
    except Exception as error:  # noqa: BLE001 (a decoder raises whatever it meets, and all of it means the same)
        raise UnsupportedAttentionError(f"{name}: not a picture that can be read ({error})") from None
