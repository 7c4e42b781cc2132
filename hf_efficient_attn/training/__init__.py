"""Distillation (`distill`) and up-training, which trains one attention, then another (Gupta et al. 2023, section 4.2).

`UptrainingSchedule` defines which attention a model uses at which step. `callback.UptrainingCallback` applies it in
Trainer, `UptrainingSchedule.step` in other training loops. `uptraining_preset` returns the schedules of the paper.
"""

from hf_efficient_attn.training.distillation import DistillationOptions as DistillationOptions
from hf_efficient_attn.training.distillation import distill as distill
from hf_efficient_attn.training.finetuning import FinetuningOptions as FinetuningOptions
from hf_efficient_attn.training.schedule import UptrainingSchedule as UptrainingSchedule
from hf_efficient_attn.training.schedule import uptraining_preset as uptraining_preset
from hf_efficient_attn.training.steps import DivergedError as DivergedError
