"""`hea.calibrate`: for each layer, the fastest method and budget whose error stays below a limit."""

import functools
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from hf_efficient_attn.errors import UnsupportedAttentionError, check_positive, shown, warn
from hf_efficient_attn.evaluation import capture, choices, timing
from hf_efficient_attn.evaluation.defaults import Candidate, configs_of, make_candidates, refuse_short
from hf_efficient_attn.integration.layers import Layer, in_order
from hf_efficient_attn.integration.settings import EfficientAttentionConfig
from hf_efficient_attn.methods import MethodConfig, make_config, methods_with
from hf_efficient_attn.ops.backends.devices import widened

logger = logging.getLogger(__name__)

# Of a call that takes less than this the first one does not count.
_SHORT_SECONDS = 0.1
HOW_TO_SAVE = (
    "Measure longer sequences, on which methods save more (on a CPU from about 2,048 tokens on), allow a larger error, "
    "or keep the model exact"
)


def calibrate(
    model: nn.Module,
    batches: Iterable[capture.Batch],
    *,
    max_error: float,
    methods: "Sequence[str | MethodConfig] | None" = None,
    budgets: Sequence[int] | None = None,
    seed: int = 0,
) -> EfficientAttentionConfig:
    """Choose the fastest method and budget for every layer whose error stays below `max_error`.

    The cost of a candidate is the time that it takes in the layer, on this machine and on the longest of `batches`. So
    let nothing else run meanwhile; another run can choose differently among candidates that take about as long. Layers
    in which no candidate stays below the limit, or all that do are slower than exact attention, keep exact attention.

    `methods=["auto"]` calibrates `auto`. Where it may not decide by the data of a call (in training and in decoders),
    all heads of a layer then have the columns that are accepted here, or exact attention where no budget is accepted.
    In all other calls `auto` decides for each head, with these columns first and `max_error` as its bound.

    The error of a layer on a sequence is |A - E| / |E| in the operator norm, averaged over heads: E is the output of
    exact attention, and A that of the method, for the layer's queries, keys and values in the exact model on `batches`.
    So it does not include the errors of earlier layers. Masks and random draws are those of the converted model.

    In an encoder-decoder the layers of the two stacks have names, such as "encoder.layers.0", and methods without a
    causal form are candidates for the encoder only. Cross attention belongs to its layer of the decoder.

    The limit is meant for unseen sequences, and the fastest of many candidates may have been chosen by chance. A
    candidate is therefore accepted only if its largest error is at most `max_error`, and if exp(mean + 2 s
    sqrt(1 + 1/n)) is, for the logarithms of its errors on the n sequences. About one unseen sequence in 44 exceeds this
    bound. s is the standard deviation between sequences, in this layer or pooled over all layers, whichever is larger.
    The pooled one counts an assumed deviation as one more observation, because sequences that happen to be alike would
    otherwise promise too much; for a single sequence it is all that is known. It is .25 for pictures and for texts of
    up to 512 tokens, and less for longer texts, by the fourth root of their length: .125 for 8,192 tokens. The result
    is reliable for 8 or more sequences that resemble the model's later inputs in kind and length. Errors grow with the
    length: a model that keeps a limit of .2 at 512 tokens can have errors of .5 at 2,048, so it warns of longer ones.

    Args:
        model: a Transformers model, or a module that contains some. It is unchanged afterwards, and so is the random
            state.
        batches: mappings of the model's arguments as tokenizers and data loaders give them (`attention_mask` included),
            or tensors of its main input. All batches are held in memory, but the activations of only one layer and
            batch.
        max_error: the limit, above 0.
        methods: names and configs to choose from. None for the default methods (`MethodConfig.default_rank`) that
            support the model; in models of pictures, with a global first token where they have one. `nearfar` is tried
            with near keys in all heads, in some and in none, unless a config says another `near_share` than .25.
        budgets: costs per query in columns (`with_budget`); None for 32, 64, 128, ..., 1024, and each method as it is
            given, or with its defaults. Budgets that reach the length of the longest sequence, without its padding, are
            left out, since exact attention costs no more.
        seed: added to the seed of every method; the config that is returned contains the sum.

    Returns:
        EfficientAttentionConfig for `hea.convert(model, config)`, which names its layers. Its `calibrated_length` is
        the number of tokens of the longest sequence in `batches`, without padding.

    Logs the relative error of the last hidden states, or of the logits, on the longest of `batches` at level INFO.

    Warns:
        UserWarning: attention with the result is not faster than exact attention on the longest of `batches`.

    Raises:
        UnsupportedAttentionError: no batches; `max_error` not above 0; a model whose attention cannot be replaced; a
            method that does not support the model (no causal form for a decoder, or as many keys as queries needed
            where there are fewer); a method with learned parameters; a budget too small for a method; no budget below
            the length of the longest sequence; or no candidate that is accepted in any layer.
    """
    check_positive("max_error", max_error, is_count=False)
    if isinstance(batches, (Mapping, Tensor, str)) or not isinstance(batches, Iterable):
        given = "a batch itself" if isinstance(batches, (Mapping, Tensor)) else shown(batches)
        raise UnsupportedAttentionError(f"batches must be a list or another iterable of batches, not {given}")
    if not (batches := list(batches)):
        raise UnsupportedAttentionError("there are no batches, so that nothing can be measured: give at least one")
    longest_batch = max(batches, key=_size)
    summary = capture.summarize_attention(model, longest_batch)
    candidates = make_candidates(methods, budgets, summary, seed, each_layer=True)
    study = Study(candidates, summary)
    with capture.capture_attention(model, study.add):
        for batch in tqdm(batches, desc="calibrating", unit="batch", disable=None, leave=False):
            capture.forward(model, batch)
            study.end_batch(max_error)
    table, tokens = study.table, study.tokens
    # The length is known without its padding only now. What computes all sequences exactly says nothing about others.
    longest = max(tokens.values(), default=0)
    useful = [one for one in candidates if max(one.columns or 0, one.config.to_measure().exact_length) < longest]
    if not useful:
        refuse_short(longest, sorted({one.columns for one in candidates if one.columns is not None}))
    measure = functools.partial(choices.measure_seconds, model, longest_batch)
    chosen = choices.choose_each(choices.accept(table, useful, max_error, study.assumed_spread), study.seconds, measure)
    # Where no budget is accepted, a method that decides in each call can still be used.
    for config in configs_of(methods):
        undecided = config.calibrated(max_error, accepted=False)
        if undecided is not None:
            undecided = make_config(undecided, seed=getattr(config, "seed", 0) + seed)
            rest = choices.Choice(Candidate(0, undecided), undecided, math.nan, math.nan)
            chosen |= {layer: rest for layer in in_order(tokens) if layer not in chosen}
    if not chosen:
        smallest = min(max(errors.values()) for errors in table.values() if errors)
        raise UnsupportedAttentionError(
            f"no method keeps max_error={max_error} in any layer; the smallest error is {smallest:.3g}. Keep the model "
            "exact, or allow a larger budget or error"
        )
    settings = make_settings(chosen, max(tokens[layer] for layer in chosen))
    speed = measure_speed(model, longest_batch, settings)
    if not speed.is_gain:
        warn(
            f"at {settings.calibrated_length} tokens this choice saves nothing: its attention is {speed.ratio:.2g} "
            f"times as fast as exact attention on this machine ({speed.ratio_min:.2g} to {speed.ratio_max:.2g} in "
            f"{choices.ROUNDS} rounds). {HOW_TO_SAVE}"
        )
    off = measure_output_error(model, longest_batch, settings)
    if off is not None:
        logger.info(f"calibrated at {settings.calibrated_length} tokens: the model's output is off by {off:.3g}")
    return settings


