"""Shared code of the training recipes: checks of data and model, the training itself, and its report.

A recipe parses its options with `arguments.parse`, loads its data and checks it with `check_columns` and
`check_not_empty`. It calls `prepare_attention` with its model, and `train_and_report` with a Trainer that has the
returned callbacks. Everything that is not possible raises ValueError before the first step.
"""

import ast
import inspect
import math
import os
import pathlib
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import hf_efficient_attn as hea
from hf_efficient_attn.evaluation.data import max_positions
from hf_efficient_attn.evaluation.timing import peak_bytes
from hf_efficient_attn.training.callback import why_incomplete
from recipes.common.arguments import STATE, AttentionArguments, RecipeArguments
from recipes.common.reporting import about_run, resumptions_of, switches_of, write_report


def prepare_attention(model: nn.Module, attention: AttentionArguments) -> list[TrainerCallback]:
    """Convert the model to --attention, in place, or make the callback that runs the stages.

    Returns:
        The callbacks for the Trainer.

    Raises:
        UnsupportedAttentionError: the model does not support the method.
    """
    chosen, schedule = attention.method(), attention.schedule()
    if chosen is not None:
        hea.convert(model, chosen[0], layers=chosen[1])
    return [] if schedule is None else [hea.UptrainingCallback(schedule)]


def check_columns(dataset: Dataset | IterableDataset, needed: Sequence[str], where: str) -> None:
    """Check that a dataset has the needed columns. An IterableDataset that does not know its columns passes.

    Args:
        dataset: the dataset.
        needed: names of the columns.
        where: path or hub id, for the message.

    Raises:
        ValueError: a column is missing.
    """
    known = dataset.column_names
    missing = [name for name in needed if known is not None and name not in known]
    if missing:
        raise ValueError(f"{where} has no column {', '.join(map(repr, missing))}; its columns: {', '.join(known)}")


def check_not_empty(dataset: Sized, where: str) -> None:
    """Raise ValueError if the dataset is empty."""
    if len(dataset) == 0:
        raise ValueError(f"{where} is empty: there is nothing to train or evaluate on")


def show_baselines(found: Mapping[str, float], args: RecipeArguments) -> None:
    """Print, in the main process, what can be predicted without a model."""
    if args.process_index == 0:
        print("without a model:", ", ".join(f"{name} {value:.3f}" for name, value in found.items()))


def check_length(model: nn.Module, length: int, option: str = "--max_length") -> None:
    """Check that the learned position table of a text model, if it has one, covers `length` tokens.

    Raises:
        ValueError: the table is shorter.
    """
    limit = max_positions(model)
    if limit is not None and length > limit and getattr(model.config, "rope_parameters", None) is None:
        raise ValueError(
            f"{option} {length}: the model has positions for {limit} tokens; give at most {limit}, or extend the model "
            "with hea.extend_positions"
        )


def take(dataset: Dataset, count: int | None, seed: int = 0) -> Dataset:
    """Choose `count` examples at random; return the whole dataset if `count` is None or not smaller.

    The seed is usually not that of the training, so that runs with different seeds use the same examples.

    Raises:
        ValueError: `count` is below 1.
    """
    if count is not None and count < 1:
        raise ValueError(f"{count} samples: give 1 or more, or leave the option out for all")
    return dataset if count is None or count >= len(dataset) else dataset.shuffle(seed=seed).select(range(count))


def last_complete_checkpoint(folder: str | os.PathLike, processes: int = 1) -> pathlib.Path | None:
    """The newest complete checkpoint of Trainer; None if there is none.

    Args:
        folder: output folder.
        processes: number of processes that wrote the checkpoint. Each of them saves its random state.
    """
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    found = [path for path in pathlib.Path(folder).glob(f"{prefix}*") if path.name.removeprefix(prefix).isdecimal()]
    states = [f"rng_state_{rank}.pth" for rank in range(processes)] if processes > 1 else []
    for path in sorted(found, key=lambda path: int(path.name.removeprefix(prefix)), reverse=True):
        if why_incomplete(path) is None and all((path / name).is_file() for name in states):
            return path
    return None


