"""What follows from the measurements of `analyze` and `benchmark`: which method to use where, and from which length on.

Two times of `benchmark` are different if the ranges of their ratios to exact attention over the rounds (`Timing.range`)
are.
"""

import itertools
import json
import pathlib
import shlex
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from hf_efficient_attn.evaluation.calibration import (
    Study,
    bound,
    choose_each,
    choose_one,
    make_settings,
    measure_output_error,
    measure_speed,
    spread,
)
from hf_efficient_attn.evaluation.capture import AttentionSummary, Batch, tensors_of
from hf_efficient_attn.evaluation.defaults import Candidate
from hf_efficient_attn.evaluation.timing import MIN_SPEED_UP, Timing
from hf_efficient_attn.integration.settings import EXACT, changed_hyperparameters

# A larger mean error of the layers is recommended only if no method has a smaller one; the default limit of `auto`.
_MAX_ERROR = 0.1

Row = Mapping[str, Any]


def recommend(
    study: Study,
    candidates: Sequence[Candidate],
    summary: AttentionSummary,
    max_error: float,
    *,
    per_layer: bool,
    run: tuple[nn.Module, Batch] | None,
) -> dict[str, Any]:
    """Choose the methods of the layers by the criterion of `hea.calibrate`.

    Args:
        study: the errors.
        candidates: the methods at their budgets, the cheapest first.
        summary: of the model's attention.
        max_error: the limit for the error of a layer on an unseen sequence.
        per_layer: whether each layer gets the cheapest method and budget that keeps the limit. Otherwise, all layers
            that keep it get the same: the method and budget with which they save the most in total.
        run: model and batch with which to measure the speed and the error of the output; None to leave that out.

    Returns:
        "calibrated": the choice as `convert --config` and `hea.convert` take it, without default hyperparameters; None
        if no method keeps the limit. "nearest": in that case, the "layer", "attention", "columns" and "bound" of the
        smallest bound, or None. "recommended": None or a dictionary of

        - "layers": [{"layer", "attention" (a label), "method", "columns", "settings" (without defaults), "error" (mean
          over sequences and heads), "bound" (of the error on an unseen sequence)}].
        - "exact_layers": the layers that stay exact.
        - "error": the mean of the errors of "layers".
        - "columns": the cost per query in keys, averaged over all layers; "keys": that of exact attention.
        - "speed_up": of the attention of all layers over exact attention, measured on one sequence, or None.
        - "saves": whether that is a gain (`Timing.is_gain`), or None.
        - "output_error": relative error of the last hidden states, or of the logits, on that sequence, or None.
        - "tokens": the length up to which this was measured.
    """
    table = study.errors()
    # In causal attention a query has half of the keys on average.
    num_keys = (summary.max_kv_len + 1) / 2 if summary.is_causal else float(summary.max_kv_len)
    choose = choose_each if per_layer else choose_one
    chosen = choose(table, candidates, max_error, num_keys)
    if not chosen:
        bounds = {
            (layer, one): bound(errors, spread(table, one, max_error), max_error)
            for (layer, one), errors in table.items()
            if errors
        }
        nearest = None
        if bounds:
            layer, one = min(bounds, key=lambda key: bounds[key])
            nearest = {"layer": layer, "attention": one.label, "columns": one.columns, "bound": bounds[layer, one]}
        return {"recommended": None, "calibrated": None, "nearest": nearest}
    settings = make_settings(chosen, max(study.tokens[layer] for layer in chosen))
    exact = [layer for layer in summary.layers if layer not in chosen]
    one_run = None if run is None else (run[0], _first_sequence(run[1]), settings)
    speed = None if one_run is None else measure_speed(*one_run)
    recommended = {
        "layers": [
            {
                "layer": layer,
                "attention": choice.candidate.label,
                "columns": choice.candidate.columns,
                "method": choice.candidate.config.method,
                "settings": changed_hyperparameters(choice.candidate.config),
                "error": choice.error,
                "bound": choice.bound,
            }
            for layer, choice in chosen.items()
        ],
        "exact_layers": exact,
        "error": statistics.fmean(choice.error for choice in chosen.values()),
        "columns": statistics.fmean([*(one.candidate.columns for one in chosen.values()), *[num_keys] * len(exact)]),
        "keys": num_keys,
        "speed_up": None if speed is None else speed.ratio,
        "saves": None if speed is None else speed.is_gain,
        "output_error": None if one_run is None else measure_output_error(*one_run),
        "tokens": settings.calibrated_length,
    }
    return {"recommended": recommended, "calibrated": settings.to_dict(defaults=False), "nearest": None}


def _first_sequence(batch: Batch) -> Batch:
    """The first sequence of a batch, or the whole batch if its tensors have different first dimensions."""
    if not isinstance(batch, Mapping):
        return batch[:1]
    tensors = tensors_of(batch)
    is_aligned = len(set(map(len, tensors.values()))) == 1
    return {**batch, **{name: x[:1] for name, x in tensors.items()}} if is_aligned else batch


