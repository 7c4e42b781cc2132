"""Distill pretrained models to fast methods without labels, and measure what they can do afterwards.

    python -m recipes.benchmarks.distilled images --method linear     (DeiT-tiny, Imagenette; a thousand photographs)
    python -m recipes.benchmarks.distilled sentences --method linear  (MiniLM, sentences of STS-B; Spearman correlation)
    python -m recipes.benchmarks.distilled search --method linear     (MiniLM, WikiText; recall@1 on XQuAD)
    python -m recipes.benchmarks.distilled states --method linear     (MiniLM, novels; hidden states of another one)
    python -m recipes.benchmarks.distilled language --method linear   (GPT-2 of the books; nats per token)

Every method is measured three times: switched in without training, after layer-wise distillation (`hea.distill`), and
after fine-tuning on the exact model's outputs (its second stage). `linear` with a window is also measured without it,
because such models may learn to ignore their features. The data of the training is never that of the measurement, and
no labels are used. METHOD is a name or NAME:key=value; the feature map is "hedgehog" unless given, and nystromformer
has a convolution. With --output, results are kept in a folder, and a method and seed with a result is not repeated.

DATA is as for recipes.benchmarks.tasks, with `images/imagenette160-val-1000.zip`, `glue/STS-B`, `text/wikitext-2` and
`models/gpt2-books`.

Duration: on one core 10 to 20 minutes for a method with the default numbers of steps, mostly for the second stage.
Expected: the table of docs/training_results.md.
"""

import copy
import gzip
import hashlib
import json
import pathlib
import random
import statistics
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Annotated, Any, NamedTuple

import torch
import typer
from scipy.stats import spearmanr
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoTokenizer, BertModel, GPT2LMHeadModel, PreTrainedModel, ViTForImageClassification

import hf_efficient_attn as hea
from hf_efficient_attn.checkpoint.loading import no_progress_bar
from hf_efficient_attn.cli import main_of, parse_methods, table
from hf_efficient_attn.evaluation.capture import Batch
from hf_efficient_attn.evaluation.defaults import method_label
from hf_efficient_attn.evaluation.demo import minilm_folder
from hf_efficient_attn.io.json import write_json
from hf_efficient_attn.methods import MethodConfig, make_config
from hf_efficient_attn.training import DistillationOptions, FinetuningOptions
from hf_efficient_attn.training.batches import batch_stream
from hf_efficient_attn.training.finetuning import Finetuning, make_teacher
from hf_efficient_attn.training.wrappers import learned_parameters
from recipes.benchmarks.tasks import photographs, top_one
from recipes.common import commands
from recipes.common.data import glue
from recipes.common.data.image_tensors import Norm, Training, preprocessor_settings
from recipes.common.data.images import load
from recipes.common.retrieval import embed, ranks, tokenized, xquad

app = commands.new_app(no_args_is_help=True)

Method = commands.methods_option("linear", "--method")
Steps = Annotated[int, typer.Option(metavar="N", min=1, help="Steps of layer-wise distillation.")]
FinetuneSteps = Annotated[int, typer.Option(metavar="N", min=0, help="Steps of the second stage; 0 for none.")]
Output = Annotated[
    pathlib.Path | None, typer.Option(metavar="FOLDER", help="Keep results here, and do not repeat those it holds.")
]
Seeds = Annotated[int, typer.Option(metavar="N", min=1, help="Number of seeds, 0, 1, ...")]
Loss = Annotated[str, typer.Option(metavar="NAME", help="Loss of the distillation: output, weights or both.")]
Target = Annotated[str, typer.Option(metavar="NAME", help="Target of the second stage: hidden_states or logits.")]
LearningRate = Annotated[float, typer.Option(metavar="X", help="Learning rate of the second stage.")]
# What gives a method something to learn that learns nothing by default.
_LEARNING: dict[str, dict[str, Any]] = {
    **{name: {"feature_map": "hedgehog"} for name in ("linear", "performer", "flurka_linear")},
    "nystromformer": {"conv_kernel_size": 33},
}


