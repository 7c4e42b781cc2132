"""Run the experiments of recipes/README.md, and print the tables of their results.

    python -m recipes.experiments run glue --data DATA --output RUNS --workers 2
    python -m recipes.experiments show RUNS/glue                                 (prints the table again)

The other groups are imagenet, lm, lra, translation, flurka_images and flurka_books; groups.yaml has their recipes and
options. `recipes.experiments.curves` draws the runs of the last two, and prints what equal loss costs.

Every run is a recipe in a separate process with its own folder. A run that has a metrics.json is not repeated, so that
interrupted experiments continue. Runs with --extra options need another folder. DATA is a folder with glue/, images/,
imdb/, models/ and text/books. The default is $HEA_DATA or ../shared/data. Steps, subsets and seeds are small, the same
for every line of a table, and stated with it.

Duration: that of the recipe, for every line, task and seed of a table. Expected: the tables of recipes/README.md.
"""

import concurrent.futures
import json
import os
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import typer
import yaml
from tqdm import tqdm

from hf_efficient_attn.cli import main_of, table
from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_name
from hf_efficient_attn.evaluation.demo import minilm_folder
from recipes.common.commands import Data, data_folder, new_app, option
from recipes.common.memory import ROOT
from recipes.common.reporting import METRICS, mean_and_range

app = new_app(no_args_is_help=True)
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
    """Run the missing experiments of some groups, and print their tables."""
    chosen = {name: group_of(name, data_folder(data)) for name in groups}
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


@app.command(epilog="Example: python -m recipes.experiments show runs/glue")
def show(
    folder: Annotated[pathlib.Path, typer.Argument(metavar="FOLDER", help="Runs of one group, made by `run`.")],
) -> None:
    """Print the table of existing runs."""
    if not folder.is_dir():
        raise UnsupportedAttentionError(f"{folder} holds no runs: make them with the command run")
    show_group(folder.name, group_of(folder.name, data_folder(None)), folder)


def show_group(name: str, group: Group, folder: pathlib.Path) -> None:
    """Print a table with a line for each attention that has run, and a column for each figure."""
    lines, seeds = [], 1
    for line in group.attention:
        reports = {task: reports_of(folder, line, task).values() for task in group.tasks}
        if not any(reports.values()):
            continue
        cells = []
        for column, (task, key) in group.figures.items():
            values = [report["metrics"].get(key, report.get(key)) for report in reports[task]]
            values = [value for value in values if value is not None]
            seeds = max(seeds, len(values))
            cells.append(mean_and_range(values, 0 if ", MiB" in column else 3))
        lines.append((line, *cells))
    typer.echo(table((name, *group.figures), lines))
    several = f"With ±: the mean and half the range of {seeds} seeds; otherwise one seed."
    typer.echo(f"\n{group.note} " + (several if seeds > 1 else "One seed."))


if __name__ == "__main__":
    main_of(app, "python -m recipes.experiments")
