"""The commands behind the tables of recipes/README.md: runs, and tables."""

import json
import pathlib

import pytest
from typer.testing import CliRunner

import hf_efficient_attn as hea
from recipes.common import arguments
from recipes.experiments import __main__ as experiments

runner = CliRunner()


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


def test_table_shows_the_mean_over_seeds(folder):
    group = experiments.group_of("glue", folder)
    for seed, value in ((0, 0.5), (1, 0.7)):
        run = experiments.folder_of(folder / "glue", "exact", "MRPC", seed)
        run.mkdir(parents=True)
        (run / "metrics.json").write_text(json.dumps({"metrics": {group.figures["MRPC"][1]: value}, "seed": seed}))
    shown = runner.invoke(experiments.app, ["show", str(folder / "glue")])
    assert shown.exit_code == 0, shown.output
    (line,) = [line for line in shown.output.splitlines() if line.startswith("| exact")]
    assert "0.600 ± 0.100" in line and "half the range of 2 seeds" in shown.output and "| linear" not in shown.output


def test_runs_are_not_repeated_and_failures_are_reported(folder, monkeypatch):
    runs = []

    def run_one(module, run_folder, threads):
        runs.append(module)
        if "linear" in module:
            return "error: no such thing"
        run_folder.mkdir(parents=True, exist_ok=True)
        (run_folder / "metrics.json").write_text(json.dumps({"metrics": {"eval_spearman": 0.25}}))
        return None

    monkeypatch.setattr(experiments, "run_one", run_one)
    call = ["run", "glue", "--output", str(folder / "runs"), "--only", "STS-B"]
    first = runner.invoke(experiments.app, call)
    assert first.exit_code == 0 and "no such thing" in first.output and "0.250" in first.output
    first_runs = len(runs)
    assert runner.invoke(experiments.app, call).exit_code == 0
    # Only the failed run is repeated.
    assert first_runs == 10 and len(runs) == 11 and "linear" in runs[-1]
    more = ["--only", "exact", "--extra", "--learning_rate 1e-3", "--output", str(folder / "rate")]
    assert runner.invoke(experiments.app, ["run", "glue", *more]).exit_code == 0
    assert len(runs) == 15 and all(run[-2:] == ["--learning_rate", "1e-3"] for run in runs[11:])


def write_run(folder: pathlib.Path, stages: list[str], losses: list[float], seconds: float) -> None:
    """A run of forty steps with an evaluation every tenth step; with two stages, they switch at step 10."""
    folder.mkdir(parents=True)
    switches = [{"step": 10, "from": stages[0], "to": stages[1]}] if len(stages) > 1 else []
    report = {
        "metrics": {"eval_accuracy": 0.25},
        "steps": 40,
        "switches": switches,
        "attention": {"attention": None if switches else stages[0]},
        "cpu_seconds_per_step": seconds,
    }
    log = [{"step": 10 * i, "eval_loss": loss} for i, loss in enumerate(losses, 1)]
    log += [{"step": i, "loss": 3.0} for i in range(1, 41)]
    (folder / "metrics.json").write_text(json.dumps(report))
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}))


def test_curves_compare_up_training_with_its_references(folder, tmp_path):
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
    done = runner.invoke(experiments.app, ["curves", str(runs), "--output", str(picture)])
    assert done.exit_code == 0, done.output
    assert picture.stat().st_size > 1000
    # 1.8 is halfway from 2.2 at step 20 to 1.8 at step 30: 10 steps of the base and 15 of the variant.
    row = next(line for line in done.output.splitlines() if "2 of 2" in line and "25 ± 0" in line)
    assert "40 ± 0" in row and "0.50 ± 0.00" in row
    assert "-0.500 ± 0.000" in done.output and "0 of 2" in done.output
    (tmp_path / "other" / "flurka_books").mkdir(parents=True)
    for empty in (tmp_path / "other" / "flurka_books", tmp_path):
        refused = runner.invoke(experiments.app, ["curves", str(empty), "--output", str(tmp_path / "none.png")])
        assert isinstance(refused.exception, hea.UnsupportedAttentionError), refused.output


def test_unknown_groups_are_refused(folder):
    for call in (["run", "gleu", "--output", str(folder)], ["show", str(folder / "gleu")]):
        result = runner.invoke(experiments.app, call)
        assert isinstance(result.exception, hea.UnsupportedAttentionError), result.output
