"""The picture of a benchmark: speed-up and error against length, with a name at the end of every line."""

import itertools
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hf_efficient_attn.evaluation.timing import describe
from hf_efficient_attn.integration.settings import EXACT
from hf_efficient_attn.io.writing import replacing

# Distinct for readers who do not see all colours (Okabe and Ito); markers tell the lines apart as well.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#8c6d31")
_MARKERS = "osD^vP*X"
# Errors from here on are drawn at the edge: the output has nothing to do with the exact one.
_LARGEST_ERROR = 1.5


class _Panel(NamedTuple):
    """A panel: the key in the rows, the title, the label of the axis, and the value of exact attention."""

    key: str
    title: str
    what: str
    exact: float


def draw(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw speed-up and error against length.

    Args:
        result: of `benchmark_checkpoint`.
        path: where to write; matplotlib determines the format from the name.
    """
    from matplotlib.figure import Figure  # an optional dependency

    rows = [row for row in result["measurements"] if row["method"] != EXACT]
    panels = [_Panel("speed_up", "Speed-up: higher is better", "times as fast as exact attention", 1.0)]
    if any(row["error"] is not None for row in rows):
        panels.append(_Panel("error", "Error of a layer: lower is better", "relative error (operator norm)", 0.0))
    lengths = sorted({row["length"] for row in result["measurements"]})
    figure = Figure(figsize=(6.2 * len(panels), 4.6), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_panel(axes, panel, rows, lengths)
    title = f"{result['source']} on {result['data']['name']}\n{describe(result['machine'])}"
    figure.suptitle(title, fontsize="medium")
    with replacing(path) as draft:
        figure.savefig(draft, dpi=150)


def _draw_panel(axes: Any, panel: _Panel, rows: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> None:
    ends: list[tuple[float, float, str, str]] = []  # x and y of the last point, text, colour
    for number, label in enumerate(dict.fromkeys(row["attention"] for row in rows)):
        points = [(row["length"], row[panel.key]) for row in rows if row["attention"] == label]
        points = [(length, value) for length, value in points if value is not None]
        if not points:
            continue
        color, (last, value) = _COLORS[number % len(_COLORS)], points[-1]
        x, y = zip(*((length, _within(panel, value)) for length, value in points), strict=True)
        axes.plot(x, y, color=color, marker=_MARKERS[number % len(_MARKERS)], markersize=5, clip_on=False, zorder=3)
        text = label if _within(panel, value) == value else f"{label}: {value:.1f}"
        ends.append((last, y[-1], text, color))
    axes.axhline(panel.exact, color="0.3", linewidth=1.2, linestyle="--", zorder=2)
    ends.append((lengths[-1], panel.exact, "exact attention", "0.3"))
    axes.set_xscale("log")
    values = [row[panel.key] for row in rows if row[panel.key] is not None]
    if panel.key == "speed_up":
        low, high = min([0.9, *values]) / 1.1, max([1.2, *values]) * 1.1
        axes.set_yscale("log")
        axes.set_ylim(low, high)
        axes.set_yticks(ticks := _ticks(low, high), [f"{tick:g}x" for tick in ticks])
        axes.tick_params(axis="y", which="minor", left=False, labelleft=False)
    else:
        axes.set_ylim(0, min(_LARGEST_ERROR, 1.1 * max([0.1, *values])))
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axes.set_title(panel.title, loc="left", fontweight="bold", fontsize="medium")
    axes.set(xlabel="tokens", ylabel=panel.what)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    label_ends(axes, ends)


def _within(panel: _Panel, value: float) -> float:
    """The value at which a point is drawn."""
    return min(value, _LARGEST_ERROR) if panel.key == "error" else value


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers on a logarithmic axis: 0.5, 1, 2, ..., or closer ones if the axis is short."""
    mantissas = (1, 2, 5) if high > 8 * low else (1, 1.5, 2, 3, 5, 7)
    ticks = [mantissa * 10.0**exponent for exponent in range(-4, 5) for mantissa in mantissas]
    return [tick for tick in ticks if low <= tick <= high]


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
            if overlap > 0:
                heights[index] -= overlap / 2
                heights[index + 1] += overlap / 2
        heights[0], heights[-1] = max(0.0, heights[0]), min(1.0, heights[-1])
    line = {"arrowstyle": "-", "linewidth": 0.6, "shrinkA": 1, "shrinkB": 3, "relpos": (0, 0.5)}
    for height, (_, x, y, text, color) in zip(heights, placed, strict=True):
        axes.annotate(
            text, xy=(x, y), xytext=(1.04, height), textcoords="axes fraction", va="center", color=color,
            fontsize="small", annotation_clip=False,
            arrowprops={**line, "color": color},
        )  # fmt: skip
