"""What the measurements of `benchmark` say: from which length on a method pays off, and which method to use.

Two times are different if the ranges of their ratios to exact attention over the rounds (`Timing.range`) are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hf_efficient_attn.evaluation.timing import MIN_SPEED_UP, Timing
from hf_efficient_attn.integration.settings import EXACT

# A larger mean error of the layers is recommended only if no method has a smaller one; the default limit of `auto`.
_MAX_ERROR = 0.1

Row = Mapping[str, Any]


def timing_of(row: Row) -> Timing:
    """The times of a row of "measurements"."""
    ratio, low, high = row["speed_up"], row["speed_up_min"], row["speed_up_max"]
    return Timing(row["seconds"], row["seconds"] * ratio, ratio, low, high)


def pays_from(measurements: Sequence[Row], label: str) -> int | None:
    """The smallest measured length from which on a method is a gain (`Timing.is_gain`); None if there is none."""
    own = sorted((row for row in measurements if row["attention"] == label), key=lambda row: row["length"])
    first = None
    for row in reversed(own):
        if not timing_of(row).is_gain:
            break
        first = row["length"]
    return first


def summarise(result: Mapping[str, Any]) -> list[str]:
    """Sentences that say from which length on each method pays off."""
    sentences = []
    for label, first in result["pays_from"].items():
        rows = sorted(
            (row for row in result["measurements"] if row["attention"] == label), key=lambda row: row["length"]
        )
        last = timing_of(rows[-1])
        about = f"{last.ratio:.1f} times as fast as exact attention at {rows[-1]['length']} tokens"
        if first is None:
            where = f" up to {rows[-1]['length']} tokens" if len(rows) > 1 else ""
            low, high = last.range
            sentences.append(
                f"{label} does not pay off{where}: it is {about} ({low:.2f} to {high:.2f} in the rounds), and less "
                f"than {MIN_SPEED_UP} in any of them is no gain."
            )
            continue
        where = "at all measured lengths" if first == rows[0]["length"] else f"from {first} tokens on"
        sentences.append(f"{label} pays off {where}: it is {about}.")
    return sentences


def recommend_method(measurements: Sequence[Row]) -> dict[str, str | None]:
    """The method to use at the greatest length at which several were compared, and why.

    Methods that are no gain are not recommended. Of the others it is the fastest that keeps an error of .1, averaged
    over layers and heads, or, of several whose times are not different from that of the fastest, the one with the
    smallest error; if none keeps the error, the one with the smallest; if none is a gain, exact attention.

    Args:
        measurements: those of the methods.

    Returns:
        "recommended": the label, or None if errors were not measured or there is nothing to compare. "recommendation":
        a sentence, or None.
    """
    rows = [row for row in measurements if row["attention"] != EXACT]
    lengths = [row["length"] for row in rows]
    compared = [length for length in set(lengths) if lengths.count(length) > 1]
    rows = [row for row in rows if row["length"] == max(compared, default=0)]
    if not rows or any(row["error"] is None for row in rows):
        return {"recommended": None, "recommendation": None}
    where = f"Recommended at {rows[0]['length']} tokens: "
    faster = [row for row in rows if timing_of(row).is_gain]
    if not faster:
        sentence = (
            f"{where}exact attention ({EXACT}), because no method is at least {MIN_SPEED_UP} times as fast in each "
            "round."
        )
        return {"recommended": EXACT, "recommendation": sentence}
    good = [row for row in faster if row["error"] <= _MAX_ERROR]
    reason = f"the smallest of the methods that are faster; none of them keeps {_MAX_ERROR}"
    if good:
        fastest = max(good, key=lambda row: row["speed_up"])
        equal = [row for row in good if timing_of(row).range[1] >= timing_of(fastest).range[0]]
        reason = f"the fastest with an error of at most {_MAX_ERROR}"
        if len(equal) > 1:
            reason = f"the smallest of those that keep {_MAX_ERROR}, whose times differ too little to tell them apart"
    best = min(equal if good else faster, key=lambda row: row["error"])
    about = f"{best['speed_up']:.1f} times as fast as exact attention with an error of {best['error']:.3f}"
    if best.get("output_error") is not None:
        about += f" in attention and of {best['output_error']:.3f} in the output"
    return {"recommended": best["attention"], "recommendation": f"{where}{best['attention']}, {about}, {reason}."}
