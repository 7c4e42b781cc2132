"""Measure what the methods lose on a task without training: search and image classification with pretrained models.

    python -m recipes.benchmarks.tasks search --data DATA      (MiniLM on XQuAD: which of 240 paragraphs answers?)
    python -m recipes.benchmarks.tasks search --data DATA --unit article --tokens 8192   (which of 48 whole articles?)
    python -m recipes.benchmarks.tasks search --data DATA --chunks 256,512 --threads 1   (whole documents or chunks?)
    python -m recipes.benchmarks.tasks images --data DATA      (DeiT-tiny on a photograph of each ImageNet class)
    python -m recipes.benchmarks.tasks classify MODEL PICTURES --layers t2t.0,t2t.1      (any image classifier)

`search` embeds questions and texts with MiniLM, mean-pooled over up to `--tokens` tokens; beyond 512 the position table
is repeated. recall@1 is the share of the questions whose own text has the highest cosine similarity, and MRR the mean
reciprocal rank of the own text. The texts are XQuAD's paragraphs or joined articles, or (`--unit book`) 18 documents of
8,000 tokens from nine novels, with 144 passages of 100 tokens of them as questions. With `--chunks`, texts are also
divided: the embedding of a text is then the mean of those of its chunks, or its similarity that of its best chunk.
`images` and `classify` measure top-1. "As exact" is the share of pictures with the same class as with exact attention,
and "faster" the time of all pictures with exact attention divided by that with the method. DATA holds
`squad/xquad.en.json.gz`, `text/books`, `models/deit-tiny-imagenet` and `images/imagenet1k-sample-*.zip`.

Duration: 1.5 minutes on one core for exact attention on the thousand photographs, and more for all methods; six minutes
for the search with chunks. Expected with exact attention: recall@1 .887 of paragraphs, of articles .839 (.732 if cut at
256 tokens), and of books what docs/guides/long_documents.md shows; top-1 .783 on the thousand photographs at 224
pixels, .750 on the hundred at 512.
"""

import functools
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.utils.benchmark import timer
from tqdm import tqdm
from transformers import AutoModelForImageClassification, AutoTokenizer, BertModel, PreTrainedModel

import hf_efficient_attn as hea
from hf_efficient_attn.checkpoint.loading import no_progress_bar
from hf_efficient_attn.cli import main_of, parse_lengths, parse_methods
from hf_efficient_attn.cli.demo import minilm_folder
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.timing import use_threads
from hf_efficient_attn.integration.layers import parse_layers
from hf_efficient_attn.methods import MethodConfig
from recipes.common import commands
from recipes.common import inputs as real
from recipes.common.arguments import for_length
from recipes.common.data.image_tensors import Evaluation, Norm, preprocessor_settings
from recipes.common.data.images import EVAL_SPLITS, class_indices, load, pick
from recipes.common.inputs import MINILM_TOKENS, embed, photographs

app = commands.new_app(no_args_is_help=True)

# Without the papers' sampling, but with a global first token, from which the class of a photograph is read.
METHODS = (*(name for name in commands.METHODS if "draw=" not in name), "longformer:global_tokens=1")

Budget = commands.numbers_option("Budgets in columns", "64,128,256")
Method = commands.methods_option("all, both near fields")
# Pictures (b, 3, P, P) and their classes (b,).
Batches = Sequence[tuple[Tensor, Tensor]]


@torch.inference_mode()
def guesses(model: PreTrainedModel, batches: Batches, **options: Any) -> Tensor:
    """The predicted class of every picture (pictures,)."""
    return torch.cat([model(pixel_values=pictures, **options).logits.argmax(1) for pictures, _ in batches])


def top_one(model: PreTrainedModel, batches: Batches) -> float:
    """Share of the photographs that are classified correctly, at any resolution."""
    classes = torch.cat([classes for _, classes in batches])
    return (guesses(model, batches, interpolate_pos_encoding=True) == classes).double().mean().item()


def settings_of(method: list[str], budget: list[str]) -> dict[tuple[str, int], MethodConfig]:
    """The config of every method at every budget, checked before any work."""
    budgets, configs = parse_lengths(budget) or [64, 128, 256], parse_methods(method or METHODS)
    return {(name, n): config.with_budget(n) for name, config in configs.items() for n in budgets}


