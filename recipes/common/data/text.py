"""Text for language models: documents from files or a hub, cut into windows.

An example is a window of at most `block_size` tokens of a single document. Documents are not packed into one window,
since sub-quadratic methods refuse packed sequences. The end of a document gives a shorter window, which is padded in
its batch or dropped.
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
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from hf_efficient_attn.io.json import read_json_lines
from hf_efficient_attn.io.reading import special_tokens as special_tokens
from hf_efficient_attn.io.text import read_text

IGNORED = -100  # the label of tokens without loss, as in Transformers
_COUNTED = 10_000  # windows whose tokens are counted, at most
TEXT_SUFFIXES = (".txt", ".txt.gz")
JSON_SUFFIXES = (".jsonl", ".jsonl.gz")
SEPARATORS = {"blank-line": r"\n[ \t\r]*\n\s*"}


class Cut(NamedTuple):
    """How documents are cut into windows.

    Attributes:
        block_size: largest number of tokens of a window, with special tokens.
        drop_short: drop the shorter window at the end of a document.
        prefix: special tokens before the text of every window.
        suffix: special tokens after it.
        offsets: keep the position of every token in the document, which whole-word masking needs.
    """

    block_size: int
    drop_short: bool = False
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    offsets: bool = False


def text_files(sources: Sequence[str]) -> list[pathlib.Path]:
    """The given files, and the text files in the given folders, sorted.

    Raises:
        ValueError: a file or folder does not exist, or a folder holds no text.
    """
    found: list[pathlib.Path] = []
    known = TEXT_SUFFIXES + JSON_SUFFIXES
    for source in sources:
        path = pathlib.Path(source).expanduser()
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.is_file() and p.name.lower().endswith(known))
            if not files:
                raise ValueError(f"{path}: no {', '.join(known)} in this folder")
            found += files
        elif path.is_file():
            found.append(path)
        else:
            raise ValueError(f"{path}: no such file or folder (give the id of a hub data set with --dataset)")
    return list(dict.fromkeys(found))


def documents_of(path: pathlib.Path, *, column: str = "text", separator: str | None = None) -> Iterator[str]:
    """The documents of one file, without empty ones.

    Args:
        path: a `.jsonl` or `.jsonl.gz` file with one document per line, or a plain text file.
        column: field of the text in a `.jsonl` file.
        separator: separator of the documents in a plain text file; "blank-line" for one or more empty lines; None if
            the file is a single document.

    Raises:
        ValueError: the file, or a line of it, cannot be read.
    """
    if path.name.lower().endswith(JSON_SUFFIXES):
        texts: Iterable[str] = _json_texts(path, column)
    else:
        content = read_text(path)
        if separator is None:
            texts = [content]
        elif separator in SEPARATORS:
            texts = re.split(SEPARATORS[separator], content)
        else:
            texts = content.split(separator)
    yield from (text for text in texts if text.strip())


def _json_texts(path: pathlib.Path, column: str) -> Iterator[str]:
    for number, row in read_json_lines(path):
        if not isinstance(row.get(column), str):
            names = ", ".join(row) or "none"
            raise ValueError(
                f"{path}, line {number}: no text in the field {column!r} (fields: {names}); give --text_column"
            )
        yield row[column]


def documents_of_hub(name: str, subset: str | None, split: str, column: str) -> Iterator[str]:
    """The documents of a hub data set, one per row."""
    rows = load_dataset(name, subset, split=split)
    if column not in rows.column_names:
        raise ValueError(
            f"{name}, split {split}: no column {column!r} (columns: {', '.join(rows.column_names)}); give --text_column"
        )
    yield from (text for text in rows[column] if isinstance(text, str) and text.strip())


class Tokens(NamedTuple):
    """A document: token ids (N,) int32, and start and end of each token in the text, (N, 2) int32, or None."""

    ids: np.ndarray
    offsets: np.ndarray | None

    def part(self, start: int, end: int) -> "Tokens":
        """The tokens from `start` to `end`, which is excluded."""
        return Tokens(self.ids[start:end], None if self.offsets is None else self.offsets[start:end])


def tokenize(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, offsets: bool = False, total: int | None = None
) -> list[Tokens]:
    """Tokenize each text, without special tokens.

    Args:
        texts: the texts.
        tokenizer: the tokenizer.
        offsets: keep the position of each token in the text.
        total: number of texts, for the progress bar.

    Raises:
        ValueError: the texts are empty, or the tokenizer has no offsets.
    """
    if offsets and not tokenizer.is_fast:
        raise ValueError(
            "whole-word masking needs a fast tokenizer, which knows the positions of its tokens in the text"
        )
    found = []
    for text in tqdm(texts, desc="tokens", total=total, unit=" documents", disable=None, leave=False):
        encoded = tokenizer(
            text,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=offsets,
            verbose=False,  # no warning about documents that are longer than the model takes
        )
        positions = np.asarray(encoded["offset_mapping"], np.int32).reshape(-1, 2) if offsets else None
        found.append(Tokens(np.asarray(encoded["input_ids"], np.int32), positions))
    if not sum(len(tokens.ids) for tokens in found):
        raise ValueError("the texts are empty: no document has any token")
    return found


def split_tails(documents: Sequence[Tokens], share: float) -> tuple[list[Tokens], list[Tokens]]:
    """Split every document into its beginning and its last `share`, to evaluate on."""
    kept, tails = [], []
    for tokens in documents:
        count = len(tokens.ids)
        end = count - int(count * share)
        kept.append(tokens.part(0, end))
        tails.append(tokens.part(end, count))
    return kept, tails


def split_documents(documents: Sequence[Tokens], share: float, seed: int = 0) -> tuple[list[Tokens], list[Tokens]]:
    """Hold out a random share of the documents; return the others and the held-out ones."""
    held = max(1, round(len(documents) * share))
    if held >= len(documents):
        raise ValueError(
            f"{len(documents)} documents cannot be split into training and evaluation: use --eval_from tails, "
            "--document_separator or --eval_text"
        )
    chosen = set(np.random.default_rng(seed).permutation(len(documents))[:held].tolist())
    return (
        [tokens for i, tokens in enumerate(documents) if i not in chosen],
        [tokens for i, tokens in enumerate(documents) if i in chosen],
    )


def windows(documents: Sequence[Tokens], cut: Cut, where: str = "the texts") -> Dataset:
    """Cut documents into consecutive windows without overlap. Windows with fewer than two tokens are dropped.

    Args:
        documents: the documents.
        cut: how to cut them.
        where: source of the documents, for messages.

    Returns:
        A Dataset with the columns `input_ids`, `length`, `document` and `row` (the number of the window), and
        `offset_mapping` if the cut keeps offsets.

    Raises:
        ValueError: the block size has no room for text besides the special tokens, or no window is left.
    """
    room = cut.block_size - len(cut.prefix) - len(cut.suffix)
    if room < 2:
        raise ValueError(f"--block_size {cut.block_size} has no room for text besides the special tokens")
    prefix, suffix = np.asarray(cut.prefix, np.int32), np.asarray(cut.suffix, np.int32)
    no_offsets = [np.zeros((len(special), 2), np.int32) for special in (prefix, suffix)]
    columns: dict[str, list] = {"input_ids": [], "length": [], "document": [], "row": []}
    if cut.offsets:
        columns["offset_mapping"] = []
    for number, tokens in enumerate(documents):
        for start in range(0, len(tokens.ids), room):
            part = tokens.part(start, start + room)
            if len(part.ids) < (room if cut.drop_short else 2):
                continue
            ids = np.concatenate((prefix, part.ids, suffix))
            columns["input_ids"].append(ids)
            columns["length"].append(len(ids))
            columns["document"].append(number)
            columns["row"].append(len(columns["row"]))
            if cut.offsets:
                columns["offset_mapping"].append(np.concatenate((no_offsets[0], part.offsets, no_offsets[1])))
    if not columns["row"]:
        longest = max((len(tokens.ids) for tokens in documents), default=0)
        raise ValueError(
            f"{where}: no window of {cut.block_size} tokens (the longest document has {longest})"
            + ("; leave out --drop_short or give a smaller --block_size" if cut.drop_short and longest > 1 else "")
        )
    return Dataset.from_dict(columns).with_format("numpy")


def pad(sequences: Sequence[Any], value: int) -> Tensor:
    """Pad sequences of integers on the right to the longest one: (B, N) int64."""
    padded = torch.full((len(sequences), max(map(len, sequences))), value, dtype=torch.int64)
    for i, ids in enumerate(sequences):
        padded[i, : len(ids)] = torch.from_numpy(np.array(ids, np.int64))
    return padded


def padding_mask(sequences: Sequence[Any]) -> Tensor:
    """The attention mask of padded sequences, 1 for tokens and 0 for padding: (B, N) int64."""
    return pad([np.ones(len(ids), np.int64) for ids in sequences], 0)


@dataclass
class CausalCollator:
    """Collates batches of a causal language model: `input_ids`, `attention_mask`, `labels` (B, N), padded on the right.

    The labels are the tokens themselves, which the model shifts, or the example's own `labels`. Padding is identified
    by its position, so that the tokenizer needs no padding token and an end-of-text token keeps its label.
    """

    pad_token_id: int = 0

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Collate a batch."""
        ids = [feature["input_ids"] for feature in features]
        labels = [feature.get("labels", feature["input_ids"]) for feature in features]
        return {
            "input_ids": pad(ids, self.pad_token_id),
            "attention_mask": padding_mask(ids),
            "labels": pad(labels, IGNORED),
        }


