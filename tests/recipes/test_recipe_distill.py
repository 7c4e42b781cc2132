"""distill.py and long_document.py, in one process and in two: results, continuation, refusals."""

import copy
import json

import pytest
import torch
import transformers

import hf_efficient_attn as hea
from commands import command, made, text  # noqa: F401 (fixtures)
from hf_efficient_attn.training import steps
from hf_efficient_attn.training.data import TrainingData
from hf_efficient_attn.training.distillation import Distillation
from hf_efficient_attn.training.steps import shuffled
from recipes import distill as recipe
from recipes import long_document
from tiny_recipes import ROOT, launch, refuses, same_weights, write

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
def test_two_processes_average_their_gradients(given, made, text, tmp_path, monkeypatch):  # noqa: F811
    """The parameters are those of one process whose gradients are the means of those of two batches."""
    shown = launched(*given, "--finetune-steps", "2", "-o", str(tmp_path / "out"))
    assert shown.count("| layers  |      3 |") == 1, "only the first process prints"
    assert json.loads((tmp_path / "out" / "distillation.json").read_text())["steps_done"] == 8
    first_stage = tmp_path / "first"
    launched(*given, "-o", str(first_stage))
    assert (first_stage / "README.md").is_file() and not (tmp_path / "first.partial").exists()

    model = transformers.BertModel.from_pretrained(made("bert")).eval()
    data = TrainingData(model, made("bert"), text, 40, 2, 12)
    streams = [map(data.batch, shuffled(data.train[rank::2], 0)) for rank in range(2)]
    hea.convert(model, "linear", feature_map="hedgehog", num_features=16)
    gradients = []

    def remember(gradient):
        gradients.append(gradient.clone())
        return torch.zeros_like(gradient)

    # Two distillations whose gradients are averaged, one after the other.
    runs = [Distillation(model, 6) for _ in range(2)]
    monkeypatch.setattr(steps, "world_size", lambda: 2)
    for step in range(6):
        state, batches = runs[0].state_dict(), [next(stream) for stream in streams]
        gradients.clear()
        runs[1].load_state_dict(copy.deepcopy(state))  # an optimizer changes what it has loaded
        monkeypatch.setattr(steps, "mean_over_processes", remember)
        runs[1].step(batches[1])
        others = iter(list(gradients))
        monkeypatch.setattr(steps, "mean_over_processes", lambda p, others=others: (p + next(others)) / 2)
        runs[0] = Distillation(model, 6)
        if step:
            runs[0].load_state_dict(state)
        runs[0].step(batches[0])
    runs[0].finish()
    written = transformers.BertModel.from_pretrained(first_stage).eval()
    for name, p in model.state_dict().items():
        torch.testing.assert_close(written.state_dict()[name], p, msg=name)


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


# --- long documents ---


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
    with pytest.raises(ValueError, match="--max_tokens 0"):
        long_document.main([*document, "--output", str(tmp_path / "x.json"), "--max_tokens", "0"])


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
