"""The folder of tiny data and models that the commands of tiny_recipes.py name."""

import pytest

import tiny_recipes


@pytest.fixture(scope="session")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    tiny_recipes.make(folder)
    return folder
