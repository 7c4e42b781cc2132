"""The numbers of tokens at which the files of a checkpoint truncate texts.

A text is truncated at the smallest of these numbers, whatever the model itself takes:

- `model_max_length` in `tokenizer_config.json`, by Transformers' tokenizers;
- `truncation` in `tokenizer.json`, by programs that use the library tokenizers without Transformers;
- `max_seq_length` in `sentence_bert_config.json`, by sentence-transformers, in place of `model_max_length`. Older
  versions give this file other names, and newer ones also read `model_max_length` among the arguments of the tokenizer
  there. The file can be in the folder of a module that `modules.json` names.
"""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hf_efficient_attn.io.json import read_json_object, write_json

_SENTENCE = "sentence_*_config.json"
_MAX_TOKENIZER = 2**30  # bytes; the tokenizers of many languages have tens of megabytes
_KEYS: dict[str, list[tuple[str, ...]]] = {
    "tokenizer_config.json": [("model_max_length",)],
    "tokenizer.json": [("truncation", "max_length")],
    _SENTENCE: [
        ("max_seq_length",),
        ("tokenizer_args", "model_max_length"),
        ("processor_kwargs", "model_max_length"),
        ("processing_kwargs", "text", "max_length"),
        ("processing_kwargs", "common", "max_length"),
    ],
}
# Lengths of models that embed queries and documents differently, which belong to their training.
_TASK_KEYS = ("query_length", "document_length")


class Limit(NamedTuple):
    """A number of tokens at which a file truncates texts.

    Attributes:
        file: The file, relative to the folder of the checkpoint.
        key: The key in the file, with dots between the levels.
        tokens: The number.
    """

    file: str
    key: str
    tokens: int


class ChangedLimit(NamedTuple):
    """A limit that has been changed; see `Limit`."""

    file: str
    key: str
    before: int
    after: int


def find_limits(folder: pathlib.Path) -> list[Limit]:
    """Find the limits in the files of a checkpoint: those of sentence-transformers first, then those of the tokenizer.

    Files without the key, or with null in its place, set no limit.

    Args:
        folder: The folder of the checkpoint.

    Raises:
        UnsupportedAttentionError: A file is not a JSON object.
    """
    return [
        Limit(path.relative_to(folder).as_posix(), ".".join(key), number)
        for path, values, keys in _files(folder)
        for key in keys
        if (number := _number(values, key)) is not None
    ]


def sentence_limit(folder: pathlib.Path) -> Limit | None:
    """The limit that applies when texts are truncated; None if there is none.

    It is that of sentence-transformers if its files set one, otherwise that of the tokenizer.

    Args:
        folder: The folder of the checkpoint.
    """
    limits = [limit for limit in find_limits(folder) if not limit.file.endswith("tokenizer.json")]
    of_sentences = [limit for limit in limits if not limit.file.endswith("tokenizer_config.json")]
    return min(of_sentences or limits, key=lambda limit: limit.tokens, default=None)


def task_lengths(folder: pathlib.Path) -> list[Limit]:
    """The lengths of queries and of documents that the files of sentence-transformers set apart from each other."""
    return [
        Limit(path.relative_to(folder).as_posix(), key, number)
        for path, values, keys in _files(folder)
        if keys is _KEYS[_SENTENCE]
        for key in _TASK_KEYS
        if (number := _number(values, (key,))) is not None
    ]


def set_limits(folder: pathlib.Path, max_length: int) -> list[ChangedLimit]:
    """Let nothing truncate texts below the number of tokens that the model takes.

    Limits of the tokenizer that are larger stay. Those of sentence-transformers become smaller too, because a text of
    more tokens than the model takes ends in an error. Limits that are not set stay so.

    Args:
        folder: The folder of the checkpoint, in which the files are changed.
        max_length: The number of tokens that the model takes.

    Returns:
        What was changed.

    Raises:
        UnsupportedAttentionError: A file is not a JSON object.
    """
    changed: list[ChangedLimit] = []
    for path, values, keys in _files(folder):
        name, before = path.relative_to(folder).as_posix(), len(changed)
        for key in keys:
            number = _number(values, key)
            if number is None or number == max_length or (number > max_length and keys is not _KEYS[_SENTENCE]):
                continue
            inner = values
            for part in key[:-1]:
                inner = inner[part]
            inner[key[-1]] = max_length
            changed.append(ChangedLimit(name, ".".join(key), number, max_length))
        if len(changed) > before:
            write_json(path, values)
    return changed


def _files(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, dict[str, Any], list[tuple[str, ...]]]]:
    """The files that set limits, with their contents and keys.

    Subfolders with a model of their own are skipped: their limits are those of another model.
    """
    folders = [folder, *(path for path in sorted(folder.iterdir()) if path.is_dir() and not _has_model(path))]
    for name in (_SENTENCE, "tokenizer_config.json", "tokenizer.json"):
        for part in folders:
            for path in sorted(part.glob(name)):
                max_bytes = _MAX_TOKENIZER if name == "tokenizer.json" else 2**25
                yield (
                    path,
                    read_json_object(path, max_bytes=max_bytes, name=path.relative_to(folder).as_posix()),
                    _KEYS[name],
                )


def _has_model(folder: pathlib.Path) -> bool:
    """Whether a folder contains a model of Transformers."""
    path = folder / "config.json"
    return path.is_file() and "model_type" in read_json_object(path, name=f"{folder.name}/config.json")


def _number(values: Mapping[str, Any], key: tuple[str, ...]) -> int | None:
    """The positive integer under a key; None if there is none."""
    found: Any = values
    for part in key:
        found = found.get(part) if isinstance(found, Mapping) else None
    return found if type(found) is int and found > 0 else None
