"""Comparison of one model with several attention methods: times, memory, errors of layers, agreement of outputs."""

import copy
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from transformers import PreTrainedModel

from hf_efficient_attn.conversion import convert
from hf_efficient_attn.evaluation import timing
from hf_efficient_attn.evaluation.capture import Call, capture_attention, forward, takes_pictures, without_head
from hf_efficient_attn.evaluation.data import Inputs, ModelData
from hf_efficient_attn.integration.layers import Layer, in_order
from hf_efficient_attn.integration.learned import learned_of
from hf_efficient_attn.integration.settings import EXACT, EfficientAttentionConfig
from hf_efficient_attn.methods import make_config
from hf_efficient_attn.ops.backends.devices import widened
from hf_efficient_attn.ops.tracing import keeping_draws

# task -> how the outputs of a method are compared with those of exact attention. For other tasks it is "top1".
AGREEMENT = {"embedding": "cosine", "causal-lm": "perplexity_ratio"}
# Number of inputs on which the errors of layers and of the hidden states are measured.
ERROR_INPUTS = 2


class Variant(NamedTuple):
    """The model with one attention method, which shares its weights with the other variants."""

    model: PreTrainedModel
    settings: EfficientAttentionConfig | None = None  # None for exact attention
    chunk: int | None = None  # if a text is embedded as the mean of the embeddings of its pieces, their tokens


def make_variants(
    model: PreTrainedModel,
    settings: Mapping[str, EfficientAttentionConfig],
    own: EfficientAttentionConfig | None,
    longest: int,
    chunk: int | None = None,
) -> dict[str, Variant]:
    """Copies of a model that share its weights: exact attention, then `settings` (label -> method), then chunks.

    `own` is the one of `settings` that `model` has already: this variant is `model` itself. Inputs have at most
    `longest` tokens. For `chunk` see `Variant`; None for no such variant.
    """
    exact = copy_with_shared_weights(model)
    convert(exact, EXACT)
    variants = {EXACT: Variant(exact)}
    for label, wanted in settings.items():
        entry, converted = wanted.entries[0], model
        if wanted is not own:
            if takes_pictures(exact) and getattr(entry.config, "max_length", None) == 0 and len(wanted.entries) == 1:
                # Learned tables otherwise have the number of tokens of the pictures that the model was made for.
                wanted = EfficientAttentionConfig(make_config(entry.config, max_length=longest), None, entry.layers)
            converted = copy_with_shared_weights(exact)
            convert(converted, wanted)
        variants[label] = Variant(converted.eval(), wanted)
    if chunk is not None:
        variants[chunk_label(chunk)] = Variant(exact, chunk=chunk)
    return variants


def chunk_label(chunk: int) -> str:
    """The label of exact attention on pieces of `chunk` tokens."""
    return f"{EXACT}, chunks of {chunk}"


def copy_with_shared_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model that shares its parameters and buffers."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


class Answer(NamedTuple):
    """What is kept of the output of a model for a batch of B inputs."""

    # Normalised mean embeddings (B, W), losses (B,), or the most likely classes or tokens, one after another.
    compared: Tensor
    # Negative log likelihoods in nats, means (B,) over the tokens after the first, or of each masked token.
    losses: Tensor | None = None
    # (B, N, W), the last hidden states of the model without its head, or its logits; None if they are not compared.
    states: Tensor | None = None


class Procedure(NamedTuple):
    """How variants are measured."""

    batch: int = 1  # inputs of a forward pass
    rounds: int = 3  # measurements of each time
    memory: bool = True  # whether to measure memory
    rows: int | None = None  # inputs for the agreement; None for 4 texts or 32 pictures
    device: "torch.device | str" = "cpu"  # where PyTorch computes
    dtype: "torch.dtype | None" = None  # of the model; None for the dtype of the checkpoint
    new_tokens: int = 8  # that a causal language model generates at the end of each length; below 2 none
    errors: bool = True  # whether to measure the errors of layers
    is_first: bool = False  # whether it is a first measurement, on one batch

    def first(self) -> "Procedure":
        """The procedure of a first measurement: one round, on one batch, with errors of one input."""
        return self._replace(rounds=1, memory=False, new_tokens=0, is_first=True)


