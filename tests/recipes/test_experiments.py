"""The experiments behind the tables of recipes/README.md, distillation of pretrained models, and long documents.

distill.py and long_document.py run in one process and in two.
"""

import json
import pathlib
import re
import shutil

import pytest
import torch
from transformers import AutoTokenizer, BertForSequenceClassification

import hf_efficient_attn as hea
from helpers.commands import command, made, run, text  # noqa: F401 (fixtures)
from helpers.encoder_decoders import tiny
from hf_efficient_attn.methods import make_config
from hf_efficient_attn.training import FinetuningOptions
from hf_efficient_attn.training.steps import learned_parameters
from recipes import distill as recipe
from recipes import long_document
from recipes.benchmarks import distilled
from recipes.common import arguments
from recipes.experiments import __main__ as experiments
from recipes.experiments import arms
from tiny_models import output, tiny_batch, tiny_config, tiny_model
from tiny_recipes import ROOT, launch, refuses, same_weights, weights, write


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
        assert run_folder.is_relative_to(folder / "runs") and str(folder / "data" / "glue") in module
        runs.append(module)
        if "linear" in module:
            return "error: no such thing"
        write(run_folder / "metrics.json", json.dumps({"metrics": {"eval_spearman": 0.25}}))
        return None

    monkeypatch.chdir(folder)
    monkeypatch.setattr(experiments, "run_one", run_one)
    monkeypatch.setattr(experiments, "data_folder", lambda data: pathlib.Path("data"))
    assert run(experiments, "show runs/glue") == 2 and "no finished runs" in capsys.readouterr().err
    call = "run glue --only STS-B --output runs"
    assert run(experiments, call) == 1
    first, printed = len(runs), capsys.readouterr()
    assert "no such thing" in printed.err and "0.250" in printed.out
    assert run(experiments, call) == 1
    assert first == 10 and len(runs) == 11 and "linear" in runs[-1], "only the failed run is repeated"
    assert run(experiments, "run glue --only exact --extra '--learning_rate 1e-3' --output runs/rate") == 0
    assert len(runs) == 13 and all(one[-2:] == ["--learning_rate", "1e-3"] for one in runs[11:])


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
    for seed in range(2):
        (experiments.folder_of(runs, "linear", task, seed) / "metrics.json").unlink()
    assert run(experiments, "curves", runs, "--output", picture) == 2
    assert "holds no finished run of linear, the base of flurka_linear" in capsys.readouterr().err
    empty = tmp_path / "other" / "flurka_books"
    empty.mkdir(parents=True)
    assert run(experiments, "curves", empty, "--output", tmp_path / "none.png") == 2
    assert "holds no finished run of an up-trained variant" in capsys.readouterr().err


# --- distillation and arms ---


FINETUNING = FinetuningOptions(steps=4, learning_rate=1e-4, attention_learning_rate=1e-3)


def test_a_method_is_measured_before_and_after(monkeypatch, capsys):
    """On a tiny BERT; the figure is the error of its hidden states."""
    inputs = tiny_batch("bert", seed=1)
    wanted = output(tiny_model("bert"), inputs)

    def evaluate(model) -> float:
        return ((output(model, inputs) - wanted).norm() / wanted.norm()).item()

    batches = [tiny_batch("bert", seed=seed) for seed in (2, 3, 4)]
    task = distilled.Task("error", lambda: tiny_model("bert"), lambda: batches, evaluate)
    config = make_config("linear", feature_map="hedgehog", num_features=16, window_size=8)
    figures = distilled.distilled_figures(task, config, 20, FINETUNING)
    assert list(figures) == ["switched", "distilled", "fine-tuned"]
    assert figures["distilled"] < figures["switched"] and figures["fine-tuned"] != figures["distilled"]
    monkeypatch.setitem(distilled.TASKS, "states", lambda data, count: task)
    methods = "linear:num_features=16:window_size=8,nystromformer:num_landmarks=4"
    assert run(distilled, "states --steps 20 --finetune-steps 4 --learning-rate 1e-4 --method", methods) == 0
    out = capsys.readouterr().out
    assert " | ".join(f"{figures[name]:.3f}" for name in ("switched", "distilled")) in re.sub(" +", " ", out)
    assert re.search(r"\| nystromformer[^|]*\| 0.000 +\| \d.\d+ +\| \d.\d+ +\| \d.\d+ +\|", out)


