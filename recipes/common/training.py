"""The training of the recipes on Transformers' Trainer: checks, resumption, timing, and the report at its end.

Everything that is not possible raises ValueError before the first step.
"""

import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import AutoConfig, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import hf_efficient_attn as hea
from hf_efficient_attn.training.callback import is_complete
from recipes.common.arguments import STATE, AttentionArguments, RecipeArguments
from recipes.common.reporting import about_run, switches_of, write_report


def prepare_attention(model: nn.Module, attention: AttentionArguments) -> list[TrainerCallback]:
    """Convert the model to --attention, in place, or return the callback that runs the stages."""
    chosen, schedule = attention.method(), attention.schedule()
    if chosen is not None:
        hea.convert(model, chosen[0], layers=chosen[1])
    return [] if schedule is None else [hea.UptrainingCallback(schedule)]


def check_not_empty(count: int, where: str) -> None:
    """Raise ValueError if there are no examples."""
    if not count:
        raise ValueError(f"{where} is empty: there is nothing to train or evaluate on")


def show_baselines(found: Mapping[str, float], args: RecipeArguments) -> None:
    """Print, in the main process, what can be predicted without a model."""
    if args.process_index == 0:
        print("without a model:", ", ".join(f"{name} {value:.3f}" for name, value in found.items()))


def take(dataset: Dataset, count: int | None) -> Dataset:
    """Choose `count` examples at random, or all. The choice is the same for every seed of the training."""
    if count is not None and count < 1:
        raise ValueError(f"{count} samples: give 1 or more, or leave the option out for all")
    return dataset if count is None or count >= len(dataset) else dataset.shuffle(seed=0).select(range(count))


def last_complete_checkpoint(folder: str | pathlib.Path, processes: int = 1) -> pathlib.Path | None:
    """The newest complete checkpoint of Trainer, with the random states of so many processes; None if there is none."""
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    found = [path for path in pathlib.Path(folder).glob(f"{prefix}*") if path.name.removeprefix(prefix).isdecimal()]
    states = [f"rng_state_{rank}.pth" for rank in range(processes)] if processes > 1 else []
    for path in sorted(found, key=lambda path: int(path.name.removeprefix(prefix)), reverse=True):
        if is_complete(path) and all((path / name).is_file() for name in states):
            return path
    return None


class _Clock(TrainerCallback):
    """Measures the time of the steps, without the first one, saving and evaluation, and logs a resumption.

    `seconds` is wall time. `cpu_seconds` is the time that the threads of this process have computed, which other
    processes on the machine hardly change.
    """

    def __init__(self) -> None:
        self.steps, self.seconds, self.cpu_seconds, self._marks = 0, 0.0, 0.0, (0.0, 0.0)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        self.steps = -1
        if args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(args.device)
        if state.global_step > 0:
            state.log_history.append({"resumed_at": state.global_step, "epoch": state.epoch, "step": state.global_step})

    def on_step_end(self, *_: Any, **__: Any) -> None:
        wall, computed = self._marks
        self._marks = time.perf_counter(), time.process_time()
        self.steps += 1
        if self.steps:
            self.seconds += self._marks[0] - wall
            self.cpu_seconds += self._marks[1] - computed

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self._marks = time.perf_counter(), time.process_time()

    on_save = on_log = on_evaluate


class Epochs(TrainerCallback):
    """Writes the number of the epoch into a tensor at its start, in the main process."""

    def __init__(self, epoch: torch.Tensor) -> None:
        self.epoch = epoch

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Set the epoch."""
        # A resumed run starts within an epoch. At the end of an epoch the value is an integer up to rounding.
        self.epoch.fill_(int((state.epoch or 0) + 1e-6))


class _SwitchWarmup(TrainerCallback):
    """Raises the learning rate linearly from 0 to its scheduled value in `steps` steps after each switch of attention.

    The schedule itself does not change: the factor applies to a single optimizer step at a time.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._scheduled: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        switches, groups = switches_of(state.log_history), kwargs["optimizer"].param_groups
        done = state.global_step - switches[-1]["step"] + 1 if switches else self.steps
        self._scheduled = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] *= min(1.0, done / self.steps)

    def on_optimizer_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        for group, rate in zip(kwargs["optimizer"].param_groups, self._scheduled, strict=True):
            group["lr"] = rate


