"""BigGAN with exact attention and with methods in its place, on the same noise (KDEformer's section 4.2 and Table 1).

    python -m recipes.biggan generate CHECKPOINT --output dogs.png --classes "golden retriever,207" --truncation 0.4
    python -m recipes.biggan compare CHECKPOINT --output side.png --method kdeformer,performer --budget 128,256
    python -m recipes.biggan score CHECKPOINT --features FEATURES --reference PICTURES --budget 32,64,128 --csv rows.csv

CHECKPOINT is a folder of `BigGANModel`, one that `python -m recipes.gan.train` wrote, or one in the layout of the PyPI
package pytorch-pretrained-biggan: `config.json` and `pytorch_model.bin`. The published weights are those of the
package's archive map: https://s3.amazonaws.com/models.huggingface.co/biggan/ and then biggan-deep-512-config.json and
biggan-deep-512-pytorch_model.bin (or -256-, -128-); put them into one folder under the two names above. They could not
be had where this was written, so that no figure here is of them.

generate: a sheet of pictures. compare: a row of pictures for each attention, and how far they are from those of exact
attention: relative error |a - e| / |e| of the pictures' values in [-1, 1], and mean absolute difference. score: FID and
inception score through an image classifier, `--features FOLDER` of AutoModelForImageClassification, such as
`python -m recipes.gan.features` writes; figures of different networks cannot be compared. Both say what the attention
layer costs for one picture (GFLOP: products, a multiply-add as one operation, as the paper counts; see
`recipes.benchmarks.counting`), and its time as a ratio to exact attention's in the same run. Methods are put in without
any training. Those without a rectangular form are refused: BigGAN has four queries for every key.

On the small BigGAN of `recipes.gan.train` `compare` takes half a minute on one core, `score` 25 s for every 5,000
pictures. To expect there at a budget of 32 of the 256 keys: FID 1.97 of exact attention and of kdeformer, 2.1 to 2.2 of
hyperattention and reformer, 8.1 of performer; see recipes/README.md.
"""

import pathlib
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from tqdm import tqdm

from hf_efficient_attn.cli import Settings, main_of, parse_lengths, table
from hf_efficient_attn.cli.common import split_list
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.io.writing import check_writable
from recipes.benchmarks.report import Csv, Seed, Threads, check_outputs, write_csv
from recipes.benchmarks.timing import UNSTEADY, use_threads
from recipes.gan.features import FeatureNetwork
from recipes.gan.metrics import Moments, frechet_distance, inception_score
from recipes.gan.pictures import grid, named_rows, save_png
from recipes.gan.reference import reference_statistics
from recipes.gan.sampling import (
    Cost,
    Draw,
    Swap,
    layer_costs,
    load_generator,
    parse_classes,
    pictures,
    put_in,
    swaps_of,
)

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)

Checkpoint = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Folder of the generator.")]
Classes = Annotated[
    list[str], typer.Option(metavar="NAME", show_default=False, help="Names or numbers. [default: all, in turn]")
]
Truncation = Annotated[float, typer.Option(metavar="X", help="Of the noise, above 0 and at most 1.")]
Batch = Annotated[int, typer.Option(metavar="N", min=1, help="Pictures at once.")]
Budget = Annotated[list[str], typer.Option(metavar="N", show_default=False, help="Columns. [default: 32,64,128]")]
Method = Annotated[
    list[str],
    typer.Option(metavar="NAME", show_default=False, help="NAME or NAME:key=value. [default: all rectangular ones]"),
]
TimingRounds = Annotated[int, typer.Option(metavar="N", min=0, help="Paired timings of each; 0 for none.")]


def _check_png(path: pathlib.Path) -> None:
    if path.suffix.lower() != ".png":
        raise UnsupportedAttentionError(f"--output {path}: its name must end in .png")
    check_writable(path)


