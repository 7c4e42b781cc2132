"""A small up-training that can be killed at any point, for test_uptraining_resume.py.

Each process appends the losses of its steps to `FOLDER/steps-RANK.jsonl`. At the end the first process writes to
`FOLDER/result.json` what must not depend on kills.
"""

import gc
import hashlib
import json
import os
import pathlib
import signal
import threading
import time

import torch
import tqdm.auto
import transformers
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments, trainer_callback

import hf_efficient_attn as hea
from tiny_models import tiny_config

# Model, stages (of ten steps in all), and arguments of Trainer. All cases use dropout.
CASES = {
    # The second stage keeps the learned parameters of the first and adds others.
    "learned": ("bert", ["linformer,projection_dim=8:0.4", "flurka_performer,num_features=8,share=none:1.0"], {}),
    # Neither stage learns parameters, so the weights do not tell the stage.
    "same": ("gpt2", ["performer,num_features=8:5", "linear:end"], {"gradient_accumulation_steps": 2}),
    # The second stage is distilled, at a checkpoint.
    "distilled": (
        "bert",
        [
            "linformer,projection_dim=8:0.4",
            "flurka_linear,feature_map=hedgehog,num_features=8,share=none,distill=4:1.0",
        ],
        {},
    ),
}
BEST = {
    "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "score",
    "greater_is_better": True,
}  # fmt: skip


def make_model(family: str, dropout: float) -> nn.Module:
    if family == "gpt2":
        options = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
        return transformers.GPT2LMHeadModel(tiny_config("gpt2", **options))
    options = {"num_labels": 3, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return transformers.BertForSequenceClassification(tiny_config("bert", **options))


def make_samples(family: str, number: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Random texts, every third with padding. The class of a text follows from its first token."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(number):
        tokens = torch.randint(5, 60, (40,), generator=generator)
        mask = torch.ones(40, dtype=torch.int64)
        if i % 3 == 2:
            mask[27:] = 0
        labels = tokens.masked_fill(mask == 0, -100) if family == "gpt2" else tokens[0] % 3
        samples.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return samples


class Killer(TrainerCallback):
    """Kills the process at a point "WHERE@STEP", when STEP steps are done. WHERE is one of

    - begin, forward, substep (between two batches of a step), saved (after the checkpoint of the step);
    - torn:FILE: while the checkpoint of the step is saved, after half of FILE is written.
    """

    def __init__(self, point: str, model: nn.Module) -> None:
        self.where, _, at = point.partition("@")
        self.at, self.step, (what, _, file) = int(at), 0, self.where.partition(":")
        layers = model.transformer.h if hasattr(model, "transformer") else model.bert.encoder.layer
        layers[1].register_forward_pre_hook(lambda module, given: self.reach("forward") if module.training else None)

        def tearing(write):
            def torn(*given, **options):
                path = given[1] if isinstance(given[1], (str, os.PathLike)) else ""
                write(*given, **options)
                if what == "torn" and str(path).endswith(f"checkpoint-{at}/{file}"):
                    os.truncate(path, os.stat(path).st_size // 2)
                    die()

            return torn

        transformers.modeling_utils.safe_save_file = tearing(transformers.modeling_utils.safe_save_file)
        torch.save = tearing(torch.save)
        trainer_callback.TrainerState.save_to_json = tearing(trainer_callback.TrainerState.save_to_json)

    def reach(self, where: str) -> None:
        if where == self.where and self.step == self.at:
            die()

    def on_step_begin(self, args, state, control, **kwargs):
        self.step = state.global_step
        self.reach("begin")

    def on_substep_end(self, args, state, control, **kwargs):
        self.reach("substep")

    def on_save(self, args, state, control, **kwargs):
        self.step = state.global_step
        self.reach("saved")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


class StepLog(TrainerCallback):
    """Appends every logged step to a file immediately, with the model's attention."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def on_log(self, args, state, control, model=None, logs=None, **kwargs):
        if "loss" in logs:
            line = {**logs, "step": state.global_step, "attention": model.config._attn_implementation}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def digest(tensor: torch.Tensor) -> str:
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def digests(optimizer) -> list:
    """The optimizer's state by group and index, as a checkpoint stores it."""
    state = optimizer.state_dict()
    groups = [{k: v for k, v in group.items() if not callable(v)} for group in state["param_groups"]]
    values = [[i, key, digest(v.reshape(-1).float())] for i, s in state["state"].items() for key, v in s.items()]
    return [groups, sorted(values)]


def train(
    rank: int, world: int, port: int, folder: pathlib.Path, case: str, *,
    stages=None, plain=False, dropout=0.1, resume=None, kill=None, kill_rank=None, best=None, **options,
) -> None:  # fmt: skip
    """Train in a new process, which writes its output to `FOLDER/output-RANK.txt`.

    Args:
        stages: as in UptrainingSchedule.parse; default: those of the case.
        plain: train without UptrainingCallback.
        resume: from the last checkpoint.
        kill: WHERE@STEP as in Killer.
        kill_rank: kill only this process.
        best: evaluate every step, with this one as the best.
        options: more arguments of Trainer.
    """
    gc.freeze()  # else a collection copies the memory that is shared with the server
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / f"output-{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    torch.set_num_threads(1)
    # The default lock is shared with other processes, and a killed process never releases it.
    for bar in (tqdm.tqdm, tqdm.auto.tqdm):
        bar.set_lock(threading.RLock())
    if world > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
        os.environ.update(LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    family, usual, further = CASES[case]
    usual_options = {
        "max_steps": 10, "save_steps": 2, "per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 5e-3,
        "warmup_steps": 3, "weight_decay": 0.1, "report_to": "none", "use_cpu": True, "disable_tqdm": True,
        "ddp_backend": "gloo" if world > 1 else None, **further, **(BEST if best else {}),
    }  # fmt: skip
    args = TrainingArguments(str(folder), **usual_options | options)
    torch.manual_seed(1)
    model = make_model(family, dropout)
    callbacks = [] if plain else [hea.UptrainingCallback(hea.UptrainingSchedule.parse(stages or usual))]
    if kill and kill_rank in (None, rank):
        callbacks.append(Killer(kill, model))
    callbacks.append(StepLog(folder / f"steps-{rank}.jsonl"))

    def score(prediction) -> dict[str, float]:
        step = trainer.state.global_step
        return {"score": step if step <= best else -step}

    trainer = Trainer(
        model,
        args,
        train_dataset=make_samples(family, 24, 0),
        eval_dataset=make_samples(family, 8, 1),
        compute_metrics=score if best else None,
        callbacks=callbacks,
    )
    # BERT's loss is a mean. By default Trainer would treat it as a part of a sum over all processes.
    trainer.model_accepts_loss_kwargs = family == "gpt2"
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "final"))
    if rank == 0:
        timings = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos"}
        timings |= {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
        result = {
            "log": [{k: v for k, v in entry.items() if k not in timings} for entry in trainer.state.log_history],
            "attention": model.config._attn_implementation,
            "weights": {name: digest(value) for name, value in model.state_dict().items()},
            "optimizer": digests(trainer.optimizer),
            "random": digest(torch.get_rng_state()),
            "best": trainer.state.best_model_checkpoint and pathlib.Path(trainer.state.best_model_checkpoint).name,
        }
        (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
