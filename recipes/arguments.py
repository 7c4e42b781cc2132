"""The command line of the training recipes: which attention, how to train, where to write; errors as one line.

What is asked for wrongly is a ValueError before the first step, which `main_of` turns into one line and exit status 2.
"""

import argparse
import difflib
import json
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import accelerate
import datasets
import torch
import transformers
from transformers import HfArgumentParser, TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import hf_efficient_attn as hea
from hf_efficient_attn.cli import parse_layers, parse_methods
from hf_efficient_attn.errors import unknown_name
from hf_efficient_attn.io.writing import check_picture
from recipes.reporting import METRICS, PICTURE

STATE = "trainer_state.json"


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
