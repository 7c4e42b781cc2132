"""A Trainer that keeps to an up-training schedule, also when it resumes."""

import contextlib
import json
import os
import pathlib
import re
import time
import zipfile
from collections.abc import Iterable
from typing import Any

import safetensors
from torch import nn
from transformers.trainer_callback import ExportableState, TrainerCallback
from transformers.utils import logging

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.learned import NAME
from hf_efficient_attn.training.schedule import UptrainingSchedule
from hf_efficient_attn.training.switch import check, layout_of, layouts_of, plain_name, put, stands_in, switch

logger = logging.get_logger(__name__)

_STATE = "trainer_state.json"
# Seconds that a process which has saved waits for the random states of the others: a folder that they do not share
# never has them.
_PATIENCE = 60.0


class UptrainingCallback(TrainerCallback, ExportableState):
    """Switches the model of a Trainer from stage to stage of a schedule.

        trainer = Trainer(model, args, ..., callbacks=[hea.UptrainingCallback(schedule)])
        trainer.train(resume_from_checkpoint=True)

    A switch comes before the first step of a stage. It is an entry of `trainer.state.log_history`, and so of
    `trainer_state.json`: {"step", "epoch", "uptraining_from", "uptraining_stage"}. A checkpoint is of the stage that
    the model was in when it was saved, and its `config.json` says of which.

    Give it to Trainer when that is made, since a checkpoint of a later stage can then be resumed: when its weights are
    loaded, the model is put into their stage. (With `model_init` Trainer makes another model later, and only stages
    that learn the same parameters can be resumed.) The last checkpoints, where a process was killed while it wrote
    or deleted them, are renamed to `incomplete-checkpoint-*` then, so that `resume_from_checkpoint=True` finds the last
    one that is whole; do not make a Trainer for a folder to which another process is still writing.

    Args:
        schedule: an `UptrainingSchedule`, or its stages.

    Raises:
        UnsupportedAttentionError: when the Trainer is made, or before the first step, if the model cannot take one of
            the stages, its wrappers cannot follow a switch, the schedule has a stage without a step, or the checkpoint
            was trained with stages that ended elsewhere.
    """

    def __init__(self, schedule: "UptrainingSchedule | Iterable") -> None:
        self.schedule = UptrainingSchedule(schedule, getattr(schedule, "total_steps", None))
        self.total_steps: int | None = None
        self.files: dict[str, int] = {}
        self._hook = None
        self._output_dir: str | None = None
        self._step = 0
        self._random_states: list[str] = []
        self._patience = _PATIENCE

    def state(self) -> dict[str, Any]:
        """What `trainer_state.json` keeps: the stages, all steps that their shares are of, and the files beside it."""
        self.files = self._saved()
        return {
            "args": {"schedule": self.schedule.to_list()},
            "attributes": {"total_steps": self.total_steps, "files": self.files},
        }

    def _saved(self) -> dict[str, int]:
        """Names and sizes of a checkpoint's files: Trainer asks for them when it has written all else.

        All but the random states of other processes. They are waited for, since older checkpoints are deleted next, and
        without them this one is not whole.
        """
        if self._output_dir is None:
            return {}
        folder = pathlib.Path(self._output_dir, f"checkpoint-{self._step}")
        if not folder.is_dir():
            return {}
        end = time.monotonic() + self._patience
        while not all(zipfile.is_zipfile(folder / name) for name in self._random_states):
            if time.monotonic() > end:
                logger.warning(
                    f"{folder.name} lacks random states of other processes. With processes on several machines that "
                    "share no folder, set save_on_each_node=True"
                )
                self._patience = 0.0
                break
            time.sleep(0.01)
        there = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != _STATE]
        return {path.relative_to(folder).as_posix(): path.stat().st_size for path in there}

    def on_init_end(self, args, state, control, model=None, **kwargs) -> None:
        check(model, self.schedule.stages)
        if args.n_gpu > 1 and any(layouts_of(model, self.schedule.stages)):
            raise UnsupportedAttentionError(
                "UptrainingCallback: one process for several GPUs (DataParallel) cannot run stages with learned "
                "parameters; start one process a GPU with 'accelerate launch'"
            )
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            self._refuse_changing_layouts(model)
        with args.main_process_first(local=args.save_on_each_node, desc="look for unfinished checkpoints"):
            if args.should_save:
                set_unfinished_aside(pathlib.Path(args.output_dir))
        if self._hook is not None:
            # Of a Trainer before, whose model may have been another one.
            self._hook.remove()
        self._hook = model.register_load_state_dict_pre_hook(self._before_loading)
        if not any(stands_in(model, stage) for stage in self.schedule.stages):
            put(model, self.schedule.stages[0])

    def _refuse_changing_layouts(self, model: nn.Module) -> None:
        layouts = layouts_of(model, self.schedule.stages)
        if any(layout != layouts[0] for layout in layouts):
            names = ", ".join(stage.attention for stage in self.schedule.stages)
            raise UnsupportedAttentionError(
                f"FSDP and DeepSpeed shard the parameters that there are at the start, and the stages {names} do not "
                "learn the same parameters: use stages that do, or train with DistributedDataParallel"
            )

    def _before_loading(self, module, state_dict, prefix, *args) -> None:
        """Put the model into the stage that the weights to be loaded are of, as far as they tell."""
        _use_own_names(module, state_dict, prefix)
        given = {plain_name(k.removeprefix(prefix)): tuple(v.shape) for k, v in state_dict.items() if f".{NAME}." in k}
        names = {key.removeprefix(prefix) for key in state_dict}
        if given == layout_of(module) or not _is_whole(module, names):
            # Of this stage, or a part of a model, which does not tell.
            return
        layouts = layouts_of(module, self.schedule.stages)
        for stage, layout in zip(self.schedule.stages, layouts, strict=True):
            if layout == given:
                put(module, stage)
                return
        # What layers share may be there under the names of each.
        kinds = {name.rpartition(".")[2] for name in given}
        fits = [layout for layout in layouts if {name.rpartition(".")[2] for name in layout} == kinds]
        if given and not any(layout.items() <= given.items() for layout in fits):
            name, shape = next(iter(given.items()))
            raise UnsupportedAttentionError(
                f"the weights hold {name} of shape {shape}, and none of the stages "
                f"{', '.join(stage.attention for stage in self.schedule.stages)} learns that: resume with the stages "
                "and hyperparameters that they were trained with"
            )

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs) -> None:
        self.total_steps = state.max_steps
        self._output_dir, self._step, self._random_states = args.output_dir, state.global_step, _random_states(args)
        self.schedule.ends(self.total_steps)
        self._check_recorded(state)
        # Trainer saves the state of those callbacks alone that the checkpoint had, and fails at the others.
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        check(model, self.schedule.stages)
        # Weights alone do not tell stages apart that learn the same. A switch that is due now comes with its step.
        self._put(model, optimizer, max(0, state.global_step - 1))

    def _check_recorded(self, state) -> None:
        """Refuse a checkpoint whose stages ended elsewhere, as far as they did end."""
        recorded = (state.stateful_callbacks or {}).get(type(self).__name__)
        recorded = recorded[-1] if isinstance(recorded, list) and recorded else recorded
        if not state.global_step or not isinstance(recorded, dict):
            return
        total = recorded.get("attributes", {}).get("total_steps")
        schedule = UptrainingSchedule(recorded["args"]["schedule"])
        if total is None:
            return
        runs = ((schedule, schedule.ends(total)), (self.schedule, self.schedule.ends(self.total_steps)))
        old, new = ([(s.attention, s.settings, end) for s, end in zip(x.stages, ends, strict=True)] for x, ends in runs)
        # The last stage ends with training, of whatever length.
        ended = [[stage for stage in stages[:-1] if stage[2] < state.global_step] for stages in (old, new)]
        under_way = [stages[len(done)][:2] for stages, done in zip((old, new), ended, strict=True)]
        if ended[0] != ended[1] or under_way[0] != under_way[1]:
            before, now = (", ".join(f"{name} to step {end}" for name, _, end in stages) for stages in (old, new))
            other = " with other hyperparameters" if before == now else ""
            raise UnsupportedAttentionError(
                f"the checkpoint was trained {state.global_step} steps with the stages {before}, and they are now "
                f"{now}{other}: resume with the same stages and as many steps in all, or give their ends as numbers of "
                "steps"
            )

    def _put(self, model, optimizer, step: int) -> dict[str, Any] | None:
        stage = self.schedule.stages[self.schedule.index(step, self.total_steps)]
        return None if stands_in(model, stage) else switch(model, optimizer, stage, step)

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs) -> None:
        record = self._put(model, optimizer, state.global_step)
        if record is not None:
            entry = {"uptraining_from": record["from"], "uptraining_stage": record["to"]}
            state.log_history.append({**entry, "epoch": state.epoch, "step": state.global_step})

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self._step = state.global_step

    def on_train_end(self, args, state, control, model=None, **kwargs) -> None:
        # With load_best_model_at_end the weights may be of another stage than the last: of the best step that was
        # saved, where `best_global_step` may be one that was not.
        best = re.search(r"checkpoint-(\d+)$", state.best_model_checkpoint or "")
        if args.load_best_model_at_end and best:
            step = int(best[1])
            stage = self.schedule.stages[self.schedule.index(step - 1, self.total_steps)]
            if not stands_in(model, stage):
                switch(model, None, stage, step)


