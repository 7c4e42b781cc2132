"""What the measurements of `benchmark` say: from which length on a method pays off, and which method to use."""

from collections.abc import Mapping, Sequence
from typing import Any

from hf_efficient_attn.integration.settings import EXACT

# Smaller speed-ups may be due to chance.
_MIN_SPEED_UP = 1.05
# A larger mean error of the layers is recommended only if no method has a smaller one; the default limit of `auto`.
_MAX_ERROR = 0.1


def pays_from(measurements: Sequence[Mapping[str, Any]], label: str) -> int | None:
    """The smallest measured length from which on a method is faster by 5% or more; None if there is none."""
    own = sorted((row for row in measurements if row["attention"] == label), key=lambda row: row["length"])
    first = None
    for row in reversed(own):
        if row["speed_up"] < _MIN_SPEED_UP:
            break
        first = row["length"]
    return first


def summarise(result: Mapping[str, Any]) -> list[str]:
    """Sentences that say from which length on each method pays off."""
    sentences = []
    for label, first in result["pays_from"].items():
        rows = [row for row in result["measurements"] if row["attention"] == label]
        lengths = sorted({row["length"] for row in rows})
        if first is None:
            where = f"up to {lengths[-1]} tokens" if len(lengths) > 1 else f"at {lengths[0]} tokens"
            sentences.append(f"{label} does not pay off {where}: exact attention is as fast or faster.")
            continue
        speed_up = next(row["speed_up"] for row in rows if row["length"] == lengths[-1])
        where = "at all measured lengths" if first == lengths[0] else f"from {first} tokens on"
        sentences.append(
            f"{label} pays off {where}: it is {speed_up:.1f} times as fast as exact attention at {lengths[-1]} tokens."
        )
    return sentences


def recommend_method(measurements: Sequence[Mapping[str, Any]]) -> dict[str, str | None]:
    """The method to use at the greatest length at which several were compared, and why.

    It is the fastest of those that keep an error of .1, averaged over layers and heads; if none keeps it, the one with
    the smallest error of those that are faster than exact attention; if there are none, exact attention.

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
    faster = [row for row in rows if row["speed_up"] >= _MIN_SPEED_UP]
    if not faster:
        sentence = f"{where}exact attention ({EXACT}), because none of the methods is faster at this length."
        return {"recommended": EXACT, "recommendation": sentence}
    good = [row for row in faster if row["error"] <= _MAX_ERROR]
    best = max(good, key=lambda row: row["speed_up"]) if good else min(faster, key=lambda row: row["error"])
    reason = (
        f"the fastest with an error of at most {_MAX_ERROR}"
        if good
        else f"the smallest of the methods that are faster; none of them keeps {_MAX_ERROR}"
    )
    about = f"{best['speed_up']:.1f} times as fast as exact attention with an error of {best['error']:.3f}"
    return {"recommended": best["attention"], "recommendation": f"{where}{best['attention']}, {about}, {reason}."}
