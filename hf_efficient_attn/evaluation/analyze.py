"""`hf-efficient-attn analyze`: what the attention of each layer and head is like, and what methods lose there.

Measured are the stable rank of the attention matrix (KDEformer, section 3.4), the ratio of the tail of the Gaussian
kernel matrix to its head (assumption A of the sparsity paper, see `analysis`), and for methods and budgets the relative
operator norm of the error. Layers in which even the largest budget leaves more than `max_error` should stay exact.
"""

import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from hf_efficient_attn.conversion import convert
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation import metrics
from hf_efficient_attn.evaluation.benchmark import TEXT_ROWS, own_settings, source_name
from hf_efficient_attn.evaluation.calibration import calibrate, check_batches, largest
from hf_efficient_attn.evaluation.capture import Call, check_methods, forward, look, watching
from hf_efficient_attn.evaluation.data import ModelData, make_room, positions_of
from hf_efficient_attn.evaluation.timing import use_threads
from hf_efficient_attn.integration.layers import Layer, in_order, ranges
from hf_efficient_attn.io.writing import replacing
from hf_efficient_attn.methods import MethodConfig, make_config, method_info

BUDGETS = (64, 128, 256)
_USUAL, _LONGEST = 512, 4096


def analyze(
    model: nn.Module,
    batches: "Iterable[Mapping[str, Any] | Tensor]",
    *,
    methods: "Mapping[str, MethodConfig] | None" = None,
    budgets: Sequence[int] = BUDGETS,
    max_error: float = 0.1,
) -> dict[str, Any]:
    """Stable rank, head-to-tail ratio and errors of every layer and head; which layers should stay exact.

    The rule: by one method, the layers stay exact whose error at the largest budget, a mean over heads and sequences,
    is above `max_error`; recommended is the method that leaves the fewest exact, of equal ones that of the smallest
    error. `calibrate` is stricter, since it promises something of unseen sequences, and finds a budget for each layer.

    Args:
        model, batches: as in `calibrate`. Matrices of tokens by tokens are formed, a head at a time.
        methods: label -> config; None for kdeformer with a window as its near field, longformer and, where nothing is
            causal, nystromformer.
        budgets: columns.
        max_error: 0.1 by default, about which DeiT-tiny at 1,025 tokens loses .05 of its .75 without training.

    Returns:
        a dictionary that JSON can hold: "layers", [{"layer", "name", "stable_rank": [a number a head], "head_to_tail":
        the same or None for attention between two sequences, "errors": {label: {budget: [a number a head]}}}];
        "exact_layers" {label: [layers]}, "recommended" {"attention", "method", "settings", "layers", "exact_layers"} or
        None if all layers should stay exact, "max_error", "budgets", "is_causal", "tokens".

    Raises:
        UnsupportedAttentionError: as `calibrate`, and for sequences of more than 4,096 tokens.
    """
    if isinstance(max_error, bool) or not isinstance(max_error, (int, float)) or not 0 < max_error < math.inf:
        raise UnsupportedAttentionError(f"max_error={max_error!r} must be a number above 0, such as 0.1")
    batches = check_batches(batches)
    shape = look(model, largest(batches))
    if shape.longest > _LONGEST:
        raise UnsupportedAttentionError(
            f"matrices of {shape.longest} x {shape.longest} take too long to decompose: give {_LONGEST} tokens or fewer"
        )
    configs = _default_methods(shape.is_causal) if methods is None else dict(methods)
    if methods is None and shape.is_rectangular:
        configs = {label: config for label, config in configs.items() if method_info(config.method).rectangular}
    check_methods(list(configs.values()), shape.is_causal, shape.is_rectangular)
    budgets = sorted(set(budgets))
    if not configs or not budgets:
        raise UnsupportedAttentionError("give at least one method and one budget")
    sized = {(label, budget): one.with_budget(budget) for label, one in configs.items() for budget in budgets}
    sums: dict[str, dict[Any, Tensor]] = {}
    layers: dict[str, Layer | None] = {}

    def visit(call: Call) -> None:
        layers[call.name] = call.layer
        notes = sums.setdefault(call.name, {})
        for key, config in sized.items():
            _add(notes, key, call.errors(config))
        for row in range(call.query.shape[0]):
            rank, ratio = _matrices(call, row)
            _add(notes, "stable_rank", rank)
            if ratio is not None:
                _add(notes, "head_to_tail", ratio)

    with watching(model, visit):
        for batch in tqdm(batches, desc="analyzing", unit="batch", disable=None, leave=False):
            forward(model, batch)
    means = {name: {key: _mean(total) for key, total in notes.items()} for name, notes in sums.items()}
    found = [
        {
            "layer": layers[name],
            "name": name,
            "stable_rank": notes["stable_rank"],
            "head_to_tail": notes.get("head_to_tail"),
            "errors": {label: {str(budget): notes[label, budget] for budget in budgets} for label in configs},
        }
        for name, notes in means.items()
    ]
    exact = {label: _exact_layers(found, label, str(budgets[-1]), max_error) for label in configs}
    return {
        "layers": found,
        "exact_layers": exact,
        "recommended": _recommend(found, exact, {label: sized[label, budgets[-1]] for label in configs}),
        "max_error": max_error,
        "budgets": budgets,
        "is_causal": shape.is_causal,
        "tokens": shape.longest,
    }


