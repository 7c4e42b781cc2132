"""What a method costs on a task, without training: search and image classification by real pretrained models.

    python -m recipes.benchmarks.tasks search --data DATA      (MiniLM on XQuAD: which of 240 paragraphs answers?)
    python -m recipes.benchmarks.tasks images --data DATA      (DeiT-tiny on a photograph of each ImageNet class)
    python -m recipes.benchmarks.tasks classify MODEL PICTURES --layers t2t.0,t2t.1      (any image classifier)

search: every question and every paragraph of XQuAD (English) is embedded by MiniLM, mean-pooled over up to 512 tokens;
recall@1 is the share of the 1,190 questions whose own paragraph has the highest cosine of all 240, MRR the mean of one
over its rank. images: top-1 is the share of photographs whose class comes first. classify: the same for a checkpoint
and pictures of yours, in layers of your choice; "as exact" is the share of pictures that get the class that exact
attention gives them, and "faster" the time of all pictures with exact attention over that with the method. DATA holds
`squad/xquad.en.json.gz`, `models/deit-tiny-imagenet` and `images/imagenet1k-sample-*.zip`; by default it is $HEA_DATA
or ../shared/data.

To expect of exact attention: recall@1 .887; top-1 .783 on the thousand photographs at 224 pixels, .750 on the hundred
at 512. How they are cut moves that by two hundredths: whole squares have .804 at 224, the whole picture squeezed .783.
"""

import dataclasses
import gzip
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor
from torch.utils.benchmark import timer
from tqdm import tqdm

import hf_efficient_attn as hea
from hf_efficient_attn.cli import Settings, label, main_of, parse_lengths, parse_methods, table
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.demo import minilm_folder, quiet_loading
from hf_efficient_attn.integration.layers import parse_layers
from hf_efficient_attn.methods import MethodConfig
from recipes.benchmarks import error
from recipes.benchmarks.error import Data, data_folder, there
from recipes.benchmarks.report import Csv, check_outputs, write_csv
from recipes.data.image_classes import class_indices
from recipes.data.image_tensors import Evaluation, Norm, preprocessor_settings
from recipes.data.images import EVAL_SPLITS, load, pick

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)

# One draw of each method; the first token, from which a photograph's class is read, may be a global one.
METHODS = (*(name for name in error.METHODS if "draw=" not in name), "longformer:global_tokens=1")

Budget = Annotated[list[str], typer.Option(metavar="N", show_default=False, help="Columns. [default: 64,128,256]")]
Method = Annotated[
    list[str],
    typer.Option(metavar="NAME", show_default=False, help="NAME or NAME:key=value. [default: all, both near fields]"),
]


def xquad_articles(data: pathlib.Path) -> list[list[dict[str, Any]]]:
    """The paragraphs, with their questions, of each article of XQuAD (English)."""
    path = there(data / "squad" / "xquad.en.json.gz", "questions and paragraphs")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [article["paragraphs"] for article in json.load(file)["data"]]


def xquad(data: pathlib.Path) -> tuple[list[str], list[str], Tensor]:
    """Paragraphs, questions, and for each question the number of its paragraph."""
    paragraphs = [paragraph for article in xquad_articles(data) for paragraph in article]
    questions = [(qa["question"], i) for i, paragraph in enumerate(paragraphs) for qa in paragraph["qas"]]
    return [p["context"] for p in paragraphs], [q for q, _ in questions], torch.tensor([i for _, i in questions])


@torch.inference_mode()
def embed(model, tokenizer, texts: Sequence[str], bar: tqdm, batch: int = 16) -> Tensor:
    """Normalised mean-pooled embeddings (texts, width), in batches of texts of like length."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    found: list[Tensor] = [torch.empty(0)] * len(texts)
    for at in range(0, len(order), batch):
        here = order[at : at + batch]
        inputs = tokenizer([texts[i] for i in here], padding=True, truncation=True, max_length=512, return_tensors="pt")
        states, there = model(**inputs).last_hidden_state, inputs["attention_mask"].unsqueeze(-1)
        pooled = torch.nn.functional.normalize((states * there).sum(1) / there.sum(1), dim=1)
        for i, row in zip(here, pooled, strict=True):
            found[i] = row
        bar.update(len(here))
    return torch.stack(found)


def ranks(questions: Tensor, paragraphs: Tensor, own: Tensor) -> Tensor:
    """1 + how many paragraphs are closer to a question than its own: (Q, D), (P, D), (Q,) -> (Q,)."""
    similar = questions @ paragraphs.t()
    return 1 + (similar > similar.gather(1, own[:, None])).sum(1)


def photographs(data: pathlib.Path, pixels: int, batch: int = 20) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of pictures (b, 3, pixels, pixels) with their classes (b,): all 1,000 at 224 pixels, else 100 originals.

    Of each its middle, 7/8 of the shorter side wide, as in the evaluation of DeiT: the picture is resized so that its
    shorter side is 8/7 of `pixels` (256 of 224), and the square in the middle cut out.
    """
    name = "imagenet1k-sample-256px.zip" if pixels == 224 else "imagenet1k-sample-original-100.zip"
    folder = there(data / "models" / "deit-tiny-imagenet", "DeiT-tiny")
    path = there(data / "images" / name, "photographs")
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    # A class is the rank of its WordNet number, with which the file names begin, among the thousand.
    numbers = load(str(path.with_name("imagenet1k-sample-256px.zip")))[""].class_names()
    pictures, cut = load(str(path))[""], Evaluation(pixels, Norm.of(settings), 224 / 256)
    for at in range(0, len(pictures), batch):
        here = range(at, min(at + batch, len(pictures)))
        classes = torch.tensor([numbers.index(pictures.classes[i]) for i in here])
        yield torch.stack([cut(pictures.open(i)) for i in here]), classes


