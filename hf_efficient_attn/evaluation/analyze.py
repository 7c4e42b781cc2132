"""`hf-efficient-attn analyze`: properties of the attention in each layer and head, and the errors of methods there.

Measured are the stable rank of the attention matrix (KDEformer, section 3.4), the ratio of the tail of the Gaussian
kernel matrix to its head (assumption A of the sparsity paper, see `metrics`), and the relative operator norm of the
error for methods and budgets. Layers in which the error exceeds `max_error` at the largest budget should stay exact.
"""

import json
import math
import pathlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from hf_efficient_attn.checkpoint import load_model, open_checkpoint
from hf_efficient_attn.conversion import convert
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation import metrics
from hf_efficient_attn.evaluation.benchmark import TEXT_ROWS, own_settings
from hf_efficient_attn.evaluation.calibration import calibrate, check_batches, check_max_error, largest
from hf_efficient_attn.evaluation.capture import (
    Batch,
    Call,
    capture_attention,
    forward,
    summarize_attention,
)
from hf_efficient_attn.evaluation.data import ModelData, allow_length, max_positions
from hf_efficient_attn.evaluation.defaults import default_variants, method_label
from hf_efficient_attn.integration.layers import Layer, in_order, ranges
from hf_efficient_attn.integration.refusals import check_methods
from hf_efficient_attn.integration.settings import EXACT
from hf_efficient_attn.io.writing import replacing
from hf_efficient_attn.methods import MethodConfig, make_config

BUDGETS = (64, 128, 256)
_DEFAULT_LENGTH, _MAX_LENGTH = 512, 4096


def analyze(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    methods: "Mapping[str, MethodConfig] | None" = None,
    budgets: Sequence[int] = BUDGETS,
    max_error: float = 0.1,
) -> dict[str, Any]:
    """Measure stable rank, tail-to-head ratio and errors in every layer and head, and recommend layers to convert.

    With one method, a layer should stay exact if the error at the largest budget, averaged over heads and sequences,
    exceeds `max_error`. The recommended method is the one with the fewest exact layers; of several, the one with the
    smallest error. `hea.calibrate` is stricter, since its result is meant for unseen sequences, and it chooses a budget
    for each layer.

    Args:
        model: as in `hea.calibrate`.
        batches: as in `hea.calibrate`. Dense matrices of tokens by tokens are formed for one head at a time.
        methods: label -> config; None for the default methods that support the model.
        budgets: costs per query in columns.
        max_error: the limit. At the default of 0.1, DeiT-tiny at 1,025 tokens loses about .05 of its accuracy of .75
            without training.

    Returns:
        a dictionary for JSON:

        - "layers": [{"layer", "name", "stable_rank": [one number per head], "head_to_tail": the same, or None for
          attention between two sequences, "errors": {label: {budget: [one number per head]}}}].
        - "exact_layers": {label: [layers]}.
        - "recommended": {"attention", "method", "settings", "layers", "exact_layers"}, or None if all layers should
          stay exact.
        - "max_error", "budgets", "is_causal", "tokens".

    Raises:
        UnsupportedAttentionError: as `hea.calibrate`, and for sequences of more than 4,096 tokens.
    """
    check_max_error(max_error)
    batches = check_batches(batches)
    summary = summarize_attention(model, largest(batches))
    if summary.max_kv_len > _MAX_LENGTH:
        raise UnsupportedAttentionError(
            f"matrices of {summary.max_kv_len} x {summary.max_kv_len} take too long to decompose: give {_MAX_LENGTH} "
            "tokens or fewer"
        )
    if methods is None:
        variants = default_variants(is_causal=summary.is_causal, is_rectangular=summary.is_rectangular)
        methods = {method_label(config): config for config in variants}
    check_methods(list(methods.values()), summary.is_causal, summary.is_rectangular)
    budgets = sorted(set(budgets))
    if not methods or not budgets:
        raise UnsupportedAttentionError("give at least one method and one budget")
    sized = {(name, budget): one.with_budget(budget) for name, one in methods.items() for budget in budgets}
    layers: dict[str, _Measurements] = {}

    def visit(call: Call) -> None:
        found = layers.setdefault(call.name, _Measurements(call.layer))
        for key, config in sized.items():
            found.add(key, call.errors(config))
        for index in range(call.query.shape[0]):
            for name, values in _matrix_properties(call, index).items():
                found.add(name, values)

    with capture_attention(model, visit):
        for batch in tqdm(batches, desc="analyzing", unit="batch", disable=None, leave=False):
            forward(model, batch)
    entries: list[dict[str, Any]] = [
        {
            "layer": found.layer,
            "name": name,
            "stable_rank": found.mean("stable_rank"),
            "head_to_tail": found.mean("head_to_tail"),
            "errors": {one: {str(budget): found.mean((one, budget)) for budget in budgets} for one in methods},
        }
        for name, found in layers.items()
    ]
    errors = {
        one: [(entry["layer"], _head_mean(entry["errors"][one][str(budgets[-1])])) for entry in entries]
        for one in methods
    }
    exact = {one: _exact_layers(pairs, max_error) for one, pairs in errors.items()}
    best = min(methods, key=lambda one: (len(exact[one]), sum(error for _, error in errors[one])))
    return {
        "layers": entries,
        "exact_layers": exact,
        "recommended": _recommendation(best, sized[best, budgets[-1]], [layer for layer, _ in errors[best]], exact),
        "max_error": max_error,
        "budgets": budgets,
        "is_causal": summary.is_causal,
        "tokens": summary.max_kv_len,
    }


