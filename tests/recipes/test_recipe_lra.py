"""Data of the Long Range Arena, the generator of ListOps, the encoder, and the recipe lra.py."""

import gzip
import itertools
import json
import random
import re
import statistics
from collections import Counter

import numpy as np
import pytest
import torch

import hf_efficient_attn as hea
from recipes import lra
from recipes.common.data import listops
from recipes.common.data import lra as data_of
from tiny_recipes import WRITERS, refuses, train, write, write_lra

FUNCTIONS = {"MIN": min, "MAX": max, "MED": lambda v: int(statistics.median(v)), "SM": lambda v: sum(v) % 10}


def by_rewriting(expression: str) -> tuple[int, list[tuple[str, int]]]:
    """Evaluate an expression, one innermost operator after the other: its value, and operators with their arguments."""
    innermost, operators = re.compile(r"\[(\w+) ([\d ]+)\]"), []
    while match := innermost.search(expression):
        digits = [int(digit) for digit in match[2].split()]
        operators.append((match[1], len(digits)))
        expression = f"{expression[: match.start()]}{FUNCTIONS[match[1]](digits)}{expression[match.end() :]}"
    return int(expression), operators


def test_values_agree_with_another_evaluator():
    found = list(itertools.islice(listops.expressions(listops.Rules(3, 300), 5), 300))
    assert [value for _, value in found] == [by_rewriting(text)[0] for text, _ in found]
    assert {value for _, value in found} == set(range(10))
    # The expressions of the documented results: change the version of the generator with them.
    assert next(listops.expressions(listops.Rules(3, 12), 0)) == ("[MIN 8 0 5 1 7 8 9 ]", 0)


def test_expressions_follow_the_rules():
    """Shares of operators, numbers of arguments and depths in 4,000 expressions, with a fixed seed."""
    rules, generator = listops.Rules(min_length=0, max_length=10_000, max_depth=4, max_args=4), random.Random(1)
    drawn = [listops.draw(generator, rules)[0] for _ in range(4000)]
    assert 0.23 < sum(len(tokens) > 1 for tokens in drawn) / len(drawn) < 0.27
    steps = [step for tokens in drawn for step in by_rewriting(" ".join(tokens))[1]]
    operators, counts = Counter(name for name, _ in steps), Counter(count for _, count in steps)
    assert set(counts) == {2, 3, 4} and max(counts.values()) < 1.2 * min(counts.values())
    assert len(operators) == 4 and max(operators.values()) < 1.2 * min(operators.values())
    nested = [itertools.accumulate((t in listops.OPERATORS) - (t == listops.END) for t in tokens) for tokens in drawn]
    assert max(map(max, nested)) == 3, "and the digits"


def test_expressions_that_get_too_long_are_abandoned():
    """Drawing stops if and only if the whole expression would be too long."""
    short, long = (listops.Rules(min_length=0, max_length=n, max_depth=5) for n in (40, 10**6))
    abandoned = 0
    for seed in range(400):
        whole, found = (listops.draw(random.Random(seed), rules) for rules in (long, short))
        assert found == (whole if len(whole[0]) < 40 else None)
        abandoned += found is None
    assert 20 < abandoned < 380


def test_generated_listops(tmp_path):
    rules = listops.Rules(min_length=20, max_length=60)
    folder = listops.generate(tmp_path, train=50, evaluation=20, rules=rules, seed=3)
    lines = {name: (folder / f"basic_{name}.tsv").read_text().splitlines() for name in ("train", "test")}
    assert {name: len(found) for name, found in lines.items()} == {"train": 51, "test": 21}
    rows = [row.split("\t") for found in lines.values() for row in found[1:]]
    assert len({text for text, _ in rows}) == 70
    assert all(20 < len(text.split()) < 60 and int(value) == by_rewriting(text)[0] for text, value in rows)
    # The files are written once. The evaluation set does not depend on the size of the training set.
    stamp = (folder / "basic_train.tsv").stat().st_mtime_ns
    assert listops.generate(tmp_path, train=50, evaluation=20, rules=rules, seed=3) == folder
    assert (folder / "basic_train.tsv").stat().st_mtime_ns == stamp
    more = listops.generate(tmp_path / "other", train=60, evaluation=20, rules=rules, seed=3)
    assert (more / "basic_test.tsv").read_text().splitlines() == lines["test"]
    assert (more / "basic_train.tsv").read_text().splitlines()[:51] == lines["train"]
    other = listops.generate(tmp_path, train=50, evaluation=20, rules=rules, seed=4)
    assert (other / "basic_test.tsv").read_text().splitlines() != lines["test"]
    assert not list(tmp_path.rglob("*.tsv.*"))


def reading(max_length=64, **options) -> data_of.Reading:
    return data_of.Reading(max_length, **options)


def test_listops_in_the_official_layout(here):
    found = data_of.load_listops(str(here / "listops"), reading())
    assert sorted(found) == ["test", "train", "validation"] and all(len(rows) == 12 for rows in found.values())
    names = ["[MAX", "2", "9", "]"]
    assert found["train"][0]["input_ids"].tolist() == [listops.TOKENS.index(name) + 2 for name in names]
    assert found["train"]["labels"][:4].tolist() == [9, 1, 3, 4]


