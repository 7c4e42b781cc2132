"""Distillation of a checkpoint folder into another folder, which can be interrupted and continued."""

import contextlib
import dataclasses
import functools
import hashlib
import pathlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_efficient_attn.checkpoint import CheckedSource
from hf_efficient_attn.conversion.checkpoint import Conversion
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.analyze import Source
from hf_efficient_attn.evaluation.capture import Batch
from hf_efficient_attn.evaluation.defaults import method_label
from hf_efficient_attn.evaluation.memory import memory_errors
from hf_efficient_attn.evaluation.names import name_of
from hf_efficient_attn.evaluation.progress import Execution, Interrupted
from hf_efficient_attn.evaluation.timing import machine, use_device
from hf_efficient_attn.integration.layers import Layer
from hf_efficient_attn.io.json import write_json
from hf_efficient_attn.io.writing import check_drawing
from hf_efficient_attn.methods import make_config
from hf_efficient_attn.training.attention_loss import DivergedError, check_loss
from hf_efficient_attn.training.chart import draw
from hf_efficient_attn.training.distillation import Distillation, DistillationOptions, LayerLoss
from hf_efficient_attn.training.distillation_run import DistillationRun
from hf_efficient_attn.training.finetuning import make_teacher, outputs_of
from hf_efficient_attn.training.saved_state import Interruption, SavedState, noting_interruption
from hf_efficient_attn.training.teachability import converted_to, why_nothing_to_learn
from hf_efficient_attn.training.training_data import BatchSize, TrainingData, mean, update

