"""Checkpoints of Trainer that a killed process left incomplete."""

import itertools
import json
import pathlib
import zipfile

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

    Trainer writes `trainer_state.json` last, but other processes may still be writing their random states. With
    `UptrainingCallback` it lists the names and sizes of all other files.
    """
    try:
        recorded = json.loads((checkpoint / TRAINER_STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"no {TRAINER_STATE}"
    except ValueError:
        return f"{TRAINER_STATE} is truncated"
    for states in (recorded.get("stateful_callbacks") or {}).values():
        for state in states if isinstance(states, list) else [states]:
            for name, size in (state.get("attributes", {}).get("files") or {}).items():
                path = checkpoint / name
                if not path.is_file():
                    return f"no {name}"
                if path.stat().st_size != size:
                    return f"{name} is truncated"
    truncated = [path for path in sorted(checkpoint.glob("rng_state*.pth")) if not zipfile.is_zipfile(path)]
    return f"{truncated[0].name} is truncated" if truncated else None