def _random_states(args) -> list[str]:
    """The files of random states that other processes write into the folder to which this one saves."""
    if args.world_size <= 1 or args.save_only_model:
        return []
    ranks = range(args.world_size)
    if args.save_on_each_node:
        first = args.process_index - args.local_process_index
        ranks = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    return [f"rng_state_{rank}.pth" for rank in ranks]


def set_unfinished_aside(folder: pathlib.Path) -> list[pathlib.Path]:
    """Rename the last checkpoints in a Trainer's output folder to `incomplete-checkpoint-*`, down to one that is whole.

    A process that is killed while it saves or deletes a checkpoint leaves a folder with some files missing or cut off,
    and Trainer resumes from the one of the highest number whatever is in it. Nothing is deleted.

    Returns:
        where they are now.
    """
    if not folder.is_dir():
        return []
    matches = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in folder.iterdir() if path.is_dir()]
    moved = []
    for _, path in sorted(((int(match[1]), path) for match, path in matches if match), reverse=True):
        reason = why_unfinished(path)
        if reason is None:
            break
        aside = path.with_name(f"incomplete-{path.name}")
        number = 1
        while aside.exists():
            number += 1
            aside = path.with_name(f"incomplete-{path.name}-{number}")
        path.rename(aside)
        logger.warning(f"{path.name} is not whole ({reason}), and was renamed to {aside.name}")
        moved.append(aside)
    return moved


