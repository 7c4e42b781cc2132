"""The nine tasks of GLUE (Wang et al., ICLR 2019), from a folder in the official layout or from the hub, with metrics.

The official files are not CSV: quotes are part of the sentences, CoLA has no header, MRPC's file begins with a
byte-order mark, QQP has broken rows, and MNLI has two development sets. Rows with a wrong number of columns or an
unknown label are counted and reported, never repaired.
"""

import contextlib
import math
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import scipy.stats
import sklearn.metrics

from hf_efficient_attn.errors import unknown_name
from hf_efficient_attn.io.reading import read_text
from recipes.common.training import check_not_empty


@dataclass(frozen=True)
class Task:
    """One task."""

    folder: str  # its name in the official layout
    texts: tuple[str, ...]  # columns of the texts in the official files
    label: str  # column of the label
    labels: Mapping[str, str]  # labels of the official files -> class names; none for a score from 0 to 5
    metrics: tuple[str, ...] = ("accuracy",)  # the official metrics; the one of the BERT paper comes first
    header: tuple[str, ...] | None = None  # of files without one
    dev: tuple[str, ...] = ("",)  # endings of the development sets

    @property
    def splits(self) -> dict[str, str]:
        """Maps splits to file names without suffix."""
        return {"train": "train"} | {f"validation{ending}": f"dev{ending}" for ending in self.dev}


_PAIR = ("sentence1", "sentence2")
_ENTAILED = {"entailment": "entailment", "not_entailment": "not_entailment"}
TASKS = {
    "cola": Task(
        "CoLA", ("sentence",), "label", {"0": "unacceptable", "1": "acceptable"},
        ("matthews_correlation", "accuracy"), header=("source", "label", "mark", "sentence"),
    ),
    "sst2": Task("SST-2", ("sentence",), "label", {"0": "negative", "1": "positive"}),
    "mrpc": Task(
        "MRPC", ("#1 String", "#2 String"), "Quality", {"0": "not_equivalent", "1": "equivalent"}, ("f1", "accuracy"),
    ),
    "stsb": Task("STS-B", _PAIR, "score", {}, ("spearman", "pearson")),
    "qqp": Task(
        "QQP", ("question1", "question2"), "is_duplicate", {"0": "not_duplicate", "1": "duplicate"},
        ("f1", "accuracy"),
    ),
    "mnli": Task(
        "MNLI", _PAIR, "gold_label",
        {"entailment": "entailment", "neutral": "neutral", "contradiction": "contradiction"},
        dev=("_matched", "_mismatched"),
    ),
    "qnli": Task("QNLI", ("question", "sentence"), "label", _ENTAILED),
    "rte": Task("RTE", _PAIR, "label", _ENTAILED),
    "wnli": Task("WNLI", _PAIR, "label", {"0": "not_entailment", "1": "entailment"}),
}  # fmt: skip


def task_of(name: str) -> Task:
    """The task with this name or folder name ("SST-2"). Raises ValueError if there is none."""
    found = [task for key, task in TASKS.items() if name.lower() in (key, task.folder.lower())]
    if not found:
        raise ValueError(unknown_name("GLUE task", name, TASKS))
    return found[0]


def load(name: str, source: str, *, skip_bad_rows: bool = False) -> datasets.DatasetDict:
    """Load the training and development sets of a task.

    The source is a folder that holds <TASK>/train.tsv and dev.tsv (or .tsv.gz), or a hub id such as "nyu-mll/glue".
    Missing files, splits and columns and empty splits are refused, and so are rows with a wrong number of columns or an
    unknown label, unless `skip_bad_rows` skips and reports them. The splits "train" and "validation" (MNLI:
    "validation_matched" and "validation_mismatched") have the columns "sentence1", "sentence2" (for tasks of pairs) and
    "label", a class index or, for STS-B, a float32 from 0 to 5.
    """
    task, splits = task_of(name), {}
    if pathlib.Path(source).is_dir():
        for split, stem in task.splits.items():
            path = pathlib.Path(source) / task.folder / f"{stem}.tsv"
            path = path if path.is_file() else path.with_name(f"{stem}.tsv.gz")
            if not path.is_file():
                raise ValueError(f"{path} (or .tsv) is missing; the official layout is <data>/{task.folder}/{stem}.tsv")
            splits[split] = _read(path, task, skip_bad_rows)
        return datasets.DatasetDict(splits)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise ValueError(f"{source} is neither a folder nor a hub id such as nyu-mll/glue")
    try:
        loaded = datasets.load_dataset(source, next(key for key, other in TASKS.items() if other is task))
    except (OSError, ValueError) as error:
        raise ValueError(f"{source} is no folder, and could not be loaded from the hub ({error})") from error
    missing = [split for split in task.splits if split not in loaded]
    if missing:
        raise ValueError(f"{source} has no split {', '.join(missing)}; its splits: {', '.join(loaded)}")
    return datasets.DatasetDict({split: _from_hub(loaded[split], task, f"{source}, {split}") for split in task.splits})


