"""GLUE: the official files, the official metrics, the recipe and the custom Accelerate loop."""

import math
import pathlib
import re

import datasets
import numpy as np
import pytest

from helpers.commands import losses
from recipes.common.data import glue
from tiny_recipes import QUOTED, labels_of, refuses, same_weights, sentence, train, write_glue


def edit(folder: pathlib.Path, name: str, change) -> pathlib.Path:
    """Change the lines of the training set."""
    path = folder / glue.TASKS[name].folder / "train.tsv"
    path.write_text("\n".join(change(path.read_text(encoding="utf-8").split("\n"))), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", glue.TASKS)
def test_all_nine_tasks_are_read_from_the_official_files(name, tmp_path):
    rows = glue.load(name, str(write_glue(tmp_path, name, 7, zipped=name in ("cola", "mrpc"))))
    dev = ["validation_matched", "validation_mismatched"] if name == "mnli" else ["validation"]
    assert list(rows) == ["train", *dev]
    given = labels_of(name, 7)
    for split in rows.values():
        texts = ["sentence1"] if name in ("cola", "sst2") else ["sentence1", "sentence2"]
        assert split.column_names == [*texts, "label"]
        assert split["sentence1"][:3] == [*QUOTED, sentence(2)]
        if name == "stsb":
            assert list(split["label"]) == [float(label) for label in given]
            assert split.features["label"].dtype == "float32"
        else:
            named = [split.features["label"].int2str(number) for number in split["label"]]
            assert named == [glue.TASKS[name].labels[label] for label in given]


def test_label_indices_equal_those_of_the_hub():
    """Otherwise other models would be evaluated with swapped classes."""
    assert list(glue.TASKS["mnli"].labels.values()) == ["entailment", "neutral", "contradiction"]
    assert list(glue.TASKS["rte"].labels) == list(glue.TASKS["qnli"].labels) == ["entailment", "not_entailment"]
    assert list(glue.TASKS["wnli"].labels.values()) == ["not_entailment", "entailment"]
    assert glue.task_of("SST-2") is glue.TASKS["sst2"]
    refuses("Did you mean 'mrpc'", glue.task_of, "mrcp")


def test_only_line_feeds_and_tabs_are_separators(tmp_path):
    write_glue(tmp_path, "sst2", 4)
    odd = ["odd\u2028line\x85here\t1", "", ""]
    path = edit(tmp_path, "sst2", lambda lines: [f"{line}\r" for line in lines[:-1]] + odd)
    split = glue.load("sst2", str(tmp_path))["train"]
    assert split["sentence1"][0] == QUOTED[0] and split["sentence1"][4] == "odd\u2028line\x85here"
    assert list(split["label"]) == [0, 1, 0, 1, 1]
    path.write_bytes(b"sentence\tlabel\n\xff\xfe\t1\n")
    refuses(r"train.tsv: not UTF-8", glue.load, "sst2", str(tmp_path))


def test_bad_rows_are_counted_and_reported(tmp_path, capsys):
    """As in QQP. An additional tab would shift the label."""
    write_glue(tmp_path, "qqp", 8)

    def breaks(lines):
        lines[2] = lines[2].rpartition("\t")[0]
        lines[3] = "\t".join(lines[3].split("\t")[:3])
        lines[5] += "\tmore"
        lines[6] = lines[6][:-1] + "maybe"
        return lines

    path = edit(tmp_path, "qqp", breaks)
    message = f"{path}: 4 bad rows: 3 with not 6 columns (line 3, 4, 6); 1 with the unknown label 'maybe' (line 7)"
    refuses(re.escape(f"{message}. Known labels: '0', '1'") + ". --skip_bad_rows", glue.load, "qqp", str(tmp_path))
    assert glue.load("qqp", str(tmp_path), skip_bad_rows=True).num_rows == {"train": 4, "validation": 8}
    assert message in capsys.readouterr().err


def ending(label):
    """Replaces the label of the last row."""
    return lambda lines: [*lines[:-2], lines[-2].rpartition("\t")[0] + f"\t{label}"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("rte", lambda lines: [lines[0].replace("label", "lable")], "no column 'label'; its columns: index"),
        ("rte", lambda lines: lines[:1], "train.tsv is empty"),
        ("cola", lambda lines: [], "train.tsv is empty"),
        ("stsb", ending("nan"), "unknown label 'nan'"),
        ("stsb", ending("5.5"), "scores from 0 to 5"),
    ],
)
def test_invalid_files_are_refused(name, change, message, tmp_path):
    edit(write_glue(tmp_path, name, 4), name, change)
    refuses(message, glue.load, name, str(tmp_path))


