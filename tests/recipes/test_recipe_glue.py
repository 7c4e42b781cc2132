"""GLUE: the official files, the official metrics, the recipe and the custom Accelerate loop."""

import gzip
import json
import math
import pathlib
import shutil
import subprocess
import sys

import datasets
import numpy as np
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file

import hf_efficient_attn as hea
from recipe_commands import losses
from recipes import accelerate_loop
from recipes import glue as recipe
from recipes.common.data import glue

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "it", "was", "not", "good", "bad"]
# A CSV reader would join the rows after an unclosed quote.
QUOTED = ('he said " no', 'a "good" cat')
# Header and row of each task in the official order; "{label}" and the like are replaced.
LAYOUT = {
    "cola": (None, ["gj04", "{label}", "*", "{first}"]),
    "sst2": (["sentence", "label"], ["{first}", "{label}"]),
    "mrpc": (["\ufeffQuality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
             ["{label}", "1", "2", "{first}", "{second}"]),
    "stsb": (
        ["index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2", "score"],
        ["0", "g", "f", "2012", "1", "none", "none", "{first}", "{second}", "{label}"],
    ),
    "qqp": (["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],
            ["0", "1", "2", "{first}", "{second}", "{label}"]),
    "mnli": (
        ["index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse", "sentence1_parse",
         "sentence2_parse", "sentence1", "sentence2", "label1", "gold_label"],
        ["0", "1", "2", "fiction", "( a )", "( b )", "(S a)", "(S b)", "{first}", "{second}", "neutral", "{label}"],
    ),
    "qnli": (["index", "question", "sentence", "label"], ["0", "{first}", "{second}", "{label}"]),
    "rte": (["index", "sentence1", "sentence2", "label"], ["0", "{first}", "{second}", "{label}"]),
    "wnli": (["index", "sentence1", "sentence2", "label"], ["0", "{first}", "{second}", "{label}"]),
}  # fmt: skip


def sentence(number: int) -> str:
    return " ".join(WORDS[(number * step + step) % len(WORDS)] for step in range(1, 3 + number % 6))


def labels_of(name: str, count: int) -> list[str]:
    if name == "stsb":
        return [f"{number % 6}.000" for number in range(count)]
    known = list(glue.TASKS[name].labels)
    return [known[number % len(known)] for number in range(count)]


def write(folder: pathlib.Path, name: str, count: int = 24, *, zipped: bool = False) -> pathlib.Path:
    """Write a task in the official layout with `count` rows per file."""
    header, row = LAYOUT[name]
    task_folder = folder / glue.TASKS[name].folder
    task_folder.mkdir(parents=True, exist_ok=True)
    for stem in glue.TASKS[name].splits.values():
        rows = [] if header is None else [header]
        for number, label in enumerate(labels_of(name, count)):
            first = QUOTED[number] if number < 2 else sentence(number)
            filled = {"label": label, "first": first, "second": sentence(number + 1)}
            rows.append([cell.format(**filled) for cell in row])
        text = "".join("\t".join(cells) + "\n" for cells in rows)
        if zipped:
            with gzip.open(task_folder / f"{stem}.tsv.gz", "wt", encoding="utf-8") as file:
                file.write(text)
        else:
            (task_folder / f"{stem}.tsv").write_text(text, encoding="utf-8")
    return folder


def edit(folder: pathlib.Path, name: str, change) -> pathlib.Path:
    """Change the lines of the training set."""
    path = folder / glue.TASKS[name].folder / "train.tsv"
    path.write_text("\n".join(change(path.read_text(encoding="utf-8").split("\n"))), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", glue.TASKS)
def test_all_nine_tasks_are_read_from_the_official_files(name, tmp_path):
    rows = glue.load(name, str(write(tmp_path, name, 7, zipped=name in ("cola", "mrpc"))))
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
    with pytest.raises(ValueError, match="Did you mean 'mrpc'"):
        glue.task_of("mrcp")


def test_only_line_feeds_and_tabs_are_separators(tmp_path):
    write(tmp_path, "sst2", 4)
    odd = ["odd\u2028line\x85here\t1", "", ""]
    path = edit(tmp_path, "sst2", lambda lines: [f"{line}\r" for line in lines[:-1]] + odd)
    split = glue.load("sst2", str(tmp_path))["train"]
    assert split["sentence1"][0] == QUOTED[0] and split["sentence1"][4] == "odd\u2028line\x85here"
    assert list(split["label"]) == [0, 1, 0, 1, 1]
    path.write_bytes(b"sentence\tlabel\n\xff\xfe\t1\n")
    with pytest.raises(ValueError, match=r"train.tsv: not UTF-8"):
        glue.load("sst2", str(tmp_path))


def test_bad_rows_are_counted_and_reported(tmp_path, capsys):
    """As in QQP. An additional tab would shift the label."""
    write(tmp_path, "qqp", 8)

    def breaks(lines):
        lines[2] = lines[2].rpartition("\t")[0]
        lines[3] = "\t".join(lines[3].split("\t")[:3])
        lines[5] += "\tmore"
        lines[6] = lines[6][:-1] + "maybe"
        return lines

    path = edit(tmp_path, "qqp", breaks)
    message = f"{path}: 4 bad rows: 3 with not 6 columns (line 3, 4, 6); 1 with the unknown label 'maybe' (line 7)"
    with pytest.raises(ValueError) as refused:
        glue.load("qqp", str(tmp_path))
    assert message in str(refused.value) and "Known labels: '0', '1'" in str(refused.value)
    assert "--skip_bad_rows" in str(refused.value)
    rows = glue.load("qqp", str(tmp_path), skip_bad_rows=True)
    assert rows.num_rows == {"train": 4, "validation": 8}
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
        ("mnli", ending("-"), "unknown label '-'"),
    ],
)
def test_invalid_files_are_refused(name, change, message, tmp_path):
    edit(write(tmp_path, name, 4), name, change)
    with pytest.raises(ValueError, match=message):
        glue.load(name, str(tmp_path))


def test_missing_and_truncated_files_are_refused(tmp_path):
    folder = write(tmp_path, "rte", 40, zipped=True)
    path = folder / "RTE" / "train.tsv.gz"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match="damaged gzip file"):
        glue.load("rte", str(folder))
    path.unlink()
    with pytest.raises(ValueError, match=r"train.tsv \(or .tsv.gz\) is missing; .* layout is <data>/RTE/train"):
        glue.load("rte", str(folder))
    for source in (str(tmp_path / "nowhere"), "glue", "a/b/c"):
        with pytest.raises(ValueError, match="is neither a folder nor a hub id"):
            glue.load("rte", source)


