"""Compare up-training with its reference runs: curves over the steps, final losses, and the cost of equal loss.

    python -m recipes.experiments run flurka_images flurka_books --output RUNS --seeds 3
    python -m recipes.experiments.curves RUNS/flurka_images --output recipes/pictures/flurka_images.png
    python -m recipes.experiments.curves --redraw --output recipes/pictures/flurka_images.png    (from its .json)

The claim of Gupta et al. 2023, section 4.2: a model that is trained with a base for a share of the steps, and then with
a FLuRKA variant, ends better than one that has the variant from the start, the reference. "Reached at" is the step at
which the evaluation loss of a run, linear between two evaluations, first is the mean final loss of the reference. The
cost up to this step is given in CPU seconds of training steps, and in multiply-adds of the attention modules in the
forward pass of one example, with their projections; steps before the switch cost as much as those of the base.

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
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForImageClassification, AutoModelForMaskedLM

import hf_efficient_attn as hea
from hf_efficient_attn.cli import main_of, table
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.timing import processor_name
from hf_efficient_attn.integration.models import attention_modules
from hf_efficient_attn.io.json import read_json_object
from hf_efficient_attn.io.writing import replacing
from recipes.common import commands
from recipes.common.counting import FORMULAS_BY_PART
from recipes.common.reporting import METRICS, mean_and_range, smoothed
from recipes.experiments.groups import GROUPS, folder_of, group_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

app = commands.new_app()

STATE, EXACT = "trainer_state.json", "exact"
# Accuracy has another name in each recipe.
ACCURACIES = ("eval_accuracy", "eval_top1")


class Curve(NamedTuple):
    """One run."""

    line: str  # the line of its group
    seed: int  # its seed
    steps: int  # number of training steps
    stages: list[str]  # lines that have the attention of its stages; one, or two if there is a switch
    switch: int | None  # number of steps before the switch; None without one
    seconds: float  # CPU seconds per step
    loss: list[list[float]]  # training loss, as (step, loss)
    evaluation: list[list[float]]  # evaluation loss, as (step, loss)
    accuracy: float  # accuracy after the last step

    @property
    def final(self) -> float:
        """The evaluation loss after the last step."""
        return self.evaluation[-1][1]


class Result(NamedTuple):
    """All runs of a group, and what the tables need besides."""

    group: str  # name of the group
    note: str  # model, data and steps
    machine: dict[str, Any]  # processor and versions
    cost: dict[str, int]  # multiply-adds of the attention of an example, by line
    curves: list[Curve]  # the runs

    def lines(self) -> list[str]:
        """The lines that have runs, in the order of the group."""
        return list(dict.fromkeys(curve.line for curve in self.curves))

    def of(self, line: str) -> list[Curve]:
        """The runs of a line."""
        return [curve for curve in self.curves if curve.line == line]

    def up_to(self, curve: Curve, step: float) -> tuple[float, float]:
        """Seconds, and attention cost of an example in each step, of a run up to a step."""
        before = 0.0 if curve.switch is None else min(step, curve.switch)
        parts = [(stage, steps) for stage, steps in ((curve.stages[0], before), (curve.stages[-1], step - before))]
        parts = [(stage, steps) for stage, steps in parts if steps]
        seconds = sum(steps * statistics.fmean(one.seconds for one in self.of(stage)) for stage, steps in parts)
        return seconds, sum(self.cost[stage] * steps for stage, steps in parts)

    def variant_of(self, line: str) -> str | None:
        """The line of the variant from the start that an up-trained line belongs to; None for other lines."""
        variant, comma, _ = line.partition(",")
        return variant if comma and variant in self.lines() else None

    def trained_up(self) -> list[str]:
        """The lines of up-training."""
        return [line for line in self.lines() if self.variant_of(line)]


def read_curve(folder: pathlib.Path, line: str, seed: int) -> Curve:
    """Read metrics.json and trainer_state.json of a run."""
    report, log = (read_json_object(folder / name) for name in (METRICS, STATE))
    metrics, switches = report["metrics"], report["switches"]

    def values(key: str) -> list[list[float]]:
        return [[entry["step"], round(entry[key], 4)] for entry in log["log_history"] if key in entry]

    stages = [switches[0]["from"], switches[0]["to"]] if switches else [report["attention"]["attention"]]
    stages = [EXACT if stage in (None, "sdpa", "eager") else stage for stage in stages]
    accuracy = next(metrics[key] for key in ACCURACIES if key in metrics)
    return Curve(
        line, seed, report["steps"], stages, switches[0]["step"] if switches else None,
        round(report["cpu_seconds_per_step"], 5), values("loss"), values("eval_loss"), round(accuracy, 5),
    )  # fmt: skip


def attention_cost(folder: pathlib.Path, block_size: int | None) -> int:
    """The multiply-adds of the attention modules of a run's model for one example, of `block_size` tokens if a text."""
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
    modules = [entry.module for entry in attention_modules(model)]
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=FORMULAS_BY_PART["products"]) as counter:
        model.eval()(**inputs)
    counts, total = counter.get_flop_counts(), 0
    for name, module in model.named_modules():
        # Some models wrap the attention in a module that adds the output projection and a residual.
        if module in modules and not any(inner in modules for inner in list(module.modules())[1:]):
            total += sum(counts[f"{type(model).__name__}.{name}"].values())
    return total // 2


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
    for line, seed in ((line, seed) for line in group.attention for seed in range(100)):
        path = folder_of(folder, line, task, seed)
        if (path / METRICS).is_file():
            curves.append(read_curve(path, line, seed))
            if line not in cost and len(curves[-1].stages) == 1:
                cost[line] = attention_cost(path, read_json_object(path / METRICS).get("block_size"))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    machine = {"cpu": processor_name(), **versions, "hf_efficient_attn": hea.__version__}
    result = Result(folder.name, group.note, machine, cost, curves)
    if not result.trained_up():
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
    unit, rows = result.cost.get(EXACT), []
    for line in result.lines():
        runs = result.of(line)
        cost = statistics.fmean(result.up_to(run, run.steps)[1] / run.steps for run in runs)
        columns = zip(*((run.final, run.accuracy, run.seconds) for run in runs), strict=True)
        rows.append((line, len(runs), *map(mean_and_range, columns), f"{cost / unit:.2f}" if unit else f"{cost:.3g}"))
    return table(("attention", "seeds", "loss", "accuracy", "CPU s per step", "attention cost"), rows)


