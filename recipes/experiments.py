"""The experiments of recipes/README.md: runs of the recipes over methods and seeds, and the tables of what came out.

    python -m recipes.experiments run glue --data DATA --output RUNS --workers 2      (also imagenet, lm, lra)
    python -m recipes.experiments show RUNS/glue                                      (the table again, from RUNS)

Every run is a recipe in a process of its own with a folder of its own; one whose metrics.json is there already is not
run again, so that what was interrupted goes on. DATA is a folder with glue/, images/, imdb/, models/ and text/books
($HEA_DATA or ../shared/data by default). Steps, subsets and seeds are small, the same for every row of a table, and
stated with it.
"""

import concurrent.futures
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from tqdm import tqdm

from hf_efficient_attn.cli import main_of, table
from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_name
from hf_efficient_attn.evaluation.demo import minilm_folder
from recipes.benchmarks.error import Data, data_folder
from recipes.benchmarks.report import Csv, write_csv

ROOT = pathlib.Path(__file__).resolve().parents[1]
app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)


@dataclass(frozen=True)
class Group:
    """A table: a row for each attention, a column for each figure.

    tasks: name -> recipe and its arguments, one run for each row. attention: row -> arguments. figures: column -> task
    and key of its metrics.json. untrained: tasks that have no training, and so no up-training. note: what the figures
    are, in which steps and subsets.
    """

    tasks: Mapping[str, Sequence[str]]
    attention: Mapping[str, Sequence[str]]
    figures: Mapping[str, tuple[str, str]]
    note: str
    untrained: Sequence[str] = ()

    def pairs(self) -> list[tuple[str, str]]:
        """(row, task) of all runs."""
        return [
            (row, task)
            for task in self.tasks
            for row, arguments in self.attention.items()
            if not (task in self.untrained and "--stages" in arguments)
        ]


def cost(task: str, name: str) -> dict[str, tuple[str, str]]:
    """Columns of what a run cost."""
    return {f"{name}, s a step": (task, "seconds_per_step"), f"{name}, MiB": (task, "peak_memory_mib")}


def attention(method: str, *settings: str) -> list[str]:
    """Arguments of a recipe that trains with one method from the first step on."""
    return ["--attention", method, *(["--set", *settings] if settings else [])]


def glue_group(data: pathlib.Path) -> Group:
    """MiniLM on GLUE. Sentences are short, so budgets are small: 16 columns, 16 landmarks, tables of 128 rows."""
    tables = "projection_dim=128", "share=none"
    common = (
        f"--data {data}/glue --model_name_or_path {minilm_folder()} --max_length 64 --num_train_epochs 1 "
        "--per_device_train_batch_size 16 --learning_rate 1e-4 --bf16 "
        "--use_cpu --max_eval_samples 400 --eval_strategy no --save_strategy no"
    ).split()
    names = {
        "stsb": ("STS-B", "spearman"),
        "mrpc": ("MRPC", "f1"),
        "cola": ("CoLA", "matthews_correlation"),
        "rte": ("RTE", "accuracy"),
    }
    return Group(
        tasks={label: ["recipes.glue", "--task", task, *common] for task, (label, _) in names.items()},
        attention={
            "exact": attention("sdpa"),
            "kdeformer": attention("kdeformer", "block_size=8", "num_samples=8"),
            "nystromformer": attention("nystromformer", "num_landmarks=16"),
            "linear": attention("linear"),
            "performer": attention("performer", "num_features=128"),
            "flurka_performer": attention("flurka_performer", *tables, "num_features=128"),
            "flurka_performer, up-trained 25 %": [
                "--stages",
                f"linformer,{','.join(tables)}:0.25",
                "flurka_performer,num_features=128:1.0",
            ],
        },
        figures={label: (label, f"eval_{figure}") for label, figure in names.values()}
        | {"MRPC, accuracy": ("MRPC", "eval_accuracy")},
        note="MiniLM, one epoch of 16 rows of up to 64 tokens in bfloat16 (steps: STS-B 360, CoLA 535, MRPC 230, RTE "
        "156); F1 of MRPC, accuracy of RTE, Matthews correlation of CoLA, Spearman correlation of STS-B, on 400 rows "
        "of the development sets (RTE has 277).",
    )


