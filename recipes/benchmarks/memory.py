"""Extra memory of one call, by the peak resident memory of child processes.

`extra_memory` compares two children with the same imports and the same inputs, of which one runs the attention; the
difference of their peaks is what the attention takes, its output included, whoever allocates it. Both multiply small
matrices first: the code and buffers that BLAS loads at its first product, some 75 MB, are the price of a process, not
of a call.
"""

import functools
import json
import pathlib
import subprocess
import sys
from typing import Any

import torch

import hf_efficient_attn as hea
from hf_efficient_attn.evaluation.timing import peak_bytes
from hf_efficient_attn.methods import MethodConfig, method_info

EXACT = "sdpa"


def make_inputs(case: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Query, key and value (batch, heads, length, width) of standard normal numbers."""
    generator = torch.Generator().manual_seed(case["seed"])
    shape, dtype = (case["batch"], case["heads"], case["length"], case["width"]), getattr(torch, case["dtype"])
    inputs = tuple(torch.randn(shape, generator=generator, dtype=dtype) for _ in range(3))
    return tuple(x.requires_grad_(case["backward"]) for x in inputs)


def run_once(config: MethodConfig | None, inputs: tuple[torch.Tensor, ...], case: dict[str, Any]) -> None:
    """One forward pass (and backward pass) by a method, or by torch's exact attention."""
    if config is None:
        out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=case["causal"])
    else:
        out = hea.attention(config, *inputs, is_causal=case["causal"])
    if case["backward"]:
        for x in inputs:
            x.grad = None
        out.backward(torch.ones_like(out))


def extra_memory(config: MethodConfig | None, case: dict[str, Any]) -> float:
    """Extra memory of one call, as a multiple of the bytes of its three inputs."""
    described = None if config is None else config.to_dict()
    idle = _idle(json.dumps({"run": False, **case}))
    busy = _child(json.dumps({"run": True, "config": described, **case}))
    size = torch.finfo(getattr(torch, case["dtype"])).bits // 8
    return (busy - idle) / (3 * case["batch"] * case["heads"] * case["length"] * case["width"] * size)


def _child(case: str) -> int:
    """Peak of a child process."""
    command = [sys.executable, "-m", "recipes.benchmarks.memory", case]
    root = pathlib.Path(__file__).resolve().parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    if done.returncode:
        raise RuntimeError(f"the child that measures memory failed:\n{done.stderr}")
    return int(done.stdout)


# All methods of a case share the child that only makes the inputs.
_idle = functools.lru_cache(maxsize=8)(_child)


def main() -> None:
    case = json.loads(sys.argv[1])
    torch.set_num_threads(case["threads"])
    square = torch.ones(8, 256, 256, dtype=getattr(torch, case["dtype"]))
    torch.softmax(square @ square, -1).exp()
    inputs = make_inputs(case)
    if case["run"]:
        values = case["config"]
        config = None if values is None else method_info(values["method"]).config_class.from_dict(values)
        run_once(config, inputs, case)
    print(peak_bytes())


if __name__ == "__main__":
    main()
