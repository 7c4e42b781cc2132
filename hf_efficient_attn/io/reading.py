"""Texts and images from files that users name. What cannot be read is refused with the name of the file."""

import functools
import gzip
import io
import json
import pathlib
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from hf_efficient_attn.errors import UnsupportedAttentionError, refusing
from hf_efficient_attn.io.json import as_object

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

_TEXT_SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz")
_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")


def read_text(path: pathlib.Path) -> str:
    """Read UTF-8 text, gzipped if the name of the file ends in .gz; refuse other text, and damaged gzip.

    Line ends become line feeds.
    """
    try:
        with gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb") as file:
            return file.read().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UnsupportedAttentionError(f"{path}: not UTF-8 text (byte {error.start}): save it as UTF-8") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UnsupportedAttentionError(f"{path}: damaged gzip file ({error})") from None


def read_json_lines(path: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read a file of JSON lines, as `read_text` does: the number of each line, from 1, and the object in it.

    Empty lines are skipped, lone surrogates become question marks, and lines without a JSON object are refused.
    """
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        with refusing(f"{path}, line {number}: not JSON"):
            values = json.loads(line)
        row = as_object(values, f"{path}, line {number}")
        texts = {key: x.encode("utf-8", "replace").decode() for key, x in row.items() if isinstance(x, str)}
        yield number, {**row, **texts}  # tokenizers refuse lone surrogates


def texts_in(path: pathlib.Path) -> list[pathlib.Path]:
    """The texts in a folder and its subfolders, sorted by name, or the file itself; refuse a folder without texts."""
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.name.lower().endswith(_TEXT_SUFFIXES) and file.is_file())
    if not found:
        raise UnsupportedAttentionError(f"{path}: no texts in it ({', '.join(_TEXT_SUFFIXES)})")
    return found


def text_of(path: pathlib.Path) -> str:
    """The text of a file: .txt, or .jsonl, whose fields "text" are joined with an empty line between them; also .gz.

    Refused are a file that does not exist, is a folder, is damaged or not UTF-8 text, a line of JSON without a string
    "text", and a file without text.
    """
    if not path.is_file():
        raise UnsupportedAttentionError(f"{path}: not a file; texts are .txt, .txt.gz, .jsonl or .jsonl.gz files")
    if path.name.lower().endswith((".jsonl", ".jsonl.gz")):
        parts = []
        for number, values in read_json_lines(path):
            if not isinstance(values.get("text"), str):
                names = ", ".join(map(str, values)) or "none"
                raise UnsupportedAttentionError(f'{path}, line {number}: no string "text" (fields: {names})')
            parts.append(values["text"])
        text = "\n\n".join(parts)
    else:
        text = read_text(path)
    if not text.strip():
        raise UnsupportedAttentionError(f"{path}: there is no text in it")
    return text


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids of the tokens that a tokenizer adds before and after a text, such as [CLS] and [SEP] of BERT.

    A tokenizer that changes the tokens of the text itself when it adds special tokens is refused.
    """
    without = tokenizer("a", add_special_tokens=False)["input_ids"]
    complete = tokenizer("a")["input_ids"]
    for start in range(len(complete) - len(without) + 1):
        if complete[start : start + len(without)] == without:
            return tuple(complete[:start]), tuple(complete[start + len(without) :])
    raise UnsupportedAttentionError(
        f"{type(tokenizer).__name__} changes texts to which it adds tokens: use another one"
    )


def pictures_of(path: pathlib.Path) -> list[tuple[str, Callable[[], bytes]]]:
    """The images in a folder and its subfolders, or in a zip file, sorted by name; refuse what contains none.

    Returns (name, function that returns the bytes of the image file) of every image.
    """
    found: list[tuple[str, Callable[[], bytes]]]
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.suffix.lower() in _IMAGE_SUFFIXES and file.is_file()]
        found = [(str(file), file.read_bytes) for file in sorted(files)]
    elif zipfile.is_zipfile(path):
        archive = zipfile.ZipFile(path)
        names = [name for name in archive.namelist() if name.lower().endswith(_IMAGE_SUFFIXES)]
        found = [(f"{path}, {name}", functools.partial(archive.read, name)) for name in sorted(names)]
    else:
        raise UnsupportedAttentionError(f"{path}: pictures come from a folder or a zip file")
    if not found:
        raise UnsupportedAttentionError(f"{path}: no pictures in it ({', '.join(_IMAGE_SUFFIXES)})")
    return found


def open_picture(name: str, read: Callable[[], bytes]) -> "Image":
    """Decode an image of `pictures_of` in RGB; refuse it, by its name, if that is not possible."""
    with refusing(f"{name}: not a picture that can be read"):
        return decode(read())


def decode(content: bytes) -> "Image":
    """Decode the bytes of an image file as a Pillow image in RGB.

    Transparent pixels keep their colours. Of 16-bit grey images the upper 8 bits are used; `Image.convert` would clip
    the values to white. Images of 32 bits, whose range is not known, are refused.
    """
    import numpy as np  # Pillow and NumPy are needed for images only
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype("uint8"))
    if image.mode in ("I", "F"):
        raise UnsupportedAttentionError("a value has 32 bits: save it with 8 or 16 bits")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")
