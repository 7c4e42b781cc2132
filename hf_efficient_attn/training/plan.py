"""What the distillation of a checkpoint folder is asked for."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hf_efficient_attn.integration.layers import Layer
from hf_efficient_attn.training.attention_loss import check_loss
from hf_efficient_attn.training.distillation import DistillationOptions
from hf_efficient_attn.training.training_data import BatchSize


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where the result of `distill_checkpoint` goes.

    Attributes:
        folder: the folder to write.
        max_length, base_model, force: as in `convert_checkpoint`.
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
    """The number of this process, of which 0 writes all files, how many there are, and what waits for all of them.

    `options.reduce` must be given for more than one.
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

    @property
    def num_batches(self) -> int:
        """The number of steps of both stages."""
        return self.steps + (self.options.finetuning.steps if self.options.finetuning else 0)

    def to_dict(self) -> dict[str, Any]:
        """The plan in plain values, by the names of the options of `hf-efficient-attn distill`."""
        options, size, second = self.options, self.size, self.options.finetuning
        names = {"finetune_steps": "steps", "finetune_target": "target", "finetune_learning_rate": "learning_rate"}
        return {
            "steps": self.steps,
            "loss": self.loss,
            "length": size.length,
            "batch_size": size.num_inputs,
            "learning_rate": options.learning_rate,
            "seed": options.seed,
            **{name: getattr(second, key, None) for name, key in (names | {"lora_rank": "lora_rank"}).items()},
        }
