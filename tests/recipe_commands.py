"""Running the command of a measuring recipe in this process, and reading its CSV file."""

import csv
import json
import shlex
from pathlib import Path

from hf_efficient_attn import cli


def run(recipe, *arguments):
    """The exit status of a recipe's module. A string may have several words, as in a shell."""
    words = [word for one in arguments for word in (shlex.split(one) if isinstance(one, str) else [str(one)])]
    return cli.run(recipe.app, words, recipe.__name__.rpartition(".")[2])


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def losses(folder):
    """The logged losses of a training."""
    history = json.loads((Path(folder) / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]