def why_unfinished(checkpoint: pathlib.Path) -> str | None:
    """What is missing in a checkpoint of Trainer; None where all is there.

    `trainer_state.json` is written last, and has the names and sizes of all other files if `UptrainingCallback` was
    there. Otherwise those that are there are looked at.
    """
    try:
        recorded = json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"no {_STATE}"
    except ValueError:
        return f"{_STATE} is cut off"
    for name, size in _files_of(recorded).items():
        path = checkpoint / name
        if not path.is_file():
            return f"no {name}"
        if path.stat().st_size != size:
            return f"{name} is cut off"
    weights = sorted(checkpoint.glob("*.safetensors"))
    others = sorted(path for ending in ("pt", "pth", "bin") for path in checkpoint.glob(f"*.{ending}"))
    torn = [path for path in weights if not _is_safetensors(path)] + [p for p in others if not zipfile.is_zipfile(p)]
    return f"{torn[0].name} is cut off" if torn else None


def _files_of(recorded: dict[str, Any]) -> dict[str, int]:
    """What `UptrainingCallback.state` wrote of a checkpoint's files."""
    for states in (recorded.get("stateful_callbacks") or {}).values():
        for state in states if isinstance(states, list) else [states]:
            files = state.get("attributes", {}).get("files") if isinstance(state, dict) else None
            if files:
                return files
    return {}


def _use_own_names(module: nn.Module, state_dict: dict, prefix: str) -> None:
    """Rename weights, in place, that `save_pretrained` gave the names of an older Transformers, as it does with ViT.

    `from_pretrained` knows both. Trainer's resumption loads a file as it is, says in a warning that all layers are
    missing, and goes on with those that the model had.
    """
    names = {key.removeprefix(prefix) for key in state_dict}
    if _is_whole(module, names):
        return
    with contextlib.suppress(ImportError):
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key

        renamings = [x for x in get_model_conversion_mapping(module) if isinstance(x, WeightRenaming)]
        renamed = {key: rename_source_key(key.removeprefix(prefix), renamings, [])[0] for key in state_dict}
        if _is_whole(module, set(renamed.values())) and len(set(renamed.values())) == len(renamed):
            for old, new in renamed.items():
                state_dict[prefix + new] = state_dict.pop(old)


def _is_safetensors(path: pathlib.Path) -> bool:
    """Whether the file is as long as its header says."""
    try:
        with safetensors.safe_open(path, framework="pt"):
            return True
    except (OSError, safetensors.SafetensorError):
        return False


def _is_whole(module: nn.Module, names: set[str]) -> bool:
    """Whether weights of these names are a whole model's but for what attention learned; tied ones are there once."""
    groups: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if f".{NAME}." not in name:
            groups.setdefault(id(parameter), set()).add(name)
    return all(group & names for group in groups.values())
