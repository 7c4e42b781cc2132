"""Distillation of a checkpoint folder into another folder, which can be interrupted and continued."""

import hashlib
import pathlib
import statistics
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hf_efficient_attn.conversion.checkpoint import Conversion
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation.analyze import Source
from hf_efficient_attn.evaluation.defaults import method_label
from hf_efficient_attn.evaluation.memory import memory_errors
from hf_efficient_attn.evaluation.names import name_of
from hf_efficient_attn.evaluation.progress import Execution, Interrupted
from hf_efficient_attn.evaluation.timing import machine, use_device
from hf_efficient_attn.integration.layers import Layer
from hf_efficient_attn.io.json import write_json
from hf_efficient_attn.io.writing import check_drawing
from hf_efficient_attn.methods import make_config
from hf_efficient_attn.training.chart import draw
from hf_efficient_attn.training.distillation import Distillation
from hf_efficient_attn.training.finetuning import Finetuning, make_teacher, outputs_of
from hf_efficient_attn.training.plan import Output, Plan, Target
from hf_efficient_attn.training.saved_state import SavedState, noting_interruption
from hf_efficient_attn.training.steps import DivergedError, LayerLoss
from hf_efficient_attn.training.teachability import refuse_converted, why_nothing_to_learn
from hf_efficient_attn.training.training_data import TrainingData, mean, update

FORMAT = 1
# A state of another format cannot be continued.
FORMAT_OF_STATE = 2


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
        run = _CheckpointRun(source, pathlib.Path(data), output, target, plan, execution)
        execution.on_begin(run.about())
        with use_device(run.model.device):
            run.train()
        return run.write()