def _default_methods(is_causal: bool) -> dict[str, MethodConfig]:
    if is_causal:
        return {name: make_config(name) for name in ("kdeformer", "longformer")}
    window = {"kdeformer (near_field=window)": make_config("kdeformer", near_field="window")}
    return window | {name: make_config(name) for name in ("longformer", "nystromformer")}


def _add(notes: dict[Any, list[Tensor]], key: Any, values: Tensor) -> None:
    """Add (rows, H) or (H,) to what was found."""
    notes.setdefault(key, []).extend(values.reshape(-1, values.shape[-1]))


def _mean(rows: Sequence[Tensor]) -> list[float]:
    return torch.stack(list(rows)).mean(0).tolist()


def _matrices(call: Call, row: int) -> tuple[Tensor, Tensor | None]:
    """Stable rank and head-to-tail ratio of every head of one sequence, without its padding: float64 (H,) each."""
    query, key = call.query[row : row + 1], call.key[row : row + 1]
    if call.mask is not None:
        there = call.mask[row]
        query = query[:, :, there] if query.shape[2] == key.shape[2] else query
        key = key[:, :, there]
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    ranks, ratios = [], []
    for head in range(query.shape[1]):
        one = query[:, head : head + 1], key[:, head : head + 1]
        weights = metrics.softmax_matrix(*one, is_causal=call.is_causal, scale=call.scale)
        ranks.append(metrics.stable_rank(weights).flatten())
        if query.shape[2] == key.shape[2]:
            ratio = metrics.head_to_tail(*one, scale=call.scale, first=query.shape[2])
            ratios.append(ratio.flatten())
    return torch.cat(ranks).cpu(), torch.cat(ratios).cpu() if ratios else None


def _exact_layers(found: Sequence[Mapping[str, Any]], label: str, budget: str, max_error: float) -> list[Layer]:
    """Numbered layers in some module of which a method's mean over heads is above `max_error`."""
    above = {
        entry["layer"]
        for entry in found
        if entry["layer"] is not None and not _over_heads(entry, label, budget) <= max_error
    }
    return in_order(above)


def _over_heads(entry: Mapping[str, Any], label: str, budget: str) -> float:
    errors = entry["errors"][label][budget]
    return sum(errors) / len(errors)


def _recommend(
    found: Sequence[Mapping[str, Any]], exact: Mapping[str, list[Layer]], configs: Mapping[str, MethodConfig]
) -> dict[str, Any] | None:
    """The method that leaves the fewest layers exact, at the largest budget."""
    every = in_order(entry["layer"] for entry in found if entry["layer"] is not None)

    def rank(label: str) -> tuple[int, float]:
        last = list(found[0]["errors"][label])[-1]
        return len(exact[label]), sum(_over_heads(entry, label, last) for entry in found)

    best = min(configs, key=rank)
    layers = [layer for layer in every if layer not in exact[best]]
    if not layers:
        return None
    settings = configs[best].to_dict()
    method = settings.pop("method")
    return {"attention": best, "method": method, "settings": settings, "layers": layers, "exact_layers": exact[best]}


