"""Compare up-training with its reference runs: curves over the steps, final losses, and the cost of equal loss.

    python -m recipes.experiments run flurka_images flurka_books --output RUNS --seeds 3
    python -m recipes.experiments.curves RUNS/flurka_images --output recipes/pictures/flurka_images.png
    python -m recipes.experiments.curves --redraw --output recipes/pictures/flurka_images.png    (from its .json)

The claim of Gupta et al. 2023, section 4.2: a model that is trained with a base for a share of the steps, and then with
a FLuRKA variant, ends better than one that has the variant from the start. The reference of a comparison is the variant
from the start. "Reached at" is the step at which the evaluation loss of a run, linear between two evaluations, first is
the mean final loss of the reference, if it is. The cost up to this step is given in seconds and as attention cost, for
the steps before the switch those of the base and for the others those of the variant.

Seconds are CPU seconds of a training step with its forward pass, backward pass and optimizer, so that other processes
on the machine hardly change them. Attention cost counts the multiply-adds of the attention modules in the forward pass,
with their projections of queries, keys and values, for one example.

Duration: seconds. Expected: the tables and the pictures of docs/training_results.md.
"""

import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
import transformers
import typer
from torch import nn
from transformers import AutoConfig, AutoModelForImageClassification, AutoModelForMaskedLM

import hf_efficient_attn as hea
from hf_efficient_attn.cli import main_of, table
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.timing import processor_name
from hf_efficient_attn.integration.models import attention_modules
from hf_efficient_attn.io.json import read_json_object
from hf_efficient_attn.io.writing import replacing
from recipes.common import commands
from recipes.common.counting import count
from recipes.common.reporting import METRICS, mean_and_range, smoothed
from recipes.experiments.groups import GROUPS, folder_of, group_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

app = commands.new_app()

STATE = "trainer_state.json"
EXACT = "exact"
# Accuracy has another name in each recipe.
ACCURACIES = ("eval_accuracy", "eval_top1")


class Curve(NamedTuple):
    """One run.

    Attributes:
        line: the line of its group.
        seed: its seed.
        steps: number of training steps.
        stages: lines that have the attention of its stages; one, or two if there is a switch.
        switch: number of steps before the switch; None without one.
        seconds: CPU seconds per step.
        loss: training loss, as (step, loss).
        evaluation: evaluation loss, as (step, loss).
        accuracy: accuracy after the last step.
    """

    line: str
    seed: int
    steps: int
    stages: list[str]
    switch: int | None
    seconds: float
    loss: list[list[float]]
    evaluation: list[list[float]]
    accuracy: float


class Result(NamedTuple):
    """All runs of a group, and what the tables need besides.

    Attributes:
        group: name of the group.
        note: model, data and steps.
        machine: processor and versions.
        cost: multiply-adds of the attention of an example, by line.
        curves: the runs.
    """

    group: str
    note: str
    machine: dict[str, Any]
    cost: dict[str, int]
    curves: list[Curve]

    def lines(self) -> list[str]:
        """The lines that have runs, in the order of the group."""
        return list(dict.fromkeys(curve.line for curve in self.curves))

    def of(self, line: str) -> list[Curve]:
        """The runs of a line."""
        return [curve for curve in self.curves if curve.line == line]

    def seconds(self, line: str) -> float:
        """Mean CPU seconds per step of a line."""
        return statistics.fmean(curve.seconds for curve in self.of(line))

    def up_to(self, curve: Curve, step: float) -> tuple[float, float]:
        """Seconds, and attention cost of an example in each step, of a run up to a step."""
        before = 0.0 if curve.switch is None else min(step, curve.switch)
        parts = [(curve.stages[0], before), (curve.stages[-1], step - before)]
        return (
            sum(self.seconds(line) * steps for line, steps in parts if steps),
            sum(self.cost[line] * steps for line, steps in parts if steps),
        )


