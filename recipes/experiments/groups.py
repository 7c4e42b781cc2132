"""The groups of experiments in groups.yaml: which recipes run with which attention, and the tables of their results."""

import pathlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from hf_efficient_attn.evaluation.demo import minilm_folder

_GROUPS: dict[str, Any] = yaml.safe_load(pathlib.Path(__file__).with_name("groups.yaml").read_text(encoding="utf-8"))
GROUPS = tuple(_GROUPS)


@dataclass(frozen=True)
class Group:
    """A table with a line for each attention and a column for each figure.

    Attributes:
        tasks: recipe and arguments of each task. Each task runs once for every line.
        attention: arguments of each line.
        figures: task of each column, and its key in metrics.json.
        note: description of the figures, with steps and subsets.
        untrained: tasks without training, which cannot be up-trained.
    """

    tasks: Mapping[str, Sequence[str]]
    attention: Mapping[str, Sequence[str]]
    figures: Mapping[str, tuple[str, str]]
    note: str
    untrained: Sequence[str] = ()

    def pairs(self) -> list[tuple[str, str]]:
        """Line and task of all runs."""
        return [
            (row, task)
            for task in self.tasks
            for row, arguments in self.attention.items()
            if not (task in self.untrained and "--stages" in arguments)
        ]


def group_of(name: str, data: pathlib.Path) -> Group:
    """The group with this name. `data` replaces $DATA in its arguments."""
    given = dict(_GROUPS[name])
    common = given.pop("common", "")
    folders = {"$DATA": str(data), "$MINILM": str(minilm_folder()) if "$MINILM" in common else ""}

    def words(text: str) -> list[str]:
        found = shlex.split(text)
        for placeholder, folder in folders.items():
            found = [word.replace(placeholder, folder) for word in found]
        return found

    given["tasks"] = {task: words(f"{text} {common}") for task, text in given["tasks"].items()}
    given["attention"] = {line: attention(words(text)) for line, text in given["attention"].items()}
    return Group(**given)


def attention(words: Sequence[str]) -> list[str]:
    """Arguments of a recipe: the words themselves, or those of a method and its hyperparameters."""
    if words[0].startswith("--"):
        return list(words)
    return ["--attention", words[0], *(["--set", *words[1:]] if words[1:] else [])]


def slug(text: str) -> str:
    """The text as a folder name."""
    return "-".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


def folder_of(output: pathlib.Path, line: str, task: str, seed: int) -> pathlib.Path:
    """The folder of a run."""
    return output / slug(task) / f"{slug(line)}-{seed}"
