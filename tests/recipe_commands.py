"""Running the command of a measuring recipe in this process, and reading its CSV file."""

import csv
import json
from pathlib import Path

from hf_efficient_attn import cli


def run(recipe, *arguments):
    """The exit status of a recipe's module."""
    return cli.run(recipe.app, list(map(str, arguments)), recipe.__name__.rpartition(".")[2])


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def losses(folder):
    """The logged losses of a training."""
    history = json.loads((Path(folder) / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]
