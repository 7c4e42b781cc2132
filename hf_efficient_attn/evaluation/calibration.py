"""`calibrate`: the cheapest method and budget for each layer that keep an error."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from tqdm import tqdm

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.capture import Call, check_methods, forward, look, watching
from hf_efficient_attn.integration.layers import Layer
from hf_efficient_attn.integration.settings import EfficientAttentionConfig
from hf_efficient_attn.methods import MethodConfig, make_config, method_info

# Faster first, at the same number of columns; those that only training makes useful are left out.
_METHODS = (
    ("nystromformer", {}), ("longformer", {}), ("kdeformer", {"near_field": "window"}), ("kdeformer", {}),
)  # fmt: skip
_CAUSAL_METHODS = (("longformer", {}), ("kdeformer", {}))
_BUDGETS = (32, 64, 128, 256, 512, 1024)
# With normal log errors of known spread an unseen sequence stays below this many deviations with probability .977.
_DEVIATIONS = 2.0
# Standard deviation of the logarithm of the error between sequences, where one sequence shows none.
_UNKNOWN_SPREAD = 0.25


class Candidate(NamedTuple):
    """A method at a budget; `columns` is what a query costs."""

    columns: int
    config: MethodConfig


# Errors of the sequences in one layer, by batch and row: the greatest of its modules of means over heads.
Errors = dict[tuple[int, int], float]


def calibrate(
    model: nn.Module,
    batches: "Iterable[Mapping[str, Any] | Tensor]",
    *,
    max_error: float,
    methods: "Sequence[str | MethodConfig] | None" = None,
    budgets: Sequence[int] | None = None,
    seed: int = 0,
) -> EfficientAttentionConfig:
    """The cheapest method and budget for every layer whose error stays below `max_error`; the others stay exact.

    The error of a layer on a sequence is |A - E| / |E| in the operator norm, a mean over heads: E is the output of its
    exact attention, A that of the method on the same queries, keys and values, those of the exact model on `batches`,
    with their masks, and with the random draws that the converted model has. Errors of earlier layers do not reach it.

    What is asked is meant for sequences not seen here, and the cheapest of many candidates is more often one that was
    lucky. So a candidate fits a layer only if exp(mean + 2 s sqrt(1 + 1/n)) of the logarithms of its errors on the n
    sequences is at most `max_error`, a bound that about one unseen sequence in 44 exceeds, and so is the greatest of
    them. s is the standard deviation between sequences, in this layer or pooled over all layers, whichever is larger; a
    single sequence shows none, and .25 is taken. Sequences like those that the model will meet, 8 or more, in number
    and length, are what the result can be trusted for.

    Args:
        model: a Transformers model, or a module that holds some. It is afterwards as it was, to the random state.
        batches: mappings of the model's arguments, such as tokenizers and data loaders give (`attention_mask` too), or
            tensors of its main input. They are held in a list; of the activations, those of one layer and batch.
        max_error: above 0.
        methods: names and configs to choose from; of those that fit at the same cost the first is taken. None for
            those that stand in for softmax attention best: nystromformer, longformer, kdeformer with a window and with
            hashing; for decoders longformer and kdeformer. Where there are fewer keys than queries (BigGAN), without
            longformer.
        budgets: what each query may cost, in columns (`with_budget`). None for 32, 64, 128, ... 1024. Those that reach
            the longest sequence are left out: exact attention costs no more.
        seed: added to the seed of the methods, which goes into the result.

    Returns:
        EfficientAttentionConfig for `hea.convert(model, config)`, naming its layers.

    Raises:
        UnsupportedAttentionError: no batches, `max_error` not above 0, a model whose attention no method can replace, a
            method without causal form for a decoder, one that needs as many keys as queries for a model that has fewer,
            one with learned parameters, a budget that is too small for a
            method, budgets that save nothing, or nothing that fits in any layer.
    """
    if isinstance(max_error, bool) or not isinstance(max_error, (int, float)) or not 0 < max_error < math.inf:
        raise UnsupportedAttentionError(f"calibrate: max_error={max_error!r} must be a number above 0, such as 0.1")
    batches = check_batches(batches)
    shape = look(model, largest(batches))
    candidates = candidates_of(
        methods, budgets, shape.is_causal, shape.longest, seed, is_rectangular=shape.is_rectangular
    )
    table = measure(model, batches, candidates, shape.layers, max_error)
    chosen: dict[MethodConfig, list[Layer]] = {}
    for layer in shape.layers:
        for candidate in candidates:
            if bound(table[layer, candidate], spread(table, candidate, max_error), max_error) <= max_error:
                chosen.setdefault(candidate.config, []).append(layer)
                break
    if not chosen:
        least = min((max(errors.values()), candidate) for (_, candidate), errors in table.items() if errors)
        raise UnsupportedAttentionError(
            f"calibrate: nothing keeps max_error={max_error} in any layer; nearest came {least[1].config.method} at "
            f"{least[1].columns} columns with {least[0]:.3g}. Leave the model exact, or allow a larger budget or error"
        )
    return config_of(chosen)


def config_of(chosen: Mapping[MethodConfig, list[Layer]]) -> EfficientAttentionConfig:
    """Methods with their layers -> the config that names them."""
    if len(chosen) == 1:
        config, layers = next(iter(chosen.items()))
        return EfficientAttentionConfig(config, None, layers)
    return EfficientAttentionConfig(
        layers=[{"layers": layers, **config.to_dict()} for config, layers in chosen.items()]
    )


def check_batches(batches: "Iterable[Mapping[str, Any] | Tensor]") -> list:
    """The batches, in a list that is not empty."""
    if isinstance(batches, (Mapping, Tensor, str)) or not isinstance(batches, Iterable):
        raise UnsupportedAttentionError("batches must be a list or another iterable of batches, not a batch itself")
    found = list(batches)
    if not found:
        raise UnsupportedAttentionError("no batches were given, and nothing can be measured: give some")
    return found


def largest(batches: Sequence):
    """The batch with the most numbers in a row of its tensors."""

    def size(batch) -> int:
        tensors = [batch] if isinstance(batch, Tensor) else [x for x in batch.values() if isinstance(x, Tensor)]
        return max((math.prod(x.shape[1:]) for x in tensors), default=0)

    return max(batches, key=lambda batch: size(batch) if isinstance(batch, (Mapping, Tensor)) else 0)


def candidates_of(
    methods: "Sequence[str | MethodConfig] | None",
    budgets: Sequence[int] | None,
    is_causal: bool,
    longest: int,
    seed: int = 0,
    *,
    is_rectangular: bool = False,
) -> list[Candidate]:
    """Every method at every budget below the longest sequence, cheapest first; raises as `calibrate` does."""
    if methods is None:
        configs = [make_config(name, **values) for name, values in (_CAUSAL_METHODS if is_causal else _METHODS)]
        configs = [config for config in configs if method_info(config.method).rectangular or not is_rectangular]
    else:
        if isinstance(methods, (str, MethodConfig)):
            methods = [methods]
        configs = [make_config(method) for method in methods]
        if not configs:
            raise UnsupportedAttentionError("methods is empty: leave it out for those that need no training")
    check_methods(configs, is_causal, is_rectangular)
    sizes = sorted(set(_BUDGETS if budgets is None else budgets))
    for columns in sizes:
        if isinstance(columns, bool) or not isinstance(columns, int) or columns < 1:
            raise UnsupportedAttentionError(
                f"a budget of {columns!r} columns makes no attention; give integers above 0"
            )
    saving = [columns for columns in sizes if columns < longest]
    if not saving:
        raise UnsupportedAttentionError(
            f"the longest sequence has {longest} tokens, and budgets of {', '.join(map(str, sizes)) or 'nothing'} "
            "columns save nothing: give longer sequences, or smaller budgets"
        )
    found: dict[MethodConfig, int] = {}
    for columns in saving:
        for config in configs:
            sized = config.with_budget(columns)
            if seed and hasattr(sized, "seed"):
                sized = dataclasses.replace(sized, seed=sized.seed + seed)
            # A method without a budget is the same at all of them.
            found.setdefault(sized, columns)
    return [Candidate(columns, config) for config, columns in found.items()]


def measure(
    model: nn.Module, batches: Sequence, candidates: Sequence[Candidate], layers: Sequence[Layer], max_error: float
) -> dict[tuple[int, Candidate], Errors]:
    """Errors of every candidate in every layer; one that exceeded `max_error` there is not measured further."""
    table: dict[tuple[Layer, Candidate], Errors] = {(layer, c): {} for layer in layers for c in candidates}
    left = {layer: list(candidates) for layer in layers}
    found: dict[tuple[int, Candidate], dict[int, float]] = {}

    def visit(call: Call) -> None:
        if call.layer is None:
            return
        there = None if call.mask is None or call.query.shape[2] != call.key.shape[2] else call.mask.any(1).tolist()
        for candidate in left[call.layer]:
            errors = found.setdefault((call.layer, candidate), {})
            for row, error in enumerate(call.errors(candidate.config).mean(1).tolist()):
                if there is None or there[row]:
                    errors[row] = max(error, errors.get(row, 0.0))

    with watching(model, visit):
        for number, batch in enumerate(tqdm(batches, desc="calibrating", unit="batch", disable=None, leave=False)):
            found.clear()
            forward(model, batch)
            for key, errors in found.items():
                table[key].update({(number, row): error for row, error in errors.items()})
                if any(not error <= max_error for error in errors.values()):
                    left[key[0]].remove(key[1])
    return table


def _logs(errors: Errors, max_error: float) -> list[float]:
    # Errors far below what is asked are all the same, and 0 has no logarithm.
    return [math.log(max(error, max_error / 100)) for error in errors.values()]


def spread(table: Mapping[tuple[int, Candidate], Errors], candidate: Candidate, max_error: float) -> float:
    """Standard deviation of a candidate's log errors between sequences, pooled over the layers."""
    squares, count = 0.0, 0
    for (_, one), errors in table.items():
        if one == candidate and len(errors) > 1:
            logs = _logs(errors, max_error)
            squares, count = squares + statistics.variance(logs) * (len(logs) - 1), count + len(logs) - 1
    return math.sqrt(squares / count) if count else _UNKNOWN_SPREAD


def bound(errors: Errors, pooled: float, max_error: float) -> float:
    """What the error on an unseen sequence will hardly exceed, as `calibrate` says it; inf where nothing is known."""
    if not errors or not all(map(math.isfinite, errors.values())):
        return math.inf
    logs = _logs(errors, max_error)
    own = statistics.stdev(logs) if len(logs) > 1 else 0.0
    wide = _DEVIATIONS * max(own, pooled) * math.sqrt(1 + 1 / len(logs))
    return max(math.exp(statistics.fmean(logs) + wide), *errors.values())
