"""The speed of generation: the time of the first token after a prompt, and the tokens per second after it."""

import inspect
import statistics
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.benchmark import timer
from transformers import PreTrainedModel


class Generation(NamedTuple):
    """Medians over rounds.

    Attributes:
        first_token_seconds: of the pass of the prompt, which fills a new cache and gives the first token.
        tokens_per_second: of the tokens after the first one, all inputs of the batch together.
    """

    first_token_seconds: float
    tokens_per_second: float


def prompt_length(tokens: int, new_tokens: int) -> int:
    """The length of the prompt, so that prompt and new tokens together are at most `tokens`; 0 if they do not fit."""
    return max(0, tokens - new_tokens)


@torch.no_grad()
def time_generation(model: PreTrainedModel, input_ids: Tensor, new_tokens: int, rounds: int) -> Generation:
    """Measure greedy generation with the cache that the model makes itself.

    Args:
        model: a causal language model, on the device that computes.
        input_ids: the prompts, (B, N).
        new_tokens: number of tokens to generate after each prompt, at least 2.
        rounds: number of measurements.
    """
    parameters = inspect.signature(model.forward).parameters
    # Earlier versions of Transformers, and models from elsewhere, call the cache `past_key_values`.
    name = "cache" if "cache" in parameters else "past_key_values"
    # Without this, a model computes the logits of all tokens of the prompt, as no generation does.
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
    first, later = [], []
    # What the first call of an operator takes does not count.
    _, cache = _next(model(input_ids[:, :16], use_cache=True, **last_only), name)
    model(input_ids[:, :1], use_cache=True, **{name: cache})
    for _ in range(rounds):
        start = timer()
        token, cache = _next(model(input_ids, use_cache=True, **last_only), name)
        first.append(timer() - start)
        start = timer()
        for _ in range(new_tokens - 1):
            token, cache = _next(model(token, use_cache=True, **{name: cache}), name)
        later.append(timer() - start)
        del cache  # before the next round fills another one
    return Generation(statistics.median(first), len(input_ids) * (new_tokens - 1) / max(statistics.median(later), 1e-9))


def _next(output: Any, name: str) -> tuple[Tensor, Any]:
    """The most likely next token (B, 1), and the cache."""
    return output.logits[:, -1:].argmax(-1), getattr(output, name)
