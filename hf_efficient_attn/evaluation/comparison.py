"""Comparison of one model with several attention methods: times, memory, errors of layers, agreement of outputs."""

import copy
import math
import statistics
from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_efficient_attn.conversion import convert
from hf_efficient_attn.evaluation.capture import Call, capture_attention, forward
from hf_efficient_attn.evaluation.data import Inputs, ModelData
from hf_efficient_attn.evaluation.timing import paired, peak_of
from hf_efficient_attn.integration.layers import Layer, in_order
from hf_efficient_attn.integration.learned import learned_tensors
from hf_efficient_attn.integration.models import attention_modules
from hf_efficient_attn.integration.settings import EXACT, EfficientAttentionConfig
from hf_efficient_attn.methods import make_config

# task -> how the outputs of a method are compared with those of exact attention, which needs no labels.
AGREEMENT = {
    "embedding": "cosine",
    "causal-lm": "perplexity_ratio",
    "masked-lm": "top1",
    "image-classification": "top1",
}
# Number of inputs on which the errors of layers are measured.
_ERROR_INPUTS = 2


class Variant(NamedTuple):
    """The model with one attention method.

    Attributes:
        model: shares its weights with the other variants.
        settings: None for exact attention.
        modules: the attention modules by their names in the model.
    """

    model: PreTrainedModel
    settings: EfficientAttentionConfig | None
    modules: Mapping[str, nn.Module]


def make_variants(
    model: PreTrainedModel,
    settings: Mapping[str, EfficientAttentionConfig],
    own: EfficientAttentionConfig | None,
    longest: int,
) -> dict[str, Variant]:
    """Make copies of a model that share its weights, with exact attention and with each method.

    Args:
        model: the model.
        settings: label -> method.
        own: the one of `settings` that `model` has already: this variant is `model` itself.
        longest: largest number of tokens of an input.

    Returns:
        label -> variant, exact attention first.
    """
    exact = copy_with_shared_weights(model)
    convert(exact, EXACT)
    variants = {EXACT: _variant(exact, None)}
    for label, wanted in settings.items():
        if wanted is own:
            variants[label] = _variant(model, wanted)
            continue
        if exact.main_input_name == "pixel_values" and len(wanted.entries) == 1:
            # Without a length, learned tables have the number of tokens of the pictures that the model was made for.
            entry = wanted.entries[0]
            if getattr(entry.config, "max_length", None) == 0:
                wanted = EfficientAttentionConfig(make_config(entry.config, max_length=longest), None, entry.layers)
        converted = copy_with_shared_weights(exact)
        convert(converted, wanted)
        variants[label] = _variant(converted.eval(), wanted)
    return variants


def _variant(model: PreTrainedModel, settings: EfficientAttentionConfig | None) -> Variant:
    return Variant(model, settings, {location.name: module for module, location, *_ in attention_modules(model)})


def copy_with_shared_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model that shares its parameters and buffers."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})


class Procedure(NamedTuple):
    """How variants are measured.

    Attributes:
        batch: number of inputs of a forward pass.
        rounds: number of measurements of each time.
        memory: whether to measure memory.
    """

    batch: int = 1
    rounds: int = 3
    memory: bool = True


DEFAULT_PROCEDURE = Procedure()


def measure(
    variants: Mapping[str, Variant], data: ModelData, length: int, procedure: Procedure, bar: "tqdm[Any]"
) -> list[dict[str, Any]]:
    """Measure every variant on inputs of one length; returns dictionaries for JSON."""
    first = data.inputs(length, 0, procedure.batch)
    works = {label: lambda model=one.model: forward(model, first.values) for label, one in variants.items()}
    calls = {label: work for label, work in works.items() if label != EXACT}
    exact, timings = paired(works[EXACT], calls, procedure.rounds, bar)
    timings = {EXACT: exact, **timings}
    peaks = {label: peak_of(work) if procedure.memory else None for label, work in works.items()}
    errors: dict[str, list[float]] = {}
    agreement: dict[str, float] = {}
    if data.is_real:
        errors = _layer_errors(variants, data.inputs(length, 0, _ERROR_INPUTS))
        agreement = _agreement(variants, data, length, procedure.batch)
    bar.update(len(variants) - 1)
    measurements = []
    for label, one in variants.items():
        timing, peak, layers = timings[label], peaks[label], errors.get(label, [])
        settings = {} if one.settings is None else one.settings.to_dict()
        measurements.append(
            {
                "attention": label,
                "method": settings.pop("method", EXACT),
                "settings": {key: value for key, value in settings.items() if key != "version"},
                "length": first.tokens,
                "pixels": first.pixels,
                "batch": len(next(iter(first.values.values()))),
                "seconds": timing.seconds,
                "speed_up": timing.ratio,
                "speed_up_min": timing.ratio_min,
                "speed_up_max": timing.ratio_max,
                "peak_memory_mib": None if peak is None else peak / 2**20,
                "error": _for_json(statistics.fmean(layers)) if layers else None,
                "layer_errors": [_for_json(error) for error in layers],
                "agreement": _for_json(agreement.get(label)),
            }
        )
    return measurements