class _Measurements:
    """Measurements of one attention module, which are averaged over sequences."""

    def __init__(self, layer: Layer | None) -> None:
        self.layer = layer
        self._values: dict[Any, list[Tensor]] = {}

    def add(self, key: Any, values: Tensor) -> None:
        """Add the values of some sequences (B, H), or of one sequence (H,)."""
        self._values.setdefault(key, []).extend(values.reshape(-1, values.shape[-1]))

    def mean(self, key: Any) -> list[float] | None:
        """The mean over sequences for every head; None if nothing was added."""
        values = self._values.get(key)
        if values is None:
            return None
        means: list[float] = torch.stack(values).mean(0).tolist()
        return means


def _matrix_properties(call: Call, index: int) -> dict[str, Tensor]:
    """Stable rank and tail-to-head ratio of one sequence without its padding: float64 (H,) each."""
    query, key = call.query[index : index + 1], call.key[index : index + 1]
    is_square = query.shape[2] == key.shape[2]
    if call.key_mask is not None:
        valid = call.key_mask[index]
        query = query[:, :, valid] if is_square else query
        key = key[:, :, valid]
        is_square = query.shape[2] == key.shape[2]
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    properties: dict[str, list[Tensor]] = {"stable_rank": [], "head_to_tail": []}
    for head in range(query.shape[1]):
        q, k = query[:, head : head + 1], key[:, head : head + 1]
        weights = metrics.softmax_matrix(q, k, is_causal=call.is_causal, scale=call.scale)
        properties["stable_rank"].append(metrics.stable_rank(weights).flatten())
        if is_square:
            ratio = metrics.head_to_tail(q, k, scale=call.scale, first=q.shape[2])
            properties["head_to_tail"].append(ratio.flatten())
    return {name: torch.cat(values).cpu() for name, values in properties.items() if values}


def _head_mean(errors: Sequence[float]) -> float:
    return sum(errors) / len(errors)


def _exact_layers(errors: Iterable[tuple[Layer | None, float]], max_error: float) -> list[Layer | None]:
    """The numbered layers in which the error of some module exceeds `max_error`."""
    return in_order(layer for layer, error in errors if layer is not None and not error <= max_error)


def _recommendation(
    best: str, config: MethodConfig, layers: Iterable[Layer | None], exact: Mapping[str, list[Layer | None]]
) -> dict[str, Any] | None:
    converted = [layer for layer in in_order(layers) if layer is not None and layer not in exact[best]]
    if not converted:
        return None
    settings = config.to_dict()
    method = settings.pop("method")
    return {"attention": best, "method": method, "settings": settings, "layers": converted, "exact_layers": exact[best]}


