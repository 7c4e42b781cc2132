"""The tasks of the Long Range Arena (Tay et al., ICLR 2021) as sequences of token ids.

Sources, besides hub data sets for text and image:

    listops     generated (listops.py), or a folder with basic_train.tsv, basic_val.tsv, basic_test.tsv
    text        reviews as bytes: train/pos/*.txt, train/neg, test/pos, test/neg (aclImdb), or train.jsonl and
                test.jsonl (also .gz) with `text` and `label`
    image       grey pixels of pictures: everything that `images.load` reads, such as <split>/<class>/<file> in a zip
    retrieval   pairs of texts as bytes: new_aan_pairs.train.tsv, .eval.tsv, .test.tsv
    pathfinder  pictures: curv_contour_length_14/metadata/*.npy (lines of text) and curv_contour_length_14/imgs/..., in
                the folder or in its pathfinder32; split at random into 80, 10 and 10 % with a fixed seed

Token 0 is padding, and token 1 the additional first token of models that pool it. A byte, a grey value or a ListOps
token t is 2 + t.
"""

import pathlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value, load_dataset
from datasets import Sequence as Many
from torch import Tensor
from tqdm import tqdm

from hf_efficient_attn.errors import unknown_name
from hf_efficient_attn.io.json import read_json_lines
from hf_efficient_attn.io.text import read_text
from recipes.common.data import listops
from recipes.common.data.text import pad, padding_mask

PAD, FIRST, OFFSET = 0, 1, 2


@dataclass(frozen=True)
class Task:
    """The benchmark's definition of a task.

    Attributes:
        max_length: largest number of tokens of a sequence.
        tokens: number of different tokens.
        labels: number of labels.
        pairs: an example is a pair of sequences.
    """

    max_length: int
    tokens: int
    labels: int
    pairs: bool = False


TASKS = {
    "listops": Task(2000, len(listops.TOKENS), 10),
    "text": Task(4096, 256, 2),
    "image": Task(1024, 256, 10),
    "retrieval": Task(4000, 256, 2, pairs=True),
    "pathfinder": Task(1024, 256, 2),
}


def task_of(name: str) -> Task:
    """The task with this name. Raises ValueError if there is none."""
    if name not in TASKS:
        raise ValueError(unknown_name("task of the Long Range Arena", name, TASKS))
    return TASKS[name]


def rows_of(
    inputs: Iterable[np.ndarray], labels: Iterable[int], others: Iterable[np.ndarray] | None = None, first: bool = False
) -> Dataset:
    """A Dataset with the columns `input_ids`, `labels` and `length`, and `other_ids` for pairs.

    Args:
        inputs: tokens of each example, from 0. OFFSET is added here.
        labels: labels of the examples.
        others: tokens of the second sequences of pairs.
        first: prepend the token FIRST to every sequence.
    """
    start = [FIRST] if first else []

    def token_ids(values: np.ndarray) -> np.ndarray:
        return np.concatenate((np.asarray(start, np.int16), np.asarray(values, np.int16) + np.int16(OFFSET)))

    columns: dict[str, Any] = {"input_ids": [token_ids(values) for values in inputs]}
    if others is not None:
        columns["other_ids"] = [token_ids(values) for values in others]
    features = {name: Many(Value("int16")) for name in columns}
    columns["labels"] = [int(label) for label in labels]
    columns["length"] = [sum(map(len, ids)) for ids in zip(*(columns[name] for name in features), strict=True)]
    features |= {"labels": Value("int64"), "length": Value("int64")}
    return Dataset.from_dict(columns, features=Features(features)).with_format("numpy")