def apply_command(
    source: "str | pathlib.Path", result: Mapping[str, Any], config: "pathlib.Path | None" = None
) -> str | None:
    """The command line that applies a recommendation, quoted for a shell; None if nothing is recommended.

    The "source" of the result gives the new checkpoint its name. Without `config`, the analysis.json that the result is
    written to, the command writes the recommendation into a file first.
    """
    if result["calibrated"] is None:
        return None
    before, words = "", ["--config", "calibrated.json" if config is None else str(config)]
    if config is None:
        before = shlex.join(["printf", "%s", json.dumps(result["calibrated"])]) + " > calibrated.json && "
    if result["max_length"] is not None:
        words += ["--max-length", str(result["max_length"])]
    name = str(result["source"]).rpartition("/")[2].lstrip("-") + "-efficient"
    return before + shlex.join(["hf-efficient-attn", "convert", str(source), *words, "-o", name])


def timing_of(row: Row) -> Timing:
    """The times of a row of "measurements"."""
    ratio, low, high = row["speed_up"], row["speed_up_min"], row["speed_up_max"]
    return Timing(row["seconds"], row["seconds"] * ratio, ratio, low, high)


def pays_from(measurements: Sequence[Row], label: str) -> int | None:
    """The smallest measured length from which on a method is a gain (`Timing.is_gain`); None if there is none."""
    gains = itertools.takewhile(lambda row: timing_of(row).is_gain, reversed(_rows_of(measurements, label)))
    return min((row["length"] for row in gains), default=None)


def _rows_of(measurements: Sequence[Row], label: str) -> list[Row]:
    return sorted((row for row in measurements if row["attention"] == label), key=lambda row: row["length"])


def summarise(result: Mapping[str, Any]) -> list[str]:
    """Sentences that say from which length on each method pays off."""
    sentences = []
    for label, first in result["pays_from"].items():
        rows = _rows_of(result["measurements"], label)
        last = timing_of(rows[-1])
        about = f"it is {last.ratio:.1f} times as fast as exact attention at {rows[-1]['length']} tokens"
        if first is not None:
            where = "at all measured lengths" if first == rows[0]["length"] else f"from {first} tokens on"
            sentences.append(f"{label} pays off {where}: {about}.")
            continue
        where = f" up to {rows[-1]['length']} tokens" if len(rows) > 1 else ""
        low, high = last.range
        sentences.append(
            f"{label} does not pay off{where}: {about} ({low:.2f} to {high:.2f} in the rounds), and less than "
            f"{MIN_SPEED_UP} in any of them is no gain."
        )
    return sentences


def recommend_method(measurements: Sequence[Row]) -> dict[str, str | None]:
    """The method to use at the greatest length at which several were compared, and why.

    Methods that are no gain are not recommended. Of the others it is the fastest that keeps an error of .1, averaged
    over layers and heads, or, of several whose times are not different from that of the fastest, the one with the
    smallest error; if none keeps the error, the one with the smallest; if none is a gain, exact attention.

    Returns:
        "recommended": the label, or None if errors were not measured or there is nothing to compare. "recommendation":
        a sentence, or None.
    """
    rows = [row for row in measurements if row["attention"] != EXACT]
    counts = Counter(row["length"] for row in rows)
    compared = max((length for length, count in counts.items() if count > 1), default=0)
    rows = [row for row in rows if row["length"] == compared]
    if not rows or any(row["error"] is None for row in rows):
        return {"recommended": None, "recommendation": None}
    where = f"Recommended at {compared} tokens: "
    faster = [row for row in rows if timing_of(row).is_gain]
    if not faster:
        why = f"because no method is at least {MIN_SPEED_UP} times as fast in each round."
        return {"recommended": EXACT, "recommendation": f"{where}exact attention ({EXACT}), {why}"}
    good = [row for row in faster if row["error"] <= _MAX_ERROR]
    fastest = max(good, key=lambda row: row["speed_up"], default=None)
    equal = [row for row in good if fastest and timing_of(row).range[1] >= timing_of(fastest).range[0]]
    if not good:
        reason = f"the smallest of the methods that are faster; none of them keeps {_MAX_ERROR}"
    elif len(equal) > 1:
        reason = f"the smallest of those that keep {_MAX_ERROR}, whose times differ too little to tell them apart"
    else:
        reason = f"the fastest with an error of at most {_MAX_ERROR}"
    best = min(equal or faster, key=lambda row: row["error"])
    about = f"{best['speed_up']:.1f} times as fast as exact attention with an error of {best['error']:.3f}"
    if best.get("output_error") is not None:
        about += f" in attention and of {best['output_error']:.3f} in the output"
    return {"recommended": best["attention"], "recommendation": f"{where}{best['attention']}, {about}, {reason}."}