class MaskingCollator:
    """Collates batches of a masked language model: `input_ids`, `attention_mask`, `labels` (B, N), padded on the right.

    Transformers' DataCollatorForLanguageModeling draws the masks. The mask of a window depends on the seed, the epoch
    and the window's number only. It is new in every epoch, but independent of the batch, the number of processes and
    interruptions of the run. A window that has `labels` already is only padded.

    Args:
        tokenizer: the tokenizer.
        probability: share of the tokens that are masked.
        whole_words: mask whole words.
        seed: seed of the masks.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        probability: float = 0.15,
        whole_words: bool = False,
        seed: int = 0,
    ) -> None:
        if tokenizer.mask_token is None:
            raise ValueError("the tokenizer has no mask token, which masked language models need: train with clm.py")
        if tokenizer.pad_token_id is None:
            raise ValueError("the tokenizer has no padding token, which batches of windows of different lengths need")
        # Whole words are always replaced by mask tokens. Transformers warns if this is not set.
        replaced = {"mask_replace_prob": 1.0, "random_replace_prob": 0.0} if whole_words else {}
        self.masking = DataCollatorForLanguageModeling(
            tokenizer, mlm_probability=probability, whole_word_mask=whole_words, seed=seed, **replaced
        )
        self.pad_token_id = tokenizer.pad_token_id
        self.special = frozenset(tokenizer.all_special_ids)
        self.seed, self.epoch = seed, 0

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Collate a batch."""
        masked = [self.mask(feature, self.epoch) if "labels" not in feature else feature for feature in features]
        ids = [feature["input_ids"] for feature in masked]
        return {
            "input_ids": pad(ids, self.pad_token_id),
            "attention_mask": padding_mask(ids),
            "labels": pad([feature["labels"] for feature in masked], IGNORED),
        }

    def mask(self, feature: dict[str, Any], epoch: int) -> dict[str, np.ndarray]:
        """Mask one window; return its `input_ids` and `labels`."""
        ids = torch.as_tensor(np.asarray(feature["input_ids"], np.int64))[None]
        special = torch.tensor([[token in self.special for token in ids[0].tolist()]])
        offsets = feature.get("offset_mapping")
        draw = np.random.SeedSequence([self.seed, epoch, int(feature["row"])]).generate_state(1, np.uint64)
        self.masking.generator = torch.Generator().manual_seed(int(draw[0] >> 1))
        masked, labels = self.masking.torch_mask_tokens(
            ids, special_tokens_mask=special, offset_mapping=None if offsets is None else np.asarray(offsets)[None]
        )
        return {"input_ids": masked[0].numpy(), "labels": labels[0].numpy()}

    def mask_once(self, rows: Dataset) -> Dataset:
        """Give every window a fixed mask for evaluation, which depends on the seed only."""
        masked = [self.mask(row, epoch=0) for row in rows]
        return Dataset.from_dict({key: [row[key] for row in masked] for key in ("input_ids", "labels")}).with_format(
            "numpy"
        )


