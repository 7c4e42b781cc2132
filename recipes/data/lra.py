"""The tasks of the Long Range Arena (Tay et al., ICLR 2021) as rows of token numbers.

Sources, besides data sets of a hub for text and image:

    listops     generated (listops.py), or a folder with basic_train.tsv, basic_val.tsv, basic_test.tsv
    text        reviews, byte by byte: train/pos/*.txt, train/neg, test/pos, test/neg (aclImdb), or train.jsonl and
                test.jsonl (also .gz) with `text` and `label`
    image       pictures, grey pixel by pixel: what `images.load` reads, such as <split>/<class>/<file> in a zip file
    retrieval   pairs of texts, byte by byte: new_aan_pairs.train.tsv, .eval.tsv, .test.tsv
    pathfinder  pictures: curv_contour_length_14/metadata/*.npy (lines of text) and curv_contour_length_14/imgs/..., in
                the folder or in pathfinder32 below it; drawn into 80, 10 and 10 % by a fixed seed

Tokens: 0 pads, 1 stands first where the model pools that one, a byte, a grey value or a ListOps token t is 2 + t.
"""

import pathlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value, load_dataset
from datasets import Sequence as Many
from torch import Tensor
from tqdm import tqdm

from hf_efficient_attn.errors import unknown_name
from recipes.data import images, listops
from recipes.data.text import json_rows, pad, padding_mask, read_text

PAD, FIRST, OFFSET = 0, 1, 2
DIFFICULTIES = {"easy": "curv_baseline", "intermediate": "curv_contour_length_9", "hard": "curv_contour_length_14"}


@dataclass(frozen=True)
class Task:
    """What the benchmark says of a task: tokens of a row at most, how many different ones, and labels.

    pairs: whether a row is a pair of texts.
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
    """The task of a name; raises ValueError for one that the benchmark has not."""
    if name not in TASKS:
        raise ValueError(unknown_name("task of the Long Range Arena", name, TASKS))
    return TASKS[name]


def rows_of(
    inputs: Iterable[np.ndarray], labels: Iterable[int], others: Iterable[np.ndarray] | None = None, first: bool = False
) -> Dataset:
    """Columns `input_ids`, `labels` and `length`, and `other_ids` where rows are pairs.

    Args:
        inputs, others: tokens of each row, from 0; OFFSET is added here.
        first: whether a token FIRST stands before each.
    """
    start = [FIRST] if first else []

    def numbers(row: np.ndarray) -> np.ndarray:
        return np.concatenate((np.asarray(start, np.int16), np.asarray(row, np.int16) + np.int16(OFFSET)))

    columns: dict[str, Any] = {"input_ids": [numbers(row) for row in inputs]}
    if others is not None:
        columns["other_ids"] = [numbers(row) for row in others]
    features = {name: Many(Value("int16")) for name in columns}
    columns["labels"] = [int(label) for label in labels]
    columns["length"] = [sum(map(len, row)) for row in zip(*(columns[name] for name in features), strict=True)]
    features |= {"labels": Value("int64"), "length": Value("int64")}
    return Dataset.from_dict(columns, features=Features(features)).with_format("numpy")


def collate(features: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask` (B, N), `labels` (B,), and `other_ids`, `other_mask` (B, M) of pairs.

    Rows are padded to the longest; where all are of one length there is no mask.
    """
    batch: dict[str, Any] = {}
    for ids, mask in (("input_ids", "attention_mask"), ("other_ids", "other_mask")):
        if ids in features[0]:
            here = [feature[ids] for feature in features]
            batch[ids] = pad(here, PAD)
            if len({len(row) for row in here}) > 1:
                batch[mask] = padding_mask(here)
    batch["labels"] = pad([[int(feature["labels"])] for feature in features], 0)[:, 0]
    return batch


def choose(count: int, wanted: int | None) -> list[int]:
    """Which of `count` rows are used: all, or so many drawn at random, always the same ones."""
    if wanted is None or wanted >= count:
        return list(range(count))
    return sorted(np.random.default_rng(0).permutation(count)[:wanted].tolist())