class _Clock(TrainerCallback):
    """Measures the time of the steps, without the first one, saving and evaluation, and the peak memory.

    `seconds` is wall time and `cpu_seconds` the time that the threads of this process have computed, which other
    processes on the machine hardly change.
    """

    def __init__(self) -> None:
        self.steps, self.seconds, self.cpu_seconds, self.peak, self._first = 0, 0.0, 0.0, 0, True
        self._mark = self._cpu_mark = 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        if args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(args.device)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not self._first:
            self.steps, self.seconds = self.steps + 1, self.seconds + time.perf_counter() - self._mark
            self.cpu_seconds += time.process_time() - self._cpu_mark
        self._first, self._mark, self._cpu_mark = False, time.perf_counter(), time.process_time()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._mark, self._cpu_mark = time.perf_counter(), time.process_time()

    on_save = on_log = on_evaluate

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        self.peak = torch.cuda.max_memory_allocated(args.device) if args.device.type == "cuda" else peak_bytes()


class _SwitchWarmup(TrainerCallback):
    """Raises the learning rate linearly from 0 to its scheduled value in some steps after each switch of attention.

    The schedule itself does not change: the factor applies to a single optimizer step at a time.

    Args:
        steps: number of steps after a switch; in the last of them the learning rate is the scheduled one.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._scheduled: list[float] = []

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Scale the learning rates."""
        switches = switches_of(state.log_history)
        done = state.global_step - switches[-1]["step"] + 1 if switches else self.steps
        groups = kwargs["optimizer"].param_groups
        self._scheduled = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] *= min(1.0, done / self.steps)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the scheduled learning rates."""
        for group, rate in zip(kwargs["optimizer"].param_groups, self._scheduled, strict=True):
            group["lr"] = rate


class _Resumptions(TrainerCallback):
    """Logs at which step a training is resumed, so that checkpoints and learning curve show all resumptions."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Log the step if it is not the first."""
        if state.global_step > 0:
            state.log_history.append({"resumed_at": state.global_step, "epoch": state.epoch, "step": state.global_step})


def train_and_report(
    trainer: Trainer,
    attention: AttentionArguments,
    *,
    evaluate: Any = None,
    extra: Mapping[str, Any] | None = None,
    metric: str | None = None,
) -> dict[str, Any]:
    """Train or resume, evaluate, save, and write a report.

    The model and its processing class, Trainer's state, `metrics.json` and `learning_curve.png` are written to
    `trainer.args.output_dir`, and a short table is printed. All processes must call this; process 0 writes.

    Args:
        trainer: a Trainer with the callbacks of `prepare_attention`.
        attention: the attention options, for the report.
        evaluate: a Dataset, or several by name for metrics `eval_<name>_...`; None for no evaluation.
        extra: further entries of `metrics.json`.
        metric: the evaluation metric to plot, such as "eval_accuracy". Default: `metric_for_best_model`, or
            "eval_loss".

    Returns:
        The contents of `metrics.json`: metrics, seconds_per_step, cpu_seconds_per_step, peak_memory_mib, steps, seed,
        attention, switches, versions, processes and more.
    """
    args, clock = trainer.args, _Clock()
    if not counts_items(trainer.model):
        # Otherwise Trainer treats the mean over a batch as a part of a sum over all processes and accumulated batches,
        # and multiplies loss and gradient by their number (huggingface/transformers, issue 47688).
        trainer.model_accepts_loss_kwargs = False
    trainer.add_callback(clock)
    if attention.switch_warmup_steps:
        trainer.add_callback(_SwitchWarmup(attention.switch_warmup_steps))
    trainer.add_callback(_Resumptions())
    result = trainer.train(resume_from_checkpoint=_checkpoint(args))
    figures = {**result.metrics, **_evaluate(trainer, evaluate)}
    trainer.save_model()
    trainer.save_state()
    peak = torch.tensor([clock.peak], dtype=torch.int64, device=args.device)
    peak = int(trainer.accelerator.gather(peak).max())
    report = {
        "metrics": figures,
        "steps": trainer.state.global_step,
        "epochs": trainer.state.epoch,
        "seconds_per_step": clock.seconds / clock.steps if clock.steps else None,
        "cpu_seconds_per_step": clock.cpu_seconds / clock.steps if clock.steps else None,
        "peak_memory_mib": round(peak / 2**20, 1),
        "peak_memory_of": "allocations on the device" if args.device.type == "cuda" else "the whole process",
        "seed": args.seed,
        "global_batch_size": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        "learning_rate": args.learning_rate,
        "precision": trainer.accelerator.mixed_precision,
        **about_run(attention, trainer.model, args.world_size, args.device),
        "switches": switches_of(trainer.state.log_history),
        "resumed_at": resumptions_of(trainer.state.log_history),
        **(extra or {}),
    }
    return _written(trainer, report, metric or args.metric_for_best_model or "eval_loss")


