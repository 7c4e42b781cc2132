"""What the training recipes share: arguments, the way to attention methods, checks of data, the run and its report.

A recipe parses with `parse`, loads its data, looks at it with `check_columns` and `check_not_empty`, hands its model to
`prepare_attention` and a Trainer with the callbacks that this returns to `train_and_report`. What cannot be done is a
ValueError before the first step, which `main_of` turns into one line and exit status 2.
"""

import argparse
import ast
import dataclasses
import difflib
import inspect
import json
import math
import os
import pathlib
import platform
import re
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import accelerate
import datasets
import torch
import transformers
from torch import nn
from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import hf_efficient_attn as hea
from hf_efficient_attn.cli import parse_methods, table
from hf_efficient_attn.demo import check_picture, replacing
from hf_efficient_attn.errors import unknown_name
from hf_efficient_attn.uptraining.callback import why_unfinished
from recipes.benchmarks.memory import peak_bytes

METRICS, PICTURE, STATE = "metrics.json", "learning_curve.png", "trainer_state.json"


@dataclass
class AttentionArguments:
    """Which attention a recipe trains with: one method, or stages in turn; checked when made.

    Raises:
        ValueError: more than one of --attention, --stages and --preset, or an option of one that is missing.
        UnsupportedAttentionError: a method, a hyperparameter or a preset that does not exist, shares that do not end
            at 1.
    """

    _argument_group_name = "attention"

    attention: str | None = field(
        default=None,
        metadata={
            "help": "Method to switch to before training (`hf-efficient-attn methods` lists them), or 'sdpa' for exact "
            "attention. Default: as the checkpoint says."
        },
    )
    set: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Hyperparameters of --attention or --preset.",
            "metavar": "KEY=VALUE",
            "action": "extend",
        },
    )
    layers: str | None = field(
        default=None, metadata={"help": "Layers to switch, such as 0-5,8; the others stay exact. Default: all."}
    )
    stages: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Up-training: METHOD[,key=value...]:END in order, where END is a share of the steps (the last 1.0) "
            "or a step (the last 'end'), such as linformer:0.25 flurka_performer:1.0.",
            "metavar": "STAGE",
            "action": "extend",
        },
    )
    preset: str | None = field(
        default=None, metadata={"help": "Up-training with the FLuRKA paper's shares for a task: nmt, imagenet, ..."}
    )
    variant: str | None = field(default=None, metadata={"help": "FLuRKA variant with which --preset ends."})

    def __post_init__(self) -> None:
        given = [f"--{name}" for name in ("attention", "stages", "preset") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: give the one that is meant")
        for name, of in (("set", ("attention", "preset")), ("layers", ("attention",)), ("variant", ("preset",))):
            if getattr(self, name) and not any(getattr(self, other) for other in of):
                raise ValueError(f"--{name} says something about {' or '.join(f'--{o}' for o in of)}, which is missing")
        # Both raise what is wrong now rather than after the model and the data were loaded.
        self.method()
        self.schedule()

    def method(self) -> tuple[Any, list[int] | None] | None:
        """What `hea.convert` takes for --attention: (config or name, layers); None without it."""
        if self.attention is None:
            return None
        layers = parse_layers(self.layers) if self.layers else None
        if re.split("[:,]", self.attention)[0] in hea.available_methods():
            configs = list(parse_methods([self.attention], self.set).values())
            if len(configs) != 1:
                raise ValueError(
                    f"--attention takes one method, not {self.attention!r}; --stages takes several in turn"
                )
            return configs[0], layers
        known = ["eager", *transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.valid_keys()]
        if self.attention not in known:
            raise hea.UnsupportedAttentionError(
                unknown_name("attention method", self.attention, [*hea.available_methods(), "sdpa", "eager"])
            )
        if self.set or layers:
            raise ValueError(
                f"--attention {self.attention} is exact attention in all layers: it takes no --set, --layers"
            )
        return self.attention, None

    def schedule(self, total_steps: int | None = None):
        """The `hea.UptrainingSchedule` of --stages or --preset; None without them.

        Args:
            total_steps: optimizer steps of the whole training, for loops without Trainer.
        """
        if self.stages:
            schedule = hea.UptrainingSchedule.parse(self.stages)
        elif self.preset:
            variant = {"variant": self.variant} if self.variant else {}
            schedule = hea.uptraining_preset(self.preset, **variant, **dict(map(_pair, self.set)))
        else:
            return None
        return schedule if total_steps is None else hea.UptrainingSchedule(schedule.stages, total_steps=total_steps)

    def label(self) -> str:
        """A few words for tables: the method, or the stages."""
        if self.stages:
            return " ".join(self.stages)
        if self.preset:
            return f"preset {self.preset}" + (f" {self.variant}" if self.variant else "")
        return " ".join([self.attention or "as the checkpoint says", *self.set])


def _pair(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ValueError(f"--set {text!r} sets nothing; write key=value")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def parse_layers(text: str) -> list[int]:
    """Indices out of such as "0-5,8"; raises ValueError for anything else."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or int(first) > int(last):
            raise ValueError(f"--layers {text!r}: {part!r} is no layer and no range of layers; write such as 0-5,8")
        found += range(int(first), int(last) + 1)
    return sorted(dict.fromkeys(found))


@dataclass
class RecipeArguments(TrainingArguments):
    """TrainingArguments with the recipes' defaults: seed 0, the loss every 10 steps, bars only on a terminal.

    Raises:
        ValueError: no output folder, or a checkpoint to resume from that is none.
    """

    _argument_group_name = "training (transformers.TrainingArguments)"

    output_dir: str | None = field(
        default=None,
        metadata={"help": f"Folder for the model, its checkpoints, {METRICS} and {PICTURE}. Needed."},
    )
    overwrite: bool = field(
        default=False, metadata={"help": "Write into an output folder that is not empty; its checkpoints are deleted."}
    )
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={"help": "True to go on from the last whole checkpoint in the output folder, or a checkpoint's path."},
    )
    seed: int = field(default=0, metadata={"help": "Of the new weights, the order of the data, dropout and draws."})
    report_to: str | None = field(
        default="none", metadata={"help": "Where the loss is reported while it runs: none or tensorboard."}
    )
    logging_steps: float = field(
        default=10, metadata={"help": "Steps from one entry of the loss to the next; below 1 a share of all steps."}
    )
    logging_first_step: bool = field(default=True, metadata={"help": "Whether the first step is logged as well."})
    disable_tqdm: bool | None = field(
        default=None, metadata={"help": "No progress bars. Default: where stderr is no terminal."}
    )

    def __post_init__(self) -> None:
        if self.output_dir is None:
            raise ValueError("--output_dir is missing: the folder for the model, its checkpoints and its figures")
        wanted = self.resume_from_checkpoint
        if isinstance(wanted, str) and wanted.lower() in ("true", "false", "none"):
            self.resume_from_checkpoint = True if wanted.lower() == "true" else None
        elif isinstance(wanted, str) and not (pathlib.Path(wanted) / STATE).is_file():
            raise ValueError(f"--resume_from_checkpoint {wanted}: no checkpoint is there (a folder that holds {STATE})")
        if self.disable_tqdm is None:
            self.disable_tqdm = not sys.stderr.isatty()
        # Without an accelerator PyTorch warns that there is nothing to pin memory for.
        self.dataloader_pin_memory = self.dataloader_pin_memory and torch.accelerator.is_available()
        super().__post_init__()
        missing = [name for name in self.report_to if name not in get_available_reporting_integrations()]
        if missing:
            raise ValueError(f"--report_to {missing[0]}: unknown or not installed; 'pip install {missing[0]}', or none")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The docstring as it stands, and the default of every option that has one."""

    def _get_help_string(self, action):
        return action.help if action.default in (None, []) else super()._get_help_string(action)


class _Parser(HfArgumentParser):
    def error(self, message: str):
        raise ValueError(f"{message}; try --help")


def parse(
    *dataclasses_: type, description: str, argv: Sequence[str] | None = None, defaults: Mapping[str, Any] | None = None
) -> tuple:
    """The command line as instances of the dataclasses, in their order, and of RecipeArguments as the last.

    Seeds all generators, so that a model that is made afterwards starts the same every time, and makes sure of the
    output folder.

    Args:
        *dataclasses_: types whose fields become options; all but a RecipeArguments of the recipe's own, which then
            stands where it was named.
        description: what --help says above the options, as a rule the script's docstring.
        argv: the options; the process's own if None.
        defaults: option -> default, where the recipe's differs.

    Raises:
        ValueError: an option that does not exist, or what the dataclasses refuse; an output folder that is not empty
            while neither --resume_from_checkpoint nor --overwrite is given.
    """
    types = list(dataclasses_)
    if not any(issubclass(kind, RecipeArguments) for kind in types):
        types.append(RecipeArguments)
    parsed = parse_only(*types, description=description, argv=argv, defaults=defaults)
    args = next(one for one in parsed if isinstance(one, RecipeArguments))
    # As Trainer does when it is made, which is after the model was.
    (transformers.enable_full_determinism if args.full_determinism else transformers.set_seed)(args.seed)
    prepare_output(args.output_dir, args.distributed_state, bool(args.resume_from_checkpoint), args.overwrite)
    if args.disable_tqdm:
        no_bars()
    return parsed


def no_bars() -> None:
    """No progress bars from datasets and Transformers; Trainer's own is `disable_tqdm`."""
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()


def parse_only(
    *dataclasses_: type, description: str, argv: Sequence[str] | None = None, defaults: Mapping[str, Any] | None = None
) -> tuple:
    """`parse` of the dataclasses and nothing else, for loops without Trainer: no seeds, no folder."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not torch.accelerator.is_available():
        # Accelerate joins processes on the CPU only where it is told so; otherwise each would train for itself.
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    parser = _Parser(
        dataclasses_,
        description=description,
        formatter_class=_Formatter,
        usage="%(prog)s [options]",
        allow_abbrev=False,
    )
    parser.set_defaults(**(defaults or {}))
    *parsed, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True, look_for_args_file=False)
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1, cutoff=0.5)
        raise ValueError(f"unknown option {unknown[0]!r};" + (f" did you mean {near[0]}?" if near else " try --help"))
    return tuple(parsed)


def prepare_output(
    output_dir: str | os.PathLike, state: accelerate.PartialState, resume: bool, overwrite: bool
) -> None:
    """Make the output folder, in which nothing may be but a run that is resumed or is to be overwritten.

    Raises:
        ValueError: the folder is not empty, or is a file; processes that were started together do not know each other.
        UnsupportedAttentionError: matplotlib is missing.
    """
    started = int(os.environ.get("WORLD_SIZE", 1))
    if state.num_processes != started:
        raise ValueError(
            f"{started} processes were started, but this one sees {state.num_processes}, so that each would train for "
            "itself: start them with 'accelerate launch --config_file recipes/configs/...'"
        )
    folder = pathlib.Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir {folder} is a file")
    if folder.is_dir() and any(folder.iterdir()) and not (resume or overwrite):
        raise ValueError(
            f"the output folder {folder} is not empty: choose another, or give --resume_from_checkpoint True to go on "
            "with the run in it, or --overwrite"
        )
    # Every process has looked before the first of them writes.
    state.wait_for_everyone()
    folder.mkdir(parents=True, exist_ok=True)
    check_picture(folder / PICTURE)
    if overwrite and not resume and state.is_local_main_process:
        for old in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
            shutil.rmtree(old, ignore_errors=True)
    state.wait_for_everyone()


def main_of(run: Callable[[], None]) -> None:
    """Run a recipe and end the process: 0 done, 2 refused (one line on stderr), 130 interrupted.

    Errors other than ValueError and OSError are faults of the program and keep their traceback.
    """
    try:
        run()
    except KeyboardInterrupt:
        _complain("interrupted", 130)
    except (ValueError, OSError) as error:
        _complain(str(error), 2)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.exit(0)


def _complain(message: str, status: int) -> None:
    rank = int(os.environ.get("RANK", 0))
    where = f" in process {rank}" if rank else ""
    print(f"error{where}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    sys.exit(status)


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
            # RoBERTa counts positions from padding_idx + 1.
            limit = table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
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
    """What Trainer shall resume from."""
    if args.resume_from_checkpoint is not True:
        return args.resume_from_checkpoint or None
    found = last_whole_checkpoint(args.output_dir, args.world_size)
    if args.process_index == 0:
        where = f"resumed from {found}" if found else f"no whole checkpoint in {args.output_dir}: from the beginning"
        print(where, file=sys.stderr)
    return found and str(found)


def about_run(attention: AttentionArguments, model: nn.Module, processes: int, device: torch.device) -> dict[str, Any]:
    """The part of a report that any loop can state: attention asked for and in force, model, machine, versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()}, CPU"
    config = getattr(model, "config", None)
    return {
        "attention": dataclasses.asdict(attention),
        "efficient_attention": getattr(config, "efficient_attention", None),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "processes": processes,
        "threads": torch.get_num_threads(),
        "device": name,
        "command": shlex.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "accelerate": accelerate.__version__,
            "hf_efficient_attn": hea.__version__,
        },
    }


