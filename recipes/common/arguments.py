"""The command line of the training recipes: attention, training and output options, and errors as one line.

Wrong options raise ValueError before the first step. `main_of` turns it into one line and exit status 2.
"""

import argparse
import dataclasses
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import accelerate
import datasets
import torch
import transformers
from transformers import HfArgumentParser, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import hf_efficient_attn as hea
from hf_efficient_attn.cli import parse_methods
from hf_efficient_attn.errors import did_you_mean, unknown_name
from hf_efficient_attn.integration.layers import parse_layers
from hf_efficient_attn.io.json import parse_value
from hf_efficient_attn.io.writing import check_picture
from hf_efficient_attn.methods import MethodConfig
from recipes.common.reporting import METRICS, PICTURE

STATE = "trainer_state.json"


def option(help: str, default: Any = dataclasses.MISSING, **metadata: Any) -> Any:
    """A dataclass field as an option; required without a default. `metadata` are arguments of `add_argument`."""
    given = {"default_factory": lambda: list(default)} if isinstance(default, list) else {"default": default}
    return field(**given, metadata={"help": help, **metadata})


def several(help: str, metavar: str = "PATH") -> Any:
    """An option with several values, which can be repeated."""
    return option(help, default=[], metavar=metavar, action="extend")


def samples(what: str) -> Any:
    """The option of a largest number of examples."""
    return option(f"{what} at most N examples, chosen at random.", None, metavar="N")


def key_values(option: str, entries: Sequence[str]) -> dict[str, Any]:
    """Parse KEY=VALUE entries of an option, the values as `parse_value` does."""
    found = {}
    for entry in entries:
        key, equals, value = entry.partition("=")
        if not (key and equals and value):
            raise ValueError(f"{option} {entry!r} must have the form key=value")
        found[key] = parse_value(value)
    return found


def for_length(config: MethodConfig, tokens: int) -> MethodConfig:
    """The config with learned tables for this number of tokens, if the method has tables."""
    return dataclasses.replace(config, max_length=tokens) if hasattr(config, "max_length") else config