def read_curve(folder: pathlib.Path, line: str, seed: int) -> Curve:
    """Read metrics.json and trainer_state.json of a run."""
    report, log = (read_json_object(folder / name) for name in (METRICS, STATE))
    history, metrics = log["log_history"], report["metrics"]

    def values(key: str) -> list[list[float]]:
        return [[entry["step"], round(entry[key], 4)] for entry in history if key in entry]

    switches = report["switches"]
    stages = [switches[0]["from"], switches[0]["to"]] if switches else [report["attention"]["attention"]]
    return Curve(
        line=line,
        seed=seed,
        steps=report["steps"],
        stages=[EXACT if stage in (None, "sdpa", "eager") else stage for stage in stages],
        switch=switches[0]["step"] if switches else None,
        seconds=round(report["cpu_seconds_per_step"], 5),
        loss=values("loss"),
        evaluation=values("eval_loss"),
        accuracy=round(next(metrics[key] for key in ACCURACIES if key in metrics), 5),
    )


def attention_cost(folder: pathlib.Path, block_size: int | None) -> int:
    """Count the multiply-adds of the attention modules of a run's model, with random weights, for one example.

    Args:
        folder: the folder of the run, with the config of its model.
        block_size: tokens of an example of a language model.
    """
    config = AutoConfig.from_pretrained(folder)
    settings, config.efficient_attention = getattr(config, "efficient_attention", None), None
    if block_size is None:
        model: nn.Module = AutoModelForImageClassification.from_config(config, attn_implementation="sdpa")
        inputs = {"pixel_values": torch.zeros(1, 3, *config.image_shape)}
    else:
        model = AutoModelForMaskedLM.from_config(config, attn_implementation="sdpa")
        inputs = {"input_ids": torch.full((1, block_size), 7), "attention_mask": torch.ones(1, block_size).long()}
    if settings:
        hea.convert(model, hea.EfficientAttentionConfig.from_dict(settings))
    found: list[int] = []
    modules = [entry.module for entry in attention_modules(model)]
    for module in modules:
        # Some models wrap the attention in a module that adds the output projection and a residual.
        if not any(inner in modules for inner in list(module.modules())[1:]):
            _count_calls(module, found)
    with torch.no_grad():
        model.eval()(**inputs)
    return sum(found)


def _count_calls(module: nn.Module, found: list[int]) -> None:
    """Append the multiply-adds of every call of a module to `found`."""
    forward = module.forward

    def counted(*arguments: Any, **options: Any) -> Any:
        outputs: list[Any] = []
        call = count(lambda: outputs.append(forward(*arguments, **options)), multiply_adds_as_one=True)
        found.append(call.products)
        return outputs[0]

    module.forward = counted


def collect(folder: pathlib.Path) -> Result:
    """Read all finished runs of a group.

    Raises:
        UnsupportedAttentionError: the folder holds no runs of a group, or none that compare up-training with the
            variant from the start.
    """
    known = [name for name in GROUPS if name.startswith("flurka_")]
    if folder.name not in known or not folder.is_dir():
        raise UnsupportedAttentionError(f"{folder} holds no runs: its name must be one of {', '.join(known)}")
    group = group_of(folder.name, pathlib.Path("DATA"))
    (task,) = group.tasks
    curves, cost = [], {}
    for line in group.attention:
        folders = {seed: folder_of(folder, line, task, seed) for seed in range(100)}
        found = {seed: path for seed, path in folders.items() if (path / METRICS).is_file()}
        curves += [read_curve(path, line, seed) for seed, path in found.items()]
        for path in [*found.values()][:1]:
            if len(curves[-1].stages) == 1:
                cost[line] = attention_cost(path, read_json_object(path / METRICS).get("block_size"))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    machine = {"cpu": processor_name(), **versions, "hf_efficient_attn": hea.__version__}
    result = Result(folder.name, group.note, machine, cost, curves)
    if not any(reference_of(line, result.lines()) for line in result.lines()):
        raise UnsupportedAttentionError(
            f"{folder} holds no finished run of an up-trained variant and of the same variant from the start"
        )
    return result