PAIR = ["sentence1", "sentence2"]


def hub_rows(texts, labels, kind) -> datasets.Dataset:
    columns = {text: [f"{text} {number}" for number in range(len(labels))] for text in texts}
    features = {**dict.fromkeys(texts, datasets.Value("string")), "label": kind, "idx": datasets.Value("int32")}
    columns |= {"label": labels, "idx": list(range(len(labels)))}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


@pytest.mark.parametrize(
    ("name", "texts"),
    [("sst2", ["sentence"]), ("mnli", ["premise", "hypothesis"]), ("stsb", ["sentence1", "sentence2"])],
)
def test_data_from_the_hub_has_the_same_format(name, texts, monkeypatch):
    task = glue.TASKS[name]
    kind = datasets.ClassLabel(names=list(task.labels.values())) if task.labels else datasets.Value("float32")
    parts = {split: hub_rows(texts, [0, 1, 1], kind) for split in [*task.splits, "test"]}
    monkeypatch.setattr(datasets, "load_dataset", lambda source, part: {("nyu-mll/glue", name): parts}[source, part])
    rows = glue.load(name, "nyu-mll/glue")
    assert list(rows) == list(task.splits)
    assert rows["train"].column_names == [f"sentence{number + 1}" for number in range(len(texts))] + ["label"]
    assert rows["train"]["sentence1"][2] == f"{texts[0]} 2" and list(rows["train"]["label"]) == [0, 1, 1]


