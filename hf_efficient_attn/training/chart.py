"""The picture of a distillation: the error of every layer before and after it."""

import pathlib
from collections.abc import Mapping
from typing import Any

from hf_efficient_attn.io.writing import replacing


def draw(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw the errors.

    Args:
        result: "distillation" of `distill_checkpoint`.
        path: where to write; matplotlib determines the format from the name.
    """
    from matplotlib.figure import Figure  # an optional dependency

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    names = [entry["name"] if entry["layer"] is None else str(entry["layer"]) for entry in result["layers"]]
    for offset, key, color in ((-0.2, "before", "#d55e00"), (0.2, "after", "#0072b2")):
        errors = [float("nan") if entry[key] is None else entry[key] for entry in result["layers"]]
        axes.bar([i + offset for i in range(len(names))], errors, width=0.4, color=color, label=key)
    axes.set_xticks(range(len(names)), names, rotation=60 if any(len(name) > 3 for name in names) else 0)
    axes.set(xlabel="layer", ylabel="relative error of the output", title="Error on held-out data: lower is better")
    axes.legend(frameon=False)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    data = f"{result['data']['name']}, {result['tokens']} tokens"
    figure.suptitle(f"{result['source']} with {result['attention']} on {data}", fontsize="medium")
    with replacing(path) as draft:
        figure.savefig(draft, dpi=150)
