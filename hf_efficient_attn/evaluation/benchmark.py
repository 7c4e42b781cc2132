"""`hf-efficient-attn benchmark`: what methods gain and cost in a model, on the user's machine and data.

Every method is compared with exact attention in copies of the model that share its weights (`comparison`). Agreement
compares the outputs of the whole model and needs no labels: the cosine of mean-pooled embeddings, the ratio of
perplexities, or the share of inputs for which the same class, or the same token at a masked position, is most likely.
Embeddings of long texts are also compared with what needs no long attention: the mean of the embeddings of pieces.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import pathlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn
from transformers import PreTrainedModel

from hf_efficient_attn.checkpoint import load_model, open_checkpoint
from hf_efficient_attn.conversion.convert import num_positions
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation import capture, comparison, defaults, timing
from hf_efficient_attn.evaluation.comparison import AGREEMENT, LengthComparison, Procedure, chunk_label, make_variants
from hf_efficient_attn.evaluation.data import DOCUMENTATION, Files, ModelData, allow_length, is_encoder_decoder, task_of
from hf_efficient_attn.evaluation.progress import Execution, Step, carry_out, partial_result
from hf_efficient_attn.integration import distance_bias, models, refusals, switching
from hf_efficient_attn.integration.layers import ranges
from hf_efficient_attn.integration.settings import EXACT, EfficientAttentionConfig, as_settings, method_of, settings_of
from hf_efficient_attn.methods import MethodConfig

FORMAT = 1
# Default numbers of texts and of pictures on which agreement is measured.
TEXT_ROWS, IMAGE_ROWS = 4, 32
_SHORTEST, _LONGEST = 512, 16384
# A larger mean error of the layers is recommended only if no method has a smaller one; the default limit of `auto`.
_MAX_ERROR = 0.1
# The limit of time if no lengths are given.
_DEFAULT_MINUTES = 1.0
# About as many keys per query as the methods have at their default budgets.
_METHOD_KEYS = 512


def benchmark_checkpoint(
    source: "str | pathlib.Path",
    methods: "Mapping[str, MethodConfig | EfficientAttentionConfig] | None" = None,
    lengths: Sequence[int] | None = None,
    *,
    data: Files | None = None,
    procedure: Procedure | None = None,
    execution: Execution | None = None,
    allow_pickle: bool = False,
) -> dict[str, Any]:
    """Measure time, memory, errors of layers and agreement of a checkpoint's model with several methods.

    Args:
        source: folder or hub id of a checkpoint; with `allow_pickle`, weights in a .bin file may be read.
        methods: label -> method. None for the method of a converted checkpoint, or else for the default methods.
        lengths: numbers of tokens; pictures are resized to the nearest possible number. None for lengths from 512
            tokens, or the model's maximum if it is smaller, up to four times the maximum, as far as a minute, or the
            time limit of `execution`, allows.
        data: as in `data.ModelData`. No errors are measured on random pixels.
        procedure: how the methods are measured.
        execution: a limit of time, and functions that get each row of "measurements". With a limit, everything is
            first measured once, on one batch. As far as the time allows it is then measured in full, the shortest
            inputs first. What does not even fit once is left out, the longest inputs first.
        allow_pickle: see `source`.

    Returns:
        a dictionary for JSON: "format", "source" (`CheckedSource.title`), "task", "machine", "data", "agreement" (which
        measure), "labels" (of the methods), "chunk" (the tokens of a piece where longer texts are also embedded as the
        mean of their pieces, or None), "notes" (sentences), what `conclude` returns, "complete" (whether
        everything was measured in full), "left_out" (names of the measurements that are missing), "only_first" (names
        of those that were made once only), and "measurements", one for each length and method:

        - "seconds": of a forward pass, median of the rounds.
        - "speed_up", "speed_up_min", "speed_up_max": over exact attention, median and extremes of the rounds.
        - "peak_memory_mib": of a forward pass, without model and inputs.
        - "layer_errors": relative operator norm in each layer, averaged over heads and two inputs; "error" is the mean.
        - "output_error": of the last hidden states (of the logits of some encoder-decoders) against those of exact
          attention, relative, Frobenius norm, mean of two inputs.
        - "agreement": with the outputs of exact attention.
        - "perplexity": of the texts, in a causal language model of the tokens after the first, in a masked one of the
          masked tokens; None for other tasks.
        - "first_token_seconds", "tokens_per_second": of generation at the end of the length, with the cache that the
          model makes itself; None for other tasks than causal language modeling.
        - "is_first": whether it was measured once only, on one batch, without memory and generation.

    Raises:
        UnsupportedAttentionError: before anything is measured, for a source, a method, a length or data that cannot be
            used, for inputs that do not fit in memory, and for a method without causal form if the model is a decoder.
        MemoryError: the memory was not enough.
        Interrupted: the user interrupted the benchmark after some measurements; contains the result so far.
    """
    execution, procedure = execution or Execution(), procedure or Procedure()
    if not lengths and execution.minutes is None:
        execution = dataclasses.replace(execution, minutes=_DEFAULT_MINUTES)
    with timing.memory_errors("give shorter lengths or a smaller batch"):
        checked = open_checkpoint(source, allow_pickle=allow_pickle)
        model = load_model(checked).eval()
        task, name = task_of(model), method_of(model.config)
        own = None if name is None else settings_of(model.config, name)
        is_pair, is_image = is_encoder_decoder(model), capture.takes_pictures(model)
        settings = _settings(methods, own, model)
        native = num_positions(model)  # the model's own number, before its positions are extended
        longest = max(lengths) if lengths else _LONGEST if is_image else min(4 * (native or _SHORTEST), _LONGEST)
        model.to(procedure.device, procedure.dtype)
        if lengths:
            timing.check_memory(model, longest, procedure.batch)
        wanted = max(procedure.rows or (IMAGE_ROWS if is_image else TEXT_ROWS), procedure.batch)
        inputs = ModelData(model, checked.folder, data, longest=longest, rows=wanted, shorter=lengths is None)
        inputs.rows -= inputs.rows % min(inputs.rows, procedure.batch)  # all passes have as many inputs
        chosen = sorted({inputs.tokens_for(length) for length in lengths or _default_lengths(inputs, native)})
        for length in chosen:
            inputs.check_length(length)
        if task == "causal-lm" and procedure.new_tokens >= chosen[0]:
            raise UnsupportedAttentionError(
                f"--new-tokens {procedure.new_tokens} leaves no prompt of {chosen[0]} tokens: give less, or 0 for none"
            )
        notes = [None if is_image else allow_length(model, chosen[-1])]
        if is_pair and own is None:
            notes.append(
                "The methods are in the encoder. The decoder, which gets the beginning of the same text, stays exact."
            )
        chunk = native if task == "embedding" and not is_image and not is_pair else None
        plan = _make_plan(model, inputs, procedure, chosen, list(settings), chunk)
        stages = [step._replace(stage=1) for step in plan]
        if execution.minutes is not None:
            stages = [*_make_plan(model, inputs, procedure.first(), chosen, list(settings), chunk), *stages]
        rows: _Rows = {}
        variants = make_variants(model, settings, own if methods is None else None, max(chosen), chunk)
        facts = {
            "format": FORMAT,
            "source": checked.title,
            "task": task,
            "machine": timing.machine(model),
            "data": {"name": inputs.name, "rows": inputs.rows},
            "agreement": AGREEMENT.get(task, "top1"),
            "labels": list(settings),
            "chunk": chunk,
        }
        result = functools.partial(_result, facts, plan, inputs, notes, rows)
        execution.on_begin(result())
        with (
            partial_result(lambda: result() if rows else None),
            timing.use_device(model.device),
            contextlib.closing(carry_out(stages, execution)) as steps,
        ):
            for step in steps:
                length, label = step.key
                if label == EXACT:
                    how = procedure if step.stage else procedure.first()
                    at_length = LengthComparison(variants, inputs, length, how)
                rows[step.key] = at_length.measure(label)
                execution.on_row(rows[step.key])
    return result()


# The rows of "measurements" by the keys of their steps. A later measurement takes the place of the first one.
_Rows: TypeAlias = dict[tuple[int, str], dict[str, Any]]


def _result(
    facts: Mapping[str, Any], plan: Sequence[Step], data: ModelData, notes: Sequence[str | None], rows: _Rows
) -> dict[str, Any]:
    """The result of `benchmark_checkpoint` with the rows that were measured of a plan so far.

    `facts` are the entries of the result that do not depend on them, and `notes` its first notes.
    """
    left_out = [step.name for step in plan if step.key not in rows]
    only_first = [step.name for step in plan if step.key in rows and rows[step.key]["is_first"]]
    missing = "Not complete." if left_out or only_first else ""
    missing += f" Not measured: {', '.join(left_out)}." if left_out else ""
    missing += f" Measured once only: {', '.join(only_first)}." if only_first else ""
    measured = [*rows.values()]
    return {
        **facts,
        "measurements": measured,
        "complete": not missing,
        "left_out": left_out,
        "only_first": only_first,
        "notes": [note for note in (*notes, *_notes_on(measured, data, facts["chunk"]), missing) if note],
        **conclude(measured, facts["labels"]),
    }


def _default_lengths(data: ModelData, native: int | None) -> list[int]:
    """Lengths that double, up to four times the model's maximum, as far as the text allows."""
    if data.is_image:
        return [factor * data.native_tokens for factor in ((1, 2, 4) if data.resizing is not None else (1,))]
    native = native or _SHORTEST
    shortest = min(native, _SHORTEST)
    lengths = [shortest << power for power in range((4 * native // shortest).bit_length())]
    return [length for length in lengths if length <= data.longest] or [data.longest]


def _make_plan(
    model: PreTrainedModel, data: ModelData, how: Procedure, lengths: list[int], labels: list[str], chunk: int | None
) -> list[Step]:
    """For each length exact attention, then each method, which is timed between two passes of exact attention.

    The key of a step is (length, label). The cost of a pass is the number of multiplications: for each token, one with
    every weight, and two with every hidden dimension of every layer for each key that it attends to.
    """
    per_key = 2 * sum(1 for _ in models.attention_modules(model)) * (getattr(model.config, "hidden_size", None) or 0)
    modules = [module for module in model.modules() if not isinstance(module, nn.Embedding)]
    per_token = sum(x.numel() for module in modules for x in module.parameters(recurse=False))
    batches = math.ceil(data.rows / how.batch) if data.is_real and not how.is_first else 0
    passes, steps = max(how.rounds, batches), []
    for length in lengths:
        exact, method = (length * (per_token + per_key * keys) for keys in (length, min(length, _METHOD_KEYS)))
        # The errors of the layers are measured with exact attention: a pass that computes it twice, and all methods.
        errors = (1 if how.is_first else comparison.ERROR_INPUTS) * (2 * exact + len(labels) * method)
        first = passes * exact + errors * (data.is_real and how.errors)
        costs = {EXACT: first, **dict.fromkeys(labels, passes * method + exact)}
        if chunk is not None and length > chunk:
            costs[chunk_label(chunk)] = passes * length * (per_token + per_key * chunk)
        steps += [Step(f"{label} at {length} tokens", cost, (length, label)) for label, cost in costs.items()]
    return steps


def _notes_on(rows: Sequence[Mapping[str, Any]], data: ModelData, chunk: int | None) -> list[str]:
    """Sentences on the data, and on what is special about the measurements in `rows`."""
    notes = []
    if data.is_image:
        sides = {row["length"]: row["pixels"] for row in rows}
        sizes = ", ".join(f"{side} x {side} pixels for {length} tokens" for length, side in sorted(sides.items()))
        notes.append(f"Pictures are resized: {sizes}. The model was trained with {data.native} x {data.native} pixels.")
    if data.name == DOCUMENTATION:
        notes.append("No data are given: the texts are Python's own documentation (pydoc_data.topics).")
    if not data.is_real:
        notes.append("The data are generated: random pixels. Time and memory are measured, but no errors.")
    same: dict[str, list[str]] = {}  # method -> lengths at which it has computed exact attention
    for row in rows:
        if row["attention"] != EXACT and row["output_error"] == 0:
            same.setdefault(row["attention"], []).append(str(row["length"]))
    if same:
        where = "; ".join(f"{label} at {', '.join(lengths)} tokens" for label, lengths in same.items())
        notes.append(f"Exact attention was computed by {where}, which a method does within its budget or its bound.")
    if any(timing_of(row).unsteady for row in rows):
        notes.append(timing.UNSTEADY)
    if chunk is not None and any(row["attention"] == chunk_label(chunk) for row in rows):
        notes.append(
            f"{chunk_label(chunk)}: exact attention within pieces as long as the model's positions, and the mean of "
            "their embeddings. If the task can be split like this, split it: a search finds more so, and long "
            "attention is not needed. Its cosine says that the embedding is another one, not that it is worse."
        )
    return notes


def timing_of(row: Mapping[str, Any]) -> timing.Timing:
    """The times of a row of "measurements"."""
    return timing.Timing(*(row[key] for key in ("seconds", "speed_up", "speed_up_min", "speed_up_max")))


def conclude(measurements: Sequence[Mapping[str, Any]], labels: Sequence[str]) -> dict[str, Any]:
    """Conclude from rows of "measurements" which of the methods with these labels pay off.

    "pays_from" has label -> the smallest length from which on the method is a gain (`Timing.is_gain`), or None, and
    "summary" sentences that say so. "recommended" is the label of the method to use at the greatest length at which
    several were compared, "sdpa", or None if errors were not measured or there is nothing to compare; "recommendation"
    a sentence that says why, or None. Of the methods that are a gain it is the fastest that keeps an error of .1,
    averaged over layers and heads, or else the one with the smallest error.
    """
    pays_from: dict[str, int | None] = {}
    rows_of = {label: [row for row in measurements if row["attention"] == label] for label in labels}
    longest = max((row["length"] for row in measurements), default=0)
    sentences = []
    for label, rows in rows_of.items():
        if not rows:
            continue
        rows.sort(key=lambda row: row["length"])
        gains = [*itertools.takewhile(lambda row: timing_of(row).is_gain, reversed(rows))]
        pays_from[label] = gains[-1]["length"] if gains else None
        last = timing_of(rows[-1])
        about = f"it is {last.ratio:.1f} times as fast as exact attention at {rows[-1]['length']} tokens"
        if gains:
            where = "at all measured lengths" if gains[-1] is rows[0] else f"from {gains[-1]['length']} tokens on"
            sentences.append(f"{label} pays off {where}: {about}.")
        elif rows[-1]["length"] < longest:
            sentences.append(
                f"{label} is not decided: {about}, and it was not measured at {longest}. Give more --minutes."
            )
        else:
            low, high = last.range
            sentences.append(
                f"{label} does not pay off: {about} ({low:.2f} to {high:.2f} in the rounds), and less than "
                f"{timing.MIN_SPEED_UP} in any of them is no gain."
            )
    return {"pays_from": pays_from, "summary": sentences, **_recommend([*itertools.chain(*rows_of.values())])}


def _recommend(rows: Sequence[Mapping[str, Any]]) -> dict[str, str | None]:
    """The method to use at the greatest length at which several were compared, and why, as in `conclude`."""
    counts = Counter(row["length"] for row in rows)
    compared = max((length for length, count in counts.items() if count > 1), default=None)
    rows = [row for row in rows if row["length"] == compared]
    if not rows or any(row["error"] is None for row in rows):
        return {"recommended": None, "recommendation": None}
    where = f"Recommended at {compared} tokens: "
    faster = [row for row in rows if timing_of(row).is_gain]
    if not faster:
        why = f"because no method is at least {timing.MIN_SPEED_UP} times as fast in each round."
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


def _settings(
    methods: "Mapping[str, MethodConfig | EfficientAttentionConfig] | None",
    own: EfficientAttentionConfig | None,
    model: PreTrainedModel,
) -> dict[str, EfficientAttentionConfig]:
    """Label -> settings of the methods to compare; in an encoder-decoder, methods without layers are in the encoder."""
    if methods is None and own is not None:
        names, layers = dict.fromkeys(entry.config.method for entry in own.entries), own.named_layers()
        return {" and ".join(names) + (f", layers {ranges(layers)}" if layers else ""): own}
    switching.adopt(model)
    found, is_pair = list(models.attention_modules(model)), is_encoder_decoder(model)
    # In an encoder-decoder the conversion checks each layer.
    modules, is_causal = [one.module for one in found], not is_pair and any(one.is_causal for one in found)
    if methods is None:
        summary = capture.AttentionSummary(
            is_causal=is_causal,
            takes_pictures=capture.takes_pictures(model),
            has_distance_bias=any(distance_bias.has_distance_bias(type(module)) for module in modules),
            has_sinks=any(map(models.has_sinks, modules)),
        )
        configs = defaults.default_configs("compare", summary)
        methods = {defaults.method_label(config): config for config in configs}
    settings = {label: as_settings(config) for label, config in methods.items()}
    entries = [entry.config for one in settings.values() for entry in one.entries]
    refusals.check_methods(entries, is_causal, model=f"the {type(model).__name__}")
    for label, one in settings.items():
        if is_pair and len(one.entries) == 1 and one.layers is None:
            settings[label] = EfficientAttentionConfig(one.entries[0].config, None, ["encoder"])
    return settings