def _for_json(value: float | None) -> float | None:
    """The value, or None if it is NaN or infinite, which JSON cannot represent."""
    return value if value is not None and math.isfinite(value) else None


def _layer_errors(variants: Mapping[str, Variant], inputs: Inputs) -> dict[str, list[float]]:
    """Errors of the layers in order, averaged over heads and inputs; 0 where a layer is exact."""
    errors: dict[str, dict[Layer | None, list[float]]] = {label: {} for label in variants}

    def visit(call: Call) -> None:
        for label, one in variants.items():
            config = None if one.settings is None else one.settings.for_layer(call.layer)
            error = 0.0
            if config is not None:
                error = call.errors(config, learned_tensors(one.modules[call.name])).mean().item()
            errors[label].setdefault(call.layer, []).append(error)

    exact = variants[EXACT].model
    with capture_attention(exact, visit):
        forward(exact, inputs.values)
    return {label: [statistics.fmean(layers[layer]) for layer in in_order(layers)] for label, layers in errors.items()}


def _agreement(variants: Mapping[str, Variant], data: ModelData, length: int, batch: int) -> dict[str, float]:
    """Agreement with exact attention over all inputs; empty for a masked language model without a mask token."""
    comparisons: dict[str, list[Tensor]] = {label: [] for label in variants}
    for start in range(0, data.rows, batch):
        inputs = data.inputs(length, start, batch)
        if data.task == "masked-lm" and inputs.masked is None:
            return {}
        reference = answers(data.task, variants[EXACT].model, inputs)
        for label, one in variants.items():
            answer = reference if label == EXACT else answers(data.task, one.model, inputs)
            comparisons[label].append(compare(data.task, answer, reference))
    means = {label: torch.cat(values).double().mean().item() for label, values in comparisons.items()}
    if data.task == "causal-lm":
        return {label: math.exp(min(mean, 700.0)) for label, mean in means.items()}
    return means


def answers(task: str, model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """The part of a model's output that is compared between methods.

    Args:
        task: see `data.task_of`.
        model: the model.
        inputs: a batch of B inputs.

    Returns:
        "embedding": (B, W), the normalised mean of the last hidden states. "causal-lm": (B,), the mean negative log
        likelihood of the tokens after the first. "masked-lm": the most likely token at each masked position, one after
        another. "image-classification": (B,), the most likely class.
    """
    if task == "embedding":
        hidden_states: Tensor = forward(model.base_model, inputs.values).last_hidden_state
        return torch.nn.functional.normalize(hidden_states.float().mean(1), dim=1)
    logits: Tensor = forward(model, inputs.values).logits
    if task == "masked-lm":
        return logits[inputs.masked].argmax(1)
    if task == "image-classification":
        return logits.argmax(1)
    targets: Tensor = inputs.values["input_ids"][:, 1:]
    losses = [
        torch.nn.functional.cross_entropy(chunk.float().transpose(1, 2), target, reduction="none")
        for chunk, target in zip(torch.split(logits[:, :-1], 512, 1), torch.split(targets, 512, 1), strict=True)
    ]
    return torch.cat(losses, 1).mean(1)


def compare(task: str, answer: Tensor, reference: Tensor) -> Tensor:
    """Compare answers with those of exact attention: cosines, differences of log likelihoods, or equality (0 or 1)."""
    if task == "embedding":
        return (answer * reference).sum(1).clamp(-1.0, 1.0)
    return answer - reference if task == "causal-lm" else (answer == reference).double()
