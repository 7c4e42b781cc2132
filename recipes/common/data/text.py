"""Text for language models: documents from files or a hub, cut into windows.

An example is a window of at most `block_size` tokens of a single document. Documents are not packed into one window,
since sub-quadratic methods refuse packed sequences. The end of a document gives a shorter window, which is padded in
its batch or dropped.
"""

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset, load_dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

from hf_efficient_attn.io.reading import read_json_lines, read_text

IGNORED = -100  # the label of tokens without loss, as in Transformers
JSON_SUFFIXES = (".jsonl", ".jsonl.gz")
SUFFIXES = (".txt", ".txt.gz", *JSON_SUFFIXES)


def text_files(sources: Sequence[str]) -> list[pathlib.Path]:
    """The given files, and the text files in the given folders, sorted. Refuses what is missing or holds no text."""
    found: list[pathlib.Path] = []
    for path in (pathlib.Path(source).expanduser() for source in sources):
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.is_file() and p.name.lower().endswith(SUFFIXES))
            if not files:
                raise ValueError(f"{path}: no {', '.join(SUFFIXES)} in this folder")
            found += files
        elif path.is_file():
            found.append(path)
        else:
            raise ValueError(f"{path}: no such file or folder (give the id of a hub data set with --dataset)")
    return list(dict.fromkeys(found))


def documents_of(path: pathlib.Path, column: str = "text") -> Iterator[str]:
    """The documents of one file, without empty ones.

    A line of a `.jsonl` or `.jsonl.gz` file is a document, with the text in the field `column`. Any other file is plain
    text, and one document.
    """
    if path.name.lower().endswith(JSON_SUFFIXES):
        texts = []
        for number, row in read_json_lines(path):
            if not isinstance(row.get(column), str):
                names = ", ".join(row) or "none"
                raise ValueError(
                    f"{path}, line {number}: no text in the field {column!r} (fields: {names}); give --text_column"
                )
            texts.append(row[column])
    else:
        texts = [read_text(path)]
    yield from (text for text in texts if text.strip())


def documents_of_hub(name: str, subset: str | None, split: str, column: str) -> Iterator[str]:
    """The documents of a hub data set, one per row."""
    rows = load_dataset(name, subset, split=split)
    if column not in rows.column_names:
        raise ValueError(f"{name}, {split}: no column {column!r} ({', '.join(rows.column_names)}); give --text_column")
    yield from (text for text in rows[column] if isinstance(text, str) and text.strip())