class Task(NamedTuple):
    """A pretrained model, unlabelled data to distill it with, and a figure that says what it can do.

    Attributes:
        figure: the name of the figure.
        load: returns the exact model.
        batches: the training data for a seed.
        evaluate: returns the figure of a model.
        note: what is measured on what.
    """

    figure: str
    load: Callable[[], PreTrainedModel]
    batches: Callable[[int], Sequence[Batch]]
    evaluate: Callable[[Any], float]
    note: str


class Plan(NamedTuple):
    """How the models are trained."""

    steps: int
    finetune_steps: int
    loss: str
    target: str
    learning_rate: float


class Crops(Sequence[Batch]):
    """Random crops of pictures: batch i is the same in every run with the same seed.

    Args:
        path: zip file or folder of pictures.
        transform: the transform of training.
        size: pictures in a batch.
        count: number of batches.
        seed: of the pictures and crops.
        chosen: indices of the pictures to use; None for all.
        classes: the classes of the model's outputs, if the batches shall have labels.
    """

    def __init__(
        self,
        path: pathlib.Path,
        transform: Training,
        size: int,
        count: int,
        seed: int,
        chosen: Sequence[int] | None = None,
        classes: Sequence[str] | None = None,
    ) -> None:
        self._pictures, self._transform = load(str(path))[""], transform
        self._chosen = range(len(self._pictures)) if chosen is None else chosen
        self._size, self._count, self._seed, self._classes = size, count, seed, classes

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        generator = torch.Generator().manual_seed(self._seed * self._count + index)
        drawn = torch.randint(len(self._chosen), (self._size,), generator=generator).tolist()
        chosen = [self._chosen[i] for i in drawn]
        batch = {"pixel_values": torch.stack([self._transform(self._pictures.open(i), generator) for i in chosen])}
        if self._classes is not None:
            batch["labels"] = torch.tensor([self._classes.index(self._pictures.classes[i]) for i in chosen])
        return batch


def configs_of(method: Sequence[str]) -> dict[str, MethodConfig]:
    """The methods by their labels, each with something to learn."""
    found = []
    for config in parse_methods(list(method) or ["linear"], []).values():
        default = make_config(config.method)
        options = _LEARNING.get(config.method, {})
        found.append(
            make_config(config, **{k: v for k, v in options.items() if getattr(config, k) == getattr(default, k)})
        )
    return {method_label(config): config for config in found}


def distilled_figures(task: Task, config: MethodConfig, plan: Plan, seed: int) -> dict[str, float]:
    """The figure of a method switched in, distilled and fine-tuned."""
    with no_progress_bar():
        model = task.load().eval()
    switched = task.evaluate(hea.convert(model, config))
    hea.convert(model, "sdpa")
    options = FinetuningOptions(
        steps=max(1, plan.finetune_steps),
        target=plan.target,
        learning_rate=plan.learning_rate,
        attention_learning_rate=10 * plan.learning_rate,
    )
    teacher = make_teacher(model, options)
    batches = task.batches(seed)
    hea.distill(model, config, batches, steps=plan.steps, loss=plan.loss, options=DistillationOptions(seed=seed))
    figures = {"switched": switched, "distilled": task.evaluate(model)}
    if plan.finetune_steps:
        finetuning = Finetuning(model, teacher, options)
        stream = islice(batch_stream(batches, seed + 1, plan.finetune_steps), plan.finetune_steps)
        for batch in tqdm(stream, total=plan.finetune_steps, desc="fine-tuning", disable=None):
            finetuning.step(batch)
        finetuning.finish()
        figures["fine-tuned"] = task.evaluate(model)
    if getattr(config, "window_size", 0) and "feature_map" in config.to_dict():
        figures["without its window"] = task.evaluate(without_window(model, config))
    return figures


@torch.no_grad()
def without_window(model: PreTrainedModel, config: MethodConfig) -> PreTrainedModel:
    """A copy of a model in which the features attend to all keys. It shows whether they learned anything."""
    copied = copy.deepcopy(model)
    kept = {name: p.clone() for name, p in learned_parameters(copied).items()}
    hea.convert(copied, make_config(config, window_size=0))
    for name, p in learned_parameters(copied).items():
        p.copy_(kept[name])
    return copied


class Results(NamedTuple):
    """How many seeds there are, and where their results are kept, if anywhere."""

    seeds: int
    output: pathlib.Path | None
    csv: pathlib.Path | None