def make_settings(chosen: Mapping[Layer, choices.Choice], calibrated_length: int) -> EfficientAttentionConfig:
    """The settings of a model from the choice for each layer."""
    layers: dict[MethodConfig, list[Layer]] = {}
    for layer, choice in chosen.items():
        layers.setdefault(choice.config, []).append(layer)
    mix = [{"layers": named, **config.to_dict()} for config, named in layers.items()]
    return EfficientAttentionConfig(layers=mix, calibrated_length=calibrated_length)


def measure_speed(model: nn.Module, batch: capture.Batch, settings: EfficientAttentionConfig) -> timing.Timing:
    """How many times faster the attention of all layers is with `settings` than exact attention, on one sequence.

    It is the longest of the batch. Layers that stay exact are included, projections and other parts of the model not.
    """
    seconds: list[list[list[float]]] = []  # of the attention with `settings`, and exact, in each round of each layer

    def visit(call: capture.Call) -> None:
        one = call.longest()
        works = [choices.work_of(one, settings.for_layer(call.location.layer, call.name)), one.compute_exact]
        seconds.append(choices.times_of(works))

    with capture.capture_attention(model, visit):
        capture.forward(model, batch)
    own, exact = torch.tensor(seconds, dtype=torch.float64).sum(0).T.tolist()
    return timing.summary(list(zip(own, exact, strict=True)))


