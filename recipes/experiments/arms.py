"""Compare ways to spend a fixed cost on a converted model: distillation, training on the task, both, or nothing.

    python -m recipes.experiments.arms run glue --output RUNS --seeds 3      (also: pictures)
    python -m recipes.experiments.arms show RUNS/glue                       (prints the table again)

A model that is good at a task with exact attention is converted to `linear` with a learned feature map. Then each arm
spends the same time of the processor: on nothing; on training all parameters on the task's labels ("task"), or the
learned parameters of attention alone ("map by the task"); half on layer-wise distillation and half on fine-tuning on
the exact model's hidden states, without labels ("distillation"); or half on layer-wise distillation and half on the
task ("both"). Costs of the steps are measured first, and an arm has as many as its share of the cost of `--steps` steps
of task training.

For glue the exact model is MiniLM, fine-tuned for one epoch and kept in RUNS for all seeds, and its task is STS-B, MRPC
or CoLA. For pictures it is DeiT-tiny. Its task is Imagenette, ten classes of ImageNet: 80 pictures of each class for
the training, 20 for the measurement. A second figure shows what is left of the other classes: top-1 on a thousand
photographs, one of each class.

Duration: on one core 5 to 20 minutes for each task and seed. Expected: the table of docs/training_results.md.
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
from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_name
from hf_efficient_attn.evaluation.capture import Batch
from hf_efficient_attn.evaluation.demo import minilm_folder
from hf_efficient_attn.io.json import write_json
from hf_efficient_attn.methods import MethodConfig, make_config
from hf_efficient_attn.training import DistillationOptions, FinetuningOptions
from hf_efficient_attn.training.distillation import Distillation
from hf_efficient_attn.training.finetuning import Finetuning, make_teacher
from hf_efficient_attn.training.steps import batch_stream, learned_parameters
from recipes.benchmarks.distilled import Crops, train
from recipes.benchmarks.tasks import top_one
from recipes.common import commands
from recipes.common.data import glue
from recipes.common.data.image_tensors import Evaluation, Norm, preprocessor_settings
from recipes.common.data.images import load
from recipes.common.inputs import deit, imagenet_classes, photographs, picture_batches
from recipes.common.reporting import mean_and_range
from recipes.glue import load_model, tokenize

app = commands.new_app(no_args_is_help=True)

ARMS = ("nothing", "task", "map by the task", "distillation", "both")
METHOD = make_config("linear", feature_map="hedgehog")
GLUE_TASKS = ("stsb", "mrpc", "cola")


class Setup(NamedTuple):
    """One task and seed."""

    model: PreTrainedModel  # the model with exact attention, good at the task
    batches: Sequence[Batch]  # the training data, with labels
    evaluate: Callable[[nn.Module], dict[str, float]]  # returns named figures of a model
    learning_rate: float  # for training on the task


class TaskTraining:
    """Trains parameters of a model on the labels of its batches, with AdamW, warmup and linear decay to 0."""

    def __init__(
        self, model: PreTrainedModel, parameters: Iterable[nn.Parameter], learning_rate: float, num_steps: int
    ) -> None:
        self.model, self._parameters = model, list(parameters)
        self._optimizer = torch.optim.AdamW(self._parameters, lr=learning_rate, weight_decay=0.0)
        self._schedule = get_linear_schedule_with_warmup(self._optimizer, max(1, num_steps // 10), max(2, num_steps))

    def step(self, batch: Batch) -> None:
        """Train on one batch."""
        self.model.train()
        self._optimizer.zero_grad()
        self.model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._schedule.step()
        self.model.eval()


def seconds_of(step: Callable[[Batch], Any], batches: Sequence[Batch]) -> float:
    """Median processor time of three steps, after one that is not measured."""
    stream = itertools.cycle(batches[i] for i in range(min(4, len(batches))))
    times = timeit.repeat(lambda: step(next(stream)), timer=time.process_time, number=1, repeat=4)
    return statistics.median(times[1:])


def costs_of(setup: Setup, method: MethodConfig) -> dict[str, float]:
    """Seconds of a step of each kind of training."""
    model = hea.convert(copy.deepcopy(setup.model), method)
    steps: dict[str, Callable[[Batch], Any]] = {
        "task": TaskTraining(model, model.parameters(), 1e-6, 10).step,
        "map": TaskTraining(model, learned_parameters(model).values(), 1e-6, 10).step,
        "distillation": Distillation(model, 10).step,
        "fine-tuning": Finetuning(model, setup.model, FinetuningOptions(steps=10)).step,
    }
    return {name: seconds_of(step, setup.batches) for name, step in steps.items()}


def run_arm(arm: str, setup: Setup, method: MethodConfig, steps: dict[str, int], seed: int) -> dict[str, float]:
    """Convert a copy of the model, train it as the arm says, and return its figures.

    `steps` are those that each kind of training could take with the whole cost.
    """
    torch.manual_seed(seed)
    model = hea.convert(copy.deepcopy(setup.model), method)
    stream = batch_stream(setup.batches, seed, 1)
    if arm in ("distillation", "both"):
        count = max(1, steps["distillation"] // 2)
        distillation = Distillation(model, count, options=DistillationOptions(seed=seed))
        train(distillation.step, stream, count, arm)
        distillation.finish()
    if arm == "distillation":
        count = max(1, steps["fine-tuning"] // 2)
        options = FinetuningOptions(steps=count)
        finetuning = Finetuning(model, make_teacher(setup.model, options), options)
        train(finetuning.step, stream, count, arm)
        finetuning.finish()
    elif arm == "map by the task":
        learned = learned_parameters(model).values()
        train(TaskTraining(model, learned, 1e-2, steps["map"]).step, stream, steps["map"], arm)
    elif arm in ("task", "both"):
        count = steps["task"] if arm == "task" else max(1, steps["task"] // 2)
        train(TaskTraining(model, model.parameters(), setup.learning_rate, count).step, stream, count, arm)
    return setup.evaluate(model.eval())


def run_all(setup: Setup, num_steps: int, seed: int) -> dict[str, Any]:
    """All arms of one task and seed: figures, costs and numbers of steps."""
    costs = costs_of(setup, METHOD)
    steps = {name: max(1, round(num_steps * costs["task"] / cost)) for name, cost in costs.items()}
    figures = {"exact": setup.evaluate(setup.model.eval())}
    for arm in ARMS:
        figures[arm] = run_arm(arm, setup, METHOD, steps, seed)
        typer.echo(f"{arm}: {figures[arm]}")
    return {"seconds_per_step": costs, "steps": steps, "figures": figures, "method": METHOD.to_dict()}


def glue_setup(name: str, data: pathlib.Path, seed: int, folder: pathlib.Path) -> Setup:
    """MiniLM, fine-tuned with exact attention on a GLUE task for one epoch, or the one that is kept in `folder`."""
    exact = folder / f"{name}-exact"
    torch.manual_seed(0)
    with no_progress_bar():
        model, tokenizer = load_model(str(exact if exact.is_dir() else minilm_folder()), glue.task_of(name))
    splits = tokenize(glue.load(name, str(commands.existing(data / "glue", "GLUE"))), tokenizer, 64)

    def batches_of(split: str, size: int, order: Sequence[int]) -> list[Batch]:
        rows, collate = [splits[split][i] for i in order], DataCollatorWithPadding(tokenizer)
        return [dict(collate(rows[start : start + size])) for start in range(0, len(rows), size)]

    def training_batches(seed: int) -> list[Batch]:
        order = list(range(len(splits["train"])))
        random.Random(seed).shuffle(order)
        return batches_of("train", 16, order)

    tests = batches_of("validation", 64, range(len(splits["validation"])))
    if not exact.is_dir():
        batches = training_batches(-1)
        training = TaskTraining(model, model.parameters(), 1e-4, len(batches))
        train(training.step, iter(batches), len(batches), f"{name}, exact")
        draft = exact.with_name(f".{exact.name}")  # an interrupted run leaves no half-written model
        with no_progress_bar():
            model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        draft.rename(exact)

    @torch.no_grad()
    def evaluate(model: nn.Module) -> dict[str, float]:
        logits = [model(**{k: x for k, x in batch.items() if k != "labels"}).logits for batch in tests]
        labels = np.concatenate([batch["labels"].numpy() for batch in tests])
        return dict(glue.figures(name, torch.cat(logits).numpy(), labels))

    return Setup(model.eval(), training_batches(seed), evaluate, 1e-4)


def picture_setup(name: str, data: pathlib.Path, seed: int, folder: pathlib.Path) -> Setup:
    """DeiT-tiny with Imagenette as its task; it was trained on ImageNet, so that it is good at it already."""
    source = deit(data)
    path = commands.existing(data / "images" / "imagenette160-val-1000.zip", "Imagenette")
    numbers = imagenet_classes(data)
    norm = Norm.of(preprocessor_settings(str(source)))
    pictures, transform = load(str(path))[""], Evaluation(224, norm, 224 / 256)
    order = list(range(len(pictures)))
    random.Random(seed).shuffle(order)
    counts, tested, trained = Counter[str](), list[int](), list[int]()
    for i in order:
        counts[pictures.classes[i]] += 1
        (tested if counts[pictures.classes[i]] <= 20 else trained).append(i)
    own, thousand = list(picture_batches(pictures, tested, numbers, transform)), list(photographs(data, 224))
    with no_progress_bar():
        model = ViTForImageClassification.from_pretrained(source).eval()

    def evaluate(model: Any) -> dict[str, float]:
        return {"Imagenette": top_one(model, own), "thousand classes": top_one(model, thousand)}

    return Setup(model, Crops(path, norm, 1000, seed, trained, numbers), evaluate, 5e-5)


SETUPS: dict[str, tuple[tuple[str, ...], Callable[[str, pathlib.Path, int, pathlib.Path], Setup]]] = {
    "glue": (GLUE_TASKS, glue_setup),
    "pictures": (("imagenette",), picture_setup),
}


@app.command(epilog="Example: python -m recipes.experiments.arms run glue --output runs --seeds 3")
def run(
    group: Annotated[str, typer.Argument(metavar="GROUP", help="glue or pictures.")],
    output: commands.option(pathlib.Path, "Folder of the results.", metavar="FOLDER"),
    data: commands.Data = None,
    steps: commands.option(int, "Steps of task training that an arm may cost.", min=4) = 100,
    seeds: commands.option(int, "Number of seeds, 0, 1, ...", min=1) = 1,
) -> None:
    """Run the missing tasks and seeds, and print the table. A task and seed with a result is not repeated."""
    if group not in SETUPS:
        raise UnsupportedAttentionError(unknown_name("group of arms", group, SETUPS))
    tasks, setup_of = SETUPS[group]
    for seed in range(seeds):
        for task in tasks:
            path = output / group / f"{task}-{seed}.json"
            if not path.is_file():
                typer.echo(f"{task}, seed {seed}")
                path.parent.mkdir(parents=True, exist_ok=True)
                setup = setup_of(task, commands.data_folder(data), seed, path.parent)
                about = {"task": task, "seed": seed, "cost_in_task_steps": steps}
                write_json(path, about | run_all(setup, steps, seed))
    show(output / group)


@app.command(epilog="Example: python -m recipes.experiments.arms show runs/glue")
def show(folder: Annotated[pathlib.Path, typer.Argument(metavar="FOLDER", help="Results of one group.")]) -> None:
    """Print the table of existing results."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*-*.json"))]
    if not results:
        raise UnsupportedAttentionError(f"{folder} holds no results: make them with the command run")
    columns = list(dict.fromkeys((r["task"], figure) for r in results for figure in r["figures"]["exact"]))
    lines = []
    for arm in ("exact", *ARMS):
        values = ([r["figures"][arm][name] for r in results if r["task"] == task] for task, name in columns)
        lines.append((arm, *map(mean_and_range, values)))
    typer.echo(table(("arm", *(f"{task}, {name}" for task, name in columns)), lines))
    costs = [
        f"{name} {statistics.median(r['seconds_per_step'][name] for r in results):.2f}"
        for name in results[0]["seconds_per_step"]
    ]
    typer.echo(
        f"\nEvery arm costs as much as {results[0]['cost_in_task_steps']} steps of task training. Seconds per step: "
        f"{', '.join(costs)}. {len({r['seed'] for r in results})} seeds: mean and half the range."
    )


if __name__ == "__main__":
    main_of(app, "python -m recipes.experiments.arms")
