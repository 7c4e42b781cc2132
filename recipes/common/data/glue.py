"""The nine tasks of GLUE (Wang et al., ICLR 2019), from a folder in the official layout or from the hub, with metrics.

The official files are not CSV: quotes are part of the sentences, CoLA has no header, MRPC's file begins with a
byte-order mark, QQP has broken rows, and MNLI has two development sets. Rows with a wrong number of columns or an
unknown label are counted and reported, never repaired.
"""

import gzip
import math
import pathlib
import re
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import scipy.stats
import sklearn.metrics

from hf_efficient_attn.errors import unknown_name
from recipes.common.training import check_columns, check_not_empty

DEV = {"validation": "dev"}


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        folder: its name in the official layout.
        texts: columns of the texts in the official files.
        label: column of the label in the official files.
        hub_texts: columns of the texts on the hub.
        labels: maps labels of the files to class names, in the order of their indices; empty for a score from 0 to 5.
        metrics: names of the official metrics. The first is the main one, that of the BERT paper.
        header: columns of files without a header.
        dev: maps development splits to file names without suffix; None for a single dev file.
    """

    folder: str
    texts: tuple[str, ...]
    label: str
    hub_texts: tuple[str, ...]
    labels: Mapping[str, str]
    metrics: tuple[str, ...] = ("accuracy",)
    header: tuple[str, ...] | None = None
    dev: Mapping[str, str] | None = None

    @property
    def regression(self) -> bool:
        """Whether the label is a score."""
        return not self.labels

    @property
    def names(self) -> list[str]:
        """Class names, in the order of the class indices."""
        return list(self.labels.values())

    @property
    def splits(self) -> dict[str, str]:
        """Maps splits to file names without suffix."""
        return {"train": "train", **(self.dev or DEV)}


_PAIR = ("sentence1", "sentence2")
_ENTAILED = {"entailment": "entailment", "not_entailment": "not_entailment"}
TASKS = {
    "cola": Task(
        "CoLA", ("sentence",), "label", ("sentence",), {"0": "unacceptable", "1": "acceptable"},
        ("matthews_correlation", "accuracy"), header=("source", "label", "mark", "sentence"),
    ),
    "sst2": Task("SST-2", ("sentence",), "label", ("sentence",), {"0": "negative", "1": "positive"}),
    "mrpc": Task(
        "MRPC", ("#1 String", "#2 String"), "Quality", _PAIR, {"0": "not_equivalent", "1": "equivalent"},
        ("f1", "accuracy"),
    ),
    "stsb": Task("STS-B", _PAIR, "score", _PAIR, {}, ("spearman", "pearson")),
    "qqp": Task(
        "QQP", ("question1", "question2"), "is_duplicate", ("question1", "question2"),
        {"0": "not_duplicate", "1": "duplicate"}, ("f1", "accuracy"),
    ),
    "mnli": Task(
        "MNLI", _PAIR, "gold_label", ("premise", "hypothesis"),
        {"entailment": "entailment", "neutral": "neutral", "contradiction": "contradiction"},
        dev={"validation_matched": "dev_matched", "validation_mismatched": "dev_mismatched"},
    ),
    "qnli": Task("QNLI", ("question", "sentence"), "label", ("question", "sentence"), _ENTAILED),
    "rte": Task("RTE", _PAIR, "label", _PAIR, _ENTAILED),
    "wnli": Task("WNLI", _PAIR, "label", _PAIR, {"0": "not_entailment", "1": "entailment"}),
}  # fmt: skip


def task_of(name: str) -> Task:
    """The task with this name or folder name ("SST-2"). Raises ValueError if there is none."""
    found = {key: task for key, task in TASKS.items() if name.lower() in (key, task.folder.lower())}
    if not found:
        raise ValueError(unknown_name("GLUE task", name, TASKS))
    return next(iter(found.values()))


def load(name: str, source: str, *, skip_bad_rows: bool = False) -> datasets.DatasetDict:
    """Load the training and development sets of a task.

    Args:
        name: name of the task.
        source: folder that holds <TASK>/train.tsv and dev.tsv (or .tsv.gz), or a hub id such as "nyu-mll/glue".
        skip_bad_rows: skip rows with a wrong number of columns or an unknown label, and report them.

    Returns:
        The splits "train" and "validation" (MNLI: "validation_matched" and "validation_mismatched") with the columns
        "sentence1", "sentence2" (for tasks of pairs) and "label", a class index or, for STS-B, a float32 from 0 to 5.

    Raises:
        ValueError: a file, split or column is missing, a split is empty, a row is bad, or the source cannot be loaded.
    """
    task = task_of(name)
    if pathlib.Path(source).is_dir():
        return datasets.DatasetDict(
            {split: _read(_file(source, task, stem), task, skip_bad_rows) for split, stem in task.splits.items()}
        )
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise ValueError(f"{source} is neither a folder nor a hub id such as nyu-mll/glue")
    try:
        loaded = datasets.load_dataset(source, next(key for key, other in TASKS.items() if other is task))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{source} is not a folder and could not be loaded from the hub ({error}); a folder in the official "
            "layout needs no network"
        ) from error
    missing = [split for split in task.splits if split not in loaded]
    if missing:
        raise ValueError(f"{source} has no split {', '.join(missing)}; its splits: {', '.join(loaded)}")
    return datasets.DatasetDict({split: _from_hub(loaded[split], task, f"{source}, {split}") for split in task.splits})


def _file(source: str, task: Task, stem: str) -> pathlib.Path:
    """The file of a split, gzipped or not."""
    folder = pathlib.Path(source) / task.folder
    for suffix in (".tsv", ".tsv.gz"):
        if (folder / f"{stem}{suffix}").is_file():
            return folder / f"{stem}{suffix}"
    raise ValueError(
        f"{folder / stem}.tsv (or .tsv.gz) is missing; the official layout is <data>/{task.folder}/{stem}.tsv"
    )


def _features(task: Task) -> datasets.Features:
    label = datasets.Value("float32") if task.regression else datasets.ClassLabel(names=task.names)
    texts = {f"sentence{number}": datasets.Value("string") for number in range(1, len(task.texts) + 1)}
    return datasets.Features({**texts, "label": label})


def _read(path: pathlib.Path, task: Task, skip_bad_rows: bool) -> datasets.Dataset:
    """Read one file."""
    lines = _lines(path)
    header = task.header or (tuple(lines.pop(0)[1]) if lines else ())
    missing = [name for name in (*task.texts, task.label) if name not in header]
    if header and missing:
        raise ValueError(f"{path} has no column {', '.join(map(repr, missing))}; its columns: {', '.join(header)}")
    index = {label: number for number, label in enumerate(task.labels)}
    rows: list[tuple] = []
    bad: dict[str, list[int]] = {}
    for number, cells in lines:
        row = dict(zip(header, cells, strict=False))
        label = (_score if task.regression else index.get)(row.get(task.label, ""))
        if len(cells) != len(header):
            bad.setdefault(f"not {len(header)} columns", []).append(number)
        elif label is None:
            bad.setdefault(f"the unknown label {row[task.label]!r}", []).append(number)
        else:
            rows.append((*(row[name] for name in task.texts), label))
    if bad:
        _report_bad(bad, path, task, skip_bad_rows)
    features = _features(task)
    columns = zip(*rows, strict=True) if rows else [[] for _ in features]
    dataset = datasets.Dataset.from_dict(dict(zip(features, map(list, columns), strict=True)), features=features)
    check_not_empty(dataset, str(path))
    return dataset


def _lines(path: pathlib.Path) -> list[tuple[int, list[str]]]:
    """Line number from 1 and cells of every nonempty line. Only tabs separate cells; quotes are text."""
    # Only "\n" ends a line: sentences may contain other characters that Python treats as line breaks.
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            lines = [line.rstrip("\r\n") for line in file]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is truncated or not a gzip file ({error}): copy it again") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error})") from error
    return [(number, line.split("\t")) for number, line in enumerate(lines, start=1) if line]


def _score(text: str) -> float | None:
    """The score, or None if it is not a number from 0 to 5."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= 5 else None


