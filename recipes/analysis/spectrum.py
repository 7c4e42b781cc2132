"""Singular values of D^-1 A before and after the near field is taken out: KDEformer's Fig. 2 (Zandieh et al. 2023).

    python -m recipes.analysis.spectrum --data DATA --plot spectrum.png                          (about 2 minutes)
    python -m recipes.analysis.spectrum --source random --length 1024

GloVe: keys and queries are the vectors of the 2,048 most frequent words, as in the paper's Fig. 2(a). DeiT: the first
attention layer of DeiT-tiny on one photograph, where the paper's Fig. 2(b) has T2T-ViT; all heads. Random: standard
normal numbers, without data. The table gives for every near field the share of the weights of D^-1 A that it holds,
and the largest singular value, squared Frobenius norm and stable rank before and after.

The paper states that the largest singular value of D^-1 A is 1. Its rows sum to 1, which makes 1 its greatest
eigenvalue; the greatest singular value is 1 only where the columns sum to 1 as well, and is larger on real data.

To expect: with scores divided by sqrt(d), as in the paper's formulas, GloVe's attention is nearly flat, of stable rank
1.24, and no near field makes it much smaller. With `--scale 1` it falls from 178 to 5. In DeiT's first layer it falls
in all three heads without a window; without the blocks of a hash it rises in two of them, since the largest singular
value falls more than the Frobenius norm.

DATA holds `wordvectors`, `models/deit-tiny-imagenet` and `images`; by default it is $HEA_DATA or ../shared/data.
"""

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from tqdm import tqdm

from hf_efficient_attn.cli import Settings, main_of, parse_methods, split_list, table
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.metrics import residual_matrix, singular_values, softmax_matrix
from hf_efficient_attn.io.writing import replacing
from hf_efficient_attn.methods import MethodConfig
from recipes.analysis.inputs import glove_vectors
from recipes.benchmarks.error import Data, data_folder, deit_activations
from recipes.benchmarks.report import Csv, Plot, check_outputs, write_csv

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

SOURCES = ("glove", "deit", "random")
METHODS = ("kdeformer:block_size=64", "kdeformer:block_size=256", "kdeformer:near_field=window:block_size=256")


def read(source: str, data: pathlib.Path, length: int, pixels: int, layer: int, seed: int) -> tuple[Tensor, Tensor]:
    """Query and key, (1, H, N, D)."""
    if source == "deit":
        layers = deit_activations(data, 1, pixels)
        if layer >= len(layers):
            raise UnsupportedAttentionError(f"--layer {layer}: the model has layers 0 to {len(layers) - 1}")
        return layers[layer].query, layers[layer].key
    if source == "glove":
        vectors = glove_vectors(data, length)[None, None]
        return vectors, vectors
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, 1, length, 64, generator=draw) for _ in range(2))


def measure(
    query: Tensor, key: Tensor, configs: Mapping[str, MethodConfig], seed: int, scale: float | None = None
) -> Iterator[dict[str, Any]]:
    """For every head the softmax matrix, and for every method its residual after the near field.

    Yields:
        {"near_field", "head", "held", "largest", "frobenius", "stable_rank", "values"}; values is a Tensor (N,).
    """
    for head in range(query.shape[1]):
        one = query[:, head : head + 1], key[:, head : head + 1]
        whole = softmax_matrix(*one, scale=scale)
        yield _row("none", head, whole, whole)
        for name, config in configs.items():
            yield _row(name, head, residual_matrix(config, *one, seed=seed, scale=scale), whole)


def _row(name: str, head: int, matrix: Tensor, whole: Tensor) -> dict[str, Any]:
    values = singular_values(matrix)[0, 0]
    total, largest = values.square().sum().item(), values[0].item()
    return {
        "near_field": name,
        "head": head,
        "held": 1.0 - (matrix.sum() / whole.sum()).item(),
        "largest": largest,
        "frobenius": total,
        "stable_rank": total / largest**2 if largest else 0.0,
        "values": values,
    }


