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

import math
import pathlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from datasets import Dataset, Features, Value, load_dataset
from datasets import Sequence as Many
from torch import Tensor
from tqdm import tqdm

from hf_efficient_attn.io.reading import read_json_lines, read_text
from recipes.common.data import images, listops
from recipes.common.data.text import pad, padding_mask

PAD, FIRST, OFFSET = 0, 1, 2
_SPLITS = ("train", "validation", "test")
T = TypeVar("T")


class Task(NamedTuple):
    """The benchmark's definition of a task."""

    max_length: int  # largest number of tokens of a sequence
    tokens: int  # number of different tokens
    labels: int  # number of labels
    pairs: bool = False  # an example is a pair of sequences


TASKS = {
    "listops": Task(2000, len(listops.TOKENS), 10),
    "text": Task(4096, 256, 2),
    "image": Task(1024, 256, 10),
    "retrieval": Task(4000, 256, 2, pairs=True),
    "pathfinder": Task(1024, 256, 2),
}


class Reading(NamedTuple):
    """How a task is read.

    Longer texts than `max_length` bytes are truncated, and pictures are resized to `max_length` pixels; ListOps are
    never changed. `train` and `evaluation` are the largest numbers of examples of the training set and of other splits;
    None for all. `first` prepends the token FIRST to every sequence.
    """

    max_length: int
    train: int | None = None
    evaluation: int | None = None
    first: bool = False

    def choose(self, examples: Sequence[T], split: str) -> list[T]:
        """The examples of a split that are read, chosen at random with a fixed seed."""
        most = self.train if split == "train" else self.evaluation
        if most is None or most >= len(examples):
            return list(examples)
        return [examples[i] for i in sorted(np.random.default_rng(0).permutation(len(examples))[:most])]

    def rows(self, examples: Sequence[tuple[Any, ...]]) -> Dataset:
        """A Dataset with the columns `input_ids`, `labels` and `length`, and `other_ids` for pairs.

        An example is its label and its tokens, from 0; for pairs also the tokens of the second sequence.
        """
        labels, *sides = zip(*examples, strict=True)
        start = np.full(int(self.first), FIRST, np.int16)
        columns: dict[str, Any] = {
            name: [np.concatenate((start, np.asarray(ids, np.int16) + np.int16(OFFSET))) for ids in side]
            for name, side in zip(("input_ids", "other_ids"), sides, strict=False)
        }
        features = Features({**dict.fromkeys(columns, Many(Value("int16"))), "labels": Value("int64")})
        lengths = [sum(map(len, ids)) for ids in zip(*columns.values(), strict=True)]
        rows = Dataset.from_dict({**columns, "labels": list(labels)}, features=features)
        return rows.add_column("length", lengths).with_format("numpy")


