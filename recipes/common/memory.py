"""Extra memory of one attention call, measured as the peak resident memory of child processes.

`extra_memory` compares two child processes with the same imports and the same inputs. Only one of them runs the
attention. The difference of their peaks is the memory that attention needs, its output included, whichever library
allocates it. Both multiply small matrices first, since BLAS loads about 75 MB of code and buffers at its first product:
that is the cost of a process, not of a call.
"""

import contextlib
import functools
import json
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import hf_efficient_attn as hea
from hf_efficient_attn.evaluation.timing import peak_bytes, peak_of
from hf_efficient_attn.integration.settings import EXACT as EXACT
from hf_efficient_attn.methods import MethodConfig, method_info

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Case(NamedTuple):
    """What is measured: self-attention on random inputs."""

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
    if config is None:
        with _kernel(case):
            out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=case.causal)
    else:
        out = hea.attention(config, *inputs, is_causal=case.causal)
    if case.backward:
        for x in inputs:
            x.grad = None
        out.backward(torch.ones_like(out))


def _kernel(case: Case) -> contextlib.AbstractContextManager[None]:
    """On CUDA, flash attention in half precision: PyTorch's choice depends on its version and on the GPU."""
    if case.device.startswith("cuda") and case.dtype != "float32":
        return sdpa_kernel(SDPBackend.FLASH_ATTENTION)
    return contextlib.nullcontext()


def extra_memory(config: MethodConfig | None, case: Case) -> float | None:
    """Extra memory of one call, as a multiple of the bytes of its three inputs; None where it is not recorded.

    On an accelerator its allocator records it, in this process.
    """
    if case.device != "cpu":
        inputs = make_inputs(case)
        peak = peak_of(lambda: run_once(config, inputs, case), torch.device(case.device))
        return None if peak is None else peak / case.input_bytes
    described = None if config is None else config.to_dict()
    idle = _peak_of_child(json.dumps({"run": False, "case": case}))
    busy = run_child("recipes.common.memory", json.dumps({"run": True, "config": described, "case": case}))
    return (busy - idle) / case.input_bytes


def run_child(module: str, *arguments: str) -> int:
    """Run a module in a child process that measures its own peak memory, and return the bytes that it prints."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"the child process that measures memory failed:\n{done.stderr}")
    return int(done.stdout.split()[-1])


@functools.lru_cache(maxsize=8)
def _peak_of_child(case: str) -> int:
    """Peak of a child that only makes the inputs. All methods of a case share it."""
    return run_child("recipes.common.memory", case)


def config_of(described: dict[str, Any] | None) -> MethodConfig | None:
    """The config that `to_dict` described; None for exact attention."""
    return None if described is None else method_info(described["method"]).config_class.from_dict(described)


def main() -> None:
    """The child process: prints its peak memory in bytes."""
    given = json.loads(sys.argv[1])
    case = Case(*given["case"])
    torch.set_num_threads(case.threads)
    square = torch.ones(8, 256, 256, dtype=getattr(torch, case.dtype))
    torch.softmax(square @ square, -1).exp()
    inputs = make_inputs(case)
    if given["run"]:
        run_once(config_of(given["config"]), inputs, case)
    print(peak_bytes())


if __name__ == "__main__":
    main()
