"""The speed of generation: the time of the first token after a prompt, and the tokens per second after it."""

import inspect
import statistics
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_efficient_attn.evaluation.timing import timer


class Generation(NamedTuple):
    """Medians over rounds.

    Attributes:
        first_token_seconds: of the pass of the prompt, which fills a new cache and gives the first token.
        tokens_per_second: of the tokens after the first one, all inputs of the batch together.
    """

    first_token_seconds: float
    tokens_per_second: float


@torch.no_grad()
def time_generation(model: PreTrainedModel, input_ids: Tensor, new_tokens: int, rounds: int) -> Generation:
    """Measure greedy generation of at least 2 tokens after prompts (B, N), with the cache that the model makes itself.

    `GenerationMixin.generate` would add its own time, and the penalties and beams of the checkpoint's settings.
    """
    parameters = inspect.signature(model.forward).parameters
    # Earlier versions of Transformers, and models from elsewhere, call the cache `past_key_values`.
    name = "cache" if "cache" in parameters else "past_key_values"
    # Without this, a model computes the logits of all tokens of the prompt, as no generation does.
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def following(ids: Tensor, **options: Any) -> tuple[Tensor, Any]:
        """The most likely next token (B, 1), and the cache."""
        output = model(ids, use_cache=True, **options)
        return output.logits[:, -1:].argmax(-1), getattr(output, name)

    first, later = [], []
    # What the first call of an operator takes does not count.
    token, cache = following(input_ids[:, :16], **last_only)
    following(token, **{name: cache})
    for _ in range(rounds):
        start = timer()
        token, cache = following(input_ids, **last_only)
        first.append(timer() - start)
        start = timer()
        for _ in range(new_tokens - 1):
            token, cache = following(token, **{name: cache})
        later.append(timer() - start)
        del cache  # before the next round fills another one
    return Generation(statistics.median(first), len(input_ids) * (new_tokens - 1) / max(statistics.median(later), 1e-9))
