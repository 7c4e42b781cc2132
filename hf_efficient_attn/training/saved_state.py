"""The state of a long training in a file: saved as a whole or not at all, and continued by the same request only."""

import contextlib
import pathlib
import signal
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from tqdm import tqdm

from hf_efficient_attn.checkpoint.files import refusing
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.io.writing import replacing

# How a message describes a difference that is not in the value of an option.
_DIFFERENT = {
    "source": "of another model",
    "data": "on other data",
    "settings": "of another method, or other layers",
    "processes": "in another number of processes",
    "version": "by another version of this package",
}


class SavedState:
    """The state of an unfinished training, in the folder OUTPUT.partial next to the output.

    Args:
        output: the output.
        request: plain values, by the names of options, that must be equal when the work is continued.
    """

    def __init__(self, output: pathlib.Path, request: Mapping[str, Any]) -> None:
        self.folder = output.with_name(f"{output.name}.partial")
        self._path, self._request = self.folder / "state.pt", dict(request)

    @property
    def exists(self) -> bool:
        """Whether a state is saved."""
        return self._path.is_file()

    def load(self) -> dict[str, Any] | None:
        """The saved values, on the CPU; None if there are none.

        Raises:
            UnsupportedAttentionError: they cannot be read, or belong to another request.
        """
        if not self.exists:
            return None
        again = "--restart discards it and starts again"
        with refusing(f"the state in {self.folder} cannot be read: {again}"):
            saved = torch.load(self._path, map_location="cpu", weights_only=True)
            request, values = saved["request"], saved["values"]
        if request != self._request:
            found = [
                _DIFFERENT.get(key) or f"with --{key.replace('_', '-')} {request.get(key)}"
                for key, value in self._request.items()
                if request.get(key) != value
            ]
            raise UnsupportedAttentionError(
                f"{self.folder} holds the state of a distillation {', '.join(found)}: repeat the command that it began "
                f"with, and it continues; {again}"
            )
        assert isinstance(values, dict)
        return values

    def save(self, values: Mapping[str, Any]) -> None:
        """Replace the saved values by others: tensors, numbers, strings and containers of them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(self._path) as draft, draft.open("wb") as file:
            torch.save({"request": self._request, "values": dict(values)}, file)

    def remove(self) -> None:
        """Remove the saved values, and their folder unless it holds anything else."""
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()


@contextlib.contextmanager
def noting_interruption(*, is_alone: bool = True) -> Iterator[threading.Event]:
    """Set an event at Ctrl-C, so that a step is completed first. If `is_alone`, a second Ctrl-C ends it at once."""
    noted, before = threading.Event(), signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield noted
        return

    def note(number: int, frame: Any) -> None:
        if is_alone and noted.is_set():
            raise KeyboardInterrupt
        if is_alone:
            tqdm.write("Stopping after this step. Ctrl-C again stops at once, without saving it.", nolock=True)
        noted.set()

    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