def analyze_checkpoint(
    source: "str | pathlib.Path",
    data: "str | pathlib.Path",
    *,
    methods: "Mapping[str, MethodConfig] | None" = None,
    budgets: Sequence[int] = BUDGETS,
    length: int | None = None,
    rows: int = TEXT_ROWS,
    max_error: float = 0.1,
    calibrate_to: float | None = None,
    threads: int | None = None,
    allow_pickle: bool = False,
) -> dict[str, Any]:
    """`analyze` of a checkpoint on rows of a text or on pictures.

    Args:
        source: folder or hub id. A converted checkpoint is looked at with exact attention.
        data: a text (.txt, .jsonl, gzipped too), or a folder or zip file of pictures.
        length: tokens of a row; None for 512, or fewer where the model takes fewer; pictures have their usual size.
        rows: sequences that are looked at.
        calibrate_to: `calibrate` with this error on the same rows as well.
        threads, allow_pickle: as in `benchmark_checkpoint`.

    Returns:
        what `analyze` does, with "source", "data" {"name", "rows"}, "notes", "command" (a line of `convert`, or None)
        and "calibrated" (a dictionary for `efficient_attention`, None where it was not asked for).
    """
    from hf_efficient_attn.checkpoint import load_model, open_checkpoint

    for what, value in (("length", length), ("rows", rows)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise UnsupportedAttentionError(f"{what}: {value!r} is not a positive integer")
    checked = open_checkpoint(source, allow_pickle=allow_pickle)
    model = load_model(checked).eval()
    if own_settings(model) is not None:
        convert(model, "sdpa")
    note = None
    if model.main_input_name != "pixel_values":
        length = length or min(_USUAL, positions_of(model) or _USUAL)
        note = make_room(model, length)
    with use_threads(threads):
        found = ModelData(model, checked.folder, pathlib.Path(data), longest=length or 1, rows=rows)
        length = length or found.native_tokens
        batches = [found.inputs(length, row, 1).values for row in range(found.rows)]
        result = analyze(model, batches, methods=methods, budgets=budgets, max_error=max_error)
        calibrated = None
        if calibrate_to is not None:
            choice = None if methods is None else list(methods.values())
            # Budgets that were asked for bound those that are tried; without, `calibrate` has more.
            sizes = None if tuple(budgets) == BUDGETS else budgets
            calibrated = calibrate(model, batches, max_error=calibrate_to, methods=choice, budgets=sizes).to_dict()
    return {
        "source": source_name(source),
        "data": {"name": found.name, "rows": found.rows},
        **result,
        "notes": [] if note is None else [note],
        "command": None if result["recommended"] is None else convert_command(source, result["recommended"]),
        "calibrated": calibrated,
    }


def convert_command(source: Any, recommended: Mapping[str, Any]) -> str:
    """The line of `hf-efficient-attn convert` that does what is recommended."""
    import json
    import shlex

    defaults = make_config(recommended["method"]).to_dict()
    changed = {key: value for key, value in recommended["settings"].items() if value != defaults[key]}
    words = ["hf-efficient-attn", "convert", str(source), "--method", recommended["method"]]
    for key, value in changed.items():
        words += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    if recommended["exact_layers"]:
        words += ["--layers", ranges(recommended["layers"])]
    return shlex.join([*words, "-o", "OUT"])


def draw_maps(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Heat maps, layers x heads: stable rank, head-to-tail ratio, and the error of each method and budget."""
    from matplotlib.figure import Figure

    layers = result["layers"]
    labels, budgets = list(layers[0]["errors"]), [str(budget) for budget in result["budgets"]]
    figure = Figure(figsize=(4 * max(2, len(budgets)), 2.6 * (1 + len(labels))), layout="constrained")
    panels = figure.subplots(1 + len(labels), max(2, len(budgets)), squeeze=False)
    worst = max(
        (max(e["errors"][label][b]) for e in layers for label in labels for b in budgets), default=1.0
    )  # fmt: skip

    def show(axes, rows: Sequence[Sequence[float] | None], title: str, most: float | None = None) -> None:
        widest = max(len(row) for row in rows if row is not None)
        filled = [[math.nan] * widest if row is None else [*row, *[math.nan] * (widest - len(row))] for row in rows]
        image = axes.imshow(filled, aspect="auto", cmap="viridis", vmin=None if most is None else 0.0, vmax=most)
        axes.set_title(title, fontsize="small")
        axes.set(xlabel="head", ylabel="layer")
        names = [entry["name"] if entry["layer"] is None else str(entry["layer"]) for entry in layers]
        axes.set_yticks(range(len(names)), names, fontsize="x-small")
        figure.colorbar(image, ax=axes)

    show(panels[0][0], [entry["stable_rank"] for entry in layers], "stable rank")
    if any(entry["head_to_tail"] is not None for entry in layers):
        show(panels[0][1], [entry["head_to_tail"] for entry in layers], "tail over head")
    else:
        panels[0][1].axis("off")
    for column in range(2, len(panels[0])):
        panels[0][column].axis("off")
    for label, line in zip(labels, panels[1:], strict=True):
        for column, axes in enumerate(line):
            if column >= len(budgets):
                axes.axis("off")
                continue
            rows = [entry["errors"][label][budgets[column]] for entry in layers]
            show(axes, rows, f"error of {label}, {budgets[column]} columns", worst)
    with replacing(path) as draft:
        figure.savefig(draft, dpi=120)