def collate(features: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Collate `input_ids`, `attention_mask` (B, N), `labels` (B,), and `other_ids`, `other_mask` (B, M) of pairs.

    Sequences are padded to the longest. There is no mask if all have the same length.
    """
    batch: dict[str, Any] = {}
    for ids, mask in (("input_ids", "attention_mask"), ("other_ids", "other_mask")):
        if ids in features[0]:
            sequences = [feature[ids] for feature in features]
            batch[ids] = pad(sequences, PAD)
            if len(set(map(len, sequences))) > 1:
                batch[mask] = padding_mask(sequences)
    batch["labels"] = pad([[int(feature["labels"])] for feature in features], 0)[:, 0]
    return batch


def choose(count: int, most: int | None) -> list[int]:
    """Indices of at most `most` of `count` examples, chosen at random with a fixed seed; all if `most` is None."""
    if most is None or most >= count:
        return list(range(count))
    return sorted(np.random.default_rng(0).permutation(count)[:most].tolist())


def baselines(train: Dataset, evaluation: Dataset, operator_at: int | None = None) -> dict[str, float]:
    """Accuracy on `evaluation` of one or two rules that need no model.

    Args:
        train: examples that the rules are taken from.
        evaluation: examples that they are applied to.
        operator_at: for ListOps, the index of the token with the outermost operator.

    Returns:
        "most_frequent": always the most frequent label. "first_operator", if `operator_at` is given: the most frequent
        label of the expressions with the same outermost operator.
    """
    labels, truth = train["labels"][:].tolist(), evaluation["labels"][:].tolist()
    most_frequent = Counter(labels).most_common(1)[0][0]
    found = {"most_frequent": sum(label == most_frequent for label in truth) / len(truth)}
    if operator_at is not None:
        counts: dict[int, Counter[int]] = {}
        for ids, label in zip(train["input_ids"][:], labels, strict=True):
            counts.setdefault(int(ids[operator_at]), Counter())[label] += 1
        best = {operator: count.most_common(1)[0][0] for operator, count in counts.items()}
        answers = [best.get(int(ids[operator_at]), most_frequent) for ids in evaluation["input_ids"][:]]
        right = sum(answer == label for answer, label in zip(answers, truth, strict=True))
        found["first_operator"] = right / len(truth)
    return found


@dataclass(frozen=True)
class Reading:
    """How a task is read.

    Attributes:
        max_length: largest number of bytes of a text; longer texts are truncated. ListOps are never truncated.
        most: largest numbers of examples of "train" and of "evaluation" splits; None for all.
        first: prepend the token FIRST to every sequence.
        image_size: side to which pictures are resized; None if all pictures have the same size.
        skip_bad: skip pictures that cannot be read, and report them.
    """

    max_length: int
    most: dict[str, int | None]
    first: bool = False
    image_size: int | None = None
    skip_bad: bool = False

    def at_most(self, split: str) -> int | None:
        """The largest number of examples of a split."""
        return self.most.get("train" if split == "train" else "evaluation")


def load_listops(source: str, reading: Reading) -> dict[str, Dataset]:
    """Load the existing splits of train, validation and test of a folder in the benchmark's layout."""
    numbers = {token: number for number, token in enumerate(listops.TOKENS)}
    found = {}
    for split, path in _files(source, {split: f"basic_{name}.tsv" for split, name in _SHORT.items()}).items():
        rows = list(listops.read(read_text(path).split("\n"), str(path)))
        rows = [rows[i] for i in choose(len(rows), reading.at_most(split))]
        longest = max((len(tokens) for tokens, _ in rows), default=0)
        if longest > reading.max_length:
            raise ValueError(
                f"{path}: an expression has {longest} tokens and cannot be truncated: give --max_length {longest}"
            )
        inputs = [np.fromiter((numbers[token] for token in tokens), np.int16) for tokens, _ in rows]
        found[split] = rows_of(inputs, [value for _, value in rows], first=reading.first)
    return found


_SHORT = {"train": "train", "validation": "val", "test": "test"}


def _files(source: str, names: dict[str, str]) -> dict[str, pathlib.Path]:
    """The file of each split. The training set and an evaluation set must exist."""
    folder = pathlib.Path(source).expanduser()
    if not folder.is_dir():
        raise ValueError(f"{source}: no such folder: give one with {', '.join(names.values())}, the benchmark's layout")
    paths = {split: _either(folder / name) for split, name in names.items()}
    found = {split: path for split, path in paths.items() if path is not None}
    if "train" not in found or len(found) < 2:
        missing = [name for split, name in names.items() if split not in found]
        raise ValueError(f"{folder}: no {', '.join(missing)} (or .gz): a training set and an evaluation set are needed")
    return found


def _either(path: pathlib.Path) -> pathlib.Path | None:
    """The file or its gzipped form; None if neither exists."""
    return next((p for p in (path, path.with_name(f"{path.name}.gz")) if p.is_file()), None)


def _bytes(text: str, length: int) -> np.ndarray:
    """The first `length` bytes of a text."""
    return np.frombuffer(text.encode("utf-8")[:length], np.uint8)


def load_text(source: str, reading: Reading) -> dict[str, Dataset]:
    """Load the splits train and test of the text task."""
    folder = pathlib.Path(source).expanduser()
    folder = folder / "aclImdb" if (folder / "aclImdb").is_dir() else folder
    found = {}
    for split in ("train", "test"):
        if not folder.is_dir():
            texts, labels = _hub_texts(source, split, reading)
        elif (folder / split).is_dir():
            texts, labels = _folder_texts(folder / split, reading.at_most(split))
        else:
            texts, labels = _json_texts(folder, split, reading.at_most(split))
        inputs = [_bytes(text, reading.max_length) for text in texts]
        empty = sum(not len(values) for values in inputs)
        if empty:
            raise ValueError(f"{source}, {split}: {empty} texts are empty")
        found[split] = rows_of(inputs, labels, first=reading.first)
    return found


def _hub_texts(source: str, split: str, reading: Reading) -> tuple[list[str], list[int]]:
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source):
        raise ValueError(f"no such folder: {source}")
    try:
        rows = load_dataset(source, split=split)
    except (OSError, ValueError) as error:
        raise ValueError(f"{source} is not a folder and could not be loaded from the hub ({error})") from error
    missing = [name for name in ("text", "label") if name not in rows.column_names]
    if missing:
        raise ValueError(f"{source} has no column {', '.join(missing)}; its columns: {', '.join(rows.column_names)}")
    rows = rows.select(choose(len(rows), reading.at_most(split)))
    return list(rows["text"]), [_sentiment(label, f"{source}, {split}") for label in rows["label"]]


