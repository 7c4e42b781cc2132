"""`hf-efficient-attn analyze`: properties of the attention in each layer and head, and the errors of methods there.

Measured are the stable rank of the attention matrix (KDEformer, section 3.4), the ratio of the tail of the Gaussian
kernel matrix to its head (assumption A of `hea.analysis`), and the relative operator norm of the error.
"""

import contextlib
import functools
import itertools
import math
import pathlib
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_efficient_attn.analysis import head_to_tail, softmax_matrix, stable_rank
from hf_efficient_attn.checkpoint import load_model, open_checkpoint
from hf_efficient_attn.conversion import convert
from hf_efficient_attn.conversion.convert import num_positions
from hf_efficient_attn.errors import check_positive
from hf_efficient_attn.evaluation import benchmark, calibration, capture, choices, timing
from hf_efficient_attn.evaluation.data import Files, ModelData, allow_length
from hf_efficient_attn.evaluation.defaults import Candidate, make_candidates
from hf_efficient_attn.evaluation.progress import Execution, Step, carry_out, partial_result
from hf_efficient_attn.integration.layers import Layer
from hf_efficient_attn.integration.settings import EXACT, EfficientAttentionConfig, changed_hyperparameters, method_of
from hf_efficient_attn.methods import MethodConfig

BUDGETS = (64, 128, 256, 512)
# The first length in common use at which methods are faster than exact attention on a CPU.
DEFAULT_LENGTH = 2048
DEFAULT_MAX_ERROR = 0.2
# About what a method costs besides its columns, and the properties of a matrix, in keys for each query and in matrices.
_OVERHEAD, _MATRIX = 256, 20
# Properties need dense matrices. They are measured up to this length, on the first input.
_MAX_LENGTH = 4096