def _dataset(task: Task, columns: Sequence[Sequence[Any]]) -> datasets.Dataset:
    """The data set of the columns of the texts and the label."""
    label = datasets.Value("float32") if not task.labels else datasets.ClassLabel(names=list(task.labels.values()))
    names = [f"sentence{number}" for number in range(1, len(task.texts) + 1)]
    features = datasets.Features({**dict.fromkeys(names, datasets.Value("string")), "label": label})
    return datasets.Dataset.from_dict(dict(zip(features, columns, strict=True)), features=features)


def _read(path: pathlib.Path, task: Task, skip_bad_rows: bool) -> datasets.Dataset:
    """Read one file."""
    # Only tabs and "\n" separate: sentences contain quotes, and characters that Python treats as line breaks.
    lines = [(i, line.rstrip("\r").split("\t")) for i, line in enumerate(read_text(path).split("\n"), 1) if line]
    header = task.header or (tuple(lines.pop(0)[1]) if lines else ())
    missing = [name for name in (*task.texts, task.label) if name not in header]
    if header and missing:
        raise ValueError(f"{path} has no column {', '.join(map(repr, missing))}; its columns: {', '.join(header)}")
    indices = {label: number for number, label in enumerate(task.labels)}
    rows, bad = [], {}
    for number, cells in lines:
        row = dict(zip(header, cells, strict=False))
        label = (_score if not task.labels else indices.get)(row.get(task.label, ""))
        if len(cells) != len(header):
            bad.setdefault(f"not {len(header)} columns", []).append(number)
        elif label is None:
            bad.setdefault(f"the unknown label {row[task.label]!r}", []).append(number)
        else:
            rows.append((*(row[name] for name in task.texts), label))
    if bad:
        known = "scores from 0 to 5" if not task.labels else ", ".join(map(repr, task.labels))
        kinds = [f"{len(n)} with {what} (line {', '.join(map(str, n[:5]))})" for what, n in list(bad.items())[:5]]
        total = f"{sum(map(len, bad.values()))} bad rows: {'; '.join(kinds)}. Known labels: {known}."
        if not skip_bad_rows:
            raise ValueError(f"{path}: {total} --skip_bad_rows skips such rows")
        print(f"skipped in {path}: {total}", file=sys.stderr)
    check_not_empty(len(rows), str(path))
    return _dataset(task, list(map(list, zip(*rows, strict=True))))


def _score(text: str) -> float | None:
    """The score, or None if it is not a number from 0 to 5."""
    with contextlib.suppress(ValueError):
        return value if 0 <= (value := float(text)) <= 5 else None
    return None


def _from_hub(dataset: datasets.Dataset, task: Task, where: str) -> datasets.Dataset:
    """Convert a split from the hub, whose labels are class indices already (-1 if unknown)."""
    texts = [name for name in dataset.column_names if name not in ("label", "idx")]
    if len(texts) != len(task.texts) or "label" not in dataset.column_names:
        raise ValueError(
            f"{where}: {len(task.texts)} columns of texts and one named label are needed, not {dataset.column_names}"
        )
    check_not_empty(len(dataset), where)
    wrong = [i for i, label in enumerate(dataset["label"]) if not 0 <= label <= (len(task.labels) or 6) - 1]
    if wrong:
        raise ValueError(f"{where}: {len(wrong)} rows with unknown labels (row {wrong[0]}): remove them")
    return _dataset(task, [list(dataset[name]) for name in (*texts, "label")])


def figures(name: str, predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The official metrics of a task, the main one first.

    The predictions are class logits (N, classes), or scores (N,) or (N, 1) for STS-B. The metrics are nan if one is not
    finite, and for correlations with a constant.
    """
    task = task_of(name)
    predicted = np.asarray(predictions, dtype=np.float64)
    constant = not task.labels and (np.ptp(labels) == 0 or np.ptp(predicted) == 0)
    if constant or not np.isfinite(predicted).all():
        return dict.fromkeys(task.metrics, math.nan)
    predicted = predicted.reshape(len(labels)) if not task.labels else predicted.argmax(axis=-1)
    return {metric: float(METRICS[metric](labels, predicted)) for metric in task.metrics}


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": sklearn.metrics.accuracy_score,
    "f1": lambda labels, predicted: sklearn.metrics.f1_score(labels, predicted, zero_division=0.0),
    "matthews_correlation": sklearn.metrics.matthews_corrcoef,
    "pearson": lambda labels, predicted: scipy.stats.pearsonr(labels, predicted).statistic,
    "spearman": lambda labels, predicted: scipy.stats.spearmanr(labels, predicted).statistic,
}
