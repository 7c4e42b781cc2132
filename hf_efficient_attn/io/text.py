"""Reading of text files."""

import gzip
import pathlib
import zlib

from hf_efficient_attn.errors import UnsupportedAttentionError


def read_text(path: pathlib.Path) -> str:
    """Read UTF-8 text, gzipped if the name of the file ends in .gz. Line ends become line feeds.

    Raises:
        UnsupportedAttentionError: The file is not UTF-8 text, or is damaged gzip.
    """
    try:
        with gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb") as file:
            return file.read().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UnsupportedAttentionError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UnsupportedAttentionError(f"{path}: damaged gzip file ({error})") from None
