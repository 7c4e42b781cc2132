"""The commands behind the tables of recipes/README.md: runs, and tables."""

import json
import pathlib

import pytest

from recipe_commands import run
from recipes.common import arguments
from recipes.experiments import __main__ as experiments
from tiny_recipes import write


@pytest.fixture
def folder(tmp_path, monkeypatch) -> pathlib.Path:
    """An empty data folder, since nothing is trained."""
    monkeypatch.setattr(experiments, "data_folder", lambda data: tmp_path)
    monkeypatch.setattr(experiments, "minilm_folder", lambda: tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", experiments.GROUPS)
def test_recipes_accept_the_arguments_of_every_line(name, folder):
    group = experiments.group_of(name, folder)
    for line, task in group.pairs():
        (options,) = arguments.parse_only(arguments.AttentionArguments, description="", argv=group.attention[line])
        assert (options.schedule() is None) == ("up-trained" not in line), (line, task)
    assert {task for task, _ in group.figures.values()} == set(group.tasks)


def test_table_shows_the_mean_over_seeds(folder, capsys):
    group = experiments.group_of("glue", folder)
    for seed, value in ((0, 0.5), (1, 0.7)):
        path = experiments.folder_of(folder / "glue", "exact", "MRPC", seed) / "metrics.json"
        write(path, json.dumps({"metrics": {group.figures["MRPC"][1]: value}, "seed": seed}))
    assert run(experiments, "show", folder / "glue") == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("| exact")]
    assert "0.600 ± 0.100" in line and "half the range of 2 seeds" in out and "| linear" not in out


def test_runs_are_not_repeated_and_failures_are_reported(folder, monkeypatch, capsys):
    runs = []

    def run_one(module, run_folder, threads):
        runs.append(module)
        if "linear" in module:
            return "error: no such thing"
        write(run_folder / "metrics.json", json.dumps({"metrics": {"eval_spearman": 0.25}}))
        return None

    monkeypatch.setattr(experiments, "run_one", run_one)
    call = "run glue --only STS-B --output", folder / "runs"
    assert run(experiments, *call) == 0
    first, printed = len(runs), capsys.readouterr()
    assert "no such thing" in printed.err and "0.250" in printed.out
    assert run(experiments, *call) == 0
    # Only the failed run is repeated.
    assert first == 10 and len(runs) == 11 and "linear" in runs[-1]
    assert run(experiments, "run glue --only exact --extra '--learning_rate 1e-3' --output", folder / "rate") == 0
    assert len(runs) == 15 and all(one[-2:] == ["--learning_rate", "1e-3"] for one in runs[11:])


def write_run(folder: pathlib.Path, stages: list[str], losses: list[float], seconds: float) -> None:
    """A run of forty steps with an evaluation every tenth step; with two stages, they switch at step 10."""
    switches = [{"step": 10, "from": stages[0], "to": stages[1]}] if len(stages) > 1 else []
    report = {"metrics": {"eval_accuracy": 0.25}, "steps": 40, "switches": switches, "cpu_seconds_per_step": seconds}
    report["attention"] = {"attention": None if switches else stages[0]}
    log = [{"step": 10 * i, "eval_loss": loss} for i, loss in enumerate(losses, 1)]
    log += [{"step": i, "loss": 3.0} for i in range(1, 41)]
    write(folder / "metrics.json", json.dumps(report))
    write(folder / "trainer_state.json", json.dumps({"log_history": log}))


def test_curves_compare_up_training_with_its_references(folder, tmp_path, capsys):
    runs = tmp_path / "flurka_books"
    (task,) = experiments.group_of("flurka_books", tmp_path).tasks
    given = {
        "exact": (["sdpa"], [2.5, 2.0, 1.0, 0.5], 4.0),
        "linear": (["linear"], [2.5, 2.4, 2.3, 2.2], 1.0),
        "flurka_linear": (["flurka_linear"], [2.5, 2.4, 2.2, 2.0], 2.0),
        "flurka_linear, up-trained 25 % from linear": (["linear", "flurka_linear"], [2.5, 2.2, 1.8, 1.5], 1.5),
    }
    for line, (stages, losses, seconds) in given.items():
        for seed in range(2):
            write_run(experiments.folder_of(runs, line, task, seed), stages, losses, seconds)
    picture = tmp_path / "books.png"
    assert run(experiments, "curves", runs, "--output", picture) == 0
    out = capsys.readouterr().out
    assert picture.stat().st_size > 1000
    # 1.8 is halfway from 2.2 at step 20 to 1.8 at step 30: 10 steps of the base and 15 of the variant.
    row = next(line for line in out.splitlines() if "2 of 2" in line and "25 ± 0" in line)
    assert "40 ± 0" in row and "0.50 ± 0.00" in row
    assert "-0.500 ± 0.000" in out and "0 of 2" in out
    empty = tmp_path / "other" / "flurka_books"
    empty.mkdir(parents=True)
    assert run(experiments, "curves", empty, "--output", tmp_path / "none.png") == 2
    assert "holds no finished run of an up-trained variant" in capsys.readouterr().err