class _Passes(NamedTuple):
    """What the forward passes of a variant yield."""

    inputs: Inputs  # of the last pass
    seconds: list[float]  # of the passes that are timed
    calls: int  # how many calls are timed together
    peak: int | None  # bytes; None if memory is not measured
    answers: list[Answer]  # one for each batch


class LengthComparison:
    """Measurements of variants on inputs of one length.

    Every forward pass serves two purposes: it is timed, and its answers are compared with those of exact attention. The
    passes of a method run between two timings of exact attention, so that slow changes in the load of the machine
    cancel. The models of the variants are on the device that computes.
    """

    def __init__(self, variants: Mapping[str, Variant], data: ModelData, length: int, procedure: Procedure) -> None:
        self._variants, self._data, self._length, self._procedure = variants, data, length, procedure
        rows = min(data.rows, procedure.batch) if procedure.is_first else data.rows
        self._batches = math.ceil(rows / procedure.batch) if data.is_real else 0
        self._references: list[Answer] = []  # those of exact attention, one for each batch
        self._exact_seconds = 0.0  # the latest time of exact attention
        self._exact_calls = 1  # how many calls are timed together for it
        self._errors: dict[str, list[float]] = {}
        self._kept: Any = None  # what `run_model` returned in the latest pass

    @torch.no_grad()
    def measure(self, label: str) -> dict[str, Any]:
        """Measure the variant with a label, exact attention first; returns a row of the benchmark's "measurements"."""
        passes = self._time_passes(label)
        pairs = self._with_exact_times(label, passes)
        self._kept = None
        first_token_seconds, tokens_per_second = self._time_generation(label, passes.inputs)
        found, layers, settings = timing.summary(pairs), self._errors.get(label, []), self._variants[label].settings
        values = {} if settings is None else settings.to_dict()
        compared = list(zip(passes.answers, self._references, strict=True))
        ratios = [compare(self._data.task, one.compared, exact.compared) for one, exact in compared]
        return {
            "attention": label,
            "method": values.pop("method", EXACT),
            "settings": {key: x for key, x in values.items() if key not in ("version", "calibrated_length")},
            "length": passes.inputs.tokens,
            "pixels": passes.inputs.pixels,
            "batch": min(self._procedure.batch, self._data.rows),
            "seconds": found.seconds,
            "speed_up": found.ratio,
            "speed_up_min": found.ratio_min,
            "speed_up_max": found.ratio_max,
            "peak_memory_mib": None if passes.peak is None else passes.peak / 2**20,
            "error": _mean(torch.tensor(layers, dtype=torch.float64)),
            "layer_errors": [error if math.isfinite(error) else None for error in layers],
            "output_error": _mean(*(_state_errors(*pair) for pair in compared)),
            "agreement": _mean(*ratios, is_log=self._data.task == "causal-lm"),
            "perplexity": _mean(*(one.losses for one in passes.answers if one.losses is not None), is_log=True),
            "first_token_seconds": first_token_seconds,
            "tokens_per_second": tokens_per_second,
            "is_first": self._procedure.is_first,
        }

    def _time_passes(self, label: str) -> "_Passes":
        """Run a variant on all batches, and time the first passes."""
        procedure, (model, _, chunk) = self._procedure, self._variants[label]
        (work, inputs), begin, peak = self._pass(label, 0), timing.timer(), None
        if procedure.memory:
            peak = timing.peak_of(work, model.device)
        else:
            work()
        first = timing.timer() - begin
        calls = timing.calls_to_time(work, first)
        # A first call fills memory and caches. It counts only if it is long, so that this makes no difference.
        is_timed = first > timing.LONG_SECONDS and peak is None and model.device.type == "cpu"
        # Long passes of exact attention are timed again after those of each method, and what chunks gain is clear.
        rounds = 1 if first > timing.LONG_SECONDS and (label == EXACT or chunk is not None) else procedure.rounds
        seconds: list[float] = []
        answers: list[Answer] = []
        for index in range(max(rounds, self._batches)):
            if index:
                work, inputs = self._pass(label, index)
            if index < rounds:
                seconds.append(first if is_timed and not index else timing.time_calls(work, calls))
            else:
                work()
            answer = answer_of(self._data.task, inputs, *self._kept) if index < self._batches else None
            if answer is not None:
                if chunk is not None:
                    pieces = answer.compared.unflatten(0, (len(self._references[index].compared), -1))
                    answer = Answer(normalize(pieces.mean(1), dim=1))
                is_compared = index * procedure.batch < ERROR_INPUTS
                answers.append(answer if is_compared else answer._replace(states=None))
        return _Passes(inputs, seconds, calls, peak, answers)

    def _with_exact_times(self, label: str, passes: "_Passes") -> list[tuple[float, float]]:
        """Each time of a variant with that of exact attention, for which it also keeps times, answers and errors."""
        seconds, (_, settings, chunk) = passes.seconds, self._variants[label]
        if label == EXACT:
            self._exact_seconds, self._exact_calls, self._references = seconds[-1], passes.calls, passes.answers
            self._errors = self._layer_errors() if self._data.is_real and self._procedure.errors else {}
            return [(one, one) for one in seconds]
        if self._is_exact(settings, passes.inputs.tokens, passes.answers):
            return [(self._exact_seconds, self._exact_seconds)]
        before = self._exact_seconds
        if chunk is None:  # nothing follows the chunks
            self._exact_seconds = timing.time_calls(self._pass(EXACT, 0)[0], self._exact_calls)
        # The load of the machine changes between the two times, at a steady pace as far as is known.
        change = (self._exact_seconds - before) / len(seconds)
        return [(one, before + change * (number + 0.5)) for number, one in enumerate(seconds)]

    def _time_generation(self, label: str, inputs: Inputs) -> tuple[float | None, float | None]:
        """Seconds to the first token, and tokens per second, at the end of inputs; None without a generation."""
        new_tokens = self._procedure.new_tokens
        if self._data.task != "causal-lm" or new_tokens < 2:
            return None, None
        prompts = inputs.values["input_ids"][:, : inputs.tokens - new_tokens]
        return timing.time_generation(self._variants[label].model, prompts, new_tokens, self._procedure.rounds)

    def _is_exact(self, settings: EfficientAttentionConfig | None, tokens: int, answers: Sequence[Answer]) -> bool:
        """Whether a variant has computed exact attention: it was timed twice, and a ratio would only be noise."""
        if settings is None or any(entry.config.exact_length < tokens for entry in settings.entries):
            return False
        pairs = zip(answers, self._references, strict=True)
        states = [(one.states, exact.states) for one, exact in pairs if exact.states is not None]
        return bool(states) and all(one is not None and torch.equal(one, exact) for one, exact in states)

    def _pass(self, label: str, index: int) -> tuple[Callable[[], None], Inputs]:
        """A forward pass of a variant on the batch with this index, which sets `_kept`, and its inputs."""
        batch, number = self._procedure.batch, index % max(1, self._batches)
        model, _, chunk = self._variants[label]
        inputs = self._data.inputs(self._length, number * batch, batch, chunk).to(model.device)

        def work() -> None:
            self._kept = None  # frees the earlier output
            self._kept = run_model(self._data.task, model, inputs)

        return work, inputs

    def _layer_errors(self) -> dict[str, list[float]]:
        """Errors of the layers in order, averaged over heads and inputs; 0 where a layer is exact.

        In an encoder-decoder, layers that are exact with every method, such as those of the decoder, are left out.
        """
        variants = {label: one for label, one in self._variants.items() if one.chunk is None}
        errors: dict[str, dict[Layer | None, list[float]]] = {label: {} for label in variants}

        def visit(call: Call) -> None:
            at = call.location.layer, call.name
            configs = {label: one.settings.for_layer(*at) if one.settings else None for label, one in variants.items()}
            if self._data.is_pair and not any(configs.values()):
                return
            for label, config in configs.items():
                error = 0.0
                if config is not None:
                    learned = learned_of(variants[label].model.base_model.get_submodule(call.name))
                    error = call.errors(config, None if learned is None else learned()).mean().item()
                errors[label].setdefault(call.layer, []).append(error)

        exact = self._variants[EXACT].model
        for index in range(min(1 if self._procedure.is_first else ERROR_INPUTS, self._data.rows)):
            with capture_attention(exact, visit):
                forward(exact, self._data.inputs(self._length, index, 1).values)
        return {label: [statistics.fmean(of[layer]) for layer in in_order(of)] for label, of in errors.items()}


