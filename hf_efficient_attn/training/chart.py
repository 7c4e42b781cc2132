"""The picture of a distillation: the error of every layer before and after, and the error during the training."""

import pathlib
from collections.abc import Mapping
from typing import Any

from hf_efficient_attn.io.writing import replacing

_COLORS = {"before": "#d55e00", "after": "#0072b2"}


def draw(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw the errors.

    Args:
        result: "distillation" of `distill_checkpoint`.
        path: where to write; matplotlib determines the format from the name.
    """
    from matplotlib.figure import Figure  # an optional dependency

    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    bars, curve = figure.subplots(1, 2, width_ratios=(3, 2))
    names = [entry["name"] if entry["layer"] is None else str(entry["layer"]) for entry in result["layers"]]
    for offset, (key, color) in zip((-0.2, 0.2), _COLORS.items(), strict=True):
        errors = [float("nan") if entry[key] is None else entry[key] for entry in result["layers"]]
        bars.bar([i + offset for i in range(len(names))], errors, width=0.4, color=color, label=key)
    bars.set_xticks(range(len(names)), names, rotation=60 if any(len(name) > 3 for name in names) else 0)
    bars.set_title("Error of each layer on held-out data: lower is better", loc="left", fontsize="medium")
    bars.set(xlabel="layer", ylabel="relative error of the output")
    bars.legend(frameon=False)
    points = [(0, result["error_before"])]
    points += [(row["step"], row["held_out"]) for row in result["history"] if row["stage"] == "layers"]
    curve.plot(*zip(*(p for p in points if p[1] is not None), strict=True), color=_COLORS["after"], marker="o")
    curve.set_title("Mean over the layers", loc="left", fontsize="medium")
    curve.set(xlabel="step")
    for axes in (bars, curve):
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    data = f"{result['data']['name']}, {result['tokens']} tokens"
    figure.suptitle(f"{result['source']} with {result['attention']} on {data}", fontsize="medium")
    with replacing(path) as draft:
        figure.savefig(draft, dpi=150)
