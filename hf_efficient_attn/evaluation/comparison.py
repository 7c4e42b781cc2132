"""One model by several attentions, beside each other: times, memory, errors of layers, agreement of outputs."""

import copy
import math
import statistics
from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_efficient_attn.conversion import convert
from hf_efficient_attn.evaluation.capture import Call, forward, watching
from hf_efficient_attn.evaluation.data import Inputs, ModelData
from hf_efficient_attn.evaluation.timing import paired, peak_of
from hf_efficient_attn.integration.layers import Layer, in_order
from hf_efficient_attn.integration.models import transformers_models
from hf_efficient_attn.integration.settings import EXACT, EfficientAttentionConfig
from hf_efficient_attn.methods import make_config

# What is measured where no labels are needed, by task.
AGREEMENT = {
    "embedding": "cosine",
    "causal-lm": "perplexity_ratio",
    "masked-lm": "top1",
    "image-classification": "top1",
}
_ERROR_ROWS = 2  # errors of layers are those of so many rows


class Variant(NamedTuple):
    """The model by one attention. settings: None for exact attention; modules: of attention, by name in the model."""

    model: nn.Module
    settings: EfficientAttentionConfig | None
    modules: Mapping[str, nn.Module]


def make_variants(
    model: nn.Module,
    wanted: Mapping[str, EfficientAttentionConfig],
    own: EfficientAttentionConfig | None,
    longest: int,
) -> dict[str, Variant]:
    """Exact attention first, then each method, all with the same weights; `model` itself is that of `own`."""
    exact = convert(sharing(model), EXACT)
    variants = {EXACT: _variant(exact, None)}
    for label, settings in wanted.items():
        if settings is own:
            variants[label] = _variant(model, settings)
            continue
        if exact.main_input_name == "pixel_values" and len(settings.entries) == 1:
            # Tables along the sequence have as many rows as the model's own pictures have tokens.
            entry = settings.entries[0]
            if getattr(entry.config, "max_length", None) == 0:
                settings = EfficientAttentionConfig(make_config(entry.config, max_length=longest), None, entry.layers)
        variants[label] = _variant(convert(sharing(exact), settings).eval(), settings)
    return variants


def _variant(model: nn.Module, settings: EfficientAttentionConfig | None) -> Variant:
    from hf_efficient_attn.integration.models import attention_modules

    return Variant(model, settings, {place.name: module for module, place, *_ in attention_modules(model)})


def sharing(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters and buffers are those of the model."""
    memo = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, memo)


def measure(
    variants: Mapping[str, Variant], data: ModelData, length: int, batch: int, rounds: int, memory: bool, bar
) -> list[dict[str, Any]]:
    """A measurement of every variant at one length."""
    first = data.inputs(length, 0, batch)
    works = {label: lambda model=one.model: forward(model, first.values) for label, one in variants.items()}
    exact, timed = paired(works[EXACT], {k: work for k, work in works.items() if k != EXACT}, rounds, bar)
    times = {EXACT: exact, **timed}
    peaks = {label: peak_of(work) if memory else None for label, work in works.items()}
    errors: dict[str, list[float]] = {}
    agreement: dict[str, float] = {}
    if data.real:
        errors = _layer_errors(variants, data.inputs(length, 0, _ERROR_ROWS))
        agreement = _agreement(variants, data, length, batch)
    bar.update(len(variants) - 1)
    found = []
    for label, one in variants.items():
        layers = errors.get(label, [])
        settings = {} if one.settings is None else one.settings.to_dict()
        found.append(
            {
                "attention": label,
                "method": settings.pop("method", EXACT),
                "settings": {key: value for key, value in settings.items() if key != "version"},
                "length": first.tokens,
                "pixels": first.pixels,
                "batch": len(next(iter(first.values.values()))),
                "seconds": times[label].seconds,
                "speed_up": times[label].ratio,
                "speed_up_min": times[label].ratio_min,
                "speed_up_max": times[label].ratio_max,
                "peak_memory_mib": None if peaks[label] is None else peaks[label] / 2**20,
                "error": _finite(statistics.fmean(layers)) if layers else None,
                "layer_errors": [_finite(error) for error in layers],
                "agreement": _finite(agreement.get(label)),
            }
        )
    return found


def _finite(value: float | None) -> float | None:
    """JSON knows no NaN and no infinity: a model that gives such things has no error that can be told."""
    return value if value is not None and math.isfinite(value) else None


def _layer_errors(variants: Mapping[str, Variant], inputs: Inputs) -> dict[str, list[float]]:
    """label -> errors of the layers in order, 0 where a layer stays exact: means over heads and rows."""
    from hf_efficient_attn.integration.learned import learned_tensors

    found: dict[str, dict[Layer | None, list[float]]] = {label: {} for label in variants}

    def visit(call: Call) -> None:
        for label, one in variants.items():
            config = None if one.settings is None else one.settings.for_layer(call.layer)
            error = 0.0
            if config is not None:
                error = call.errors(config, learned_tensors(one.modules[call.name])).mean().item()
            found[label].setdefault(call.layer, []).append(error)

    exact = variants[EXACT].model
    with watching(exact, visit):
        forward(exact, inputs.values)
    return {label: [statistics.fmean(layers[n]) for n in in_order(layers)] for label, layers in found.items()}


def _agreement(variants: Mapping[str, Variant], data: ModelData, length: int, batch: int) -> dict[str, float]:
    """label -> agreement with exact attention, over all rows; empty where nothing is masked to be guessed."""
    notes: dict[str, list[Tensor]] = {label: [] for label in variants}
    for start in range(0, data.rows, batch):
        inputs = data.inputs(length, start, batch)
        if data.task == "masked-lm" and inputs.masked is None:
            return {}
        reference = answers(data.task, variants[EXACT].model, inputs)
        for label, one in variants.items():
            given = reference if label == EXACT else answers(data.task, one.model, inputs)
            notes[label].append(compare(data.task, given, reference))
    means = {label: torch.cat(note).double().mean().item() for label, note in notes.items()}
    return {k: math.exp(min(mean, 700.0)) if data.task == "causal-lm" else mean for k, mean in means.items()}


def answers(task: str, model: nn.Module, inputs: Inputs) -> Tensor:
    """What a model says of each row.

    Returns:
        (rows, width), the normalised mean of the last hidden states; (rows,), the mean negative log likelihood of the
        tokens after the first; (guesses,), the most likely tokens under the masks; or (rows,), the most likely class.
    """
    if task == "embedding":
        hidden = forward(transformers_models(model)[0].base_model, inputs.values).last_hidden_state
        return torch.nn.functional.normalize(hidden.float().mean(1), dim=1)
    logits = forward(model, inputs.values).logits
    if task == "masked-lm":
        return logits[inputs.masked].argmax(1)
    if task == "image-classification":
        return logits.argmax(1)
    targets = inputs.values["input_ids"][:, 1:]
    losses = [
        torch.nn.functional.cross_entropy(some.float().transpose(1, 2), target, reduction="none")
        for some, target in zip(logits[:, :-1].split(512, 1), targets.split(512, 1), strict=True)
    ]
    return torch.cat(losses, 1).mean(1)


def compare(task: str, given: Tensor, reference: Tensor) -> Tensor:
    """Answers beside those of exact attention: cosines, differences of log likelihoods, or whether they agree."""
    if task == "embedding":
        return (given * reference).sum(1).clamp(-1.0, 1.0)
    return given - reference if task == "causal-lm" else (given == reference).double()
