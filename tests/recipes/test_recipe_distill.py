"""distill.py and long_document.py, in one process and in two: results, continuation, refusals."""

import json

import pytest
import torch

from commands import command, made, text  # noqa: F401 (fixtures)
from recipes import distill as recipe
from recipes import long_document
from tiny_recipes import ROOT, launch, refuses, same_weights, weights, write

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
    assert (tmp_path / "two" / "README.md").is_file() and not (tmp_path / "two.partial").exists()
    assert recipe.run([*given, "--batch-size", "4", "-o", str(tmp_path / "one")]) == 0
    one, two = (weights(tmp_path / name) for name in ("one", "two"))
    for name, x in one.items():
        torch.testing.assert_close(two[name], x, msg=name)


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
