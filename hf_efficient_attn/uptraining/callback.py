"""A Trainer that keeps to an up-training schedule, also when it resumes."""

import json
import pathlib
import re
import zipfile
from collections.abc import Iterable
from typing import Any

import safetensors
from torch import nn
from transformers.trainer_callback import ExportableState, TrainerCallback
from transformers.utils import logging

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.integration.learned import NAME
from hf_efficient_attn.uptraining.schedule import UptrainingSchedule
from hf_efficient_attn.uptraining.switch import check, layout_of, layouts_of, put, stands_in, switch

logger = logging.get_logger(__name__)


class UptrainingCallback(TrainerCallback, ExportableState):
    """Switches the model of a Trainer from stage to stage of a schedule.

        trainer = Trainer(model, args, ..., callbacks=[hea.UptrainingCallback(schedule)])
        trainer.train(resume_from_checkpoint=True)

    A switch comes before the first step of a stage. It is an entry of `trainer.state.log_history`, and so of
    `trainer_state.json`: {"step", "epoch", "uptraining_from", "uptraining_stage"}. A checkpoint is of the stage that
    the model was in when it was saved, and its `config.json` says of which.

    Give it to Trainer when that is made, since a checkpoint of a later stage can then be resumed: when its weights are
    loaded, the model is put into their stage. (With `model_init` Trainer makes another model later, and only stages
    that learn the same parameters can be resumed.) Checkpoints that were not finished, because the process was killed
    while it wrote them, are renamed to `incomplete-checkpoint-*` then, so that `resume_from_checkpoint=True` finds the
    last one that is whole; do not make a Trainer for a folder to which another process is still writing.

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
        self.world_size = 1
        self._hooked = False

    def state(self) -> dict[str, Any]:
        """What `trainer_state.json` keeps: the stages, and all steps that their shares are of."""
        return {
            "args": {"schedule": self.schedule.to_list()},
            "attributes": {"total_steps": self.total_steps, "world_size": self.world_size},
        }

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
        if not self._hooked:
            model.register_load_state_dict_pre_hook(self._before_loading)
            self._hooked = True
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
        given = {k.removeprefix(prefix): tuple(v.shape) for k, v in state_dict.items() if f".{NAME}." in k}
        names = {key.removeprefix(prefix) for key in state_dict}
        if given == layout_of(module) or not _is_whole(module, names):
            # Of this stage, or a part of a model, which does not tell.
            return
        layouts = layouts_of(module, self.schedule.stages)
        for stage, layout in zip(self.schedule.stages, layouts, strict=True):
            if layout == given:
                put(module, stage)
                return

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs) -> None:
        self.total_steps, self.world_size = state.max_steps, args.world_size
        self.schedule.ends(self.total_steps)
        self._check_recorded(state)
        check(model, self.schedule.stages)
        # Weights alone do not tell stages apart that learn the same. A switch that is due now comes with its step.
        self._put(model, optimizer, max(0, state.global_step - 1))

    def _check_recorded(self, state) -> None:
        """Refuse a checkpoint whose stages ended elsewhere, as far as they did end."""
        recorded = (state.stateful_callbacks or {}).get(type(self).__name__)
        recorded = recorded[0] if isinstance(recorded, list) and recorded else recorded
        if not state.global_step or not isinstance(recorded, dict):
            return
        total = recorded.get("attributes", {}).get("total_steps")
        schedule = UptrainingSchedule(recorded["args"]["schedule"])
        if total is None:
            return
        runs = ((schedule, schedule.ends(total)), (self.schedule, self.schedule.ends(self.total_steps)))
        old, new = ([(s.attention, s.settings, end) for s, end in zip(x.stages, ends, strict=True)] for x, ends in runs)
        ended = [[stage for stage in stages if stage[2] < state.global_step] for stages in (old, new)]
        under_way = [stages[len(done)][:2] for stages, done in zip((old, new), ended, strict=True)]
        if ended[0] != ended[1] or under_way[0] != under_way[1]:
            raise UnsupportedAttentionError(
                f"the checkpoint was trained {state.global_step} steps with stages that end at {schedule.ends(total)}, "
                f"and they now end at {self.schedule.ends(self.total_steps)}: resume with the same stages and as many "
                "steps in all, or give their ends as numbers of steps"
            )

    def _put(self, model, optimizer, step: int) -> dict[str, Any] | None:
        stage = self.schedule.stages[self.schedule.index(step, self.total_steps)]
        return None if stands_in(model, stage) else switch(model, optimizer, stage, step)

    def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs) -> None:
        record = self._put(model, optimizer, state.global_step)
        if record is not None:
            entry = {"uptraining_from": record["from"], "uptraining_stage": record["to"]}
            state.log_history.append({**entry, "epoch": state.epoch, "step": state.global_step})

    def on_train_end(self, args, state, control, model=None, **kwargs) -> None:
        # With load_best_model_at_end the weights may be of another stage than the last.
        best = getattr(state, "best_global_step", None)
        if args.load_best_model_at_end and state.best_model_checkpoint is not None and best:
            stage = self.schedule.stages[self.schedule.index(best - 1, self.total_steps)]
            if not stands_in(model, stage):
                switch(model, None, stage, best)


def set_unfinished_aside(folder: pathlib.Path) -> list[pathlib.Path]:
    """Rename checkpoints in a Trainer's output folder that are not whole to `incomplete-checkpoint-*`.

    A process that is killed while it saves leaves a folder with some files missing or cut off, and Trainer resumes from
    the one of the highest number whatever is in it. Nothing is deleted.

    Returns:
        where they are now.
    """
    if not folder.is_dir():
        return []
    moved = []
    for path in sorted(folder.iterdir()):
        if not re.fullmatch(r"checkpoint-\d+", path.name) or not path.is_dir():
            continue
        reason = why_unfinished(path)
        if reason is None:
            continue
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

    `trainer_state.json` is written last by the first process, the random state of every other one on its own.
    """
    state = checkpoint / "trainer_state.json"
    try:
        recorded = json.loads(state.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "no trainer_state.json"
    except ValueError:
        return "trainer_state.json is cut off"
    weights = sorted(checkpoint.glob("*.safetensors"))
    others = sorted(path for ending in ("pt", "pth", "bin") for path in checkpoint.glob(f"*.{ending}"))
    torn = [path for path in weights if not _is_safetensors(path)] + [p for p in others if not zipfile.is_zipfile(p)]
    if torn:
        return f"{torn[0].name} is cut off"
    ours = (recorded.get("stateful_callbacks") or {}).get("UptrainingCallback")
    world = ours.get("attributes", {}).get("world_size", 1) if isinstance(ours, dict) else 1
    there = {path.name for path in checkpoint.glob("rng_state*.pth")}
    missing = [f"rng_state_{i}.pth" for i in range(world) if f"rng_state_{i}.pth" not in there]
    return f"no {missing[0]}" if there and world > 1 and missing else None


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