FORMAT = 1
FILES = ("distillation.json", "distillation.png")


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where the result of `distill_checkpoint` goes.

    Attributes:
        folder: the folder to write.
        max_length: as in `convert_checkpoint`.
        base_model: as in `convert_checkpoint`.
        force: replace an existing output folder when everything is written.
        restart: discard a saved state.
        write_now: write the checkpoint from the saved state, without further training.
    """

    folder: pathlib.Path
    max_length: int | None = None
    base_model: str | None = None
    force: bool = False
    restart: bool = False
    write_now: bool = False


class Target(NamedTuple):
    """The attention to distill: a method, its hyperparameters, and the layers to convert (None for all)."""

    method: str
    hyperparameters: Mapping[str, Any] = {}
    layers: Sequence[Layer] | None = None


class Processes(NamedTuple):
    """This process among those of a distributed training.

    Attributes:
        rank: its number. Process 0 writes all files.
        total: how many there are. `options.reduce` must be given for more than one.
        wait: waits for all of them.
    """

    rank: int = 0
    total: int = 1
    wait: Callable[[], object] = lambda: None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How `distill_checkpoint` trains.

    Attributes:
        steps: number of steps of the first stage.
        loss: as in `hea.distill`.
        size: the size of a batch.
        save_steps: the state is saved, and the error is measured, after this many steps.
        options: as in `hea.distill`, with the second stage.
        processes: in a distributed training. Each process learns from its own part of the batches.
    """

    steps: int = 300
    loss: str = "output"
    size: BatchSize = field(default_factory=BatchSize)
    save_steps: int = 50
    options: DistillationOptions = field(default_factory=DistillationOptions)
    processes: Processes = field(default_factory=Processes)

    def __post_init__(self) -> None:
        check_loss(self.loss)
        for name, value in (
            ("steps", self.steps),
            ("save_steps", self.save_steps),
            ("batch_size", self.size.num_inputs),
        ):
            if value < 1:
                raise UnsupportedAttentionError(f"{name}={value} must be 1 or more")

    @property
    def num_batches(self) -> int:
        """The number of steps of both stages."""
        finetuning = self.options.finetuning
        return self.steps + (0 if finetuning is None else finetuning.steps)

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain values, by the names of the options of `hf-efficient-attn distill`."""
        finetuning = self.options.finetuning
        second = {} if finetuning is None else dataclasses.asdict(finetuning)
        return {
            "steps": self.steps,
            "loss": self.loss,
            "length": self.size.length,
            "batch_size": self.size.num_inputs,
            "learning_rate": self.options.learning_rate,
            "seed": self.options.seed,
            "finetune_steps": second.get("steps"),
            "finetune_target": second.get("target"),
            "finetune_learning_rate": second.get("learning_rate"),
            "lora_rank": second.get("lora_rank"),
        }


def distill_checkpoint(
    source: Source,
    data: "str | pathlib.Path",
    output: Output,
    target: Target,
    plan: Plan | None = None,
    execution: Execution | None = None,
) -> dict[str, Any]:
    """Convert a checkpoint to a method, and train the method's learned parameters as `hea.distill` does.

    About a twentieth of the batches is held out to measure the error of each layer before and after the training. The
    state of the training is saved in the folder OUTPUT.partial. A call with the same arguments continues from there,
    bit for bit; the folder is removed at the end. The output is written as by `convert_checkpoint`, with
    distillation.json and distillation.png, from which the model card takes a table and a figure.

    Args:
        source: the checkpoint, and where PyTorch computes.
        data: a text (.txt, .jsonl, or gzipped), or a folder or zip file of pictures.
        output: where the result goes.
        target: the method.
        plan: how it is trained.
        execution: `on_begin` gets what is known of "distillation" before the training, `on_row` each row of "history".
            At the end of `minutes` the training is interrupted, after one step at least.

    Returns:
        the report of `convert_checkpoint`, and "distillation", the contents of distillation.json: "format", "source",
        "attention" (a label of the method), "machine", "data" (name, number of inputs to learn from and of others),
        "tokens" (of an input), "plan", "resumed_at" (the step from which this call continued, or None), "steps_done"
        and "complete"; "layers" (number, name, and error before and after of each layer, without fine-tuning),
        "error_before", "error_after" (the means), "outputs" (loss of the fine-tuning on the held-out data before and
        after it, or None), and "history": for every `save_steps` the stage ("layers" or "outputs"), the step, the mean
        loss since the row before, and the mean error of the layers, or the loss, on the held-out data.

    Raises:
        UnsupportedAttentionError: a source, a method or data that cannot be used, a method that learns nothing or
            computes inputs of this length exactly, a state of another request, or a loss that is not finite.
        Interrupted: the user, or the limit of time, interrupted the training. The state is saved. The result has
            "steps_done", "steps" (of both stages), "folder" (of the state) and "is_over" (whether the time was over).
    """
    check_drawing()
    plan, execution = plan or Plan(), execution or Execution()
    with memory_errors("give a smaller --batch-size or --length"):
        run = _CheckpointRun(source, pathlib.Path(data), output, target, plan)
        execution.on_begin(run.about())
        with use_device(run.model.device), run.reporting_interruption():
            run.train(execution)
        return run.write()


class _CheckpointRun:
    """The work of `distill_checkpoint`, whose arguments it takes."""

    def __init__(self, source: Source, file: pathlib.Path, output: Output, target: Target, plan: Plan) -> None:
        config = make_config(target.method, **target.hyperparameters)
        if (reason := why_nothing_to_learn([config])) is not None:
            raise UnsupportedAttentionError(reason)
        self._plan, self._output, self._attention = plan, output, method_label(config)
        self._conversion = conversion = Conversion(
            source.name,
            output.folder,
            max_length=output.max_length,
            base_model=output.base_model,
            force=output.force,
            allow_pickle=source.allow_pickle,
        )
        self.model = model = conversion.model
        _refuse_converted(model, str(source.name))
        conversion.extend()
        self._data = _data(model, conversion.checked.folder, file, plan)
        move: Callable[..., object] = model.to  # the annotations of Transformers are wrong
        move(source.device or model.device)
        # The head of a language model would compute a large matrix that is not needed.
        finetuning = plan.options.finetuning
        self._trained: nn.Module = model if finetuning and finetuning.target == "logits" else model.base_model
        teacher = None
        if finetuning is not None:
            with torch.no_grad():  # a refusal would otherwise come after the first stage
                outputs_of(self._trained, self._data.batch(self._data.held_out[0]), finetuning.target)
            teacher = _make_teacher(self._trained, plan.options)
        conversion.switch(target.method, dict(target.hyperparameters), target.layers)
        options = dataclasses.replace(plan.options, on_step=self._after_step)
        self._run = DistillationRun(self._trained, teacher, plan.steps, plan.loss, options)
        self._state = SavedState(conversion.place.path, self._request())
        if output.restart:
            if plan.processes.rank == 0:
                self._state.remove()
            plan.processes.wait()
        # What is saved beside the state of the run: errors by layer, losses of the second stage, rows, and the losses
        # since the last row.
        self._record: dict[str, Any] = {"before": None, "after": None, "outputs": None, "history": [], "recent": []}
        # The steps that were done before this call, and those that the saved state contains.
        self._resumed_at: int | None = None
        self._saved_at: int | None = None
        self._load()
        self._execution, self._interruption = Execution(), Interruption()
        self._is_over = False

    def _request(self) -> dict[str, Any]:
        return {
            "source": _digest(self._conversion.checked),
            "data": self._data.digest(),
            "settings": repr(dict(self.model.config.efficient_attention or {})),
            **self._plan.to_dict(),
            "max_length": self._output.max_length,
            "processes": self._plan.processes.total,
        }

    def _load(self) -> None:
        values = self._state.load()
        if values is not None:
            self._run.load_state_dict(values["run"])
            self._record = values["record"]
            self._resumed_at = self._saved_at = self._run.num_batches
        elif self._output.write_now:
            raise UnsupportedAttentionError(
                f"--write-now: no state is saved in {self._state.folder}: leave it out to begin the training"
            )

    def about(self) -> dict[str, Any]:
        """What is known before the training."""
        plan = self._plan
        return {
            "format": FORMAT,
            "source": name_of(self._conversion.checked),
            "attention": self._attention,
            "machine": machine(self.model),
            "data": {
                "name": self._data.name,
                "rows": len(self._data.train) * plan.size.num_inputs,
                "held_out": len(self._data.held_out) * plan.size.num_inputs,
            },
            "tokens": self._data.tokens,
            "plan": plan.to_dict(),
            "resumed_at": self._resumed_at,
        }

    def train(self, execution: Execution) -> None:
        """Train what remains of both stages, and measure the errors before and after."""
        run, record, self._execution = self._run, self._record, execution
        if record["before"] is None:
            record["before"] = self._measure_layers()
        if self._output.write_now:
            self._stop_here()
            return
        processes = self._plan.processes
        own = self._data.train[processes.rank :: processes.total]
        stream = self._data.stream(own, self._plan.options.seed, run.num_batches)
        # What starts several processes passes Ctrl-C on to those that have received it already.
        is_alone = processes.total == 1
        with noting_interruption(is_alone=is_alone) as self._interruption, self._divergence():
            if run.finetuning is None:
                run.train_layers(stream)
                record["after"] = self._measure_layers()
            if self._plan.options.finetuning is not None:
                if run.finetuning is None:
                    torch.manual_seed(self._plan.options.seed)  # of LoRA's adapters
                    run.begin_finetuning()
                    record["outputs"] = {"before": self._measure_outputs(), "after": None}
                run.train_outputs(stream)

    def _stop_here(self) -> None:
        """Give the model the parameters of the saved state."""
        if self._run.finetuning is None:
            self._run.distillation.store()
            self._record["after"] = self._measure_layers()
        else:
            self._record["outputs"]["after"] = self._measure_outputs()
            self._run.finetuning.finish()

    def _after_step(self, step: int, losses: Sequence[LayerLoss]) -> None:
        """Measure, report and save after some steps, and stop if the user has asked for it."""
        record, finetuning = self._record, self._run.finetuning
        record["recent"].append(mean([one.loss for one in losses]))
        last = self._plan.steps if finetuning is None else finetuning.options.steps
        is_row = step % self._plan.save_steps == 0 or step == last
        if is_row:
            recent = [loss for loss in record["recent"] if loss is not None]
            if finetuning is None:
                held_out = mean([entry["error"] for entry in self._measure_layers()])
            else:
                record["outputs"]["after"] = held_out = self._measure_outputs()
            stage = "layers" if finetuning is None else "outputs"
            row = {"stage": stage, "step": step, "loss": mean(recent), "held_out": held_out}
            record["history"].append(row)
            record["recent"] = []
            self._execution.on_row(row)
        is_interrupted = self._is_interrupted()
        if is_row or is_interrupted:
            if self._plan.processes.rank == 0:
                self._state.save({"run": self._run.state_dict(), "record": record})
            self._plan.processes.wait()
            self._saved_at = self._run.num_batches
        if is_interrupted:
            raise KeyboardInterrupt

    def _is_interrupted(self) -> bool:
        """Whether Ctrl-C was pressed or the time is over; in a distributed training, in any of the processes."""
        is_last = self._run.num_batches == self._plan.num_batches
        is_over = not is_last and self._execution.seconds_left() <= 0
        flags, reduce = [self._interruption.requested, is_over], self._plan.options.reduce
        if reduce is not None:
            flags = (reduce(torch.tensor(flags, dtype=torch.float32, device=self.model.device)) > 0).tolist()
        self._is_over = flags[1]
        return any(flags)

    @contextlib.contextmanager
    def reporting_interruption(self) -> Iterator[None]:
        """Turn a KeyboardInterrupt into `Interrupted` with what is known of the saved state, if there is one."""
        try:
            yield
        except KeyboardInterrupt:
            if self._saved_at is None:
                raise KeyboardInterrupt from None
            known = {"steps_done": self._saved_at, "steps": self._plan.num_batches, "folder": str(self._state.folder)}
            raise Interrupted({**known, "is_over": self._is_over}) from None

    @contextlib.contextmanager
    def _divergence(self) -> Iterator[None]:
        """Say what to do about a loss that is not finite."""
        try:
            yield
        except DivergedError as error:
            option = "--learning-rate" if self._run.finetuning is None else "--finetune-learning-rate"
            advice = f"use a smaller {option} than {error.learning_rate:g}"
            if self._state.exists:
                advice += (
                    f" and --restart. {self._state.folder} holds an earlier state, which --write-now makes a "
                    "checkpoint of"
                )
            raise UnsupportedAttentionError(f"{error.what}: {advice}") from error

    def _held_out(self) -> Iterable[Batch]:
        return self._data.batches(self._data.held_out)

    def _measure_layers(self) -> list[dict[str, Any]]:
        errors = layer_errors(self._run.distillation, self._held_out())
        if not errors:
            raise UnsupportedAttentionError(self._run.distillation.why_idle)
        return errors

    def _measure_outputs(self) -> float | None:
        assert self._run.finetuning is not None
        return mean([self._run.finetuning.measure(batch) for batch in self._held_out()])

    def result(self) -> dict[str, Any]:
        """The contents of distillation.json."""
        record, about = self._record, self.about()
        before, after = record["before"], record["after"]
        layers = [
            {"layer": old["layer"], "name": old["name"], "before": old["error"], "after": new["error"]}
            for old, new in zip(before, after, strict=True)
        ]
        return {
            **about,
            "steps_done": self._run.num_batches,
            "complete": self._run.num_batches == self._plan.num_batches,
            "layers": layers,
            "error_before": mean([entry["error"] for entry in before]),
            "error_after": mean([entry["error"] for entry in after]),
            "outputs": record["outputs"],
            "history": record["history"],
        }

    def write(self) -> dict[str, Any]:
        """Write the checkpoint, and remove the state if the training is complete.

        Only process 0 writes. The others return what it writes into distillation.json, under "distillation".
        """
        result, processes = self.result(), self._plan.processes
        if processes.rank:
            processes.wait()
            return {"distillation": result}
        move: Callable[..., object] = self.model.to
        move("cpu")
        report = self._conversion.write(
            is_trained=self._run.finetuning is not None, add_files=functools.partial(_write_result, result)
        )
        if result["complete"]:
            self._state.remove()
        processes.wait()
        return {**report, "distillation": result}


def layer_errors(distillation: Distillation, batches: Iterable[Batch]) -> list[dict[str, Any]]:
    """The relative error of each layer, as a mean over batches: {"layer", "name", "error"}."""
    found: dict[tuple[Layer | None, str], list[float]] = defaultdict(list)
    for batch in batches:
        for one in distillation.measure(batch):
            found[one.layer, one.name].append(one.loss)
    return [{"layer": layer, "name": name, "error": mean(errors)} for (layer, name), errors in found.items()]


def _data(model: PreTrainedModel, folder: pathlib.Path, file: pathlib.Path, plan: Plan) -> TrainingData:
    """The batches for all processes."""
    count = plan.processes.total
    data = TrainingData(model, folder, file, plan.size, plan.num_batches * count)
    if len(data.train) < 2 * count:
        raise UnsupportedAttentionError(
            f"{data.name} has {len(data.train)} batches to learn from, but each of {count} processes needs two: give "
            "more data, fewer processes or smaller batches"
        )
    return data


def _write_result(result: Mapping[str, Any], folder: pathlib.Path) -> None:
    draw(result, folder / FILES[1])
    write_json(folder / FILES[0], result)


def _refuse_converted(model: PreTrainedModel, source: str) -> None:
    name = converted_to(model)
    if name is not None:
        raise UnsupportedAttentionError(
            f"{source} is converted to {name} already, and only exact attention can teach: give the original "
            "checkpoint, or one that 'hf-efficient-attn convert --method sdpa' makes of this one"
        )


def _make_teacher(model: nn.Module, options: DistillationOptions) -> nn.Module | None:
    """`make_teacher`, whose refusal then names an option of the command."""
    assert options.finetuning is not None
    if options.finetuning.lora_rank is None:
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float32, torch.float64}
        if dtypes:
            raise UnsupportedAttentionError(
                f"the checkpoint's parameters are {', '.join(sorted(map(str, dtypes)))}, in which most updates of "
                "fine-tuning are rounded away: give --lora-rank N, which trains adapters in float32"
            )
    return make_teacher(model, options.finetuning)


def _digest(checked: CheckedSource) -> str:
    """A hash of the config and all tensors of a checkpoint."""
    found = hashlib.sha256(repr(sorted(checked.config.items(), key=str)).encode())
    for name, tensor in checked.weights.all_tensors():
        found.update(name.encode("utf-8", "backslashreplace"))
        update(found, tensor)
    return found.hexdigest()
