"""Resumption of killed trainings with a schedule: the result equals that of an uninterrupted training bit for bit.

Processes kill themselves (SIGKILL) at a given point, in steps of every stage and while a checkpoint is written, and
start again with `resume_from_checkpoint=True`. They run uptraining_run.py. The tests compare loss,
gradient norm, learning rate and attention of every step before and after the kill, the final weights, the states of the
optimizer and of the random number generators, and the log with the switches.
"""

import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch

import uptraining_run

SCRIPT = pathlib.Path(uptraining_run.__file__)
TWO = ("--set", '{"per_device_train_batch_size": 2}')
ONE_KEPT = ("--set", '{"save_total_limit": 1}')  # does not affect the result
# Whole epochs: within an epoch, Trainer does one step too many when it resumes from the last checkpoint.
EPOCHS = ("--steps", "12")
FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


class Trainings:
    """Runs trainings in separate processes."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")]),
        }
        self.server = subprocess.Popen(
            [sys.executable, str(SCRIPT), "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=self.environment,
        )
        self.references: dict[tuple, pathlib.Path] = {}

    def close(self) -> None:
        self.server.stdin.close()
        self.server.wait(timeout=10)

    def run(self, folder, case: str, *further: str, world: int = 1) -> list[int]:
        """Run a training; return the exit statuses of its processes, minus the signal for killed ones."""
        argv = ["--case", case, "--output", str(folder), *further]
        self.server.stdin.write(json.dumps([world, argv]) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def reference(self, case: str, *further: str, world: int = 1) -> pathlib.Path:
        """Return the folder of the uninterrupted training."""
        key = (case, *further, world)
        if key not in self.references:
            folder = self.folder / f"reference-{len(self.references)}"
            assert self.run(folder, case, *further, world=world) == [0] * world, output(folder)
            self.references[key] = folder
        return self.references[key]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    made = Trainings(tmp_path_factory.mktemp("trainings"))
    yield made
    made.close()


def output(folder: pathlib.Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("output-*.txt")))


def steps(folder: pathlib.Path, rank: int = 0) -> list[dict]:
    """The steps of all runs in a folder, in order."""
    path = folder / f"steps-{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def result(folder: pathlib.Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def checkpoints(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*checkpoint-*"))


def kill_and_resume(trainings, folder, case, *kills, further=(), world=1, rank=None, at=None) -> None:
    """Kill a training and each of its resumed runs at `kills`; then compare the last run with the reference.

    `at` is the step of the checkpoint that the last run resumes from. Only one complete checkpoint is kept.
    """
    reference = trainings.reference(case, *further, world=world)
    only = () if rank is None else ("--kill_rank", str(rank))
    for i, kill in enumerate(kills):
        again = ("--resume",) if i else ()
        statuses = trainings.run(folder, case, *further, *ONE_KEPT, *again, "--kill", kill, *only, world=world)
        assert -signal.SIGKILL in statuses, f"{kill}: {statuses}\n{output(folder)}"
    assert not (folder / "result.json").exists()
    done = len(steps(folder))
    statuses = trainings.run(folder, case, *further, *ONE_KEPT, "--resume", world=world)
    assert statuses == [0] * world, output(folder)
    assert at is None or steps(folder)[done]["step"] == 1 + at
    for process in range(world):
        expected = {step["step"]: step for step in steps(reference, process)}
        assert len(expected) == len(steps(reference, process)) > 0
        assert all(step == expected[step["step"]] for step in steps(folder, process))
    assert result(folder) == result(reference)


@pytest.mark.parametrize(
    ("case", "attention"),
    [
        ("learned", ["linformer"] * 4 + ["flurka_performer"] * 6),
        ("same", ["performer"] * 5 + ["linear"] * 5),
        ("distilled", ["linformer"] * 4 + ["flurka_linear"] * 6),
    ],
)
def test_references_follow_their_stages(trainings, case, attention):
    """The references themselves: attention of every step, switches in the log, and configs of the checkpoints."""
    reference = trainings.reference(case)
    assert [step["attention"] for step in steps(reference)] == attention
    log = [x for x in result(reference)["log"] if "uptraining_stage" in x]
    changes = [(i, *attention[i - 1 : i + 1]) for i in range(1, 10) if attention[i] != attention[i - 1]]
    assert [(x["step"], x["uptraining_from"], x["uptraining_stage"]) for x in log] == changes
    state = json.loads((reference / "checkpoint-10" / "trainer_state.json").read_text())
    assert [x for x in state["log_history"] if "uptraining_stage" in x] == log
    for path in reference.glob("checkpoint-*"):
        config = json.loads((path / "config.json").read_text())
        assert config.get("attn_implementation", "sdpa") == attention[int(path.name.rpartition("-")[2]) - 1]


def more(case: str, *kills: str, at: int, world: int = 1, rank: int | None = None):
    """Kills outside of the core suite."""
    return pytest.param(case, kills, at, world, rank, marks=pytest.mark.exhaustive)


KILLS = [
    # Around a switch at a checkpoint: learned parameters of the first stage continue in the second.
    ("learned", ["torn:model.safetensors@4", "begin@4", "torn:trainer_state.json@8"], 6, 1, None),
    *(more("learned", f"torn:{file}@8", at=6) for file in FILES),
    # A distillation is repeated if the checkpoint is from before it, and not repeated otherwise.
    ("distilled", ["begin@4"], 4, 1, None),
    more("distilled", "torn:model.safetensors@4", at=2),
    more("distilled", "forward@5", at=4),
    # Weights do not tell the stage, the switch is between two checkpoints, and each step has two batches.
    ("same", ["substep@5"], 4, 1, None),
    more("same", "begin@6", "forward@9", at=8),
    # Two processes, or one of two; the other then fails or is ended as by a launcher.
    more("learned", "forward@5", at=4, world=2),
    more("distilled", "begin@4", at=4, world=2, rank=1),
    more("same", "substep@5", at=4, world=2, rank=0),
]


@pytest.mark.parametrize(("case", "kills", "at", "world", "rank"), KILLS)
def test_kill(trainings, tmp_path, case, kills, at, world, rank):
    further = TWO if world == 2 else ()
    kill_and_resume(trainings, tmp_path, case, *kills, further=further, world=world, rank=rank, at=at)


@pytest.mark.slow
@pytest.mark.parametrize("case", uptraining_run.CASES)
def test_kill_at_random_points(trainings, tmp_path, case):
    draw = random.Random(case)
    for i in range(25):
        step, save = f"{draw.choice(['begin', 'forward'])}@{draw.randrange(3, 10)}", draw.choice([4, 6, 8, 10])
        kill = draw.choice([step, f"torn:{draw.choice(FILES)}@{save}"])
        kill_and_resume(trainings, tmp_path / str(i), case, kill)
        shutil.rmtree(tmp_path / str(i))


def test_incomplete_checkpoints_are_neither_deleted_nor_resumed(trainings, tmp_path):
    """A kill in the first save leaves no complete checkpoint: Trainer reports that, and a new start works."""
    assert trainings.run(tmp_path, "learned", "--kill", "torn:optimizer.pt@2") == [-signal.SIGKILL]
    torn = (tmp_path / "checkpoint-2" / "optimizer.pt").read_bytes()
    assert trainings.run(tmp_path, "learned", "--resume") == [1]
    assert re.search("No valid checkpoint found", output(tmp_path))
    assert checkpoints(tmp_path) == ["incomplete-checkpoint-2-1"]
    assert (tmp_path / "incomplete-checkpoint-2-1" / "optimizer.pt").read_bytes() == torn
    assert trainings.run(tmp_path, "learned") == [0], output(tmp_path)
    assert result(tmp_path) == result(trainings.reference("learned"))


@pytest.mark.exhaustive
def test_resumption_after_the_last_step(trainings, tmp_path):
    """A kill after the last checkpoint was saved, but before training ended."""
    reference = trainings.reference("learned", *EPOCHS)
    assert trainings.run(tmp_path, "learned", *EPOCHS, "--kill", "saved@12") == [-signal.SIGKILL]
    assert trainings.run(tmp_path, "learned", *EPOCHS, "--resume") == [0], output(tmp_path)
    assert len(steps(tmp_path)) == 12
    for key in ("log", "attention", "weights", "optimizer"):
        assert result(tmp_path)[key] == result(reference)[key]


def test_resumption_from_a_checkpoint_without_the_callback(trainings, tmp_path):
    stages = ("--stages", "sdpa:4", "kdeformer,block_size=8,num_samples=8:7", "linformer,projection_dim=8:end")
    assert trainings.run(tmp_path, "learned", "--plain", "--kill", "forward@5") == [-signal.SIGKILL]
    assert trainings.run(tmp_path, "learned", *stages, "--resume") == [0], output(tmp_path)
    reference = trainings.reference("learned", *stages)
    assert result(tmp_path) == result(reference)
    same = [step for step in steps(tmp_path) if step["attention"] != "sdpa"]
    assert same == steps(reference)[4:]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["learned", "same"])
def test_two_processes_equal_one(trainings, case):
    """With the same global batch, without dropout, up to rounding."""
    further = ("--dropout", "0")
    one = steps(trainings.reference(case, *further))
    for rank in range(2):
        two = steps(trainings.reference(case, *further, *TWO, world=2), rank)
        assert [step["attention"] for step in two] == [step["attention"] for step in one]
        for key in ("loss", "grad_norm", "learning_rate"):
            torch.testing.assert_close([s[key] for s in two], [s[key] for s in one], rtol=2e-5, atol=0)


@pytest.mark.parametrize(
    ("case", "best", "every", "expected", "attention"),
    [
        ("learned", 4, 2, 4, "linformer"),
        # The best step was not saved, and it is in a later stage than the best saved one.
        pytest.param("learned", 5, 4, 4, "linformer", marks=pytest.mark.exhaustive),
        ("same", 6, 4, 4, "performer"),
    ],
)
def test_best_model_is_in_its_own_stage(trainings, case, best, every, expected, attention):
    folder = trainings.reference(case, "--best", str(best), *(() if every == 2 else ("--save_steps", str(every))))
    assert result(folder)["best"] == f"checkpoint-{expected}"
    saved, final = folder / f"checkpoint-{expected}", folder / "final"
    assert json.loads((final / "config.json").read_text()).get("attn_implementation", "sdpa") == attention
    assert result(folder)["attention"] == attention
    for file in ("config.json", "model.safetensors"):
        assert (final / file).read_bytes() == (saved / file).read_bytes()


def test_weights_of_other_stages_are_refused(trainings, tmp_path):
    assert trainings.run(tmp_path, "learned", "--kill", "forward@6") == [-signal.SIGKILL]
    first, second = "linformer,projection_dim=8", "flurka_performer,num_features=8,share=none"
    for stages, message in [
        ([f"{first}:4", "performer:end"], r"learned_parameters.* none of the stages linformer, performer learns"),
        ([f"{first}6:4", f"{second}:end"], r"of shape \(8, 64\), which none of the stages linformer, f"),
    ]:
        before = checkpoints(tmp_path), steps(tmp_path)
        assert trainings.run(tmp_path, "learned", "--resume", "--stages", *stages) == [1]
        last = output(tmp_path).strip().splitlines()[-1]
        assert last.startswith("hf_efficient_attn.errors.UnsupportedAttentionError: ") and re.search(message, last)
        assert (checkpoints(tmp_path), steps(tmp_path)) == before
    # Later stages may end elsewhere, or be replaced.
    stages = ("--stages", f"{first}:4", f"{second}:8", "flurka_linear,share=none:end")
    assert trainings.run(tmp_path, "learned", "--resume", *stages) == [0], output(tmp_path)
    assert [step["attention"] for step in steps(tmp_path)][-3:] == [
        "flurka_performer",
        "flurka_linear",
        "flurka_linear",
    ]
