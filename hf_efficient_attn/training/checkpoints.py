"""Checkpoints of Trainer that a killed process left incomplete."""

import itertools
import json
import pathlib
import zipfile
from typing import Any

import safetensors
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

logger = logging.get_logger(__name__)

TRAINER_STATE = "trainer_state.json"


def rename_incomplete_checkpoints(folder: pathlib.Path) -> None:
    """Rename incomplete checkpoints at the end of a Trainer's output folder to `incomplete-checkpoint-*`.

    A process that is killed while it saves or deletes a checkpoint leaves a folder with missing or truncated files.
    Trainer resumes from the checkpoint with the highest number without looking at its files. This function renames the
    latest checkpoints until it finds a complete one. Nothing is deleted.
    """
    while folder.is_dir() and (last := get_last_checkpoint(str(folder))) is not None:
        path = pathlib.Path(last)
        reason = why_incomplete(path)
        if reason is None:
            return
        target = path.with_name(f"incomplete-{path.name}")
        for number in itertools.count(2):
            if not target.exists():
                break
            target = path.with_name(f"incomplete-{path.name}-{number}")
        path.rename(target)
        logger.warning(f"{path.name} is incomplete ({reason}). It was renamed to {target.name}")


def why_incomplete(checkpoint: pathlib.Path) -> str | None:
    """What is missing in a checkpoint of Trainer; None if it is complete.

    Trainer writes `trainer_state.json` last. With `UptrainingCallback` it lists the names and sizes of all other files;
    otherwise the files in the folder are checked for truncation.
    """
    try:
        recorded = json.loads((checkpoint / TRAINER_STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"no {TRAINER_STATE}"
    except ValueError:
        return f"{TRAINER_STATE} is truncated"
    for name, size in _recorded_files(recorded).items():
        path = checkpoint / name
        if not path.is_file():
            return f"no {name}"
        if path.stat().st_size != size:
            return f"{name} is truncated"
    weights = sorted(checkpoint.glob("*.safetensors"))
    others = sorted(path for ending in ("pt", "pth", "bin") for path in checkpoint.glob(f"*.{ending}"))
    truncated = [path for path in weights if not _is_safetensors(path)]
    truncated += [path for path in others if not zipfile.is_zipfile(path)]
    return f"{truncated[0].name} is truncated" if truncated else None


def _recorded_files(recorded: dict[str, Any]) -> dict[str, int]:
    """Names and sizes of the files of a checkpoint, as `UptrainingCallback.state` recorded them."""
    for states in (recorded.get("stateful_callbacks") or {}).values():
        for state in states if isinstance(states, list) else [states]:
            files = state.get("attributes", {}).get("files") if isinstance(state, dict) else None
            if files:
                return dict(files)
    return {}


def _is_safetensors(path: pathlib.Path) -> bool:
    """Whether the file has the length that its header states."""
    try:
        with safetensors.safe_open(path, framework="pt"):
            return True
    except (OSError, safetensors.SafetensorError):
        return False
