"""The commands behind the tables of recipes/README.md: runs, tables, and the cost of a step."""

import json
import pathlib

import pytest
import torch
from typer.testing import CliRunner

import hf_efficient_attn as hea
from recipes.benchmarks import step
from recipes.common import arguments
from recipes.experiments import __main__ as experiments
from recipes.experiments import groups

runner = CliRunner()


@pytest.fixture
def folder(tmp_path, monkeypatch) -> pathlib.Path:
    """An empty data folder, since nothing is trained."""
    monkeypatch.setattr(experiments, "data_folder", lambda data: tmp_path)
    monkeypatch.setattr(groups, "minilm_folder", lambda: tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", experiments.GROUPS)
def test_recipes_accept_the_arguments_of_every_line(name, folder):
    group = experiments.GROUPS[name](folder)
    for line, task in group.pairs():
        (options,) = arguments.parse_only(arguments.AttentionArguments, description="", argv=group.attention[line])
        assert (options.schedule() is None) == ("up-trained" not in line), (line, task)
    assert {task for task, _ in group.figures.values()} == set(group.tasks)


def test_table_shows_the_mean_over_seeds(folder):
    group = groups.glue_group(folder)
    for seed, value in ((0, 0.5), (1, 0.7)):
        run = experiments.folder_of(folder / "glue", "exact", "MRPC", seed)
        run.mkdir(parents=True)
        (run / "metrics.json").write_text(json.dumps({"metrics": {group.figures["MRPC"][1]: value}, "seed": seed}))
    shown = runner.invoke(experiments.app, ["show", str(folder / "glue"), "--csv", str(folder / "out.csv")])
    assert shown.exit_code == 0, shown.output
    (line,) = [line for line in shown.output.splitlines() if line.startswith("| exact")]
    assert "0.600 ± 0.100" in line and "half the range of 2 seeds" in shown.output and "| linear" not in shown.output
    assert "0.6" in (folder / "out.csv").read_text()


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


def test_unknown_groups_are_refused(folder):
    for call in (["run", "gleu", "--output", str(folder)], ["show", str(folder / "gleu")]):
        result = runner.invoke(experiments.app, call)
        assert isinstance(result.exception, hea.UnsupportedAttentionError), result.output


def test_step_is_trained_and_measured(tmp_path):
    before = step.make_model(hea.LinearConfig(), 32)
    assert before.config._attn_implementation == "linear" and before.training
    case = step.Case(32, threads=torch.get_num_threads())
    do_step = step.make_step(None, case)
    do_step(), do_step()
    given = {"config": hea.LinearConfig().to_dict(), "steps": 1, **case._asdict()}
    assert step.child(given) > 2**20
    call = ["--length", "32", "--method", "linear", "--rounds", "1", "--no-memory", "--csv", str(tmp_path / "a.csv")]
    done = runner.invoke(step.app, [*call, "--plot", str(tmp_path / "a.png")])
    assert done.exit_code == 0, done.output
    assert "| sdpa" in done.output and "| linear" in done.output and (tmp_path / "a.png").stat().st_size > 1000
