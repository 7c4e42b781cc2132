"""Distillation of a checkpoint folder into another folder, which can be interrupted and continued."""

import contextlib
import itertools
import math
import pathlib
import signal
import statistics
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from hf_efficient_attn.conversion.checkpoint import Conversion
from hf_efficient_attn.errors import UnsupportedAttentionError, refusing
from hf_efficient_attn.evaluation import capture, defaults, pictures, timing
from hf_efficient_attn.evaluation.data import Files
from hf_efficient_attn.evaluation.progress import Execution, Interrupted
from hf_efficient_attn.integration.layers import Layer
from hf_efficient_attn.io.writing import check_drawing, check_takes_files, replacing, write_results
from hf_efficient_attn.methods import make_config
from hf_efficient_attn.training import steps
from hf_efficient_attn.training.data import TrainingData, digest
from hf_efficient_attn.training.distillation import DistillationOptions, refuse_converted, stages_of
from hf_efficient_attn.training.finetuning import make_teacher

FORMAT = 1
# A state of another format cannot be continued.
FORMAT_OF_STATE = 4
_AGAIN = "--restart discards it and starts again"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What `distill_checkpoint` reads and makes, and how it trains."""

    # As in `Conversion`.
    source: str
    output: pathlib.Path
    max_length: int | None = None
    base_model: str | None = None
    force: bool = False
    allow_pickle: bool = False
    # As in `hea.distill`. `steps` is the number of steps of the first stage.
    method: str
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    layers: Sequence[Layer] | None = None
    steps: int = 300
    loss: str = "output"
    options: DistillationOptions = field(default_factory=DistillationOptions)
    # As in `TrainingData`.
    data: Files
    length: int | None = None
    batch_size: int = 4
    device: torch.device | None = None  # where PyTorch computes; None for the CPU
    restart: bool = False  # whether to discard a saved state
    write_now: bool = False  # whether to write the checkpoint from the saved state, without further training
    save_steps: int = 50  # the steps after which the state is saved, and the error is measured

    @property
    def num_batches(self) -> int:
        """The number of steps of both stages."""
        return self.steps + (self.options.finetuning.steps if self.options.finetuning else 0)

    def to_dict(self) -> dict[str, Any]:
        """How it trains, in plain values by the names of the options of `hf-efficient-attn distill`."""
        second = self.options.finetuning
        return {
            **{name: getattr(self, name) for name in ("steps", "loss", "length", "batch_size")},
            **{name: getattr(self.options, name) for name in ("learning_rate", "seed")},
            **{f"finetune_{name}": getattr(second, name, None) for name in ("steps", "target", "learning_rate")},
            "lora_rank": getattr(second, "lora_rank", None),
        }


def distill_checkpoint(plan: Plan, execution: Execution) -> dict[str, Any]:
    """Convert a checkpoint to a method, and train the method's learned parameters as `hea.distill` does.

    About a twentieth of the batches is held out to measure the error of each layer before and after the training. The
    state of the training is saved in the folder OUTPUT.partial. A call with the same arguments continues from there,
    bit for bit, and one with more steps in the first stage continues, too. After a fine-tuning the folder is removed at
    the end; otherwise it stays, for a call with more steps. The output is written as by `convert_saved_model`, with
    distillation.json and distillation.png, from which the model card takes a table and a figure.

    In a distributed training all processes call it. Each learns from its own part of the batches, and process 0 writes
    all files.

    Args:
        plan: the checkpoint, the data, the method, where the result goes, and how it is trained.
        execution: `on_begin` gets what is known of "distillation" before the training, `on_row` each row of "history".
            At the end of `minutes` the training is interrupted, after one step at least.

    Returns:
        The report of `convert_saved_model` (in process 0), "state", the folder of the state if it stays, else None, and
        "distillation", the contents of distillation.json. In it "resumed_at" is the step from which this call
        continued, "layers" are the errors of the layers before and after, without fine-tuning, "outputs" the losses of
        the fine-tuning on the held-out data, and "history" has for every `save_steps` the stage, the step, the mean
        loss since the row before, and the error on the held-out data.

    Raises:
        UnsupportedAttentionError: a source, a method or data that cannot be used, a method that learns nothing or
            computes inputs of this length exactly, a state of another request, or a loss that is not finite.
        Interrupted: the user, or the limit of time, interrupted the training. The state is saved. The result has
            "steps_done", "steps" (of both stages), "folder" (of the state) and "is_over" (whether the time was over).
    """
    check_drawing()
    with timing.memory_errors("give a smaller --batch-size or --length"):
        run = _CheckpointRun(plan, execution)
        with timing.use_device(run.model.device):
            run.train()
        return run.write()


class _SavedState:
    """The state in the folder OUTPUT.partial, which is read when this is made, unless the plan discards it.

    A state whose checkpoint is written serves only a training with more steps than it has; else it is as if there were
    none. A folder in which no state can be saved, and a state that cannot be read, are refused.

    Attributes:
        folder: the folder.
        saved: what `save` got; the state before the first step if there is none.
        is_longer: whether the training goes on beyond the steps of the state, before its second stage.
    """

    def __init__(self, plan: Plan, output: pathlib.Path) -> None:
        self.folder = output.with_name(f"{output.name}.partial")
        self._file = self.folder / "state.pt"
        check_takes_files(self.folder, f"the state of the training in {self.folder}")
        # Errors by stage, each (layer, name, error), rows, and the losses since the last row.
        record: dict[str, Any] = {"layers": {}, "outputs": {}, "history": [], "recent": []}
        self.saved: dict[str, Any] = {"request": None, "stages": [], "record": record, "held_out": None, "rows": 0}
        self.is_longer = False
        if plan.restart or not self._file.is_file():
            return
        with refusing(f"the state in {self.folder} cannot be read: {_AGAIN}"):
            saved = dict(torch.load(self._file, map_location="cpu", weights_only=True))
            self.is_longer = plan.steps > saved["request"]["steps"] and len(saved["stages"]) < 2
            if self.is_longer or not saved["is_written"]:
                self.saved = {name: saved[name] for name in self.saved}

    def check(self, request: Mapping[str, Any], options: Collection[str]) -> None:
        """Refuse a state of another request: plain values by names, of which `options` are those of options."""
        before = self.saved["request"] or request
        names = [
            f"--{key.replace('_', '-')} {before.get(key)}" if key in options else f"other {key}"
            for key, value in request.items()
            if before.get(key) != value and not (key == "steps" and self.is_longer)
        ]
        if names:
            raise UnsupportedAttentionError(
                f"{self.folder} holds the state of a distillation with {', '.join(names)}: repeat the command that it "
                f"began with, and it continues, also with more --steps; {_AGAIN}"
            )

    def save(self, values: Mapping[str, Any]) -> None:
        """Replace the saved state as a whole."""
        if steps.process_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._file) as draft, draft.open("wb") as file:
                torch.save(dict(values), file)
        steps.wait_for_processes()

    def remove(self) -> None:
        """Remove the saved state, and its folder unless that holds anything else."""
        if steps.process_rank() == 0:
            self._file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.folder.rmdir()
        steps.wait_for_processes()


class _CheckpointRun:
    """The work of `distill_checkpoint`, whose arguments it takes."""

    def __init__(self, plan: Plan, execution: Execution) -> None:
        self._plan, self._execution, second = plan, execution, plan.options.finetuning
        names = {name: getattr(plan, name) for name in ("max_length", "base_model", "force", "allow_pickle")}
        self._conversion = conversion = Conversion(plan.source, plan.output, **names)
        self.model, checked = (model := conversion.model), conversion.checked
        refuse_converted(model)
        conversion.extend()
        self._state = state = _SavedState(plan, conversion.place.path)
        saved = state.saved
        if plan.write_now and saved["request"] is None:
            raise UnsupportedAttentionError(f"--write-now: no unfinished state is in {state.folder}: train first")
        size = plan.length, plan.batch_size, plan.num_batches * steps.world_size()
        held_out = saved["held_out"] and range(*saved["held_out"])
        self._data = data = TrainingData(model, checked.folder, plan.data, *size, held_out)
        nn.Module.to(model, plan.device or model.device)  # the annotations of Transformers are wrong
        # The head of a language model would compute a large matrix that is not needed.
        trained = model if second and second.target == "logits" else capture.without_head(model)
        teacher = None if second is None else make_teacher(trained, second, data.batch(data.held_out[0]))
        conversion.switch(plan.method, dict(plan.hyperparameters), plan.layers)
        self._trainings = stages_of(trained, teacher, plan.steps, plan.loss, plan.options)
        self._stages: list[steps.Training] = []  # those that have begun
        self._request = self._make_request()
        inputs_of_state = {"data": data.digest(saved["rows"])} if state.is_longer else {}
        state.check({**self._request, **inputs_of_state}, plan.to_dict())
        self._saved: list[dict[str, Any]] = saved["stages"]  # the saved states of those
        self._record = saved["record"]
        self._saved_at = sum(stage["step"] for stage in self._saved) or None  # the steps that the saved state contains
        self._is_over = False
        self._about = self._describe()

    def _make_request(self) -> dict[str, Any]:
        """Plain values, by the names of options, that must be equal when the work is continued."""
        plan, checked, model = self._plan, self._conversion.checked, self.model
        return {
            "version": FORMAT_OF_STATE,
            "source": digest(repr(sorted(checked.config.items(), key=str)), *model.state_dict().values()),
            "data": self._data.digest(self._data.rows),
            "settings": repr(dict(model.config.efficient_attention or {})),
            **plan.to_dict(),
            "max_length": plan.max_length,
            "processes": steps.world_size(),
        }

    def _describe(self) -> dict[str, Any]:
        """What is known of "distillation" before the training."""
        plan, data = self._plan, self._data
        inputs = {"rows": plan.batch_size * len(data.train), "held_out": plan.batch_size * len(data.held_out)}
        return {
            "format": FORMAT,
            "source": self._conversion.checked.title,
            "attention": defaults.method_label(make_config(plan.method, **plan.hyperparameters)),
            "machine": timing.machine(self.model),
            "data": {"name": data.name, **inputs},
            "tokens": data.tokens,
            "plan": plan.to_dict(),
            "resumed_at": self._saved_at,
        }

    def _save(self, *, is_written: bool = False) -> None:
        """Replace the saved state as a whole; `is_written` says that the checkpoint has been made of it."""
        about = {"held_out": (self._data.held_out.start, self._data.held_out.stop), "rows": self._data.rows}
        stages = [stage.state_dict() for stage in self._stages]
        values = {"request": self._request, "stages": stages, "record": self._record, "is_written": is_written}
        self._state.save({**values, **about})
        self._saved_at = self._steps_done

    @property
    def _steps_done(self) -> int:
        return sum(stage.step_number for stage in self._stages)

    def train(self) -> None:
        """Train what remains of both stages, and measure the errors before and after."""
        plan, saved = self._plan, self._saved
        # With `write_now` only those that have begun.
        trainings = itertools.islice(self._trainings, len(saved) if plan.write_now else None)
        try:
            with _noting_interruption() as self._interruption:
                for training in trainings:
                    if not self._stages:
                        self._execution.on_begin(self._about)
                        if plan.restart:  # not before: a refused command keeps the state
                            self._state.remove()
                    self._stages.append(training)
                    if saved:
                        training.load_state_dict(saved.pop(0))
                    else:
                        self._note_errors("before")
                    if plan.write_now:
                        self._note_errors("after")
                        training.finish()
                        continue
                    stream = self._data.stream(plan.options.seed, self._steps_done)
                    training.run(stream, self._after_step, show_progress=plan.options.show_progress)
        except steps.DivergedError as error:
            option = "--learning-rate" if len(self._stages) == 1 else "--finetune-learning-rate"
            advice = f"{error}: give {option}"
            if self._saved_at is not None:
                advice += f" and --restart. --write-now makes a checkpoint of the earlier state in {self._state.folder}"
            raise UnsupportedAttentionError(advice) from error
        except KeyboardInterrupt:
            if self._saved_at is None:
                raise KeyboardInterrupt from None
            done = {"steps_done": self._saved_at, "steps": plan.num_batches, "is_over": self._is_over}
            raise Interrupted({**done, "folder": str(self._state.folder)}) from None

    def _after_step(self, step: int, losses: Sequence[steps.LayerLoss]) -> None:
        """Measure, report and save after some steps, and stop if the user has asked for it."""
        record, training = self._record, self._stages[-1]
        if losses:
            record["recent"].append(statistics.fmean(one.loss for one in losses))
        is_row = step % self._plan.save_steps == 0 or step == training.num_steps
        if is_row:
            loss, held_out = _mean(record["recent"]), self._note_errors("after")
            record["history"].append({"stage": training.key, "step": step, "loss": loss, "held_out": held_out})
            record["recent"] = []
            self._execution.on_row(record["history"][-1])
        is_last = self._steps_done == self._plan.num_batches
        flags = [self._interruption.is_set(), not is_last and self._execution.seconds_left() <= 0]
        if steps.world_size() > 1:  # one process stops all
            numbers = torch.tensor(flags, dtype=torch.float32, device=self.model.device)
            flags = (steps.mean_over_processes(numbers) > 0).tolist()
        if is_row or any(flags):
            self._save()
        if any(flags):
            self._is_over = flags[1]
            raise KeyboardInterrupt

    def _note_errors(self, when: str) -> float | None:
        """Measure the errors of the layers, or of the outputs, on the held-out data, and return their mean."""
        training, losses = self._stages[-1], defaultdict[tuple[Layer | None, str], list[float]](list)
        for number in self._data.held_out:
            for one in training.measure(self._data.batch(number)):
                losses[one.layer, one.name].append(one.loss)
        errors = [(layer, name, _mean(values)) for (layer, name), values in losses.items()]
        self._record[training.key][when] = errors
        return _mean([error for *_, error in errors])

    def write(self) -> dict[str, Any]:
        """Write the checkpoint. Of a complete training the state is kept if more steps can follow, or else removed."""
        layers, outputs = self._record["layers"], self._record["outputs"]
        pairs = zip(layers["before"], layers["after"], strict=True)
        result: dict[str, Any] = {
            **self._about,
            "steps_done": self._steps_done,
            "complete": self._steps_done == self._plan.num_batches,
            "layers": [{"layer": x[0], "name": x[1], "before": x[2], "after": y[2]} for x, y in pairs],
            **{f"error_{when}": _mean([error for *_, error in layers[when]]) for when in ("before", "after")},
            "outputs": {when: _mean([error for *_, error in found]) for when, found in outputs.items()} or None,
            "history": self._record["history"],
        }
        report: dict[str, Any] = {"distillation": result}
        if steps.process_rank() == 0:
            nn.Module.to(self.model, "cpu")
            results = partial(write_results, result, name="distillation", draw=pictures.draw_distillation)
            report |= self._conversion.write(add_files=results)
        is_kept = self._plan.options.finetuning is None
        if result["complete"] and is_kept:
            self._save(is_written=True)
        elif result["complete"]:
            self._state.remove()
        return report | {"state": str(self._state.folder) if is_kept or not result["complete"] else None}


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of some numbers; None if there are none, or if one is not finite."""
    value = statistics.fmean(math.nan if x is None else x for x in values or [math.nan])
    return value if math.isfinite(value) else None


@contextlib.contextmanager
def _noting_interruption() -> Iterator[threading.Event]:
    """Set an event at Ctrl-C, so that a step is completed first. A second Ctrl-C ends it at once."""
    noted, before = threading.Event(), signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        # What starts several processes passes Ctrl-C on to those that have received it already.
        if steps.world_size() == 1:
            tqdm.write("Stopping after this step. Ctrl-C again stops at once, without saving it.", nolock=True)
            signal.signal(signal.SIGINT, before)
        noted.set()

    with contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGINT, before)
        if callable(before):  # not ignored
            signal.signal(signal.SIGINT, note)
        yield noted
