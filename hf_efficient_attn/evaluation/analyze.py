"""`hf-efficient-attn analyze`: properties of the attention in each layer and head, and the errors of methods there.

Measured are the stable rank of the attention matrix (KDEformer, section 3.4), the ratio of the tail of the Gaussian
kernel matrix to its head (assumption A of the sparsity paper, see `sparsity`), and the relative operator norm of the
error for methods and budgets. From the errors follows one recommendation: which layers can use which method.

The model computes all inputs together, as far as memory allows, so that a row of the table is complete after each
layer.
"""

import contextlib
import itertools
import math
import pathlib
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_efficient_attn.analysis import head_to_tail, softmax_matrix, stable_rank
from hf_efficient_attn.checkpoint import load_model, open_checkpoint
from hf_efficient_attn.conversion import convert
from hf_efficient_attn.evaluation.benchmark import TEXT_ROWS, own_settings
from hf_efficient_attn.evaluation.calibration import Study, check_batches, check_max_error, largest
from hf_efficient_attn.evaluation.capture import (
    AttentionSummary,
    Batch,
    Call,
    capture_attention,
    forward,
    summarize_attention,
    tensors_of,
)
from hf_efficient_attn.evaluation.data import ModelData, allow_length, max_positions
from hf_efficient_attn.evaluation.defaults import Candidate, make_candidates
from hf_efficient_attn.evaluation.memory import check_memory, memory_errors
from hf_efficient_attn.evaluation.names import name_of
from hf_efficient_attn.evaluation.progress import Execution, Step, carry_out, partial_result
from hf_efficient_attn.evaluation.recommendation import recommend
from hf_efficient_attn.evaluation.timing import machine, use_device
from hf_efficient_attn.integration.settings import EXACT
from hf_efficient_attn.methods import MethodConfig
from hf_efficient_attn.version import __version__

BUDGETS = (64, 128, 256, 512)
# The first length in common use at which methods are faster than exact attention on a CPU.
DEFAULT_LENGTH = 2048
DEFAULT_MAX_ERROR = 0.2
# Properties need dense matrices. They are measured up to this length, on as many inputs as have this many entries
# together in one head: 16 inputs of 512 tokens, one of 2,048.
_MAX_LENGTH = 4096
_PROPERTY_ENTRIES = 1 << 22
# Tokens of a forward pass, all inputs together: enough for the default number of inputs of 8,192 tokens.
_BATCH_TOKENS = 1 << 15


class _EnoughError(Exception):
    """Ends a forward pass, because the rest of it is not needed or does not fit into the time."""


