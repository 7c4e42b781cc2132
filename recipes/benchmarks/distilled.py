"""Distill pretrained models to fast methods without labels, and measure what they can do afterwards.

    python -m recipes.benchmarks.distilled images --method linear     (DeiT-tiny, Imagenette; a thousand photographs)
    python -m recipes.benchmarks.distilled sentences --method linear  (MiniLM, sentences of STS-B; Spearman correlation)
    python -m recipes.benchmarks.distilled search --method linear     (MiniLM, WikiText; recall@1 on XQuAD)
    python -m recipes.benchmarks.distilled states --method linear     (MiniLM, novels; hidden states of another one)
    python -m recipes.benchmarks.distilled language --method linear   (GPT-2 of the books; nats per token)

Every method is measured three times: switched in without training, after layer-wise distillation (`hea.distill`), and
after fine-tuning on the exact model's outputs (its second stage). The data of the training is never that of the
measurement, and no labels are used. METHOD is a name or NAME:key=value; the feature map is "hedgehog" unless given, and
nystromformer has a convolution.

DATA is as for recipes.benchmarks.tasks, with `images/imagenette160-val-1000.zip`, `glue/STS-B`, `text/wikitext-2` and
`models/gpt2-books`.

Duration: on one core 10 to 20 minutes for a method with the default numbers of steps, mostly for the second stage.
Expected: the table of recipes/README.md.
"""

import pathlib
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Annotated, Any, NamedTuple

import torch
import typer
from scipy.stats import spearmanr
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer, BertModel, GPT2LMHeadModel, PreTrainedModel, ViTForImageClassification

import hf_efficient_attn as hea
from hf_efficient_attn.checkpoint.loading import no_progress_bar
from hf_efficient_attn.cli import main_of, parse_methods
from hf_efficient_attn.cli.demo import minilm_folder
from hf_efficient_attn.evaluation.capture import Batch
from hf_efficient_attn.evaluation.defaults import method_label
from hf_efficient_attn.io.reading import read_text
from hf_efficient_attn.methods import MethodConfig, make_config
from hf_efficient_attn.training import DistillationOptions, FinetuningOptions
from hf_efficient_attn.training.finetuning import Finetuning, make_teacher
from hf_efficient_attn.training.steps import batch_stream
from recipes.benchmarks.tasks import top_one
from recipes.common import commands
from recipes.common.data import glue
from recipes.common.data.image_tensors import Norm, Training, preprocessor_settings
from recipes.common.data.images import Pictures
from recipes.common.inputs import FRONT_MATTER, book_paths, deit, embed, opened, photographs, ranks, tokenized, xquad

app = commands.new_app(no_args_is_help=True)

# What gives a method something to learn that learns nothing by default.
_LEARNING: dict[str, dict[str, Any]] = {
    **{name: {"feature_map": "hedgehog"} for name in ("linear", "performer", "flurka_linear")},
    "nystromformer": {"conv_kernel_size": 33},
}


class Task(NamedTuple):
    """A pretrained model, unlabelled data to distill it with, and a figure that says what it can do."""

    figure: str  # the name of the figure
    load: Callable[[], PreTrainedModel]  # returns the exact model
    batches: Callable[[], Sequence[Batch]]  # returns the training data
    evaluate: Callable[[Any], float]  # returns the figure of a model


class Crops(Sequence[Batch]):
    """Random crops of pictures in `count` batches of 8: batch i is the same in every run with the same seed.

    The batches have labels if `classes` are given.
    """

    def __init__(self, pictures: Pictures, norm: Norm, count: int, seed: int, classes: Any = None) -> None:
        self._pictures, self._transform = pictures, Training(224, norm, scale=(0.35, 1.0))
        self._count, self._seed, self._classes = count, seed, classes

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        generator = torch.Generator().manual_seed(self._seed * self._count + index)
        chosen = torch.randint(len(self._pictures), (8,), generator=generator).tolist()
        batch = {"pixel_values": torch.stack([self._transform(self._pictures.open(i), generator) for i in chosen])}
        if self._classes is not None:
            batch["labels"] = torch.tensor([self._classes[self._pictures.classes[i]] for i in chosen])
        return batch


def train(step: Callable[[Batch], Any], batches: Iterator[Batch], num_steps: int, name: str) -> None:
    """Take steps on batches, with a progress bar."""
    for batch in tqdm(islice(batches, num_steps), total=num_steps, desc=name, disable=None, leave=False):
        step(batch)