def imagenet_group(data: pathlib.Path) -> Group:
    """DeiT-tiny: switched and evaluated on ImageNet's thousand samples, and fine-tuned on Imagenette."""
    images = data / "images"
    model = ["recipes.imagenet", "--model", f"{data}/models/deit-tiny-imagenet"]
    samples, classes = f"{images}/imagenet1k-sample-256px.zip", f"{images}/imagenet1k-sample-256px.zip"
    switched = [*model, "--eval_only", "--eval_data", samples, "--max_eval_samples", "500"]
    tuned = (
        f"--train_data {images}/imagenette160-val-1000.zip --class_list {classes} --eval_share 0.2 --eval_strategy no "
        "--save_strategy no --per_device_train_batch_size 16 --learning_rate 1e-4 --warmup_steps 10"
    ).split()
    tables = "projection_dim=64", "share=none"
    return Group(
        tasks={
            "switched": switched,
            "224 px": [*model, *tuned, "--max_steps", "60"],
            "384 px": [*model, *tuned, "--max_steps", "15", "--resolution", "384"],
        },
        attention={
            "exact": attention("sdpa"),
            "kdeformer": attention("kdeformer", "block_size=32", "num_samples=32"),
            "nystromformer": attention("nystromformer", "num_landmarks=32"),
            "performer": attention("performer", "num_features=128"),
            "flurka_performer": attention("flurka_performer", *tables, "num_features=128"),
            "flurka_performer, up-trained 16.7 %": [
                "--stages",
                f"linformer,{','.join(tables)}:0.167",
                "flurka_performer,num_features=128:1.0",
            ],
        },
        figures={
            "thousand classes, switched": ("switched", "eval_top1"),
            "Imagenette 224 px": ("224 px", "eval_top1"),
            "Imagenette 384 px": ("384 px", "eval_top1"),
        },
        untrained=("switched",),
        note="DeiT-tiny, top-1 among 1,000 classes. Switched: 500 of ImageNet's sample photographs at 224 pixels, no "
        "training. Imagenette: 200 photographs after 60 steps (at 384 pixels 15) of 16 of the other 800.",
    )


def lm_group(data: pathlib.Path) -> Group:
    """A small GPT-2 that copies passages from far back, before and after a short up-training."""
    common = (
        f"recipes.clm --model {data}/models/gpt2-books --text {data}/text/books --block_size 2048 --drop_short "
        "--max_eval_windows 8 --eval_positions --per_device_eval_batch_size 2"
    ).split()
    tuned = (
        "--max_steps 25 --per_device_train_batch_size 2 --learning_rate 3e-4 --warmup_steps 4 --eval_strategy no"
        " --save_strategy no"
    )
    figures: dict[str, tuple[str, str]] = {}
    for task, short in (("before", "before"), ("after", "after")):
        figures[f"{short}: text"] = (task, "eval_loss")
        for distance in (256, 768, 1536):
            figures[f"{short}: repeated at {distance}"] = (task, f"eval_repeat_{distance}_second")
    return Group(
        tasks={"before": [*common, "--eval_only"], "after": [*common, *tuned.split()]},
        attention={
            "exact": attention("sdpa"),
            "kdeformer": attention("kdeformer", "block_size=256", "num_samples=256"),
            "hyperattention": attention("hyperattention", "block_size=256", "num_samples=256"),
            "longformer": attention("longformer", "window_size=256"),
            "scatterbrain": attention("scatterbrain"),
            "eva": attention("eva"),
            "performer": attention("performer", "num_features=256"),
            "linear": attention("linear"),
        },
        figures=figures,
        untrained=("before",),
        note="gpt2-books, nats a token on 8 windows of 2,048 tokens that it was not trained on, and on passages of "
        "128 tokens that stood 256, 768 and 1,536 tokens earlier; before any training and after 25 steps of 2 "
        "windows.",
    )


