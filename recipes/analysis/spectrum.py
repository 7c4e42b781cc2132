"""Compare singular values of D^-1 A with and without the near field: KDEformer's Fig. 2 (Zandieh et al. 2023).

    python -m recipes.analysis.spectrum --data DATA --plot spectrum.png
    python -m recipes.analysis.spectrum --source random --length 1024

GloVe: keys and queries are the vectors of the 2,048 most frequent words, as in the paper's Fig. 2(a). DeiT: all heads
of the first attention layer of DeiT-tiny on one photograph, where the paper's Fig. 2(b) has T2T-ViT. Random: standard
normal numbers. For every near field the table shows its share of the weights of D^-1 A, and the largest singular value,
squared Frobenius norm and stable rank with and without it. DATA holds `wordvectors`, `models/deit-tiny-imagenet` and
`images`. The default is $HEA_DATA or ../shared/data.

The paper states that the largest singular value of D^-1 A is 1. The weights of every query sum to 1, which makes 1 the
largest eigenvalue. The largest singular value is 1 only if the weights of every key sum to 1 as well, and is larger on
real data.

Duration: about 2 minutes. Expected: with scores divided by sqrt(d), as in the paper's formulas, GloVe's attention is
nearly uniform with stable rank 1.24, and no near field changes it much. With `--scale 1` the rank falls from 178 to 5.
In DeiT's first layer it falls in all three heads without a window. Without the blocks of a hash it rises in two of
them, since the largest singular value falls more than the Frobenius norm.
"""

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import typer
from torch import Tensor
from tqdm import tqdm

from hf_efficient_attn.analysis import residual_matrix, singular_values, softmax_matrix
from hf_efficient_attn.cli import Settings, main_of, parse_methods, split_list
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.timing import use_threads
from hf_efficient_attn.methods import MethodConfig
from recipes.common import commands
from recipes.common.inputs import deit_activations, glove_vectors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

app = commands.new_app()

SOURCES = ("glove", "deit", "random")
METHODS = ("kdeformer:block_size=64", "kdeformer:block_size=256", "kdeformer:near_field=window:block_size=256")


def read(source: str, data: pathlib.Path, length: int, pixels: int, layer: int, seed: int) -> tuple[Tensor, Tensor]:
    """Query and key, (1, H, N, D) each."""
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
    """Analyse the softmax matrix of every head, and its residual without the near field of every method.

    Args:
        query: (1, H, N, D).
        key: (1, H, N, D).
        configs: the methods, by label.
        seed: seed of the hashes.
        scale: factor of the scores.

    Yields:
        Rows with "near_field", "head", "held", "largest", "frobenius", "stable_rank" and "values", a Tensor (N,).
    """
    for head in range(query.shape[1]):
        one = query[:, head : head + 1], key[:, head : head + 1]
        matrix = softmax_matrix(*one, scale=scale)
        yield _row("none", head, matrix, matrix)
        for name, config in configs.items():
            yield _row(name, head, residual_matrix(config, *one, seed=seed, scale=scale), matrix)


def _row(name: str, head: int, residual: Tensor, matrix: Tensor) -> dict[str, Any]:
    """The figures of a residual of a softmax matrix, both (1, 1, N, N)."""
    values = singular_values(residual)[0, 0]
    total, largest = values.square().sum().item(), values[0].item()
    return {
        "near_field": name,
        "head": head,
        "held": 1.0 - (residual.sum() / matrix.sum()).item(),
        "largest": largest,
        "frobenius": total,
        "stable_rank": total / largest**2 if largest else 0.0,
        "values": values,
    }


def draw(rows: Sequence[commands.Row]) -> "Figure":
    """Plot the singular values of the first head of every source, with the stable ranks in the legend."""
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
    return figure


@app.command(epilog="Example: python -m recipes.analysis.spectrum --data data --source glove --method longformer")
def spectrum(
    source: commands.option(list[str], "glove, deit or random. [default: glove,deit]") = ["glove,deit"],  # noqa: B006 (typer copies it)
    data: commands.Data = None,
    length: commands.option(int, "Number of vectors of glove and random.", min=2) = 2048,
    pixels: commands.option(int, "Resolution of the photograph of deit.", min=32) = 512,
    layer: commands.option(int, "Layer of deit.", min=0) = 0,
    method: commands.methods_option("kdeformer's blocks of 64 and 256, and a window of 256") = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    scale: commands.Scale = None,
    seed: commands.option(int, "Seed of the hash and of random inputs.", min=0) = 0,
    threads: commands.AnyThreads = None,
    csv: commands.Csv = None,
    plot: commands.Plot = None,
) -> None:
    """Measure singular values and stable rank of attention matrices with and without the methods' near fields."""
    sources = split_list(source)
    commands.check_known("--source", sources, SOURCES)
    commands.check_outputs(csv, plot)
    configs, folder = parse_methods(method or METHODS, setting), commands.data_folder(data)
    rows: list[dict[str, Any]] = []
    with use_threads(threads):
        inputs = {name: read(name, folder, length, pixels, layer, seed) for name in sources}
        total = sum(query.shape[1] for query, _ in inputs.values()) * (1 + len(configs))
        with tqdm(total=total, unit="matrix", disable=None, leave=False) as bar:
            for name, (query, key) in inputs.items():
                for row in measure(query, key, configs, seed, scale):
                    rows.append({"source": name, "tokens": query.shape[2], **row})
                    bar.update()
    commands.write([{k: v for k, v in row.items() if k != "values"} for row in rows], csv, plot, lambda _: draw(rows))
    columns = {
        "input": "{source}", "tokens": "{tokens}", "head": "{head}", "near field removed": "{near_field}",
        "weight in it": "{percent:.1f} %", "largest singular value": "{largest:.3f}",
        "squared Frobenius norm": "{frobenius:.2f}", "stable rank": "{stable_rank:.2f}",
    }  # fmt: skip
    commands.show([{**row, "percent": 100 * row["held"]} for row in rows], columns)
    exact = {(row["source"], row["head"]): row["stable_rank"] for row in rows if row["near_field"] == "none"}
    fell = [row["stable_rank"] < exact[row["source"], row["head"]] for row in rows if row["near_field"] != "none"]
    typer.echo(f"\nThe stable rank is smaller without the near field in {sum(fell)} of {len(fell)} cases.")


if __name__ == "__main__":
    main_of(app, "python -m recipes.analysis.spectrum")
