"""The plan of a benchmark: its steps, with durations that are estimated from one short pass."""

import math
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_efficient_attn.evaluation.capture import forward
from hf_efficient_attn.evaluation.comparison import ERROR_INPUTS, Procedure, chunk_label
from hf_efficient_attn.evaluation.data import ModelData
from hf_efficient_attn.evaluation.progress import Step
from hf_efficient_attn.evaluation.timing import LONG_SECONDS, timer
from hf_efficient_attn.integration.models import attention_modules
from hf_efficient_attn.integration.settings import EXACT

# Number of tokens of the pass that is timed for the estimates.
_PROBED_TOKENS = 512
# About as many keys per query as the methods have at their default budgets.
_METHOD_KEYS = 512
# Short passes are repeated for about this time in seconds.
_SHORTEST_TIMING = 0.1


class PassTimes:
    """Estimated seconds of forward passes at any length, from the time of a short pass of `batch` inputs.

    The time is taken to be proportional to the number of multiplications: for each token, one with every weight, and
    two with every hidden dimension of every layer for each key that it attends to. The model computes exact attention,
    on its device; `tokens` is a length that will be measured.
    """

    def __init__(self, model: PreTrainedModel, data: ModelData, tokens: int, batch: int) -> None:
        layers = sum(1 for _ in attention_modules(model))
        self._per_key = 2 * layers * (getattr(model.config, "hidden_size", None) or 0)
        modules = [module for module in model.modules() if not isinstance(module, nn.Embedding)]
        self._per_token = sum(x.numel() for module in modules for x in module.parameters(recurse=False))
        inputs = data.inputs(min(tokens, _PROBED_TOKENS) if data.is_text else tokens, 0, batch)
        with torch.no_grad():
            forward(model, inputs.values)
            start = timer()
            forward(model, inputs.values)
        self._unit = (timer() - start) / max(1.0, self._products(inputs.tokens, inputs.tokens))

    def _products(self, tokens: int, keys: int) -> float:
        return float(tokens * (self._per_token + self._per_key * keys))

    def exact(self, tokens: int) -> float:
        """Seconds of a pass of exact attention."""
        return self._unit * self._products(tokens, tokens)

    def method(self, tokens: int) -> float:
        """Seconds of a pass of a method with its default hyperparameters."""
        return self._unit * self._products(tokens, min(tokens, _METHOD_KEYS))


def plan_of(
    times: PassTimes,
    lengths: Sequence[int],
    labels: Sequence[str],
    procedure: Procedure,
    data: ModelData,
    chunk: int | None = None,
) -> list[Step]:
    """The steps of a benchmark: for each length exact attention, then each method. The key is (length, label).

    With `chunk`, texts that are longer are also divided into pieces (`comparison.Variant`).
    """
    batches = math.ceil(data.rows / procedure.batch) if data.is_real else 0

    def timed(seconds: float) -> float:
        return max(seconds, min(_SHORTEST_TIMING, 50 * seconds))

    def passes(seconds: float, rounds: int = procedure.rounds) -> float:
        # One more, and those for the agreement, are not timed.
        return rounds * timed(seconds) + (1 + max(0, batches - rounds)) * seconds

    steps = []
    for length in lengths:
        exact, method = times.exact(length), times.method(length)
        errors = min(ERROR_INPUTS, data.rows) / procedure.batch * (exact + len(labels) * method / 2)
        # Generation passes the prompt once a round. Its other tokens take little time next to that.
        generated = procedure.rounds if data.task == "causal-lm" and procedure.new_tokens > 1 else 0
        seconds = passes(exact, 1 if exact > LONG_SECONDS else procedure.rounds)
        seconds += generated * exact + (errors if data.is_real else 0.0)
        steps.append(Step(f"{EXACT} at {length} tokens", seconds, (length, EXACT)))
        seconds = passes(method) + generated * method + timed(exact)
        steps += [Step(f"{label} at {length} tokens", seconds, (length, label)) for label in labels]
        if chunk is not None and length > chunk:
            label, seconds = chunk_label(chunk), passes(length / chunk * times.exact(chunk))
            steps.append(Step(f"{label} at {length} tokens", seconds, (length, label)))
    return steps
