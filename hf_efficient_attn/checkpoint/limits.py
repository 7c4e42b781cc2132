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

from hf_efficient_attn.io.json import MAX_BYTES, read_json_object, write_json

_SENTENCE = "sentence_*_config.json"
_KEYS = {
    _SENTENCE: (
        "max_seq_length", "tokenizer_args.model_max_length", "processor_kwargs.model_max_length",
        "processing_kwargs.text.max_length", "processing_kwargs.common.max_length",
    ),
    "tokenizer_config.json": ("model_max_length",),
    "tokenizer.json": ("truncation.max_length",),
}  # fmt: skip
# Bytes; the tokenizers of many languages have tens of megabytes.
_MAX_BYTES = {"tokenizer.json": 2**30}


class Limit(NamedTuple):
    """A number of tokens at which a file truncates texts; in the key, dots are between the levels."""

    file: str
    key: str
    tokens: int


def find_limits(folder: pathlib.Path) -> list[Limit]:
    """Find the limits in the files of a checkpoint: those of sentence-transformers first, then those of the tokenizer.

    Files without the key, or with null in its place, set no limit. A file that is no JSON object is refused.
    """
    return [limit for *_, limits in _files(folder) for limit in limits]


def sentence_limit(folder: pathlib.Path) -> Limit | None:
    """The limit that applies when texts are truncated: of sentence-transformers, or else of the tokenizer, or None."""
    limits = [limit for limit in find_limits(folder) if not limit.file.endswith("tokenizer.json")]
    of_sentences = [limit for limit in limits if not limit.file.endswith("tokenizer_config.json")]
    return min(of_sentences or limits, key=lambda limit: limit.tokens, default=None)


def set_limits(folder: pathlib.Path, max_length: int) -> list[dict[str, Any]]:
    """Let nothing truncate texts below `max_length`, the number of tokens that the model takes.

    Limits of the tokenizer that are larger stay. Those of sentence-transformers become smaller too, because a text of
    more tokens than the model takes ends in an error. Limits that are not set stay so.

    Returns:
        "file", "key", "before" and "after" of each limit that was changed.
    """
    changed = []
    for path, values, limits in _files(folder):
        wrong = [x for x in limits if x.tokens < max_length or (x.tokens > max_length and path.name not in _KEYS)]
        for limit in wrong:
            inner, (*parents, last) = values, limit.key.split(".")
            for part in parents:
                inner = inner[part]
            inner[last] = max_length
            changed.append({"file": limit.file, "key": limit.key, "before": limit.tokens, "after": max_length})
        if wrong:
            write_json(path, values)
    return changed


def _files(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, dict[str, Any], list[Limit]]]:
    """The files that can set limits, with their contents and their limits.

    Subfolders with a model of their own are skipped: their limits are those of another model.
    """
    inner = [path for path in sorted(folder.iterdir()) if path.is_dir()]
    for pattern, keys in _KEYS.items():
        for path in (path for part in (folder, *inner) for path in sorted(part.glob(pattern))):
            config, name = path.with_name("config.json"), path.relative_to(folder).as_posix()
            if path.parent != folder and config.is_file() and "model_type" in read_json_object(config):
                continue
            values = read_json_object(path, max_bytes=_MAX_BYTES.get(path.name, MAX_BYTES), name=name)
            numbers = {key: _number(values, key) for key in keys}
            yield path, values, [Limit(name, key, number) for key, number in numbers.items() if number is not None]


def _number(values: Mapping[str, Any], key: str) -> int | None:
    """The positive integer under a key; None if there is none."""
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found if type(found) is int and found > 0 else None