def switches_of(log_history: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """[{"step", "from", "to"}] of the switches in Trainer's log."""
    return [
        {"step": entry["step"], "from": entry.get("uptraining_from"), "to": entry["uptraining_stage"]}
        for entry in log_history
        if "uptraining_stage" in entry
    ]


def write_report(
    report: Mapping[str, Any], log_history: Sequence[Mapping[str, Any]], folder: str | os.PathLike, metric: str
) -> None:
    """`metrics.json` and `learning_curve.png` into `folder`, and the main figures as a table to stdout."""
    folder = pathlib.Path(folder)
    with replacing(folder / METRICS) as draft:
        draft.write_text(json.dumps(_plain(report), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    with replacing(folder / PICTURE) as draft:
        learning_curve(log_history, metric).savefig(draft, dpi=120)
    skipped = ("_runtime", "_per_second", "total_flos", "epoch")
    figures = {k: v for k, v in report["metrics"].items() if not k.endswith(skipped)}
    beside = ("steps", "seconds_per_step", "peak_memory_mib")
    rows = [(key, _short(value)) for key, value in ({k: report[k] for k in beside if k in report} | figures).items()]
    rows += [(f"switch at step {s['step']}", f"{s['from']} to {s['to']}") for s in report.get("switches", ())]
    print(table(("", "value"), rows))
    print(f"written: {folder / METRICS}, {folder / PICTURE}", flush=True)


def _plain(value: Any) -> Any:
    """What JSON can hold: numbers that are not finite become null, anything else that it does not know its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def learning_curve(log_history: Sequence[Mapping[str, Any]], metric: str):
    """Training loss and an evaluation figure against the step; a dashed line at every switch of attention.

    Args:
        log_history: entries {"step", "loss"}, {"step", metric} and {"step", "uptraining_stage"}, as Trainer logs them.
        metric: key of the evaluation figure; where no entry has it only the loss is drawn.

    Returns:
        a matplotlib Figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    lines = _line(axes, log_history, "loss", "training loss", "C0")
    axes.set(xlabel="step", ylabel="training loss")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    if any(metric in entry for entry in log_history):
        other = axes.twinx()
        lines += _line(other, log_history, metric, metric, "C1", marker="o")
        other.set_ylabel(metric)
    for switch in switches_of(log_history):
        axes.axvline(switch["step"], color="0.3", linestyle="--", linewidth=1)
        axes.annotate(
            str(switch["to"]), (switch["step"], 1.0), xycoords=("data", "axes fraction"), xytext=(3, -3),
            textcoords="offset points", rotation=90, va="top", fontsize="x-small",
        )  # fmt: skip
    if lines:
        axes.legend(handles=lines, fontsize="small")
    return figure


def _line(axes, log_history, key: str, label: str, color: str, **style) -> list:
    points = [(entry["step"], entry[key]) for entry in log_history if key in entry and "step" in entry]
    return axes.plot(*zip(*points, strict=True), label=label, color=color, **style) if points else []
