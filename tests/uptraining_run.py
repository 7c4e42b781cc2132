"""Small up-trainings for test_uptraining*.py, which can be interrupted as by a kill, and resumed."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

import hf_efficient_attn as hea
from tiny_models import tiny_config

PLAIN = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def classifier(seed: int = 0, **changes) -> nn.Module:
    torch.manual_seed(seed)
    return transformers.BertForSequenceClassification(tiny_config("bert", **changes))


def decoder(**changes) -> nn.Module:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(tiny_config("gpt2", **changes))


def samples(count: int = 48, is_decoder: bool = False) -> list[dict[str, torch.Tensor]]:
    """Random texts, every third with padding. The class of a text follows from its first token."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(count):
        tokens, mask = torch.randint(5, 60, (24,), generator=generator), torch.ones(24, dtype=torch.int64)
        if i % 3 == 2:
            mask[17:] = 0
        labels = tokens.masked_fill(mask == 0, -100) if is_decoder else tokens[0] % 2
        found.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return found


def trainer_of(folder, schedule, model=None, steps: int = 8, callbacks=(), data=None, **options) -> Trainer:
    """A Trainer with the callback of a schedule; without it if there is no schedule."""
    usual = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1, "report_to": "none"}
    usual |= {"use_cpu": True, "disable_tqdm": True, "seed": 3, "max_steps": steps}
    usual |= {"save_strategy": "steps" if "save_steps" in options else "no"}
    arguments = TrainingArguments(str(folder), **{**usual, **options})
    callbacks = [*([] if schedule is None else [hea.UptrainingCallback(schedule)]), *callbacks]
    model, data = classifier() if model is None else model, data or samples()
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks)


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def switches(log: list[dict]) -> list[tuple[int, str, str]]:
    found = [entry for entry in log if "uptraining_stage" in entry]
    return [(entry["step"], entry["uptraining_from"], entry["uptraining_stage"]) for entry in found]


def hashed(value):
    """A value with a hash in place of each tensor."""
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        return hashlib.sha256(local.detach().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    if isinstance(value, dict):
        return {key: hashed(x) for key, x in value.items() if not callable(x)}
    return [hashed(x) for x in value] if isinstance(value, (list, tuple)) else value


class Attention(TrainerCallback):
    """Records the attention of the model at the beginning of each step."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.names.append(model.config._attn_implementation)


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
        for owner, name in (
            (transformers.modeling_utils, "safe_save_file"),
            (torch, "save"),
            (TrainerState, "save_to_json"),
        ):
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
        """The attention of each step."""
        stages = hea.UptrainingSchedule(self.stages).stages
        counts = [end - start for start, end in zip([0, *self.ends], self.ends, strict=False)]
        return [stage.attention for stage, count in zip(stages, counts, strict=True) for _ in range(count)]


def train(folder, case: Case, kills: Sequence[str] = (), resume: Any = None, **options) -> tuple[list, list, dict]:
    """Train, interrupted at each of `kills`, and resumed from the last checkpoint; only one complete one is kept.

    Returns the attention of each step of the last run, the log, and the states at the end as hashes.
    """
    make_model, stages, ends, data, usual = case
    options = {
        "save_steps": 2,
        "save_total_limit": 1,
        "warmup_steps": 3,
        "weight_decay": 0.1,
        **(usual or {}),
        **options,
    }
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