def analyze(
    model: nn.Module,
    batch: capture.Batch,
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
    `execution` get `about`, a part of the result, with "tokens", and each complete entry of "layers".

    Returns:
        a dictionary for JSON:

        - "layers": [{"layer", "name", "stable_rank": [one number per head], "head_to_tail": the same, "errors": {label:
          {budget: [one number per head]}}}]. Both properties are those of the first sequence, and None for more than
          4,096 tokens; "stable_rank" also with distance biases or sinks, "head_to_tail" between two sequences.
        - "recommended": None if no method keeps the limit. Otherwise a dictionary of "layers" [{"layer", "attention" (a
          label), "method", "columns" (None for a method as it is given), "settings" (without defaults), "error" (mean
          over sequences and heads), "bound" (of the error on an unseen sequence)}], "exact_layers", "error" (mean of
          "layers"), "tokens" (the length up to which this was measured), "speed_up" (of the attention of all layers),
          "saves" (whether that is a gain, `Timing.is_gain`) and "output_error" (of the last hidden states or the
          logits). The last three need a run of the model, and are None after Ctrl-C.
        - "calibrated": the choice as `convert --config` and `hea.convert` take it, without default hyperparameters.
        - "max_error", "per_layer", "budgets" (those below the number of tokens), "is_causal", "tokens".
        - "complete": whether all was measured; "left_out": the layers that were not. They stay exact. "partial": those
          that were measured on fewer sequences or with fewer candidates, since the time was over.

    Raises:
        UnsupportedAttentionError: as `hea.calibrate`; but if no method keeps the limit, "recommended" is None.
        Interrupted: the user interrupted the measurement; contains the result for the layers that were complete.
    """
    summary = capture.summarize_attention(model, batch)
    candidates = make_candidates(methods, budgets, summary, standard=BUDGETS)
    analysis = _Analysis(model, batch, summary, candidates, execution or Execution(), max_error, per_layer, about or {})
    with partial_result(lambda: analysis.result(is_over=True)):
        analysis.run()
        found = analysis.result()
    assert found is not None  # the first step is always carried out
    return found


@dataclass
class _Analysis:
    """The measurements of `analyze`, whose arguments it takes, and what follows from them."""

    model: nn.Module
    batch: capture.Batch
    summary: capture.AttentionSummary
    candidates: Sequence[Candidate]
    execution: Execution
    max_error: float
    per_layer: bool
    about: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.about = {**self.about, "tokens": self.summary.max_kv_len}
        self._study = calibration.Study(self.candidates, self.summary)
        self._budgets = sorted({one.columns for one in self.candidates if one.columns is not None})
        is_limited = self.execution.minutes is not None
        self._visits = _plan_visits(self.candidates, self._budgets, self.summary, is_limited=is_limited)
        # Of each module: the number of its calls, and of those visits of calls that are done.
        self._calls = Counter(call.name for call in self.summary.calls)
        self._done = Counter[str]()
        self._entries: dict[str, dict[str, Any]] = {}  # of the modules that are complete
        # Module -> candidate, or name of a property -> the numbers of its heads (H,) for each sequence.
        self._values: dict[str, dict[Any, list[Tensor]]] = defaultdict(lambda: defaultdict(list))

    def run(self) -> None:
        """Measure everything, or what fits into the time."""
        self.execution.on_begin(self.about)
        stages = enumerate(self._visits)
        plan = [Step(x.name, visit.cost(x), visit, stage) for stage, visit in stages for x in self.summary.calls]
        with contextlib.closing(carry_out(plan, self.execution)) as steps, contextlib.suppress(TimeoutError):
            for _ in self._visits:
                with capture.capture_attention(self.model, functools.partial(self._visit, steps)):
                    capture.forward(self.model, self.batch)

    def _visit(self, steps: Iterator[Step], call: capture.Call) -> None:
        """Measure in a call what the next step asks for."""
        step = next(steps, None)
        if step is None:
            raise TimeoutError  # the rest does not fit into the time; the first step is always carried out
        some: _Visit = step.key
        rows, values = call.rows(some.rows), self._values[call.name]
        for candidate, errors in self._study.add(rows, some.candidates, some.rows.start).items():
            values[candidate] += [errors[b] for b in rows.sequences]
        if some.properties:
            for name, heads in _matrix_properties(call.rows(slice(1))).items():
                values[name].append(heads)
        self._done[call.name] += 1
        if self._done[call.name] == len(self._visits) * self._calls[call.name]:
            self._add_entry(call)

    def _add_entry(self, call: capture.Call) -> None:
        """Make the entry of a module in "layers": the means of its numbers over sequences."""
        means: dict[Any, Any] = {key: torch.stack(x).mean(0).tolist() for key, x in self._values[call.name].items()}
        errors: dict[str, dict[str, Any]] = {}
        for columns, candidate in itertools.product(self._budgets, self.candidates):
            # A method without a budget has one candidate, the smallest.
            if candidate.columns is not None and candidate.columns <= columns:
                errors.setdefault(candidate.label, {})[str(columns)] = means.get(candidate)
        properties = {key: means.get(key) for key in ("stable_rank", "head_to_tail")}
        entry = {"layer": call.layer, "name": call.name, **properties, "errors": errors}
        self._entries[call.name] = entry
        self.execution.on_row(entry)

    def result(self, *, is_over: bool = False) -> dict[str, Any] | None:
        """The result of `analyze`; None if no layer was measured. With `is_over` nothing more is measured for it."""
        visited = {name: self._done[name] // count for name, count in self._calls.items()}
        for call in self.summary.calls:  # those that were measured in part, too
            if visited[call.name] and call.name not in self._entries:
                self._add_entry(call)
        if not self._entries:
            return None
        names = {call.name: call.name if call.layer is None else call.layer for call in self.summary.calls}
        missing = list(dict.fromkeys(label for name, label in names.items() if not visited[name]))
        unfinished = dict.fromkeys(label for name, label in names.items() if visited[name] < len(self._visits))
        partial = [label for label in unfinished if label not in missing]
        chosen = self._choose(missing, is_over=is_over)
        settings = calibration.make_settings(chosen, max(self._study.tokens[x] for x in chosen)) if chosen else None
        return {
            **self.about,
            "layers": [self._entries[name] for name in names if name in self._entries],
            "recommended": settings and self._recommended(chosen, settings, is_over=is_over),
            "calibrated": settings and settings.to_dict(defaults=False),
            "max_error": self.max_error,
            "per_layer": self.per_layer,
            "budgets": self._budgets,
            "is_causal": self.summary.is_causal,
            "complete": not missing and not partial,
            "left_out": missing,
            "partial": partial,
        }

    def _choose(self, missing: Sequence[Layer], *, is_over: bool) -> Mapping[Layer, choices.Choice]:
        """The method and the budget of each layer that can be converted, without the layers that are missing."""
        study = self._study
        table = {key: errors for key, errors in study.table.items() if key[0] not in missing}
        accepted = choices.accept(table, self.candidates, self.max_error, study.assumed_spread)
        # After Ctrl-C the user does not want to wait for more measurements.
        measure = None if is_over else functools.partial(choices.measure_seconds, self.model, self.batch)
        choose = choices.choose_each if self.per_layer else choices.choose_one
        return choose(accepted, study.seconds, measure)

    def _recommended(
        self, chosen: Mapping[Layer, choices.Choice], settings: EfficientAttentionConfig, *, is_over: bool
    ) -> dict[str, Any]:
        given = self.model, self.batch, settings
        speed = None if is_over else calibration.measure_speed(*given)
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
            "exact_layers": [layer for layer in self.summary.layers if layer not in chosen],
            "error": statistics.fmean(choice.error for choice in chosen.values()),
            "speed_up": speed and speed.ratio,
            "saves": speed and speed.is_gain,
            "output_error": None if is_over else calibration.measure_output_error(*given),
            "tokens": settings.calibrated_length,
        }


class _Visit(NamedTuple):
    """What is measured in one forward pass: candidates on some sequences, and properties of the first one."""

    candidates: Sequence[Candidate]
    rows: slice
    properties: bool

    def cost(self, call: capture.Call) -> float:
        """The estimated cost in a call, in keys for each query and head."""
        (_, num_heads, q_len, _), num_keys = call.query.shape, call.key.shape[2]
        columns = sum(one.columns or one.config.to_measure().exact_length for one in self.candidates)
        rows = len(range(len(call.query))[self.rows])
        each = rows * (columns + _OVERHEAD * len(self.candidates) + num_keys)
        return num_heads * q_len * (each + _MATRIX * num_keys * self.properties)


def _plan_visits(
    candidates: Sequence[Candidate], budgets: Sequence[int], summary: capture.AttentionSummary, *, is_limited: bool
) -> list[_Visit]:
    """What the forward passes measure. Within a limit of time all layers come first, and then all that is left."""
    properties = summary.max_kv_len <= _MAX_LENGTH
    if not is_limited:
        return [_Visit(candidates, slice(0, None), properties)]
    middle, first = budgets[len(budgets) // 2], dict[str, Candidate]()
    for one in sorted(candidates, key=lambda one: math.inf if one.columns is None else abs(one.columns - middle)):
        first.setdefault(one.label, one)
    rest = [one for one in candidates if one not in first.values()]
    visits = [_Visit([*first.values()], slice(0, 1), properties=False), _Visit(rest, slice(0, 1), properties)]
    if len(summary.calls[0].query) > 1:
        visits.append(_Visit(candidates, slice(1, None), properties=False))
    return visits


def _matrix_properties(call: capture.Call) -> dict[str, Tensor]:
    """Stable rank and tail-to-head ratio of the call of one sequence without its padding: float64 (H,) each."""
    query, key = call.query, call.key
    is_square = not call.location.is_cross and query.shape[2] == key.shape[2]
    if call.key_mask is not None:
        valid = call.key_mask[0]
        query, key = query[:, :, valid] if is_square else query, key[:, :, valid]
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    properties: dict[str, list[Tensor]] = defaultdict(list)
    for q, k in zip(query.split(1, 1), key.split(1, 1), strict=True):  # one head at a time, for the memory
        if call.distance_bias is None and call.sinks is None:
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
    rows: int = benchmark.TEXT_ROWS,
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
    check_positive("max_error", options.get("max_error", DEFAULT_MAX_ERROR), is_count=False)  # before the work
    checked = open_checkpoint(source, allow_pickle=allow_pickle)
    model = load_model(checked).eval()
    if method_of(model.config) is not None:
        convert(model, EXACT)
    wanted = length or DEFAULT_LENGTH
    inputs = ModelData(model, checked.folder, data, longest=wanted, rows=rows, shorter=length is None)
    inputs.mask_token = None  # no token of a masked language model is masked
    if not inputs.is_image:
        wanted = inputs.longest
    elif length is None:
        wanted = max(0 if inputs.resizing is None else wanted, inputs.native_tokens)
    inputs.check_length(wanted)
    positions = num_positions(model)
    model.to(device or model.device)
    timing.check_memory(model, inputs.tokens_for(wanted), inputs.rows)
    notes = [None if inputs.is_image else allow_length(model, wanted)]
    batch = inputs.inputs(wanted, 0, inputs.rows)
    if batch.pixels is not None and batch.pixels != inputs.native:
        notes.append(
            f"Pictures are resized to {batch.pixels} x {batch.pixels} pixels, which are {batch.tokens} tokens; the "
            f"model was trained with {inputs.native} x {inputs.native} pixels."
        )
    elif length is None and batch.tokens < DEFAULT_LENGTH:
        limit = "The model takes" if inputs.is_image else f"{inputs.name} has"
        notes.append(f"{limit} only {batch.tokens} tokens, where methods save little and errors are smaller.")
    about = {
        "source": checked.title,
        "data": {"name": inputs.name, "rows": inputs.rows},
        "pixels": batch.pixels,
        "max_length": wanted if num_positions(model) != positions else None,
        "notes": [note for note in notes if note],
        "machine": timing.machine(model),
    }
    with timing.memory_errors("give a smaller --length or fewer --rows"), timing.use_device(model.device):
        # The head of a language model would compute a large matrix that is not needed.
        return analyze(capture.without_head(model), batch.values, about=about, **options)
