"""A Trainer callback that follows an up-training schedule, also after a resumption."""

import json
import os
import pathlib
import re
import time
import zipfile
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.modeling_utils import PreTrainedModel
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerState
from transformers.trainer_utils import get_last_checkpoint
from transformers.training_args import TrainingArguments
from transformers.utils import logging

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.capture import Batch
from hf_efficient_attn.integration.learned import NAME
from hf_efficient_attn.training.distillation import DistillationOptions
from hf_efficient_attn.training.schedule import UptrainingSchedule
from hf_efficient_attn.training.stage_distillation import StageDistillation, log_entries, training_batches
from hf_efficient_attn.training.switch import (
    apply_stage,
    check_stages,
    is_in_stage,
    learned_layout,
    plain_name,
    stage_layouts,
)

logger = logging.get_logger(__name__)

TRAINER_STATE = "trainer_state.json"
# Seconds to wait for the random states that other processes write. They never appear if the processes share no folder.
_PATIENCE = 60.0


class UptrainingCallback(TrainerCallback, ExportableState):
    """Switches the model of a Trainer from stage to stage of a schedule.

        trainer = Trainer(model, args, ..., callbacks=[hea.UptrainingCallback(schedule)])
        trainer.train(resume_from_checkpoint=True)

    A switch happens before the first step of a stage. It is logged in `trainer.state.log_history`, and so in
    `trainer_state.json`: {"step", "epoch", "uptraining_from", "uptraining_stage"}. A checkpoint contains the model in
    the stage of its step, and its `config.json` names that stage.

    A stage with "distill" is distilled at its switch, and the first stage when training begins. The entry of the log
    then also has "distillation_steps", "distillation_first_loss" and "distillation_last_loss"; that of the first stage
    has "distilled_stage" in place of the names of a switch. A training that is resumed from a checkpoint before the
    switch repeats the distillation bit for bit.

    Pass the callback to the constructor of Trainer. Then a checkpoint of a later stage can be resumed: the model
    switches to the stage of the weights when these are loaded. (With `model_init`, Trainer creates the model later, and
    only stages that learn the same parameters can be resumed.) The constructor also renames the latest checkpoints to
    `incomplete-checkpoint-*` if a process was killed while it saved or deleted them, so that
    `resume_from_checkpoint=True` finds the last complete one. Do not create a Trainer for a folder to which another
    process is still writing.

    Args:
        schedule: an `UptrainingSchedule`, or its stages.
        distillation_batches: for stages with "distill", batches as for `hea.distill`, which must be the same whenever
            they are read. By default samples of the training set are read by their index and collated as in training.
            The training itself reads its data as without distillation, and the global random states stay as they
            are. A data set or collator with a random generator of its own needs batches here.
        distillation_options: the learning rate of the distillation and others; the default suits most models.

    Raises:
        UnsupportedAttentionError: when the Trainer is created or before the first step, if the model cannot take one of
            the stages, its wrappers cannot follow a switch, a stage has no step, the checkpoint was trained with other
            stages, or a stage is to be distilled and the training set can only be iterated.
    """

    def __init__(
        self,
        schedule: "UptrainingSchedule | Iterable[Any]",
        distillation_batches: Iterable[Batch] | None = None,
        distillation_options: DistillationOptions | None = None,
    ) -> None:
        self.schedule = UptrainingSchedule(schedule, getattr(schedule, "total_steps", None))
        self.total_steps: int | None = None
        self.distillation_batches, self.distillation_options = distillation_batches, distillation_options
        # Remains true if Trainer makes the callback again from `state`, which cannot hold batches.
        self.has_own_distillation = distillation_batches is not None or distillation_options is not None
        self._distillation: StageDistillation | None = None
        self._hook: Any = None
        self._folder = pathlib.Path()
        self._random_states: list[str] = []

    def state(self) -> dict[str, Any]:
        """The entry in `trainer_state.json`: the stages, the total number of steps, and the files of the checkpoint."""
        attributes = {"total_steps": self.total_steps, "has_own_distillation": self.has_own_distillation}
        return {
            "args": {"schedule": self.schedule.to_list()},
            "attributes": {**attributes, "files": self._saved_files()},
        }

    def _saved_files(self) -> dict[str, int]:
        """Names and sizes of the files of the checkpoint that is being saved.

        Trainer calls `state` when this process has written everything else. The random states of the other processes
        may still be missing. This waits for them, because Trainer deletes older checkpoints next, and the new one is
        not complete without them.
        """
        if not self._folder.name or not self._folder.is_dir():
            return {}
        deadline = time.monotonic() + _PATIENCE
        while not all(zipfile.is_zipfile(self._folder / name) for name in self._random_states):
            if time.monotonic() > deadline:
                logger.warning(
                    f"{self._folder.name} lacks the random states of other processes. If the processes run on several "
                    "machines without a shared folder, set save_on_each_node=True"
                )
                self._random_states = []
            time.sleep(0.01)
        files = [path for path in sorted(self._folder.rglob("*")) if path.is_file() and path.name != TRAINER_STATE]
        return {path.relative_to(self._folder).as_posix(): path.stat().st_size for path in files}

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Check the stages, rename incomplete checkpoints, and start in the first stage."""
        model, stages = kwargs["model"], self.schedule.stages
        refusal = None
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            refusal = "FSDP and DeepSpeed shard the parameters that exist at the start"
        elif args.n_gpu > 1:
            refusal = "a change of the parameters is not tested in one process for several GPUs (DataParallel)"
        check_stages(model, stages, refusal)
        with args.main_process_first(local=args.save_on_each_node, desc="rename incomplete checkpoints"):
            if args.should_save:
                rename_incomplete_checkpoints(pathlib.Path(str(args.output_dir)))
        if self._hook is not None:
            # The callback belonged to another Trainer, perhaps with another model.
            self._hook.remove()
        self._hook = model.register_load_state_dict_pre_hook(self._before_loading)
        if not any(is_in_stage(model, stage) for stage in stages[1:]):
            self.schedule.advance(model, None, 0)

    def _before_loading(
        self, module: PreTrainedModel, state_dict: dict[str, torch.Tensor], prefix: str, *args: Any
    ) -> None:
        """Switch the model to the stage of the weights that are about to be loaded, if they tell which one it is."""
        own = {name for name in module.state_dict() if f".{NAME}." not in name}
        _use_own_names(module, own, state_dict, prefix)
        names = {key.removeprefix(prefix): tuple(value.shape) for key, value in state_dict.items()}
        given = {plain_name(name): shape for name, shape in names.items() if f".{NAME}." in name}
        if given == learned_layout(module) or 2 * len(own & names.keys()) < len(own):
            # The weights fit already, or they are a part of a model, such as adapters, which does not tell the stage.
            return
        stages = self.schedule.stages
        for stage, layout in zip(stages, stage_layouts(module, stages), strict=True):
            if layout == given:
                apply_stage(module, stage)
                return
        for name, shape in given.items():
            raise UnsupportedAttentionError(
                f"the weights contain {name} of shape {shape}, which none of the stages "
                f"{', '.join(stage.attention for stage in stages)} learns: resume with the stages and hyperparameters "
                "of the original training"
            )

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Check the stages against the checkpoint and the wrapped model, and switch to the stage to resume in."""
        self.schedule.total_steps = self.total_steps = state.max_steps
        self._random_states = _random_states(args)
        self.schedule.ends(state.max_steps)
        self._check_recorded_stages(state)
        # Trainer updates only the callback states that the checkpoint has, and fails for others.
        cast("dict[str, Any]", state.stateful_callbacks).setdefault(type(self).__name__, self.state())
        model, optimizer = kwargs["model"], kwargs.get("optimizer")
        check_stages(model, self.schedule.stages)
        if self.schedule.still_distilled(state.global_step):
            self._distillation = self._make_distillation(args, kwargs.get("train_dataloader"))
        if state.global_step > 0:
            # Weights do not distinguish stages that learn the same parameters. A switch that is due at this very step
            # is made, and logged, by `on_step_begin`. The weights of an earlier one are loaded, so not distilled again.
            self.schedule.advance(model, optimizer, state.global_step - 1)
            return
        record = self.schedule.advance(model, optimizer, 0, self._distillation)
        if record is not None and record["distillation"] is not None:
            state.log_history.append({**log_entries(record), "epoch": state.epoch, "step": 0})

    def _make_distillation(self, args: TrainingArguments, train_dataloader: Any) -> StageDistillation:
        """How the stages that are still to begin are distilled."""
        batches = self.distillation_batches
        if self.has_own_distillation and batches is None and self.distillation_options is None:
            raise UnsupportedAttentionError(
                "Trainer made UptrainingCallback again from the checkpoint, which holds no distillation_batches and "
                "no distillation_options: resume with restore_callback_states_from_checkpoint=False"
            )
        if batches is None:
            size, processes = args.per_device_train_batch_size, (args.process_index, args.world_size)
            batches = training_batches(train_dataloader.dataset, train_dataloader.collate_fn, size, *processes)
        return StageDistillation(batches, self.distillation_options or DistillationOptions())

    def _check_recorded_stages(self, state: TrainerState) -> None:
        """Refuse a checkpoint that was trained with other stages up to its step."""
        recorded = cast("dict[str, Any]", state.stateful_callbacks).get(type(self).__name__)
        recorded = recorded[-1] if isinstance(recorded, list) else recorded
        if not state.global_step or not recorded or not (total := recorded["attributes"].get("total_steps")):
            return
        old, new = UptrainingSchedule(recorded["args"]["schedule"], total), self.schedule
        for step in {0, *old.ends(total), *new.ends(state.max_steps)}:
            was, now = old.stages[old.index(step)], new.stages[new.index(step)]
            if step >= state.global_step or replace(was, end=None) == replace(now, end=None):
                continue
            before, after = (
                ", ".join(f"{s.attention} to step {end}" for s, end in zip(x.stages, x.ends(n), strict=True))
                for x, n in ((old, total), (new, state.max_steps))
            )
            other = " with other hyperparameters" if before == after else ""
            raise UnsupportedAttentionError(
                f"the checkpoint was trained for {state.global_step} steps with the stages {before}, and now they are "
                f"{after}{other}: resume with the same stages and the same total number of steps, or specify the ends "
                "as numbers of steps"
            )

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Switch before the first step of a stage."""
        record = self.schedule.advance(kwargs["model"], kwargs.get("optimizer"), state.global_step, self._distillation)
        if record is not None:
            state.log_history.append({**log_entries(record), "epoch": state.epoch, "step": state.global_step})

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Remember the folder of a checkpoint of this step."""
        self._folder = pathlib.Path(str(args.output_dir), f"checkpoint-{state.global_step}")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Switch to the stage of the best model if Trainer has loaded that."""
        # `best_global_step` may be a step that was not saved.
        best = re.search(r"checkpoint-(\d+)$", state.best_model_checkpoint or "")
        if args.load_best_model_at_end and best:
            self.schedule.advance(kwargs["model"], None, int(best[1]) - 1)


def _random_states(args: TrainingArguments) -> list[str]:
    """Names of the files of random states that all processes write to the folder of this process."""
    if args.world_size <= 1 or args.save_only_model:
        return []
    ranks = range(args.world_size)
    if args.save_on_each_node:
        first = args.process_index - args.local_process_index
        ranks = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    return [f"rng_state_{rank}.pth" for rank in ranks]


def _use_own_names(module: PreTrainedModel, own: set[str], state_dict: dict[str, torch.Tensor], prefix: str) -> None:
    """Rename, in place, weights that `save_pretrained` stored under names of older Transformers versions (as for ViT).

    `from_pretrained` accepts both. Resumption in Trainer loads a file as it is, warns that all layers are missing, and
    continues with the current weights.
    """
    renamings = [x for x in get_model_conversion_mapping(module) if isinstance(x, WeightRenaming)]
    renamed = {key: rename_source_key(key.removeprefix(prefix), renamings, [])[0] for key in state_dict}
    names = set(renamed.values())
    if len(names) == len(renamed) and len(names & own) > sum(key.removeprefix(prefix) in own for key in renamed):
        for old, new in renamed.items():
            state_dict[prefix + new] = state_dict.pop(old)


def rename_incomplete_checkpoints(folder: pathlib.Path) -> None:
    """Rename incomplete checkpoints at the end of a Trainer's output folder to `incomplete-checkpoint-*`.

    A process that is killed while it saves or deletes a checkpoint leaves a folder with missing or truncated files.
    Trainer resumes from the checkpoint with the highest number without looking at its files. This function renames the
    latest checkpoints until it finds a complete one. Nothing is deleted.
    """
    while folder.is_dir() and (last := get_last_checkpoint(str(folder))) is not None:
        path = pathlib.Path(last)
        reason = why_incomplete(path)
        if reason is None:
            return
        numbers = ("", *(f"-{number}" for number in range(2, 1000)))
        targets = (path.with_name(f"incomplete-{path.name}{number}") for number in numbers)
        target = next(target for target in targets if not target.exists())
        path.rename(target)
        logger.warning(f"{path.name} is incomplete ({reason}). It was renamed to {target.name}")


def why_incomplete(checkpoint: pathlib.Path) -> str | None:
    """What is missing in a checkpoint of Trainer; None if it is complete.

    Trainer writes `trainer_state.json` last, but other processes may still be writing their random states. With
    `UptrainingCallback` it lists the names and sizes of all other files.
    """
    try:
        recorded = json.loads((checkpoint / TRAINER_STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"no {TRAINER_STATE}"
    except ValueError:
        return f"{TRAINER_STATE} is truncated"
    for states in (recorded.get("stateful_callbacks") or {}).values():
        for state in states if isinstance(states, list) else [states]:
            for name, size in (state.get("attributes", {}).get("files") or {}).items():
                path = checkpoint / name
                if not path.is_file():
                    return f"no {name}"
                if path.stat().st_size != size:
                    return f"{name} is truncated"
    truncated = [path for path in sorted(checkpoint.glob("rng_state*.pth")) if not zipfile.is_zipfile(path)]
    return f"{truncated[0].name} is truncated" if truncated else None
