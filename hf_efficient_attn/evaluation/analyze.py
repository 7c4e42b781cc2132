"""`hf-efficient-attn analyze`: properties of the attention in each layer and head, and the errors of methods there.

Measured are the stable rank of the attention matrix (KDEformer, section 3.4), the ratio of the tail of the Gaussian
kernel matrix to its head (assumption A of the sparsity paper, see `sparsity`), and the relative operator norm of the
error for methods and budgets. From the errors follows one recommendation: which layers can use which method.
"""

import contextlib
import functools
import itertools
import math
import pathlib
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_efficient_attn.analysis import head_to_tail, softmax_matrix, stable_rank
from hf_efficient_attn.checkpoint import load_model, open_checkpoint
from hf_efficient_attn.conversion import convert
from hf_efficient_attn.conversion.convert import num_positions
from hf_efficient_attn.errors import check_positive
from hf_efficient_attn.evaluation import calibration
from hf_efficient_attn.evaluation.benchmark import TEXT_ROWS, own_settings
from hf_efficient_attn.evaluation.capture import Batch, Call, capture_attention, forward, summarize_attention
from hf_efficient_attn.evaluation.choices import Choice, accept, choose_each, choose_one, measure_seconds
from hf_efficient_attn.evaluation.data import Files, ModelData, allow_length
from hf_efficient_attn.evaluation.defaults import make_candidates
from hf_efficient_attn.evaluation.progress import Execution, Step, carry_out, partial_result
from hf_efficient_attn.evaluation.timing import check_memory, machine, memory_errors, use_device
from hf_efficient_attn.integration.layers import Layer
from hf_efficient_attn.integration.settings import EXACT, EfficientAttentionConfig, changed_hyperparameters
from hf_efficient_attn.methods import MethodConfig

BUDGETS = (64, 128, 256, 512)
# The first length in common use at which methods are faster than exact attention on a CPU.
DEFAULT_LENGTH = 2048
DEFAULT_MAX_ERROR = 0.2
# Properties need dense matrices. They are measured up to this length, on the first input.
_MAX_LENGTH = 4096