def _written(trainer: Trainer, report: dict[str, Any], metric: str) -> dict[str, Any]:
    """Write the report in process 0, and return it."""
    if trainer.is_world_process_zero():
        name = metric if metric.startswith("eval_") else f"eval_{metric}"
        write_report(report, trainer.state.log_history, trainer.args.output_dir, name)
    trainer.accelerator.wait_for_everyone()
    return report


def evaluate_and_report(
    trainer: Trainer,
    attention: AttentionArguments,
    *,
    evaluate: Any = None,
    extra: Mapping[str, Any] | None = None,
    metric: str = "eval_loss",
) -> dict[str, Any]:
    """Evaluate without training, and write a report. The model is not saved.

    Args:
        trainer: the Trainer.
        attention: the attention options, for the report.
        evaluate: as in `train_and_report`; None for the trainer's own evaluation set.
        extra: further entries of `metrics.json`.
        metric: the metric to plot.

    Returns:
        The contents of `metrics.json`.
    """
    args, figures = trainer.args, trainer.evaluate(evaluate)
    report = {
        "metrics": {key: value for key, value in figures.items() if not key.endswith("preparation_time")},
        "steps": 0,
        "seed": args.seed,
        **about_run(attention, trainer.model, args.world_size, args.device),
        "switches": [],
        **(extra or {}),
    }
    return _written(trainer, report, metric)


def counts_items(model: nn.Module) -> bool:
    """Whether the model's loss uses `num_items_in_batch`, as far as the source code of its forward method shows.

    Trainer assumes so for every forward method with keyword arguments. BertForSequenceClassification has them, but its
    loss is a mean over its own batch.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(type(inner).forward)))
    except (OSError, TypeError):
        return True
    calls = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and "loss" in ast.unparse(node.func)
    ]
    return any(word.arg in (None, "num_items_in_batch") for call in calls for word in call.keywords)


def _evaluate(trainer: Trainer, data: Any) -> dict[str, Any]:
    """The metrics on `data`. They are taken from the log if the last step was evaluated already."""
    if data is None:
        return {}
    if data is trainer.eval_dataset and not trainer.args.load_best_model_at_end:
        last = [entry for entry in trainer.state.log_history if entry.get("step") == trainer.state.global_step]
        found = {key: value for entry in last for key, value in entry.items() if key.startswith("eval_")}
        if found:
            return found
    return trainer.evaluate(data)


def _checkpoint(args: RecipeArguments) -> str | None:
    """The checkpoint to resume from; None to start anew.

    Options that are shares of all steps become the steps of the checkpoint, if it was made with the same shares.
    Otherwise Trainer would warn that the two differ.

    Raises:
        ValueError: the checkpoint has done --max_steps already. Trainer would do one more step.
    """
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
            f"the run in {found} is finished: it has done {state.global_step} steps and --max_steps is "
            f"{args.max_steps}; give a larger --max_steps to continue"
        )
    for name in ("logging_steps", "eval_steps", "save_steps"):
        share = getattr(args, name)
        if share is not None and share < 1 and math.ceil(state.max_steps * share) == getattr(state, name):
            setattr(args, name, getattr(state, name))
    return str(found)
