"""Resumption of killed trainings with a schedule: the result equals that of an uninterrupted training bit for bit.

Processes kill themselves (SIGKILL) at a given point, in steps of every stage and while a checkpoint is written, and
start again with `resume_from_checkpoint=True`. They run uptraining_run.py. The tests compare loss, gradient norm,
learning rate and attention of every step before and after the kill, the final weights, the states of the optimizer and
of the random number generators, and the log with the switches.
"""

import json
import multiprocessing
import pathlib
import random
import re
import shutil
import signal
from multiprocessing import connection

import pytest
import torch

import processes
import uptraining_run

TWO = {"per_device_train_batch_size": 2}
FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


class Trainings:
    """Runs trainings in separate processes."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.references: dict[str, pathlib.Path] = {}

    def run(self, folder, case: str, world: int = 1, **options) -> list[int]:
        """Run a training; return the exit statuses of its processes, minus the signal for killed ones.

        Like a launcher, it ends all processes if one fails.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(processes.PRELOADED)
        port = processes.free_port()
        started = [
            context.Process(
                target=uptraining_run.train, args=(rank, world, port, folder, case), kwargs=options, daemon=True
            )
            for rank in range(world)
        ]
        for process in started:
            process.start()
        while alive := [process for process in started if process.exitcode is None]:
            ended = connection.wait([process.sentinel for process in alive], timeout=120)
            if not ended or any(process.exitcode for process in started):
                for process in alive:
                    process.terminate()
        return [process.exitcode for process in started]

    def reference(self, case: str, world: int = 1, **options) -> pathlib.Path:
        """Return the folder of the uninterrupted training."""
        key = json.dumps([case, world, options], sort_keys=True)
        if key not in self.references:
            folder = self.folder / f"reference-{len(self.references)}"
            assert self.run(folder, case, world, **options) == [0] * world, output(folder)
            self.references[key] = folder
        return self.references[key]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OMP_NUM_THREADS", "1")
        yield Trainings(tmp_path_factory.mktemp("trainings"))


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


def kill_and_resume(trainings, folder, case, *kills, world=1, rank=None, at=None) -> None:
    """Kill a training and each of its resumed runs at `kills`; then compare the last run with the reference.

    `at` is the step of the checkpoint that the last run resumes from. Only one complete checkpoint is kept.
    """
    options = TWO if world == 2 else {}
    reference = trainings.reference(case, world, **options)
    options = {**options, "world": world, "save_total_limit": 1}  # the limit does not affect the result
    for i, kill in enumerate(kills):
        statuses = trainings.run(folder, case, resume=i > 0 or None, kill=kill, kill_rank=rank, **options)
        assert -signal.SIGKILL in statuses, f"{kill}: {statuses}\n{output(folder)}"
    assert not (folder / "result.json").exists()
    done = len(steps(folder))
    assert trainings.run(folder, case, resume=True, **options) == [0] * world, output(folder)
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
        pytest.param("distilled", ["linformer"] * 4 + ["flurka_linear"] * 6, marks=pytest.mark.exhaustive),
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
    # A distillation is repeated if the checkpoint is from before it, and not repeated otherwise. The callback's test in
    # test_uptraining_distillation.py resumes from both in the core suite.
    more("distilled", "begin@4", at=4),
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
    kill_and_resume(trainings, tmp_path, case, *kills, world=world, rank=rank, at=at)


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
    assert trainings.run(tmp_path, "learned", kill="torn:optimizer.pt@2") == [-signal.SIGKILL]
    torn = (tmp_path / "checkpoint-2" / "optimizer.pt").read_bytes()
    assert trainings.run(tmp_path, "learned", resume=True) == [1]
    assert re.search("No valid checkpoint found", output(tmp_path))
    assert checkpoints(tmp_path) == ["incomplete-checkpoint-2-1"]
    assert (tmp_path / "incomplete-checkpoint-2-1" / "optimizer.pt").read_bytes() == torn
    assert trainings.run(tmp_path, "learned") == [0], output(tmp_path)
    assert result(tmp_path) == result(trainings.reference("learned"))


@pytest.mark.exhaustive
def test_resumption_after_the_last_step(trainings, tmp_path):
    """A kill after the last checkpoint was saved, but before training ended."""
    # Whole epochs: within an epoch, Trainer does one step too many when it resumes from the last checkpoint.
    reference = trainings.reference("learned", max_steps=12)
    assert trainings.run(tmp_path, "learned", max_steps=12, kill="saved@12") == [-signal.SIGKILL]
    assert trainings.run(tmp_path, "learned", max_steps=12, resume=True) == [0], output(tmp_path)
    assert len(steps(tmp_path)) == 12
    for key in ("log", "attention", "weights", "optimizer"):
        assert result(tmp_path)[key] == result(reference)[key]


