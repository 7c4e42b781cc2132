"""The groups of experiments in groups.yaml: which recipes run with which attention, and the tables of their results."""

import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from hf_efficient_attn.errors import UnsupportedAttentionError, unknown_name
from hf_efficient_attn.evaluation.demo import minilm_folder

_GROUPS: dict[str, Any] = yaml.safe_load(pathlib.Path(__file__).with_name("groups.yaml").read_text(encoding="utf-8"))
GROUPS = tuple(_GROUPS)


class Group(NamedTuple):
    """A table with a line for each attention and a column for each figure."""

    tasks: Mapping[str, Sequence[str]]  # recipe and arguments of each task. Each task runs once for every line
    attention: Mapping[str, Sequence[str]]  # arguments of each line
    figures: Mapping[str, tuple[str, str]]  # task of each column, and its key in metrics.json
    note: str  # description of the figures, with steps and subsets
    untrained: Sequence[str] = ()  # tasks without training, which cannot be up-trained

    def pairs(self) -> list[tuple[str, str]]:
        """Line and task of all runs."""
        return [
            (row, task)
            for task in self.tasks
            for row, arguments in self.attention.items()
            if not (task in self.untrained and "--stages" in arguments)
        ]


def group_of(name: str, data: pathlib.Path) -> Group:
    """The group with this name. `data` replaces $DATA in its arguments.

    Raises:
        UnsupportedAttentionError: there is no such group.
    """
    if name not in GROUPS:
        raise UnsupportedAttentionError(unknown_name("group of experiments", name, GROUPS))
    given = dict(_GROUPS[name])
    common = given.pop("common", "")
    folders = {"$DATA": str(data), "$MINILM": str(minilm_folder()) if "$MINILM" in common else ""}

    def words(text: str) -> list[str]:
        found = shlex.split(text)
        for placeholder, folder in folders.items():
            found = [word.replace(placeholder, folder) for word in found]
        return found

    def attention(text: str) -> list[str]:
        """The words themselves, or the arguments for a method and its hyperparameters."""
        method, *hyperparameters = words(text)
        if method.startswith("--"):
            return [method, *hyperparameters]
        return ["--attention", method, *(["--set", *hyperparameters] if hyperparameters else [])]

    tasks = {task: words(f"{text} {common}") for task, text in given.pop("tasks").items()}
    return Group(tasks, {line: attention(text) for line, text in given.pop("attention").items()}, **given)


def folder_of(output: pathlib.Path, line: str, task: str, seed: int | str) -> pathlib.Path:
    """The folder of a run."""
    slugs = ("-".join("".join(c if c.isalnum() else " " for c in text.lower()).split()) for text in (task, line))
    return output / next(slugs) / f"{next(slugs)}-{seed}"