@dataclass(frozen=True)
class Wanted:
    """How a task is to be read.

    Attributes:
        max_length: bytes of a text at most; what is longer is cut. ListOps are never cut.
        most: split -> rows at most.
        first: whether FIRST stands before each row.
        image_size: side to which pictures are resized; None for pictures that are all of one size.
        skip_bad: leave out pictures that cannot be read, and say so.
    """

    max_length: int
    most: dict[str, int | None]
    first: bool = False
    image_size: int | None = None
    skip_bad: bool = False

    def at_most(self, split: str) -> int | None:
        return self.most.get("train" if split == "train" else "evaluation")


def load_listops(source: str, wanted: Wanted) -> dict[str, Dataset]:
    """Splits train, validation and test of a folder in the benchmark's layout, as far as they are there."""
    numbers = {token: number for number, token in enumerate(listops.TOKENS)}
    found = {}
    for split, path in _files(source, {split: f"basic_{name}.tsv" for split, name in _SHORT.items()}).items():
        rows = list(listops.read(read_text(path).split("\n"), str(path)))
        rows = [rows[i] for i in choose(len(rows), wanted.at_most(split))]
        longest = max((len(tokens) for tokens, _ in rows), default=0)
        if longest > wanted.max_length:
            raise ValueError(
                f"{path}: an expression of {longest} tokens, which has no value when it is cut: give --max_length "
                f"{longest}"
            )
        inputs = [np.fromiter((numbers[token] for token in tokens), np.int16) for tokens, _ in rows]
        found[split] = rows_of(inputs, [value for _, value in rows], first=wanted.first)
    return found


_SHORT = {"train": "train", "validation": "val", "test": "test"}


def _files(source: str, names: dict[str, str]) -> dict[str, pathlib.Path]:
    """Split -> file, of which those of training and of one evaluation must be there."""
    folder = pathlib.Path(source).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"{source}: no such folder; the benchmark's layout is a folder with {', '.join(names.values())}"
        )
    places = {split: _either(folder / name) for split, name in names.items()}
    found = {split: path for split, path in places.items() if path is not None}
    if "train" not in found or len(found) < 2:
        missing = [name for split, name in names.items() if split not in found]
        raise ValueError(f"{folder}: no {', '.join(missing)} (or .gz); training and an evaluation set are needed")
    return found


def _either(path: pathlib.Path) -> pathlib.Path | None:
    """The file, or its gzipped form."""
    return next((p for p in (path, path.with_name(f"{path.name}.gz")) if p.is_file()), None)


def _bytes(text: str, length: int) -> np.ndarray:
    return np.frombuffer(text.encode("utf-8")[:length], np.uint8)


def load_text(source: str, wanted: Wanted) -> dict[str, Dataset]:
    """Splits train and test."""
    folder = pathlib.Path(source).expanduser()
    folder = folder / "aclImdb" if (folder / "aclImdb").is_dir() else folder
    found = {}
    for split in ("train", "test"):
        if not folder.is_dir():
            texts, labels = _hub_texts(source, split, wanted)
        elif (folder / split).is_dir():
            texts, labels = _folder_texts(folder / split, wanted.at_most(split))
        else:
            texts, labels = _json_texts(folder, split, wanted.at_most(split))
        inputs = [_bytes(text, wanted.max_length) for text in texts]
        empty = sum(not len(row) for row in inputs)
        if empty:
            raise ValueError(f"{source}, {split}: {empty} texts are empty")
        found[split] = rows_of(inputs, labels, first=wanted.first)
    return found


def _hub_texts(source: str, split: str, wanted: Wanted) -> tuple[list[str], list[int]]:
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source):
        raise ValueError(f"there is no folder {source}")
    try:
        rows = load_dataset(source, split=split)
    except (OSError, ValueError) as error:
        raise ValueError(f"no folder {source} is here, and the hub did not give it either ({error})") from error
    missing = [name for name in ("text", "label") if name not in rows.column_names]
    if missing:
        raise ValueError(f"{source} has no column {', '.join(missing)}; its columns: {', '.join(rows.column_names)}")
    rows = rows.select(choose(len(rows), wanted.at_most(split)))
    return list(rows["text"]), [_sentiment(label, f"{source}, {split}") for label in rows["label"]]


