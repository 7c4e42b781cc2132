"""What follows from measured errors: one recommendation, with its expected error and saving and the command for it."""

import json
import pathlib
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from hf_efficient_attn.evaluation.calibration import (
    Choice,
    ErrorTable,
    bound,
    choose_each,
    choose_one,
    make_settings,
    measure_output_error,
    measure_speed,
    spread,
)
from hf_efficient_attn.evaluation.candidates import Candidate
from hf_efficient_attn.evaluation.capture import AttentionSummary, Batch
from hf_efficient_attn.integration.layers import Layer, ranges
from hf_efficient_attn.integration.settings import changed_hyperparameters
from hf_efficient_attn.methods import MethodConfig

# A larger budget should reduce the error of a method at least by this factor.
_FALLS = 0.9


class Measured(NamedTuple):
    """What a recommendation is made from.

    Attributes:
        methods: label -> config without a budget.
        candidates: the methods at their budgets, the cheapest first.
        table: the errors of every candidate in every layer.
        tokens: layer -> number of tokens of the longest sequence.
        summary: of the model.
    """

    methods: Mapping[str, MethodConfig]
    candidates: Sequence[Candidate]
    table: ErrorTable
    tokens: Mapping[Layer, int]
    summary: AttentionSummary


def recommend(
    measured: Measured, max_error: float, *, per_layer: bool, run: tuple[nn.Module, Batch] | None
) -> dict[str, Any]:
    """Choose the methods of the layers by the criterion of `hea.calibrate`.

    Args:
        measured: the errors.
        max_error: the limit for the error of a layer on an unseen sequence.
        per_layer: whether each layer gets the cheapest method and budget that keeps the limit. Otherwise, all layers
            that keep it get the same: the method and budget with which they save the most in total.
        run: model and batch with which to measure the speed; None to leave that out.

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
    summary = measured.summary
    # In causal attention a query has half of the keys on average.
    num_keys = (summary.max_kv_len + 1) / 2 if summary.is_causal else float(summary.max_kv_len)
    candidates = [one for one in measured.candidates if one.columns < num_keys]
    if per_layer:
        chosen = choose_each(measured.table, candidates, max_error)
    else:
        chosen = choose_one(measured.table, candidates, max_error, num_keys)
    if not chosen:
        return {"recommended": None, "calibrated": None, "nearest": _nearest(measured, max_error)}
    settings = make_settings(chosen, max(measured.tokens[layer] for layer in chosen))
    exact = [layer for layer in summary.layers if layer not in chosen]
    costs = [choice.candidate.columns for choice in chosen.values()] + [num_keys] * len(exact)
    one = None if run is None else (run[0], _first_sequence(run[1]), settings)
    speed = None if one is None else measure_speed(*one)
    recommended = {
        "layers": [_entry(measured, layer, choice) for layer, choice in chosen.items()],
        "exact_layers": exact,
        "error": statistics.fmean(choice.error for choice in chosen.values()),
        "columns": statistics.fmean(costs),
        "keys": num_keys,
        "speed_up": None if speed is None else speed.ratio,
        "saves": None if speed is None else speed.is_gain,
        "output_error": None if one is None else measure_output_error(*one),
        "tokens": settings.calibrated_length,
    }
    return {"recommended": recommended, "calibrated": settings.to_dict(defaults=False), "nearest": None}


def _entry(measured: Measured, layer: Layer, choice: Choice) -> dict[str, Any]:
    config = choice.candidate.config
    return {
        "layer": layer,
        "attention": _label(measured, choice.candidate),
        "method": config.method,
        "columns": choice.candidate.columns,
        "settings": changed_hyperparameters(config),
        "error": choice.error,
        "bound": choice.bound,
    }


def _label(measured: Measured, candidate: Candidate) -> str:
    """The label of the method that a candidate is a budget of."""
    return next(
        label for label, one in measured.methods.items() if one.with_budget(candidate.columns) == candidate.config
    )


def _nearest(measured: Measured, max_error: float) -> dict[str, Any] | None:
    """The layer and candidate with the smallest bound."""
    pooled = {one: spread(measured.table, one, max_error) for one in measured.candidates}
    bounds = {key: bound(errors, pooled[key[1]], max_error) for key, errors in measured.table.items() if errors}
    if not bounds:
        return None
    layer, candidate = min(bounds, key=lambda key: bounds[key])
    label = _label(measured, candidate)
    return {
        "layer": layer,
        "attention": label,
        "columns": candidate.columns,
        "bound": bounds[layer, candidate],
    }


def _first_sequence(batch: Batch) -> Batch:
    """The first sequence of a batch, or the whole batch if its tensors have different first dimensions."""
    if isinstance(batch, Tensor):
        return batch[:1]
    sizes = {len(value) for value in batch.values() if isinstance(value, Tensor) and value.ndim}
    if len(sizes) != 1:
        return batch
    return {name: x[:1] if isinstance(x, Tensor) and x.ndim else x for name, x in batch.items()}


def budget_warnings(entries: Sequence[Mapping[str, Any]], budgets: Sequence[int]) -> list[str]:
    """Sentences about methods whose error hardly falls from the smallest to the largest budget."""
    if len(budgets) < 2:
        return []
    small, large = str(budgets[0]), str(budgets[-1])
    sentences = []
    for label in entries[0]["errors"]:
        firsts, lasts, names = [], [], []
        for entry in entries:
            first, last = (statistics.fmean(entry["errors"][label][size]) for size in (small, large))
            # An error that is small anyway, such as that of uniform attention, needs no warning.
            if not last <= max(_FALLS * first, 1e-3):
                firsts.append(first)
                lasts.append(last)
                names.append(entry["name"] if entry["layer"] is None else entry["layer"])
        if not names:
            continue
        first, last = statistics.fmean(firsts), statistics.fmean(lasts)
        distinct = list(dict.fromkeys(names))
        where = f" in layer{'s' * (len(distinct) > 1)} {ranges(distinct)}" if len(names) < len(entries) else ""
        sentences.append(
            f"{label}: the error hardly falls with the budget{where}: {first:.2f} at {small} columns, {last:.2f} at "
            f"{large}. A larger budget does not help there."
        )
    return sentences


def apply_command(
    source: "str | pathlib.Path", result: Mapping[str, Any], config: "pathlib.Path | None" = None
) -> str | None:
    """The command line that applies a recommendation, quoted for a shell; None if nothing is recommended.

    Args:
        source: the checkpoint.
        result: of `analyze_checkpoint`, whose "source" gives the new checkpoint its name.
        config: the analysis.json that the result is written to. None: the command contains the recommendation.
    """
    settings = result["calibrated"]
    if settings is None:
        return None
    convert = ["hf-efficient-attn", "convert", str(source)]
    name = str(result["source"]).rpartition("/")[2].lstrip("-") + "-efficient"
    rest = [] if result["max_length"] is None else ["--max-length", str(result["max_length"])]
    rest += ["-o", name]
    if config is not None:
        return shlex.join([*convert, "--config", str(config), *rest])
    entries = result["recommended"]["layers"]
    if _is_mix(entries):
        written = shlex.join(["printf", "%s", json.dumps(settings)])
        return f"{written} > calibrated.json && " + shlex.join([*convert, "--config", "calibrated.json", *rest])
    words = ["--method", entries[0]["method"]]
    for key, value in entries[0]["settings"].items():
        words += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    if result["recommended"]["exact_layers"]:
        words += ["--layers", ranges(one["layer"] for one in entries)]
    return shlex.join([*convert, *words, *rest])


def note_on_command(result: Mapping[str, Any], config: "pathlib.Path | None" = None) -> str | None:
    """A sentence about what the command of `apply_command` does not store; None if it stores everything."""
    found = result["recommended"]
    if config is not None or found is None or _is_mix(found["layers"]):
        return None
    return (
        f"This command does not store the length of {found['tokens']:,} tokens up to which this holds. With --output "
        "FOLDER, analyze prints one that does, and the converted model warns of longer inputs."
    )


def _is_mix(entries: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the layers of a recommendation have different methods or hyperparameters."""
    return any((one["method"], one["settings"]) != (entries[0]["method"], entries[0]["settings"]) for one in entries)