def _mean(*values: Tensor, is_log: bool = False) -> float | None:
    """The mean of all values, or its exponential; None without values, and for NaN and inf, which JSON has not."""
    mean = widened(torch.cat(values)).mean().item() if values else math.nan
    if is_log:
        mean = math.exp(min(mean, 700.0))  # a huge number instead of an overflow
    return mean if math.isfinite(mean) else None


def _state_errors(answer: Answer, exact: Answer) -> Tensor:
    """|S - E| / |E| of the last hidden states (Frobenius norm) of each input; (0,) where they are not compared."""
    if answer.states is None or exact.states is None or exact.states.ndim != 3:
        return torch.empty(0, dtype=torch.float64)
    reference = widened(exact.states).flatten(1)
    errors: Tensor = (widened(answer.states).flatten(1) - reference).norm(dim=1) / reference.norm(dim=1)
    return errors


def run_model(task: str, model: PreTrainedModel, inputs: Inputs) -> tuple[Any, Tensor | None]:
    """Run what a task needs of a model; returns its output, and the last hidden states or the logits.

    The hidden states are those of the model without its head, all that embeddings need. Each run has the same draws.
    """
    states: list[Tensor | None] = []
    body = without_head(model)

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        states.append(getattr(output, "last_hidden_state", getattr(output, "logits", None)))

    with keeping_draws(model.device), body.register_forward_hook(keep):
        output = forward(body if task == "embedding" else model, inputs.values)
    return output, states[-1]