class _CheckpointRun:
    """The work of `distill_checkpoint`, whose arguments it takes."""

    def __init__(
        self, source: Source, file: pathlib.Path, output: Output, target: Target, plan: Plan, execution: Execution
    ) -> None:
        config = make_config(target.method, **target.hyperparameters)
        if (reason := why_nothing_to_learn([config])) is not None:
            raise UnsupportedAttentionError(reason)
        self._plan, self._output, self._execution, self._attention = plan, output, execution, method_label(config)
        self._conversion = conversion = Conversion(
            source.name,
            output.folder,
            max_length=output.max_length,
            base_model=output.base_model,
            force=output.force,
            allow_pickle=source.allow_pickle,
        )
        self.model = model = conversion.model
        refuse_converted(
            model,
            str(source.name),
            "give the original checkpoint, or one that 'hf-efficient-attn convert --method sdpa' makes of this one",
        )
        conversion.extend()
        total = plan.processes.total
        self._data = data = TrainingData(model, conversion.checked.folder, file, plan.size, plan.num_batches * total)
        if len(data.train) < 2 * total:
            raise UnsupportedAttentionError(
                f"{data.name} has {len(data.train)} batches to learn from, but each of {total} processes needs two: "
                "give more data, fewer processes or smaller batches"
            )
        move: Callable[..., object] = model.to  # the annotations of Transformers are wrong
        move(source.device or model.device)
        # The head of a language model would compute a large matrix that is not needed.
        finetuning = plan.options.finetuning
        self._trained: nn.Module = model if finetuning and finetuning.target == "logits" else model.base_model
        self._teacher: nn.Module | None = None
        if finetuning is not None:
            with torch.no_grad():  # a refusal would otherwise come after the first stage
                outputs_of(self._trained, data.batch(data.held_out[0]), finetuning.target)
            advice = "give --lora-rank N, which trains adapters in float32"
            self._teacher = make_teacher(self._trained, finetuning, advice)
        conversion.switch(target.method, dict(target.hyperparameters), target.layers)
        self._distillation = Distillation(self._trained, plan.steps, plan.loss, plan.options)
        self._finetuning: Finetuning | None = None  # until it begins
        self._state = SavedState(conversion.place.path, self._request())
        # What is saved beside the states of the stages: errors by layer, losses of the second stage, rows, and the
        # losses since the last row.
        self._record: dict[str, Any] = {"before": None, "after": None, "outputs": None, "history": [], "recent": []}
        # The steps that were done before this call, and those that the saved state contains.
        self._resumed_at: int | None = None
        self._saved_at: int | None = None
        self._load()
        self._interruption, self._is_over = threading.Event(), False

    def _request(self) -> dict[str, Any]:
        checked = self._conversion.checked
        source = hashlib.sha256(repr(sorted(checked.config.items(), key=str)).encode())
        for name, tensor in checked.weights.tensors.items():
            source.update(name.encode("utf-8", "backslashreplace"))
            update(source, tensor)
        return {
            "version": FORMAT_OF_STATE,
            "source": source.hexdigest(),
            "data": self._data.digest(),
            "settings": repr(dict(self.model.config.efficient_attention or {})),
            **self._plan.to_dict(),
            "max_length": self._output.max_length,
            "processes": self._plan.processes.total,
        }

    def _load(self) -> None:
        if self._output.restart:
            if self._plan.processes.rank == 0:
                self._state.remove()
            self._plan.processes.wait()
        values = self._state.load()
        if values is not None:
            self._distillation.load_state_dict(values["distillation"])
            if values["finetuning"] is not None:
                self._distillation.finish()
                self._begin_finetuning().load_state_dict(values["finetuning"])
            self._record = values["record"]
            self._resumed_at = self._saved_at = self._steps_done
        elif self._output.write_now:
            raise UnsupportedAttentionError(
                f"--write-now: no state is saved in {self._state.folder}: leave it out to begin the training"
            )

    @property
    def _steps_done(self) -> int:
        return self._distillation.step_number + (self._finetuning.step_number if self._finetuning else 0)

    def _begin_finetuning(self) -> Finetuning:
        options = self._plan.options
        assert options.finetuning is not None
        torch.manual_seed(options.seed)  # of LoRA's adapters
        self._finetuning = Finetuning(self._trained, self._teacher, options.finetuning, options.reduce)
        return self._finetuning

    def about(self) -> dict[str, Any]:
        """What is known before the training."""
        data, num_inputs = self._data, self._plan.size.num_inputs
        rows, held_out = len(data.train) * num_inputs, len(data.held_out) * num_inputs
        return {
            "format": FORMAT,
            "source": name_of(self._conversion.checked),
            "attention": self._attention,
            "machine": machine(self.model),
            "data": {"name": data.name, "rows": rows, "held_out": held_out},
            "tokens": data.tokens,
            "plan": self._plan.to_dict(),
            "resumed_at": self._resumed_at,
        }

    def train(self) -> None:
        """Train what remains of both stages, and measure the errors before and after."""
        try:
            if self._record["before"] is None:
                self._record["before"] = self._measure_layers()
            if self._output.write_now:
                self._measure()
                (self._finetuning or self._distillation).finish()
            else:
                self._train()
        except DivergedError as error:
            option = "--learning-rate" if self._finetuning is None else "--finetune-learning-rate"
            advice = f"use a smaller {option} than {error.learning_rate:g}"
            if self._state.exists:
                advice += (
                    f" and --restart. {self._state.folder} holds an earlier state, which --write-now makes a "
                    "checkpoint of"
                )
            raise UnsupportedAttentionError(f"{error.what}: {advice}") from error
        except KeyboardInterrupt:
            if self._saved_at is None:
                raise KeyboardInterrupt from None
            known = {"steps_done": self._saved_at, "steps": self._plan.num_batches, "folder": str(self._state.folder)}
            raise Interrupted({**known, "is_over": self._is_over}) from None

    def _train(self) -> None:
        options, processes = self._plan.options, self._plan.processes
        own = self._data.train[processes.rank :: processes.total]
        stream = self._data.stream(own, options.seed, self._steps_done)
        # What starts several processes passes Ctrl-C on to those that have received it already.
        with noting_interruption(is_alone=processes.total == 1) as self._interruption:
            if self._finetuning is None:
                self._distillation.run(stream, self._after_step, show_progress=options.show_progress)
                if options.finetuning is None:
                    return
                self._begin_finetuning()
                self._record["outputs"] = {"before": self._measure_outputs(), "after": None}
            assert self._finetuning is not None
            self._finetuning.run(stream, self._after_step, show_progress=options.show_progress)

    def _after_step(self, step: int, losses: Sequence[LayerLoss]) -> None:
        """Measure, report and save after some steps, and stop if the user has asked for it."""
        record, training = self._record, self._finetuning or self._distillation
        if losses:
            record["recent"].append(statistics.fmean(one.loss for one in losses))
        is_row = step % self._plan.save_steps == 0 or step == training.num_steps
        if is_row:
            stage = "layers" if self._finetuning is None else "outputs"
            row = {"stage": stage, "step": step, "loss": mean(record["recent"]), "held_out": self._measure()}
            record["history"].append(row)
            record["recent"] = []
            self._execution.on_row(row)
        is_interrupted = self._is_interrupted()
        if is_row or is_interrupted:
            if self._plan.processes.rank == 0:
                second = None if self._finetuning is None else self._finetuning.state_dict()
                first = self._distillation.state_dict()
                self._state.save({"distillation": first, "finetuning": second, "record": record})
            self._plan.processes.wait()
            self._saved_at = self._steps_done
        if is_interrupted:
            raise KeyboardInterrupt

    def _is_interrupted(self) -> bool:
        """Whether Ctrl-C was pressed or the time is over; in a distributed training, in any of the processes."""
        is_last = self._steps_done == self._plan.num_batches
        is_over = not is_last and self._execution.seconds_left() <= 0
        flags, reduce = [self._interruption.is_set(), is_over], self._plan.options.reduce
        if reduce is not None:
            flags = (reduce(torch.tensor(flags, dtype=torch.float32, device=self.model.device)) > 0).tolist()
        self._is_over = flags[1]
        return any(flags)

    def _measure(self) -> float | None:
        """Measure what the present stage improves, and return its mean."""
        if self._finetuning is None:
            self._record["after"] = errors = self._measure_layers()
            return mean([entry["error"] for entry in errors])
        self._record["outputs"]["after"] = loss = self._measure_outputs()
        return loss

    def _measure_layers(self) -> list[dict[str, Any]]:
        """The relative error of each layer, as a mean over the batches that are held out."""
        found: dict[tuple[Layer | None, str], list[float]] = defaultdict(list)
        for batch in self._data.batches(self._data.held_out):
            for one in self._distillation.measure(batch):
                found[one.layer, one.name].append(one.loss)
        if not found:
            raise UnsupportedAttentionError(self._distillation.why_idle())
        return [{"layer": layer, "name": name, "error": mean(errors)} for (layer, name), errors in found.items()]

    def _measure_outputs(self) -> float | None:
        assert self._finetuning is not None
        return mean([self._finetuning.measure(batch) for batch in self._data.batches(self._data.held_out)])

    def write(self) -> dict[str, Any]:
        """Write the checkpoint, and remove the state if the training is complete.

        Only process 0 writes. The others return what it writes into distillation.json, under "distillation".
        """
        record, processes = self._record, self._plan.processes
        before, after = record["before"], record["after"]
        result = {
            **self.about(),
            "steps_done": self._steps_done,
            "complete": self._steps_done == self._plan.num_batches,
            "layers": [
                {"layer": old["layer"], "name": old["name"], "before": old["error"], "after": new["error"]}
                for old, new in zip(before, after, strict=True)
            ],
            "error_before": mean([entry["error"] for entry in before]),
            "error_after": mean([entry["error"] for entry in after]),
            "outputs": record["outputs"],
            "history": record["history"],
        }

        def add_files(folder: pathlib.Path) -> None:
            draw(result, folder / "distillation.png")
            write_json(folder / "distillation.json", result)

        report = {"distillation": result}
        if processes.rank == 0:
            move: Callable[..., object] = self.model.to
            move("cpu")
            report = self._conversion.write(add_files=add_files) | report
            if result["complete"]:
                self._state.remove()
        processes.wait()
        return report