def kept_figures(task: Task, config: MethodConfig, plan: Plan, seed: int, output: pathlib.Path) -> dict[str, float]:
    """`distilled_figures` from a file if it exists, which is written otherwise."""
    asked = {"task": task.note, "method": config.to_dict(), "plan": plan._asdict(), "seed": seed}
    number = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]
    path = output / f"{config.method}-{seed}-{number}.json"
    if not path.is_file():
        output.mkdir(parents=True, exist_ok=True)
        write_json(path, {**asked, "figures": distilled_figures(task, config, plan, seed)})
    found: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))["figures"]
    return found


def measure(task: Task, method: Sequence[str], plan: Plan, results: Results) -> None:
    """Distill and measure every method, print the table, and write the figure of every seed."""
    commands.check_outputs(results.csv, None)
    configs, seeds = configs_of(method), results.seeds
    with no_progress_bar():
        exact = task.evaluate(task.load().eval())
    rows: list[dict[str, Any]] = []
    lines: list[dict[str, str]] = []
    for label, config in configs.items():
        found = []
        for seed in range(seeds):
            if results.output is None:
                found.append(distilled_figures(task, config, plan, seed))
            else:
                found.append(kept_figures(task, config, plan, seed, results.output))
            rows.append({"attention": label, "seed": seed, "exact": exact, **found[-1]})
            tqdm.write(f"{label}, seed {seed}: {found[-1]}")
        lines.append({"attention": label, "exact": f"{exact:.3f}"})
        lines[-1] |= {name: summary([figures[name] for figures in found]) for name in found[0]}
    columns = list(dict.fromkeys(name for line in lines for name in line))
    commands.write([dict.fromkeys(("attention", "seed", *columns[1:]), "") | row for row in rows], results.csv)
    typer.echo(table(columns, [[line.get(name, "") for name in columns] for line in lines]))
    typer.echo(
        f"\n{task.figure}: {task.note} {plan.steps} steps of distillation (loss {plan.loss}), {plan.finetune_steps} of "
        f"fine-tuning ({plan.target}, learning rate {plan.learning_rate:g}); {seeds} seed{'s' if seeds > 1 else ''}"
        f"{', mean and half the range' if seeds > 1 else ''}."
    )


def summary(values: Sequence[float]) -> str:
    """The mean, and half the range if there are several values."""
    mean = f"{statistics.fmean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ± {(max(values) - min(values)) / 2:.3f}"


@app.command(epilog="Example: python -m recipes.benchmarks.distilled images --method linear,flurka_linear")
def images(
    data: commands.Data = None,
    method: Method = [],  # noqa: B006 (typer copies it)
    steps: Steps = 300,
    finetune_steps: FinetuneSteps = 300,
    loss: Loss = "output",
    target: Target = "hidden_states",
    learning_rate: LearningRate = 5e-5,
    seeds: Seeds = 1,
    output: Output = None,
    csv: commands.Csv = None,
) -> None:
    """DeiT-tiny, distilled on crops of Imagenette: top-1 of a thousand photographs of a thousand classes."""
    source = commands.data_folder(data)
    folder = commands.existing(source / "models" / "deit-tiny-imagenet", "DeiT-tiny")
    path = commands.existing(source / "images" / "imagenette160-val-1000.zip", "Imagenette")
    transform = Training(224, Norm.of(preprocessor_settings(str(folder))), scale=(0.35, 1.0))
    tests = list(photographs(source, 224))
    task = Task(
        "top-1",
        lambda: ViTForImageClassification.from_pretrained(folder),
        lambda seed: Crops(path, transform, 8, steps + finetune_steps, seed),
        lambda model: top_one(model, tests, tqdm(disable=True)),
        "DeiT-tiny, 1,000 photographs of 224 x 224 pixels; distilled on crops of 1,000 pictures of Imagenette in "
        "batches of 8.",
    )
    measure(task, method, Plan(steps, finetune_steps, loss, target, learning_rate), Results(seeds, output, csv))


