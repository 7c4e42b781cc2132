"""A Trainer callback that follows an up-training schedule, also after a resumption."""

import itertools
import json
import pathlib
import re
import zipfile
from collections.abc import Iterable
from functools import partial
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.capture import Batch
from hf_efficient_attn.integration.settings import EXACT, EfficientAttentionConfig
from hf_efficient_attn.training import switch
from hf_efficient_attn.training.distillation import DistillationOptions
from hf_efficient_attn.training.schedule import UptrainingSchedule

logger = logging.get_logger(__name__)
# The key in `trainer_state.json` of the settings of attention in the step of the checkpoint; null for exact.
_SETTINGS = "uptraining_settings"


class UptrainingCallback(TrainerCallback):
    """Switches the model of a Trainer from stage to stage of a schedule.

        trainer = Trainer(model, args, ..., callbacks=[hea.UptrainingCallback(schedule)])
        trainer.train(resume_from_checkpoint=True)

    A switch happens before the first step of a stage. It is logged in `trainer.state.log_history`, and so in
    `trainer_state.json`: {"step", "epoch", "uptraining_from", "uptraining_stage"}. A checkpoint contains the model in
    the stage of its step, and its `config.json` names that stage.

    A stage with "distill" is distilled at its switch. The entry of the log then also has "distillation_steps",
    "distillation_first_loss" and "distillation_last_loss".

    Pass the callback to the constructor of Trainer, and resume with the same stages: the model switches to the stage of
    the weights when these are loaded. (With `model_init`, Trainer creates the model later, and only stages that learn
    the same parameters can be resumed.) The constructor also renames the latest checkpoints to
    `incomplete-checkpoint-*` if a process was killed while it saved them, so that `resume_from_checkpoint=True` finds
    the last complete one. Do not create a Trainer for a folder to which another process is still writing.

    Args:
        schedule: an `UptrainingSchedule`, or its stages.
        distillation_batches: for stages with "distill", batches as for `hea.distill`, which must be the same whenever
            they are read. By default samples of the training set are read by their index and collated as in training,
            whose order of the data and random states stay as they are. A data set or collator with a random generator
            of its own needs batches here.
        distillation_options: the learning rate of the distillation and others; the default suits most models.

    Raises:
        UnsupportedAttentionError: when the Trainer is created or before the first step, if the model cannot take one of
            the stages, its wrappers cannot follow a switch, a stage has no step, the checkpoint has learned parameters
            of none of the stages or is in another stage than its step, because the number of steps has changed, or a
            stage is to be distilled and the training set can only be iterated.
    """

    def __init__(
        self,
        schedule: "UptrainingSchedule | Iterable[Any]",
        distillation_batches: Iterable[Batch] | None = None,
        distillation_options: DistillationOptions | None = None,
    ) -> None:
        self.schedule = UptrainingSchedule(schedule, getattr(schedule, "total_steps", None))
        self.distillation_batches, self.distillation_options = distillation_batches, distillation_options
        self._hook: Any = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Check the stages, rename incomplete checkpoints, and start in the first stage."""
        model, stages = kwargs["model"], self.schedule.stages
        switch.check_stages(model, stages, is_fixed=bool(args.fsdp or args.deepspeed or args.n_gpu > 1))
        with args.main_process_first(local=args.save_on_each_node, desc="rename incomplete checkpoints"):
            if args.should_save:
                rename_incomplete_checkpoints(pathlib.Path(str(args.output_dir)))
        self._follow(model)
        optimizer = kwargs.get("optimizer")  # one that the user has made
        if not any(switch.is_in_stage(model, stage) for stage in stages):
            switch.switch_stage(model, optimizer, stages[0], 0)
        if optimizer is not None:
            # Accelerate takes the state when training begins, after a checkpoint's weights are loaded.
            hook = partial(switch.update_optimizer, dict(model.named_parameters()), model)
            optimizer.register_state_dict_pre_hook(hook)

    def _follow(self, model: nn.Module, *, is_over: bool = False) -> None:
        """Let the model switch to the stage of weights that are loaded; before the training is over, refuse others."""
        if self._hook is not None:
            self._hook.remove()
        # Copies of the model contain the hook, which has no data of the training.
        hook = partial(switch.before_loading, self.schedule.stages, is_over)
        self._hook = model.register_load_state_dict_pre_hook(hook)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Check the stages against the wrapped model, and switch to the stage to resume in."""
        schedule, model = self.schedule, kwargs["model"]
        self._follow(model)  # with `model_init` it is another one than at the start
        schedule.total_steps = state.max_steps
        schedule.ends(state.max_steps)
        self._batches = self.distillation_batches
        if stages := schedule.distilled(state.global_step):
            if self._batches is None:
                loader = kwargs["train_dataloader"]
                given = loader.dataset, loader.collate_fn, args.per_device_train_batch_size
                self._batches = switch.training_batches(*given, args.process_index, args.world_size)
            switch.check_distillation(stages, self._batches, self.distillation_options)
        if state.global_step:
            self._check_stage(pathlib.Path(str(args.output_dir)), state)
            # Weights do not distinguish stages that learn the same parameters. A switch that is due at this very step
            # is made, and logged, by `on_step_begin`. The weights of an earlier one are loaded, so not distilled again.
            schedule.step(model, None, state.global_step)

    def _check_stage(self, folder: pathlib.Path, state: Any) -> None:  # Transformers annotates the callbacks as a list
        """Refuse stages and a number of steps by which the checkpoint would have other attention than it had."""
        stages = self.schedule.stages
        step = state.global_step
        known = state.stateful_callbacks
        now = stages[self.schedule.index(step - 1)]
        config = folder / f"checkpoint-{step}" / "config.json"
        logged = [entry["uptraining_stage"] for entry in state.log_history if "uptraining_stage" in entry]
        if _SETTINGS not in known and config.is_file():  # of an earlier version, or of a training without stages
            known = {_SETTINGS: json.loads(config.read_text(encoding="utf-8")).get("efficient_attention")}
        was: Any = [stages[0].attention, *logged][-1]
        if _SETTINGS in known:
            was = known[_SETTINGS] and EfficientAttentionConfig.from_dict(known[_SETTINGS])
        new: Any = now.settings if _SETTINGS in known else now.attention
        if was != new:
            was, new = (x.to_dict(defaults=False) if hasattr(x, "to_dict") else x or EXACT for x in (was, new))
            raise UnsupportedAttentionError(
                f"step {step} was trained with {was!r}, but of {state.max_steps} steps it belongs to {new!r}: resume "
                "with the stages and the number of steps of the original training. To train longer, give the ends of "
                "the stages as numbers of steps"
            )

    def on_step_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        """Switch before the first step of a stage."""
        given = kwargs["model"], kwargs["optimizer"], state.global_step
        record = self.schedule.step(*given, self._batches, self.distillation_options)
        settings = self.schedule.stages[self.schedule.index(state.global_step)].settings
        state.stateful_callbacks[_SETTINGS] = settings and settings.to_dict()
        if record is not None:
            state.log_history.append({**switch.log_entries(record), "epoch": state.epoch, "step": state.global_step})

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Switch to the stage of the best model if Trainer has loaded that, and accept any weights from now on."""
        # `best_global_step` may be a step that was not saved.
        best = re.search(r"checkpoint-(\d+)$", state.best_model_checkpoint or "")
        if args.load_best_model_at_end and best:
            self.schedule.step(kwargs["model"], None, int(best[1]))
        self._follow(kwargs["model"], is_over=True)


def rename_incomplete_checkpoints(folder: pathlib.Path) -> None:
    """Rename the latest checkpoints of a Trainer's output folder until one is complete; nothing is deleted."""
    while folder.is_dir() and (last := get_last_checkpoint(str(folder))) and not is_complete(pathlib.Path(last)):
        path = pathlib.Path(last)
        numbered = (path.with_name(f"incomplete-{path.name}-{number}") for number in itertools.count(1))
        target = path.rename(next(target for target in numbered if not target.exists()))
        rest = "" if get_last_checkpoint(str(folder)) else "; no complete one is left: begin without a checkpoint"
        logger.warning(f"{path.name} is incomplete. It was renamed to {target.name}{rest}")


def is_complete(checkpoint: pathlib.Path) -> bool:
    """Whether a checkpoint of Trainer has all its files.

    Trainer writes `trainer_state.json` last, but other processes may still be writing their random states, and a run
    that was resumed from an earlier checkpoint writes into the folder of a later one.
    """
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        for path in checkpoint.glob("*.safetensors"):
            with safe_open(path, "pt"):  # compares the length of the file with its header
                pass
    except (OSError, ValueError, SafetensorError):
        return False
    return all(zipfile.is_zipfile(path) for path in checkpoint.glob("*.pt*"))  # pt and pth