def lra_group(data: pathlib.Path) -> Group:
    """The Long Range Arena's small encoder, for as many steps as two cores have time for."""
    common = ["recipes.lra", "--eval_strategy", "no", "--save_strategy", "no", "--task"]
    image = f"image --data {data}/images/cifar10-jpeg-test10k-train5k.zip --max_steps 150 --max_eval_samples 500"
    text = f"text --data {data}/imdb --max_length 4096 --max_steps 40 --max_eval_samples 200"
    listops = "listops --listops_train 1000 --listops_eval 200 --max_steps 60"
    small = ["--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "8"]
    tasks = {
        "ListOps": [*listops.split(), *small],
        "text": [*text.split(), *small],
        "image": [*image.split(), "--per_device_train_batch_size", "16"],
    }
    costs: dict[str, tuple[str, str]] = {}
    for task in tasks:
        costs |= cost(task, task)
    return Group(
        tasks={name: [*common, *arguments] for name, arguments in tasks.items()},
        attention={
            "exact": attention("sdpa"),
            "linear": attention("linear"),
            "nystromformer": attention("nystromformer", "num_landmarks=64"),
            "kdeformer": attention("kdeformer", "block_size=64", "num_samples=64"),
            "flurka_linear": attention("flurka_linear", "projection_dim=256"),
        },
        figures={name: (name, "eval_accuracy") for name in tasks} | costs,
        note="Accuracy of an encoder of 2 layers, 64 wide, from scratch: ListOps (up to 2,000 tokens; 60 steps of 8; "
        "200 to evaluate; chance about .17), IMDB by bytes (4,096; 40 of 8; 200; .5), CIFAR-10 by pixels (1,024; 150 "
        "of 16; 500; .1). This is far from the benchmark's training.",
    )


GROUPS: dict[str, Callable[[pathlib.Path], Group]] = {
    "glue": glue_group,
    "imagenet": imagenet_group,
    "lm": lm_group,
    "lra": lra_group,
}


def slug(text: str) -> str:
    """A folder's name."""
    return "-".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


def folder_of(output: pathlib.Path, row: str, column: str, seed: int) -> pathlib.Path:
    return output / slug(column) / f"{slug(row)}-{seed}"


def run_one(module: Sequence[str], folder: pathlib.Path, threads: int) -> str | None:
    """One recipe in a process of its own; what it complained of, or None. Its output is in run.log."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", *module, "--output_dir", str(folder), "--overwrite", "True"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    with (folder / "run.log").open("w", encoding="utf-8") as log:
        log.write(f"{shlex.join(command)}\n")
        log.flush()
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode == 0:
        # The weights of a table's rows are of no use to anybody.
        for path in (*folder.glob("*.safetensors"), *folder.glob("*.bin")):
            path.unlink()
        return None
    lines = (folder / "run.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"


@app.command(epilog="Example: python -m recipes.experiments run glue --output runs --workers 2 --seeds 2")
def run(
    groups: Annotated[list[str], typer.Argument(metavar="GROUP...", help="glue, imagenet, lm or lra.")],
    output: Annotated[pathlib.Path, typer.Option(metavar="FOLDER", help="Where the runs are kept.")],
    data: Data = None,
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Runs at a time, each with one thread.")] = 1,
    threads: Annotated[int, typer.Option(metavar="N", min=1, help="Threads of each.")] = 1,
    seeds: Annotated[int, typer.Option(metavar="N", min=1, help="Runs of each row, with seeds 0, 1, ...")] = 1,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Only rows or columns that hold this text.")] = "",
    csv: Csv = None,
) -> None:
    """Run the rows of some tables that were not run yet, and print the tables."""
    for name in groups:
        if name not in GROUPS:
            raise UnsupportedAttentionError(unknown_name("group of experiments", name, GROUPS))
    source = data_folder(data)
    made = {name: GROUPS[name](source) for name in groups}
    waiting = []
    for name, group in made.items():
        for seed in range(seeds):
            for row, task in group.pairs():
                folder = folder_of(output / name, row, task, seed)
                if only.lower() in f"{row} {task}".lower() and not (folder / "metrics.json").is_file():
                    waiting.append(([*group.tasks[task], *group.attention[row], "--seed", str(seed)], folder))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool, tqdm(total=len(waiting), disable=None) as bar:
        started = {pool.submit(run_one, module, folder, threads): folder for module, folder in waiting}
        for future in concurrent.futures.as_completed(started):
            bar.update()
            if future.result() is not None:
                tqdm.write(f"failed: {started[future]}: {future.result()}", file=sys.stderr)
    for name, group in made.items():
        show_group(name, group, output / name, csv)


@app.command(epilog="Example: python -m recipes.experiments show runs/glue")
def show(
    folder: Annotated[pathlib.Path, typer.Argument(metavar="FOLDER", help="Runs of one group, as `run` left them.")],
    data: Data = None,
    csv: Csv = None,
) -> None:
    """Print the table of runs that were made."""
    if folder.name not in GROUPS or not folder.is_dir():
        raise UnsupportedAttentionError(f"{folder} holds no runs: its last part must be one of {', '.join(GROUPS)}")
    show_group(folder.name, GROUPS[folder.name](data_folder(data)), folder, csv)


def reports_of(folder: pathlib.Path, row: str, column: str) -> list[dict[str, Any]]:
    """What the recipe wrote, of every seed."""
    found = sorted((folder / slug(column)).glob(f"{slug(row)}-[0-9]*/metrics.json"))
    found = [path for path in found if path.parent.name.removeprefix(f"{slug(row)}-").isdecimal()]
    return [json.loads(path.read_text(encoding="utf-8")) for path in found]


def figures_of(reports: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """One figure of every report that has it."""
    values = (report["metrics"].get(key, report.get(key)) for report in reports)
    return [value for value in values if value is not None]


def mean_and_range(values: Sequence[float], digits: int = 3) -> str:
    """The mean, and half the range of the seeds where there are several."""
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {(max(values) - min(values)) / 2:.{digits}f}"


def show_group(name: str, group: Group, folder: pathlib.Path, csv: pathlib.Path | None) -> None:
    """A line for each attention that was run, a column for each figure."""
    lines, rows, seeds = [], [], 1
    for row in group.attention:
        reports = {task: reports_of(folder, row, task) for task in group.tasks}
        if not any(reports.values()):
            continue
        found = {column: figures_of(reports[task], key) for column, (task, key) in group.figures.items()}
        seeds = max(seeds, *map(len, found.values()))
        lines.append((row, *(mean_and_range(values, 0 if ", MiB" in c else 3) for c, values in found.items())))
        rows.append({"attention": row} | {c: statistics.fmean(v) if v else None for c, v in found.items()})
    typer.echo(table((name, *group.figures), lines))
    several = f"With ±: the mean and half the range of {seeds} seeds; else one seed."
    typer.echo(f"\n{group.note} " + (several if seeds > 1 else "One seed."))
    if csv is not None and rows:
        write_csv(csv, rows)


if __name__ == "__main__":
    main_of(app, "python -m recipes.experiments")