def text_batches(texts: Sequence[str], size: int, max_length: int, seed: int) -> list[Batch]:
    """Texts in random order as padded batches of MiniLM's tokens."""
    tokenizer, order = AutoTokenizer.from_pretrained(minilm_folder()), list(texts)
    random.Random(seed).shuffle(order)
    parts = [order[start : start + size] for start in range(0, len(order) - size + 1, size)]
    return [
        dict(tokenizer(part, padding=True, truncation=True, max_length=max_length, return_tensors="pt"))
        for part in parts
    ]


@app.command(epilog="Example: python -m recipes.benchmarks.distilled sentences --method linear,nystromformer")
def sentences(
    data: commands.Data = None,
    method: Method = [],  # noqa: B006
    steps: Steps = 300,
    finetune_steps: FinetuneSteps = 300,
    loss: Loss = "output",
    target: Target = "hidden_states",
    learning_rate: LearningRate = 5e-5,
    seeds: Seeds = 1,
    output: Output = None,
    csv: commands.Csv = None,
) -> None:
    """MiniLM, distilled on the training sentences of STS-B: Spearman correlation on its 1,500 pairs for development."""
    splits = glue.load("stsb", str(commands.existing(commands.data_folder(data) / "glue", "GLUE")))
    texts = [text for name in ("sentence1", "sentence2") for text in splits["train"][name]]
    pairs, tokenizer = splits["validation"], AutoTokenizer.from_pretrained(minilm_folder())

    def evaluate(model: BertModel) -> float:
        bar = tqdm(disable=True)
        sentences = (tokenized(tokenizer, pairs[name]) for name in ("sentence1", "sentence2"))
        first, second = (embed(model, tokenizer, own, bar, 128) for own in sentences)
        return float(spearmanr((first * second).sum(1).numpy(), list(pairs["label"])).statistic)

    task = Task(
        "Spearman correlation",
        lambda: BertModel.from_pretrained(minilm_folder()),
        lambda seed: text_batches(texts, 32, 128, seed)[: steps + finetune_steps],
        evaluate,
        "MiniLM, cosine similarity of 1,500 pairs of STS-B (dev); distilled on sentences of its training set in "
        "batches of 32.",
    )
    measure(task, method, Plan(steps, finetune_steps, loss, target, learning_rate), Results(seeds, output, csv))


def read_texts(paths: Sequence[pathlib.Path]) -> list[str]:
    """The contents of compressed text files."""
    found = []
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            found.append(file.read())
    return found


@app.command(epilog="Example: python -m recipes.benchmarks.distilled search --method linear:num_features=128")
def search(
    data: commands.Data = None,
    method: Method = [],  # noqa: B006
    steps: Steps = 300,
    finetune_steps: FinetuneSteps = 300,
    loss: Loss = "output",
    target: Target = "hidden_states",
    learning_rate: LearningRate = 5e-5,
    seeds: Seeds = 1,
    output: Output = None,
    csv: commands.Csv = None,
) -> None:
    """MiniLM, distilled on WikiText-2: recall@1 of the paragraphs that answer the questions of XQuAD."""
    source = commands.data_folder(data)
    files = [commands.existing(source / "text" / "wikitext-2" / f"{name}.txt.gz", "WikiText") for name in
             ("valid", "test")]  # fmt: skip
    paragraphs = [line.strip() for text in read_texts(files) for line in text.splitlines() if len(line) > 200]
    # As many sentences, about as long as a question.
    texts = paragraphs + [part for one in paragraphs for part in one.split(" . ")[:1]]
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    corpus = xquad(source, tokenizer)

    def evaluate(model: BertModel) -> float:
        bar = tqdm(disable=True)
        asked, found = (embed(model, tokenizer, texts, bar) for texts in (corpus.questions, corpus.texts))
        return (ranks(asked @ found.t(), corpus.own) == 1).double().mean().item()

    def batches(seed: int) -> list[Batch]:
        long, short = (text_batches(part, 8, 256, seed) for part in (paragraphs, texts[len(paragraphs) :]))
        return [batch for pair in zip(long, short, strict=True) for batch in pair]

    task = Task(
        "recall@1",
        lambda: BertModel.from_pretrained(minilm_folder()),
        batches,
        evaluate,
        f"MiniLM, {len(corpus.questions)} questions and {len(corpus.texts)} paragraphs of XQuAD; distilled on "
        "paragraphs of WikiText-2 of up to 256 tokens and on their first sentences, in batches of 8.",
    )
    measure(task, method, Plan(steps, finetune_steps, loss, target, learning_rate), Results(seeds, output, csv))


