"""Run the experiments of recipes/README.md, and print the tables of their results.

    python -m recipes.experiments run glue --data DATA --output RUNS --workers 2
    python -m recipes.experiments show RUNS/glue                                 (prints the table again)
    python -m recipes.experiments curves RUNS/flurka_images --output recipes/pictures/flurka_images.png

groups.yaml has the options of these and of the other groups. Every run is a recipe in a process and a folder of its
own. A run that has a metrics.json is not repeated, so that interrupted experiments continue. Runs with --extra options
need another folder. DATA has glue/, images/, models/ and text/books/. Steps, subsets and seeds are small, the same for
every line of a table, and stated with it.

`curves` compares up-training with its reference runs. The claim of Gupta et al. 2023, section 4.2: a model that is
trained with a base for a share of the steps, and then with a FLuRKA variant, ends better than one that has the variant
from the start, the reference. "Reached at" is the step at which the evaluation loss of a run, linear between two
evaluations, first is the mean final loss of the reference. The cost up to this step is given in CPU seconds of training
steps; those before the switch cost as much as those of the base.

Duration: that of the recipe, for every line, task and seed of a table. Expected: the tables of recipes/README.md.
"""

import concurrent.futures
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
import yaml
from tqdm import tqdm

from hf_efficient_attn.cli import main_of, table
from hf_efficient_attn.cli.demo import minilm_folder
from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_name
from hf_efficient_attn.io.json import read_json_object
from recipes.common.commands import Csv, Data, Picture, data_folder, new_app, option, save, write
from recipes.common.memory import ROOT
from recipes.common.reporting import METRICS, mean_and_range, smoothed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

app = new_app(no_args_is_help=True)
EXACT = "exact"
GROUPS: dict[str, Any] = yaml.safe_load(pathlib.Path(__file__).with_name("groups.yaml").read_text(encoding="utf-8"))