def collate(features: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Collate `input_ids`, `attention_mask` (B, N), `labels` (B,), and `other_ids`, `other_mask` (B, M) of pairs.

    Sequences are padded to the longest. There is no mask if all have the same length.
    """
    batch = {"labels": pad([[int(feature["labels"])] for feature in features], 0)[:, 0]}
    for ids, mask in (("input_ids", "attention_mask"), ("other_ids", "other_mask")):
        if ids in features[0]:
            sequences = [feature[ids] for feature in features]
            batch[ids] = pad(sequences, PAD)
            if len(set(map(len, sequences))) > 1:
                batch[mask] = padding_mask(sequences)
    return batch


def baselines(train: Dataset, evaluation: Dataset, operator_at: int | None = None) -> dict[str, float]:
    """Accuracy on `evaluation` of rules that need no model, taken from `train`.

    "most_frequent" is always the most frequent label. "first_operator", if `operator_at` is given, the index of the
    token with the outermost operator of ListOps, is the most frequent label of the expressions with the same one.
    """
    truth = evaluation["labels"][:]
    overall, counts = Counter(train["labels"][:].tolist()), defaultdict(Counter)
    most_frequent = overall.most_common(1)[0][0]
    found = {"most_frequent": float(np.mean(truth == most_frequent))}
    if operator_at is not None:
        for ids, label in zip(train["input_ids"][:], train["labels"][:].tolist(), strict=True):
            counts[int(ids[operator_at])][label] += 1
        operators = (int(ids[operator_at]) for ids in evaluation["input_ids"][:])
        answers = [(counts.get(operator) or overall).most_common(1)[0][0] for operator in operators]
        found["first_operator"] = float(np.mean(truth == np.array(answers)))
    return found


def _lines(source: str, name: str, reading: Reading, validation: str) -> Iterator[tuple[str, str, str]]:
    """Split, place and text of the chosen lines of the .tsv files of a folder. `{}` in the name is the split.

    A training set and an evaluation set must exist.
    """
    names = [name.format(short) for short in ("train", validation, "test")]
    paths = [_either(pathlib.Path(source).expanduser() / file) for file in names]
    if paths[0] is None or not (paths[1] or paths[2]):
        missing = ", ".join(file for file, path in zip(names, paths, strict=True) if path is None)
        raise ValueError(f"{source}: no {missing} (or .gz): a training set and an evaluation set are needed")
    for split, path in zip(_SPLITS, paths, strict=True):
        lines = enumerate(read_text(path).split("\n") if path else (), 1)
        kept = [(i, line) for i, line in lines if line.strip() and not (i == 1 and line.strip() == listops.HEADER)]
        if path and not kept:
            raise ValueError(f"{path} is empty")
        for number, line in reading.choose(kept, split):
            yield split, f"{path}, line {number}", line.rstrip("\r")


def _either(path: pathlib.Path) -> pathlib.Path | None:
    """The file or its gzipped form; None if neither exists."""
    return next((p for p in (path, path.with_name(f"{path.name}.gz")) if p.is_file()), None)


def load_listops(source: str, reading: Reading) -> dict[str, Dataset]:
    """Load the existing splits of train, validation and test of a folder in the benchmark's layout."""
    numbers = {token: number for number, token in enumerate(listops.TOKENS)}
    splits = defaultdict(list)
    for split, where, line in _lines(source, "basic_{}.tsv", reading, "val"):
        text, tab, value = line.rpartition("\t")
        tokens = [token for token in text.split() if token not in ("(", ")")]
        unknown = next((token for token in tokens if token not in numbers), None)
        if not tab or not tokens or unknown is not None or value.strip() not in listops.DIGITS:
            what = f"unknown token {unknown!r}" if unknown is not None else "expected EXPRESSION TAB DIGIT"
            raise ValueError(f"{where}: {what}")
        if len(tokens) > reading.max_length:
            raise ValueError(f"{where}: {len(tokens)} tokens cannot be truncated: give --max_length {len(tokens)}")
        splits[split].append((int(value), [numbers[token] for token in tokens]))
    return {split: reading.rows(examples) for split, examples in splits.items()}


def _bytes(text: str, length: int) -> np.ndarray:
    """The first `length` bytes of a text."""
    return np.frombuffer(text.encode("utf-8")[:length], np.uint8)


def load_text(source: str, reading: Reading) -> dict[str, Dataset]:
    """Load the splits train and test of the text task."""
    folder = pathlib.Path(source).expanduser()
    folder = folder / "aclImdb" if (folder / "aclImdb").is_dir() else folder
    splits = {}
    for split in ("train", "test"):
        files = [(i, p) for i, end in enumerate(("neg", "pos")) for p in sorted(folder.glob(f"{split}/{end}/*.txt"))]
        if files:
            rows = [(label, read_text(path)) for label, path in reading.choose(files, split)]
        else:
            rows = reading.choose(_text_rows(source, folder, split), split)
        if not rows or not all(text for _, text in rows):
            raise ValueError(f"{source}, {split}: there is no text, or a text is empty")
        splits[split] = reading.rows([(label, _bytes(text, reading.max_length)) for label, text in rows])
    return splits


def _text_rows(source: str, folder: pathlib.Path, split: str) -> list[tuple[int, str]]:
    """Label and text of each row of a .jsonl file, or of a hub data set if there is no such folder."""
    path, known = _either(folder / f"{split}.jsonl"), {"0": 0, "1": 1, "neg": 0, "pos": 1}
    if path is None and (folder.is_dir() or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source)):
        raise ValueError(f"{source} holds neither {split}/pos and {split}/neg nor {split}.jsonl (or .jsonl.gz)")
    rows = read_json_lines(path) if path else enumerate(load_dataset(source, split=split), 1)
    examples = []
    for i, row in rows:
        if not isinstance(row.get("text"), str) or str(row.get("label")) not in known:
            raise ValueError(
                f"{path or source}, line {i}: 'text' and 'label' (0, 1) are needed, not the label {row.get('label')}"
            )
        examples.append((known[str(row["label"])], row["text"]))
    return examples


