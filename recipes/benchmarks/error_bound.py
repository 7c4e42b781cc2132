"""Measure how often the bound of `hea.attention_error` fails on texts and photographs.

    python -m recipes.benchmarks.error_bound --data DATA --threads 2 --check
    python -m recipes.benchmarks.error_bound --data DATA --source xquad --tokens 512,4096 --method kdeformer

A model is converted to a method at a budget of exact columns (`with_budget`). `hea.attention_error` then estimates the
error of every layer and head from the exact output of some queries, with a bound, and computes it from that of all
queries. A layer is missed if the mean of the bounds of its heads is below the mean of their errors. The sources:

- books: six novels in MiniLM, whose table of positions is repeated for more than 512 tokens;
- xquad: paragraphs of XQuAD, joined, in MiniLM;
- photographs: in DeiT-tiny, resized to about as many patches of 16 x 16 pixels as tokens are asked for;
- gpt2: the same novels in GPT-2, which is causal and has 2,048 positions.

Errors below 1e-4, such as those of methods that are exact at a length, are left out. DATA holds `text/books`, `squad`,
`images`, and `models/deit-tiny-imagenet` and `models/gpt2-books`. The default is $HEA_DATA or ../shared/data.

Duration: about 20 minutes on one core for three methods with 64 and 128 rows. Expected: at most 1 % of layers missed at
each number of rows, and medians of bound / error of 1.4 with 64 rows, 1.3 with 96 and 1.25 with 128.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn
from tqdm import tqdm
from transformers import AutoModel, AutoModelForImageClassification, AutoTokenizer

import hf_efficient_attn as hea
from hf_efficient_attn.checkpoint.loading import no_progress_bar
from hf_efficient_attn.cli import Settings, main_of, parse_lengths, parse_methods, split_list, table
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.defaults import default_methods
from hf_efficient_attn.evaluation.demo import minilm_folder
from hf_efficient_attn.evaluation.timing import use_threads
from hf_efficient_attn.io.text import read_text
from hf_efficient_attn.methods import MethodConfig
from recipes.benchmarks.tasks import photographs
from recipes.common import commands
from recipes.common.inputs import squad_texts

app = commands.new_app()

SOURCES = ("books", "xquad", "photographs", "gpt2")
TOKENS, ROWS, BUDGETS = [512, 1024, 2048, 8192], [64, 96, 128], [128]
_INPUTS, _POSITIONS, _PATCH = 6, {"gpt2": 2048}, 16
# Smaller errors are those of rounding.
_SMALLEST = 1e-4
# Largest share of layers that may be missed.
GOAL = 0.01

# The batches of a source with a number of tokens.
Load = Callable[[int], Iterator[Mapping[str, Any]]]


def open_source(source: str, data: Path, longest: int) -> tuple[nn.Module, Load]:
    """The model of a source, and a function that returns its inputs.

    Args:
        source: one of `SOURCES`.
        data: the data folder.
        longest: the largest number of tokens that is asked for.
    """
    if source == "photographs":
        folder = commands.existing(data / "models" / "deit-tiny-imagenet", "DeiT-tiny")

        def load_photographs(tokens: int) -> Iterator[Mapping[str, Any]]:
            pictures, _ = next(photographs(data, _PATCH * round(tokens**0.5), batch=_INPUTS))
            for picture in pictures.split(1):
                yield {"pixel_values": picture, "interpolate_pos_encoding": True}

        with no_progress_bar():
            return AutoModelForImageClassification.from_pretrained(folder).eval(), load_photographs
    is_gpt2 = source == "gpt2"
    folder = commands.existing(data / "models" / "gpt2-books", "GPT-2") if is_gpt2 else minilm_folder()
    with no_progress_bar():
        model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    if not is_gpt2 and longest > model.config.max_position_embeddings:
        hea.extend_positions(model, longest)
    if source == "xquad":
        articles = squad_texts(data, "article")
        texts = [" ".join(articles[i::_INPUTS]) for i in range(_INPUTS)]
    else:
        books = sorted(commands.existing(data / "text" / "books", "books").glob("*.txt.gz"))[:_INPUTS]
        texts = [read_text(book)[-8 * longest :] for book in books]

    def load_texts(tokens: int) -> Iterator[Mapping[str, Any]]:
        for text in texts:
            ids = tokenizer(text[: 16 * tokens], truncation=True, max_length=tokens, return_tensors="pt")["input_ids"]
            if ids.shape[1] == tokens:
                yield {"input_ids": ids}

    return model, load_texts


def compare(model: nn.Module, batch: Mapping[str, Any], rows: list[int], seeds: int) -> list[dict[str, Any]]:
    """One row for each number of queries, seed and layer: whether its bound and those of its heads fail."""
    exact = hea.attention_error(model, batch, num_rows=None).layers
    found = []
    for count in rows:
        for seed in range(seeds):
            sampled = hea.attention_error(model, batch, num_rows=count, seed=seed).layers
            for some, every in zip(sampled, exact, strict=True):
                if every.mean >= _SMALLEST:
                    found.append(
                        {
                            "rows": count,
                            "layer": some.name,
                            "missed": some.mean_bound < every.mean,
                            "ratio": some.mean_bound / every.mean,
                            "heads": every.estimate.numel(),
                            "heads_missed": int((some.bound < every.estimate).sum()),
                        }
                    )
    return found


def measure(
    configs: Mapping[str, MethodConfig],
    sources: list[str],
    tokens: list[int],
    *,
    data: Path,
    rows: list[int],
    seeds: int,
) -> list[dict[str, Any]]:
    """All rows of `compare`, with "source", "tokens" and "method"."""
    measured = []
    for source in sources:
        lengths = [length for length in tokens if length <= _POSITIONS.get(source, length)]
        model, load = open_source(source, data, max(lengths))
        causal = source == "gpt2"
        for label, config in configs.items():
            if causal and not hea.method_info(config.method).causal:
                continue
            hea.convert(model, config)
            for length in lengths:
                for batch in tqdm(list(load(length)), desc=f"{source}, {length}, {label}", disable=None, leave=False):
                    about = {"source": source, "tokens": length, "method": label}
                    measured += [{**about, **row} for row in compare(model, batch, rows, seeds)]
    return measured


def summary(rows: list[dict[str, Any]]) -> tuple[int, float, float, float]:
    """Number of layers, share of them that are missed, share of the heads, and the median of bound / error."""
    heads = sum(row["heads"] for row in rows)
    missed = statistics.fmean(row["missed"] for row in rows)
    ratio = statistics.median(row["ratio"] for row in rows)
    return len(rows), missed, sum(row["heads_missed"] for row in rows) / heads, ratio


@app.command(epilog="Example: python -m recipes.benchmarks.error_bound --data data --source books --tokens 1024")
def error_bound(
    data: commands.Data = None,
    source: Annotated[
        list[str], typer.Option(metavar="NAME", show_default=False, help=f"[default: {', '.join(SOURCES)}]")
    ] = [],  # noqa: B006 (typer copies it)
    tokens: commands.numbers_option("Tokens", "512,1024,2048,8192", "--tokens") = [],  # noqa: B006
    rows: commands.numbers_option("Queries of each head", "64,96,128", "--rows") = [],  # noqa: B006
    budgets: commands.numbers_option("Budgets in columns", "128", "--budget") = [],  # noqa: B006
    method: commands.methods_option("those that benchmark compares", "--method", "--methods") = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    seeds: Annotated[int, typer.Option(metavar="N", min=1, help="Samples of queries.")] = 2,
    threads: commands.AnyThreads = None,
    check: commands.Check = False,
    csv: commands.Csv = None,
) -> None:
    """Measure how often the bound of `hea.attention_error` fails."""
    sources = split_list(source) or list(SOURCES)
    unknown = [name for name in sources if name not in SOURCES]
    if unknown:
        raise UnsupportedAttentionError(f"--source {unknown[0]!r} is not one of {', '.join(SOURCES)}")
    commands.check_outputs(csv, None)
    configs = parse_methods(method or default_methods(purpose="compare"), setting)
    columns = parse_lengths(budgets) or BUDGETS
    sized = {f"{label}, {count}": one.with_budget(count) for label, one in configs.items() for count in columns}
    counts = parse_lengths(rows) or ROWS
    with use_threads(threads), torch.no_grad():
        found = measure(
            sized, sources, parse_lengths(tokens) or TOKENS, data=commands.data_folder(data), rows=counts, seeds=seeds
        )
    if not found:
        raise UnsupportedAttentionError("every method is exact at these lengths: give more tokens or smaller budgets")
    commands.write(found, csv)
    groups = dict.fromkeys((row["source"], row["tokens"], row["rows"]) for row in found)
    cells = []
    for name, length, count in [*groups, *(("all", "", count) for count in counts)]:
        part = [row for row in found if row["rows"] == count]
        if name != "all":
            part = [row for row in part if (row["source"], row["tokens"]) == (name, length)]
        layers, missed, heads, ratio = summary(part)
        cells.append((name, length, count, layers, f"{100 * missed:.2f} %", f"{100 * heads:.2f} %", f"{ratio:.2f}"))
    typer.echo(table(("source", "tokens", "rows", "layers", "missed", "heads missed", "bound / error"), cells))
    if check:
        verdicts = [
            commands.Verdict(
                f"{count} rows", summary([r for r in found if r["rows"] == count])[1], GOAL, at_least=False
            )
            for count in counts
        ]
        commands.conclude(verdicts)


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.error_bound")