@torch.inference_mode()
def top_one(model, batches: Iterable[tuple[Tensor, Tensor]], bar: tqdm) -> float:
    """Share of the photographs whose class comes first: batches of pictures (b, 3, P, P) and classes (b,)."""
    right = total = 0
    for pictures, classes in batches:
        guessed = model(pixel_values=pictures, interpolate_pos_encoding=True).logits.argmax(1)
        right, total = right + int((guessed == classes).sum()), total + len(classes)
        bar.update(len(classes))
    return right / total


def for_length(config: MethodConfig, tokens: int) -> MethodConfig:
    """The config with tables for so many tokens, where it has tables; a model of fewer positions would set less."""
    return dataclasses.replace(config, max_length=tokens) if hasattr(config, "max_length") else config


class Setting(NamedTuple):
    """A method at a budget; None and "all" are exact attention."""

    name: str
    budget: int | str
    config: MethodConfig | None


def settings_of(method: list[str], setting: Sequence[str], budget: list[str]) -> list[Setting]:
    """Every method with every budget, checked before any work."""
    budgets = parse_lengths(budget) or [64, 128, 256]
    configs = parse_methods(method or METHODS, setting)
    return [
        Setting(name, columns, config.with_budget(columns)) for name, config in configs.items() for columns in budgets
    ]


def run(
    load: Callable[[], Any], wanted: Sequence[Setting], total: int, evaluate, layers: Sequence | None = None
) -> list[dict[str, Any]]:
    """A row for exact attention and one for every setting: evaluate(model, bar) -> figures by name."""
    settings = [Setting("sdpa", "all", None), *wanted]
    # A method without a budget is the same at all of them.
    figures: dict[MethodConfig | None, dict[str, float]] = dict.fromkeys(config for _, _, config in settings)
    with tqdm(total=total * len(figures), disable=None, leave=False) as bar:
        for config in figures:
            with quiet_loading():
                model = load().eval()
            bar.set_description("sdpa" if config is None else label(config))
            if config is not None:
                hea.convert(model, config, layers=layers)
            figures[config] = evaluate(model, bar)
    return [{"attention": name, "budget": columns, **figures[config]} for name, columns, config in settings]


def show(rows: list[dict[str, Any]], csv: pathlib.Path | None, note: str) -> None:
    """A line for each method, a column for each budget and figure; exact attention has the same in all budgets."""
    if csv is not None:
        write_csv(csv, rows)
    budgets = list(dict.fromkeys(row["budget"] for row in rows[1:]))
    figures = [name for name in rows[0] if name not in ("attention", "budget")]
    cells: dict[str, list[str]] = {}
    for row in [rows[0]] * len(budgets) + rows[1:]:
        cells.setdefault(row["attention"], [row["attention"]]).extend(f"{row[name]:.3f}" for name in figures)
    typer.echo(table(("attention", *(f"{name}, {budget}" for budget in budgets for name in figures)), cells.values()))
    typer.echo(f"\n{note} Budgets are columns.")


@app.command(epilog="Example: python -m recipes.benchmarks.tasks search --method kdeformer --budget 64")
def search(
    data: Data = None,
    budget: Budget = [],  # noqa: B006 (typer copies it)
    method: Method = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    csv: Csv = None,
) -> None:
    """Recall@1 and MRR of MiniLM on XQuAD: the paragraph of each question among all."""
    from transformers import AutoTokenizer, BertModel

    check_outputs(csv, None)
    wanted = settings_of(method, setting, budget)
    paragraphs, questions, own = xquad(data_folder(data))
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())

    def evaluate(model, bar) -> dict[str, float]:
        found = ranks(embed(model, tokenizer, questions, bar), embed(model, tokenizer, paragraphs, bar), own)
        return {"recall@1": (found == 1).double().mean().item(), "mrr": (1 / found).mean().item()}

    total = len(paragraphs) + len(questions)
    rows = run(lambda: BertModel.from_pretrained(minilm_folder()), wanted, total, evaluate)
    show(rows, csv, f"MiniLM, {len(questions)} questions, {len(paragraphs)} paragraphs; not trained further.")