def _keys(model) -> int:
    """Number of keys of the attention layer: its picture is pooled by two."""
    return (model.config.attention_resolution // 2) ** 2


def _cost_columns(cost: Cost, exact: Cost) -> dict[str, Any]:
    """GFLOP by the paper's counting, for one picture, and the ratios to exact attention."""
    products = cost.operations.products / 2
    return {
        "gflop": products / 1e9,
        "fewer": exact.operations.products / 2 / products,
        "times_faster": None if cost.timing is None else cost.timing.ratio,
        "unsteady": cost.timing is not None and cost.timing.unsteady,
    }


def _show(rows: list[dict[str, Any]], figures: dict[str, str], csv: pathlib.Path | None) -> None:
    """A line for every row: `figures`, column -> format."""
    if csv is not None:
        write_csv(csv, rows)

    def cell(row: dict[str, Any], name: str, how: str) -> str:
        return "" if row[name] is None else format(row[name], how)

    cost = {"gflop": ".4f", "fewer": ".2f", "times_faster": ".2f"}
    headers = ["attention", "budget", *(name.replace("_", " ") for name in (*figures, *cost))]
    cells = [
        [row["attention"], row["budget"] or "", *(cell(row, n, how) for n, how in (figures | cost).items())]
        for row in rows
    ]
    typer.echo(table(headers, cells))
    typer.echo("\nGFLOP of the attention layer for one picture: products, a multiply-add as one operation.")
    if any(row["unsteady"] for row in rows):
        typer.echo(UNSTEADY)


@app.command(epilog="Example: python -m recipes.biggan generate gan --output digits.png --classes 3,8 --count 20")
def generate(
    checkpoint: Checkpoint,
    output: Annotated[pathlib.Path, typer.Option(metavar="FILE.png", help="The sheet.")],
    classes: Classes = [],  # noqa: B006 (typer copies it)
    number: Annotated[int, typer.Option("--count", metavar="N", min=1, help="Pictures.")] = 16,
    columns: Annotated[int, typer.Option(metavar="N", min=1, help="Of the sheet.")] = 8,
    truncation: Truncation = 0.4,
    seed: Seed = 0,
    attention: Annotated[str | None, typer.Option(metavar="METHOD", help="[default: exact attention]")] = None,
    setting: Settings = [],  # noqa: B006
    batch: Batch = 8,
    threads: Threads = 1,
) -> None:
    """A sheet of pictures, with exact attention or a method."""
    _check_png(output)
    model = load_generator(checkpoint)
    draw = Draw.of(model.config, parse_classes(split_list(classes), model.config), number, truncation, seed)
    if setting and attention is None:
        raise UnsupportedAttentionError("--set needs --attention METHOD")
    swap = swaps_of([attention], setting, [], _keys(model))[-1] if attention else Swap("exact", None, None)
    put_in(model, swap)
    with use_threads(threads), tqdm(total=number, unit="picture", disable=None, leave=False) as bar:
        made = torch.cat(list(pictures(model, draw, batch, bar)))
    save_png(grid(made, min(columns, number)), output)
    typer.echo(f"{output}: {number} pictures of {made.shape[-1]} pixels, {swap.name} attention")


def _differences(made: Tensor, exact: Tensor) -> dict[str, float]:
    """Mean and greatest relative error over the pictures (N, 3, P, P), and the mean absolute difference."""
    away = (made - exact).flatten(1)
    relative = away.norm(dim=1) / exact.flatten(1).norm(dim=1)
    return {
        "relative_error": relative.mean().item(),
        "greatest": relative.max().item(),
        "absolute_difference": away.abs().mean().item(),
    }


@app.command(epilog="Example: python -m recipes.biggan compare gan --output side.png --method kdeformer --budget 64")
def compare(
    checkpoint: Checkpoint,
    output: Annotated[pathlib.Path, typer.Option(metavar="FILE.png", help="A row of pictures for each attention.")],
    classes: Classes = [],  # noqa: B006
    number: Annotated[int, typer.Option("--count", metavar="N", min=1, help="Pictures of a row.")] = 10,
    truncation: Truncation = 0.4,
    seed: Seed = 0,
    method: Method = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    budget: Budget = [],  # noqa: B006
    rounds: TimingRounds = 5,
    batch: Batch = 8,
    threads: Threads = 1,
    colours: Annotated[int, typer.Option(metavar="N", min=2, max=256, help="Of the file.")] = 256,
    csv: Csv = None,
) -> None:
    """Exact attention beside methods on the same noise."""
    _check_png(output)
    check_outputs(csv, None)
    model = load_generator(checkpoint)
    draw = Draw.of(model.config, parse_classes(split_list(classes), model.config), number, truncation, seed)
    swaps = swaps_of(method, setting, parse_lengths(budget) or [32, 64, 128], _keys(model))
    rows, sheets = [], {}
    with use_threads(threads):
        with tqdm(total=(len(swaps) - 1) * rounds, unit="pair", desc="time", disable=None, leave=False) as bar:
            costs = layer_costs(model, draw, swaps, rounds, bar)
        with tqdm(total=number * len(swaps), unit="picture", disable=None, leave=False) as bar:
            for swap, cost in zip(swaps, costs, strict=True):
                bar.set_description(swap.label)
                made = torch.cat(list(pictures(put_in(model, swap), draw, batch, bar)))
                sheets[swap.label] = made
                found = _differences(made, next(iter(sheets.values())))
                rows.append({"attention": swap.name, "budget": swap.budget, **found, **_cost_columns(cost, costs[0])})
    save_png(named_rows(sheets), output, colours)
    _show(rows, {"relative_error": ".3f", "greatest": ".3f", "absolute_difference": ".4f"}, csv)
    typer.echo(f"{output}: {number} pictures of each, truncation {truncation:g}, seed {seed}")


@app.command(epilog="Example: python -m recipes.biggan score gan --features features --reference data/images/mnist")
def score(
    checkpoint: Checkpoint,
    features: Annotated[pathlib.Path, typer.Option(metavar="FOLDER", help="An image classifier.")],
    reference: Annotated[
        pathlib.Path,
        typer.Option(metavar="PATH", help="Real pictures: folder, zip or IDX file; or .npz of statistics."),
    ],
    classes: Classes = [],  # noqa: B006
    number: Annotated[int, typer.Option("--count", metavar="N", min=2, help="Pictures of each.")] = 5000,
    truncation: Truncation = 1.0,
    seed: Seed = 0,
    method: Method = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    budget: Budget = [],  # noqa: B006
    splits: Annotated[int, typer.Option(metavar="N", min=1, help="Parts for the inception score.")] = 10,
    rounds: TimingRounds = 5,
    batch: Batch = 50,
    threads: Threads = 1,
    statistics: Annotated[
        pathlib.Path | None, typer.Option(metavar="FILE.npz", help="Keep the reference's statistics.")
    ] = None,
    csv: Csv = None,
) -> None:
    """FID and inception score of exact attention and of methods, on the same noise."""
    check_outputs(csv, None)
    if statistics is not None:
        check_writable(statistics)
    if number < splits:
        raise UnsupportedAttentionError(f"--count {number} pictures cannot be cut into --splits {splits} parts")
    model, network = load_generator(checkpoint), FeatureNetwork(features)
    chosen = parse_classes(split_list(classes), model.config)
    # In any order, or some parts of the inception score might have more of a class than others.
    draw = Draw.of(model.config, chosen, number, truncation, seed, shuffled=True)
    swaps = swaps_of(method, setting, parse_lengths(budget) or [32, 64, 128], _keys(model))
    rows = []
    with use_threads(threads):
        real = reference_statistics(reference, network, model.config.output_dim)
        if statistics is not None:
            real.save(statistics)
        with tqdm(total=(len(swaps) - 1) * rounds, unit="pair", desc="time", disable=None, leave=False) as bar:
            costs = layer_costs(model, draw, swaps, rounds, bar)
        with tqdm(total=number * len(swaps), unit="picture", disable=None, leave=False) as bar:
            for swap, cost in zip(swaps, costs, strict=True):
                bar.set_description(swap.label)
                moments, guesses = Moments(), []
                for made in pictures(put_in(model, swap), draw, batch, bar):
                    seen, probabilities = network(made)
                    moments.update(seen)
                    guesses.append(probabilities)
                distance = frechet_distance(moments.gaussian(), real)
                mean, deviation = inception_score(torch.cat(guesses), splits)
                found = {"fid": distance, "inception_score": mean, "deviation": deviation}
                rows.append({"attention": swap.name, "budget": swap.budget, **found, **_cost_columns(cost, costs[0])})
    _show(rows, {"fid": ".2f", "inception_score": ".3f", "deviation": ".3f"}, csv)
    typer.echo(f"{number} pictures of each, truncation {truncation:g}, seed {seed}; features of {features}")


if __name__ == "__main__":
    main_of(app, "python -m recipes.biggan")
