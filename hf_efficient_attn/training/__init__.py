"""Distillation and up-training.

`distill` trains the learned parameters of a converted model to imitate its exact attention.

Up-training (Gupta et al. 2023, sections 4.2-4.3) trains one attention for a share of the steps, then another.
`UptrainingSchedule` defines which attention the model uses at which step. `UptrainingCallback` applies it in Trainer,
`UptrainingSchedule.step` in other training loops. `uptraining_preset` returns the schedules of the paper.
"""

from typing import TYPE_CHECKING, Any

from hf_efficient_attn.training.distillation import DistillationOptions, distill
from hf_efficient_attn.training.finetuning import FinetuningOptions
from hf_efficient_attn.training.schedule import Stage, UptrainingSchedule, uptraining_preset
from hf_efficient_attn.training.steps import DivergedError

if TYPE_CHECKING:
    from hf_efficient_attn.training.callback import UptrainingCallback

__all__ = [
    "DistillationOptions",
    "DivergedError",
    "FinetuningOptions",
    "Stage",
    "UptrainingCallback",
    "UptrainingSchedule",
    "distill",
    "uptraining_preset",
]


def __getattr__(name: str) -> Any:
    # Transformers' callbacks import PEFT and others, which most programs do not need.
    if name == "UptrainingCallback":
        from hf_efficient_attn.training.callback import UptrainingCallback

        return UptrainingCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
