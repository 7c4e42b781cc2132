"""A small up-training that can be killed at any point, for test_uptraining_resume.py.

    python tests/uptraining_run.py --case learned --output FOLDER [--resume] [--kill forward@5]
    python tests/uptraining_run.py --serve

Each process appends the losses of its steps to `FOLDER/steps-RANK.jsonl`. At the end the first process writes to
`FOLDER/result.json` what must not depend on kills.

With --serve it reads lines of JSON, [number of processes, arguments], and runs each line in new processes. They are
forks, so they do not import Transformers again. The answer to each line is the list of exit statuses.
"""

import argparse
import gc
import hashlib
import json
import os
import pathlib
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback

import torch
import tqdm.auto
import transformers
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments, trainer_callback
from transformers.models.bert import modeling_bert  # noqa: F401 (imported once, before the forks)
from transformers.models.gpt2 import modeling_gpt2  # noqa: F401

import hf_efficient_attn as hea
import hf_efficient_attn.training.callback

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
TEXT = {"vocab_size": 60, "max_position_embeddings": 64, "pad_token_id": 1}
# Model, stages (of ten steps in all), and arguments of Trainer. All cases use dropout.
CASES = {
    # The second stage keeps the learned parameters of the first and adds others.
    "learned": (
        "bert",
        [("linformer", 0.4, {"projection_dim": 8}), ("flurka_performer", 1.0, {"num_features": 8, "share": "none"})],
        {},
    ),
    # Neither stage learns parameters, so the weights do not tell the stage.
    "same": ("gpt2", [("performer", 5, {"num_features": 8}), ("linear", None)], {"gradient_accumulation_steps": 2}),
    # The second stage is distilled, at a checkpoint.
    "distilled": (
        "bert",
        [
            ("linformer", 0.4, {"projection_dim": 8}),
            ("flurka_linear", 1.0, {"feature_map": "hedgehog", "num_features": 8, "share": "none", "distill": 4}),
        ],
        {},
    ),
}


def make_model(family: str, dropout: float = 0.1) -> nn.Module:
    if family == "gpt2":
        dropouts = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
        config = transformers.GPT2Config(
            vocab_size=60, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=2, eos_token_id=3, **dropouts
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.BertConfig(
        **SIZES, **TEXT, num_labels=3, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )
    return transformers.BertForSequenceClassification(config)


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
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def digests(optimizer) -> list:
    """The optimizer's state by group and index, as a checkpoint stores it."""
    state = optimizer.state_dict()
    groups = [{k: v for k, v in group.items() if not callable(v)} for group in state["param_groups"]]
    values = [[i, key, digest(v.reshape(-1).float())] for i, s in state["state"].items() for key, v in s.items()]
    return [groups, sorted(values)]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--stages", nargs="*", help="as in UptrainingSchedule.parse; default: those of the case")
    parser.add_argument("--plain", action="store_true", help="train without UptrainingCallback")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save_steps", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--resume", action="store_const", const=True, help="from the last checkpoint")
    parser.add_argument("--kill", help="WHERE@STEP as in Killer")
    parser.add_argument("--kill_rank", type=int, help="kill only this process")
    parser.add_argument("--set", action="append", default=[], help="more arguments of Trainer, as JSON")
    parser.add_argument("--best", type=int, help="evaluate every step, with this one as the best")
    parser.add_argument("--serve", action="store_true")
    return parser


def train(given: argparse.Namespace) -> None:
    rank = int(os.environ.get("RANK", 0))
    family, stages, further = CASES[given.case]
    schedule = hea.UptrainingSchedule.parse(given.stages) if given.stages else hea.UptrainingSchedule(stages)
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    evaluation |= {"metric_for_best_model": "score", "greater_is_better": True}
    given.output.mkdir(parents=True, exist_ok=True)
    options = {
        "max_steps": given.steps,
        "save_steps": given.save_steps,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "learning_rate": 5e-3,
        "warmup_steps": 3,
        "weight_decay": 0.1,
        "report_to": "none",
        "use_cpu": True,
        "ddp_backend": "gloo" if "RANK" in os.environ else None,
        "disable_tqdm": True,
        **further,
        **(evaluation if given.best else {}),
        **{key: value for text in given.set for key, value in json.loads(text).items()},
    }
    args = TrainingArguments(str(given.output), **options)
    torch.manual_seed(1)
    model = make_model(family, given.dropout)
    callbacks = [] if given.plain else [hea.UptrainingCallback(schedule)]
    if given.kill and given.kill_rank in (None, rank):
        callbacks.append(Killer(given.kill, model))
    callbacks.append(StepLog(given.output / f"steps-{rank}.jsonl"))
    samples = make_samples(family, 24, 0)

    def score(prediction) -> dict[str, float]:
        step = trainer.state.global_step
        return {"score": step if step <= given.best else -step}

    trainer = Trainer(
        model,
        args,
        train_dataset=samples,
        eval_dataset=make_samples(family, 8, 1),
        compute_metrics=score if given.best else None,
        callbacks=callbacks,
    )
    # BERT's loss is a mean. By default Trainer would treat it as a part of a sum over all processes.
    trainer.model_accepts_loss_kwargs = family == "gpt2"
    trainer.train(resume_from_checkpoint=given.resume)
    trainer.save_model(str(given.output / "final"))
    weights = {name: digest(value) for name, value in model.state_dict().items()}
    (given.output / f"weights-{rank}.json").write_text(json.dumps(weights), encoding="utf-8")
    if rank == 0:
        timings = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos"}
        timings |= {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
        result = {
            "log": [{k: v for k, v in entry.items() if k not in timings} for entry in trainer.state.log_history],
            "attention": model.config._attn_implementation,
            "weights": weights,
            "optimizer": digests(trainer.optimizer),
            "random": digest(torch.get_rng_state()),
            "best": trainer.state.best_model_checkpoint and pathlib.Path(trainer.state.best_model_checkpoint).name,
        }
        (given.output / "result.json").write_text(json.dumps(result), encoding="utf-8")


def start(argv: list[str], rank: int, world: int, port: int) -> int:
    """Fork a process that trains and writes its output to `OUTPUT/output-RANK.txt`."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        given = parser().parse_args(argv)
        given.output.mkdir(parents=True, exist_ok=True)
        file = os.open(given.output / f"output-{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(file, stream)
        if world > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
            os.environ.update(LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        train(given)
        code = 0
    except BaseException:  # noqa: BLE001 (a fork must not continue as its parent)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pids: list[int]) -> list[int]:
    """Exit statuses, minus the signal for killed processes. Like a launcher, ends all processes if one fails."""
    statuses: dict[int, int] = {}
    begin = time.monotonic()
    while len(statuses) < len(pids):
        for pid in pids:
            if pid not in statuses:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
        late = time.monotonic() - begin > 120
        if any(statuses.values()) or late:
            for pid in pids:
                if pid not in statuses:
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.005)
    return [statuses[pid] for pid in pids]


def serve() -> None:
    # Forks would share the locks of progress bars, and a killed process never releases them.
    for bar in (tqdm.tqdm, tqdm.auto.tqdm):
        bar.set_lock(threading.RLock())
    with tempfile.TemporaryDirectory() as folder:
        # The first save does one-time work that takes a third of a run's time.
        make_model("bert").save_pretrained(folder)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        world, argv = json.loads(line)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pids = [start(argv, rank, world, port) for rank in range(world)]
        print(json.dumps(wait(pids)), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = parser().parse_args()
    if given.serve:
        serve()
    else:
        train(given)