def test_missing_and_truncated_files_are_refused(tmp_path):
    folder = write_glue(tmp_path, "rte", 40, zipped=True)
    path = folder / "RTE" / "train.tsv.gz"
    path.write_bytes(path.read_bytes()[:-30])
    refuses("damaged gzip file", glue.load, "rte", str(folder))
    path.unlink()
    refuses(r"train.tsv.gz \(or .tsv\) is missing; .* layout is <data>/RTE/train", glue.load, "rte", str(folder))
    for source in (str(tmp_path / "nowhere"), "glue", "a/b/c"):
        refuses("is neither a folder nor a hub id", glue.load, "rte", source)


def hub_rows(texts: str, labels, kind) -> datasets.Dataset:
    columns = {text: [f"{text} {number}" for number in range(len(labels))] for text in texts.split()}
    data = datasets.Dataset.from_dict({**columns, "label": labels, "idx": range(len(labels))})
    strings = {text: datasets.Value("string") for text in columns}
    return data.cast(datasets.Features({**strings, "label": kind, "idx": datasets.Value("int32")}))


@pytest.mark.parametrize(
    ("name", "texts"), [("sst2", "sentence"), ("mnli", "premise hypothesis"), ("stsb", "sentence1 sentence2")]
)
def test_data_from_the_hub_has_the_same_format(name, texts, monkeypatch):
    task = glue.TASKS[name]
    kind = datasets.ClassLabel(names=list(task.labels.values())) if task.labels else datasets.Value("float32")
    parts = {split: hub_rows(texts, [0, 1, 1], kind) for split in [*task.splits, "test"]}
    monkeypatch.setattr(datasets, "load_dataset", lambda source, part: {("nyu-mll/glue", name): parts}[source, part])
    rows = glue.load(name, "nyu-mll/glue")
    assert list(rows) == list(task.splits)
    assert rows["train"].column_names == [*(f"sentence{i + 1}" for i, _ in enumerate(texts.split())), "label"]
    assert rows["train"]["sentence1"][2] == f"{texts.split()[0]} 2" and list(rows["train"]["label"]) == [0, 1, 1]


@pytest.mark.parametrize(
    ("parts", "texts", "message"),
    [
        ({"train": [0, 1]}, "a b", "nyu-mll/glue has no split validation; its splits: train"),
        ({"train": [0, -1], "validation": [0]}, "a b", r"1 rows with unknown labels \(row 1\)"),
        ({"train": [0], "validation": []}, "a b", "nyu-mll/glue, validation is empty"),
        ({"train": [0], "validation": [0]}, "a", "2 columns of texts and one named label are needed"),
        (None, "a b", r"could not be loaded from the hub \(no network\)"),
    ],
)
def test_data_from_the_hub_is_checked(parts, texts, message, monkeypatch):
    def load(*given):
        if parts is None:
            raise ConnectionError("no network")
        kind = datasets.ClassLabel(names=list(glue.TASKS["rte"].labels))
        return {split: hub_rows(texts, labels, kind) for split, labels in parts.items()}

    monkeypatch.setattr(datasets, "load_dataset", load)
    refuses(message, glue.load, "rte", "nyu-mll/glue")