def reached_at(curve: Curve, loss: float) -> float | None:
    """The step at which the evaluation loss, linear between two evaluations, first is `loss`; None if it never is."""
    before: list[float] | None = None
    for step, value in curve.evaluation:
        if value <= loss:
            if before is None:
                return step
            return before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - value)
        before = [step, value]
    return None


def final_table(result: Result) -> str:
    """Final loss and accuracy, seconds per step, and attention cost of a step, for each line."""
    unit = result.cost.get(EXACT)
    rows = []
    for line in result.lines():
        runs = result.of(line)
        cost = statistics.fmean(result.up_to(run, run.steps)[1] / run.steps for run in runs)
        rows.append(
            (
                line,
                len(runs),
                mean_and_range([run.evaluation[-1][1] for run in runs]),
                mean_and_range([run.accuracy for run in runs]),
                mean_and_range([run.seconds for run in runs]),
                f"{cost / unit:.2f}" if unit else f"{cost:.3g}",
            )
        )
    return table(("attention", "seeds", "loss", "accuracy", "CPU s per step", "attention cost"), rows)


def reference_of(line: str, lines: Sequence[str]) -> str | None:
    """The line of the variant from the start that an up-trained line belongs to; None for other lines."""
    variant, comma, _ = line.partition(",")
    return variant if comma and variant in lines else None


def equal_loss_table(result: Result) -> str:
    """Where each up-trained line and base reaches the final loss of the variant from the start, and at what cost."""
    lines = result.lines()
    variants = list(dict.fromkeys(filter(None, (reference_of(line, lines) for line in lines))))
    rows: list[tuple[Any, ...]] = []
    for variant in variants:
        references = result.of(variant)
        loss = statistics.fmean(run.evaluation[-1][1] for run in references)
        full = [result.up_to(run, run.steps) for run in references]
        seconds, cost = (statistics.fmean(values) for values in zip(*full, strict=True))
        for line in lines:
            if reference_of(line, lines) not in (variant, None):
                continue
            if line == variant:
                rows.append((line, f"{loss:.3f}", "", references[0].steps, f"{seconds:.0f}", "1.00", "1.00"))
                continue
            runs = result.of(line)
            steps = [(run, reached_at(run, loss)) for run in runs]
            found = [(step, *result.up_to(run, step)) for run, step in steps if step is not None]
            columns = list(zip(*found, strict=True)) or [(), (), ()]
            rows.append(
                (
                    line,
                    f"{loss:.3f}",
                    f"{len(found)} of {len(runs)}",
                    mean_and_range(columns[0], 0),
                    mean_and_range(columns[1], 0),
                    mean_and_range([value / seconds for value in columns[1]], 2),
                    mean_and_range([value / cost for value in columns[2]], 2),
                )
            )
    headers = ("attention", "loss", "reached by", "step", "CPU s", "time, relative", "attention cost, relative")
    return table(headers, rows) if rows else ""


def verdict_table(result: Result) -> str:
    """Final loss of each up-trained line minus that of the variant and of the base, with the same seed."""
    lines, rows = result.lines(), []
    for line in lines:
        variant = reference_of(line, lines)
        if variant is None:
            continue
        runs = {run.seed: run for run in result.of(line)}
        cells = []
        for other in (variant, next(iter(runs.values())).stages[0]):
            pairs = [(runs[run.seed], run) for run in result.of(other) if run.seed in runs]
            differences = [ours.evaluation[-1][1] - theirs.evaluation[-1][1] for ours, theirs in pairs]
            cells += [mean_and_range(differences), f"{sum(d < 0 for d in differences)} of {len(differences)}"]
        rows.append((line, *cells))
    headers = ("attention", "loss minus the variant's", "lower in", "loss minus the base's", "lower in")
    return table(headers, rows) if rows else ""


