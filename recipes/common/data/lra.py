"""Three tasks of the Long Range Arena (Tay et al., ICLR 2021) as sequences of token ids.

Sources, besides hub data sets for image:

    listops     generated (listops.py), or a folder with basic_train.tsv, basic_val.tsv, basic_test.tsv
    text        reviews as bytes: train/pos/*.txt, train/neg, test/pos, test/neg (aclImdb), or train.jsonl and
                test.jsonl (also .gz) with `text` and `label`
    image       grey pixels of pictures: everything that `images.load` reads, such as <split>/<class>/<file> in a zip

Token 0 is padding, and token 1 the additional first token of models that pool it. A byte, a grey value or a ListOps
token t is 2 + t.
"""

import math
import pathlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from datasets import Dataset, Features, Value
from datasets import Sequence as Many
from torch import Tensor
from tqdm import tqdm

from hf_efficient_attn.io.reading import read_json_lines, read_text
from recipes.common.data import images, listops
from recipes.common.data.text import pad, padding_mask

PAD, FIRST, OFFSET = 0, 1, 2
T = TypeVar("T")


class Task(NamedTuple):
    """The benchmark's definition of a task."""

    max_length: int  # largest number of tokens of a sequence
    tokens: int  # number of different tokens
    labels: int  # number of labels


TASKS = {
    "listops": Task(2000, len(listops.TOKENS), 10),
    "text": Task(4096, 256, 2),
    "image": Task(1024, 256, 10),
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

    def rows(self, examples: Sequence[tuple[int, Any]]) -> Dataset:
        """A Dataset with the columns `input_ids`, `labels` and `length`, from the label and the tokens of examples."""
        labels, tokens = zip(*examples, strict=True)
        start = np.full(int(self.first), FIRST, np.int16)
        ids = [np.concatenate((start, np.asarray(one, np.int16) + np.int16(OFFSET))) for one in tokens]
        features = Features({"input_ids": Many(Value("int16")), "labels": Value("int64"), "length": Value("int64")})
        columns = {"input_ids": ids, "labels": list(labels), "length": list(map(len, ids))}
        return Dataset.from_dict(columns, features=features).with_format("numpy")


def collate(features: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Collate `input_ids`, `attention_mask` (B, N) and `labels` (B,).

    Sequences are padded to the longest. There is no mask if all have the same length.
    """
    sequences = [feature["input_ids"] for feature in features]
    labels = torch.tensor([int(feature["labels"]) for feature in features])
    batch = {"labels": labels, "input_ids": pad(sequences, PAD)}
    return batch if len(set(map(len, sequences))) == 1 else batch | {"attention_mask": padding_mask(sequences)}


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


def _either(path: pathlib.Path) -> pathlib.Path | None:
    """The file or its gzipped form; None if neither exists."""
    return next((p for p in (path, path.with_name(f"{path.name}.gz")) if p.is_file()), None)


def load_listops(source: str, reading: Reading) -> dict[str, Dataset]:
    """Load the existing splits of train, validation and test of a folder in the benchmark's layout.

    A training set and an evaluation set must exist.
    """
    names = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}
    found = {split: _either(pathlib.Path(source).expanduser() / name) for split, name in names.items()}
    if found["train"] is None or not (found["validation"] or found["test"]):
        missing = ", ".join(names[split] for split, path in found.items() if path is None)
        raise ValueError(f"{source}: no {missing} (or .gz): a training set and an evaluation set are needed")
    numbers, splits = {token: number for number, token in enumerate(listops.TOKENS)}, {}
    for split, path in found.items():
        if path is None:
            continue
        lines = [(i, line) for i, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]
        kept, examples = [one for one in lines if (one[0], one[1].strip()) != (1, listops.HEADER)], []
        if not kept:
            raise ValueError(f"{path} is empty")
        for number, line in reading.choose(kept, split):
            text, tab, value = line.rpartition("\t")
            tokens = [token for token in text.split() if token not in ("(", ")")]
            unknown = next((token for token in tokens if token not in numbers), None)
            if not tab or not tokens or unknown is not None or value.strip() not in listops.DIGITS:
                what = f"unknown token {unknown!r}" if unknown is not None else "expected EXPRESSION TAB DIGIT"
                raise ValueError(f"{path}, line {number}: {what}")
            if len(tokens) > reading.max_length:
                advice = f"{len(tokens)} tokens cannot be truncated: give --max_length {len(tokens)}"
                raise ValueError(f"{path}, line {number}: {advice}")
            examples.append((int(value), [numbers[token] for token in tokens]))
        splits[split] = reading.rows(examples)
    return splits


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
            rows = reading.choose(_text_rows(folder, split), split)
        if not rows or not all(text for _, text in rows):
            raise ValueError(f"{source}, {split}: there is no text, or a text is empty")
        splits[split] = reading.rows([(label, _bytes(text, reading.max_length)) for label, text in rows])
    return splits


def _text_rows(folder: pathlib.Path, split: str) -> list[tuple[int, str]]:
    """Label and text of each row of a .jsonl file."""
    path, known, examples = _either(folder / f"{split}.jsonl"), {"0": 0, "1": 1, "neg": 0, "pos": 1}, []
    if path is None:
        raise ValueError(f"{folder} holds neither {split}/pos and {split}/neg nor {split}.jsonl (or .jsonl.gz)")
    for i, row in read_json_lines(path):
        if not isinstance(row.get("text"), str) or str(row.get("label")) not in known:
            raise ValueError(
                f"{path}, line {i}: 'text' and 'label' (0, 1) are needed, not the label {row.get('label')}"
            )
        examples.append((known[str(row["label"])], row["text"]))
    return examples


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
