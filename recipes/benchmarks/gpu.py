"""Check and measure all methods on one accelerator in one run: promises, errors, times and memory.

    python -m recipes.benchmarks.gpu --minutes 8 -o OUT
    python -m recipes.benchmarks.gpu --device cpu --length 2048,4096 --minutes 2 -o OUT      (to try it)

The run has four parts, and writes gpu.json and gpu.md into OUT after each of their steps:

1. Promises: output and gradient of every method are finite and those of the CPU, masked keys have no influence, nor
   have later tokens, and a batch row is computed as if alone.
2. Errors: the relative error (operator norm) in the dtype of the measurement, against exact attention in float32.
3. The model of the time (`recipes.benchmarks.roofline`): its constants as this device has them, and profiles of
   `nystromformer` and `nearfar`: the time of the call, what the device is busy, and the kernels that take most.
4. Times: forward, and forward and backward, 16 heads of 64, from 8,192 to 1,048,576 tokens in bfloat16 (`--dtype`), in
   float32 and in the causal form up to 65,536. Every method is compared with each exact kernel that the device has:
   flash attention (version 3 if `flash_attn_interface` is installed), cuDNN's, and the memory-efficient one. On CUDA a
   method is also measured without the Triton kernels of this package ("plain", at 65,536 tokens). All lengths are
   measured once, and then in three rounds. Lengths that would not end in time are left out.

On MPS, PyTorch's exact attention forms all scores, and is wrong if there are more than 2^31 of them (11,585 tokens with
16 heads). Such a call is never made here: exact attention is left out of longer lengths.

Duration: what `--minutes` says. Expected: the predictions of docs/guides/gpus.md, up to a third.
"""

import contextlib
import functools
import importlib.util
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import typer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import hf_efficient_attn as hea
from hf_efficient_attn.cli import Device, main_of, parse_device, parse_dtype, parse_lengths, parse_methods
from hf_efficient_attn.evaluation.progress import Execution, Step, carry_out
from hf_efficient_attn.evaluation.timing import calls_to_time, processor_name, time_calls, use_device
from hf_efficient_attn.io.json import write_json
from hf_efficient_attn.io.writing import check_folder
from hf_efficient_attn.methods import MethodConfig, method_info
from recipes.common import commands
from recipes.common.gpu_model import H100
from recipes.common.memory import Case, extra_memory, make_inputs, run_once

app = commands.new_app()

LENGTHS = [2**n for n in range(13, 21)]
# Scores of a call beyond which PyTorch's exact attention is wrong on MPS.
_MPS_SCORES = 2**31
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}  # fmt: skip
_ROUNDS = 3
# Float32, causal forms, and calls without Triton's kernels are measured up to this length, and at it.
_LENGTH = 65536
_PROFILED = ("nystromformer", "nearfar")


@contextlib.contextmanager
def exact_kernel(name: str) -> Iterator[None]:
    """Let `scaled_dot_product_attention` use one kernel within the context; "default" is PyTorch's choice."""
    with contextlib.ExitStack() as stack:
        if name == "flash 3":
            torch.nn.attention.activate_flash_attention_impl("FA3")
            stack.callback(torch.nn.attention.restore_flash_attention_impl)
        if name != "default":
            stack.enter_context(sdpa_kernel(_BACKENDS[name.removesuffix(" 3")]))
        yield


def exact_kernels(device: torch.device) -> list[str]:
    """The exact kernels of a kind of device."""
    if device.type != "cuda":
        return ["default"]
    return [*_BACKENDS, *(["flash 3"] if importlib.util.find_spec("flash_attn_interface") else [])]