def measure_output_error(model: nn.Module, batch: capture.Batch, settings: EfficientAttentionConfig) -> float | None:
    """|S - E| / |E| of the last hidden states, or of the logits, in the Frobenius norm. None if there are none.

    Tokens that the batch masks do not count. Unlike the errors of layers, this contains what later layers make of the
    errors of earlier ones.
    """

    def compute(call: capture.Call) -> Tensor:
        config = call.chosen(settings.for_layer(call.location.layer, call.name))
        return capture.exact_attention_of(call) if config is None else call.compute(config)

    states = []
    for attention in (capture.exact_attention_of, compute):
        with capture.capture_attention(model, lambda call: None, attention):
            output = capture.forward(model, batch)
        found = getattr(output, "last_hidden_state", getattr(output, "logits", None))
        if not isinstance(found, Tensor):
            return None
        valid = capture.valid_tokens(batch, found, of_decoder=hasattr(output, "encoder_last_hidden_state"))
        states.append(widened(found[valid]))
    return float((states[1] - states[0]).norm() / states[0].norm())


def _size(batch: capture.Batch) -> tuple[int, int]:
    """The tokens without padding and the numbers of the longest sequence of a batch; 0 for what `forward` refuses."""
    values = batch if isinstance(batch, Mapping) else {"": batch}
    size = max((math.prod(x.shape[1:]) for x in values.values() if isinstance(x, Tensor) and x.ndim), default=0)
    mask = values.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return size, size
    return max(mask.bool().sum(1).tolist(), default=0), size


class Study:
    """Errors and times of methods in the layers of a model, which are collected call by call.

    `table` has the errors; of several calls in a layer, such as self and cross attention, the largest. `seconds` has
    the time of a sequence and call, and `tokens` the tokens of the longest sequence in each layer.
    """

    def __init__(self, candidates: Sequence[Candidate], summary: capture.AttentionSummary) -> None:
        self.table: choices.ErrorTable = {}
        self._taken: choices.Seconds = defaultdict(float)
        self._sequences = Counter[tuple[Layer, Candidate | None]]()
        self.tokens = Counter[Layer]()
        self._fewest = summary.max_kv_len  # tokens of a sequence
        self._is_text = not summary.takes_pictures
        self._batch = 0
        causal = [one for one in candidates if one.config.method in methods_with("causal")]
        self._candidates = {
            call.layer: list(causal if call.layer in summary.causal_layers else candidates) for call in summary.calls
        }

    @property
    def seconds(self) -> choices.Seconds:
        """The seconds of candidates in the layers, and of exact attention (None)."""
        return {key: taken / self._sequences[key] for key, taken in self._taken.items()}

    @property
    def assumed_spread(self) -> float:
        """What to assume of the spread between sequences, as `accept` takes it."""
        return choices.assumed_spread(self._fewest, is_text=self._is_text)

    def add(
        self, call: capture.Call, some: Sequence[Candidate] | None = None, first: int = 0
    ) -> dict[Candidate, Tensor]:
        """Measure the methods in a call: candidate -> errors (B, H).

        `some` are the candidates to measure; None for all. `first` is the index in the batch of the first sequence.
        """
        found: dict[Candidate, Tensor] = {}
        taken: dict[Candidate | None, float] = {None: _first_time(call.compute_exact)[1]}
        for one in self._candidates[call.layer]:
            if some is not None and one not in some:
                continue
            config = one.config.to_measure()
            output, taken[one] = _first_time(choices.work_of(call, config))
            found[one] = call.errors(config, None, output)
        if call.layer is None:
            return found
        for candidate, seconds in taken.items():
            self._taken[call.layer, candidate] += seconds
            self._sequences[call.layer, candidate] += len(call.query)
        self.tokens[call.layer] = max(call.tokens, self.tokens[call.layer])
        self._fewest = min([self._fewest, *(call.rows(slice(b, b + 1)).tokens for b in call.sequences)])
        for candidate, errors in found.items():
            known = self.table.setdefault((call.layer, candidate), {})
            for b in call.sequences:
                index = self._batch, first + b
                known[index] = max(errors[b].mean().item(), known.get(index, 0.0))
        return found

    def end_batch(self, max_error: float) -> None:
        """Go on to the next batch, and measure no longer in a layer what exceeds a limit there in some sequence."""
        self._batch += 1
        for (layer, candidate), errors in self.table.items():
            if candidate in self._candidates[layer] and not all(error <= max_error for error in errors.values()):
                self._candidates[layer].remove(candidate)


def _first_time(work: timing.Work) -> tuple[Any, float]:
    """The output of a call, and its seconds."""
    begin = timing.timer()
    output = work()
    seconds = timing.timer() - begin
    return output, seconds if seconds > _SHORT_SECONDS else min(seconds, timing.time_calls(work))
