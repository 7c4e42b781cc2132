"""What a training step costs: time and peak memory of a whole model at several lengths, against exact attention.

    python -m recipes.benchmarks.step --length 512,2048,8192

About 8 minutes on 2 cores. The model is an encoder as Transformers' BERT makes it, with random weights: 4 layers, 256
wide, 4 heads of 64. A step is forward pass, backward pass and AdamW on one row of random tokens with a masked
language model's loss on every eighth; attention has no dropout, with which exact attention builds its N x N matrix on a
CPU and takes several times as long. Times are paired with exact attention (`recipes.benchmarks.timing`); memory is
the peak of a process that takes two steps, less that of one that only makes the model.
"""

import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

import hf_efficient_attn as hea
from hf_efficient_attn.cli import Settings, main_of, parse_lengths, parse_methods, table
from hf_efficient_attn.methods import MethodConfig, method_info
from recipes.benchmarks.memory import EXACT, peak_bytes
from recipes.benchmarks.report import Csv, Plot, Rounds, Threads, check_outputs, write
from recipes.benchmarks.timing import UNSTEADY, paired, use_threads

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
METHODS = (
    "kdeformer", "hyperattention", "longformer", "nystromformer", "linear", "performer", "linformer",
    "flurka_linear", "flurka_performer",
)  # fmt: skip
SIZES = {"layers": 4, "heads": 4, "width": 64, "words": 1000}


def make_model(config: MethodConfig | None, length: int) -> torch.nn.Module:
    """A masked language model in training whose attention is the method's; None for exact attention."""
    from transformers import BertConfig, BertForMaskedLM

    wide = SIZES["heads"] * SIZES["width"]
    torch.manual_seed(0)
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=SIZES["words"], hidden_size=wide, num_hidden_layers=SIZES["layers"],
            num_attention_heads=SIZES["heads"], intermediate_size=4 * wide, max_position_embeddings=length,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    return (model if config is None else hea.convert(model, config)).train()


def make_step(config: MethodConfig | None, length: int) -> Callable[[], None]:
    """One step of training on one row of `length` tokens."""
    model = make_model(config, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(SIZES["words"], (1, length), generator=generator)
    labels = tokens.masked_fill(torch.arange(length) % 8 != 0, -100)

    def step() -> None:
        model(input_ids=tokens, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def peak_memory(config: MethodConfig | None, length: int, threads: int, steps: int) -> int:
    """Bytes at the peak of a process that makes the model and takes so many steps."""
    described = None if config is None else config.to_dict()
    case = json.dumps({"config": described, "length": length, "threads": threads, "steps": steps})
    root = pathlib.Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "recipes.benchmarks.step", "--child", case]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    if done.returncode:
        raise RuntimeError(f"the child that measures memory failed:\n{done.stderr}")
    return int(done.stdout.split()[-1])


def child(case: Mapping[str, Any]) -> int:
    """What the child measures: its own peak, in bytes."""
    torch.set_num_threads(case["threads"])
    values = case["config"]
    config = None if values is None else method_info(values["method"]).config_class.from_dict(values)
    step = make_step(config, case["length"])
    for _ in range(case["steps"]):
        step()
    return peak_bytes()


def draw(rows: Sequence[Mapping[str, Any]]):
    """Seconds and memory of a step against length."""
    from matplotlib.figure import Figure

    keys = [("seconds", "seconds a step"), ("memory_mib", "MiB beside the model")]
    keys = [(key, what) for key, what in keys if any(row[key] is not None for row in rows)]
    figure = Figure(figsize=(5.5 * len(keys), 4), layout="constrained")
    for axes, (key, what) in zip(figure.subplots(1, len(keys), squeeze=False)[0], keys, strict=True):
        for label in dict.fromkeys(row["attention"] for row in rows):
            own = [row for row in rows if row["attention"] == label and row[key] is not None]
            axes.plot([row["length"] for row in own], [row[key] for row in own], marker="o", label=label)
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=what)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    return figure


@app.command(epilog="Example: python -m recipes.benchmarks.step --length 8192 --method kdeformer")
def main(
    length: Annotated[list[str], typer.Option(metavar="N", help="Tokens. [default: 512,2048,8192]")] = [],  # noqa: B006
    method: Annotated[
        list[str], typer.Option(metavar="NAME", show_default=False, help="NAME or NAME:key=value. [default: nine]")
    ] = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    rounds: Rounds = 3,
    threads: Threads = 2,
    memory: Annotated[bool, typer.Option(help="Whether to measure memory too.")] = True,
    csv: Csv = None,
    plot: Plot = None,
    child_: Annotated[str, typer.Option("--child", hidden=True)] = "",
) -> None:
    """Seconds and peak memory of a training step, and times faster than with exact attention."""
    if child_:
        typer.echo(child(json.loads(child_)))
        return
    check_outputs(csv, plot)
    lengths, configs = parse_lengths(length) or [512, 2048, 8192], parse_methods(method or METHODS, setting)
    rows, unsteady = [], False
    with use_threads(threads), tqdm(total=len(lengths) * len(configs) * (rounds + memory), disable=None) as bar:
        for tokens in lengths:
            steps = {label: make_step(config, tokens) for label, config in configs.items()}
            exact, timed = paired(make_step(None, tokens), steps, rounds, bar)
            del steps
            for label, timing in {EXACT: exact, **timed}.items():
                config = configs.get(label)
                peak = None
                if memory:
                    peak = peak_memory(config, tokens, threads, 2) - peak_memory(config, tokens, threads, 0)
                    bar.update(label != EXACT)
                unsteady |= timing.unsteady
                rows.append(
                    {
                        "length": tokens, "attention": label, "seconds": timing.seconds, "ratio": timing.ratio,
                        "memory_mib": None if peak is None else peak / 2**20,
                    }
                )  # fmt: skip
    write(rows, csv, plot, draw)
    lines = []
    for label in (EXACT, *configs):
        own = [row for row in rows if row["attention"] == label]
        cells = [f"{row['seconds']:.3g} s, {row['ratio']:.2g}x" for row in own]
        cells += ["" if row["memory_mib"] is None else f"{row['memory_mib']:.0f}" for row in own]
        lines.append((label, *cells))
    typer.echo(table(("attention", *map(str, lengths), *(f"MiB, {tokens}" for tokens in lengths)), lines))
    if unsteady:
        typer.echo(f"\n{UNSTEADY}")


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.step")