def tokenize(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    """The token ids of each text, (N,) int32, without special tokens. Refuses texts without any token."""
    # Without `verbose` there is no warning about documents that are longer than the model takes.
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    bar = tqdm(texts, desc="tokens", unit=" documents", disable=None, leave=False)
    found = [np.asarray(tokenizer(text, **options)["input_ids"], np.int32) for text in bar]
    if not sum(map(len, found)):
        raise ValueError("the texts are empty: no document has any token")
    return found


def split_tails(documents: Sequence[np.ndarray], share: float) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Split every document into its beginning and its last `share`, to evaluate on."""
    ends = [len(ids) - int(len(ids) * share) for ids in documents]
    pairs = list(zip(documents, ends, strict=True))
    return [ids[:end] for ids, end in pairs], [ids[end:] for ids, end in pairs]


def windows(
    documents: Sequence[np.ndarray],
    block_size: int,
    special: tuple[Sequence[int], Sequence[int]] = ((), ()),
    *,
    drop_short: bool = False,
    where: str = "the texts",
) -> Dataset:
    """Cut documents, given by their token ids, into consecutive windows without overlap.

    `special` are the tokens before and after the text of every window, which count for `block_size`. With `drop_short`
    the shorter window at the end of a document is dropped; one with fewer than two tokens always is. The columns are
    `input_ids`, `length` and `row`, the number of the window.
    """
    room = block_size - sum(map(len, special))
    if room < 2:
        raise ValueError(f"--block_size {block_size} has no room for text besides the special tokens")
    prefix, suffix = (np.asarray(ids, np.int32) for ids in special)
    parts = (ids[start : start + room] for ids in documents for start in range(0, len(ids), room))
    found = [np.concatenate((prefix, ids, suffix)) for ids in parts if len(ids) >= (room if drop_short else 2)]
    if not found:
        longest = max(map(len, documents), default=0)
        raise ValueError(
            f"{where}: no window of {block_size} tokens (the longest document has {longest})"
            + ("; leave out --drop_short or give a smaller --block_size" if drop_short and longest > 1 else "")
        )
    columns = {"input_ids": found, "length": list(map(len, found)), "row": list(range(len(found)))}
    return Dataset.from_dict(columns).with_format("numpy")


def pad(sequences: Sequence[Any], value: int) -> Tensor:
    """Pad sequences of integers on the right to the longest one: (B, N) int64."""
    return pad_sequence([torch.from_numpy(np.array(ids, np.int64)) for ids in sequences], True, value)


def padding_mask(sequences: Sequence[Any]) -> Tensor:
    """The attention mask of padded sequences, 1 for tokens and 0 for padding: (B, N) int64."""
    return pad([np.ones(len(ids)) for ids in sequences], 0)


def collate(features: Sequence[dict[str, Any]], pad_token_id: int) -> dict[str, Tensor]:
    """Collate windows to `input_ids`, `attention_mask`, `labels` (B, N), padded on the right.

    Without `labels` of its own, the labels of a window are its tokens, which a causal model shifts. Padding is
    identified by its position, so that an end-of-text token that also pads keeps its label.
    """
    ids = [feature["input_ids"] for feature in features]
    labels = [feature.get("labels", feature["input_ids"]) for feature in features]
    return {"input_ids": pad(ids, pad_token_id), "attention_mask": padding_mask(ids), "labels": pad(labels, IGNORED)}


class MaskingCollator:
    """Collates batches of a masked language model as `collate` does, with tokens masked.

    Transformers' DataCollatorForLanguageModeling draws the masks. The mask of a window depends on the seed, the epoch
    and the window's number only. It is new in every epoch, but independent of the batch, the number of processes and
    interruptions of the run. A window that has `labels` already is only padded.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, probability: float = 0.15, seed: int = 0) -> None:
        if tokenizer.mask_token is None:
            raise ValueError("the tokenizer has no mask token, which masked language models need: train with clm.py")
        if tokenizer.pad_token_id is None:
            raise ValueError("the tokenizer has no padding token, which batches of windows of different lengths need")
        self.masking = DataCollatorForLanguageModeling(tokenizer, mlm_probability=probability, seed=seed)
        self.special = torch.tensor(tokenizer.all_special_ids)
        self.pad_token_id, self.seed = tokenizer.pad_token_id, seed
        # In shared memory, since workers may live longer than an epoch.
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def __call__(self, features: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Collate a batch."""
        masked = [feature if "labels" in feature else self.mask(feature, int(self.epoch)) for feature in features]
        return collate(masked, self.pad_token_id)

    def mask(self, feature: dict[str, Any], epoch: int = 0) -> dict[str, np.ndarray]:
        """Mask one window; return its `input_ids` and `labels`."""
        ids = torch.from_numpy(np.array(feature["input_ids"], np.int64))[None]
        drawn = np.random.SeedSequence([self.seed, epoch, int(feature["row"])]).generate_state(1, np.uint64)
        self.masking.generator = torch.Generator().manual_seed(int(drawn[0] >> 1))
        masked, labels = self.masking.torch_mask_tokens(ids, special_tokens_mask=torch.isin(ids, self.special))
        return {"input_ids": masked[0].numpy(), "labels": labels[0].numpy()}

    def mask_once(self, rows: Dataset) -> Dataset:
        """Give every window a fixed mask for evaluation, which depends on the seed only."""
        return Dataset.from_list([self.mask(row) for row in rows]).with_format("numpy")
