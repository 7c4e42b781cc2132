"""Benchmarks: the times of a call and of its reference, and self-attention of random inputs."""

import contextlib
import pathlib
import statistics
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import hf_efficient_attn as hea
from hf_efficient_attn.evaluation.timing import Timing, Work, calls_to_time, peak_of, summary, time_calls
from hf_efficient_attn.integration.settings import EXACT as EXACT
from hf_efficient_attn.methods import MethodConfig

ROOT = pathlib.Path(__file__).resolve().parents[2]


def paired(reference: Work, calls: Mapping[str, Work], rounds: int) -> tuple[Timing, dict[str, Timing]]:
    """Measure the time of a reference, and of every call between two runs of the reference, in several rounds.

    So slow changes in the load of the machine cancel. Returns the timing of the reference, and label -> timing of the
    call.
    """
    number = calls_to_time(reference)
    numbers = {label: calls_to_time(call) for label, call in calls.items()}
    times: dict[str, list[tuple[float, float]]] = {label: [] for label in calls}
    references = []
    for _ in range(rounds):
        references.append(time_calls(reference, number))
        for label, call in calls.items():
            taken = time_calls(call, numbers[label])
            references.append(time_calls(reference, number))
            times[label].append((taken, statistics.fmean(references[-2:])))
    return summary([(x, x) for x in references]), {label: summary(pairs) for label, pairs in times.items()}


class Case(NamedTuple):
    """What is measured: self-attention on random inputs, or on the inputs of a model's layers (`source`)."""

    length: int
    batch: int = 1
    num_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    threads: int = 2
    causal: bool = False
    backward: bool = False
    seed: int = 0
    device: str = "cpu"
    source: str = "random"
    budget: int | None = None  # of the methods, in columns; None for their hyperparameters as they are

    def __str__(self) -> str:
        """The sizes, without the setting."""
        where = "threads" if self.device == "cpu" else "device"
        return ", ".join(f"{name} {getattr(self, name)}" for name in ("batch", "num_heads", "head_dim", "dtype", where))

    @property
    def input_bytes(self) -> int:
        """The bytes of query, key and value."""
        size = torch.finfo(getattr(torch, self.dtype)).bits // 8
        return 3 * self.batch * self.num_heads * self.length * self.head_dim * size


def make_inputs(case: Case) -> tuple[torch.Tensor, ...]:
    """Query, key and value (B, H, N, D) of standard normal numbers."""
    generator = torch.Generator(case.device).manual_seed(case.seed)
    shape, dtype = (case.batch, case.num_heads, case.length, case.head_dim), getattr(torch, case.dtype)
    inputs = tuple(torch.randn(shape, generator=generator, dtype=dtype, device=case.device) for _ in range(3))
    return tuple(x.requires_grad_(case.backward) for x in inputs)


def run_once(config: MethodConfig | None, inputs: tuple[torch.Tensor, ...], case: Case) -> None:
    """One forward pass, and a backward pass if the case says so, with a method or with torch's exact attention."""
    if config is not None:
        out = hea.attention(config, *inputs, is_causal=case.causal)
    else:
        # On CUDA, flash attention in half precision: PyTorch's choice depends on its version and on the GPU.
        is_flash = case.device.startswith("cuda") and case.dtype != "float32"
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if is_flash else contextlib.nullcontext():
            out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=case.causal)
    if case.backward:
        for x in inputs:
            x.grad = None
        out.backward(torch.ones_like(out))


def extra_memory(config: MethodConfig | None, case: Case) -> float | None:
    """What PyTorch allocates in a call, as a multiple of the bytes of its three inputs; None if not recorded."""
    inputs = make_inputs(case)
    peak = peak_of(lambda: run_once(config, inputs, case), torch.device(case.device))
    return None if peak is None else peak / case.input_bytes