def test_resumption_from_a_checkpoint_without_the_callback(trainings, tmp_path):
    stages = ["sdpa:4", "kdeformer,block_size=8,num_samples=8:7", "linformer,projection_dim=8:end"]
    assert trainings.run(tmp_path, "learned", plain=True, kill="forward@5") == [-signal.SIGKILL]
    assert trainings.run(tmp_path, "learned", stages=stages, resume=True) == [0], output(tmp_path)
    reference = trainings.reference("learned", stages=stages)
    assert result(tmp_path) == result(reference)
    same = [step for step in steps(tmp_path) if step["attention"] != "sdpa"]
    assert same == steps(reference)[4:]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["learned", "same"])
def test_two_processes_equal_one(trainings, case):
    """With the same global batch, without dropout, up to rounding."""
    one = steps(trainings.reference(case, dropout=0.0))
    for rank in range(2):
        two = steps(trainings.reference(case, 2, dropout=0.0, **TWO), rank)
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
    folder = trainings.reference(case, best=best, save_steps=every)
    assert result(folder)["best"] == f"checkpoint-{expected}"
    saved, final = folder / f"checkpoint-{expected}", folder / "final"
    assert json.loads((final / "config.json").read_text()).get("attn_implementation", "sdpa") == attention
    assert result(folder)["attention"] == attention
    for file in ("config.json", "model.safetensors"):
        assert (final / file).read_bytes() == (saved / file).read_bytes()


def test_weights_of_other_stages_are_refused(trainings, tmp_path):
    assert trainings.run(tmp_path, "learned", kill="forward@6") == [-signal.SIGKILL]
    first, second = "linformer,projection_dim=8", "flurka_performer,num_features=8,share=none"
    for stages, message in [
        ([f"{first}:4", "performer:end"], r"learned_parameters.* none of the stages linformer, performer learns"),
        ([f"{first}6:4", f"{second}:end"], r"of shape \(8, 128\), which none of the stages linformer, f"),
    ]:
        before = checkpoints(tmp_path), steps(tmp_path)
        assert trainings.run(tmp_path, "learned", resume=True, stages=stages) == [1]
        last = output(tmp_path).strip().splitlines()[-1]
        assert last.startswith("hf_efficient_attn.errors.UnsupportedAttentionError: ") and re.search(message, last)
        assert (checkpoints(tmp_path), steps(tmp_path)) == before
    # Later stages may end elsewhere, or be replaced.
    stages = [f"{first}:4", f"{second}:8", "flurka_linear,share=none:end"]
    assert trainings.run(tmp_path, "learned", resume=True, stages=stages) == [0], output(tmp_path)
    last = ["flurka_performer", "flurka_linear", "flurka_linear"]
    assert [step["attention"] for step in steps(tmp_path)][-3:] == last


@pytest.mark.slow
def test_fsdp2_on_two_processes(trainings, tmp_path):
    """Losses and switches are those of one process, also when resumed. Stages must learn the same parameters."""
    shards = {"version": 2, "fsdp_version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"]}
    sharded = {**TWO, "world": 2, "dropout": 0.0, "fsdp": "full_shard auto_wrap", "fsdp_config": shards}
    stages = ["sdpa:2", "linear:5", "longformer,window_size=8:end"]
    options = {"stages": stages, "adam_epsilon": 1e-3}
    one = steps(trainings.reference("learned", dropout=0.0, **options))
    assert trainings.run(tmp_path, "learned", **options, **sharded) == [0, 0], output(tmp_path)
    two, log = steps(tmp_path), result(tmp_path)["log"]
    assert [step["attention"] for step in two] == [step["attention"] for step in one]
    torch.testing.assert_close([s["loss"] for s in two], [s["loss"] for s in one], rtol=0, atol=1e-4)
    assert [x["uptraining_stage"] for x in log if "uptraining_stage" in x] == ["linear", "longformer"]
    (tmp_path / "steps-0.jsonl").unlink()
    again = {**options, **sharded, "resume": str(tmp_path / "checkpoint-4")}
    assert trainings.run(tmp_path, "learned", **again) == [0, 0], output(tmp_path)
    assert steps(tmp_path) == two[4:] and result(tmp_path)["log"] == log
    first = "linformer,projection_dim=8:2"
    assert trainings.run(tmp_path / "learned", "learned", stages=[first, "flurka_linear:end"], **sharded) == [0, 0]
    assert trainings.run(tmp_path / "no", "learned", stages=[first, "linear:end"], **sharded) == [1, 1]
    assert re.search("do not learn the same parameters.*DistributedDataParallel", output(tmp_path / "no"))
