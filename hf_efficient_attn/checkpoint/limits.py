"""The numbers of tokens at which the files of a checkpoint truncate texts.

A text is truncated at the smallest of these numbers, whatever the model itself takes:

- `model_max_length` in `tokenizer_config.json`, by Transformers' tokenizers;
- `truncation` in `tokenizer.json`, by programs that use the library tokenizers without Transformers;
- `max_seq_length` in `sentence_bert_config.json`, by sentence-transformers, in place of `model_max_length`. Newer
  versions also read `model_max_length` among the arguments of the tokenizer there.
"""

import pathlib
from collections.abc import Iterator
from typing import Any

from hf_efficient_attn.io.json import read_json_object, write_json

_SENTENCE = "sentence_bert_config.json"
_KEYS = {
    _SENTENCE: (
        "max_seq_length", "tokenizer_args.model_max_length", "processor_kwargs.model_max_length",
        "processing_kwargs.text.max_length", "processing_kwargs.common.max_length",
    ),
    "tokenizer_config.json": ("model_max_length",),
    "tokenizer.json": ("truncation.max_length",),
}  # fmt: skip
_MAX_BYTES = 2**30  # the tokenizers of many languages have tens of megabytes


def sentence_limit(folder: pathlib.Path) -> dict[str, Any] | None:
    """The limit that applies when texts are truncated: of sentence-transformers, or else of the tokenizer, or None.

    It is the "file", the "key" in it, with dots between the levels, and the number of tokens, as "before". Files
    without the key, or with null in its place, set no limit. A file that is no JSON object is refused.
    """
    limits = [limit for limit, *_ in _entries(folder) if limit["file"] != "tokenizer.json"]
    of_sentences = [limit for limit in limits if limit["file"] == _SENTENCE]
    return min(of_sentences or limits, key=lambda limit: limit["before"], default=None)


def set_limits(folder: pathlib.Path, max_length: int) -> list[dict[str, Any]]:
    """Let nothing truncate texts below `max_length`, the number of tokens that the model takes.

    Limits of the tokenizer that are larger stay. Those of sentence-transformers become smaller too, because a text of
    more tokens than the model takes ends in an error. Limits that are not set stay so. Returns each limit that was
    changed, as `sentence_limit` does, with "after".
    """
    changed = []
    for limit, values, holder in _entries(folder):
        if limit["before"] < max_length or (limit["before"] > max_length and limit["file"] == _SENTENCE):
            holder[limit["key"].rpartition(".")[2]] = max_length
            write_json(folder / limit["file"], values)
            changed.append({**limit, "after": max_length})
    return changed


def _entries(folder: pathlib.Path) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Each limit, with the contents of its file and the object in them that contains the number."""
    for name, keys in _KEYS.items():
        if not (folder / name).is_file():
            continue
        values = read_json_object(folder / name, max_bytes=_MAX_BYTES, name=name)
        for key in keys:
            holder: Any = None
            tokens: Any = values
            for part in key.split("."):
                holder, tokens = tokens, tokens.get(part) if isinstance(tokens, dict) else None
            if type(tokens) is int and tokens > 0:
                yield {"file": name, "key": key, "before": tokens}, values, holder