def _report_bad(bad: Mapping[str, Sequence[int]], path: pathlib.Path, task: Task, skip: bool) -> None:
    """Raise ValueError for bad rows, or report them on stderr if they are skipped."""
    found = [
        f"{len(n)} with {what} (line {', '.join(map(str, n[:5]))}{', ...' * (len(n) > 5)})" for what, n in bad.items()
    ]
    more = f" and {len(found) - 5} more kinds" if len(found) > 5 else ""
    labels = "scores from 0 to 5" if task.regression else ", ".join(map(repr, task.labels))
    message = f"{path}: {sum(map(len, bad.values()))} bad rows: {'; '.join(found[:5])}{more}. Known labels: {labels}."
    if not skip:
        raise ValueError(f"{message} --skip_bad_rows skips such rows")
    print(f"skipped in {message}", file=sys.stderr)


def _from_hub(dataset: datasets.Dataset, task: Task, where: str) -> datasets.Dataset:
    """Convert a split from the hub, whose labels are class indices already (-1 if unknown)."""
    check_columns(dataset, [*task.hub_texts, "label"], where)
    check_not_empty(dataset, where)
    labels = np.asarray(dataset["label"], dtype=np.float64)
    wrong = ~((labels >= 0) & (labels <= 5)) if task.regression else ~np.isin(labels, range(len(task.labels)))
    if wrong.any():
        known = "scores from 0 to 5" if task.regression else f"0 to {len(task.labels) - 1}"
        rows = np.flatnonzero(wrong)
        raise ValueError(
            f"{where}: {len(rows)} rows with unknown labels (row {rows[0]}: {labels[rows[0]]:g}); known: {known}"
        )
    dataset = dataset.select_columns([*task.hub_texts, "label"])
    renamed = {old: f"sentence{number}" for number, old in enumerate(task.hub_texts, start=1)}
    return dataset.rename_columns({o: n for o, n in renamed.items() if o != n}).cast(_features(task))


def figures(name: str, predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The official metrics of a task, the main one first.

    They are nan if a prediction is not finite, and for correlations with a constant.

    Args:
        name: name of the task.
        predictions: class logits (N, classes), or scores (N,) or (N, 1) for STS-B.
        labels: (N,).
    """
    task = task_of(name)
    predicted = np.asarray(predictions, dtype=np.float64)
    if not np.isfinite(predicted).all():
        return dict.fromkeys(task.metrics, math.nan)
    predicted = predicted.reshape(len(labels)) if task.regression else predicted.argmax(axis=-1)
    return {metric: float(METRICS[metric](labels, predicted)) for metric in task.metrics}


def _correlation(function: Callable[..., Any]) -> Callable[[np.ndarray, np.ndarray], float]:
    def correlate(labels: np.ndarray, predicted: np.ndarray) -> float:
        constant = np.ptp(labels) == 0 or np.ptp(predicted) == 0
        return math.nan if constant else function(labels, predicted).statistic

    return correlate


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": sklearn.metrics.accuracy_score,
    "f1": lambda labels, predicted: sklearn.metrics.f1_score(labels, predicted, zero_division=0.0),
    "matthews_correlation": sklearn.metrics.matthews_corrcoef,
    "pearson": _correlation(scipy.stats.pearsonr),
    "spearman": _correlation(scipy.stats.spearmanr),
}