def run(
    load: Callable[[], PreTrainedModel],
    settings: Mapping[tuple[str, int], MethodConfig],
    evaluate: Callable[[Any], dict[str, float]],
    layers: Sequence[int | str] | None = None,
) -> list[dict[str, Any]]:
    """Evaluate a model with exact attention and with every setting in some layers or all; one row for each."""
    # A method without a budget has the same config for all of them and runs once.
    figures: dict[MethodConfig | None, dict[str, float]] = dict.fromkeys([None, *settings.values()])
    for config in tqdm(figures, disable=None, leave=False):
        with no_progress_bar():
            model = load().eval()
        figures[config] = evaluate(model if config is None else hea.convert(model, config, layers=layers))
    rows = [{"attention": name, "budget": n, **figures[config]} for (name, n), config in settings.items()]
    return [{"attention": "sdpa", "budget": "all", **figures[None]}, *rows]


def show(rows: list[dict[str, Any]], csv: pathlib.Path | None, note: str) -> None:
    """Print a line for each method and budget, with all figures."""
    columns = {name: f"{{{name}}}" if name in ("attention", "budget") else f"{{{name}:.3f}}" for name in rows[0]}
    commands.report(rows, columns, f"{note} Budgets in columns.", csv=csv)


@app.command(epilog="Example: python -m recipes.benchmarks.tasks search --method kdeformer --budget 64")
def search(
    data: commands.Data = None,
    budget: Budget = [],  # noqa: B006 (typer copies it)
    method: Method = [],  # noqa: B006
    unit: commands.option(
        str | None,
        "What is searched: paragraph or article of XQuAD, or book. [default: paragraph; book with --chunks]",
        metavar="UNIT",
    ) = None,
    tokens: commands.option(int | None, "Longer texts are cut. [default: 512; 8192 for books]", min=3) = None,
    chunk: commands.numbers_option(
        "Tokens of the chunks that texts are also divided into, for exact attention", "none", "--chunks"
    ) = [],  # noqa: B006
    threads: commands.Threads = None,
    csv: commands.Csv = None,
) -> None:
    """Measure recall@1 and MRR of MiniLM: finding the text of each question among all, whole or in chunks."""
    sizes = parse_lengths(chunk)
    unit = unit or ("book" if sizes else "paragraph")
    commands.check_known("--unit", [unit], ("paragraph", "article", "book"))
    if any(not 3 <= size <= MINILM_TOKENS for size in sizes):
        raise UnsupportedAttentionError(f"--chunks: MiniLM was trained with chunks of 3 to {MINILM_TOKENS} tokens")
    # With chunks, the methods that need no training, with their default budget.
    wanted = settings_of(method or (["auto,nearfar"] if sizes else []), budget or (["256"] if sizes else []))
    folder, tokenizer = commands.data_folder(data), AutoTokenizer.from_pretrained(minilm_folder())
    corpus = real.books(folder, tokenizer) if unit == "book" else real.xquad(folder, tokenizer, unit)
    longest, count = tokens or (8192 if unit == "book" else MINILM_TOKENS), len(corpus.texts)

    def figures(similar: Tensor, seconds: float) -> dict[str, float]:
        found = real.ranks(similar, corpus.own)
        recall, mrr = (found == 1).double().mean().item(), (1 / found).mean().item()
        return {"recall@1": recall, "mrr": mrr, "CPU s": seconds / count}

    def evaluate(model: BertModel, cut: int = longest) -> dict[str, float]:
        asked, start = embed(model, tokenizer, corpus.questions), time.process_time()
        found = embed(model, tokenizer, corpus.texts, cut)
        return figures(asked @ found.t(), time.process_time() - start)

    def in_chunks() -> Iterator[dict[str, Any]]:
        model = real.long_minilm(MINILM_TOKENS).eval()
        if longest > MINILM_TOKENS:
            yield {"attention": f"sdpa, cut at {MINILM_TOKENS}", "budget": "all", **evaluate(model, MINILM_TOKENS)}
        asked = embed(model, tokenizer, corpus.questions)
        for size in sizes:
            pieces, own = real.chunks(tokenizer, corpus.texts, size)
            start = time.process_time()
            embedded = embed(model, tokenizer, pieces, size)
            seconds = time.process_time() - start
            for name, similar in real.similarities(asked, embedded, own, count).items():
                yield {"attention": f"sdpa, {name} chunks of {size}", "budget": "all", **figures(similar, seconds)}

    with use_threads(threads):
        rows = run(lambda: real.long_minilm(longest), wanted, evaluate)
        rows += in_chunks() if sizes else []
    note = f"MiniLM, {len(corpus.questions)} questions, {count} {unit}s, up to {longest} tokens; no training."
    show(rows, csv, f"{note} CPU seconds of a text, all threads together.")


