"""What follows from the measurements of `benchmark`: from which length on methods pay off, and which one to use."""

import itertools
from collections import Counter
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


def conclude(measurements: Sequence[Row], labels: Sequence[str]) -> dict[str, Any]:
    """Conclude from rows of "measurements" which of the methods with these labels pay off.

    Returns:
        "pays_from": label -> the smallest length from which on the method is a gain (`Timing.is_gain`), or None.
        "summary": sentences that say so. "recommended" and "recommendation": see `recommend_method`.
    """
    pays_from: dict[str, int | None] = {}
    sentences = []
    for label in labels:
        rows = sorted((row for row in measurements if row["attention"] == label), key=lambda row: row["length"])
        if not rows:
            continue
        gains = [*itertools.takewhile(lambda row: timing_of(row).is_gain, reversed(rows))]
        pays_from[label] = gains[-1]["length"] if gains else None
        last = timing_of(rows[-1])
        about = f"it is {last.ratio:.1f} times as fast as exact attention at {rows[-1]['length']} tokens"
        if gains:
            where = "at all measured lengths" if gains[-1] is rows[0] else f"from {gains[-1]['length']} tokens on"
            sentences.append(f"{label} pays off {where}: {about}.")
        else:
            low, high = last.range
            sentences.append(
                f"{label} does not pay off: {about} ({low:.2f} to {high:.2f} in the rounds), and less than "
                f"{MIN_SPEED_UP} in any of them is no gain."
            )
    compared = [row for row in measurements if row["attention"] in labels]
    return {"pays_from": pays_from, "summary": sentences, **recommend_method(compared)}


def recommend_method(rows: Sequence[Row]) -> dict[str, str | None]:
    """The method to use at the greatest length at which several were compared, and why.

    Methods that are no gain are not recommended. Of the others it is the fastest that keeps an error of .1, averaged
    over layers and heads; if none keeps it, the one with the smallest error; if none is a gain, exact attention.

    Returns:
        "recommended": the label, or None if errors were not measured or there is nothing to compare. "recommendation":
        a sentence, or None.
    """
    counts = Counter(row["length"] for row in rows)
    compared = max((length for length, count in counts.items() if count > 1), default=None)
    rows = [row for row in rows if row["length"] == compared]
    if not rows or any(row["error"] is None for row in rows):
        return {"recommended": None, "recommendation": None}
    where = f"Recommended at {compared} tokens: "
    faster = [row for row in rows if timing_of(row).is_gain]
    if not faster:
        why = f"because no method is at least {MIN_SPEED_UP} times as fast in each round."
        return {"recommended": EXACT, "recommendation": f"{where}exact attention ({EXACT}), {why}"}
    good = [row for row in faster if row["error"] <= _MAX_ERROR]
    if good:
        best = max(good, key=lambda row: row["speed_up"])
        reason = f"the fastest with an error of at most {_MAX_ERROR}"
    else:
        best = min(faster, key=lambda row: row["error"])
        reason = f"the smallest of the methods that are faster; none of them keeps {_MAX_ERROR}"
    about = f"{best['speed_up']:.1f} times as fast as exact attention with an error of {best['error']:.3f}"
    if best.get("output_error") is not None:
        about += f" in attention and of {best['output_error']:.3f} in the output"
    return {"recommended": best["attention"], "recommendation": f"{where}{best['attention']}, {about}, {reason}."}
