"""Up-training (Gupta et al. 2023, sections 4.2-4.3): train one attention for a share of the steps, then another.

`UptrainingSchedule` says which attention stands in the model at which step, `UptrainingCallback` keeps a Trainer to it,
`UptrainingSchedule.step` a loop of one's own, and `uptraining_preset` knows the paper's shares.
"""

from hf_efficient_attn.training.schedule import Stage, UptrainingSchedule, uptraining_preset


def __getattr__(name: str):
    # Transformers' callbacks take seconds to import, and who only converts a model does not need them.
    if name == "UptrainingCallback":
        from hf_efficient_attn.training.callback import UptrainingCallback

        globals()[name] = UptrainingCallback
        return UptrainingCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