def draw(result: Result) -> "Figure":
    """Plot mean and range over the seeds: training loss above, evaluation loss below, one column for each base."""
    from matplotlib.figure import Figure

    lines = result.lines()
    trained_up = [line for line in lines if reference_of(line, lines)]
    pairs = list(dict.fromkeys((reference_of(line, lines), result.of(line)[0].stages[0]) for line in trained_up))
    figure = Figure(figsize=(5.2 * len(pairs), 8), layout="constrained", facecolor="white")
    columns = figure.subplots(2, len(pairs), squeeze=False, sharex=True, sharey="row").T
    for (variant, base), (above, below) in zip(pairs, columns, strict=True):
        own = [line for line in trained_up if result.of(line)[0].stages[0] == base and line.startswith(f"{variant},")]
        shown = [line for line in (EXACT, base, variant, *own) if line in lines]
        for number, line in enumerate(shown):
            color = "0.4" if line == EXACT else f"C{number - 1}"
            switch = result.of(line)[0].switch
            for axes, key in ((above, "loss"), (below, "evaluation")):
                label = line.removeprefix(f"{variant}, ").replace(f" from {base}", "")
                _band(axes, [getattr(run, key) for run in result.of(line)], label, color)
                if switch is not None:
                    axes.axvline(switch, color=color, linestyle="--", linewidth=1)
        above.set(title=f"{variant}, base {base}", ylabel="training loss, smoothed")
        below.set(xlabel="step", ylabel="evaluation loss")
        below.legend(fontsize="x-small", loc="lower left")
    return figure


def _band(axes: "Axes", curves: Sequence[Sequence[Sequence[float]]], label: str, color: str) -> None:
    """Plot the mean of the curves, and shade their range. Curves with many points are smoothed."""
    steps = [step for step, _ in curves[0]]
    values = [[value for _, value in curve] for curve in curves]
    if len(steps) > 40:
        values = [smoothed(one) for one in values]
    columns = list(zip(*values, strict=True))
    axes.plot(steps, [statistics.fmean(column) for column in columns], color=color, label=label, linewidth=1.5)
    axes.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.15, linewidth=0)
    axes.grid(alpha=0.3)


@app.command(epilog="Example: python -m recipes.experiments.curves RUNS/flurka_images --output flurka_images.png")
def curves(
    folder: Annotated[
        pathlib.Path | None, typer.Argument(metavar="[FOLDER]", help="Runs of one group, made by `run`.")
    ] = None,
    output: commands.option(
        pathlib.Path, "The picture; the curves go to a .json file beside it.", metavar="FILE"
    ) = pathlib.Path("curves.png"),
    redraw: commands.option(bool, "Read the curves from the .json file instead.", "--redraw") = False,
) -> None:
    """Draw the curves of up-training and its references, and print what they cost and where they end."""
    stored = commands.measurements_of(output)
    if redraw == (folder is not None):
        raise UnsupportedAttentionError("give either the folder of the runs, or --redraw")
    if folder is None:
        values = read_json_object(stored)
        result = Result(**{**values, "curves": [Curve(**curve) for curve in values["curves"]]})
    else:
        result = collect(folder)
        with replacing(stored) as draft:
            values = {**result._asdict(), "curves": [curve._asdict() for curve in result.curves]}
            # On one line: with an indent each of the thousands of numbers would have its own.
            draft.write_text(json.dumps(values, allow_nan=False) + "\n", encoding="utf-8")
    with replacing(output) as draft:
        draw(result).savefig(draft, dpi=110)
    typer.echo("\n\n".join(filter(None, (final_table(result), verdict_table(result), equal_loss_table(result)))))
    about = ", ".join(f"{name} {version}" for name, version in result.machine.items() if name != "cpu")
    typer.echo(f"\n{result.note}\n± is half the range of the seeds. {result.machine['cpu']}, {about}.")
    typer.echo(f"Written: {output}, {stored}" if folder is not None else f"Written: {output}")


if __name__ == "__main__":
    main_of(app, "python -m recipes.experiments.curves")