def analyze(
    model: nn.Module,
    batches: Iterable[Batch],
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
    `hea.calibrate`, whose arguments these are; the default budgets are 64, 128, 256 and 512 columns. For `per_layer`
    see `recommendation.recommend`. The functions of `execution` get `about` and "tokens" of the result, the estimate,
    and each complete entry of "layers". `about` is what is known of the model and the data, for the result.

    Returns:
        a dictionary for JSON:

        - "layers": [{"layer", "name", "stable_rank": [one number per head], "head_to_tail": the same, "errors": {label:
          {budget: [one number per head]}}}]. "head_to_tail" is None for attention between two sequences, and both
          properties are for sequences of more than 4,096 tokens.
        - "recommended", "calibrated": see `recommendation.recommend`.
        - "warnings": sentences about what is left out.
        - "max_error", "per_layer", "budgets", "is_causal", "tokens".
        - "property_inputs": the number of sequences per batch that the properties were measured on.
        - "complete": whether all was measured; "left_out": the layers that were not. They stay exact.

    Raises:
        UnsupportedAttentionError: as `hea.calibrate`; but if no method keeps the limit, "recommended" is None.
        Interrupted: the user interrupted the measurement; contains the result for the layers that were complete.
    """
    check_max_error(max_error)
    batches, execution = check_batches(batches), execution or Execution()
    summary = summarize_attention(model, largest(batches))
    candidates = make_candidates(methods, BUDGETS if budgets is None else budgets, summary)
    study, used = Study(candidates, summary), sorted({one.columns for one in candidates})
    about = {**(about or {}), "tokens": summary.max_kv_len}
    execution.on_begin(about)
    dropped = [str(columns) for columns in sorted(set(budgets or ())) if columns >= summary.max_kv_len]
    short = f"budgets of {', '.join(dropped)} columns, because an input has only {summary.max_kv_len} tokens"
    warnings = [f"Left out: {short}."] if dropped else []
    plan = _plan(_time_sequence(model, largest(batches), candidates), batches, summary)

    def entry(name: str) -> dict[str, Any]:
        """The means of a module over sequences."""
        values = study.values[name]
        means: dict[Any, Any] = {key: torch.stack(list(x.values())).mean(0).tolist() for key, x in values.items() if x}
        errors: dict[str, dict[str, Any]] = {}
        for columns, candidate in itertools.product(used, candidates):
            if candidate.columns <= columns:  # a method without a budget has one candidate, the cheapest
                errors.setdefault(candidate.label, {})[str(columns)] = means.get(candidate)
        properties = {key: means.get(key) for key in ("stable_rank", "head_to_tail")}
        return {"layer": study.layers[name], "name": name, **properties, "errors": errors}

    def result(run: tuple[nn.Module, Batch] | None) -> dict[str, Any] | None:
        entries = [entry(name) for name in study.layers if study.batches_done(name)]
        if not entries:
            return None
        missing = [name for name in study.layers if study.batches_done(name) < len(batches)]
        left_out = list(dict.fromkeys(name if study.layers[name] is None else study.layers[name] for name in missing))
        return {
            **about,
            "layers": entries,
            **recommend(study, candidates, summary, max_error, per_layer=per_layer, run=run),
            "warnings": warnings,
            "max_error": max_error,
            "per_layer": per_layer,
            "budgets": used,
            "is_causal": summary.is_causal,
            "property_inputs": _property_inputs(summary.max_kv_len),
            "complete": not left_out,
            "left_out": left_out,
        }

    # After Ctrl-C the user does not want to wait for the measurement of the speed.
    with partial_result(lambda: result(None)):
        with contextlib.closing(carry_out(plan, execution, noun="layer")) as steps:

            def visit(call: Call) -> None:
                if next(steps, None) is None:
                    raise _EnoughError
                inputs = min(_property_inputs(call.key.shape[2]), call.query.shape[0])
                study.add(call, number, [_matrix_properties(call.row(index)) for index in range(inputs)])
                if study.batches_done(call.name) == len(batches):
                    execution.on_row(entry(call.name))

            with contextlib.suppress(_EnoughError), capture_attention(model, visit):
                for number, batch in enumerate(batches):  # noqa: B007 (`visit` reads the number)
                    forward(model, batch)
        found = result((model, largest(batches)))
    assert found is not None  # the first step is always carried out
    return found


def _plan(seconds: float, batches: Sequence[Batch], summary: AttentionSummary) -> list[Step]:
    """A step for each call of a module; `seconds` is the time for one sequence of the first call."""
    pairs = [math.prod(call.query.shape[1:3]) * call.key.shape[2] for call in summary.calls]
    names = [call.name if call.layer is None else f"layer {call.layer}" for call in summary.calls]
    steps = [Step(name, seconds * count / pairs[0]) for name, count in zip(names, pairs, strict=True)]
    sizes = [max(map(len, tensors_of(batch).values()), default=1) for batch in batches]
    return [step._replace(seconds=size * step.seconds) for size in sizes for step in steps]


def _property_inputs(num_tokens: int) -> int:
    """The number of sequences of a batch that the properties are measured on."""
    return 0 if num_tokens > _MAX_LENGTH else max(1, _PROPERTY_ENTRIES // num_tokens**2)


def _time_sequence(model: nn.Module, batch: Batch, candidates: Sequence[Candidate]) -> float:
    """Estimate how long the measurements of one sequence take in the first attention module, in seconds."""
    seconds = [0.0]

    def visit(call: Call) -> None:
        one, (size, num_heads) = call.row(0), call.query.shape[:2]
        one.errors(candidates[0].config)  # fills caches
        start = time.perf_counter()
        for candidate in candidates:
            one.errors(candidate.config)
        seconds[0] = time.perf_counter() - start
        inputs = min(_property_inputs(call.key.shape[2]), size)
        if inputs:
            start = time.perf_counter()
            _matrix_properties(one._replace(query=one.query[:, :1], key=one.key[:, :1]))
            seconds[0] += (time.perf_counter() - start) * num_heads * inputs / size
        raise _EnoughError

    with contextlib.suppress(_EnoughError), capture_attention(model, visit):
        forward(model, batch)
    return seconds[0]


def _matrix_properties(call: Call) -> dict[str, Tensor]:
    """Stable rank and tail-to-head ratio of the call of one sequence without its padding: float64 (H,) each."""
    query, key = call.query, call.key
    is_square = query.shape[2] == key.shape[2]
    if call.key_mask is not None:
        valid = call.key_mask[0]
        query, key = query[:, :, valid] if is_square else query, key[:, :, valid]
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    properties: dict[str, list[Tensor]] = defaultdict(list)
    for q, k in zip(query.split(1, 1), key.split(1, 1), strict=True):
        weights = softmax_matrix(q, k, is_causal=call.is_causal, scale=call.scale)
        properties["stable_rank"].append(stable_rank(weights).flatten())
        if is_square and q.shape[2]:
            properties["head_to_tail"].append(head_to_tail(q, k, scale=call.scale, first=q.shape[2]).flatten())
    return {name: torch.cat(values).cpu() for name, values in properties.items()}


class Source(NamedTuple):
    """A checkpoint to analyze. A converted one is analyzed with exact attention."""

    name: "str | pathlib.Path"  # folder or hub id
    allow_pickle: bool = False  # whether weights in a .bin file may be read
    device: torch.device | None = None  # where PyTorch computes; None for the CPU


def analyze_checkpoint(
    source: Source, data: "str | pathlib.Path", *, length: int | None = None, rows: int = TEXT_ROWS, **options: Any
) -> dict[str, Any]:
    """`analyze` the model of a checkpoint on `rows` inputs of a file as in `data.ModelData`, with options of `analyze`.

    Pictures are resized to `length` tokens, and the position table of a text model is extended. Without a length it is
    2,048 tokens or that of the whole text; for models of speech, of pictures of a fixed size, or whose own pictures
    have more tokens, the number that they have.

    Returns:
        the result of `analyze`, with "source" (see `names.name_of`), "data" {"name", "rows"}, "pixels" (height and
        width of pictures, or None), "excerpt_seconds" (of recordings, or None), "max_length" (to which the position
        table was extended, or None), "notes", "machine" and "hf_efficient_attn" (the version).
    """
    checked = open_checkpoint(source.name, allow_pickle=source.allow_pickle)
    model = load_model(checked).eval()
    if own_settings(model) is not None:
        convert(model, EXACT)
    wanted = length or DEFAULT_LENGTH
    inputs = ModelData(model, checked.folder, pathlib.Path(data), longest=wanted, rows=rows, shorter=length is None)
    if inputs.is_text:
        wanted = inputs.longest
    elif length is None:
        is_resized = inputs.is_image and inputs.resizes
        wanted = max(wanted if is_resized else 0, inputs.native_tokens)
    inputs.check_length(wanted)
    positions = max_positions(model)
    device = source.device or model.device
    model.to(device)
    size = min(inputs.rows, max(1, _BATCH_TOKENS // inputs.tokens_for(wanted)))
    check_memory(model, inputs.tokens_for(wanted), size)
    notes = [allow_length(model, wanted) if inputs.is_text else None]
    is_extended = inputs.is_text and positions is not None and max_positions(model) != positions
    batches = [inputs.inputs(wanted, start, size) for start in range(0, inputs.rows, size)]
    pixels, tokens = batches[0].pixels, batches[0].tokens
    if pixels is not None and pixels != inputs.native:
        notes.append(
            f"Pictures are resized to {pixels} x {pixels} pixels, which are {tokens} tokens; the model was trained "
            f"with {inputs.native} x {inputs.native} pixels."
        )
    elif length is None and tokens < DEFAULT_LENGTH and inputs.speech is None:
        limit = f"{inputs.name} has" if pixels is None else "The model takes"
        larger = f"errors at {DEFAULT_LENGTH} tokens are larger"
        notes.append(f"{limit} only {tokens} tokens, where methods save little: {larger}.")
    notes.append(None if inputs.speech is None else inputs.speech.note)
    about = {
        "source": name_of(checked),
        "data": {"name": inputs.name, "rows": inputs.rows},
        "pixels": pixels,
        "excerpt_seconds": None if inputs.speech is None else inputs.speech.seconds,
        "max_length": wanted if is_extended else None,
        "notes": [note for note in notes if note],
        "machine": machine(model),
        "hf_efficient_attn": __version__,
    }
    with memory_errors("give a smaller --length or fewer --rows"), use_device(device):
        # The head of a language model would compute a large matrix that is not needed.
        return analyze(model.base_model, [one.values for one in batches], about=about, **options)