def answer_of(task: str, inputs: Inputs, output: Any, states: Tensor | None) -> Answer | None:
    """What is kept of what `run_model` returns; None for a masked language model without a mask token."""
    if task == "embedding":
        return Answer(normalize(output.last_hidden_state.float().mean(1), dim=1), None, states)
    logits: Tensor = output.logits
    if task == "masked-lm":
        if inputs.masked is None or inputs.targets is None:
            return None
        guesses = logits[inputs.masked]
        return Answer(guesses.argmax(1), cross_entropy(guesses.float(), inputs.targets, reduction="none"), states)
    if task in ("text-to-text", "image-classification"):
        return Answer(logits.argmax(-1).flatten(), None, states)
    targets: Tensor = inputs.values["input_ids"][:, 1:]
    parts = [  # in parts, because the logits in float32 are large
        cross_entropy(part.float().transpose(1, 2), target, reduction="none")
        for part, target in zip(torch.split(logits[:, :-1], 512, 1), torch.split(targets, 512, 1), strict=True)
    ]
    losses = torch.cat(parts, 1).mean(1)
    return Answer(losses, losses, states)


def compare(task: str, answer: Tensor, reference: Tensor) -> Tensor:
    """Compare answers with those of exact attention: cosines, differences of log likelihoods, or equality (0 or 1)."""
    if task == "embedding":
        return (answer * reference).sum(1).clamp(-1.0, 1.0)
    return answer - reference if task == "causal-lm" else widened(answer == reference)
