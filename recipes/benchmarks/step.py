"""Measure time and peak memory of a training step of a whole model, relative to exact attention.

    python -m recipes.benchmarks.step --length 512,2048,8192

Duration: about 8 minutes on 2 cores. Expected: the table of recipes/README.md. The model is a BERT of Transformers with
random weights, 4 layers, hidden size 256 and 4 heads of dimension 64. A step is a forward pass, a backward pass and an
update with AdamW on one sequence of random tokens, with the loss of a masked language model on every eighth. Attention
has no dropout: with dropout, exact attention builds its N x N matrix on a CPU and takes several times as long. Times
are paired with exact attention (`hf_efficient_attn.evaluation.timing`). Memory is the peak of a process that does two
steps, minus that of a process that only makes the model.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from tqdm import tqdm
from transformers import BertConfig, BertForMaskedLM

import hf_efficient_attn as hea
from hf_efficient_attn.cli import Settings, main_of, parse_lengths, parse_methods, table
from hf_efficient_attn.evaluation.timing import UNSTEADY, paired, use_threads
from hf_efficient_attn.methods import MethodConfig
from recipes.common import commands
from recipes.common.memory import EXACT, config_of, peak_bytes, run_child

if TYPE_CHECKING:
    from matplotlib.figure import Figure

app = commands.new_app()
METHODS = (
    "nearfar", "kdeformer", "hyperattention", "longformer", "nystromformer", "wildcat", "thinformer", "linear",
    "performer", "linformer", "flurka_linear", "flurka_performer",
)  # fmt: skip
SIZES = {"layers": 4, "heads": 4, "head_dim": 64, "vocabulary": 1000}


def make_model(config: MethodConfig | None, length: int) -> torch.nn.Module:
    """A masked language model in training mode with a method, or with exact attention for None."""
    hidden_size = SIZES["heads"] * SIZES["head_dim"]
    torch.manual_seed(0)
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=SIZES["vocabulary"], hidden_size=hidden_size, num_hidden_layers=SIZES["layers"],
            num_attention_heads=SIZES["heads"], intermediate_size=4 * hidden_size, max_position_embeddings=length,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    return (model if config is None else hea.convert(model, config)).train()


def make_step(config: MethodConfig | None, length: int) -> Callable[[], None]:
    """A function that does one training step on a sequence of `length` tokens."""
    model = make_model(config, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(SIZES["vocabulary"], (1, length), generator=generator)
    labels = tokens.masked_fill(torch.arange(length) % 8 != 0, -100)

    def step() -> None:
        model(input_ids=tokens, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def peak_memory(config: MethodConfig | None, length: int, threads: int, steps: int) -> int:
    """Peak bytes of a child process that makes the model and does this number of steps."""
    described = None if config is None else config.to_dict()
    case = json.dumps({"config": described, "length": length, "threads": threads, "steps": steps})
    return run_child("recipes.benchmarks.step", "--child", case)


def child(case: Mapping[str, Any]) -> int:
    """The work of the child process: returns its own peak in bytes."""
    torch.set_num_threads(case["threads"])
    step = make_step(config_of(case["config"]), case["length"])
    for _ in range(case["steps"]):
        step()
    return peak_bytes()


def draw(rows: Sequence[commands.Row]) -> "Figure":
    """Plot seconds and memory of a step against length."""
    from matplotlib.figure import Figure

    keys = [("seconds", "seconds per step"), ("memory_mib", "MiB besides the model")]
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
    length: commands.numbers_option("Tokens", "512,2048,8192") = [],  # noqa: B006 (typer copies it)
    method: commands.methods_option("nine of them") = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    rounds: commands.Rounds = 3,
    threads: commands.Threads = 2,
    memory: commands.Memory = True,
    csv: commands.Csv = None,
    plot: commands.Plot = None,
    child_: Annotated[str, typer.Option("--child", hidden=True)] = "",
) -> None:
    """Measure seconds and peak memory of a training step, and times faster than with exact attention."""
    if child_:
        typer.echo(child(json.loads(child_)))
        return
    commands.check_outputs(csv, plot)
    lengths, configs = parse_lengths(length) or [512, 2048, 8192], parse_methods(method or METHODS, setting)
    rows, unsteady = [], False
    with use_threads(threads), tqdm(total=len(lengths) * len(configs) * (rounds + memory), disable=None) as bar:
        for tokens in lengths:
            steps = {label: make_step(config, tokens) for label, config in configs.items()}
            exact, timed = paired(make_step(None, tokens), steps, rounds, bar)
            del steps  # frees the models
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
    commands.write(rows, csv, plot, draw)
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