@pytest.mark.parametrize(
    ("parts", "texts", "message"),
    [
        ({"train": [0, 1]}, PAIR, "nyu-mll/glue has no split validation; its splits: train"),
        ({"train": [0, -1], "validation": [0]}, PAIR, r"1 rows with unknown labels \(row 1\)"),
        ({"train": [0], "validation": []}, PAIR, "nyu-mll/glue, validation is empty"),
        ({"train": [0], "validation": [0]}, ["sentence"], "2 columns of texts and one named label are needed"),
        (None, PAIR, r"could not be loaded from the hub \(no network\)"),
    ],
)
def test_data_from_the_hub_is_checked(parts, texts, message, monkeypatch):
    def load(*given):
        if parts is None:
            raise ConnectionError("no network")
        kind = datasets.ClassLabel(names=list(glue.TASKS["rte"].labels))
        return {split: hub_rows(texts, labels, kind) for split, labels in parts.items()}

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(ValueError, match=message):
        glue.load("rte", "nyu-mll/glue")


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
    assert list(glue.figures("stsb", scores, given)) == ["spearman", "pearson"]


def test_metrics_of_invalid_predictions_are_nan():
    """A broken model must not score like one that always predicts the first class."""
    assert math.isnan(glue.figures("rte", np.array([[math.nan, 1.0], [0.0, 1.0]]), np.array([0, 1]))["accuracy"])
    constant = glue.figures("stsb", np.ones((3, 1)), np.array([1.0, 2.0, 3.0]))
    assert all(math.isnan(value) for value in constant.values())


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> str:
    """A tiny BERT with its own tokenizer."""
    folder = tmp_path_factory.mktemp("encoder")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    return str(folder)


STAGES = ["--stages", "linformer,projection_dim=4:0.25", "flurka_performer,num_features=8:1.0"]


@pytest.fixture
def command(encoder, tmp_path):
    """Makes the options of a short run on tiny data."""

    def options(name: str, out: str, *more: str) -> list[str]:
        if not (tmp_path / "glue" / glue.TASKS[name].folder).exists():
            write(tmp_path / "glue", name)
        given = {"--task": name, "--data": tmp_path / "glue", "--model_name_or_path": encoder, "--max_length": 16,
                 "--output_dir": tmp_path / out, "--per_device_train_batch_size": 4}  # fmt: skip
        return [str(part) for pair in given.items() for part in pair] + list(more)

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return options


TRAINER = ["--max_steps", "8", "--logging_steps", "1", "--save_strategy", "steps", "--save_steps", "3",
           "--save_total_limit", "9", "--learning_rate", "1e-2"]  # fmt: skip


def same_weights(one: pathlib.Path, other: pathlib.Path) -> bool:
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def check_files(folder, report) -> None:
    written = json.loads((folder / "metrics.json").read_text())
    assert written["metrics"]["eval_accuracy"] == report["metrics"]["eval_accuracy"]
    assert written["switches"] == [{"step": 2, "from": "linformer", "to": "flurka_performer"}]
    assert written["rows"] == {"train": 20, "validation": 9}
    assert (written["steps"], written["seed"], written["processes"], written["global_batch_size"]) == (8, 0, 1, 4)
    assert written["seconds_per_step"] > 0 and written["peak_memory_mib"] > 100
    assert written["attention"]["stages"] == STAGES[1:] and written["versions"]["hf_efficient_attn"] == hea.__version__
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.config.efficient_attention["method"] == "flurka_performer"
    assert model.config.id2label == {0: "not_equivalent", 1: "equivalent"}
    assert transformers.AutoTokenizer.from_pretrained(folder).pad_token == "[PAD]"