def trained(arm: str, labels=(0, 1)) -> dict[str, torch.Tensor]:
    """The parameters of a tiny BERT with a classifier after an arm, by name."""
    batches, found = [{**tiny_batch("bert", seed=seed), "labels": torch.tensor(labels)} for seed in range(3)], {}

    def evaluate(model) -> dict[str, float]:
        found.update((name, p.detach()) for name, p in model.named_parameters())
        return {}

    torch.manual_seed(0)
    setup = arms.Setup(BertForSequenceClassification(tiny_config("bert")).eval(), batches, evaluate, 1e-3)
    arms.run_arm(arm, setup, dict.fromkeys(("task", "map", "distillation", "fine-tuning"), 4), 0)
    return found


def test_what_each_arm_trains_and_whether_it_uses_labels():
    before = trained("nothing")
    learned = {name for name in before if "learned_parameters" in name}
    assert len(learned) == len(learned_parameters(hea.convert(tiny_model("bert"), arms.METHOD)))
    for arm in set(arms.ARMS) - {"nothing"}:
        after, other = trained(arm), trained(arm, (1, 0))
        changed = {name for name, p in after.items() if not torch.equal(p, before[name])}
        assert all(torch.equal(p, other[name]) for name, p in after.items()) == (arm == "distillation")
        assert changed == learned if arm == "map by the task" else learned < changed, arm
        assert any("classifier" in name for name in changed) == (arm in ("task", "both")), arm


def test_table_of_arms(tmp_path, capsys):
    for seed, value in ((0, 0.5), (1, 0.7)):
        figures = {arm: {"accuracy": value} for arm in ("exact", *arms.ARMS)}
        found = {"task": "mrpc", "seed": seed, "cost_in_task_steps": 100, "figures": figures}
        write(tmp_path / "glue" / f"mrpc-{seed}.json", json.dumps(found | {"seconds_per_step": {"task": 1.5}}))
    assert run(arms, "show", tmp_path / "glue") == 0
    shown = capsys.readouterr().out
    assert run(arms, "run glue --steps 50 --output", tmp_path) == 2
    assert "has results of --steps 100" in capsys.readouterr().err
    lines = shown.splitlines()
    assert [line.split("|")[1].strip() for line in lines if "0.600 ± 0.100" in line] == ["exact", *arms.ARMS]
    assert "as much as 100 steps" in shown and "task 1.50" in shown


# --- distill.py ---

METHOD = ["--method", "linear", "--set", "feature_map=hedgehog", "--set", "num_features=16"]
SMALL = ["--length", "40", "--batch-size", "2", "--steps", "6", "--save-steps", "3"]


@pytest.fixture
def given(made, text):  # noqa: F811
    return [str(made("bert")), "--data", str(text), *METHOD, *SMALL]


def test_one_process_does_what_the_command_does(given, tmp_path, capsys):
    given = [*given, "--finetune-steps", "3"]
    assert recipe.run([*given, "-o", str(tmp_path / "recipe")]) == 0
    out = capsys.readouterr().out
    assert "| layers  |      6 |" in out and "| layer | error before | error after |" in out
    assert command("distill", *given, "-o", tmp_path / "command") == 0
    assert same_weights(tmp_path / "recipe", tmp_path / "command")


def test_what_is_refused(given, tmp_path, capsys, monkeypatch):
    assert recipe.run([*given, "--loss", "outputs", "-o", str(tmp_path / "out")]) == 2
    assert "Did you mean 'output'?" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    refuses("2 processes were started, but they are not connected", recipe.run, [*given, "-o", str(tmp_path / "out")])


