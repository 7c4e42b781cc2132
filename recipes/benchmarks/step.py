"""Measure time and peak memory of a training step of a whole model, relative to exact attention.

    python -m recipes.benchmarks.step --length 512,2048,8192

Duration: about 8 minutes on 2 cores. Expected: the table of recipes/README.md. Times are paired with exact attention
(`recipes.common.memory.paired`). A step is a forward pass, a backward pass and an update with AdamW on one
sequence. The model is a BERT of Transformers with random weights, 4 layers, hidden size 256 and 4 heads of dimension
64, on random tokens, with the loss of a masked language model on every eighth.

There is no dropout: with dropout, exact attention builds its N x N matrix on a CPU and takes several times as long.
Memory is the largest that PyTorch holds during two steps besides the model: gradients, the optimizer's state included.
"""

from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm
from transformers import BertConfig, BertForMaskedLM, PreTrainedModel

import hf_efficient_attn as hea
from hf_efficient_attn.cli import main_of, parse_lengths, parse_methods
from hf_efficient_attn.evaluation.timing import peak_of, use_threads
from hf_efficient_attn.methods import MethodConfig
from recipes.common import commands
from recipes.common.memory import EXACT, paired

app = commands.new_app()
METHODS = (
    "nearfar", "kdeformer", "hyperattention", "longformer", "nystromformer", "wildcat", "thinformer", "linear",
    "performer", "linformer", "flurka_linear", "flurka_performer",
)  # fmt: skip
COLUMNS = {
    "tokens": "{length}", "attention": "{attention}", "s": "{seconds:.3g}", "times faster": "{ratio:.2g}",
    "MiB": "{memory_mib:.0f}",
}  # fmt: skip
VOCABULARY = 1000


def make_model(config: MethodConfig | None, length: int) -> PreTrainedModel:
    """A masked language model in training mode with a method, or with exact attention for None."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    model = BertForMaskedLM(
        BertConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=length, attention_probs_dropout_prob=0.0)
    )
    return (model if config is None else hea.convert(model, config)).train()


def make_step(config: MethodConfig | None, length: int) -> Callable[[], None]:
    """A function that does one training step on a sequence."""
    model = make_model(config, length)
    tokens = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1))
    labels = tokens.masked_fill(torch.arange(length) % 8 != 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        model(input_ids=tokens, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@app.command(epilog="Example: python -m recipes.benchmarks.step --length 8192 --method kdeformer")
def main(
    length: commands.numbers_option("Tokens", "512,2048,8192") = [],  # noqa: B006 (typer copies it)
    method: commands.methods_option("twelve of them") = [],  # noqa: B006
    rounds: commands.Rounds = 3,
    threads: commands.Threads = 2,
    csv: commands.Csv = None,
) -> None:
    """Measure seconds and peak memory of a training step, and times faster than with exact attention."""
    lengths, configs = parse_lengths(length) or [512, 2048, 8192], parse_methods(method or METHODS)
    rows: list[dict[str, Any]] = []
    with use_threads(threads):
        for tokens in tqdm(lengths, disable=None, leave=False):
            steps = {label: make_step(config, tokens) for label, config in configs.items()}
            exact, timed = paired(make_step(None, tokens), steps, rounds)
            del steps  # frees the models
            for label, timing in {EXACT: exact, **timed}.items():
                step = make_step(configs.get(label), tokens)
                peak = peak_of(lambda step=step: [step(), step()])
                row = {"length": tokens, "attention": label, "seconds": timing.seconds, "ratio": timing.ratio}
                rows.append(row | {"memory_mib": peak and peak / 2**20, "unsteady": timing.unsteady})
    commands.report(rows, COLUMNS, commands.rounds_note(f"threads {threads}", rounds), csv=csv)


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.step")