def test_a_run_is_reported_and_can_be_resumed(command, tmp_path, capsys):
    options = [*TRAINER, *STAGES, "--max_train_samples", "20", "--max_eval_samples", "9"]
    report = recipe.run(command("mrpc", "one", *options))
    check_files(tmp_path / "one", report)
    assert "| switch at step 2 | linformer to flurka_performer |" in capsys.readouterr().out
    assert {"eval_f1", "eval_accuracy", "eval_loss", "train_loss"} <= report["metrics"].keys()
    one, two = tmp_path / "one", tmp_path / "two"
    assert len(losses(one)) == 8
    shutil.copytree(one, two)
    (two / "model.safetensors").unlink()
    # From step 3, after the switch at step 2, in the middle of an epoch.
    for step in ("6", "8"):
        shutil.rmtree(two / f"checkpoint-{step}", ignore_errors=True)
    resumed = recipe.run(command("mrpc", "two", *options, "--resume_from_checkpoint", "True"))
    assert (report["resumed_at"], resumed["resumed_at"]) == ([], [3])
    assert "resumed from" in capsys.readouterr().err
    assert losses(two) == losses(one) and same_weights(one, two)
    # The last step has a checkpoint. Trainer would do a ninth step.
    with pytest.raises(ValueError, match=r"is finished: it has done 8 steps and --max_steps is 8"):
        recipe.run(command("mrpc", "two", *options, "--resume_from_checkpoint", "True"))
    assert same_weights(one, two)


@pytest.fixture
def encoder_without_dropout(encoder, tmp_path) -> str:
    """The encoder without dropout, whose random masks depend on the shapes of the batches."""
    folder = tmp_path / "without_dropout"
    shutil.copytree(encoder, folder)
    values = json.loads((folder / "config.json").read_text())
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps({**values, **dropout}))
    return str(folder)


FIVE_STEPS = ["--attention", "sdpa", "--max_steps", "5", "--logging_steps", "1", "--save_strategy", "no"]


def test_accumulated_batches_train_like_one_batch(command, tmp_path, encoder_without_dropout):
    """Trainer treats BERT's mean as a sum: two batches of 4 would have twice the loss of one batch of 8."""
    more = [["--per_device_train_batch_size", "8"], ["--gradient_accumulation_steps", "2"]]
    for out, options in zip(("whole", "halves"), more, strict=True):
        recipe.run(command("mrpc", out, *FIVE_STEPS, "--model_name_or_path", encoder_without_dropout, *options))
    np.testing.assert_allclose(losses(tmp_path / "halves"), losses(tmp_path / "whole"), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["glue", "accelerate_loop"])
def test_two_processes_train_like_one(script, command, tmp_path, encoder_without_dropout):
    """With the CPU config. A step has the same examples, half of them in each process."""
    steps = FIVE_STEPS if script == "glue" else ["--max_steps", "5"]
    given = command("mrpc", "two", *steps, "--model_name_or_path", encoder_without_dropout)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "recipes/configs/cpu.yaml"]
    done = subprocess.run(
        [*launch, f"recipes/{script}.py", *given], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "two" / "metrics.json").read_text())["processes"] == 2
    alone = command(
        "mrpc", "one", *steps, "--model_name_or_path", encoder_without_dropout, "--per_device_train_batch_size", "8"
    )
    (recipe if script == "glue" else accelerate_loop).run(alone)
    for name in ("config.json", "learning_curve.png"):
        assert (tmp_path / "two" / name).is_file()
    first, second = (load_file(tmp_path / out / "model.safetensors") for out in ("one", "two"))
    for key in first:
        torch.testing.assert_close(second[key], first[key], atol=1e-5, rtol=1e-4, msg=key)
    if script == "glue":
        np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-4)