def test_rules_without_a_model():
    examples = [(0, [10, 1]), (0, [10, 2]), (9, [10, 5]), (7, [11, 3])]
    others = [(0, [10, 4]), (7, [11, 4]), (8, [11, 8]), (0, [12, 6])]
    train, evaluation = reading().rows(examples), reading().rows(others)
    assert data_of.baselines(train, evaluation) == {"most_frequent": 0.5}
    assert data_of.baselines(train, evaluation, operator_at=0) == {"most_frequent": 0.5, "first_operator": 0.75}
    started = [reading(first=True).rows(rows) for rows in (examples, others)]
    assert data_of.baselines(*started, operator_at=1)["first_operator"] == 0.75


def test_reviews_as_bytes(here, tmp_path):
    found = data_of.load_text(str(here / "text"), reading())
    assert {split: len(rows) for split, rows in found.items()} == {"train": 12, "test": 12}
    by_label = {int(row["labels"]): row["input_ids"] for row in found["train"]}
    assert bytes((by_label[1] - 2).tolist()).decode().startswith("good")
    assert by_label[1].tolist()[-2:] == [byte + 2 for byte in "\u00e9".encode()]
    assert len(by_label[0]) == 64 and max(found["train"]["length"]) == 64
    for split in ("train", "test"):
        lines = [json.dumps({"id": i, "label": i % 2, "text": f"review {i}"}) for i in range(5)]
        write(tmp_path / f"{split}.jsonl.gz", gzip.compress("\n".join(lines).encode()))
    found = data_of.load_text(str(tmp_path), reading(train=3, first=True))
    assert len(found["train"]) == 3 and len(found["test"]) == 5
    assert found["test"][1]["input_ids"].tolist() == [1, *(byte + 2 for byte in b"review 1")]
    assert found["test"]["labels"][:].tolist() == [0, 1, 0, 1, 0]


def test_pictures_as_grey_pixels(tmp_path):
    """The splits are chosen as in test_recipe_imagenet.py."""
    source = write_lra("image", tmp_path / "image")
    for rows in data_of.load_image(source, reading(16)).values():
        assert len(rows) == 20 and rows["length"][:].tolist() == [16] * 20
        for row in rows:
            assert set(row["input_ids"]) <= {20 * row["labels"] + 2, 20 * row["labels"] + 3}
    resized = data_of.load_image(source, reading(64, evaluation=5))
    assert set(resized["test"]["length"][:].tolist()) == {64} and len(resized["test"]) == 5


BAD = {
    "listops": ("basic_val.tsv", "Source\tTarget\n[MAX 1 2 ]\t2\n[AVG 1 2 ]\t1\n", "line 3: unknown token '.AVG'"),
    "listops, no value": ("basic_val.tsv", "[MAX 1 2 ]\n", "line 1: expected EXPRESSION TAB DIGIT"),
    "listops, too long": ("basic_val.tsv", f"[MAX {'1 ' * 70}]\t1\n", "72 tokens .* give --max_length 72"),
    "text, label": ("train.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": 2}\n', "line 2: .* the label 2"),
    "text, field": ("train.jsonl", '{"review": "a", "label": 1}\n', "'text' and 'label' .* are needed"),
    "text, empty": ("train.jsonl", "\n", "there is no text"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_line(case, tmp_path):
    task, (name, content, message) = case.partition(",")[0], BAD[case]
    if task != "text":
        write_lra(task, tmp_path)
    write(tmp_path / name, content)
    refuses(message, getattr(data_of, f"load_{task}"), str(tmp_path), reading())


@pytest.mark.parametrize("task", WRITERS)
def test_missing_sources(task, tmp_path):
    for source in (tmp_path / "nowhere" / "at" / "all", tmp_path):
        refuses(re.escape(str(source)), getattr(data_of, f"load_{task}"), str(source), reading())


@pytest.mark.parametrize("method", ["sdpa", "nystromformer", "linear"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_padding_does_not_change_outputs(method, pooling):
    torch.manual_seed(0)
    encoder = lra.EncoderArguments(pooling=pooling, dropout=0.0)
    model = hea.convert(lra.make_model(data_of.TASKS["text"], encoder, 64).eval(), method)
    rows = reading().rows([(0, np.arange(20)), (1, np.arange(50))])
    with torch.no_grad():
        alone = [model(**data_of.collate([row])).logits[0] for row in rows]
        both = model(**data_of.collate(list(rows))).logits
    torch.testing.assert_close(torch.stack(alone), both, rtol=1e-4, atol=1e-5)


def test_it_learns(here, tmp_path):
    """The classes are ten grey values, which a model without training or with wrong pooling does not recognise."""
    more = ["--attention", "linear", "--learning_rate", 1e-2, "--dropout", 0, "--max_length", 16, "--max_steps", 60]
    assert train("lra-image", here, tmp_path / "out", *more)["metrics"]["eval_accuracy"] > 0.7


def test_generated_listops_through_the_recipe(here, tmp_path, capsys):
    rules = "--min_length 10 --max_length 64 --listops_depth 3 --listops_args 6 --listops_train 16 --listops_eval 8"
    words = f"--task listops {rules} --cache_dir {tmp_path / 'cache'} --use_cpu --max_steps 2 --save_strategy no"
    words += " --pooling cls --initializer_range 0.1 --num_layers 1 --hidden_size 16"
    report = train("lra-listops", here, tmp_path / "out", "ONLY", *words.split())
    assert report["rows"] == {"train": 16, "test": 8} and 10 < report["mean_length"]["train"] < 64
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["listops-10-64-3-6-0-16-8-v1"]
    assert sorted(report["baselines"]) == ["first_operator", "most_frequent"]
    assert f"first_operator {report['baselines']['first_operator']:.3f}" in capsys.readouterr().out
    assert lra.LongRangeModel.from_pretrained(tmp_path / "out").config.initializer_range == 0.1
