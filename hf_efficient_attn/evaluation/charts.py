"""The files of a benchmark: its result as JSON, and a picture of speed-up and error against length."""

import itertools
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.timing import describe
from hf_efficient_attn.hub.card import write_card
from hf_efficient_attn.integration.settings import EXACT
from hf_efficient_attn.io.json import read_json_object
from hf_efficient_attn.io.writing import check_folder, replacing, write_results

_FILES = ("benchmark.json", "benchmark.png")

# Distinct for readers who do not see all colours (Okabe and Ito); markers tell the lines apart as well.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#8c6d31")
_MARKERS = "osD^vP*X"
# Errors from here on are drawn at the edge: the output has nothing to do with the exact one.
_LARGEST_ERROR = 1.5
# Key of the rows -> title, label of the axis, value of exact attention, largest value that is drawn.
_PANELS = {
    "speed_up": ("Speed-up: higher is better", "times as fast as exact attention", 1.0, float("inf")),
    "error": ("Error of a layer: lower is better", "relative error (operator norm)", 0.0, _LARGEST_ERROR),
}


def output_folder(
    source: "str | pathlib.Path", output: pathlib.Path | None, *, card: bool = False, force: bool = False
) -> pathlib.Path | None:
    """The folder for benchmark.json and benchmark.png, checked before the measurements; None if none is requested.

    With `card` it is `source`, the folder of the checkpoint, and otherwise `output`, which the user names.

    Raises:
        UnsupportedAttentionError: the files cannot be written, or they exist and `force` is False; with `card`, an
            `output` is given or `source` is not the folder of a converted checkpoint.
    """
    if card:
        if output is not None:
            raise UnsupportedAttentionError("with --card the results are written into SOURCE: leave --output out")
        output = pathlib.Path(source)
        config = output / "config.json"
        if not config.is_file() or "efficient_attention" not in read_json_object(config):
            raise UnsupportedAttentionError(
                f"--card: {str(source)!r} is not the folder of a converted checkpoint: make one with hf-efficient-attn "
                "convert"
            )
    if output is not None:
        check_folder(output, _FILES, force=force)
    return output


def write_benchmark(
    result: Mapping[str, Any], folder: pathlib.Path, *, card: bool = False, force: bool = True
) -> list[pathlib.Path]:
    """Write benchmark.json and benchmark.png into a folder, and with `card` update the model card there.

    Without `force`, files that have appeared since `output_folder` stay, and the results get other names.

    Returns:
        the paths of the files.
    """
    if card:  # the files are published, and should not name the folder around the checkpoint
        result = {**result, "source": str(result["source"]).rpartition("/")[2]}
    written = write_results(result, folder, "benchmark", draw, force=force)
    return [*written, write_card(folder)] if card else written


def draw(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw speed-up and error of a result of `benchmark_checkpoint`; the name of the file determines the format."""
    from matplotlib.figure import Figure  # an optional dependency

    has_errors = any(row["error"] is not None for row in result["measurements"] if row["method"] != EXACT)
    keys = ["speed_up", "error"][: 1 + has_errors]
    figure = Figure(figsize=(6.2 * len(keys), 4.6), layout="constrained")
    for axes, key in zip(figure.subplots(1, len(keys), squeeze=False)[0], keys, strict=True):
        _draw_panel(axes, key, result)
    title = f"{result['source']} on {result['data']['name']}\n{describe(result['machine'])}"
    figure.suptitle(title, fontsize="medium")
    with replacing(path) as draft:
        figure.savefig(draft, dpi=150)


def _draw_panel(axes: Any, key: str, result: Mapping[str, Any]) -> None:
    from matplotlib.ticker import LogLocator

    title, what, exact, largest = _PANELS[key]
    lengths = sorted({row["length"] for row in result["measurements"]})
    ends = [(lengths[-1], exact, "exact attention", "0.3")]  # x and y of the last point, text, colour
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in result["measurements"]:
        if row["method"] != EXACT:
            points = lines.setdefault(row["attention"], [])
            points += [(row["length"], row[key])] if row[key] is not None else []
    for number, (label, points) in enumerate(lines.items()):
        color, marker = (styles[number % len(styles)] for styles in (_COLORS, _MARKERS))
        if points:
            x, y = zip(*((length, min(value, largest)) for length, value in points), strict=True)
            axes.plot(x, y, color=color, marker=marker, markersize=5, clip_on=False, zorder=3)
            value = points[-1][1]
            ends.append((x[-1], y[-1], label if value <= largest else f"{label}: {value:.1f}", color))
    axes.axhline(exact, color="0.3", linewidth=1.2, linestyle="--", zorder=2)
    values = [value for points in lines.values() for _, value in points]
    axes.set_xscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    if key == "speed_up":
        low, high = min([0.9, *values]) / 1.1, max([1.2, *values]) * 1.1
        axes.set(yscale="log", ylim=(low, high))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 8 * low else (1, 1.5, 2, 3, 5, 7)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    else:
        axes.set_ylim(0, min(largest, 1.1 * max([0.1, *values])))
    axes.minorticks_off()
    axes.set_title(title, loc="left", fontweight="bold", fontsize="medium")
    axes.set(xlabel="tokens", ylabel=what)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    label_ends(axes, ends)


def label_ends(axes: Any, ends: Iterable[tuple[float, float, str, str]], distance: float = 0.055) -> None:
    """Write texts to the right of the last points of lines, moved up or down so that they do not overlap.

    Args:
        axes: the panel, whose limits are final.
        ends: x and y of each point, its text and its colour.
        distance: smallest distance between two texts, as a share of the height of the panel.
    """
    to_share = axes.transScale + axes.transLimits
    placed = sorted((float(to_share.transform((x, y))[1]), x, y, text, color) for x, y, text, color in ends)
    heights = [share for share, *_ in placed]
    for _ in range(1000):  # push neighbours apart until nothing moves
        overlaps = [distance - (high - low) for low, high in itertools.pairwise(heights)]
        if all(overlap < 1e-3 for overlap in overlaps):
            break
        for index, overlap in enumerate(overlaps):
            heights[index] -= max(0.0, overlap) / 2
            heights[index + 1] += max(0.0, overlap) / 2
        heights[0], heights[-1] = max(0.0, heights[0]), min(1.0, heights[-1])
    line = {"arrowstyle": "-", "linewidth": 0.6, "shrinkA": 1, "shrinkB": 3, "relpos": (0, 0.5)}
    for height, (_, x, y, text, color) in zip(heights, placed, strict=True):
        axes.annotate(
            text, xy=(x, y), xytext=(1.04, height), textcoords="axes fraction", va="center", color=color,
            fontsize="small", annotation_clip=False,
            arrowprops={**line, "color": color},
        )  # fmt: skip