def verdict_table(result: Result) -> str:
    """Compare the final loss of each up-trained line with the variant and with the base, seed by seed."""
    rows = []
    for line in result.trained_up():
        runs, cells = {run.seed: run for run in result.of(line)}, []
        for other in (result.variant_of(line), next(iter(runs.values())).stages[0]):
            differences = [runs[run.seed].final - run.final for run in result.of(other) if run.seed in runs]
            cells += [mean_and_range(differences), f"{sum(d < 0 for d in differences)} of {len(differences)}"]
        rows.append((line, *cells))
    headers = ("attention", "loss minus the variant's", "lower in", "loss minus the base's", "lower in")
    return table(headers, rows)


def equal_loss_table(result: Result) -> str:
    """Where each up-trained line and base reaches the final loss of the variant from the start, and at what cost."""
    rows: list[tuple[Any, ...]] = []
    for variant in dict.fromkeys(map(result.variant_of, result.trained_up())):
        references = result.of(variant)
        loss = statistics.fmean(run.final for run in references)
        full = zip(*(result.up_to(run, run.steps) for run in references), strict=True)
        seconds, cost = map(statistics.fmean, full)
        for line in result.lines():
            if line == variant:
                rows.append((line, f"{loss:.3f}", "", references[0].steps, f"{seconds:.0f}", "1.00", "1.00"))
            elif result.variant_of(line) in (variant, None):
                steps = [(run, reached_at(run, loss)) for run in result.of(line)]
                found = [(step, *result.up_to(run, step)) for run, step in steps if step is not None]
                at, taken, spent = list(zip(*found, strict=True)) or [(), (), ()]
                relative = ([value / seconds for value in taken], [value / cost for value in spent])
                cells = (mean_and_range(at, 0), mean_and_range(taken, 0), *(mean_and_range(v, 2) for v in relative))
                rows.append((line, f"{loss:.3f}", f"{len(found)} of {len(steps)}", *cells))
    headers = ("attention", "loss", "reached by", "step", "CPU s", "time, relative", "attention cost, relative")
    return table(headers, rows)


def draw(result: Result) -> "Figure":
    """Plot mean and range over the seeds: training loss above, evaluation loss below, one column for each base."""
    from matplotlib.figure import Figure

    pairs: dict[tuple[str | None, str], list[str]] = {}
    for line in result.trained_up():
        pairs.setdefault((result.variant_of(line), result.of(line)[0].stages[0]), []).append(line)
    figure = Figure(figsize=(5.2 * len(pairs), 8), layout="constrained", facecolor="white")
    columns = figure.subplots(2, len(pairs), squeeze=False, sharex=True, sharey="row").T
    for ((variant, base), own), (above, below) in zip(pairs.items(), columns, strict=True):
        for number, line in enumerate(line for line in (EXACT, base, variant, *own) if line in result.lines()):
            color, runs = "0.4" if line == EXACT else f"C{number - 1}", result.of(line)
            label = line.removeprefix(f"{variant}, ").replace(f" from {base}", "")
            _band(above, [run.loss for run in runs], label, color)
            _band(below, [run.evaluation for run in runs], label, color)
            for axes in (above, below) if runs[0].switch is not None else ():
                axes.axvline(runs[0].switch, color=color, linestyle="--", linewidth=1)
        above.set(title=f"{variant}, base {base}", ylabel="training loss, smoothed")
        below.set(xlabel="step", ylabel="evaluation loss")
        below.legend(fontsize="x-small", loc="lower left")
    return figure


def _band(axes: "Axes", curves: Sequence[Sequence[Sequence[float]]], label: str, color: str) -> None:
    """Plot the mean of the curves, and shade their range. Curves with many points are smoothed."""
    steps, values = [step for step, _ in curves[0]], [[value for _, value in one] for one in curves]
    if len(steps) > 40:
        values = [smoothed(one) for one in values]
    columns = list(zip(*values, strict=True))
    axes.plot(steps, list(map(statistics.fmean, columns)), color=color, label=label, linewidth=1.5)
    axes.fill_between(steps, list(map(min, columns)), list(map(max, columns)), color=color, alpha=0.15, linewidth=0)
    axes.grid(alpha=0.3)


@app.command(epilog="Example: python -m recipes.experiments.curves RUNS/flurka_images --output flurka_images.png")
def curves(
    folder: Annotated[
        pathlib.Path | None, typer.Argument(metavar="[FOLDER]", help="Runs of one group, made by `run`.")
    ] = None,
    output: commands.Picture = pathlib.Path("curves.png"),
    redraw: commands.Redraw = False,
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
    typer.echo("\n\n".join((final_table(result), verdict_table(result), equal_loss_table(result))))
    about = ", ".join(f"{name} {version}" for name, version in result.machine.items() if name != "cpu")
    typer.echo(f"\n{result.note}\n± is half the range of the seeds. {result.machine['cpu']}, {about}.")
    typer.echo(f"Written: {output}, {stored}" if folder is not None else f"Written: {output}")


if __name__ == "__main__":
    main_of(app, "python -m recipes.experiments.curves")