def promises(config: MethodConfig, device: torch.device) -> dict[str, bool]:
    """Whether a method keeps its promises on a device, in float32 with 300 tokens: the name of each and the answer."""
    generator, is_causal = torch.Generator().manual_seed(0), method_info(config.method).causal
    tensors = [torch.randn(2, 4, 300, 32, generator=generator) for _ in range(3)]
    mask = torch.arange(300) < torch.tensor([[300], [210]])

    def run(tensors: list[Tensor], mask: Tensor, where: torch.device, *, causal: bool) -> tuple[Tensor, Tensor]:
        leaves = [x.to(where).requires_grad_() for x in tensors]
        out = hea.attention(config, *leaves, attention_mask=mask.to(where), is_causal=causal)
        grads = torch.autograd.grad(out.square().sum(), leaves)
        return out.detach().cpu(), torch.cat(grads, 1).cpu()

    found = {"agrees with the CPU": True, "finite": True}
    for causal in (False, True)[: 1 + is_causal]:
        results = run(tensors, mask, device, causal=causal)
        for one, other in zip(results, run(tensors, mask, torch.device("cpu"), causal=causal), strict=True):
            found["finite"] &= bool(one.isfinite().all())
            found["agrees with the CPU"] &= bool((one - other).norm() <= 1e-3 * other.norm())
    out = run(tensors, mask, device, causal=False)[0]
    spoilt = [x.masked_fill(~mask[:, None, :, None], torch.nan) for x in tensors[1:]]
    padded = run([tensors[0], *spoilt], mask, device, causal=False)[0]
    kept = mask[:, None].expand(-1, 4, -1)
    found["padding never leaks"] = torch.equal(padded[kept], out[kept])
    alone = run([x[:1] for x in tensors], mask[:1], device, causal=False)[0]
    found["rows are independent"] = bool((alone - out[:1]).norm() <= 1e-3 * alone.norm())
    if is_causal:
        later = [torch.cat((x[:, :, :200], x[:, :, 200:] * 3.0), 2) for x in tensors]
        before, after = (run(x, torch.ones_like(mask), device, causal=True)[0][:, :, :200] for x in (tensors, later))
        found["the future never leaks"] = bool((before - after).norm() <= 1e-5 * before.norm())
    return found


def error(config: MethodConfig, case: Case) -> float:
    """The relative error of a method in the case's dtype, against exact attention in float32.

    The 4,096 tokens are random, in 64 segments with a mean of their own, so that attention is not uniform.
    """
    sizes = case._replace(length=64)
    means = [x.detach().repeat_interleave(64, 2) for x in make_inputs(sizes)[:2]]
    noise = [x.detach() for x in make_inputs(case._replace(length=4096, seed=1))]
    inputs = [1.5 * means[0] + noise[0], 1.5 * means[0] + noise[1], means[1] + noise[2]]
    exact = scaled_dot_product_attention(*(x.float() for x in inputs))
    return hea.analysis.relative_error(hea.attention(config, *inputs).float(), exact).operator.mean().item()


def runs(call: Callable[[], Any], label: str) -> bool:
    """Whether a kernel takes the inputs, and the memory of the device suffices."""
    try:
        call()
    except torch.OutOfMemoryError:
        typer.echo(f"{label}: left out, since it does not fit the memory of the device", err=True)
        return False
    except RuntimeError as problem:
        if not label.startswith("exact"):
            raise
        typer.echo(f"{label}: left out ({str(problem).splitlines()[0]})", err=True)
        return False
    return True


def constants(device: torch.device) -> dict[str, float]:
    """Constants of `recipes.common.gpu_model.Machine` as a device has them, by calls that they bound."""
    draw = functools.partial(torch.randn, device=device)
    small, large = draw(16), draw(1 << 26)
    square = {
        name: draw(8, 2048, 2048, dtype=dtype) for name, dtype in (("half", torch.bfloat16), ("single", torch.float32))
    }
    rows = {name: draw(1, 16, 8192, 64, dtype=x.dtype) for name, x in square.items()}
    index = torch.randint(4096, (1 << 18,), device=device)
    sums, terms = draw(4096, 64), draw(1 << 18, 64)
    calls: dict[str, tuple[float, Callable[[], Any]]] = {
        "op": (1.0, lambda: small.add_(1.0)),
        "bandwidth": (2.0 * large.nbytes, large.clone),
        "atomics": (terms.numel(), lambda: sums.index_add_(0, index, terms)),
    }
    calls |= {name: (2.0 * 8 * 2048**3, functools.partial(torch.bmm, x, x)) for name, x in square.items()}
    for name, x in {"flash": rows["half"], "efficient": rows["single"]}.items():
        calls[name] = 4.0 * 16 * 8192**2 * 64, functools.partial(scaled_dot_product_attention, x, x, x)
    seconds = {name: time_calls(call, calls_to_time(call)) for name, (_, call) in calls.items()}
    return {name: seconds[name] if name == "op" else amount / seconds[name] for name, (amount, _) in calls.items()}


