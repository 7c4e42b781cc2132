"""The pictures of `hf-efficient-attn benchmark`, `analyze` and `distill`."""

import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_efficient_attn.evaluation.timing import describe
from hf_efficient_attn.integration.settings import EXACT
from hf_efficient_attn.io.writing import replacing

# Distinct for readers who do not see all colours (Okabe and Ito); markers tell the lines apart as well.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#8c6d31")
_MARKERS = "osD^vP*X"
# Errors from here on are drawn at the edge: the output has nothing to do with the exact one.
_LARGEST_ERROR = 1.5
# Key of the rows -> title, label of the axis, value of exact attention, lowest and highest end of the axis.
_PANELS = {
    "speed_up": ("Speed-up: higher is better", "times as fast as exact attention", 1.0, 1.2, math.inf),
    "error": ("Error of a layer: lower is better", "relative error (operator norm)", 0.0, 0.1, _LARGEST_ERROR),
}


def draw_benchmark(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw a result of `benchmark_checkpoint`; the name of the file determines the format.

    It is speed-up and error by length. With one length, or more settings than colours, it is the error of the output
    against speed-up, at the two largest lengths.
    """
    from matplotlib.figure import Figure  # an optional dependency

    rows = [row for row in result["measurements"] if row["speed_up"] is not None]
    lengths = sorted({row["length"] for row in rows})
    has_errors = any(row["error"] is not None for row in rows if row["method"] != EXACT)
    is_many = len(lengths) == 1 or len({row["attention"] for row in rows}) > len(_COLORS)
    trades = is_many and any(row["output_error"] for row in rows)
    keys: list[Any] = lengths[-2:] if trades else ["speed_up", "error"][: 1 + has_errors]
    figure = Figure(figsize=((7.4 if trades else 6.2) * len(keys), 4.6), layout="constrained")
    for axes, key in zip(figure.subplots(1, len(keys), squeeze=False)[0], keys, strict=True):
        if trades:
            _draw_frontier(axes, [row for row in rows if row["length"] == key])
        else:
            _draw_panel(axes, key, rows)
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{result['source']} on {result['data']['name']}\n{describe(result['machine'])}", fontsize="medium")
    with replacing(path) as draft:
        figure.savefig(draft, dpi=150)


def _draw_panel(axes: Any, key: str, rows: Iterable[Mapping[str, Any]]) -> None:
    title, what, exact, lowest, largest = _PANELS[key]
    lengths, values = sorted({row["length"] for row in rows}), [lowest]
    axes.axhline(exact, color="0.3", linewidth=1.2, linestyle="--", zorder=2, label="exact attention")
    for number, label in enumerate(dict.fromkeys(row["attention"] for row in rows if row["method"] != EXACT)):
        points = [(row["length"], row[key]) for row in rows if row["attention"] == label and row[key] is not None]
        if points:
            color, marker = (styles[number % len(styles)] for styles in (_COLORS, _MARKERS))
            x, y = zip(*points, strict=True)
            values += y
            style = {"color": color, "marker": marker, "markersize": 5, "clip_on": False, "zorder": 3}
            label = label if y[-1] <= largest else f"{label}: {y[-1]:.1f}"
            axes.plot(x, [min(value, largest) for value in y], label=label, **style)
    axes.set_xscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set_ylim(0, min(largest, 1.1 * max(values)))
    axes.set_title(title, loc="left", fontweight="bold", fontsize="medium")
    axes.set(xlabel="tokens", ylabel=what)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize="small")


def _draw_frontier(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw error of the output against speed-up, and a line through the rows that no other is better than in both."""
    styles = {method: number for number, method in enumerate(dict.fromkeys(row["method"] for row in rows))}
    best: list[tuple[float, float]] = []
    for row in sorted(rows, key=lambda row: row["speed_up"], reverse=True):
        x = row["speed_up"]
        y = row["output_error"]
        label = f"{row['attention']}: {x:.1f}"
        if y is None:  # chunks, which have embeddings only
            cosine = "" if row["agreement"] is None else f", cosine {row['agreement']:.2f}"
            axes.axvline(x, color="0.3", linewidth=1.2, linestyle=":", label=label + cosine)
        elif y > 0:
            number = styles[row["method"]]
            style = {"color": _COLORS[number % 8], "marker": _MARKERS[(number + number // 8) % 8], "linestyle": ""}
            axes.plot(x, min(y, _LARGEST_ERROR), **style, markersize=7, zorder=3, label=f"{label}, {y:.3f}")
            best += [(x, min(y, _LARGEST_ERROR))] if all(y < other for _, other in best) else []
    axes.plot(*zip(*best, strict=True), color="0.85", linewidth=9, zorder=1)
    axes.axvline(1.0, color="0.3", linewidth=1.2, linestyle="--", zorder=2, label="exact attention")
    axes.set_title(f"{rows[0]['length']:,} tokens: right and low is better", loc="left", fontsize="medium")
    axes.set(xlabel="times as fast as exact attention", ylabel="relative error of the output", yscale="log")
    axes.set_yticks([x for x in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if axes.get_ylim()[0] < x < axes.get_ylim()[1]])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False, fontsize="x-small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def draw_analysis(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw stable rank, tail-to-head ratio, and the errors of each method and budget, as heat maps of layers and heads.

    All errors have one colour scale that ends at 1, an error as large as the output itself, so that a method that fails
    does not hide the differences between the others.
    """
    from matplotlib.figure import Figure  # an optional dependency

    layers = result["layers"]
    names = [entry["name"] if entry["layer"] is None else str(entry["layer"]) for entry in layers]
    errors = [entry["errors"] for entry in layers]
    known = [heads for one in errors for sizes in one.values() for heads in sizes.values() if heads]
    largest = max(map(max, known), default=0.0)
    limits = {"vmin": 0.0, "vmax": min(1.0, largest) or 1.0}
    # Title, numbers (for each layer one per head, or None) and scale of each map.
    rows: list[list[tuple[str, list[list[float] | None], dict[str, Any]]]] = [[]]
    for title, key in (("stable rank of the attention matrix", "stable_rank"), ("tail / head", "head_to_tail")):
        if any(x > 0 for entry in layers for x in entry[key] or ()):
            rows[0].append((title, [entry[key] for entry in layers], {"norm": "log"}))
    for label in errors[0]:
        budgets = [str(columns) for columns in result["budgets"]]
        rows.append([(f"{label}\nerror at {n} columns", [one[label][n] for one in errors], limits) for n in budgets])
    rows = [maps for maps in rows if maps]
    num_columns, step = max(map(len, rows)), max(1, round(len(names) / 16))
    num_heads = max(len(heads) for maps in rows for _, values, _ in maps for heads in values if heads)
    width, height = max(2.4, min(0.3 * num_heads, 5.0) + 0.8), min(6.0, max(1.2, 0.2 * len(layers))) + 1.0
    # A title that is wider than the maps below it would be cut.
    figure = Figure(figsize=(max(7.0, width * num_columns + 1.0), height * len(rows) + 0.7), layout="constrained")
    for maps, panels in zip(rows, figure.subplots(len(rows), num_columns, squeeze=False), strict=True):
        for axes in panels[len(maps) :]:
            axes.axis("off")
        for (title, values, scale), axes in zip(maps, panels, strict=False):
            # Layers may have different numbers of heads.
            padded = [[*(heads or ()), *[math.nan] * (num_heads - len(heads or ()))] for heads in values]
            image = axes.imshow(padded, aspect="auto", **scale)
            axes.set_title(title, fontsize="small")
            axes.set(xlabel="head", ylabel="layer")
            axes.set_yticks(range(0, len(names), step), names[::step])
            axes.tick_params(labelsize="x-small", length=2)
            figure.colorbar(image, ax=axes, extend="max" if scale is limits and largest > 1.0 else "neither")
    figure.suptitle(title_of(result))
    with replacing(path) as draft:
        figure.savefig(draft, dpi=120)


def draw_distillation(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw the errors of the result of `distill_checkpoint`."""
    from matplotlib.figure import Figure  # an optional dependency

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    names = [entry["name"] if entry["layer"] is None else str(entry["layer"]) for entry in result["layers"]]
    for offset, key, color in ((-0.2, "before", "#d55e00"), (0.2, "after", "#0072b2")):
        errors = [float("nan") if entry[key] is None else entry[key] for entry in result["layers"]]
        axes.bar([i + offset for i in range(len(names))], errors, width=0.4, color=color, label=key)
    axes.set_xticks(range(len(names)), names, rotation=60 if max(map(len, names)) > 3 else 0)
    axes.set(xlabel="layer", ylabel="relative error of the output", title="Error on held-out data: lower is better")
    axes.legend(frameon=False)
    data = f"{result['data']['name']}, {result['tokens']} tokens"
    figure.suptitle(f"{result['source']} with {result['attention']} on {data}", fontsize="medium")
    with replacing(path) as draft:
        figure.savefig(draft, dpi=150)


def title_of(result: Mapping[str, Any]) -> str:
    """Model, data and length of a result of `analyze_checkpoint`."""
    rows, kind = result["data"]["rows"], "text" if result["pixels"] is None else "picture"
    inputs = f"{rows} {kind}{'s' if rows > 1 else ''} of {result['tokens']:,} tokens"
    return f"{result['source']}, {result['data']['name']}, {inputs}"
