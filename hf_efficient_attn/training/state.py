"""The saved state of a distillation, in a folder beside its output, from which a later call continues."""

import contextlib
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import torch

from hf_efficient_attn.errors import UnsupportedAttentionError, refusing
from hf_efficient_attn.io.writing import check_takes_files, replacing
from hf_efficient_attn.training.steps import process_rank, world_size

_AGAIN = "--restart discards it and starts again"


class SavedState:
    """The state in the folder OUTPUT.partial, which is read when this is made, unless it `is_discarded`.

    A state whose checkpoint is written serves only a training with more steps than it has; else it is as if there were
    none. A folder in which no state can be saved, and a state that cannot be read, are refused.

    Attributes:
        folder: the folder.
        saved: what `save` got, or None.
        rows: the number of inputs of the data that the state was made with; 0 if that is not known.
        held_out: the batches that the training of the state has held out.
        is_longer: whether the training goes on beyond the steps of the state, before its second stage.
    """

    def __init__(self, output: pathlib.Path, num_steps: int, *, is_discarded: bool) -> None:
        self.folder = output.with_name(f"{output.name}.partial")
        self._file = self.folder / "state.pt"
        check_takes_files(self.folder, f"the state of the training in {self.folder}")
        self.saved: dict[str, Any] | None = None
        self.rows, self.is_longer = 0, False
        self.held_out: range | None = None
        if is_discarded or not self._file.is_file():
            return
        with refusing(f"the state in {self.folder} cannot be read: {_AGAIN}"):
            saved = dict(torch.load(self._file, map_location="cpu", weights_only=True))
            before = dict(saved["request"]).get("steps", num_steps)
            self.is_longer = num_steps > before and len(saved["stages"]) < 2
        if self.is_longer or not saved.get("is_written"):
            self.saved, self.rows = saved, saved.get("rows", 0)
            self.held_out = range(*saved["held_out"]) if "held_out" in saved else None

    def check(self, request: Mapping[str, Any], options: Collection[str]) -> None:
        """Refuse a state of another request: plain values by names, of which `options` are those of options."""
        if self.saved is None:
            return
        names = [
            f"--{key.replace('_', '-')} {self.saved['request'].get(key)}" if key in options else f"other {key}"
            for key, value in request.items()
            if self.saved["request"].get(key) != value and not (key == "steps" and self.is_longer)
        ]
        if names:
            raise UnsupportedAttentionError(
                f"{self.folder} holds the state of a distillation with {', '.join(names)}: repeat the command that it "
                f"began with, and it continues, also with more --steps; {_AGAIN}"
            )

    def save(self, values: Mapping[str, Any]) -> None:
        """Replace the saved state as a whole."""
        if process_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._file) as draft, draft.open("wb") as file:
                torch.save(dict(values), file)
        _wait()

    def remove(self) -> None:
        """Remove the saved state, and its folder unless that holds anything else."""
        if process_rank() == 0:
            self._file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.folder.rmdir()
        _wait()


def _wait() -> None:
    if world_size() > 1:
        torch.distributed.barrier()