def analyze_checkpoint(
    source: "str | pathlib.Path",
    data: "str | pathlib.Path",
    *,
    length: int | None = None,
    rows: int = TEXT_ROWS,
    methods: "Mapping[str, MethodConfig] | None" = None,
    budgets: Sequence[int] | None = None,
    max_error: float = 0.1,
    calibrate_to: float | None = None,
    allow_pickle: bool = False,
) -> dict[str, Any]:
    """`analyze` the model of a checkpoint on a text or on pictures.

    Args:
        source: folder or hub id. A converted checkpoint is analyzed with exact attention.
        data: a text (.txt, .jsonl, or gzipped), or a folder or zip file of pictures.
        length: number of tokens of a text; None for 512, or the model's maximum if it is smaller. Pictures have the
            size that the model was trained with.
        rows: number of texts or pictures.
        methods: as in `analyze`.
        budgets: as in `analyze`; None for its default, and for all budgets of `hea.calibrate`.
        max_error: as in `analyze`.
        calibrate_to: if given, `hea.calibrate` is run with this error on the same inputs.
        allow_pickle: whether weights in a .bin file may be read.

    Returns:
        the result of `analyze`, with "source", "data" {"name", "rows"}, "notes", "command" (a `convert` command for the
        recommendation, or None) and "calibrated" (a dictionary for `efficient_attention`, or None).
    """
    checked = open_checkpoint(source, allow_pickle=allow_pickle)
    model = load_model(checked).eval()
    if own_settings(model) is not None:
        convert(model, EXACT)
    note = None
    if model.main_input_name != "pixel_values":
        length = length or min(_DEFAULT_LENGTH, max_positions(model) or _DEFAULT_LENGTH)
        note = allow_length(model, length)
    inputs = ModelData(model, checked.folder, pathlib.Path(data), longest=length or 1, rows=rows)
    length = length or inputs.native_tokens
    batches = [inputs.inputs(length, index, 1).values for index in range(inputs.rows)]
    result = analyze(model, batches, methods=methods, budgets=budgets or BUDGETS, max_error=max_error)
    calibrated = None
    if calibrate_to is not None:
        candidates = None if methods is None else list(methods.values())
        config = calibrate(model, batches, max_error=calibrate_to, methods=candidates, budgets=budgets)
        calibrated = config.to_dict()
    return {
        "source": checked.name,
        "data": {"name": inputs.name, "rows": inputs.rows},
        **result,
        "notes": [] if note is None else [note],
        "command": None if result["recommended"] is None else convert_command(source, result["recommended"]),
        "calibrated": calibrated,
    }


def convert_command(source: "str | pathlib.Path", recommended: Mapping[str, Any]) -> str:
    """The `hf-efficient-attn convert` command that applies a recommendation."""
    defaults = make_config(recommended["method"]).to_dict()
    changed = {key: value for key, value in recommended["settings"].items() if value != defaults[key]}
    words = ["hf-efficient-attn", "convert", str(source), "--method", recommended["method"]]
    for key, value in changed.items():
        words += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    if recommended["exact_layers"]:
        words += ["--layers", ranges(recommended["layers"])]
    return shlex.join([*words, "-o", "OUT"])


def draw_maps(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw heat maps of layers x heads: stable rank, tail-to-head ratio, and the errors of each method and budget."""
    from matplotlib.figure import Figure  # an optional dependency

    layers, budgets = result["layers"], [str(budget) for budget in result["budgets"]]
    methods = list(layers[0]["errors"])
    figure = Figure(figsize=(4 * max(2, len(budgets)), 2.6 * (1 + len(methods))), layout="constrained")
    panels = figure.subplots(1 + len(methods), max(2, len(budgets)), squeeze=False)
    names = [entry["name"] if entry["layer"] is None else str(entry["layer"]) for entry in layers]
    # (panel, title, a list of numbers per head for each layer, largest value of the colours)
    maps: list[tuple[Any, str, list[list[float] | None], float | None]] = [
        (panels[0][0], "stable rank", [entry["stable_rank"] for entry in layers], None)
    ]
    if any(entry["head_to_tail"] is not None for entry in layers):
        maps.append((panels[0][1], "tail over head", [entry["head_to_tail"] for entry in layers], None))
    errors = {(one, b): [entry["errors"][one][b] for entry in layers] for one in methods for b in budgets}
    worst = max((max(heads) for values in errors.values() for heads in values), default=1.0)
    for (one, budget), values in errors.items():
        panel = panels[1 + methods.index(one)][budgets.index(budget)]
        maps.append((panel, f"error of {one}, {budget} columns", values, worst))
    for axes in panels.flat:
        axes.axis("off")
    for axes, title, values, most in maps:
        num_heads = max(len(heads) for heads in values if heads is not None)
        padded = [[*(heads or ()), *[math.nan] * (num_heads - len(heads or ()))] for heads in values]
        axes.axis("on")
        image = axes.imshow(padded, aspect="auto", cmap="viridis", vmin=None if most is None else 0.0, vmax=most)
        axes.set_title(title, fontsize="small")
        axes.set(xlabel="head", ylabel="layer")
        axes.set_yticks(range(len(names)), names, fontsize="x-small")
        figure.colorbar(image, ax=axes)
    with replacing(path) as draft:
        figure.savefig(draft, dpi=120)
