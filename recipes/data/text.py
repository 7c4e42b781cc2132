"""Text for language models: documents out of files or a hub, cut into windows that hold one document each.

A row is a window of at most `block_size` tokens of one document. Two documents never share a row: attention would have
to be told where one ends, which sub-quadratic methods cannot take (they refuse packed sequences). What is left at the
end of a document is a shorter row, padded in its batch, or dropped.
"""

import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset, load_dataset
from torch import Tensor
from tqdm import tqdm
from transformers import DataCollatorForLanguageModeling, TrainerCallback

from hf_efficient_attn.io.reading import json_rows, read_text
from hf_efficient_attn.io.reading import special_tokens as special_tokens

IGNORED = -100  # the label of a token that counts in no loss, as in Transformers
TEXT_SUFFIXES = (".txt", ".txt.gz")
JSON_SUFFIXES = (".jsonl", ".jsonl.gz")
SEPARATORS = {"blank-line": r"\n[ \t\r]*\n\s*"}


class Cut(NamedTuple):
    """How documents become rows.

    Attributes:
        block_size: tokens of a row at most, special tokens included.
        drop_short: whether what is left at the end of a document is dropped rather than padded.
        prefix, suffix: special tokens that stand before and after what a row holds of its document.
        offsets: whether a row keeps where in the document its tokens stand, which whole-word masking needs.
    """

    block_size: int
    drop_short: bool = False
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    offsets: bool = False


def text_files(sources: Sequence[str]) -> list[pathlib.Path]:
    """The files that are named, and those of text in the folders that are named, sorted.

    Raises:
        ValueError: nothing is there, or a folder holds no text.
    """
    found: list[pathlib.Path] = []
    known = TEXT_SUFFIXES + JSON_SUFFIXES
    for source in sources:
        path = pathlib.Path(source).expanduser()
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and p.name.lower().endswith(known))
            if not inside:
                raise ValueError(f"{path}: no {', '.join(known)} in this folder")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise ValueError(f"{path}: no such file or folder (for a data set of a hub give --dataset ID)")
    return list(dict.fromkeys(found))


def documents_of(path: pathlib.Path, *, column: str = "text", separator: str | None = None) -> Iterator[str]:
    """The documents of one file, without empty ones.

    Args:
        path: `.jsonl` and `.jsonl.gz` hold a document a line, in the field `column`; any other file is plain text.
        separator: what stands between the documents of a plain text file; "blank-line" for one or more empty lines;
            None where the file is one document.

    Raises:
        ValueError: names the file, and the line where there is one, that cannot be read.
    """
    if path.name.lower().endswith(JSON_SUFFIXES):
        texts: Iterable[str] = _json_texts(path, column)
    else:
        whole = read_text(path)
        if separator is None:
            texts = [whole]
        elif separator in SEPARATORS:
            texts = re.split(SEPARATORS[separator], whole)
        else:
            texts = whole.split(separator)
    yield from (text for text in texts if text.strip())


def _json_texts(path: pathlib.Path, column: str) -> Iterator[str]:
    for number, row in json_rows(path):
        if not isinstance(row.get(column), str):
            names = ", ".join(row) or "none"
            raise ValueError(f"{path}, line {number}: no text in {column!r} (fields: {names}); give --text_column")
        yield row[column]


def documents_of_hub(name: str, subset: str | None, split: str, column: str) -> Iterator[str]:
    """The rows of a data set of a hub, each a document."""
    rows = load_dataset(name, subset, split=split)
    if column not in rows.column_names:
        raise ValueError(
            f"{name}, split {split}: no column {column!r} (columns: {', '.join(rows.column_names)}); give --text_column"
        )
    yield from (text for text in rows[column] if isinstance(text, str) and text.strip())


class Tokens(NamedTuple):
    """A document: token ids (N,) int32, and where they stand in its text, (N, 2) int32 or None."""

    ids: np.ndarray
    offsets: np.ndarray | None

    def part(self, start: int, end: int) -> "Tokens":
        return Tokens(self.ids[start:end], None if self.offsets is None else self.offsets[start:end])


def tokenize(texts: Iterable[str], tokenizer, *, offsets: bool = False, total: int | None = None) -> list[Tokens]:
    """Each text as tokens, without special ones.

    Raises:
        ValueError: there is no text, or offsets are asked of a tokenizer that has none.
    """
    if offsets and not tokenizer.is_fast:
        raise ValueError("whole words need a fast tokenizer, which knows where its tokens stand in the text")
    found = []
    for text in tqdm(texts, desc="tokens", total=total, unit=" documents", disable=None, leave=False):
        encoded = tokenizer(
            text,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=offsets,
            verbose=False,  # that a document is longer than the model is no news here
        )
        places = np.asarray(encoded["offset_mapping"], np.int32).reshape(-1, 2) if offsets else None
        found.append(Tokens(np.asarray(encoded["input_ids"], np.int32), places))
    if not sum(len(tokens.ids) for tokens in found):
        raise ValueError("the texts are empty: no document has a token")
    return found