def analyze(
    model: nn.Module,
    batch: Batch,
    *,
    methods: "Sequence[MethodConfig] | None" = None,
    budgets: Sequence[int] | None = None,
    max_error: float = DEFAULT_MAX_ERROR,
    per_layer: bool = False,
    execution: Execution | None = None,
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure stable rank, tail-to-head ratio and errors in every layer and head, and recommend layers to convert.

    A layer can be converted if its error stays below `max_error` on unseen sequences too, by the criterion of
    `hea.calibrate`. With `per_layer`, each layer gets the fastest method and budget that keeps the limit. Otherwise,
    all layers that keep it get the same: the method and budget with which the model is fastest. The default budgets are
    64, 128, 256 and 512 columns, and each method as it is given, whose errors are not in "layers". The functions of
    `execution` get `about` and "tokens" of the result, and each complete entry of "layers". `about` is what is known of
    the model and the data, for the result.

    Returns:
        a dictionary for JSON:

        - "layers": [{"layer", "name", "stable_rank": [one number per head], "head_to_tail": the same, "errors": {label:
          {budget: [one number per head]}}}]. Both properties are those of the first sequence, and None for more than
          4,096 tokens; "head_to_tail" also for attention between two sequences.
        - "recommended": None if no method keeps the limit. Otherwise a dictionary of "layers" [{"layer", "attention" (a
          label), "method", "columns" (None for a method as it is given), "settings" (without defaults), "error" (mean
          over sequences and heads), "bound" (of the error on an unseen sequence)}], "exact_layers", "error" (mean of
          "layers"), "tokens" (the length up to which this was measured), "speed_up" (of the attention of all layers),
          "saves" (whether that is a gain, `Timing.is_gain`) and "output_error" (of the last hidden states or the
          logits). The last three need a run of the model, and are None after Ctrl-C.
        - "calibrated": the choice as `convert --config` and `hea.convert` take it, without default hyperparameters.
        - "max_error", "per_layer", "budgets" (those below the number of tokens), "is_causal", "tokens".
        - "complete": whether all was measured; "left_out": the layers that were not. They stay exact.

    Raises:
        UnsupportedAttentionError: as `hea.calibrate`; but if no method keeps the limit, "recommended" is None.
        Interrupted: the user interrupted the measurement; contains the result for the layers that were complete.
    """
    check_positive("max_error", max_error, is_count=False)
    execution = execution or Execution()
    summary = summarize_attention(model, batch)
    candidates = make_candidates(methods, budgets, summary, standard=BUDGETS)
    study = calibration.Study(candidates, summary)
    used = sorted({one.columns for one in candidates if one.columns is not None})
    about = {**(about or {}), "tokens": summary.max_kv_len}
    execution.on_begin(about)
    waiting = Counter(call.name for call in summary.calls)  # the calls of each module that are still to be measured
    num_keys, entries = summary.max_kv_len, list[dict[str, Any]]()
    # Module -> candidate, or name of a property -> the numbers of its heads (H,) for each sequence.
    values: dict[str, dict[Any, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
    plan = [Step(call.name, math.prod(call.query.shape[1:3]) * call.key.shape[2], call.layer) for call in summary.calls]

    def entry(call: Call) -> dict[str, Any]:
        """The means of the numbers of a module over sequences."""
        means: dict[Any, Any] = {key: torch.stack(x).mean(0).tolist() for key, x in values[call.name].items()}
        errors: dict[str, dict[str, Any]] = {}
        for columns, candidate in itertools.product(used, candidates):
            # A method without a budget has one candidate, the smallest.
            if candidate.columns is not None and candidate.columns <= columns:
                errors.setdefault(candidate.label, {})[str(columns)] = means.get(candidate)
        properties = {key: means.get(key) for key in ("stable_rank", "head_to_tail")}
        return {"layer": call.layer, "name": call.name, **properties, "errors": errors}

    def recommended(
        chosen: Mapping[Layer, Choice], settings: EfficientAttentionConfig, is_over: bool
    ) -> dict[str, Any]:
        exact = [layer for layer in summary.layers if layer not in chosen]
        speed = None if is_over else calibration.measure_speed(model, batch, settings)
        return {
            "layers": [
                {
                    "layer": layer,
                    "attention": choice.candidate.label,
                    "columns": choice.candidate.columns,
                    "method": choice.config.method,
                    "settings": changed_hyperparameters(choice.config),
                    "error": choice.error,
                    "bound": choice.bound,
                }
                for layer, choice in chosen.items()
            ],
            "exact_layers": exact,
            "error": statistics.fmean(choice.error for choice in chosen.values()),
            "speed_up": speed and speed.ratio,
            "saves": speed and speed.is_gain,
            "output_error": None if is_over else calibration.measure_output_error(model, batch, settings),
            "tokens": settings.calibrated_length,
        }

    def result(*, is_over: bool = False) -> dict[str, Any] | None:
        if not entries:
            return None
        missing = [call.name if call.layer is None else call.layer for call in summary.calls if waiting[call.name]]
        table = {key: errors for key, errors in study.table.items() if key[0] not in missing}
        # After Ctrl-C the user does not want to wait for more measurements.
        measure = None if is_over else functools.partial(measure_seconds, model, batch)
        choose = choose_each if per_layer else choose_one
        chosen = choose(accept(table, candidates, max_error), study.seconds, measure)
        settings = calibration.make_settings(chosen, max(study.tokens[layer] for layer in chosen)) if chosen else None
        return {
            **about,
            "layers": entries,
            "recommended": settings and recommended(chosen, settings, is_over),
            "calibrated": settings and settings.to_dict(defaults=False),
            "max_error": max_error,
            "per_layer": per_layer,
            "budgets": used,
            "is_causal": summary.is_causal,
            "complete": not missing,
            "left_out": list(dict.fromkeys(missing)),
        }

    with partial_result(lambda: result(is_over=True)):
        with contextlib.closing(carry_out(plan, execution)) as steps:

            def visit(call: Call) -> None:
                if next(steps, None) is None and entries:
                    raise TimeoutError  # the rest of the forward pass does not fit into the time
                for candidate, errors in study.add(call).items():
                    values[call.name][candidate] += [errors[b] for b in call.sequences]
                if num_keys <= _MAX_LENGTH:
                    for name, heads in _matrix_properties(call.row(0)).items():
                        values[call.name][name].append(heads)
                waiting[call.name] -= 1
                if not waiting[call.name]:
                    entries.append(entry(call))
                    execution.on_row(entries[-1])

            with contextlib.suppress(TimeoutError), capture_attention(model, visit):
                forward(model, batch)
        found = result()
    assert found is not None  # the first step is always carried out
    return found


def _matrix_properties(call: Call) -> dict[str, Tensor]:
    """Stable rank and tail-to-head ratio of the call of one sequence without its padding: float64 (H,) each."""
    query, key = call.query, call.key
    is_square = query.shape[2] == key.shape[2]
    if call.key_mask is not None:
        valid = call.key_mask[0]
        query, key = query[:, :, valid] if is_square else query, key[:, :, valid]
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    properties: dict[str, list[Tensor]] = defaultdict(list)
    for q, k in zip(query.split(1, 1), key.split(1, 1), strict=True):  # one head at a time, for the memory
        weights = softmax_matrix(q, k, is_causal=call.is_causal, scale=call.scale)
        properties["stable_rank"].append(stable_rank(weights).flatten())
        if is_square and q.shape[2]:
            properties["head_to_tail"].append(head_to_tail(q, k, scale=call.scale, first=q.shape[2]).flatten())
    return {name: torch.cat(values).cpu() for name, values in properties.items()}


def analyze_checkpoint(
    source: "str | pathlib.Path",
    data: Files,
    *,
    length: int | None = None,
    rows: int = TEXT_ROWS,
    device: torch.device | None = None,
    allow_pickle: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """`analyze` the model of a checkpoint on `rows` inputs of data as in `data.ModelData`, with options of `analyze`.

    `source` is a folder or hub id, and `device` where PyTorch computes, by default the CPU. With `allow_pickle` weights
    in a .bin file may be read. A converted checkpoint is analyzed with exact attention. Pictures are resized to
    `length` tokens, and the position table of a text model is extended. Without a length it is 2,048 tokens or that of
    the whole text; for models of pictures of a fixed size, or whose own pictures have more tokens, the number that they
    have.

    Returns the result of `analyze`, with "source" (`CheckedSource.title`), "data" {"name", "rows"}, "pixels" (height
    and width of pictures, or None), "max_length" (to which the position table was extended, or None), "notes" and
    "machine".
    """
    checked = open_checkpoint(source, allow_pickle=allow_pickle)
    model = load_model(checked).eval()
    if own_settings(model) is not None:
        convert(model, EXACT)
    wanted = length or DEFAULT_LENGTH
    inputs = ModelData(model, checked.folder, data, longest=wanted, rows=rows, shorter=length is None)
    if not inputs.is_image:
        wanted = inputs.longest
    elif length is None:
        wanted = max(wanted if inputs.resizes else 0, inputs.native_tokens)
    inputs.check_length(wanted)
    positions = num_positions(model)
    model.to(device or model.device)
    check_memory(model, inputs.tokens_for(wanted), inputs.rows)
    notes = [None if inputs.is_image else allow_length(model, wanted)]
    is_extended = not inputs.is_image and positions is not None and num_positions(model) != positions
    batch = inputs.inputs(wanted, 0, inputs.rows)
    if batch.pixels is not None and batch.pixels != inputs.native:
        notes.append(
            f"Pictures are resized to {batch.pixels} x {batch.pixels} pixels, which are {batch.tokens} tokens; the "
            f"model was trained with {inputs.native} x {inputs.native} pixels."
        )
    elif length is None and batch.tokens < DEFAULT_LENGTH:
        limit = "The model takes" if inputs.is_image else f"{inputs.name} has"
        larger = f"errors at {DEFAULT_LENGTH} tokens are larger"
        notes.append(f"{limit} only {batch.tokens} tokens, where methods save little: {larger}.")
    about = {
        "source": checked.title,
        "data": {"name": inputs.name, "rows": inputs.rows},
        "pixels": batch.pixels,
        "max_length": wanted if is_extended else None,
        "notes": [note for note in notes if note],
        "machine": machine(model),
    }
    with memory_errors("give a smaller --length or fewer --rows"), use_device(model.device):
        # The head of a language model would compute a large matrix that is not needed.
        return analyze(model.base_model, batch.values, about=about, **options)