def run_and_report(
    trainer: Trainer,
    attention: AttentionArguments,
    *,
    evaluate: Any = None,
    extra: Mapping[str, Any] | None = None,
    metric: str = "eval_loss",
    train: bool = True,
) -> dict[str, Any]:
    """Train or resume, evaluate, save, and write a report; or only evaluate and report.

    The model with its processing class and Trainer's state (after a training), `metrics.json` and `learning_curve.png`
    are written to `trainer.args.output_dir`, and a short table is printed. All processes must call this; process 0
    writes. The contents of `metrics.json` are returned.

    Args:
        trainer: a Trainer with the callbacks of `prepare_attention`. If its attribute `counts_items` is True, the loss
            of its model is a sum over tokens divided by the number of tokens in all processes and accumulated batches.
        attention: the attention options, for the report.
        evaluate: a Dataset, or several by name for metrics `eval_<name>_...`; None for no evaluation.
        extra: further entries of `metrics.json`.
        metric: the evaluation metric to plot, such as "eval_accuracy".
        train: False to evaluate the model as it is.
    """
    args, clock = trainer.args, _Clock()
    if not getattr(trainer, "counts_items", False):
        # Otherwise Trainer treats the mean over a batch as a part of a sum over all processes and accumulated batches,
        # and multiplies loss and gradient by their number (huggingface/transformers, issue 47688).
        trainer.model_accepts_loss_kwargs = False
    report: dict[str, Any] = {"steps": 0}
    if train:
        trainer.add_callback(clock)
        if attention.switch_warmup_steps:
            trainer.add_callback(_SwitchWarmup(attention.switch_warmup_steps))
        figures = dict(trainer.train(resume_from_checkpoint=_checkpoint(trainer, attention)).metrics)
        cuda = args.device.type == "cuda"
        peak = torch.tensor([torch.cuda.max_memory_allocated(args.device) if cuda else _peak_bytes()])
        figures |= _evaluate(trainer, evaluate)
        trainer.save_model()
        trainer.save_state()
        peak = int(trainer.accelerator.gather(peak.to(args.device)).max())
        report = {
            "steps": trainer.state.global_step,
            "epochs": trainer.state.epoch,
            "seconds_per_step": clock.seconds / clock.steps if clock.steps > 0 else None,
            "cpu_seconds_per_step": clock.cpu_seconds / clock.steps if clock.steps > 0 else None,
            "peak_memory_mib": round(peak / 2**20, 1),
            "peak_memory_of": "allocations on the device" if cuda else "the whole process",
            "global_batch_size": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
            # That of a checkpoint, if the run was resumed with another.
            "learning_rate": getattr(trainer.lr_scheduler, "base_lrs", [args.learning_rate])[0],
            "precision": trainer.accelerator.mixed_precision,
            "resumed_at": sorted({x["resumed_at"] for x in trainer.state.log_history if "resumed_at" in x}),
        }
    else:
        figures = trainer.evaluate(evaluate)
        figures = {key: value for key, value in figures.items() if not key.endswith("preparation_time")}
    report |= {
        "metrics": figures,
        "seed": args.seed,
        **about_run(attention, trainer.model, args.world_size, args.device),
        "switches": switches_of(trainer.state.log_history),
        **(extra or {}),
    }
    if trainer.is_world_process_zero():
        write_report(report, trainer.state.log_history, args.output_dir, metric)
    trainer.accelerator.wait_for_everyone()
    return report


def _peak_bytes() -> int:
    """Largest resident memory of this process so far; on Linux at least the peak of the process that started it."""
    import resource  # not available on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _evaluate(trainer: Trainer, data: Any) -> dict[str, Any]:
    """The metrics on `data`. They are taken from the log if the last step was evaluated already."""
    if data is None:
        return {}
    if data is trainer.eval_dataset and not trainer.args.load_best_model_at_end:
        last = [entry for entry in trainer.state.log_history if entry.get("step") == trainer.state.global_step]
        if logged := {key: value for entry in last for key, value in entry.items() if key.startswith("eval_")}:
            return logged
    return trainer.evaluate(data)


def _checkpoint(trainer: Trainer, attention: AttentionArguments) -> str | None:
    """The checkpoint to resume from; None to start anew.

    Refused is one that has done --max_steps already, after which Trainer would do one more step, one without the state
    of the optimizer, with which Trainer would begin another schedule of the learning rate, and one of other attention.
    """
    args = trainer.args
    found = args.resume_from_checkpoint or None
    if found is True:
        found = last_complete_checkpoint(args.output_dir, args.world_size)
        if args.process_index == 0:
            message = f"resumed from {found}" if found else f"no complete checkpoint in {args.output_dir}: started anew"
            print(message, file=sys.stderr)
    if found is None:
        return None
    state = TrainerState.load_from_json(str(pathlib.Path(found) / STATE))
    if 0 < args.max_steps <= state.global_step:
        raise ValueError(
            f"{found} is finished: it has done {state.global_step} steps and --max_steps is {args.max_steps}; give "
            "more, or, to write the model and the metrics once more, resume from an earlier checkpoint"
        )
    # DeepSpeed has its own folder.
    if not any(any(pathlib.Path(found).glob(name)) for name in ("optimizer*", "global_step*")):
        raise ValueError(
            f"{found} has no state of the optimizer (--save_only_model True), so that no training can continue from "
            "it; begin a new one with its model: --model"
        )
    # The callback of stages compares them itself. Sharded checkpoints have no config.
    if attention.schedule() is None and (pathlib.Path(found) / "config.json").is_file():
        was = AutoConfig.from_pretrained(found).efficient_attention
        now = getattr(getattr(trainer.model, "config", None), "efficient_attention", None)
        if was != now:
            raise ValueError(
                f"{found} was trained with the attention {was}, not {now}: resume with the --attention and --set of "
                "the original training, or begin a new one with its model: --model"
            )
    if args.train_sampling_strategy == "group_by_length" and args.process_index == 0:
        print("resumed with group_by_length: later epochs have other batches than without a break", file=sys.stderr)
    return str(found)
