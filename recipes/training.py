"""What the training recipes share beside their command line: checks of data and model, the run and its figures.

A recipe parses with `arguments.parse`, loads its data, looks at it with `check_columns` and `check_not_empty`, hands
its model to `prepare_attention` and a Trainer with the callbacks that this returns to `train_and_report`. What cannot
be done is a ValueError before the first step.
"""

import ast
import inspect
import os
import pathlib
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import hf_efficient_attn as hea
from hf_efficient_attn.conversion.positions import position_offset
from hf_efficient_attn.training.callback import why_unfinished
from recipes.arguments import STATE, AttentionArguments, RecipeArguments
from recipes.benchmarks.memory import peak_bytes
from recipes.reporting import about_run, switches_of, write_report


def prepare_attention(model: nn.Module, attention: AttentionArguments) -> list[TrainerCallback]:
    """Switch the model to --attention, in place, or make the callback that takes it through the stages.

    Returns:
        the callbacks for the Trainer.

    Raises:
        UnsupportedAttentionError: the model cannot take the method.
    """
    chosen, schedule = attention.method(), attention.schedule()
    if chosen is not None:
        hea.convert(model, chosen[0], layers=chosen[1])
    return [] if schedule is None else [hea.UptrainingCallback(schedule)]


def check_columns(dataset, needed: Sequence[str], where: str) -> None:
    """That a `datasets.Dataset` (or an IterableDataset that knows its columns) has all that is needed.

    Raises:
        ValueError: one is missing; the message names it, the columns that are there, and `where` (a path or hub id).
    """
    there = dataset.column_names
    missing = [name for name in needed if there is not None and name not in there]
    if missing:
        raise ValueError(f"{where} has no column {', '.join(map(repr, missing))}; its columns: {', '.join(there)}")


def check_not_empty(dataset, where: str) -> None:
    """That a dataset with a length holds something; raises ValueError if not."""
    if len(dataset) == 0:
        raise ValueError(f"{where} is empty: there is nothing to train or evaluate on")


def check_length(model: nn.Module, length: int, option: str = "--max_length") -> None:
    """That the learned position table of a text model, where it has one, takes sequences of `length` tokens.

    Raises:
        ValueError: it is shorter.
    """
    for module in model.modules():
        for name in ("position_embeddings", "wpe"):
            table = getattr(module, name, None)
            if not isinstance(table, nn.Embedding):
                continue
            limit = table.num_embeddings - position_offset(table)
            if length > limit:
                raise ValueError(
                    f"{option} {length}: the model has positions for {limit} tokens; give at most that, or a model "
                    "that hea.extend_positions has grown"
                )


def take(dataset, count: int | None, seed: int = 0):
    """`count` rows, drawn and ordered by the seed; all rows in their order if None or if there are not more.

    The seed is as a rule not that of the training, so that runs with several seeds see the same rows.

    Raises:
        ValueError: a count below 1.
    """
    if count is not None and count < 1:
        raise ValueError(f"{count} samples are none: give 1 or more, or leave the option out for all")
    return dataset if count is None or count >= len(dataset) else dataset.shuffle(seed=seed).select(range(count))


def last_whole_checkpoint(folder: str | os.PathLike, processes: int = 1) -> pathlib.Path | None:
    """The newest checkpoint of Trainer that was written to its end; None if there is none.

    Args:
        folder: output folder.
        processes: number of processes that wrote it, each of which saves its random state.
    """
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    found = [path for path in pathlib.Path(folder).glob(f"{prefix}*") if path.name.removeprefix(prefix).isdecimal()]
    states = [f"rng_state_{rank}.pth" for rank in range(processes)] if processes > 1 else []
    for path in sorted(found, key=lambda path: int(path.name.removeprefix(prefix)), reverse=True):
        if why_unfinished(path) is None and all((path / name).is_file() for name in states):
            return path
    return None


class _Clock(TrainerCallback):
    """Seconds of the steps (data included; saving, evaluation and the first step left out) and the peak of memory."""

    def __init__(self) -> None:
        self.steps, self.seconds, self.peak, self._mark, self._first = 0, 0.0, 0, 0.0, True

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(args.device)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if not self._first:
            self.steps, self.seconds = self.steps + 1, self.seconds + time.perf_counter() - self._mark
        self._first, self._mark = False, time.perf_counter()

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        self._mark = time.perf_counter()

    on_save = on_log = on_evaluate

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self.peak = torch.cuda.max_memory_allocated(args.device) if args.device.type == "cuda" else peak_bytes()


