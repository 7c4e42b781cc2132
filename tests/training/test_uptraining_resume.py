"""Resumption of killed trainings with a schedule: the result equals that of an uninterrupted training bit for bit.

Trainings end at a given point, in steps of every stage and while a checkpoint is written, and start again with
`resume_from_checkpoint=True`. The tests compare the attention of every step, the log with losses, gradient norms,
learning rates and switches, the final weights, and the states of the optimizer and of the random number generators.
"""

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn
from transformers import TrainerCallback, TrainerState

import hf_efficient_attn as hea
import processes
from helpers.trainings import PLAIN, Attention, classifier, decoder, lora, samples, switches, trainer_of, translator
from tiny_models import tiny_class, tiny_config


def hashed(value):
    """A value with a hash in place of each tensor."""
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        return hashlib.sha256(local.detach().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    if isinstance(value, dict):
        return {key: hashed(x) for key, x in value.items() if not callable(x)}
    return [hashed(x) for x in value] if isinstance(value, (list, tuple)) else value


class KilledError(BaseException):
    """The training ends here, and leaves its files as a killed process would."""


class Killer(TrainerCallback):
    """Ends the training at a point "WHERE@STEP", when STEP steps are done. WHERE is one of

    - begin, forward, substep (between two batches of a step), saved (after the checkpoint of the step);
    - torn:FILE: while the checkpoint of the step is saved, after half of FILE is written.
    """

    def __init__(self, point: str, patch: pytest.MonkeyPatch) -> None:
        self.where, _, at = point.partition("@")
        self.at = self.step = int(at)
        writers = {"safe_save_file": transformers.modeling_utils, "save": torch, "save_to_json": TrainerState}
        for name, owner in writers.items():
            patch.setattr(owner, name, self.tearing(getattr(owner, name)))

    def tearing(self, write: Callable[..., None]) -> Callable[..., None]:
        what, _, file = self.where.partition(":")

        def torn(*given: Any, **options: Any) -> None:
            write(*given, **options)
            if what == "torn" and str(given[1]).endswith(f"checkpoint-{self.at}/{file}"):
                os.truncate(given[1], os.stat(given[1]).st_size // 2)
                raise KilledError

        return torn

    def reach(self, where: str) -> None:
        if where == self.where and self.step == self.at:
            raise KilledError

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        model.register_forward_pre_hook(lambda module, given: self.reach("forward"))

    def on_step_begin(self, args, state, control, **kwargs):
        self.step = state.global_step
        self.reach("begin")

    def on_substep_end(self, args, state, control, **kwargs):
        self.reach("substep")

    def on_save(self, args, state, control, **kwargs):
        self.step = state.global_step
        self.reach("saved")


class Case(NamedTuple):
    """What is trained: how to make the model, the stages, the steps at which they end, the data, and more arguments."""

    make_model: Callable[[], nn.Module]
    stages: Any
    ends: list[int]
    data: list[dict[str, Any]] = samples(24)
    options: dict[str, Any] | None = None

    @property
    def attention(self) -> list[str]:
        stages = hea.UptrainingSchedule(self.stages).stages
        counts = [end - start for start, end in zip([0, *self.ends], self.ends, strict=False)]
        return [stage.attention for stage, count in zip(stages, counts, strict=True) for _ in range(count)]


def train(folder, case: Case, kills: Sequence[str] = (), resume: Any = None, **options) -> tuple[list, list, dict]:
    """Train, interrupted at each of `kills`, and resumed from the last checkpoint; only one complete one is kept.

    Returns the attention of each step of the last run, the log, and the states at the end as hashes.
    """
    make_model, stages, ends, data, usual = case
    default = {"save_steps": 2, "save_total_limit": 1, "warmup_steps": 3, "weight_decay": 0.1}
    options = {**default, **(usual or {}), **options}
    is_alone = options.pop("first_run_alone", False)  # the first run is without the callback
    for kill in (*kills, None):
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KilledError):
            seen, schedule = Attention(), None if is_alone and resume is None else stages
            callbacks = [seen, Killer(kill, patch)] if kill else [seen]
            trainer = trainer_of(folder, schedule, make_model(), ends[-1], callbacks, data, **options)
            # BERT's loss is a mean. By default Trainer would treat it as a part of a sum over all processes.
            trainer.model_accepts_loss_kwargs = isinstance(trainer.model, transformers.GPT2LMHeadModel)
            trainer.train(resume_from_checkpoint=resume)
            assert kill is None, f"{kill} was not reached"
        resume = True
    states = {"weights": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    log = [entry for entry in trainer.state.log_history if "train_runtime" not in entry]
    return seen.names, log, hashed({**states, "random": torch.get_rng_state()})


FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


def vit():
    """Transformers saves it under its names from before version 5, which Trainer cannot load."""
    torch.manual_seed(0)
    return tiny_class("vit", head=True)(tiny_config("vit"))


IMAGES = [{"pixel_values": torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(i)), "labels": i % 2}
          for i in range(16)]  # fmt: skip
PAIRS = [{"input_ids": sample["input_ids"], "labels": sample["input_ids"].flip(0)} for sample in samples(24)]
LEARNED = ["linformer,projection_dim=8:0.4", "flurka_performer,num_features=8,share=none:1.0"]
DISTILLED = "flurka_linear,feature_map=hedgehog,num_features=8,share=none,distill=4:1.0"
CASES = {
    # The second stage keeps the learned parameters of the first and adds others.
    "learned": Case(classifier, hea.UptrainingSchedule.parse(LEARNED), [4, 10]),
    # The second stage is distilled, at a checkpoint.
    "distilled": Case(classifier, hea.UptrainingSchedule.parse([LEARNED[0], DISTILLED]), [4, 10]),
    # Weights do not tell the stage, the switch is between two checkpoints, and each step has two batches.
    "same": Case(
        decoder, [("performer", 5, {"num_features": 8}), ("linear", None)], [5, 10], samples(24, is_decoder=True),
        {"gradient_accumulation_steps": 2},
    ),
    # Whole epochs: within an epoch, Trainer does one step too many when it resumes from the last checkpoint.
    # The optimizer is made before there are learned parameters, and not in the order of the model.
    "to the end": Case(
        classifier, hea.UptrainingSchedule.parse(LEARNED), [2, 6],
        options={"make_optimizer": lambda model: torch.optim.AdamW([*model.parameters()][::-1], 1e-2)},
    ),
    "LoRA": Case(lora, [("longformer", 2, {"window_size": 8}), ("linear", None)], [2, 5]),
    "older names": Case(vit, [("linformer", 3, {"projection_dim": 8}), ("linear", None)], [3, 5], IMAGES),
    # The paper up-trains only the encoder (Gupta et al. 2023, appendix A.3). The decoder stays exact.
    "translation": Case(
        translator, hea.uptraining_preset("nmt", layers=["encoder"], projection_dim=8, num_features=8), [4, 5], PAIRS
    ),
    "first run alone": Case(
        classifier, [("sdpa", 2), ("linear", 3), ("linformer", None, {"projection_dim": 8})], [2, 3, 4], samples(24),
        {"first_run_alone": True},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    found = {}

    def get(case):
        if case not in found:
            # No run is without the callback here.
            one = CASES[case]._replace(options=None) if case == "first run alone" else CASES[case]
            found[case] = train(tmp_path_factory.mktemp("whole"), one)
        return found[case]

    return get


@pytest.mark.parametrize(
    ("case", "kills", "at"),
    [
        # Around a switch at a checkpoint.
        ("learned", ["torn:model.safetensors@4", "begin@4", "torn:trainer_state.json@8"], 6),
        *(pytest.param("learned", [f"torn:{file}@8"], 6, marks=pytest.mark.exhaustive) for file in FILES),
        # A distillation is repeated if the checkpoint is from before it, and not repeated otherwise.
        ("distilled", ["begin@4"], 4),
        pytest.param("distilled", ["torn:model.safetensors@4"], 2, marks=pytest.mark.exhaustive),
        ("distilled", ["forward@7"], 6),
        ("same", ["substep@5"], 4),
        pytest.param("same", ["begin@6", "forward@9"], 8, marks=pytest.mark.exhaustive),
        ("to the end", ["forward@5", "saved@6"], 6),
        ("LoRA", ["begin@4"], 4),
        ("older names", ["forward@2"], 2),
        ("translation", ["begin@4"], 4),
        ("first run alone", ["forward@3"], 2),
    ],
)
def test_kill(case, kills, at, whole, tmp_path):
    attention, log, states = whole(case)
    found, *again = train(tmp_path, CASES[case], kills)
    assert attention == CASES[case].attention and found == attention[at:]
    assert switches(log) == [(i, attention[i - 1], attention[i]) for i in CASES[case].ends[:-1]]
    if not found:  # nothing draws random numbers after the last step
        again[1]["random"] = states["random"]
    assert again == [log, states]


def test_a_number_of_steps_that_moves_the_stage_of_the_checkpoint_is_refused(tmp_path):
    case = CASES["learned"]
    train(tmp_path, case)  # switches at step 4 of 10, and saves step 10
    with pytest.raises(hea.UnsupportedAttentionError, match=r"10 was trained with .*'flurka_performer',.* of 30"):
        train(tmp_path, case._replace(ends=[12, 30]), resume=True)
    stages = [("linformer", 4, {"projection_dim": 8}), ("flurka_performer", None, {"num_features": 8, "share": "none"})]
    found, *_ = train(tmp_path, case._replace(stages=stages, ends=[4, 12]), resume=True)
    assert found == ["flurka_performer"] * 2


def logged(log: list[dict], key: str) -> list[float]:
    return [entry[key] for entry in log if key in entry]


plain = functools.partial(classifier, **PLAIN)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "kill"), [("learned", "forward@5"), ("same", "substep@5"), ("distilled", "begin@4")])
def test_two_processes(name, kill, tmp_path):
    """Without dropout they equal one, up to rounding; and killed and resumed ones those that were not."""
    plain_decoder = functools.partial(decoder, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    case = CASES[name]._replace(make_model=plain_decoder if name == "same" else plain)
    attention, one, _ = train(tmp_path / "one", case)
    # With the same global batch.
    case = case._replace(options={**(case.options or {}), "per_device_train_batch_size": 2, "ddp_backend": "gloo"})
    twice = processes.run(2, tmp_path, train, tmp_path / "two", case)
    for two, again in zip(twice, processes.run(2, tmp_path, train, tmp_path / "again", case, [kill]), strict=True):
        assert two[0] == attention == case.attention and len(again[0]) == 6 and again[1:] == two[1:]
        # Processes distill on different batches.
        for key in ("loss", "grad_norm", "learning_rate") if name != "distilled" else ():
            torch.testing.assert_close(logged(two[1], key), logged(one, key), rtol=2e-5, atol=0)


@pytest.mark.slow
def test_fsdp2_on_two_processes(tmp_path):
    """Losses and switches are those of one process, also when resumed. Stages must learn the same parameters."""
    stages = [("sdpa", 2), ("linear", 5), ("longformer", None, {"window_size": 8})]
    case = Case(plain, stages, [2, 5, 10], samples(24), {"adam_epsilon": 1e-3, "save_total_limit": 9})
    one = train(tmp_path / "one", case)
    shards = {"version": 2, "fsdp_version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"]}
    fsdp = {"fsdp": "full_shard auto_wrap", "fsdp_config": shards, "per_device_train_batch_size": 2}
    case = case._replace(options={**case.options, **fsdp, "ddp_backend": "gloo"})
    two = processes.run(2, tmp_path, train, tmp_path / "two", case)[0]
    assert two[0] == one[0] and switches(two[1]) == switches(one[1])
    torch.testing.assert_close(logged(two[1], "loss"), logged(one[1], "loss"), rtol=0, atol=1e-4)
    again = processes.run(2, tmp_path, train, tmp_path / "two", case, (), str(tmp_path / "two" / "checkpoint-4"))[0]
    assert again[0] == two[0][4:] and again[1] == two[1]
