"""Inputs that do not fit in memory: refused before the work where that is certain, and one clear error otherwise."""

import contextlib
import pathlib
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_efficient_attn.errors import UnsupportedAttentionError

# What the messages of PyTorch's RuntimeErrors about memory on a CPU contain.
_SIGNS = ("can't allocate memory", "not enough memory", "out of memory", "calculation overflowed", "overflow when")


def check_memory(model: PreTrainedModel, length: int, batch: int = 1) -> None:
    """Refuse a batch of inputs whose activations certainly do not fit in the memory of the model's device.

    The estimate is low: the hidden states, queries, keys and values of one layer, and the logits of a language model
    without an encoder; beside an encoder, the decoder's inputs are short. The model is on the device that computes.
    """
    width = 5 * (getattr(model.config, "hidden_size", None) or 1)
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear) and not getattr(model.config, "is_encoder_decoder", False):
        width += head.out_features
    needed, free = batch * length * width * model.dtype.itemsize, free_memory(model.device)
    if needed > free:
        raise UnsupportedAttentionError(
            f"a batch of {batch:,} inputs of {length:,} tokens needs at least {needed / 2**30:,.0f} GiB of memory, and "
            f"{free / 2**30:,.1f} GiB are free: give fewer tokens or smaller batches"
        )


def free_memory(device: torch.device) -> float:
    """Bytes of memory that are free on a device; inf if the system does not tell."""
    known = pathlib.Path("/proc/meminfo")
    if device.type == "cpu":
        lines = known.read_text().splitlines() if known.exists() else []
        return next((float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), torch.inf)
    try:
        return torch.accelerator.get_memory_info(device)[0]
    except RuntimeError:  # not recorded for this kind of device
        return torch.inf


@contextlib.contextmanager
def memory_errors(advice: str) -> Iterator[None]:
    """Turn PyTorch's errors about memory into a MemoryError with advice, such as "give shorter lengths"."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        is_known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not is_known and not any(sign in str(error).lower() for sign in _SIGNS):
            raise
        raise MemoryError(f"the memory is not enough for this measurement: {advice}") from error