class Group(NamedTuple):
    """A table with a line for each attention and a column for each figure."""

    tasks: Mapping[str, Sequence[str]]  # recipe and arguments of each task. Each task runs once for every line
    attention: Mapping[str, Sequence[str]]  # arguments of each line
    figures: Mapping[str, tuple[str, str]]  # task of each column, and its key in metrics.json
    note: str  # description of the figures, with steps and subsets
    untrained: Sequence[str] = ()  # tasks without training, which cannot be up-trained

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Line and task of all runs."""
        for task in self.tasks:
            for line, arguments in self.attention.items():
                if not (task in self.untrained and "--stages" in arguments):
                    yield line, task


def group_of(name: str, data: pathlib.Path) -> Group:
    """The group with this name. `data` replaces $DATA in its arguments. An unknown name is refused."""
    if name not in GROUPS:
        raise UnsupportedAttentionError(unknown_name("group of experiments", name, GROUPS))
    given = dict(GROUPS[name])
    common = given.pop("common", "")
    minilm = str(minilm_folder()) if "$MINILM" in common else ""

    def words(text: str) -> list[str]:
        return [word.replace("$DATA", str(data)).replace("$MINILM", minilm) for word in shlex.split(text)]

    def attention(text: str) -> list[str]:
        method, *hyperparameters = words(text)
        if method.startswith("--"):
            return [method, *hyperparameters]
        return ["--attention", method, *(["--set", *hyperparameters] if hyperparameters else [])]

    tasks = {task: words(f"{text} {common}") for task, text in given.pop("tasks").items()}
    return Group(tasks, {line: attention(text) for line, text in given.pop("attention").items()}, **given)


def folder_of(output: pathlib.Path, line: str, task: str, seed: int) -> pathlib.Path:
    """The folder of a run."""
    slugs = ["-".join("".join(c if c.isalnum() else " " for c in text.lower()).split()) for text in (task, line)]
    return output / slugs[0] / f"{slugs[1]}-{seed}"


def reports_of(folder: pathlib.Path, line: str, task: str) -> dict[int, dict[str, Any]]:
    """The reports of the finished runs by seed."""
    paths = {seed: folder_of(folder, line, task, seed) / METRICS for seed in range(100)}
    return {seed: json.loads(path.read_text(encoding="utf-8")) for seed, path in paths.items() if path.is_file()}


def run_one(module: Sequence[str], folder: pathlib.Path, threads: int) -> str | None:
    """Run a recipe in a child process with its output in run.log; return its error message, or None."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", *module, "--output_dir", str(folder), "--overwrite", "True"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    with (folder / "run.log").open("w", encoding="utf-8") as log:
        log.write(f"{shlex.join(command)}\n")
        log.flush()
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode == 0:
        # The weights are not needed for the table.
        for path in (*folder.glob("*.safetensors"), *folder.glob("*.bin")):
            path.unlink()
        return None
    return (folder / "run.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1]


@app.command(epilog="Example: python -m recipes.experiments run glue --output runs --workers 2 --seeds 2")
def run(
    groups: Annotated[
        list[str], typer.Argument(metavar="GROUP...", help="Names of groups: " + ", ".join(GROUPS) + ".")
    ],
    output: option(pathlib.Path, "Folder of the runs.", metavar="FOLDER"),
    data: Data = None,
    workers: option(int, "Number of simultaneous runs.", min=1) = 1,
    threads: option(int, "Threads of each run.", min=1) = 1,
    seeds: option(int, "Number of seeds, 0, 1, ...", min=1) = 1,
    only: option(str, "Only lines or tasks that contain this text.", metavar="TEXT") = "",
    extra: option(str, "Further options of the recipes, in quotes.", metavar="OPTIONS") = "",
) -> None:
    """Run the missing experiments of some groups, and print their tables. The exit status is 1 if a run fails."""
    output = output.absolute()  # recipes run in another folder
    chosen = {name: group_of(name, data_folder(data).absolute()) for name in groups}
    waiting = []
    for name, group in chosen.items():
        for seed, (line, task) in ((seed, pair) for seed in range(seeds) for pair in group.pairs()):
            folder = folder_of(output / name, line, task, seed)
            if only.lower() in f"{line} {task}".lower() and not (folder / METRICS).is_file():
                module = [*group.tasks[task], *group.attention[line], "--seed", str(seed), *shlex.split(extra)]
                waiting.append((module, folder))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool, tqdm(total=len(waiting), disable=None) as bar:
        started = {pool.submit(run_one, module, folder, threads): folder for module, folder in waiting}
        for future in concurrent.futures.as_completed(started):
            bar.update()
            if future.result() is not None:
                tqdm.write(f"failed: {started[future]}: {future.result()}", file=sys.stderr)
    for name, group in chosen.items():
        show_group(name, group, output / name)
    if any(future.result() is not None for future in started):
        raise typer.Exit(1)


@app.command(epilog="Example: python -m recipes.experiments show runs/glue")
def show(
    folder: Annotated[pathlib.Path, typer.Argument(metavar="FOLDER", help="Runs of one group.")], csv: Csv = None
) -> None:
    """Print the table of existing runs."""
    group = group_of(folder.name, data_folder(None))
    if not any(folder.glob(f"*/*/{METRICS}")):
        raise UnsupportedAttentionError(f"{folder} holds no finished runs: make them with the command run")
    show_group(folder.name, group, folder, csv)


def show_group(name: str, group: Group, folder: pathlib.Path, csv: pathlib.Path | None = None) -> None:
    """Print a table with a line for each attention that has run, and a column for each figure; write it as CSV."""
    lines, seeds = [], 1
    for line in group.attention:
        reports = {task: reports_of(folder, line, task).values() for task in group.tasks}
        if not any(reports.values()):
            continue
        cells = []
        for task, key in group.figures.values():
            values = [report["metrics"].get(key, report.get(key)) for report in reports[task]]
            values = [value for value in values if value is not None]
            seeds = max(seeds, len(values))
            cells.append(mean_and_range(values, 1 if max(values, default=0.0) > 10.0 else 3))  # percentages, shares
        lines.append((line, *cells))
    write([dict(zip(("attention", *group.figures), line, strict=True)) for line in lines], csv)
    typer.echo(table((name, *group.figures), lines))
    several = f"With ±: the mean and half the range of {seeds} seeds; otherwise one seed."
    typer.echo(f"\n{group.note} " + (several if seeds > 1 else "One seed."))


class Curve(NamedTuple):
    """One run."""

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
        at = next((i for i, (_, value) in enumerate(self.evaluation) if value <= loss), None)
        if at is None:
            return None
        (first, high), (last, low) = self.evaluation[max(at - 1, 0)], self.evaluation[at]
        return last if high <= low else first + (last - first) * (high - loss) / (high - low)


class Result:
    """The finished runs of a group by line and seed, and the variant from the start of every up-trained line.

    A folder without an up-trained variant, the same variant from the start, and its base is refused.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        known = [name for name in GROUPS if name.startswith("flurka_")]
        if folder.name not in known or not folder.is_dir():
            raise UnsupportedAttentionError(f"{folder} holds no runs: its name must be one of {', '.join(known)}")
        group = group_of(folder.name, pathlib.Path("DATA"))
        (task,) = group.tasks
        self.note, self.runs = group.note, dict[str, dict[int, Curve]]()
        for line in group.attention:
            for seed, report in reports_of(folder, line, task).items():
                log = read_json_object(folder_of(folder, line, task, seed) / "trainer_state.json")["log_history"]
                self.runs.setdefault(line, {})[seed] = curve_of(report, log)
        variants = {line: line.partition(",")[0] for line in self.runs if "," in line}
        self.variants = {line: variant for line, variant in variants.items() if variant in self.runs}
        if not self.variants:
            raise UnsupportedAttentionError(
                f"{folder} holds no finished run of an up-trained variant and of the same variant from the start"
            )
        for line in self.variants:
            if self.base(line) not in self.runs:
                raise UnsupportedAttentionError(
                    f"{folder} holds no finished run of {self.base(line)}, the base of {line}"
                )

    def base(self, line: str) -> str:
        """The line with the attention of a line's first stage."""
        return next(iter(self.runs[line].values())).stages[0]

    def seconds(self, curve: Curve, step: float) -> float:
        """CPU seconds of a run up to a step."""
        before = min(step, curve.switch)
        parts = [(stage, n) for stage, n in ((curve.stages[0], before), (curve.stages[-1], step - before)) if n]
        return sum(n * statistics.fmean(one.seconds for one in self.runs[stage].values()) for stage, n in parts)


def curve_of(report: dict[str, Any], log: list[dict[str, Any]]) -> Curve:
    """The curve of a run with its report and Trainer's log."""
    loss, evaluation = ([(one["step"], one[key]) for one in log if key in one] for key in ("loss", "eval_loss"))
    switch = next(iter(report["switches"]), None)
    stages = [switch["from"], switch["to"]] if switch else [report["attention"]["attention"]]
    stages = [EXACT if stage in (None, "sdpa", "eager") else stage for stage in stages]
    at = switch["step"] if switch else 0
    return Curve(report["steps"], stages, at, report["cpu_seconds_per_step"], loss, evaluation)


def verdict_table(result: Result) -> str:
    """Compare the final loss of each up-trained line with the variant and with the base, seed by seed."""
    rows = []
    for line, variant in result.variants.items():
        runs, cells = result.runs[line], []
        for other in (variant, result.base(line)):
            references = result.runs.get(other, {})
            differences = [runs[seed].final - run.final for seed, run in references.items() if seed in runs]
            cells += [mean_and_range(differences), f"{sum(d < 0 for d in differences)} of {len(differences)}"]
        rows.append((line, *cells))
    return table(("attention", "loss minus the variant's", "lower in", "loss minus the base's", "lower in"), rows)


def equal_loss_table(result: Result) -> str:
    """Where each up-trained line and base reaches the final loss of the variant from the start, and at what cost."""
    rows: list[tuple[Any, ...]] = []
    for variant in dict.fromkeys(result.variants.values()):
        references = list(result.runs[variant].values())
        loss = statistics.fmean(run.final for run in references)
        seconds = statistics.fmean(result.seconds(run, run.steps) for run in references)
        for line, runs in result.runs.items():
            if line == variant:
                rows.append((line, f"{loss:.3f}", "", references[0].steps, f"{seconds:.0f}", "1.00"))
            elif result.variants.get(line, variant) == variant:
                steps = [(run, step) for run in runs.values() if (step := run.reached_at(loss)) is not None]
                taken = [result.seconds(run, step) for run, step in steps]
                cells = mean_and_range([step for _, step in steps], 0), mean_and_range(taken, 0)
                relative = mean_and_range([t / seconds for t in taken], 2)
                rows.append((line, f"{loss:.3f}", f"{len(steps)} of {len(runs)}", *cells, relative))
    return table(("attention", "loss", "reached by", "step", "CPU s", "time, relative"), rows)


def draw(result: Result) -> "Figure":
    """Plot mean and range over the seeds: training loss above, evaluation loss below, one column for each base."""
    from matplotlib.figure import Figure

    pairs: dict[tuple[str, str], list[str]] = {}
    for line, variant in result.variants.items():
        pairs.setdefault((variant, result.base(line)), []).append(line)
    figure = Figure(figsize=(5.2 * len(pairs), 8), layout="constrained", facecolor="white")
    columns = figure.subplots(2, len(pairs), squeeze=False, sharex=True, sharey="row").T
    for ((variant, base), lines), (above, below) in zip(pairs.items(), columns, strict=True):
        for number, line in enumerate(line for line in (EXACT, base, variant, *lines) if line in result.runs):
            color, runs = "0.4" if line == EXACT else f"C{number - 1}", list(result.runs[line].values())
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


@app.command(epilog="Example: python -m recipes.experiments curves RUNS/flurka_images --output flurka_images.png")
def curves(
    folder: Annotated[pathlib.Path, typer.Argument(metavar="FOLDER", help="Runs of one group.")],
    output: Picture = pathlib.Path("curves.png"),
) -> None:
    """Draw the curves of up-training and its references, and print what they cost and where they end."""
    result = Result(folder)
    typer.echo("\n\n".join((verdict_table(result), equal_loss_table(result))))
    typer.echo(f"\n{result.note}\n± is half the range of the seeds.")
    save(draw(result), output)


if __name__ == "__main__":
    main_of(app, "python -m recipes.experiments")