def load_retrieval(source: str, reading: Reading) -> dict[str, Dataset]:
    """Load the existing splits of train, validation and test of the retrieval task."""
    splits = defaultdict(list)
    for split, where, line in _lines(source, "new_aan_pairs.{}.tsv", reading, "eval"):
        label, *_, text, other = cells = line.split("\t")
        # The benchmark writes its labels as 0.0 and 1.0.
        if len(cells) != 5 or label not in ("0", "1", "0.0", "1.0") or not (text and other):
            raise ValueError(f"{where}: expected LABEL TAB ID TAB ID TAB TEXT TAB TEXT, with label 0 or 1")
        splits[split].append((int(float(label)), *(_bytes(one, reading.max_length) for one in (text, other))))
    return {split: reading.rows(examples) for split, examples in splits.items()}


def load_image(
    source: str, reading: Reading, split: str | None = None, train_split: str | None = None
) -> dict[str, Dataset]:
    """Load the splits train and test of the image task, or those with the given names, from pictures with classes."""
    splits = images.load(source)
    train = images.pick(splits, train_split, images.TRAIN_SPLITS, source)
    evaluation = images.pick(splits, split, ("test", *images.EVAL_SPLITS), source)
    if train is None or evaluation is None:
        raise ValueError(f"{source} needs a split to train on and one to evaluate on: {', '.join(splits)}")
    names = train.class_names()
    unknown = sorted(set(evaluation.classes) - set(names))
    if unknown or len(names) != TASKS["image"].labels:
        raise ValueError(f"{source} must have ten classes in each split, not {[*names, *unknown]}")
    return {
        name: _grey_rows(pictures.select(reading.choose(range(len(pictures)), name)), names, reading)
        for name, pictures in (("train", train), ("test", evaluation))
    }


def _grey_rows(pictures: images.Pictures, names: Sequence[str], reading: Reading) -> Dataset:
    """Grey values of each picture, line by line from the top, with the index of its class."""
    size = (math.isqrt(reading.max_length),) * 2
    examples = []
    for i in tqdm(range(len(pictures)), desc=pictures.where, unit=" pictures", disable=None, leave=False):
        picture = pictures.open(i).convert("L")
        picture = picture if picture.size == size else picture.resize(size)
        examples.append((names.index(pictures.classes[i]), np.asarray(picture, np.uint8).reshape(-1)))
    return reading.rows(examples)


def load_pathfinder(source: str, reading: Reading) -> dict[str, Dataset]:
    """Load the pathfinder task and split it at random into train, validation and test, 80, 10 and 10 %.

    The benchmark splits by the order of its own files, which its release does not contain. The source is the folder of
    a difficulty, or one that holds the hard one.
    """
    root, name = pathlib.Path(source).expanduser(), "curv_contour_length_14"
    folder = next((p for p in (root / name, root / "pathfinder32" / name, root) if (p / "metadata").is_dir()), None)
    if folder is None:
        raise ValueError(f"{source} holds no {name}/metadata; the layout is {name}/metadata/*.npy and {name}/imgs/...")
    examples = []
    for path in sorted((folder / "metadata").glob("*.npy"), key=lambda path: (len(path.name), path.name)):
        for number, line in enumerate(read_text(path).split("\n"), 1):
            cells = line.split()
            if cells and (len(cells) < 4 or cells[3] not in ("0", "1")):
                raise ValueError(f"{path}, line {number}: expected FOLDER FILE NUMBER LABEL ..., with label 0 or 1")
            if cells:
                examples.append((f"{cells[0]}/{cells[1]}", cells[3]))
    if len(examples) < 3:
        raise ValueError(f"{folder / 'metadata'}: {len(examples)} pictures are not enough to train and evaluate on")
    order = np.random.default_rng(0).permutation(len(examples))
    splits = {}
    for split, part in zip(_SPLITS, np.split(order, [round(len(order) * s) for s in (0.8, 0.9)]), strict=True):
        keys, labels = zip(*(examples[i] for i in reading.choose(part.tolist(), split)), strict=True)
        pictures = images.Pictures(f"{folder}, {split}", keys, labels, lambda key: (folder / key).read_bytes())
        splits[split] = _grey_rows(pictures, ("0", "1"), reading)
    return splits