def windows(text: str, folder: pathlib.Path, length: int) -> Tensor:
    """The tokens of a text in windows (windows, length), without special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"][0]
    return ids[: len(ids) // length * length].view(-1, length)


def books(data: pathlib.Path) -> list[str]:
    """The text of every book, in the order of their file names."""
    return read_texts(sorted(commands.existing(data / "text" / "books", "books").glob("*.txt.gz")))


def split_batches(ids: Tensor, size: int, seed: int) -> list[Batch]:
    """Windows (windows, length) in random order as batches."""
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": part} for part in ids[order].split(size) if len(part) == size]


@app.command(epilog="Example: python -m recipes.benchmarks.distilled states --method linear:num_features=256")
def states(
    data: commands.Data = None,
    method: Method = [],  # noqa: B006
    steps: Steps = 300,
    finetune_steps: FinetuneSteps = 300,
    loss: Loss = "output",
    target: Target = "hidden_states",
    learning_rate: LearningRate = 5e-5,
    seeds: Seeds = 1,
    output: Output = None,
    length: Annotated[int, typer.Option(metavar="N", min=2, max=512, help="Tokens of a window.")] = 512,
    csv: commands.Csv = None,
) -> None:
    """MiniLM, distilled on windows of eight novels: the error of its last hidden states on windows of another."""
    texts = books(commands.data_folder(data))
    # Without title pages and tables of contents.
    test, *others = (windows(text[9000 : 9000 + 400_000], minilm_folder(), length) for text in reversed(texts))
    train, test = torch.cat(others), test[:16]
    with torch.no_grad(), no_progress_bar():
        wanted = BertModel.from_pretrained(minilm_folder()).eval()(input_ids=test).last_hidden_state

    @torch.no_grad()
    def evaluate(model: nn.Module) -> float:
        found = model(input_ids=test).last_hidden_state
        return ((found - wanted).norm() / wanted.norm()).item()

    task = Task(
        "error of the last hidden states",
        lambda: BertModel.from_pretrained(minilm_folder()),
        lambda seed: split_batches(train, max(1, 1024 // length), seed),
        evaluate,
        f"MiniLM, Frobenius norm, 16 windows of {length} tokens of a novel; distilled on {len(train)} windows of "
        "others in batches of about 1,024 tokens.",
    )
    measure(task, method, Plan(steps, finetune_steps, loss, target, learning_rate), Results(seeds, output, csv))


@app.command(epilog="Example: python -m recipes.benchmarks.distilled language --method linear,linear:window_size=128")
def language(
    data: commands.Data = None,
    method: Method = [],  # noqa: B006
    steps: Steps = 300,
    finetune_steps: FinetuneSteps = 300,
    loss: Loss = "output",
    target: Target = "logits",
    learning_rate: LearningRate = 2e-4,
    seeds: Seeds = 1,
    output: Output = None,
    csv: commands.Csv = None,
) -> None:
    """GPT-2 of the books, distilled on the first 95 % of each: nats per token on windows of the last 5 %."""
    source = commands.data_folder(data)
    folder, length = commands.existing(source / "models" / "gpt2-books", "GPT-2"), 2048
    texts = books(source)
    train = torch.cat([windows(text[: int(0.95 * len(text))], folder, length) for text in texts])
    ends = [windows(text[int(0.95 * len(text)) :], folder, length) for text in texts]
    test = torch.cat([end[: max(1, round(24 * len(end) / sum(map(len, ends))))] for end in ends])

    @torch.no_grad()
    def evaluate(model: GPT2LMHeadModel) -> float:
        return statistics.fmean(model(input_ids=part, labels=part).loss.item() for part in test.split(1))

    task = Task(
        "nats per token",
        lambda: GPT2LMHeadModel.from_pretrained(folder),
        lambda seed: split_batches(train, 1, seed),
        evaluate,
        f"GPT-2 of the books, {len(test)} windows of 2,048 tokens of the last 5 % of each book; distilled on single "
        "windows of the rest.",
    )
    measure(task, method, Plan(steps, finetune_steps, loss, target, learning_rate), Results(seeds, output, csv))


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.distilled")
