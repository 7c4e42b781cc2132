"""Compare ways to spend a fixed cost on a converted model: distillation, training on the task, both, or nothing.

    python -m recipes.experiments.arms run glue --output RUNS --seeds 3      (also: pictures)
    python -m recipes.experiments.arms show RUNS/glue                       (prints the table again)

A model that is good at a task with exact attention is converted to `linear` with a learned feature map. Then each arm
spends the same time of the processor: on nothing; on training all parameters on the task's labels ("task"), or the
learned parameters of attention alone ("map by the task"); half on layer-wise distillation and half on fine-tuning on
the exact model's hidden states, without labels ("distillation"); or half on layer-wise distillation and half on the
task ("both"). Costs of the steps are measured first, and an arm has as many as its share of the cost of `--steps` steps
of task training.

For glue the exact model is MiniLM, fine-tuned for one epoch and kept in RUNS for all seeds, and its task is STS-B or
MRPC. For pictures it is DeiT-tiny. Its task is Imagenette, ten classes of ImageNet: 80 pictures of each class for the
training, 20 for the measurement. A second figure shows what is left of the other classes: top-1 on a thousand
photographs, one of each class.

Duration: on one core 5 to 20 minutes for each task and seed. Expected: the table of recipes/README.md.
"""

import copy
import itertools
import json
import pathlib
import random
import statistics
import time
import timeit
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from torch import nn
from transformers import DataCollatorWithPadding, PreTrainedModel, ViTForImageClassification
from transformers.optimization import get_linear_schedule_with_warmup

import hf_efficient_attn as hea
from hf_efficient_attn.checkpoint.loading import no_progress_bar
from hf_efficient_attn.cli import main_of, table
from hf_efficient_attn.cli.demo import minilm_folder
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.capture import Batch
from hf_efficient_attn.io.json import write_json
from hf_efficient_attn.io.writing import check_writable
from hf_efficient_attn.methods import make_config
from hf_efficient_attn.training import DistillationOptions, FinetuningOptions
from hf_efficient_attn.training.distillation import Distillation
from hf_efficient_attn.training.finetuning import Finetuning, make_teacher
from hf_efficient_attn.training.steps import batch_stream, learned_parameters
from recipes import glue as recipe
from recipes.benchmarks.distilled import Crops, train
from recipes.benchmarks.tasks import top_one
from recipes.common import commands
from recipes.common.data import glue
from recipes.common.data.image_tensors import Evaluation, Norm, preprocessor_settings
from recipes.common.inputs import deit, imagenet_classes, opened, photographs, picture_batches
from recipes.common.reporting import mean_and_range

app = commands.new_app(no_args_is_help=True)

ARMS = ("nothing", "task", "map by the task", "distillation", "both")
METHOD = make_config("linear", feature_map="hedgehog")
Step = Callable[[Batch], Any]


class Setup(NamedTuple):
    """One task and seed."""

    model: PreTrainedModel  # the model with exact attention, good at the task
    batches: Sequence[Batch]  # the training data, with labels
    evaluate: Callable[[nn.Module], dict[str, float]]  # returns named figures of a model
    learning_rate: float  # for training on the task