def train_and_report(
    trainer: Trainer,
    attention: AttentionArguments,
    *,
    evaluate: Any = None,
    extra: Mapping[str, Any] | None = None,
    metric: str | None = None,
) -> dict[str, Any]:
    """Train (or resume), evaluate, save, and write what came out.

    Into `trainer.args.output_dir` go the model and its processing class, Trainer's state, `metrics.json` and
    `learning_curve.png`; a short table is printed. Process 0 writes, all take part.

    Args:
        trainer: with the callbacks of `prepare_attention`.
        attention: what was asked, for the report.
        evaluate: a Dataset, or name -> Dataset for metrics `eval_<name>_...`; None for no evaluation.
        extra: further entries of `metrics.json`.
        metric: the evaluation figure to draw, such as "eval_accuracy"; by default `metric_for_best_model`, else
            "eval_loss".

    Returns:
        what `metrics.json` holds: metrics, seconds_per_step, peak_memory_mib, steps, seed, attention, switches,
        versions, processes and more.
    """
    args, clock = trainer.args, _Clock()
    if not counts_items(trainer.model):
        # Else Trainer takes the mean over a batch for a share of a sum over all processes and accumulated batches, and
        # multiplies loss and gradient by their number (huggingface/transformers, issue 47688).
        trainer.model_accepts_loss_kwargs = False
    trainer.add_callback(clock)
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
        "peak_memory_mib": round(peak / 2**20, 1),
        "peak_memory_of": "allocations on the device" if args.device.type == "cuda" else "the whole process",
        "seed": args.seed,
        "global_batch_size": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        "learning_rate": args.learning_rate,
        "precision": trainer.accelerator.mixed_precision,
        **about_run(attention, trainer.model, args.world_size, args.device),
        "switches": switches_of(trainer.state.log_history),
        **(extra or {}),
    }
    if trainer.is_world_process_zero():
        name = metric or args.metric_for_best_model or "eval_loss"
        write_report(
            report, trainer.state.log_history, args.output_dir, name if name.startswith("eval_") else f"eval_{name}"
        )
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
    """`train_and_report` without the training: the figures of the model as it is; the model is not saved.

    Args:
        evaluate: as there; None for the trainer's own evaluation set.
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
    if trainer.is_world_process_zero():
        write_report(report, trainer.state.log_history, args.output_dir, metric)
    trainer.accelerator.wait_for_everyone()
    return report


def counts_items(model: nn.Module) -> bool:
    """Whether the model's loss heeds `num_items_in_batch`, as far as the source of its forward pass tells.

    Trainer takes it for granted where forward takes further keywords, as BertForSequenceClassification does, whose loss
    is nevertheless a mean over its own batch.
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
    """The figures on `data`, which are there already if the last step was followed by an evaluation."""
    if data is None:
        return {}
    if data is trainer.eval_dataset and not trainer.args.load_best_model_at_end:
        last = [entry for entry in trainer.state.log_history if entry.get("step") == trainer.state.global_step]
        found = {key: value for entry in last for key, value in entry.items() if key.startswith("eval_")}
        if found:
            return found
    return trainer.evaluate(data)


def _checkpoint(args: RecipeArguments) -> str | None:
    """What Trainer shall resume from.

    Raises:
        ValueError: it holds all of --max_steps; Trainer would take one step more.
    """
    found = args.resume_from_checkpoint or None
    if found is True:
        found = last_whole_checkpoint(args.output_dir, args.world_size)
        if args.process_index == 0:
            where = f"resumed from {found}" if found else f"no whole checkpoint in {args.output_dir}: from the start"
            print(where, file=sys.stderr)
    if found is not None and args.max_steps > 0:
        done = TrainerState.load_from_json(str(pathlib.Path(found) / STATE)).global_step
        if done >= args.max_steps:
            raise ValueError(
                f"the run in {found} has done {done} steps and --max_steps {args.max_steps} asks for no more: it is "
                "finished; give a larger --max_steps to go on"
            )
    return found and str(found)
