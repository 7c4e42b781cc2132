"""The picture of a distillation: the error of every layer before and after, and the error during the training."""

import pathlib
from collections.abc import Mapping
from typing import Any

from hf_efficient_attn.io.writing import replacing

_BEFORE, _AFTER = "#d55e00", "#0072b2"


def draw(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw the errors.

    Args:
        result: "distillation" of `distill_checkpoint`.
        path: where to write; matplotlib determines the format from the name.
    """
    from matplotlib.figure import Figure  # an optional dependency

    history = [row for row in result["history"] if row["stage"] == "layers" and row["held_out"] is not None]
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    bars, curve = figure.subplots(1, 2, width_ratios=(3, 2))
    layers = result["layers"]
    names = [entry["name"] if entry["layer"] is None else str(entry["layer"]) for entry in layers]
    for offset, key, color in ((-0.2, "before", _BEFORE), (0.2, "after", _AFTER)):
        points = [(i + offset, entry[key]) for i, entry in enumerate(layers) if entry[key] is not None]
        bars.bar([x for x, _ in points], [y for _, y in points], width=0.4, color=color, label=key)
    bars.set_xticks(range(len(names)), names, rotation=0 if max(map(len, names), default=0) < 4 else 60)
    bars.set_title("Error of each layer on held-out data: lower is better", loc="left", fontsize="medium")
    bars.set(xlabel="layer", ylabel="relative error of the output")
    bars.legend(frameon=False)
    steps, errors = [row["step"] for row in history], [row["held_out"] for row in history]
    if result["error_before"] is not None:
        steps, errors = [0, *steps], [result["error_before"], *errors]
    curve.plot(steps, errors, color=_AFTER, marker="o", markersize=4)
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
