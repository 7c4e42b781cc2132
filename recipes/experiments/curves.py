"""Compare up-training with its reference runs: curves over the steps, differences of loss, and the cost of equal loss.

    python -m recipes.experiments run flurka_images flurka_books --output RUNS --seeds 3
    python -m recipes.experiments.curves RUNS/flurka_images --output recipes/pictures/flurka_images.png

The claim of Gupta et al. 2023, section 4.2: a model that is trained with a base for a share of the steps, and then with
a FLuRKA variant, ends better than one that has the variant from the start, the reference. "Reached at" is the step at
which the evaluation loss of a run, linear between two evaluations, first is the mean final loss of the reference. The
cost up to this step is given in CPU seconds of training steps, and in multiply-adds of the attention modules in the
forward pass of one example, with their projections; steps before the switch cost as much as those of the base.

`python -m recipes.experiments show` prints the final losses.

Duration: seconds. Expected: the tables and the pictures of docs/training_results.md.
"""

import pathlib
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
import typer
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForImageClassification, AutoModelForMaskedLM

import hf_efficient_attn as hea
from hf_efficient_attn.cli import main_of, table
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.models import attention_modules
from hf_efficient_attn.io.json import read_json_object
from recipes.common import commands
from recipes.common.counting import FORMULAS_BY_PART
from recipes.common.reporting import mean_and_range, smoothed
from recipes.experiments.__main__ import GROUPS, folder_of, group_of, reports_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

app = commands.new_app()
EXACT = "exact"


class Curve(NamedTuple):
    """One run."""

    seed: int
    steps: int  # number of training steps
    stages: list[str]  # lines that have the attention of its stages; one, or two if there is a switch
    switch: int  # number of steps before the switch; 0 without one
    seconds: float  # CPU seconds per step
    loss: list[tuple[float, float]]  # training loss, as (step, loss)
    evaluation: list[tuple[float, float]]  # evaluation loss, as (step, loss)

    @property
    def final(self) -> float:
        """The evaluation loss after the last step."""
        return self.evaluation[-1][1]

    def reached_at(self, loss: float) -> float | None:
        """The step at which the evaluation loss, linear between two evaluations, first is `loss`; None for never."""
        before = self.evaluation[0]
        for step, value in self.evaluation:
            if value <= loss:
                share = (before[1] - loss) / (before[1] - value) if value < before[1] else 0.0
                return before[0] + (step - before[0]) * share
            before = (step, value)
        return None


