"""Distillation (`distill`) and up-training, which trains one attention, then another (Gupta et al. 2023, section 4.2).

`UptrainingSchedule` defines which attention a model uses at which step. `UptrainingCallback` applies it in Trainer,
`UptrainingSchedule.step` in other training loops. `uptraining_preset` returns the schedules of the paper.
"""

from typing import TYPE_CHECKING, Any

from hf_efficient_attn.training.distillation import DistillationOptions, distill
from hf_efficient_attn.training.finetuning import FinetuningOptions
from hf_efficient_attn.training.schedule import UptrainingSchedule, uptraining_preset
from hf_efficient_attn.training.steps import DivergedError
from hf_efficient_attn.training.switch import Stage

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
