"""Resumption of killed trainings with a schedule: the result equals that of an uninterrupted training bit for bit.

Processes kill themselves (SIGKILL) at a given point, in steps of every stage and while a checkpoint is written or
deleted, and start again with `resume_from_checkpoint=True`. They run uptraining_run.py. The tests compare loss,
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
import time

import pytest
import torch
import transformers

import hf_efficient_attn as hea
import uptraining_run

SCRIPT = pathlib.Path(uptraining_run.__file__)
TWO = ("--batch", "2")
ONE_KEPT = ("--set", '{"save_total_limit": 1}')  # does not affect the result
# Whole epochs: within an epoch, Trainer does one step too many when it resumes from the last checkpoint.
EPOCHS = ("--steps", "12")
IN_A_STEP = ("begin", "forward", "backward", "optimized", "end")
FILES = (
    "model.safetensors",
    "training_args.bin",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "trainer_state.json",
)


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

    def run(self, folder, case: str, *further: str, world: int = 1, seconds: float | None = None) -> list[int]:
        """Run a training; return the exit statuses of its processes, minus the signal for killed ones."""
        argv = ["--case", case, "--output", str(folder), *further]
        self.server.stdin.write(json.dumps([world, argv, seconds]) + "\n")
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


def last_complete(kill: str, every: int = 2) -> int:
    """The step of the last complete checkpoint after a kill, if none is deleted."""
    where, _, at = kill.partition("@")
    if where.startswith(("end", "torn", "before")):
        return (int(at) - 1) // every * every
    return int(at) // every * every


def kill_and_resume(trainings, folder, case, *kills, further=(), also=(), world=1, rank=None, at=None) -> None:
    """Kill a training and each of its resumed runs at `kills`; then compare the last run with the reference.

    `at` is the step of the checkpoint that the last run resumes from. The arguments `also` do not affect the result.
    """
    reference = trainings.reference(case, *further, world=world)
    further = (*further, *also)
    only = () if rank is None else ("--kill_rank", str(rank))
    for i, kill in enumerate(kills):
        again = ("--resume",) if i else ()
        statuses = trainings.run(folder, case, *further, *again, "--kill", kill, *only, world=world)
        assert -signal.SIGKILL in statuses, f"{kill}: {statuses}\n{output(folder)}"
    assert not (folder / "result.json").exists()
    done = len(steps(folder))
    statuses = trainings.run(folder, case, *further, "--resume", world=world)
    assert statuses == [0] * world, output(folder)
    assert steps(folder)[done]["step"] == 1 + (last_complete(kills[-1]) if at is None else at)
    same_steps(folder, reference, world)
    assert result(folder) == result(reference)


def same_steps(folder: pathlib.Path, reference: pathlib.Path, world: int = 1) -> None:
    for rank in range(world):
        expected = {step["step"]: step for step in steps(reference, rank)}
        assert len(expected) == len(steps(reference, rank)) > 0
        for step in steps(folder, rank):
            assert step == expected[step["step"]]


@pytest.mark.exhaustive
def test_references_follow_their_stages(trainings):
    """The references themselves: attention of every step, switches in the log, losses that differ between stages."""
    expected = {
        "learned": ["linformer"] * 4 + ["flurka_performer"] * 6,
        "same": ["performer"] * 5 + ["linear"] * 5,
        "three": ["sdpa"] * 3 + ["kdeformer"] * 3 + ["linformer"] * 4,
        "distilled": ["linformer"] * 4 + ["flurka_linear"] * 6,
    }
    for case, attention in expected.items():
        reference = trainings.reference(case)
        assert [step["attention"] for step in steps(reference)] == attention
        log = result(reference)["log"]
        switches = [(x["step"], x["uptraining_from"], x["uptraining_stage"]) for x in log if "uptraining_stage" in x]
        assert switches == [
            (i, attention[i - 1], attention[i]) for i in range(1, 10) if attention[i] != attention[i - 1]
        ]
        state = json.loads((reference / "checkpoint-10" / "trainer_state.json").read_text())
        assert [x for x in state["log_history"] if "uptraining_stage" in x] == [
            x for x in log if "uptraining_stage" in x
        ]
        for path in reference.glob("checkpoint-*"):
            config = json.loads((path / "config.json").read_text())
            name = attention[int(path.name.rpartition("-")[2]) - 1]
            assert config.get("attn_implementation", "sdpa") == name
            if name != "sdpa":
                assert config["efficient_attention"]["method"] == name
    one = trainings.reference("same", "--stages", "performer,num_features=8:end")
    losses = [[step["loss"] for step in steps(x)] for x in (one, trainings.reference("same"))]
    assert losses[0][:5] == losses[1][:5] and losses[0][5] != losses[1][5]


def more(case: str, *kills: str, at: int | None = None, also: tuple[str, ...] = ()):
    """Kills outside of the core suite."""
    return pytest.param(case, kills, at, also, marks=pytest.mark.exhaustive)


KILLS = [
    # Around a switch at a checkpoint: learned parameters of the first stage continue in the second.
    *(("learned", [kill], None, ()) for kill in ("begin@4", "torn:model.safetensors@4", "torn:rng_state.pth@8")),
    *(more("learned", kill) for kill in ("forward@3", "backward@4", "end@4")),
    # A distillation is repeated if the checkpoint is from before it, and not repeated otherwise.
    ("distilled", ["begin@4"], None, ()),
    *(more("distilled", kill) for kill in ("forward@3", "torn:model.safetensors@4", "forward@5")),
    # Weights do not tell the stage, the switch is between two checkpoints, and each step has two batches.
    *(more("same", kill) for kill in ("substep@4", "forward@5", "begin@6", "before:rng_state.pth@6")),
    more("same", "torn:trainer_state.json@6"),
    # Repeated kills: exact attention, KDEformer, Linformer in bfloat16, keeping only the last two checkpoints.
    more("three", "forward@3", at=2),
    ("three", ["begin@6", "torn:optimizer.pt@8", "deleted@4", "forward@8"], 8, ()),
    # The only checkpoint survives.
    more("learned", "torn:model.safetensors@4", "torn:optimizer.pt@4", at=2, also=ONE_KEPT),
    ("learned", ["deleted:optimizer.pt@2", "torn:trainer_state.json@6"], 4, ONE_KEPT),
    # Trainer makes the callback again from the checkpoint.
    ("learned", ["forward@5"], None, ("--set", '{"restore_callback_states_from_checkpoint": true}')),
]


@pytest.mark.parametrize(("case", "kills", "at", "also"), KILLS)
def test_kill(trainings, tmp_path, case, kills, at, also):
    kill_and_resume(trainings, tmp_path, case, *kills, at=at, also=also)


def random_kills(case: str, number: int, seed: int) -> list[str]:
    draw = random.Random(f"{case} {seed}")
    points = [*IN_A_STEP, *(["substep"] * 2 if case == "same" else [])]
    kills = [f"{draw.choice(points)}@{draw.randrange(3, 10)}" for _ in range(number)]
    saves = [f"{draw.choice(['torn', 'before'])}:{draw.choice(FILES)}@{draw.choice([4, 6, 8, 10])}" for _ in kills]
    return [draw.choice(pair) for pair in zip(kills, saves, strict=True)]


@pytest.mark.parametrize(("number", "seed"), [(1, 0), pytest.param(25, 1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", uptraining_run.CASES)
def test_kill_at_random_points(trainings, tmp_path, case, number, seed):
    for i, kill in enumerate(random_kills(case, number, seed)):
        kill_and_resume(trainings, tmp_path / str(i), case, kill)
        shutil.rmtree(tmp_path / str(i))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", uptraining_run.CASES)
@pytest.mark.parametrize("further", [(), ONE_KEPT], ids=["all", "one"])
def test_kill_from_outside_until_training_ends(trainings, tmp_path, case, world, further):
    """All processes are killed at any moment, with a little more time in every run, until a run reaches the end."""
    given = (*EPOCHS, *(TWO if world == 2 else ()))
    reference = trainings.reference(case, *given, world=world)
    further = (*further, *given)
    draw = random.Random(f"{case} {world} {further}")
    kills = 0
    begin = time.monotonic()
    assert trainings.run(tmp_path / "timed", case, *further, world=world) == [0] * world
    duration = time.monotonic() - begin
    for repeat in range(30):
        if kills >= 6:
            break
        folder = tmp_path / str(repeat)
        for i in range(100):
            saved = sorted((int(x.rpartition("-")[2]) for x in checkpoints(folder) if x[0] == "c"), reverse=True)
            done = len(steps(folder))
            again = ("--resume",) if saved else ()
            seconds = 1.05**i * draw.uniform(0.3, 0.8) * duration
            statuses = trainings.run(folder, case, *further, *again, world=world, seconds=seconds)
            if not any(statuses):
                break
            if -signal.SIGKILL not in statuses:
                assert "No valid checkpoint found" in output(folder) and len(saved) == 1, output(folder)
            kills += -signal.SIGKILL in statuses
            new = steps(folder)[done:]
            if new and saved:
                assert new[0]["step"] - 1 in saved[:2]
        same_steps(folder, reference, world)
        assert [result(folder)[key] == result(reference)[key] for key in ("log", "weights")] == [True, True]
    assert kills >= 6


def test_incomplete_checkpoints_are_neither_deleted_nor_resumed(trainings, tmp_path):
    """A kill in the first save leaves no complete checkpoint: Trainer reports that, and a new start works."""
    assert trainings.run(tmp_path, "learned", "--kill", "torn:optimizer.pt@2") == [-signal.SIGKILL]
    torn = (tmp_path / "checkpoint-2" / "optimizer.pt").read_bytes()
    assert trainings.run(tmp_path, "learned", "--resume") == [1]
    assert re.search("No valid checkpoint found", output(tmp_path))
    assert checkpoints(tmp_path) == ["incomplete-checkpoint-2"]
    assert (tmp_path / "incomplete-checkpoint-2" / "optimizer.pt").read_bytes() == torn
    assert trainings.run(tmp_path, "learned", "--kill", "torn:optimizer.pt@2") == [-signal.SIGKILL]
    assert trainings.run(tmp_path, "learned") == [0], output(tmp_path)
    assert {"incomplete-checkpoint-2", "incomplete-checkpoint-2-2"} < set(checkpoints(tmp_path))
    assert result(tmp_path) == result(trainings.reference("learned"))


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
@pytest.mark.parametrize(
    ("case", "kill", "rank", "also", "at"),
    [
        ("learned", "forward@5", None, (), 4),
        ("learned", "begin@4", 1, (), 4),
        ("distilled", "begin@4", 1, (), 4),
        # The other process has written all its files, but must not delete the older checkpoint.
        ("learned", "before:rng_state_1.pth@6", 1, ONE_KEPT, 4),
        ("same", "substep@5", 0, (), 4),
        ("three", "deleted@2", 0, (), 6),
    ],
)
def test_two_processes(trainings, tmp_path, case, kill, rank, also, at):
    """Both processes are killed, or one; the other then fails or is ended as by a launcher."""
    kill_and_resume(trainings, tmp_path, case, kill, further=TWO, also=also, world=2, rank=rank, at=at)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["learned", "same"])
def test_two_processes_equal_one(trainings, case):
    """With the same global batch, without dropout, up to rounding. (22 samples would not divide evenly.)"""
    further = ("--dropout", "0", "--samples", "24")
    one = steps(trainings.reference(case, *further))
    for rank in range(2):
        two = steps(trainings.reference(case, *further, *TWO, world=2), rank)
        assert [step["attention"] for step in two] == [step["attention"] for step in one]
        for key in ("loss", "grad_norm", "learning_rate"):
            torch.testing.assert_close([s[key] for s in two], [s[key] for s in one], rtol=2e-5, atol=0)


@pytest.mark.slow
def test_launcher(trainings, tmp_path):
    """`torch.distributed.run` starts both processes, and ends the second when the first is killed."""
    reference = trainings.reference("learned", *TWO, world=2)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(SCRIPT), "--case", "learned", "--output", str(tmp_path), *TWO]
    for further in (["backward@5"], ["torn:trainer_state.json@8", "--resume"], []):
        again = ["--kill", *further, "--kill_rank", "0"] if further else ["--resume"]
        launcher = subprocess.Popen(
            [*command, *again], env=trainings.environment, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            _, errors = launcher.communicate(timeout=180)
        finally:
            if launcher.returncode is None:
                os.killpg(launcher.pid, signal.SIGKILL)
        assert bool(launcher.returncode) == bool(further), errors[-3000:]
        assert not further or "Signal 9 (SIGKILL)" in errors
    same_steps(tmp_path, reference, 2)
    assert [step["step"] for step in steps(tmp_path)] == [*range(1, 6), *range(5, 9), *range(7, 11)]
    assert result(tmp_path) == result(reference)


@pytest.mark.parametrize(
    ("case", "best", "every", "expected", "attention"),
    [
        ("learned", 4, 2, 4, "linformer"),
        pytest.param("three", 2, 2, 2, "sdpa", marks=pytest.mark.exhaustive),
        # The best step was not saved, and it is in a later stage than the best saved one.
        ("learned", 5, 4, 4, "linformer"),
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


@pytest.mark.parametrize(
    ("kill", "at"), [("forward@7", 6), ("deleted:trainer_state.json@10", 4), ("deleted:optimizer.pt@10", 4)]
)
def test_best_model_after_a_kill(trainings, tmp_path, kill, at):
    """Only the best and the last checkpoint are kept, and the best model is loaded at the end."""
    kill_and_resume(trainings, tmp_path, "learned", kill, further=("--best", "4"), also=ONE_KEPT, at=at)


def test_other_stages_are_refused_with_the_reason(trainings, tmp_path):
    shared = tmp_path / "shared"
    assert trainings.run(shared, "learned", "--kill", "forward@6") == [-signal.SIGKILL]
    assert trainings.run(tmp_path / "same", "same", "--kill", "forward@6") == [-signal.SIGKILL]
    first, second = "linformer,projection_dim=8", "flurka_performer,num_features=8,share=none"
    for folder, stages, further, message in [
        # By the new stages, the current stage would have ended before, or would not have begun.
        (shared, [f"{first}:0.9", f"{second}:1.0"], (), r"6 steps with the stages linformer to step 4, .* to step 9, "),
        (shared, [f"{first}:0.2", f"{second}:1.0"], (), "now they are linformer to step 2, flurka_performer to step 1"),
        (
            shared,
            [f"{first}:0.4", f"{second}:1.0"],
            ("--steps", "30"),
            "now they are linformer to step 12, .* total number",
        ),
        (shared, [f"{first}:4", "performer:end"], (), "learned_parameters.* none of the stages linformer, performer l"),
        (shared, [f"{first}6:4", f"{second}:end"], (), r"of shape \(8, 64\), which none of the stages linformer, f"),
        (tmp_path / "same", ["linear:5", "performer:end"], (), "performer to step 5, .* now they are linear to step 5"),
        (tmp_path / "same", ["performer,num_features=4:5", "linear:end"], (), "linear to step 10 with other hyperpar"),
    ]:
        before = checkpoints(folder), steps(folder)
        case = "same" if folder.name == "same" else "learned"
        assert trainings.run(folder, case, "--resume", "--stages", *stages, *further) == [1]
        last = output(folder).strip().splitlines()[-1]
        assert last.startswith("hf_efficient_attn.errors.UnsupportedAttentionError: ") and re.search(message, last)
        assert (checkpoints(folder), steps(folder)) == before
    # Later stages may end elsewhere, or be replaced.
    stages = ("--stages", f"{first}:4", f"{second}:8", "flurka_linear,share=none:end")
    assert trainings.run(shared, "learned", "--resume", *stages) == [0], output(shared)
    assert [step["attention"] for step in steps(shared)][-3:] == ["flurka_performer", "flurka_linear", "flurka_linear"]


@pytest.mark.exhaustive
def test_callback_in_another_trainer(tmp_path):
    """The callback switches the model of the second Trainer to the stage of the checkpoint."""
    stages = [("linformer", 2, {"projection_dim": 8}), ("kdeformer", None, uptraining_run.KDEFORMER)]
    callback = hea.UptrainingCallback(stages)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, save_steps=3, logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True
    )
    losses = []
    for resume in (None, str(tmp_path / "checkpoint-3")):
        torch.manual_seed(0)
        trainer = transformers.Trainer(
            uptraining_run.make_model("bert"),
            arguments,
            train_dataset=uptraining_run.make_samples("bert", 22, 0),
            callbacks=[callback],
        )
        trainer.train(resume_from_checkpoint=resume)
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == losses[1]
