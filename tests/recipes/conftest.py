"""The folder of tiny data and models that the commands of tiny_recipes.py name, and the table of a command."""

import gc

import pytest

import tiny_recipes
from helpers import commands


@pytest.fixture(scope="session")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    tiny_recipes.make(folder)
    return folder


@pytest.fixture(autouse=True)
def without_old_garbage():
    """Accelerate collects garbage after a training, which takes longer than a tiny one if all modules are looked at."""
    gc.freeze()


@pytest.fixture
def table(tmp_path, capsys):
    """Runs a measuring command: the rows of its CSV file, and what it prints."""

    def measured(recipe, *words, status=0):
        path = tmp_path / "table.csv"
        assert commands.run(recipe, *words, "--csv", path) == status
        return commands.read_csv(path), capsys.readouterr().out

    return measured