def baselines(train: Dataset, evaluation: Dataset, vocab_size: int, special: Iterable[int] = ()) -> dict[str, float]:
    """What can be predicted of tokens without a model, by the frequencies of the tokens.

    Args:
        train: windows with `input_ids`; the frequencies are those of at most 10,000 windows, evenly spaced.
        evaluation: windows with `labels`.
        vocab_size: the number of tokens.
        special: tokens that are never predicted, and not counted.

    Returns:
        "frequencies_loss": nats per token if each has the probability of its frequency. Every count is larger by one,
        so that no token is impossible. "most_frequent_accuracy": share of the most frequent token.
    """
    step = -(-len(train) // _COUNTED)
    counts = np.ones(vocab_size, np.int64)
    for rows in train.select(range(0, len(train), step)).iter(1000):
        counts += np.bincount(np.concatenate([np.asarray(ids) for ids in rows["input_ids"]]), minlength=vocab_size)
    counts[list(special)] = 0
    labels = np.concatenate([np.asarray(row) for row in evaluation["labels"]])
    labels = labels[labels != IGNORED]
    loss = np.log(counts.sum()) - np.log(counts[labels]).mean()
    return {"frequencies_loss": float(loss), "most_frequent_accuracy": float((labels == counts.argmax()).mean())}


class EpochOfMasks(TrainerCallback):
    """Tells a MaskingCollator the epoch."""

    def __init__(self, collator: MaskingCollator) -> None:
        self.collator = collator

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Set the epoch."""
        self.collator.epoch = int(state.epoch or 0)


def first(rows: Dataset, count: int | None) -> Dataset:
    """The first `count` windows, or all if `count` is None."""
    return rows if count is None or count >= len(rows) else rows.select(range(count))