@dataclass
class AttentionArguments:
    """The attention that a recipe trains with: one method, or several stages. The options are checked on construction.

    Image recipes set `tokens` once the model is loaded. Methods with learned tables get tables for this number of
    tokens, which the config of a model does not show at another resolution than the model's own.
    """

    _argument_group_name = "attention"
    default_layers: ClassVar[list[int | str] | None] = None  # the layers that are converted without --layers

    attention: str | None = option(
        "Attention method (`hf-efficient-attn methods` lists them), or 'sdpa' for exact attention. "
        "Default: that of the checkpoint.",
        None,
    )
    set: list[str] = several("Hyperparameters of --attention or --preset.", "KEY=VALUE")
    layers: str | None = option("Layers to convert, such as 0-5,8 or encoder; others stay exact. Default: all.", None)
    stages: list[str] = several(
        "Up-training stages in order, as METHOD[,key=value...]:END. END is a share of the steps (1.0 for the last "
        "stage) or a step ('end' for the last), such as linformer:0.25 flurka_performer:1.0. With distill=N among "
        "the keys, the stage's new learned parameters first imitate the attention before it, for N steps on "
        "batches of the training set.",
        "STAGE",
    )
    preset: str | None = option("Up-training with the FLuRKA paper's shares for a task: nmt, imagenet, ...", None)
    variant: str | None = option("FLuRKA variant that --preset ends with.", None)
    switch_warmup_steps: int = option(
        "Raise the learning rate from 0 to its scheduled value again in N steps after each switch of --stages or "
        "--preset.",
        0,
        metavar="N",
    )

    def __post_init__(self) -> None:
        self.tokens: int | None = None
        given = [f"--{name}" for name in ("attention", "stages", "preset") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: give only one of them")
        needs = {"set": "attention preset", "layers": "attention", "variant": "preset"}
        for name, others in {**needs, "switch_warmup_steps": "stages preset"}.items():
            if getattr(self, name) and not any(getattr(self, other) for other in others.split()):
                raise ValueError(f"--{name} needs {' or '.join(f'--{other}' for other in others.split())}")
        if self.switch_warmup_steps < 0:
            raise ValueError(f"--switch_warmup_steps {self.switch_warmup_steps}: give 0 or more")
        # Both are called for their errors, which would otherwise come after the model and the data are loaded.
        self.method()
        self.schedule()

    def method(self) -> tuple[Any, list[int | str] | None] | None:
        """The arguments of `hea.convert` for --attention: (config or name, layers); None without --attention."""
        if self.attention is None:
            return None
        layers = parse_layers(self.layers) if self.layers else None
        if re.split("[:,]", self.attention)[0] in hea.available_methods():
            configs = list(parse_methods([self.attention], self.set).values())
            if len(configs) != 1:
                raise ValueError(f"--attention takes one method, not {self.attention!r}; use --stages for several")
            return self._adapted(configs[0], layers)
        if self.attention not in ("eager", *transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.valid_keys()):
            known = [*hea.available_methods(), "sdpa", "eager"]
            raise hea.UnsupportedAttentionError(unknown_name("attention method", self.attention, known))
        if self.set or layers:
            raise ValueError(f"--attention {self.attention} is exact attention everywhere: no --set, no --layers")
        return self.attention, None

    def schedule(self, total_steps: int | None = None) -> hea.UptrainingSchedule | None:
        """The up-training schedule of --stages or --preset; None without them.

        Training loops without Trainer need `total_steps`, the optimizer steps of the whole training.
        """
        if self.stages:
            schedule = hea.UptrainingSchedule.parse(self.stages)
        elif self.preset:
            variant = {"variant": self.variant} if self.variant else {}
            schedule = hea.uptraining_preset(self.preset, **variant, **key_values("--set", self.set))
        else:
            return None
        stages = list(schedule.stages)
        for i, stage in enumerate(stages):
            if stage.settings is not None and len(stage.settings.entries) == 1:
                config, layers = self._adapted(stage.settings.entries[0].config, stage.settings.entries[0].layers)
                stages[i] = stage._replace(settings=hea.EfficientAttentionConfig(config, None, layers))
        return hea.UptrainingSchedule(stages, schedule.total_steps if total_steps is None else total_steps)

    def _adapted(self, config: MethodConfig, layers: Any) -> tuple[MethodConfig, Any]:
        """The method with tables for `tokens`, and the layers. Refuses a `max_length` that is too small."""
        given = getattr(config, "max_length", 0)
        if self.tokens is not None and given < self.tokens:
            if given:
                raise ValueError(f"{config.method}: max_length={given}, but a picture has {self.tokens} tokens")
            config = for_length(config, self.tokens)
        return config, self.default_layers if layers is None else layers


# Evaluates and saves after every epoch.
PER_EPOCH = {"eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 2}
# The defaults of the recipes: the loss is logged at 50 to 100 steps, and nothing is reported to a service.
_DEFAULTS = {"seed": 0, "report_to": "none", "logging_steps": 0.01, "logging_first_step": True, "disable_tqdm": None}


@dataclass
class RecipeArguments(TrainingArguments):
    """TrainingArguments with an output folder that is protected, and bars only on a terminal."""

    _argument_group_name = "training (transformers.TrainingArguments)"

    output_dir: str | None = option(f"Folder for the model, its checkpoints, {METRICS} and {PICTURE}. Required.", None)
    overwrite: bool = option("Write into an output folder that is not empty, and delete its checkpoints.", False)
    resume_from_checkpoint: str | None = option("True for the last complete checkpoint, or the path of one.", None)

    def __post_init__(self) -> None:
        if self.output_dir is None:
            raise ValueError("--output_dir is missing: give a folder for the model, its checkpoints and its figures")
        given = self.resume_from_checkpoint
        if isinstance(given, str) and given.lower() in ("true", "false", "none"):
            self.resume_from_checkpoint = True if given.lower() == "true" else None
        elif isinstance(given, str) and not (pathlib.Path(given) / STATE).is_file():
            raise ValueError(f"--resume_from_checkpoint {given} is not a checkpoint, a folder that holds {STATE}")
        if self.eval_strategy == "steps" and self.eval_steps is None:
            self.eval_steps = 10  # and not `logging_steps`, as in TrainingArguments
        if self.disable_tqdm is None:
            self.disable_tqdm = not sys.stderr.isatty()
        # Without an accelerator PyTorch warns about pinned memory.
        self.dataloader_pin_memory = self.dataloader_pin_memory and torch.accelerator.is_available()
        super().__post_init__()


def check_counts(options: Any, *names: str) -> None:
    """Raise ValueError if one of the named options, each a count or None, is below 1."""
    for name in names:
        count = getattr(options, name)
        if count is not None and count < 1:
            raise ValueError(f"--{name} {count}: give 1 or more")


def check_share(name: str, value: float) -> None:
    """Raise ValueError if the value of an option is not between 0 and 1."""
    if not 0 < value < 1:
        raise ValueError(f"--{name} {value:g} must be between 0 and 1")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of the description, and adds the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, []) else super()._get_help_string(action)


def parse(*dataclasses_: type, description: str, argv: Sequence[str] | None = None, **defaults: Any) -> tuple:
    """Parse the command line, seed all random generators, and prepare the output folder.

    The types are those of the options; RecipeArguments is appended, unless a subclass of it is given. Instances of
    them are returned in their order. --save_steps, --eval_steps and --logging_steps imply the strategy "steps", without
    which Trainer would ignore them.
    """
    types = [*dataclasses_]
    if not any(issubclass(kind, RecipeArguments) for kind in types):
        types.append(RecipeArguments)
    argv = sys.argv[1:] if argv is None else list(argv)
    names = {word.partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    with_steps = [name for name in ("save", "eval", "logging") if f"__{name}_steps" in names]
    argv += [f"--{name}_strategy=steps" for name in with_steps if f"__{name}_strategy" not in names]
    parsed = parse_only(*types, description=description, argv=argv, **_DEFAULTS, **defaults)
    args = next(one for one in parsed if isinstance(one, RecipeArguments))
    for name in with_steps:
        steps, strategy = getattr(args, f"{name}_steps"), getattr(args, f"{name}_strategy").value
        if strategy != "steps":
            raise ValueError(
                f"--{name}_steps {steps:g} has no effect with --{name}_strategy {strategy}: leave one of them out"
            )
    # Trainer seeds only on construction, which comes after the model is made.
    (transformers.enable_full_determinism if args.full_determinism else transformers.set_seed)(args.seed)
    prepare_output(args.output_dir, args.distributed_state, bool(args.resume_from_checkpoint), args.overwrite)
    return parsed


def parse_only(*dataclasses_: type, description: str, argv: Sequence[str] | None = None, **defaults: Any) -> tuple:
    """Parse the command line only, without seeding and without an output folder, for loops without Trainer."""
    use_cpu_if_needed()
    if not sys.stderr.isatty():  # `disable_tqdm` disables the progress bar of Trainer
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
    layout: Any = {"formatter_class": _Formatter, "usage": "%(prog)s [options]", "allow_abbrev": False}

    def refuse(message: str) -> NoReturn:
        raise ValueError(f"{message}; try --help")

    parser = HfArgumentParser(dataclasses_, description=description, **layout)
    parser.error = refuse
    parser.set_defaults(**defaults)
    *parsed, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True, look_for_args_file=False)
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        advice = did_you_mean(unknown[0].partition("=")[0], known) or " Try --help"
        raise ValueError(f"unknown option {unknown[0]!r}.{advice}")
    return tuple(parsed)


def use_cpu_if_needed() -> None:
    """Let Accelerate connect processes on the CPU, which it does only if told to."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def prepare_output(output_dir: str, state: accelerate.PartialState, resume: bool, overwrite: bool) -> None:
    """Create the output folder, and delete its checkpoints and metrics with --overwrite.

    Refused are a file, a folder that is not empty unless the run resumes or overwrites it, processes that were started
    together and are not connected, and a missing matplotlib.
    """
    check_connected(state.num_processes)
    folder = pathlib.Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir {folder} is a file: give a folder")
    if folder.is_dir() and any(folder.iterdir()) and not (resume or overwrite):
        raise ValueError(
            f"the output folder {folder} is not empty: choose another, or give --overwrite; recipes on Trainer "
            "continue the run in it with --resume_from_checkpoint True"
        )
    # All processes check the folder before the first one writes to it.
    state.wait_for_everyone()
    folder.mkdir(parents=True, exist_ok=True)
    check_picture(folder / PICTURE)
    if overwrite and not resume and state.is_local_main_process:
        for old in (*folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), *folder.glob(f"incomplete-{PREFIX_CHECKPOINT_DIR}-*")):
            shutil.rmtree(old, ignore_errors=True)
        (folder / METRICS).unlink(missing_ok=True)
    state.wait_for_everyone()


def check_connected(processes: int) -> None:
    """Raise ValueError if processes were started together, but do not know of each other."""
    started = int(os.environ.get("WORLD_SIZE", 1))
    if processes != started:
        raise ValueError(
            f"{started} processes were started, but they are not connected and each would train its own model: start "
            "them with 'accelerate launch --config_file recipes/configs/...'"
        )


def main_of(run: Callable[[], Any]) -> None:
    """Run a recipe and exit with status 0 (done), 2 (refused, with one line on stderr) or 130 (interrupted)."""
    status, message = 0, ""
    try:
        run()
    except KeyboardInterrupt:
        status, message = 130, "interrupted"
    except (ValueError, OSError) as error:
        status, message = 2, " ".join(str(error).split())
    if status:
        rank = int(os.environ.get("RANK", 0))
        print(f"error{f' in process {rank}' if rank else ''}: {message}", file=sys.stderr, flush=True)
        sys.exit(status)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.exit(0)