class Result:
    """The finished runs of a group by line, and the multiply-adds of the attention of an example by line.

    A folder without an up-trained variant and the same variant from the start is refused.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        known = [name for name in GROUPS if name.startswith("flurka_")]
        if folder.name not in known or not folder.is_dir():
            raise UnsupportedAttentionError(f"{folder} holds no runs: its name must be one of {', '.join(known)}")
        group = group_of(folder.name, pathlib.Path("DATA"))
        (task,) = group.tasks
        self.note, self.runs, self.cost = group.note, dict[str, list[Curve]](), dict[str, int]()
        for line in group.attention:
            for seed, report in reports_of(folder, line, task).items():
                path = folder_of(folder, line, task, seed)
                self.runs.setdefault(line, []).append(read_curve(path, seed, report))
                if line not in self.cost and not report["switches"]:
                    self.cost[line] = attention_cost(path, report.get("block_size"))
        # The variant from the start of every up-trained line.
        variants = {line: line.partition(",")[0] for line in self.runs if "," in line}
        self.variants = {line: variant for line, variant in variants.items() if variant in self.runs}
        if not self.variants:
            raise UnsupportedAttentionError(
                f"{folder} holds no finished run of an up-trained variant and of the same variant from the start"
            )

    def up_to(self, curve: Curve, step: float) -> tuple[float, float]:
        """Seconds, and attention cost of an example in each step, of a run up to a step."""
        before = min(step, curve.switch)
        parts = [(stage, n) for stage, n in ((curve.stages[0], before), (curve.stages[-1], step - before)) if n]
        seconds = sum(n * statistics.fmean(one.seconds for one in self.runs[stage]) for stage, n in parts)
        return seconds, sum(self.cost[stage] * n for stage, n in parts)


def read_curve(folder: pathlib.Path, seed: int, report: dict[str, Any]) -> Curve:
    """Read trainer_state.json of a run with its report."""
    log, switches = read_json_object(folder / "trainer_state.json")["log_history"], report["switches"]
    loss, evaluation = ([(one["step"], one[key]) for one in log if key in one] for key in ("loss", "eval_loss"))
    stages = [switches[0]["from"], switches[0]["to"]] if switches else [report["attention"]["attention"]]
    stages = [EXACT if stage in (None, "sdpa", "eager") else stage for stage in stages]
    switch = switches[0]["step"] if switches else 0
    return Curve(seed, report["steps"], stages, switch, report["cpu_seconds_per_step"], loss, evaluation)


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


def verdict_table(result: Result) -> str:
    """Compare the final loss of each up-trained line with the variant and with the base, seed by seed."""
    rows = []
    for line, variant in result.variants.items():
        runs, cells = {run.seed: run for run in result.runs[line]}, []
        for other in (variant, result.runs[line][0].stages[0]):
            pairs = [(runs[run.seed], run) for run in result.runs.get(other, ()) if run.seed in runs]
            differences = [run.final - reference.final for run, reference in pairs]
            cells += [mean_and_range(differences), f"{sum(d < 0 for d in differences)} of {len(differences)}"]
        rows.append((line, *cells))
    headers = ("attention", "loss minus the variant's", "lower in", "loss minus the base's", "lower in")
    return table(headers, rows)


def equal_loss_table(result: Result) -> str:
    """Where each up-trained line and base reaches the final loss of the variant from the start, and at what cost."""
    rows: list[tuple[Any, ...]] = []
    for variant in dict.fromkeys(result.variants.values()):
        references = result.runs[variant]
        loss = statistics.fmean(run.final for run in references)
        full = zip(*(result.up_to(run, run.steps) for run in references), strict=True)
        seconds, cost = map(statistics.fmean, full)
        for line, runs in result.runs.items():
            if line == variant:
                rows.append((line, f"{loss:.3f}", "", references[0].steps, f"{seconds:.0f}", "1.00", "1.00"))
            elif result.variants.get(line, variant) == variant:
                steps = [(run, run.reached_at(loss)) for run in runs]
                reached = [(step, *result.up_to(run, step)) for run, step in steps if step is not None]
                at, taken, spent = list(zip(*reached, strict=True)) or [(), (), ()]
                relative = ([value / seconds for value in taken], [value / cost for value in spent])
                cells = (mean_and_range(at, 0), mean_and_range(taken, 0), *(mean_and_range(v, 2) for v in relative))
                rows.append((line, f"{loss:.3f}", f"{len(reached)} of {len(steps)}", *cells))
    headers = ("attention", "loss", "reached by", "step", "CPU s", "time, relative", "attention cost, relative")
    return table(headers, rows)


def draw(result: Result) -> "Figure":
    """Plot mean and range over the seeds: training loss above, evaluation loss below, one column for each base."""
    from matplotlib.figure import Figure

    pairs: dict[tuple[str, str], list[str]] = {}
    for line, variant in result.variants.items():
        pairs.setdefault((variant, result.runs[line][0].stages[0]), []).append(line)
    figure = Figure(figsize=(5.2 * len(pairs), 8), layout="constrained", facecolor="white")
    columns = figure.subplots(2, len(pairs), squeeze=False, sharex=True, sharey="row").T
    for ((variant, base), lines), (above, below) in zip(pairs.items(), columns, strict=True):
        for number, line in enumerate(line for line in (EXACT, base, variant, *lines) if line in result.runs):
            color, runs = "0.4" if line == EXACT else f"C{number - 1}", result.runs[line]
            label = line.removeprefix(f"{variant}, ").replace(f" from {base}", "")
            _band(above, [run.loss for run in runs], label, color)
            _band(below, [run.evaluation for run in runs], label, color)
            for axes in (above, below) if runs[0].switch else ():
                axes.axvline(runs[0].switch, color=color, linestyle="--", linewidth=1)
        above.set(title=f"{variant}, base {base}", ylabel="training loss, smoothed")
        below.set(xlabel="step", ylabel="evaluation loss")
        below.legend(fontsize="x-small", loc="lower left")
    return figure


def _band(axes: "Axes", curves: Sequence[Sequence[tuple[float, float]]], label: str, color: str) -> None:
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
    folder: Annotated[pathlib.Path, typer.Argument(metavar="FOLDER", help="Runs of one group, made by `run`.")],
    output: commands.Picture = pathlib.Path("curves.png"),
) -> None:
    """Draw the curves of up-training and its references, and print what they cost and where they end."""
    result = Result(folder)
    typer.echo("\n\n".join((verdict_table(result), equal_loss_table(result))))
    typer.echo(f"\n{result.note}\n± is half the range of the seeds.")
    commands.save(draw(result), output)


if __name__ == "__main__":
    main_of(app, "python -m recipes.experiments.curves")