def draw(rows: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """The singular values of every source's first head, and the stable ranks of all heads in the legend."""
    from matplotlib.figure import Figure

    sources = list(dict.fromkeys(row["source"] for row in rows))
    figure = Figure(figsize=(5.5 * len(sources), 4.2), layout="constrained")
    for source, axes in zip(sources, figure.subplots(1, len(sources), squeeze=False)[0], strict=True):
        for row in rows:
            if row["source"] == source and row["head"] == 0:
                name = "D⁻¹A" if row["near_field"] == "none" else f"without {row['near_field']}"
                axes.plot(row["values"].numpy(), label=f"{name}: stable rank {row['stable_rank']:.1f}")
        axes.set(xlabel="index", ylabel="singular value", title=f"{source}, head 0", yscale="log", ylim=(1e-4, None))
        axes.legend(fontsize="x-small")
        axes.grid(alpha=0.3)
    with replacing(path) as draft:
        figure.savefig(draft, dpi=150)


@app.command(epilog="Example: python -m recipes.analysis.spectrum --data data --source glove --method longformer")
def spectrum(
    source: Annotated[
        list[str],
        typer.Option(metavar="NAME", show_default=False, help="glove, deit or random. [default: glove,deit]"),
    ] = ["glove,deit"],  # noqa: B006 (typer copies it)
    data: Data = None,
    length: Annotated[int, typer.Option(metavar="N", min=2, help="Vectors of glove and random.")] = 2048,
    pixels: Annotated[int, typer.Option(metavar="N", min=32, help="Side of deit's photograph.")] = 512,
    layer: Annotated[int, typer.Option(metavar="N", min=0, help="Of deit.")] = 0,
    method: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="Whose near field: NAME or NAME:key=value, repeated or with commas. [default: kdeformer's blocks of "
            "64 and 256, and a window of 256]",
        ),
    ] = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    scale: Annotated[
        float | None, typer.Option(metavar="X", help="Factor of the scores. [default: 1 / sqrt of the width]")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the hash and of random inputs.")] = 0,
    threads: Annotated[int | None, typer.Option(metavar="N", min=1)] = None,
    csv: Csv = None,
    plot: Plot = None,
) -> None:
    """Singular values and stable rank of attention matrices with and without the near field."""
    sources = split_list(source)
    for name in sources:
        if name not in SOURCES:
            raise UnsupportedAttentionError(f"--source {name!r} is not one of {', '.join(SOURCES)}")
    check_outputs(csv, plot)
    configs, folder = parse_methods(method or METHODS, setting), data_folder(data)
    rows: list[dict[str, Any]] = []
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        inputs = {name: read(name, folder, length, pixels, layer, seed) for name in sources}
        total = sum(query.shape[1] for query, _ in inputs.values()) * (1 + len(configs))
        with tqdm(total=total, unit="matrix", disable=None, leave=False) as bar:
            for name, (query, key) in inputs.items():
                for row in measure(query, key, configs, seed, scale):
                    rows.append({"source": name, "tokens": query.shape[2], **row})
                    bar.update()
    finally:
        torch.set_num_threads(before)
    if csv is not None:
        write_csv(csv, [{k: v for k, v in row.items() if k != "values"} for row in rows])
    if plot is not None:
        draw(rows, plot)
    cells = [
        (
            row["source"],
            row["tokens"],
            row["head"],
            row["near_field"],
            f"{100 * row['held']:.1f} %",
            f"{row['largest']:.3f}",
            f"{row['frobenius']:.2f}",
            f"{row['stable_rank']:.2f}",
        )
        for row in rows
    ]
    headers = (
        "input",
        "tokens",
        "head",
        "near field taken out",
        "weight in it",
        "largest singular value",
        "squared Frobenius norm",
        "stable rank",
    )
    typer.echo(table(headers, cells))
    fell = [
        row["stable_rank"]
        < next(
            r["stable_rank"]
            for r in rows
            if (r["source"], r["head"], r["near_field"]) == (row["source"], row["head"], "none")
        )
        for row in rows
        if row["near_field"] != "none"
    ]
    typer.echo(f"\nThe stable rank is smaller without the near field in {sum(fell)} of {len(fell)} cases.")


if __name__ == "__main__":
    main_of(app, "python -m recipes.analysis.spectrum")