@app.command(epilog="Example: python -m recipes.benchmarks.tasks images --pixels 512 --budget 256")
def images(
    data: commands.Data = None,
    pixels: commands.option(
        int, "Resolution: 224 for the thousand photographs, others for the 100 originals.", min=32
    ) = 224,
    budget: Budget = [],  # noqa: B006
    method: Method = [],  # noqa: B006
    csv: commands.Csv = None,
) -> None:
    """Measure top-1 of DeiT-tiny on photographs."""
    tokens, data = (pixels // 16) ** 2 + 1, commands.data_folder(data)
    wanted = {key: for_length(config, tokens) for key, config in settings_of(method, budget).items()}
    folder, batches = real.deit(data), list(photographs(data, pixels))
    count = sum(len(classes) for _, classes in batches)
    load = functools.partial(AutoModelForImageClassification.from_pretrained, folder)
    rows = run(load, wanted, lambda model: {"top-1": top_one(model, batches)})
    size = f"{pixels} x {pixels} pixels ({tokens} tokens)"
    show(rows, csv, f"DeiT-tiny, {count} photographs of {size}; no training.")


def own_pictures(source: str, split: str | None, model: PreTrainedModel, settings: dict[str, Any]) -> Batches:
    """Batches of pictures and classes from a folder, zip file or data set, preprocessed as the settings say."""
    splits = load(source)
    pictures = splits.get("") or pick(splits, split, EVAL_SPLITS, source)
    if pictures is None:
        raise ValueError(f"{source} has no split to evaluate on: give one of {', '.join(splits)} with --split")
    names = [str(model.config.id2label[i]) for i in range(model.config.num_labels)]
    indices, _ = class_indices(pictures.class_names(), names, own_order=pictures.order is not None)
    pixels, edge = model.config.image_size, (settings.get("size") or {}).get("shortest_edge")
    transform = Evaluation(pixels, Norm.of(settings), pixels / edge if edge else 1.0)
    return list(real.picture_batches(pictures, range(len(pictures)), indices, transform))


@app.command(epilog="Example: python -m recipes.benchmarks.tasks classify t2t cifar10.zip --layers t2t.0 --budget 64")
def classify(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Image classifier: a folder or a hub id.")],
    pictures: Annotated[
        str, typer.Argument(metavar="PICTURES", help="Folder, zip file or hub id of pictures with classes.")
    ],
    split: commands.option(str | None, "Split of the pictures. [default: validation, test]", metavar="NAME") = None,
    layers: commands.option(str | None, "Layers to convert, such as t2t.0,0-5. [default: all]", metavar="LIST") = None,
    budget: Budget = [],  # noqa: B006
    method: Method = [],  # noqa: B006
    csv: commands.Csv = None,
) -> None:
    """Measure top-1 of an image classifier at its own resolution, with other attention methods."""
    wanted, chosen = settings_of(method, budget), None if layers is None else parse_layers(layers)

    # Exact attention even for a converted checkpoint, since all other settings are compared with it.
    load_exact = functools.partial(AutoModelForImageClassification.from_pretrained, model, attn_implementation="sdpa")
    try:
        with no_progress_bar():
            first = load_exact()
        batches = own_pictures(pictures, split, first, preprocessor_settings(model))
    except (OSError, ValueError) as reason:
        raise UnsupportedAttentionError(f"{model} does not classify {pictures}: {reason}") from reason
    truth = torch.cat([classes for _, classes in batches])
    exact: list[tuple[Tensor, float]] = []

    def evaluate(converted: PreTrainedModel) -> dict[str, float]:
        guesses(converted, batches[:1])  # what first calls take does not count
        start = timer()
        guessed = guesses(converted, batches)
        seconds = timer() - start
        exact.append((guessed, seconds))
        same, right = ((guessed == other).double().mean().item() for other in (exact[0][0], truth))
        return {"top-1": right, "as exact": same, "faster": exact[0][1] / seconds}

    rows = run(load_exact, wanted, evaluate, chosen)
    where = "all layers" if layers is None else f"layers {layers}"
    show(rows, csv, f"{len(truth)} pictures of {first.config.image_size} pixels, {where}; no training.")


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.tasks")