def test_regression_and_two_development_sets(command):
    short = ["--max_steps", "2", "--save_strategy", "no", "--attention", "linear"]
    found = recipe.run(command("stsb", "stsb", *short))["metrics"]
    assert {"eval_spearman", "eval_pearson"} <= found.keys() and found["eval_loss"] > 0
    report = recipe.run(command("mnli", "mnli", *short))
    assert {"eval_matched_accuracy", "eval_mismatched_accuracy"} <= report["metrics"].keys()
    assert report["efficient_attention"]["method"] == "linear"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--task", "mrcp"], "unknown GLUE task 'mrcp'"),
        (["--max_length", "64"], "the model has positions for 32 tokens"),
        (["--max_train_samples", "0"], "0 samples: give 1 or more"),
        (["--data", "nowhere"], "nowhere is neither a folder"),
        (["--stages", "linear:0.01", "flurka_linear:1.0", "--max_steps", "8"], "the stage 'linear' would have none"),
        (["--attention", "kdeformer", "--layers", "7"], "7"),
    ],
)
@pytest.mark.parametrize("run", [recipe.run, accelerate_loop.run], ids=["trainer", "loop"])
def test_refusals_before_the_first_step(run, more, message, command, monkeypatch):
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", lambda *given, **named: pytest.fail("a step was made"))
    with pytest.raises(ValueError, match=message):
        run(command("rte", "out", *more))


LOOP = ["--max_steps", "8", "--gradient_accumulation_steps", "2", "--learning_rate", "1e-2"]


@pytest.mark.parametrize(
    "stages",
    [
        ("linformer,projection_dim=4:3", "flurka_performer:end"),
        pytest.param(
            ("linformer,projection_dim=4:3", "flurka_linear,feature_map=hedgehog,num_features=4,distill=3:end"),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["plain", "distilled"],
)
def test_loop_switches_and_is_reproducible(command, tmp_path, stages):
    options = [*LOOP, "--stages", *stages]
    report = accelerate_loop.run(command("mrpc", "one", *options))
    (switch,), method = report["switches"], stages[1].split(",")[0].split(":")[0]
    assert (switch["step"], switch["from"], switch["to"]) == (3, "linformer", method)
    assert switch.get("distillation_steps") == (3 if "distill" in stages[1] else None)
    assert report["metrics"].keys() == {"eval_f1", "eval_accuracy"}
    one, two = tmp_path / "one", tmp_path / "two"
    assert json.loads((one / "metrics.json").read_text())["steps"] == 8
    assert (one / "learning_curve.png").is_file()
    model = transformers.AutoModelForSequenceClassification.from_pretrained(one)
    assert model.config.efficient_attention["method"] == method
    again = accelerate_loop.run(command("mrpc", "two", *options))
    assert again["metrics"] == report["metrics"] and same_weights(one, two)


def test_official_files(data):
    """The sizes of the official files. QNLI's training set is missing."""
    sizes = {"cola": (8551, 1043), "mrpc": (3667, 408), "stsb": (5749, 1500), "rte": (2490, 277), "wnli": (635, 71)}
    for name, (train, dev) in sizes.items():
        assert glue.load(name, str(data / "glue")).num_rows == {"train": train, "validation": dev}, name
    with pytest.raises(ValueError, match=r"QNLI/train\.tsv"):
        glue.load("qnli", str(data / "glue"))


@pytest.mark.slow
def test_minilm_learns_mrpc(data, minilm, tmp_path):
    """As in the recipe's docstring: better than always answering "equivalent", which has an accuracy of .684."""
    report = recipe.run([
        "--task", "mrpc", "--data", str(data / "glue"), "--model_name_or_path", str(minilm),
        "--output_dir", str(tmp_path / "out"), "--attention", "sdpa", "--num_train_epochs", "1",
        "--learning_rate", "2e-4", "--save_strategy", "no",
    ])  # fmt: skip
    assert report["metrics"]["eval_accuracy"] > 0.71