def test_official_metrics():
    # Predictions 1, 1, 0, 1, 0 for 1, 0, 0, 1, 1: two true and one false positives, one false and one true negatives.
    logits = np.array([[0.0, 1.0], [0.2, 0.3], [2.0, 1.0], [-2.0, -1.0], [1.0, 0.0]])
    labels = np.array([1, 0, 0, 1, 1])
    assert glue.figures("rte", logits, labels) == {"accuracy": 0.6}
    f1 = 2 * (2 / 3) * (2 / 3) / (2 / 3 + 2 / 3)
    assert glue.figures("mrpc", logits, labels) == {"f1": pytest.approx(f1), "accuracy": 0.6}
    matthews = (2 * 1 - 1 * 1) / math.sqrt((2 + 1) * (2 + 1) * (1 + 1) * (1 + 1))
    assert glue.figures("cola", logits, labels)["matthews_correlation"] == pytest.approx(matthews)
    # The ranks agree except for two neighbours; the values are far from linear.
    scores, given = np.array([[1.0], [2.0], [30.0], [4.0]]), np.array([0.0, 1.0, 2.0, 3.0])
    found = glue.figures("stsb", scores, given)
    assert found["spearman"] == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert found["pearson"] == pytest.approx(np.corrcoef(scores[:, 0], given)[0, 1])
    assert list(found) == ["spearman", "pearson"]
    # A broken model must not score like one that always predicts the first class.
    assert math.isnan(glue.figures("rte", np.array([[math.nan, 1.0], [0.0, 1.0]]), np.array([0, 1]))["accuracy"])
    assert all(math.isnan(value) for value in glue.figures("stsb", np.ones((3, 1)), np.array([1.0, 2.0, 3.0])).values())


def test_accumulated_batches_train_like_one_batch(here, tmp_path):
    """Trainer treats BERT's mean as a sum: two batches of 4 would have twice the loss of one batch of 8."""
    steps = "--attention", "sdpa", "--max_steps", 5, "--model", here / "encoder_without_dropout"
    train("glue", here, tmp_path / "whole", *steps, "--per_device_train_batch_size", 8)
    train("glue", here, tmp_path / "halves", *steps, "--gradient_accumulation_steps", 2)
    np.testing.assert_allclose(losses(tmp_path / "halves"), losses(tmp_path / "whole"), rtol=1e-4)


def test_regression_and_two_development_sets(here, tmp_path):
    short = "--max_steps", 2, "--attention", "linear"
    found = train("glue", here, tmp_path / "stsb", "--task", "stsb", *short)["metrics"]
    assert {"eval_spearman", "eval_pearson"} <= found.keys() and found["eval_loss"] > 0
    found = train("glue", here, tmp_path / "mnli", "--task", "mnli", *short)["metrics"]
    assert {"eval_matched_accuracy", "eval_mismatched_accuracy"} <= found.keys()


def test_the_loop_switches_and_is_reproducible(here, tmp_path):
    """With a distillation at the switch."""
    options = "--gradient_accumulation_steps", 2, "--learning_rate", 1e-2, "--stages", "linformer,projection_dim=4:3"
    last = "flurka_linear,feature_map=hedgehog,num_features=4,distill=3:end"
    report, again = (train("loop", here, tmp_path / name, *options, last) for name in ("one", "two"))
    (switch,) = report["switches"]
    assert (switch["step"], switch["from"], switch["to"]) == (3, "linformer", "flurka_linear")
    assert switch["distillation_steps"] == 3
    assert report["steps"] == 6 and report["metrics"].keys() == {"eval_f1", "eval_accuracy"}
    assert report["efficient_attention"]["method"] == "flurka_linear"
    assert again["metrics"] == report["metrics"] and same_weights(tmp_path / "one", tmp_path / "two")


def test_official_files(data):
    """The sizes of the official files. QNLI's training set is missing."""
    sizes = {"cola": (8551, 1043), "mrpc": (3667, 408), "stsb": (5749, 1500), "rte": (2490, 277), "wnli": (635, 71)}
    for name, (count, dev) in sizes.items():
        assert glue.load(name, str(data / "glue")).num_rows == {"train": count, "validation": dev}, name
    refuses(r"QNLI/train\.tsv", glue.load, "qnli", str(data / "glue"))


@pytest.mark.slow
def test_minilm_learns_mrpc(data, minilm, tmp_path):
    """As in the recipe's docstring: better than always answering "equivalent", which has an accuracy of .684."""
    words = f"ONLY --task mrpc --data {data / 'glue'} --model {minilm} --attention sdpa --num_train_epochs 1"
    words += " --learning_rate 2e-4 --save_strategy no"
    assert train("glue", tmp_path, tmp_path / "out", *words.split())["metrics"]["eval_accuracy"] > 0.71
