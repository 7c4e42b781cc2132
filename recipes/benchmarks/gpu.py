"""Check and measure all methods on one accelerator in one run: promises, errors, times and memory.

    python -m recipes.benchmarks.gpu --minutes 8 -o OUT
    python -m recipes.benchmarks.gpu --device cpu --length 2048,4096 --minutes 2 -o OUT      (to try it)

The run has three parts, and writes gpu.json, gpu.md and gpu.png into OUT after each of them:

1. Promises: output and gradient of every method are finite and those of the CPU, masked keys have no influence, nor
   have later tokens, and a batch row is computed as if alone.
2. Errors: the relative error (operator norm) in the dtype of the measurement, against exact attention in float32.
3. Times: forward, and forward and backward, 16 heads of 64 in bfloat16, from 8,192 to 1,048,576 tokens. Every method is
   compared with each exact kernel that the device has: flash attention (version 3 if `flash_attn_interface` is
   installed), cuDNN's, and the memory-efficient one. All lengths are measured once, and then in three rounds. Lengths
   that would not end in time are left out.

On MPS, PyTorch's exact attention forms all scores, and is wrong if there are more than 2^31 of them (11,585 tokens with
16 heads). Such a call is never made here: exact attention is left out of longer lengths.

Duration: what `--minutes` says. Expected, as times faster than flash attention 3 on an H100, by arithmetic and not
measured: at 8,192, 16,384, 65,536 and 131,072 tokens `longformer` 5, 12, 50, 110; `nystromformer` 3, 8, 55, 140;
`linear` 2, 5, 25, 50; `nearfar` 1.5, 4, 25, 55; `kdeformer` 2, 4, 18, 37. docs/results.md has what was measured.
"""

import contextlib
import functools
import importlib.util
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import typer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import hf_efficient_attn as hea
from hf_efficient_attn.cli import Device, main_of, parse_device, parse_lengths, parse_methods
from hf_efficient_attn.evaluation.progress import Execution, Step, carry_out
from hf_efficient_attn.evaluation.timing import calls_to_time, processor_name, time_calls, use_device
from hf_efficient_attn.io.json import write_json
from hf_efficient_attn.io.writing import check_folder, replacing
from hf_efficient_attn.methods import MethodConfig, method_info
from recipes.common import commands
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


def times(configs: Mapping[str, MethodConfig], case: Case, num_rounds: int) -> list[dict[str, Any]]:
    """The seconds of every exact kernel and method that runs, medians over rounds, with the ratio to each kernel."""
    inputs, device = make_inputs(case), torch.device(case.device)

    def exact(name: str) -> None:
        with exact_kernel(name):
            run_once(None, inputs, case)

    few = device.type != "mps" or case.batch * case.num_heads * case.length**2 < _MPS_SCORES
    calls = {f"exact, {name}": functools.partial(exact, name) for name in (exact_kernels(device) if few else ())}
    calls |= {label: functools.partial(run_once, config, inputs, case) for label, config in configs.items()}
    calls = {label: call for label, call in calls.items() if runs(call, label)}
    numbers = {label: calls_to_time(call) for label, call in calls.items()}
    rounds = [{label: time_calls(call, numbers[label]) for label, call in calls.items()} for _ in range(num_rounds)]
    seconds = {label: sorted(one[label] for one in rounds)[num_rounds // 2] for label in calls}
    kernels = [label for label in calls if label.startswith("exact")]
    return [
        {
            "attention": label, "length": case.length, "backward": case.backward, "seconds": taken,
            "rounds": num_rounds,
            "ratios": {kernel.removeprefix("exact, "): seconds[kernel] / taken for kernel in kernels},
            "extra_memory": extra_memory(configs.get(label), case) if label in configs else None,
        }
        for label, taken in seconds.items()
    ]  # fmt: skip


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
    rows = [
        {**row, **row["ratios"], "pass": "fwd+bwd" if row["backward"] else "fwd", "ms": 1000 * row["seconds"]}
        for row in result["times"]
    ]
    columns = {"attention": "{attention}", "tokens": "{length:,}", "pass": "{pass}", "ms": "{ms:.3g}"}
    columns |= {f"times faster than {name}": f"{{{name}:.2f}}" for row in rows for name in row["ratios"]}
    columns["extra memory / inputs"] = "{extra_memory:.1f}"
    return "\n\n".join([*parts, commands.table_of(rows, columns)] if rows else parts) + "\n"


def draw(result: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw the forward times by length, one line for each kernel and method."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    scales = {"xscale": "log", "yscale": "log"}
    axes = figure.add_subplot(xlabel="tokens", ylabel="milliseconds", title=result["device"], **scales)
    for label in dict.fromkeys(row["attention"] for row in result["times"]):
        rows = [row for row in result["times"] if row["attention"] == label and not row["backward"]]
        style = "k--" if label.startswith("exact") else "-"
        axes.plot([row["length"] for row in rows], [1000 * row["seconds"] for row in rows], style, label=label)
    axes.legend(fontsize="small", ncols=2)
    with replacing(path) as draft:
        figure.savefig(draft, dpi=150)


def write(result: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Write what is known."""
    folder.mkdir(exist_ok=True)
    write_json(folder / "gpu.json", dict(result))
    (folder / "gpu.md").write_text(markdown(result), encoding="utf-8")
    if result["times"]:
        draw(result, folder / "gpu.png")


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
    check_folder(output, ("gpu.json", "gpu.md", "gpu.png"), force=force)
    configs = parse_methods(method or [name for name in hea.available_methods() if name != "auto"])
    case = Case(0, num_heads=heads, dtype=dtype, device=str(where))
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else f"{where}, {processor_name()}"
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, "case": str(case)}
    result |= {"promises": {}, "errors": {}, "times": []}
    execution, lengths = Execution(minutes=minutes), parse_lengths(length) or LENGTHS
    # In seconds on an H100, roughly; the pace is measured.
    steps = [Step(f"promises of {label}", 1.0, ("promises", label)) for label in configs]
    steps += [Step(f"error of {label}", 0.3, ("errors", label)) for label in configs]
    for stage, rounds in enumerate((1, _ROUNDS)):
        for n, factor in itertools.product(lengths, (1, 3)):
            cost = 0.5 * (1 + rounds) * max(1.0, n / 32768) * factor
            steps.append(Step(f"{n:,} tokens, rounds: {rounds}", cost, (n, (factor == 3, rounds)), stage))
    with use_device(where):
        for step in carry_out(steps, execution):
            part, value = step.key
            if part == "promises":
                result["promises"][value] = promises(configs[value].with_budget(64), where)
            elif part == "errors":
                result["errors"][value] = error(configs[value], case)
            else:
                one = case._replace(length=part, backward=value[0])
                kept = [row for row in result["times"] if (row["length"], row["backward"]) != (part, value[0])]
                result["times"] = sorted(kept + times(configs, one, value[1]), key=lambda row: row["length"])
                write(result, output)
    write(result, output)
    typer.echo(markdown(result))
    if broken(result):
        typer.echo(f"Promises that are broken: {'; '.join(broken(result))}", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.gpu")