def split_tails(documents: Sequence[Tokens], share: float) -> tuple[list[Tokens], list[Tokens]]:
    """What is left of each document, and its last `share`, to evaluate on."""
    kept, tails = [], []
    for tokens in documents:
        count = len(tokens.ids)
        at = count - int(count * share)
        kept.append(tokens.part(0, at))
        tails.append(tokens.part(at, count))
    return kept, tails


def split_documents(documents: Sequence[Tokens], share: float, seed: int = 0) -> tuple[list[Tokens], list[Tokens]]:
    """All but a share of the documents, and that share, drawn by the seed."""
    held = max(1, round(len(documents) * share))
    if held >= len(documents):
        raise ValueError(
            f"{len(documents)} documents cannot be split into training and evaluation; use --eval_from tails, "
            "--document_separator or --eval_text"
        )
    chosen = set(np.random.default_rng(seed).permutation(len(documents))[:held].tolist())
    return (
        [tokens for i, tokens in enumerate(documents) if i not in chosen],
        [tokens for i, tokens in enumerate(documents) if i in chosen],
    )


def windows(documents: Sequence[Tokens], cut: Cut, where: str = "the texts") -> Dataset:
    """Rows with `input_ids`, `length`, `document` and `row`, and `offset_mapping` where the cut keeps offsets.

    Rows follow one another in the documents without overlap. Rows of which nothing could be predicted (fewer than two
    tokens) are left out.

    Raises:
        ValueError: the block size leaves no room beside the special tokens, or not one row is left.
    """
    room = cut.block_size - len(cut.prefix) - len(cut.suffix)
    if room < 2:
        raise ValueError(f"--block_size {cut.block_size} leaves no room for text beside the special tokens")
    prefix, suffix = np.asarray(cut.prefix, np.int32), np.asarray(cut.suffix, np.int32)
    nowhere = [np.zeros((len(special), 2), np.int32) for special in (prefix, suffix)]
    columns: dict[str, list] = {"input_ids": [], "length": [], "document": [], "row": []}
    if cut.offsets:
        columns["offset_mapping"] = []
    for number, tokens in enumerate(documents):
        for start in range(0, len(tokens.ids), room):
            here = tokens.part(start, start + room)
            if len(here.ids) < (room if cut.drop_short else 2):
                continue
            row = np.concatenate((prefix, here.ids, suffix))
            columns["input_ids"].append(row)
            columns["length"].append(len(row))
            columns["document"].append(number)
            columns["row"].append(len(columns["row"]))
            if cut.offsets:
                columns["offset_mapping"].append(np.concatenate((nowhere[0], here.offsets, nowhere[1])))
    if not columns["row"]:
        longest = max((len(tokens.ids) for tokens in documents), default=0)
        raise ValueError(
            f"{where}: no window of {cut.block_size} tokens (the longest document has {longest})"
            + ("; leave out --drop_short or give a smaller --block_size" if cut.drop_short and longest > 1 else "")
        )
    return Dataset.from_dict(columns).with_format("numpy")