def task_step(model: PreTrainedModel, parameters: Iterable[nn.Parameter], rate: float, num_steps: int) -> Step:
    """A step of training on the labels of a batch, with AdamW, warmup and linear decay to 0."""
    trained = list(parameters)
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, max(1, num_steps // 10), max(2, num_steps))

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        model.train()(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        model.eval()

    return step


def costs_of(setup: Setup) -> dict[str, float]:
    """The median processor time of three steps of each kind of training, after one that is not measured."""
    model = hea.convert(copy.deepcopy(setup.model), METHOD)
    stream = itertools.cycle(setup.batches[i] for i in range(min(4, len(setup.batches))))
    steps: dict[str, Step] = {
        "task": task_step(model, model.parameters(), 1e-6, 10),
        "map": task_step(model, learned_parameters(model).values(), 1e-6, 10),
        "distillation": Distillation(model, 10).step,
        "fine-tuning": Finetuning(model, setup.model, FinetuningOptions(steps=10)).step,
    }
    times = {
        name: timeit.repeat(lambda step=step: step(next(stream)), timer=time.process_time, number=1, repeat=4)
        for name, step in steps.items()
    }
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def run_arm(arm: str, setup: Setup, steps: dict[str, int], seed: int) -> dict[str, float]:
    """Convert a copy of the model, train it as the arm says, and return its figures.

    `steps` are those that each kind of training could take with the whole cost.
    """
    torch.manual_seed(seed)
    model = hea.convert(copy.deepcopy(setup.model), METHOD)
    stream, half = batch_stream(setup.batches, seed, 1), {name: max(1, count // 2) for name, count in steps.items()}
    if arm in ("distillation", "both"):
        count = half["distillation"]
        distillation = Distillation(model, count, options=DistillationOptions(seed=seed))
        train(distillation.step, stream, count, arm)
        distillation.finish()
    if arm == "distillation":
        options = FinetuningOptions(steps=half["fine-tuning"])
        finetuning = Finetuning(model, make_teacher(setup.model, options, setup.batches[0]), options)
        train(finetuning.step, stream, options.steps, arm)
        finetuning.finish()
    elif arm == "map by the task":
        learned = learned_parameters(model).values()
        train(task_step(model, learned, 1e-2, steps["map"]), stream, steps["map"], arm)
    elif arm in ("task", "both"):
        count = (steps if arm == "task" else half)["task"]
        train(task_step(model, model.parameters(), setup.learning_rate, count), stream, count, arm)
    return setup.evaluate(model.eval())


def glue_setup(name: str, data: pathlib.Path, seed: int, folder: pathlib.Path) -> Setup:
    """MiniLM, fine-tuned with exact attention on a GLUE task for one epoch, or the one that is kept in `folder`."""
    exact, source = folder / f"{name}-exact", str(commands.existing(data / "glue", "GLUE"))
    if not (exact / "metrics.json").is_file():
        options = {"task": name, "data": source, "model": minilm_folder(), "output_dir": exact, "max_length": 64}
        options |= {"num_train_epochs": 1, "per_device_train_batch_size": 16, "learning_rate": 1e-4}
        options |= {"save_strategy": "no", "eval_strategy": "no", "overwrite": True, "use_cpu": True}
        recipe.run([str(word) for option, value in options.items() for word in (f"--{option}", value)])
    with no_progress_bar():
        model, tokenizer = recipe.load_model(str(exact), glue.task_of(name))
    splits, collate = recipe.tokenize(glue.load(name, source), tokenizer, 64), DataCollatorWithPadding(tokenizer)

    def batches_of(split: str, size: int, order: Sequence[int]) -> list[Batch]:
        rows = [splits[split][i] for i in order]
        return [dict(collate(rows[start : start + size])) for start in range(0, len(rows), size)]

    @torch.no_grad()
    def evaluate(model: nn.Module) -> dict[str, float]:
        logits = [model(**{k: x for k, x in batch.items() if k != "labels"}).logits for batch in tests]
        labels = np.concatenate([batch["labels"].numpy() for batch in tests])
        return dict(glue.figures(name, torch.cat(logits).numpy(), labels))

    order, tests = list(range(len(splits["train"]))), batches_of("validation", 64, range(len(splits["validation"])))
    random.Random(seed).shuffle(order)
    return Setup(model.eval(), batches_of("train", 16, order), evaluate, 1e-4)


def picture_setup(name: str, data: pathlib.Path, seed: int, folder: pathlib.Path) -> Setup:
    """DeiT-tiny with Imagenette as its task; it was trained on ImageNet, so that it is good at it already."""
    source, numbers, pictures = deit(data), imagenet_classes(data), opened(data, "imagenette160-val-1000.zip")
    norm, order = Norm.of(preprocessor_settings(str(source))), list(range(len(pictures)))
    random.Random(seed).shuffle(order)
    counts, tested, trained = Counter[str](), list[int](), list[int]()
    for i in order:
        counts[pictures.classes[i]] += 1
        (tested if counts[pictures.classes[i]] <= 20 else trained).append(i)
    ten = list(picture_batches(pictures, tested, numbers, Evaluation(224, norm, 224 / 256)))
    thousand = list(photographs(data, 224))
    with no_progress_bar():
        model = ViTForImageClassification.from_pretrained(source).eval()

    def evaluate(model: Any) -> dict[str, float]:
        return {"Imagenette": top_one(model, ten), "thousand classes": top_one(model, thousand)}

    return Setup(model, Crops(pictures.select(trained), norm, 1000, seed, numbers), evaluate, 5e-5)


SETUPS: dict[str, tuple[tuple[str, ...], Callable[[str, pathlib.Path, int, pathlib.Path], Setup]]] = {
    "glue": (("stsb", "mrpc"), glue_setup),
    "pictures": (("imagenette",), picture_setup),
}


def results_of(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The results in a folder, one for each task and seed."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*-*.json"))]


@app.command(epilog="Example: python -m recipes.experiments.arms run glue --output runs --seeds 3")
def run(
    group: Annotated[str, typer.Argument(metavar="GROUP", help="glue or pictures.")],
    output: commands.option(pathlib.Path, "Folder of the results.", metavar="FOLDER"),
    data: commands.Data = None,
    steps: commands.option(int, "Steps of task training that an arm may cost.", min=4) = 100,
    seeds: commands.option(int, "Number of seeds, 0, 1, ...", min=1) = 1,
) -> None:
    """Run the missing tasks and seeds, and print the table. A task and seed with a result is not repeated."""
    commands.check_known("GROUP", [group], SETUPS)
    tasks, setup_of = SETUPS[group]
    for cost in {one["cost_in_task_steps"] for one in results_of(output / group)} - {steps}:
        raise UnsupportedAttentionError(
            f"{output / group} has results of --steps {cost}, which cannot be compared: give another --output"
        )
    for seed, task in itertools.product(range(seeds), tasks):
        path = output / group / f"{task}-{seed}.json"
        if path.is_file():
            continue
        typer.echo(f"{task}, seed {seed}")
        path.parent.mkdir(parents=True, exist_ok=True)
        check_writable(path)
        setup = setup_of(task, commands.data_folder(data), seed, path.parent)
        costs, figures = costs_of(setup), {"exact": setup.evaluate(setup.model.eval())}
        counts = {name: max(1, round(steps * costs["task"] / cost)) for name, cost in costs.items()}
        for arm in ARMS:
            figures[arm] = run_arm(arm, setup, counts, seed)
            typer.echo(f"{arm}: {figures[arm]}")
        result = {"task": task, "seed": seed, "cost_in_task_steps": steps, "seconds_per_step": costs, "steps": counts}
        write_json(path, result | {"figures": figures, "method": METHOD.to_dict()})
    show(output / group)


@app.command(epilog="Example: python -m recipes.experiments.arms show runs/glue")
def show(
    folder: Annotated[pathlib.Path, typer.Argument(metavar="FOLDER", help="Results of one group.")],
    csv: commands.Csv = None,
) -> None:
    """Print the table of existing results."""
    if not (results := results_of(folder)):
        raise UnsupportedAttentionError(f"{folder} holds no results: make them with the command run")
    columns = list(dict.fromkeys((r["task"], figure) for r in results for figure in r["figures"]["exact"]))
    lines = []
    for arm in ("exact", *ARMS):
        values = ([r["figures"][arm][name] for r in results if r["task"] == task] for task, name in columns)
        lines.append((arm, *map(mean_and_range, values)))
    headers = ("arm", *(f"{task}, {name}" for task, name in columns))
    commands.write([dict(zip(headers, line, strict=True)) for line in lines], csv)
    typer.echo(table(headers, lines))
    costs = [
        f"{name} {statistics.median(r['seconds_per_step'][name] for r in results):.2f}"
        for name in results[0]["seconds_per_step"]
    ]
    typer.echo(f"\nEvery arm costs as much as {results[0]['cost_in_task_steps']} steps of task training.")
    seeds = len({r["seed"] for r in results})
    several = f"{seeds} seeds: mean and half the range." if seeds > 1 else "One seed."
    typer.echo(f"Seconds per step: {', '.join(costs)}. {several}")


if __name__ == "__main__":
    main_of(app, "python -m recipes.experiments.arms")