def _folder_texts(folder: pathlib.Path, most: int | None) -> tuple[list[str], list[int]]:
    files = []
    for label, name in enumerate(("neg", "pos")):
        here = sorted((folder / name).glob("*.txt"))
        if not here:
            raise ValueError(f"{folder / name}: no .txt file; the layout is {folder}/neg/*.txt and {folder}/pos/*.txt")
        files += [(path, label) for path in here]
    chosen = [files[i] for i in choose(len(files), most)]
    bar = tqdm(chosen, desc=str(folder), unit=" texts", disable=None, leave=False)
    return [read_text(path) for path, _ in bar], [label for _, label in chosen]


def _json_texts(folder: pathlib.Path, split: str, most: int | None) -> tuple[list[str], list[int]]:
    path = _either(folder / f"{split}.jsonl")
    if path is None:
        raise ValueError(f"{folder}: neither {split}/pos and {split}/neg nor {split}.jsonl (or .jsonl.gz) in it")
    rows = []
    for number, row in json_rows(path):
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


def load_retrieval(source: str, wanted: Wanted) -> dict[str, Dataset]:
    """Splits train, validation and test, as far as they are there."""
    names = {"train": "train", "validation": "eval", "test": "test"}
    found = {}
    for split, path in _files(source, {split: f"new_aan_pairs.{name}.tsv" for split, name in names.items()}).items():
        lines = [pair for pair in enumerate(read_text(path).split("\n"), 1) if pair[1].strip()]
        left, right, labels = [], [], []
        for number, line in (lines[i] for i in choose(len(lines), wanted.at_most(split))):
            label, *_, text, other = cells = line.rstrip("\r").split("\t")
            # The benchmark writes its labels as 0.0 and 1.0.
            if len(cells) != 5 or label not in ("0", "1", "0.0", "1.0") or not (text and other):
                raise ValueError(
                    f"{path}, line {number}: expected LABEL TAB ID TAB ID TAB TEXT TAB TEXT, with label 0 or 1"
                )
            left.append(_bytes(text, wanted.max_length))
            right.append(_bytes(other, wanted.max_length))
            labels.append(int(float(label)))
        if not labels:
            raise ValueError(f"{path} is empty")
        found[split] = rows_of(left, labels, right, first=wanted.first)
    return found


def load_image(source: str, wanted: Wanted, split: str | None = None) -> dict[str, Dataset]:
    """Splits train and test of a data set of pictures with classes.

    Args:
        split: name of the split to evaluate on; None for test, or else one of the usual names.
    """
    splits = images.load(source)
    train = images.pick(splits, None, images.TRAIN_SPLITS, source)
    evaluation = images.pick(splits, split, ("test", *images.EVAL_SPLITS), source)
    if train is None or evaluation is None:
        raise ValueError(f"{source}: a split to train on and one to evaluate on are needed; it has {', '.join(splits)}")
    numbers = {name: number for number, name in enumerate(train.class_names())}
    unknown = sorted(set(evaluation.classes) - set(numbers))
    if unknown:
        raise ValueError(f"{evaluation.where}: unknown labels {', '.join(unknown)}; known: {', '.join(numbers)}")
    if len(numbers) != TASKS["image"].labels:
        raise ValueError(f"{source}: {len(numbers)} classes; the task has {TASKS['image'].labels}")
    found = {}
    for name, pictures in (("train", train), ("test", evaluation)):
        chosen = pictures.select(choose(len(pictures), wanted.at_most(name)))
        found[name] = rows_of(*pixels(chosen, [numbers[c] for c in chosen.classes], wanted), first=wanted.first)
    return found


