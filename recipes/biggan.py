"""BigGAN with exact attention and with other methods on the same noise (KDEformer's section 4.2 and Table 1).

    python -m recipes.biggan compare CHECKPOINT --output dogs.png --classes "golden retriever,207" --method kdeformer
    python -m recipes.biggan score CHECKPOINT --features FEATURES --reference PICTURES --budget 32,64,128 --csv rows.csv

`compare` writes one line of pictures for each method and measures how far they are from those of exact attention: the
relative error |a - e| / |e| of the pictures' values in [-1, 1], and the mean absolute difference. `score` computes FID
and the inception score with an image classifier: `--features FOLDER` is any folder of AutoModelForImageClassification,
such as `python -m recipes.biggan_train features` writes. Scores of different networks cannot be compared. `compare` and
`score` also print the cost of the attention layer for one picture (GFLOP of its products, with a multiply-add as one
operation as in the paper; see `recipes.common.counting`) and how many times faster it is than exact attention in the
same run. Nothing is trained. Methods without a rectangular form are refused, since BigGAN has four queries for every
key.

CHECKPOINT is a folder of `BigGANModel`, such as `python -m recipes.biggan_train` writes, or one with `config.json` and
`pytorch_model.bin` of the PyPI package pytorch-pretrained-biggan. Its archive map lists the published weights:
https://s3.amazonaws.com/models.huggingface.co/biggan/ followed by biggan-deep-512-config.json and
biggan-deep-512-pytorch_model.bin (or -256-, -128-). They were not available when this was written, so all results here
are of other weights.

Duration on the small BigGAN of `recipes.biggan_train`: half a minute on one core for `compare`, 25 s for every 5,000
pictures for `score`. Expected with it at a budget of 32 of the 256 keys: FID 1.97 for exact attention and kdeformer,
2.1 to 2.2 for hyperattention and reformer, 8.1 for performer. recipes/README.md has the whole table.
"""

import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from hf_efficient_attn.cli import Settings, main_of, parse_lengths, split_list
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.timing import use_threads
from hf_efficient_attn.io.writing import check_writable
from recipes.common import commands, gan
from recipes.common.commands import Csv, Seed, Threads, option
from recipes.common.gan import Draw, FeatureNetwork, Swap, apply_swap, pictures, save_png

app = commands.new_app(no_args_is_help=True)

Checkpoint = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Folder of the generator.")]
Classes = option(list[str], "Names or numbers. [default: all, in turn]")
Truncation = option(float, "Truncation of the noise, above 0 and at most 1.")
Batch = option(int, "Batch size.", min=1)
Budget = commands.numbers_option("Budgets in columns", "32,64,128")
Method = commands.methods_option("all rectangular ones")
TimingRounds = option(int, "Paired timings of each method; 0 for none.", min=0)

Figures = Callable[[Swap, Iterable[Tensor]], dict[str, float]]


@commands.checked
def _png(path: pathlib.Path) -> None:
    if path.suffix.lower() != ".png":
        raise UnsupportedAttentionError(f"--output {path}: the name must end in .png")
    check_writable(path)