@app.command(epilog="Example: python -m recipes.benchmarks.tasks images --pixels 512 --budget 256")
def images(
    data: Data = None,
    pixels: Annotated[
        int, typer.Option(metavar="N", min=32, help="224: the thousand; other: the 100 originals.")
    ] = 224,
    budget: Budget = [],  # noqa: B006
    method: Method = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    csv: Csv = None,
) -> None:
    """Top-1 of DeiT-tiny on photographs."""
    from transformers import ViTForImageClassification

    check_outputs(csv, None)
    tokens, data = (pixels // 16) ** 2 + 1, data_folder(data)
    wanted = [one._replace(config=for_length(one.config, tokens)) for one in settings_of(method, setting, budget)]
    folder = data / "models" / "deit-tiny-imagenet"
    batches = list(photographs(data, pixels))
    count = sum(len(classes) for _, classes in batches)
    rows = run(
        lambda: ViTForImageClassification.from_pretrained(folder),
        wanted,
        count,
        lambda model, bar: {"top-1": top_one(model, batches, bar)},
    )
    size = f"{pixels} x {pixels} pixels ({tokens} tokens)"
    show(rows, csv, f"DeiT-tiny, {count} photographs of {size}; not trained further.")


def own_pictures(source: str, split: str | None, model, settings: dict[str, Any], count: int | None):
    """Batches of pictures and classes out of a folder, zip file or data set, cut and scaled as the preprocessor says.

    Raises:
        ValueError: there is no such split, or its classes are none of the model's.
    """
    splits = load(source)
    found = splits.get("") or pick(splits, split, EVAL_SPLITS, source)
    if found is None:
        raise ValueError(f"{source} has no split to evaluate on; name one by --split: {', '.join(splits)}")
    names = [str(model.config.id2label[i]) for i in range(model.config.num_labels)]
    indices, _ = class_indices(found.class_names(), names, own_order=found.order is not None)
    chosen = range(len(found))
    if count is not None and count < len(found):
        chosen = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))[:count].tolist()
    pixels, edge = model.config.image_size, (settings.get("size") or {}).get("shortest_edge")
    cut, batches = Evaluation(pixels, Norm.of(settings), pixels / edge if edge else 1.0), []
    for at in tqdm(range(0, len(chosen), 20), desc="reading", disable=None, leave=False):
        here = chosen[at : at + 20]
        classes = torch.tensor([indices[found.classes[i]] for i in here])
        batches.append((torch.stack([cut(found.open(i)) for i in here]), classes))
    return batches


@torch.inference_mode()
def guesses(model, batches: Iterable[tuple[Tensor, Tensor]], bar: tqdm) -> tuple[Tensor, float]:
    """The class of every picture, (pictures,), and the seconds that the model took for all of them."""
    found, seconds = [], 0.0
    for pictures, classes in batches:
        start = timer()
        logits = model(pixel_values=pictures).logits
        seconds += timer() - start
        found.append(logits.argmax(1))
        bar.update(len(classes))
    return torch.cat(found), seconds


@app.command(epilog="Example: python -m recipes.benchmarks.tasks classify t2t cifar10.zip --layers t2t.0 --budget 64")
def classify(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Image classifier: a folder or a hub id.")],
    pictures: Annotated[str, typer.Argument(metavar="PICTURES", help="Folder, zip file or hub id, with classes.")],
    split: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of the pictures. [default: validation, test]")
    ] = None,
    layers: Annotated[str | None, typer.Option(metavar="LIST", help="Such as t2t.0,0-5. [default: all]")] = None,
    count: Annotated[int | None, typer.Option(metavar="N", min=1, help="So many pictures, drawn at random.")] = None,
    budget: Budget = [],  # noqa: B006
    method: Method = [],  # noqa: B006
    setting: Settings = [],  # noqa: B006
    csv: Csv = None,
) -> None:
    """Top-1 of an image classifier, at its own size of picture, with methods swapped in."""
    from transformers import AutoModelForImageClassification

    check_outputs(csv, None)
    wanted, chosen = settings_of(method, setting, budget), None if layers is None else parse_layers(layers)

    def fresh():
        # Exact, whatever a converted checkpoint says of itself: its row is what all others are compared with.
        return AutoModelForImageClassification.from_pretrained(model, attn_implementation="sdpa")

    try:
        with quiet_loading():
            first = fresh()
        settings = preprocessor_settings(model)
    except (OSError, ValueError) as reason:
        raise UnsupportedAttentionError(f"{model} is no image classifier with a preprocessor: {reason}") from reason
    try:
        batches = own_pictures(pictures, split, first, settings, count)
    except ValueError as reason:
        raise UnsupportedAttentionError(str(reason)) from reason
    truth = torch.cat([classes for _, classes in batches])
    exact: list[tuple[Tensor, float]] = []

    def evaluate(one, bar) -> dict[str, float]:
        guessed, seconds = guesses(one, batches, bar)
        exact.append((guessed, seconds))
        same = (guessed == exact[0][0]).double().mean().item()
        return {
            "top-1": (guessed == truth).double().mean().item(), "as exact": same, "faster": exact[0][1] / seconds,
        }  # fmt: skip

    rows = run(fresh, wanted, len(truth), evaluate, chosen)
    where = "all layers" if layers is None else f"layers {layers}"
    show(rows, csv, f"{len(truth)} pictures of {first.config.image_size} pixels, {where}; not trained further.")


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.tasks")
