"""What one attention layer costs at each length: counted to a million tokens, measured as far as this machine goes.

    python -m recipes.benchmarks.cost_by_length
    python -m recipes.benchmarks.cost_by_length --method nearfar --length 4096,65536 --measure-to 65536 --heads 8

Duration: about five minutes on one idle core. Expected: kernels that do not grow with the length, and traffic, memory
and time that grow in proportion to it, where exact attention has four times the work for twice the tokens.

The counts are those of an accelerator in bfloat16, on meta tensors (`recipes.common.launches`). The time is the
processor time of this CPU in float32 on one thread, so that other programs have little influence: the least of a few
calls, without a gradient, on normal random tokens. "ns per token and head" is the time divided by the tokens and the
heads; it is constant if the cost is linear.
"""

import time
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

import hf_efficient_attn as hea
from hf_efficient_attn.cli import Settings, main_of, parse_lengths, parse_methods, table
from hf_efficient_attn.evaluation.timing import use_threads
from hf_efficient_attn.methods import MethodConfig, crossover, method_info
from recipes.common import commands
from recipes.common.launches import launches

app = commands.new_app()

METHODS = ("nearfar", "linear", "longformer")
LENGTHS = (4096, 16_384, 65_536, 131_072, 1_048_576)


def seconds(config: MethodConfig, length: int, shape: tuple[int, int], is_causal: bool, rounds: int) -> float:
    """The least processor time of some calls on random tokens (1, H, N, D), on one thread."""
    heads, dim = shape
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, length, dim, generator=generator) for _ in range(3))
    times = []
    with torch.inference_mode():
        for _ in range(rounds):
            start = time.process_time()
            hea.attention(config, query, key, value, is_causal=is_causal)
            times.append(time.process_time() - start)
    return min(times)


@app.command(epilog="Example: python -m recipes.benchmarks.cost_by_length --method nearfar,longformer --measure-to 0")
def run(
    length: commands.numbers_option("Tokens", ",".join(map(str, LENGTHS))) = [],  # noqa: B006
    method: commands.methods_option(",".join(METHODS)) = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    measure_to: Annotated[
        int, typer.Option(metavar="N", min=0, help="Measure up to this many tokens. 0: only count.")
    ] = 131_072,
    causal: Annotated[bool, typer.Option("--causal/--bidirectional", help="Causal attention.")] = False,
    heads: Annotated[int, typer.Option(metavar="N", min=1, help="Heads of what is measured.")] = 2,
    width: commands.HeadDim = 64,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Calls of which the shortest counts.")] = 3,
    csv: commands.Csv = None,
) -> None:
    """Count and measure one layer of attention at growing lengths."""
    commands.check_outputs(csv, None)
    configs = parse_methods(method or METHODS, setting)
    configs = {k: v for k, v in configs.items() if not causal or method_info(v.method).causal}
    rows: list[dict[str, Any]] = []
    cases = [(label, tokens) for label in configs for tokens in parse_lengths(length) or LENGTHS]
    for label, tokens in tqdm(cases, disable=None, leave=False):
        counted = launches(configs[label], tokens, is_causal=causal)
        found = None
        if tokens <= measure_to:
            with use_threads(1):
                found = seconds(configs[label], tokens, (heads, width), causal, rounds)
        rows.append(
            {
                "method": label,
                "length": tokens,
                "causal": causal,
                "kernels": counted.kernels,
                "gigabytes": counted.traffic / 1e9,
                "peak_gigabytes": counted.peak / 1e9,
                "seconds": found,
                "nanoseconds_per_token": None if found is None else found / tokens / heads * 1e9,
            }
        )
    commands.write(rows, csv)
    cells = [
        (
            r["method"], f"{r['length']:,}", f"{r['kernels']:,}", f"{r['gigabytes']:.2f}", f"{r['peak_gigabytes']:.2f}",
            *(("", "") if r["seconds"] is None else (f"{r['seconds']:.2f}", f"{r['nanoseconds_per_token']:,.0f}")),
        )
        for r in rows
    ]  # fmt: skip
    typer.echo(table(("attention", "tokens", "kernels", "GB", "peak GB", "seconds", "ns per token and head"), cells))
    kind = "causal" if causal else "bidirectional"
    typer.echo(f"\n{kind}; counted: 16 heads of dimension 64, bfloat16; measured: {heads} heads of {width}, float32")
    typer.echo(f"{crossover.processor_name()}, one thread, torch {torch.__version__}")


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.cost_by_length")
