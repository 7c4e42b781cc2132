"""The picture of `hf-efficient-attn analyze`: heat maps of layers and heads."""

import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from hf_efficient_attn.io.writing import replacing

# Up to so many layers and heads, the cells contain their numbers.
_MOST_NUMBERS = 12
# An error of 1 is as large as the output itself. Larger errors have the colour of 1.
_LARGEST_ERROR = 1.0
# Largest ratio of the ends of a logarithmic scale.
_LOG_RANGE = 1000.0

Values = list[list[float] | None]  # for each layer one number per head


class _Map(NamedTuple):
    """A heat map: its title and numbers, and the scale and map of its colours."""

    title: str
    values: Values
    norm: Any
    cmap: str


def draw_maps(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw stable rank, tail-to-head ratio, and the errors of each method and budget, as heat maps of layers and heads.

    All errors have one colour scale that ends at 1, so that a method that fails does not hide the differences between
    the others.
    """
    from matplotlib.colors import Normalize  # an optional dependency
    from matplotlib.figure import Figure

    layers, budgets = result["layers"], [str(budget) for budget in result["budgets"]]
    names = [entry["name"] if entry["layer"] is None else str(entry["layer"]) for entry in layers]
    properties = [
        _Map(title, [entry[key] for entry in layers], _log_scale([entry[key] for entry in layers]), "cividis")
        for title, key in (("stable rank of the attention matrix", "stable_rank"), ("tail / head", "head_to_tail"))
        if any(entry[key] for entry in layers)
    ]
    sizes = [heads for entry in layers for sizes in entry["errors"].values() for heads in sizes.values()]
    largest = max(map(max, sizes), default=0.0)
    scale = Normalize(0.0, min(_LARGEST_ERROR, largest) if largest > 0 else 1.0)
    rows = [properties] if properties else []
    for label in layers[0]["errors"]:
        maps = []
        for budget in budgets:
            values = [entry["errors"][label][budget] for entry in layers]
            maps.append(_Map(f"{label}\n{budget} columns", values, scale, "viridis"))
        if len(maps) > 1 and all(one.values == maps[0].values for one in maps):
            maps = [maps[0]._replace(title=f"{label}\nat any budget")]
        rows.append(maps)
    num_columns = max(len(maps) for maps in rows)
    num_heads = max(len(heads) for one in (m for maps in rows for m in maps) for heads in one.values if heads)
    has_numbers = len(layers) <= _MOST_NUMBERS and num_heads <= _MOST_NUMBERS
    cell = 0.36 if has_numbers else min(0.3, 5 / num_heads)
    width = max(2.4, cell * num_heads + 0.8)
    height = min(6.0, max(1.2, (0.24 if has_numbers else 0.2) * len(layers))) + 1.0
    # A title that is wider than the maps below it would be cut.
    figure = Figure(figsize=(max(7.0, width * num_columns + 1.0), height * len(rows) + 0.7), layout="constrained")
    panels = figure.subplots(len(rows), num_columns, squeeze=False)
    for axes in panels.flat:
        axes.axis("off")
    image = None
    for maps, places in zip(rows, panels, strict=True):
        for one, axes in zip(maps, places, strict=False):
            shown = _draw_map(axes, one, names, num_heads, has_numbers=has_numbers)
            if one.norm is scale:
                image = shown
            else:
                is_cut = any(x < one.norm.vmin for heads in one.values for x in heads or ())
                figure.colorbar(shown, ax=axes, shrink=0.9, extend="min" if is_cut else "neither")
    below = panels[1 if properties else 0 :]
    if image is not None:
        extend = "max" if largest > _LARGEST_ERROR else "neither"
        bar = figure.colorbar(image, ax=below, extend=extend, shrink=min(1.0, 1.5 / len(below)), aspect=25)
        bar.set_label("relative error (operator norm)" + (f", up to {largest:.1f}" if extend == "max" else ""))
    figure.suptitle(title_of(result))
    with replacing(path) as draft:
        figure.savefig(draft, dpi=120)


def title_of(result: Mapping[str, Any]) -> str:
    """Model, data and length, as far as they are known, for a title."""
    parts = [f"{result['tokens']:,} tokens"]
    if "data" in result:
        rows, pixels = result["data"]["rows"], result.get("pixels")
        kind = "excerpt" if result.get("excerpt_seconds") else "text" if pixels is None else "picture"
        parts = [result["source"], result["data"]["name"], f"{rows} {kind}{'s' if rows > 1 else ''} of {parts[0]}"]
    return ", ".join(parts)


def _log_scale(values: Values) -> Any:
    """A logarithmic scale for positive numbers; numbers below a thousandth of the largest have the lowest colour."""
    from matplotlib.colors import LogNorm

    numbers = [x for heads in values for x in heads or () if x > 0]
    low, high = min(numbers, default=1.0), max(numbers, default=1.0)
    return LogNorm(max(low, high / _LOG_RANGE), high if high > low else 2 * low, clip=True)


def _draw_map(axes: Any, one: _Map, names: list[str], num_heads: int, *, has_numbers: bool) -> Any:
    """Draw one heat map; layers may have different numbers of heads."""
    padded = [[*(heads or ()), *[math.nan] * (num_heads - len(heads or ()))] for heads in one.values]
    axes.axis("on")
    image = axes.imshow(padded, aspect="auto", cmap=one.cmap, norm=one.norm)
    axes.set_title(one.title, fontsize="small")
    axes.set_xlabel("head", fontsize="x-small")
    axes.set_ylabel("layer", fontsize="x-small")
    step = max(1, round(len(names) / 16))
    axes.set_yticks(range(0, len(names), step), names[::step], fontsize="x-small")
    axes.set_xticks(range(0, num_heads, max(1, round(num_heads / 16))))
    axes.tick_params(labelsize="x-small", length=2)
    cells = [(layer, head, x) for layer, heads in enumerate(padded) for head, x in enumerate(heads) if math.isfinite(x)]
    for layer, head, value in cells if has_numbers else ():
        # Both maps of colours become lighter from one end to the other.
        color = "white" if one.norm(value) < 0.6 else "black"
        axes.text(head, layer, short_number(value), ha="center", va="center", fontsize=6, color=color)
    return image


def short_number(value: float) -> str:
    """A number with two or three digits and without a zero before the point: .07, 1.2, 34, 1.2k."""
    if value >= 1e4:
        return f"{value / 1e3:.0f}k"
    if value >= 9.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 0.995 else f"{value:.2f}".removeprefix("0")