def configs_of(method: Sequence[str]) -> dict[str, MethodConfig]:
    """The methods by their labels, each with something to learn."""
    found = []
    for config in parse_methods(list(method) or ["linear"], []).values():
        default, options = make_config(config.method), _LEARNING.get(config.method, {})
        missing = {k: v for k, v in options.items() if getattr(config, k) == getattr(default, k)}
        found.append(make_config(config, **missing))
    return {method_label(config): config for config in found}


def distilled_figures(
    task: Task, config: MethodConfig, steps: int, options: FinetuningOptions | None
) -> dict[str, float]:
    """The figure of a method switched in, distilled in a number of steps, and fine-tuned."""
    with no_progress_bar():
        model = task.load().eval()
    switched = task.evaluate(hea.convert(model, config))
    hea.convert(model, "sdpa")
    batches = task.batches()
    teacher = options and make_teacher(model, options, batches[0])
    hea.distill(model, config, batches, steps=steps, options=DistillationOptions(seed=0))
    figures = {"switched": switched, "distilled": task.evaluate(model)}
    if options is not None:
        finetuning = Finetuning(model, teacher, options)
        train(finetuning.step, batch_stream(batches, 1, options.steps), options.steps, "fine-tuning")
        finetuning.finish()
        figures["fine-tuned"] = task.evaluate(model)
    return figures


def images(data: pathlib.Path, count: int) -> Task:
    """DeiT-tiny, distilled on crops of Imagenette in batches of 8: top-1 of a thousand photographs of all classes."""
    folder, pictures = deit(data), opened(data, "imagenette160-val-1000.zip")
    norm, tests = Norm.of(preprocessor_settings(str(folder))), list(photographs(data, 224))
    return Task(
        "top-1",
        lambda: ViTForImageClassification.from_pretrained(folder),
        lambda: Crops(pictures, norm, count, 0),
        lambda model: top_one(model, tests),
    )


def load_minilm() -> PreTrainedModel:
    """The exact model of three tasks."""
    return BertModel.from_pretrained(minilm_folder())


def text_batches(texts: Sequence[str], size: int, max_length: int) -> list[Batch]:
    """Texts in random order as padded batches of MiniLM's tokens."""
    tokenizer, order = AutoTokenizer.from_pretrained(minilm_folder()), list(texts)
    random.Random(0).shuffle(order)
    parts = [order[start : start + size] for start in range(0, len(order) - size + 1, size)]
    options = {"padding": True, "truncation": True, "max_length": max_length, "return_tensors": "pt"}
    return [dict(tokenizer(part, **options)) for part in parts]


def sentences(data: pathlib.Path, count: int) -> Task:
    """MiniLM, distilled on STS-B's sentences in batches of 32: Spearman correlation on its 1,500 pairs (dev)."""
    splits = glue.load("stsb", str(commands.existing(data / "glue", "GLUE")))
    texts = [text for name in ("sentence1", "sentence2") for text in splits["train"][name]]
    pairs, tokenizer = splits["validation"], AutoTokenizer.from_pretrained(minilm_folder())

    def evaluate(model: BertModel) -> float:
        both = (tokenized(tokenizer, pairs[name]) for name in ("sentence1", "sentence2"))
        first, second = (embed(model, tokenizer, own, 128) for own in both)
        return float(spearmanr((first * second).sum(1).numpy(), list(pairs["label"])).statistic)

    return Task("Spearman correlation", load_minilm, lambda: text_batches(texts, 32, 128)[:count], evaluate)


def search(data: pathlib.Path, count: int) -> Task:
    """MiniLM, distilled on paragraphs (up to 256 tokens) and sentences of WikiText-2: recall@1 on XQuAD."""
    files = [data / "text" / "wikitext-2" / f"{name}.txt.gz" for name in ("valid", "test")]
    lines = [line.strip() for path in files for line in read_text(commands.existing(path, "WikiText")).splitlines()]
    paragraphs = [line for line in lines if len(line) > 200]
    # As many sentences, about as long as a question.
    shorts = [part for one in paragraphs for part in one.split(" . ")[:1]]
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    corpus = xquad(data, tokenizer)

    def evaluate(model: BertModel) -> float:
        asked, found = (embed(model, tokenizer, texts) for texts in (corpus.questions, corpus.texts))
        return (ranks(asked @ found.t(), corpus.own) == 1).double().mean().item()

    def batches() -> list[Batch]:
        pairs = zip(*(text_batches(texts, 8, 256) for texts in (paragraphs, shorts)), strict=True)
        return [batch for pair in pairs for batch in pair]

    return Task("recall@1", load_minilm, batches, evaluate)