def _folder_texts(folder: pathlib.Path, most: int | None) -> tuple[list[str], list[int]]:
    files = []
    for label, name in enumerate(("neg", "pos")):
        paths = sorted((folder / name).glob("*.txt"))
        if not paths:
            raise ValueError(f"{folder / name}: no .txt file; the layout is {folder}/neg/*.txt and {folder}/pos/*.txt")
        files += [(path, label) for path in paths]
    chosen = [files[i] for i in choose(len(files), most)]
    bar = tqdm(chosen, desc=str(folder), unit=" texts", disable=None, leave=False)
    return [read_text(path) for path, _ in bar], [label for _, label in chosen]


def _json_texts(folder: pathlib.Path, split: str, most: int | None) -> tuple[list[str], list[int]]:
    path = _either(folder / f"{split}.jsonl")
    if path is None:
        raise ValueError(f"{folder} holds neither {split}/pos and {split}/neg nor {split}.jsonl (or .jsonl.gz)")
    rows = []
    for number, row in read_json_lines(path):
        where = f"{path}, line {number}"
        if not isinstance(row.get("text"), str) or "label" not in row:
            raise ValueError(f"{where}: 'text' and 'label' are needed (fields: {', '.join(row)})")
        rows.append((row["text"], _sentiment(row["label"], where)))
    if not rows:
        raise ValueError(f"{path} is empty")
    rows = [rows[i] for i in choose(len(rows), most)]
    return [text for text, _ in rows], [label for _, label in rows]


def _sentiment(label: Any, where: str) -> int:
    known = {"0": 0, "1": 1, "neg": 0, "pos": 1}
    if str(label) not in known:
        raise ValueError(f"{where}: unknown label {label!r}; known: 0 or neg, 1 or pos")
    return known[str(label)]


def load_retrieval(source: str, reading: Reading) -> dict[str, Dataset]:
    """Load the existing splits of train, validation and test of the retrieval task."""
    names = {"train": "train", "validation": "eval", "test": "test"}
    found = {}
    for split, path in _files(source, {split: f"new_aan_pairs.{name}.tsv" for split, name in names.items()}).items():
        lines = [pair for pair in enumerate(read_text(path).split("\n"), 1) if pair[1].strip()]
        left, right, labels = [], [], []
        for number, line in (lines[i] for i in choose(len(lines), reading.at_most(split))):
            label, *_, text, other = cells = line.rstrip("\r").split("\t")
            # The benchmark writes its labels as 0.0 and 1.0.
            if len(cells) != 5 or label not in ("0", "1", "0.0", "1.0") or not (text and other):
                raise ValueError(
                    f"{path}, line {number}: expected LABEL TAB ID TAB ID TAB TEXT TAB TEXT, with label 0 or 1"
                )
            left.append(_bytes(text, reading.max_length))
            right.append(_bytes(other, reading.max_length))
            labels.append(int(float(label)))
        if not labels:
            raise ValueError(f"{path} is empty")
        found[split] = rows_of(left, labels, right, first=reading.first)
    return found