def profile(config: MethodConfig, case: Case) -> dict[str, Any]:
    """What a call of a method does: its seconds, those in which the device is busy, and the costliest operations."""
    inputs = make_inputs(case)
    seconds = time_calls(call := functools.partial(run_once, config, inputs, case), calls_to_time(call))
    activities = [one for one in torch.profiler.supported_activities() if one.name in ("CPU", "CUDA", "XPU")]
    with torch.profiler.profile(activities=activities) as found:
        call()
        if case.device.startswith("cuda"):
            torch.cuda.synchronize()
    events = sorted(found.key_averages(), key=lambda one: -(one.self_device_time_total or one.self_cpu_time_total))
    costly = [
        {
            "operation": one.key,
            "calls": one.count,
            "device ms": one.self_device_time_total / 1e3,
            "host ms": one.self_cpu_time_total / 1e3,
        }
        for one in events[:20]
    ]
    busy = sum(one.self_device_time_total for one in events) / 1e6
    return {"length": case.length, "seconds": seconds, "busy": busy, "operations": costly}


def times(configs: Mapping[str, MethodConfig], case: Case, num_rounds: int) -> list[dict[str, Any]]:
    """The seconds of every exact kernel and method that runs, medians over rounds, with the ratio to each kernel."""
    inputs, device = make_inputs(case), torch.device(case.device)

    def exact(name: str) -> None:
        with exact_kernel(name):
            run_once(None, inputs, case)

    few = device.type != "mps" or case.batch * case.num_heads * case.length**2 < _MPS_SCORES
    calls = {f"exact, {name}": functools.partial(exact, name) for name in (exact_kernels(device) if few else ())}

    def without_kernels(config: MethodConfig) -> None:
        with mock.patch.dict(os.environ, HEA_KERNELS="plain"):
            run_once(config, inputs, case)

    calls |= {label: functools.partial(run_once, config, inputs, case) for label, config in configs.items()}
    if device.type == "cuda" and case.length == _LENGTH:
        calls |= {f"{label}, plain": functools.partial(without_kernels, config) for label, config in configs.items()}
    calls = {label: call for label, call in calls.items() if runs(call, label)}
    numbers = {label: calls_to_time(call) for label, call in calls.items()}
    rounds = [{label: time_calls(call, numbers[label]) for label, call in calls.items()} for _ in range(num_rounds)]
    seconds = {label: sorted(one[label] for one in rounds)[num_rounds // 2] for label in calls}
    kernels = [label for label in calls if label.startswith("exact")]
    return [
        {
            "attention": label, "length": case.length, "dtype": case.dtype, "causal": case.causal,
            "backward": case.backward, "seconds": taken, "rounds": num_rounds,
            "ratios": {kernel.removeprefix("exact, "): seconds[kernel] / taken for kernel in kernels},
            "extra_memory": extra_memory(configs.get(label), case) if label in configs else None,
        }
        for label, taken in seconds.items()
    ]  # fmt: skip


def cases(case: Case, lengths: list[int]) -> list[Case]:
    """What is timed: first all lengths in the dtype of the case, then short ones in float32 and in the causal form."""
    short = [n for n in lengths if n <= _LENGTH]
    settings = [(lengths, {}), (short, {"causal": True})]
    settings += [(short, {"dtype": "float32"})] if case.dtype != "float32" else []
    return [
        case._replace(length=n, backward=backward, **changes)
        for own, changes in settings
        for n in own
        for backward in (False, True)
    ]


def broken(result: Mapping[str, Any]) -> list[str]:
    """The promises that are not kept, by method."""
    return [f"{name}: {what}" for name, found in result["promises"].items() for what, kept in found.items() if not kept]


def markdown(result: Mapping[str, Any]) -> str:
    """The result as tables in Markdown."""
    parts = [f"# {result['device']}", f"torch {result['torch']}, hf_efficient_attn {hea.__version__}, {result['case']}"]
    bad = "\n".join(f"- {one}" for one in broken(result))
    parts += [bad or f"All promises are kept by {len(result['promises'])} methods."]
    errors = [{"method": label, "error": value} for label, value in result["errors"].items()]
    columns = {"method": "{method}", "error at 4,096 tokens": "{error:.4f}"}
    parts += [commands.table_of(errors, columns)] if errors else []
    columns = {"constant": "{name}", "this device": "{found:.3g}", "the model's": "{known:.3g}"}
    values = [{"name": k, "found": v, "known": getattr(H100, k)} for k, v in result["constants"].items()]
    parts += [commands.table_of(values, columns)] if values else []
    for label, one in result["profiles"].items():
        ms, busy = 1e3 * one["seconds"], 1e3 * one["busy"]
        sizes = f"{label}, {one['length']:,} tokens: {ms:.2f} ms, of which the device is busy for {busy:.2f}"
        columns = {name: f"{{{name}}}" for name in ("operation", "calls")}
        columns |= {name: f"{{{name}:.3f}}" for name in ("device ms", "host ms")}
        parts += [sizes, commands.table_of(one["operations"], columns)]
    rows = [
        {**row, **row["ratios"], "pass": "fwd+bwd" if row["backward"] else "fwd", "ms": 1000 * row["seconds"]}
        for row in result["times"]
    ]
    columns = {"attention": "{attention}", "tokens": "{length:,}", "dtype": "{dtype}", "causal": "{causal}"}
    columns |= {"pass": "{pass}", "ms": "{ms:.3g}"}
    columns |= {f"times faster than {name}": f"{{{name}:.2f}}" for row in rows for name in row["ratios"]}
    columns["extra memory / inputs"] = "{extra_memory:.1f}"
    return "\n\n".join([*parts, commands.table_of(rows, columns)] if rows else parts) + "\n"


def write(result: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Write what is known."""
    folder.mkdir(exist_ok=True)
    write_json(folder / "gpu.json", dict(result))
    (folder / "gpu.md").write_text(markdown(result), encoding="utf-8")


@app.command(epilog="Example: python -m recipes.benchmarks.gpu --minutes 8 -o OUT")
def gpu(
    output: commands.option(pathlib.Path, "Where to write the results.", "--output", "-o", metavar="FOLDER"),
    minutes: commands.option(float, "Limit of the duration.", min=0.1) = 8.0,
    length: commands.numbers_option("Tokens", "8192..1048576") = [],  # noqa: B006 (typer copies it)
    method: commands.methods_option("all") = [],  # noqa: B006
    dtype: commands.option(str, "Dtype of errors and times.", metavar="TYPE") = "bfloat16",
    heads: commands.NumHeads = 16,
    device: Device = None,
    force: commands.option(bool, "Replace the files of an earlier run.", "--force") = False,
) -> None:
    """Check and measure all methods on one accelerator in one run: promises, errors, times and memory."""
    # A build of PyTorch for CUDA has an accelerator also on a machine without one.
    found = torch.accelerator.current_accelerator(check_available=True)
    where = parse_device(device or getattr(found, "type", "cpu"))
    parse_dtype(dtype)
    check_folder(output, ("gpu.json", "gpu.md"), force=force)
    configs = parse_methods(method or [name for name in hea.available_methods() if name != "auto"])
    case = Case(0, num_heads=heads, dtype=dtype, device=str(where))
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else f"{where}, {processor_name()}"
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, "case": str(case), "dtype": dtype}
    result |= {"promises": {}, "errors": {}, "constants": {}, "profiles": {}, "times": []}
    execution, lengths = Execution(minutes=minutes), parse_lengths(length) or LENGTHS
    # In seconds on an H100, roughly; the pace is measured.
    steps = [Step(f"promises of {label}", 1.0, ("promises", label)) for label in configs]
    steps += [Step(f"error of {label}", 0.3, ("errors", label)) for label in configs]
    steps.append(Step("constants of the model", 1.0, ("constants", None)))
    profiled = min(_LENGTH, max(lengths))
    steps += [Step(f"profile of {label}", 1.0, ("profiles", label)) for label in _PROFILED if label in configs]
    for stage, rounds in enumerate((1, _ROUNDS)):
        for one in cases(case, lengths):
            cost = 0.5 * (1 + rounds) * max(1.0, one.length / 32768) * (3 if one.backward else 1)
            steps.append(Step(f"{one.length:,} tokens, rounds: {rounds}", cost, (one, rounds), stage))
    with use_device(where):
        for step in carry_out(steps, execution):
            part, value = step.key
            if part == "promises":
                result[part][value] = promises(configs[value].with_budget(64), where)
            elif part == "errors":
                result[part][value] = error(configs[value], case)
            elif part == "constants":
                result[part] = constants(where)
            elif part == "profiles":
                result[part][value] = profile(configs[value], case._replace(length=profiled))
            else:
                chosen = {k: c for k, c in configs.items() if method_info(c.method).causal or not part.causal}
                same = {"length": part.length, "dtype": part.dtype, "causal": part.causal, "backward": part.backward}
                kept = [row for row in result["times"] if any(row[key] != same[key] for key in same)]
                result["times"] = sorted(kept + times(chosen, part, value), key=lambda row: row["length"])
            write(result, output)
    typer.echo(markdown(result))
    if broken(result):
        typer.echo(f"Promises that are broken: {'; '.join(broken(result))}", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.gpu")