def pad(rows: Sequence[Any], value: int, length: int | None = None) -> Tensor:
    """Rows of numbers, filled on the right: (B, N) int64, N the longest row's or `length`."""
    length = length or max(len(row) for row in rows)
    padded = torch.full((len(rows), length), value, dtype=torch.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.from_numpy(np.array(row, np.int64))
    return padded


def padding_mask(rows: Sequence[Any]) -> Tensor:
    """1 where a token stands, 0 where `pad` fills: (B, N) int64."""
    return pad([np.ones(len(row), np.int64) for row in rows], 0)


@dataclass
class CausalCollator:
    """Batches of a causal language model: `input_ids`, `attention_mask`, `labels` (B, N), padded on the right.

    The labels are the tokens themselves (the model shifts them), or a row's own `labels`. Padding is told by its place,
    so that a tokenizer needs no padding token and a true end-of-text token keeps its label.
    """

    pad_token_id: int = 0

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        rows = [feature["input_ids"] for feature in features]
        labels = [feature.get("labels", feature["input_ids"]) for feature in features]
        return {
            "input_ids": pad(rows, self.pad_token_id),
            "attention_mask": padding_mask(rows),
            "labels": pad(labels, IGNORED),
        }


class MaskingCollator:
    """Batches of a masked language model: `input_ids`, `attention_mask`, `labels` (B, N), padded on the right.

    Masks by Transformers' DataCollatorForLanguageModeling: a row's mask is drawn by seed, epoch and the row's number
    alone. It is a new one in every epoch, and the same whatever the batch, the number of processes, and however often
    the run was stopped and resumed. A row that has `labels` already is only padded.
    """

    def __init__(self, tokenizer, *, probability: float = 0.15, whole_words: bool = False, seed: int = 0):
        if tokenizer.mask_token is None:
            raise ValueError("the tokenizer has no mask token, which a masked language model needs; train with clm.py")
        if tokenizer.pad_token_id is None:
            raise ValueError("the tokenizer has no padding token, which batches of rows of several lengths need")
        # Whole words are replaced as a whole: Transformers warns unless told so.
        replaced = {"mask_replace_prob": 1.0, "random_replace_prob": 0.0} if whole_words else {}
        self.masking = DataCollatorForLanguageModeling(
            tokenizer, mlm_probability=probability, whole_word_mask=whole_words, seed=seed, **replaced
        )
        self.pad_token_id = tokenizer.pad_token_id
        self.special = frozenset(tokenizer.all_special_ids)
        self.seed, self.epoch = seed, 0

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        masked = [self.mask(feature, self.epoch) if "labels" not in feature else feature for feature in features]
        rows = [feature["input_ids"] for feature in masked]
        return {
            "input_ids": pad(rows, self.pad_token_id),
            "attention_mask": padding_mask(rows),
            "labels": pad([feature["labels"] for feature in masked], IGNORED),
        }

    def mask(self, feature: dict[str, Any], epoch: int) -> dict[str, np.ndarray]:
        """`input_ids` with masks and `labels` of one row."""
        ids = torch.as_tensor(np.asarray(feature["input_ids"], np.int64))[None]
        special = torch.tensor([[token in self.special for token in ids[0].tolist()]])
        places = feature.get("offset_mapping")
        draw = np.random.SeedSequence([self.seed, epoch, int(feature["row"])]).generate_state(1, np.uint64)
        self.masking.generator = torch.Generator().manual_seed(int(draw[0] >> 1))
        masked, labels = self.masking.torch_mask_tokens(
            ids, special_tokens_mask=special, offset_mapping=None if places is None else np.asarray(places)[None]
        )
        return {"input_ids": masked[0].numpy(), "labels": labels[0].numpy()}

    def mask_once(self, rows: Dataset) -> Dataset:
        """Rows with one fixed mask each, for evaluation: the same in every evaluation of every run of a seed."""
        masked = [self.mask(row, epoch=0) for row in rows]
        return Dataset.from_dict({key: [row[key] for row in masked] for key in ("input_ids", "labels")}).with_format(
            "numpy"
        )


class EpochOfMasks(TrainerCallback):
    """Tells a MaskingCollator the epoch, from which it draws."""

    def __init__(self, collator: MaskingCollator):
        self.collator = collator

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.collator.epoch = int(state.epoch or 0)


def first(rows: Dataset, count: int | None) -> Dataset:
    """The first `count` rows, or all."""
    return rows if count is None or count >= len(rows) else rows.select(range(count))


def repeated_passages(
    rows: Dataset, *, distances: Sequence[int], passage: int, block_size: int, count: int | None = None
) -> dict[int, Dataset]:
    """Distance -> rows in which a passage stands a second time, so many tokens after its first place.

    Each is a full row of `rows`, (block_size,), into which the passage was inserted; what is pushed out at its end is
    dropped. The passages and their first places, drawn once, are the same for all distances, so that only the distance
    differs. Only the tokens of the two places have `labels`, the first place's first. The first token of each place has
    none: nothing tells at the second place that the passage begins again.

    Args:
        count: rows a distance; None for as many as there are full rows.

    Raises:
        ValueError: the two places do not fit into a row or overlap, or no row is full.
    """
    if passage < 2 or min(distances) < passage:
        raise ValueError(
            f"a passage of {passage} tokens cannot stand again {min(distances)} tokens after its beginning: give "
            "--repeat_tokens of 2 or more and --repeat_distances no smaller"
        )
    last = block_size - max(distances) - passage
    if last < 1:
        raise ValueError(
            f"a passage of {passage} tokens and its repetition {max(distances)} tokens later do not fit into windows "
            f"of {block_size}: give a larger --block_size, or smaller --repeat_distances or --repeat_tokens"
        )
    full = [i for i, length in enumerate(rows["length"]) if length == block_size]
    if not full:
        raise ValueError(f"no evaluation window is {block_size} tokens long: repeated passages need whole windows")
    generator = np.random.default_rng(0)
    chosen = [(full[i % len(full)], int(generator.integers(1, last + 1))) for i in range(count or len(full))]
    found = {}
    for distance in distances:
        columns: dict[str, list] = {"input_ids": [], "labels": [], "length": []}
        for i, start in chosen:
            ids = np.asarray(rows[i]["input_ids"])
            again = np.concatenate((ids[: start + distance], ids[start : start + passage], ids[start + distance :]))
            again = again[:block_size]
            labels = np.full_like(again, IGNORED)
            for place in (start, start + distance):
                labels[place + 1 : place + passage] = again[place + 1 : place + passage]
            columns["input_ids"].append(again)
            columns["labels"].append(labels)
            columns["length"].append(block_size)
        found[distance] = Dataset.from_dict(columns).with_format("numpy")
    return found