def _open(checkpoint: str, classes: Sequence[str], number: int, truncation: float, seed: int) -> tuple[Any, Draw, int]:
    """The generator, the inputs of the pictures, and the number of keys of its attention layer."""
    model = gan.load_generator(checkpoint)
    chosen = gan.parse_classes(split_list(classes), model.config)
    # The layer pools its picture by two for the keys.
    return model, Draw.of(model.config, chosen, number, truncation, seed), (model.config.attention_resolution // 2) ** 2


def _run(model: Any, draw: Draw, swaps: Sequence[Swap], rounds: int, batch: int, figures_of: Figures) -> list[Any]:
    """One row for each method, with the cost of the attention layer and the figures of its pictures (b, 3, P, P)."""
    rows, costs = [], gan.layer_costs(model, draw, swaps, rounds)
    for swap, cost in zip(swaps, costs, strict=True):
        found = figures_of(swap, pictures(apply_swap(model, swap), draw, batch))
        rows.append({"attention": swap.name, "budget": swap.budget, **found, **cost})
    return rows


def _show(rows: Sequence[dict[str, Any]], figures: dict[str, str], csv: pathlib.Path | None) -> None:
    """Print one line for every row. `figures` maps a column to its format."""
    columns = {**figures, "gflop": ".4f", "fewer": ".2f", "times_faster": ".2f"}
    templates = {name.replace("_", " "): f"{{{name}:{form}}}" for name, form in columns.items()}
    note = "GFLOP: products of the attention layer for one picture, a multiply-add as one operation."
    commands.report(rows, {"attention": "{attention}", "budget": "{budget}", **templates}, note, csv=csv)


@app.command(epilog="Example: python -m recipes.biggan compare gan --output side.png --method kdeformer --budget 64")
def compare(
    checkpoint: Checkpoint,
    output: option(pathlib.Path, "File for one line of pictures a method.", metavar="FILE.png", callback=_png),
    classes: Classes = [],  # noqa: B006
    number: option(int, "Number of pictures in a line.", "--count", min=1) = 10,
    truncation: Truncation = 0.4,
    seed: Seed = 0,
    method: Method = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    budget: Budget = [],  # noqa: B006
    rounds: TimingRounds = 5,
    batch: Batch = 8,
    threads: Threads = 1,
    csv: Csv = None,
) -> None:
    """Compare the pictures of exact attention with those of other methods on the same noise."""
    model, draw, keys = _open(checkpoint, classes, number, truncation, seed)
    swaps = gan.swaps_of(method, setting, parse_lengths(budget) or [32, 64, 128], keys)
    sheets: dict[str, Tensor] = {}

    def figures_of(swap: Swap, made: Iterable[Tensor]) -> dict[str, float]:
        sheets[swap.label] = torch.cat(list(made))
        exact = next(iter(sheets.values())).flatten(1)
        difference = sheets[swap.label].flatten(1) - exact
        relative = difference.norm(dim=1) / exact.norm(dim=1)
        figures = {"relative_error": relative.mean().item(), "greatest": relative.max().item()}
        return figures | {"absolute_difference": difference.abs().mean().item()}

    with use_threads(threads):
        rows = _run(model, draw, swaps, rounds, batch, figures_of)
    save_png(gan.named_rows(sheets), output, colours=256)
    _show(rows, {"relative_error": ".3f", "greatest": ".3f", "absolute_difference": ".4f"}, csv)
    typer.echo(f"{output}: {number} pictures for each method, truncation {truncation:g}, seed {seed}")


@app.command(epilog="Example: python -m recipes.biggan score gan --features features --reference data/images/mnist")
def score(
    checkpoint: Checkpoint,
    features: option(pathlib.Path, "Folder of an image classifier.", metavar="FOLDER"),
    reference: option(pathlib.Path, "Real pictures (folder or zip file), or MNIST's folder.", metavar="PATH"),
    classes: Classes = [],  # noqa: B006
    number: option(int, "Pictures for each method.", "--count", min=2) = 5000,
    truncation: Truncation = 1.0,
    seed: Seed = 0,
    method: Method = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    budget: Budget = [],  # noqa: B006
    splits: option(int, "Parts for the inception score.", min=1) = 10,
    rounds: TimingRounds = 5,
    batch: Batch = 50,
    threads: Threads = 1,
    csv: Csv = None,
) -> None:
    """Compute FID and the inception score of exact attention and of other methods on the same noise."""
    if number < splits:
        raise UnsupportedAttentionError(f"--count {number}: give at least one picture for each of --splits {splits}")
    model, draw, keys = _open(checkpoint, classes, number, truncation, seed)
    network = FeatureNetwork(features)
    # Shuffled, so that all parts of the inception score have about the same share of every class.
    draw = draw._replace(labels=draw.labels[torch.randperm(number, generator=torch.Generator().manual_seed(seed))])
    swaps = gan.swaps_of(method, setting, parse_lengths(budget) or [32, 64, 128], keys)
    with use_threads(threads):
        real = gan.reference_features(reference, network, model.config.output_dim)

        def figures_of(swap: Swap, made: Iterable[Tensor]) -> dict[str, float]:
            features, guesses = map(torch.cat, zip(*map(network, made), strict=True))
            mean, deviation = gan.inception_score(guesses, splits)
            return {"fid": gan.frechet_distance(features, real), "inception_score": mean, "deviation": deviation}

        rows = _run(model, draw, swaps, rounds, batch, figures_of)
    _show(rows, {"fid": ".2f", "inception_score": ".3f", "deviation": ".3f"}, csv)
    typer.echo(f"{number} pictures for each method, truncation {truncation:g}, seed {seed}; features of {features}")


if __name__ == "__main__":
    main_of(app, "python -m recipes.biggan")