def windows(text: str, folder: pathlib.Path, length: int) -> Tensor:
    """The tokens of a text in windows (windows, length), without special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"][0]
    return ids[: len(ids) // length * length].view(-1, length)


def split_batches(ids: Tensor, size: int) -> list[Batch]:
    """Windows (windows, length) in random order as batches."""
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": part} for part in ids[order].split(size) if len(part) == size]


def states(data: pathlib.Path, count: int) -> Task:
    """MiniLM, distilled on windows of eight novels: the error of its last hidden states on 16 windows of another."""
    texts = [read_text(path)[FRONT_MATTER:][:400_000] for path in reversed(book_paths(data))]
    parts = [windows(text, minilm_folder(), 512) for text in texts]
    train, test = torch.cat(parts[1:]), parts[0][:16]
    with torch.no_grad(), no_progress_bar():
        wanted = load_minilm().eval()(input_ids=test).last_hidden_state

    @torch.no_grad()
    def evaluate(model: BertModel) -> float:
        return ((model(input_ids=test).last_hidden_state - wanted).norm() / wanted.norm()).item()

    return Task("error of the last hidden states", load_minilm, lambda: split_batches(train, 2), evaluate)


def language(data: pathlib.Path, count: int) -> Task:
    """GPT-2 of the books, distilled on the first 95 % of each: nats per token on windows of the last 5 %."""
    folder = commands.existing(data / "models" / "gpt2-books", "GPT-2")
    texts = [(text, int(0.95 * len(text))) for text in map(read_text, book_paths(data))]
    train = torch.cat([windows(text[:end], folder, 2048) for text, end in texts])
    ends = [windows(text[end:], folder, 2048) for text, end in texts]
    test = torch.cat([end[: max(1, round(24 * len(end) / sum(map(len, ends))))] for end in ends])

    @torch.no_grad()
    def evaluate(model: GPT2LMHeadModel) -> float:
        return statistics.fmean(model(input_ids=part, labels=part).loss.item() for part in test.split(1))

    return Task(
        "nats per token", lambda: GPT2LMHeadModel.from_pretrained(folder), lambda: split_batches(train, 1), evaluate
    )


TASKS: dict[str, Callable[[pathlib.Path, int], Task]] = {
    "images": images, "sentences": sentences, "search": search, "states": states, "language": language,
}  # fmt: skip


@app.command(epilog="Example: python -m recipes.benchmarks.distilled images --method linear,flurka_linear")
def main(
    task: Annotated[
        str, typer.Argument(metavar="TASK", help="images, sentences, search, states (hidden states) or language.")
    ],
    data: commands.Data = None,
    method: commands.methods_option("linear", "--method") = [],  # noqa: B006 (typer copies it)
    steps: commands.option(int, "Steps of layer-wise distillation.", min=1) = 300,
    finetune_steps: commands.option(int, "Steps of the second stage; 0 for none.", min=0) = 300,
    learning_rate: commands.option(
        float | None, "Learning rate of the second stage. [default: 5e-5; language: 2e-4]"
    ) = None,
    csv: commands.Csv = None,
) -> None:
    """Distill and measure every method on a task, print the table, and write the figures."""
    commands.check_known("TASK", [task], TASKS)
    target, usual = ("logits", 2e-4) if task == "language" else ("hidden_states", 5e-5)
    rate = learning_rate or usual
    rates = {"learning_rate": rate, "attention_learning_rate": 10 * rate}
    options = FinetuningOptions(steps=finetune_steps, target=target, **rates) if finetune_steps else None
    configs, what = configs_of(method), TASKS[task](commands.data_folder(data), steps + finetune_steps)
    with no_progress_bar():
        exact = what.evaluate(what.load().eval())
    rows = []
    for label, config in configs.items():
        rows.append(
            {"task": task, "attention": label, "exact": exact, **distilled_figures(what, config, steps, options)}
        )
        tqdm.write(str(rows[-1]))
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: f"{{{name}:.3f}}" for name in names} | {"task": "{task}", "attention": "{attention}"}
    stages = f"{steps} steps of distillation, {finetune_steps} of fine-tuning"
    note = f"{what.figure} of {task}: {stages} ({target}, learning rate {rate:g})."
    commands.report([names | row for row in rows], columns, note, csv=csv)


if __name__ == "__main__":
    main_of(app, "python -m recipes.benchmarks.distilled")