def launched(*options) -> str:
    done = launch("recipes/distill.py", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.exhaustive
def test_two_processes_average_their_gradients(given, tmp_path):
    """With batches of two inputs they learn what one process learns with batches of four."""
    shown = launched(*given, "--finetune-steps", "2", "-o", str(tmp_path / "out"))
    assert shown.count("| layers  |      3 |") == 1, "only the first process prints"
    assert json.loads((tmp_path / "out" / "distillation.json").read_text())["steps_done"] == 8
    launched(*given, "-o", str(tmp_path / "two"))
    assert (tmp_path / "two" / "README.md").is_file() and not (tmp_path / "out.partial").exists()
    assert recipe.run([*given, "--batch-size", "4", "-o", str(tmp_path / "one")]) == 0
    one, two = (weights(tmp_path / name) for name in ("one", "two"))
    torch.testing.assert_close(two, one)


@pytest.mark.exhaustive
def test_two_processes_continue(given, tmp_path):
    """A run that is interrupted in both processes, or in one, continues to the result of an uninterrupted one."""
    launched(*given, "-o", str(tmp_path / "whole"))
    script = INTERRUPTED.format(root=str(ROOT), argv=[*given, "-o", str(tmp_path / "parts")])
    (tmp_path / "interrupted.py").write_text(script)
    done = launch(tmp_path / "interrupted.py")
    assert done.returncode != 0
    assert "Stopped after 4 of 6 steps" in done.stderr
    assert (tmp_path / "parts.partial" / "state.pt").is_file() and not (tmp_path / "parts").exists()
    assert "Continues after step 4." in launched(*given, "-o", str(tmp_path / "parts"))
    assert same_weights(tmp_path / "whole", tmp_path / "parts")


# Ctrl-C in one process stops both after the same step.
INTERRUPTED = """
import os, signal, sys
sys.path.insert(0, {root!r})
signal.signal(signal.SIGINT, signal.default_int_handler)
from hf_efficient_attn.training.distillation import Distillation
from recipes import distill
step = Distillation.step
def interrupted(self, batch):
    if self.step_number == 3 and os.environ["RANK"] == "1":
        signal.raise_signal(signal.SIGINT)
    return step(self, batch)
Distillation.step = interrupted
sys.exit(distill.run({argv!r}))
"""


@pytest.fixture
def document(here, tmp_path):
    """The options of a document in the tiny encoder, which has positions for 32 tokens."""
    write(tmp_path / "document.txt", "the cat sat on a tree " * 12)
    return ["--document", str(tmp_path / "document.txt"), "--model", str(here / "encoder"), "--max_tokens", "61"]


def test_one_process_embeds_a_document(tmp_path, document):
    long_document.main([*document, "--output", str(tmp_path / "one.json")])
    one = json.loads((tmp_path / "one.json").read_text())
    assert (one["processes"], one["tokens"], one["tokens_of_first_process"]) == (1, 61, 61)
    assert "repeated up to 61" in one["positions"]
    assert abs(torch.tensor(one["embedding"]).norm() - 1.0) < 1e-5
    output = ["--output", str(tmp_path / "x.json")]
    refuses("--max_tokens 0", long_document.main, [*document, *output, "--max_tokens", "0"])
    refuses("its folder must exist", long_document.main, [*document, "--output", str(tmp_path / "none" / "x.json")])


def test_the_positions_of_roberta(tmp_path, document):
    """They begin after padding_idx."""
    shutil.copytree(document[3], tmp_path / "roberta")
    tiny_model("roberta").save_pretrained(tmp_path / "roberta")
    given = [*document[:3], str(tmp_path / "roberta"), "--output", str(tmp_path / "one.json")]
    long_document.main(given)
    found = torch.tensor(json.loads((tmp_path / "one.json").read_text())["embedding"])
    tokens = AutoTokenizer.from_pretrained(document[3])(pathlib.Path(document[1]).read_text(), return_tensors="pt")
    states = output(hea.convert(tiny_model("roberta"), "linear"), {"input_ids": tokens["input_ids"]})
    torch.testing.assert_close(found, torch.nn.functional.normalize(states.mean(1)[0], dim=0), rtol=1e-4, atol=1e-5)
    tiny("bart").save_pretrained(tmp_path / "roberta")
    refuses("give an encoder as --model", long_document.main, given)


@pytest.mark.exhaustive
def test_two_processes_give_the_embedding_of_one(tmp_path, document, monkeypatch):
    long_document.main([*document, "--output", str(tmp_path / "one.json")])
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = launch("recipes/long_document.py", *document, "--output", tmp_path / "two.json")
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    assert (two["processes"], two["tokens"], two["tokens_of_first_process"]) == (2, 61, 30)
    torch.testing.assert_close(torch.tensor(two["embedding"]), torch.tensor(one["embedding"]), rtol=1e-4, atol=1e-5)