def pixels(pictures: images.Pictures, labels: Sequence[int], wanted: Wanted) -> tuple[list[np.ndarray], list[int]]:
    """Grey values, row by row from the top, (side * side,) uint8 of each picture that can be read, and its label.

    Raises:
        ValueError: pictures cannot be read and are not to be skipped, or are not of one size.
    """
    found, kept, bad, size = [], [], [], None
    bar = tqdm(range(len(pictures)), desc=pictures.where, unit=" pictures", disable=None, leave=False)
    for i in bar:
        try:
            picture = pictures.open(i).convert("L")
        except ValueError as error:
            bad.append(str(error))
            continue
        if wanted.image_size is not None and picture.size != (wanted.image_size, wanted.image_size):
            picture = picture.resize((wanted.image_size, wanted.image_size))
        size = size or picture.size
        if picture.size != size or size[0] * size[1] > wanted.max_length:
            raise ValueError(
                f"{pictures.where}: {pictures.name(i)} has {picture.size[0]} x {picture.size[1]} pixels, where "
                + (f"others have {size[0]} x {size[1]}" if picture.size != size else f"{wanted.max_length} are taken")
                + "; give --max_length or --image_size"
            )
        found.append(np.asarray(picture, np.uint8).reshape(-1))
        kept.append(labels[i])
    if bad and (not wanted.skip_bad or not found):
        raise ValueError(
            f"{len(bad)} of {len(pictures)} pictures cannot be read: {'; '.join(bad[:3])}"
            + ("; ..." if len(bad) > 3 else "")
            + (". --skip_bad_images leaves them out" if found else "")
        )
    if bad:
        tqdm.write(f"left out {len(bad)} of {len(pictures)} pictures: {'; '.join(bad[:3])}")
    if not found:
        raise ValueError(f"{pictures.where} is empty")
    return found, kept


def load_pathfinder(source: str, wanted: Wanted, difficulty: str = "hard") -> dict[str, Dataset]:
    """Splits train, validation and test: 80, 10 and 10 % of the pictures, drawn by a fixed seed.

    The benchmark cuts by the order of its own files, which its release does not have.
    """
    if difficulty not in DIFFICULTIES:
        raise ValueError(unknown_name("difficulty", difficulty, DIFFICULTIES))
    name = DIFFICULTIES[difficulty]
    root = pathlib.Path(source).expanduser()
    folder = next((p for p in (root / name, root / "pathfinder32" / name, root) if (p / "metadata").is_dir()), None)
    if folder is None:
        raise ValueError(f"{source}: no {name}/metadata in it; the layout is {name}/metadata/*.npy and {name}/imgs/...")
    keys, labels = [], []
    for path in sorted((folder / "metadata").glob("*.npy"), key=lambda path: (len(path.name), path.name)):
        for number, line in enumerate(read_text(path).split("\n"), 1):
            cells = line.split()
            if not cells:
                continue
            if len(cells) < 4 or cells[3] not in ("0", "1"):
                raise ValueError(f"{path}, line {number}: expected FOLDER FILE NUMBER LABEL ..., with label 0 or 1")
            keys.append(f"{cells[0]}/{cells[1]}")
            labels.append(int(cells[3]))
    if len(keys) < 3:
        raise ValueError(f"{folder / 'metadata'}: {len(keys)} pictures are too few to train and evaluate on")
    order = np.random.default_rng(0).permutation(len(keys))
    ends = [round(len(keys) * share) for share in (0.8, 0.9)]

    def read(key: str) -> bytes:
        return (folder / key).read_bytes()

    found = {}
    for split, part in zip(("train", "validation", "test"), np.split(order, ends), strict=True):
        here = part[choose(len(part), wanted.at_most(split))].tolist()
        pictures = images.Pictures(
            f"{folder}, {split}", tuple(keys[i] for i in here), tuple(str(labels[i]) for i in here), read
        )
        found[split] = rows_of(*pixels(pictures, [labels[i] for i in here], wanted), first=wanted.first)
    return found
