"""The option --import: a method of a user's own file works in every command, and needs the file when it is loaded."""

import pathlib
import sys

import pytest
import torch
import typer
from transformers import AutoModel

import hf_efficient_attn as hea
from helpers.commands import refused, run_json, shown
from hf_efficient_attn.cli.common import app
from instances import unregister
from tiny_models import output, tiny_batch

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "guides" / "random_keys.py"
GROUP = typer.main.get_command(app)
COMMANDS = sorted(GROUP.commands)


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    """Forget the methods and modules that a test imports."""
    modules, methods = set(sys.modules), set(hea.available_methods())
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in set(hea.available_methods()) - methods:
        unregister(name)
    for name in set(sys.modules) - modules:
        if not name.startswith(("torch.", "transformers.", "hf_efficient_attn.")):
            del sys.modules[name]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_imports_the_file_first(name, capsys, tmp_path):
    needed = {
        "info": "random_keys", "export-kernel": "random_keys -o y", "convert": "x -o y", "push": "x a/b",
        "distill": "x --data y -o z --method random_keys", "benchmark": "x", "analyze": "x --data y",
    }.get(name, "").split()  # fmt: skip
    (option,) = [parameter for parameter in GROUP.commands[name].params if "--import" in parameter.opts]
    assert option.multiple and option.metavar == "FILE" and "method of your own" in option.help
    (tmp_path / "own.py").write_text("raise ValueError('reached')")
    assert "ValueError in line 1: reached" in refused(capsys, name, *needed, "--import", tmp_path / "own.py")


def test_a_method_of_ones_own_in_the_commands(made, text, tmp_path, capsys):
    assert "unknown attention method 'random_keys'" in refused(capsys, "info", "random_keys")
    own = ("--import", EXAMPLE)
    about = shown(capsys, "info", "random_keys", *own).out
    assert {"config class: RandomKeysConfig", "module: random_keys"} <= set(about.splitlines())
    assert "random_keys" in [entry["name"] for entry in run_json(capsys, "methods", *own)]
    options = ["--length", "60", "--methods", "random_keys", "--budgets", "16", "--max-error", "9", "--allow-pickle"]
    words = run_json(capsys, "analyze", made("bert"), "--data", text, *options, *own)["command"].split()
    assert words[-4:-2] == ["--allow-pickle", f"--import={EXAMPLE}"]
    out, small = tmp_path / "out", ("--set", "num_samples=16")
    done = run_json(capsys, "convert", made("bert"), "--method", "random_keys", *small, "-o", out, *own)
    assert "import random_keys" in done["load"]
    assert "The file `random_keys.py` registers it" in (out / "README.md").read_text()
    batch = tiny_batch("bert", length=60)
    model = AutoModel.from_pretrained(out)
    assert model.config._attn_implementation == "random_keys"
    expected = hea.convert(AutoModel.from_pretrained(made("bert")), "random_keys", num_samples=16)
    assert torch.equal(output(model, batch), output(expected, batch))
    plan = run_json(capsys, "push", out, "me/mine", *own)
    assert any("readers need random_keys.py" in problem for problem in plan["card_problems"])
    unregister("random_keys")
    error = refused(capsys, "push", out, "me/mine")
    assert "unknown attention method 'random_keys'" in error and "--import FILE" in error


def test_files_are_repeatable_and_imported_once(tmp_path, capsys):
    source = EXAMPLE.read_text()
    for name in ("one_method", "two_method"):
        own = source.replace("random_keys", name).replace("RandomKeys", name.title().replace("_", ""))
        (tmp_path / f"{name}.py").write_text(f"import helper_of_mine\n{own}")
    (tmp_path / "helper_of_mine.py").write_text("")
    files = ("--import", tmp_path / "one_method.py", "--import", tmp_path / "two_method.py")
    for _ in range(2):
        listed = [entry["name"] for entry in run_json(capsys, "methods", *files)]
        assert {"one_method", "two_method"} <= set(listed)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.py", None, "give an existing Python file"),
        ("method.txt", "", "give an existing Python file"),
        ("my-method.py", "", "a name that Python can import, such as my_method.py"),
        ("random.py", "", "another module has the name 'random': rename the file"),
        ("nothing_at_all.py", "x = 1", "it registers no method: it must call hea.register_method"),
        ("no_syntax.py", "def f(:", "it cannot be imported, because of SyntaxError: invalid syntax"),
        ("no_name.py", "\nx = y", "because of NameError in line 2: name 'y' is not defined"),
        ("no_package.py", "import nothing_like_it", "because of ModuleNotFoundError in line 1"),
        ("no_name.py", "import hf_efficient_attn as hea\nhea.method_info(3)", "UnsupportedAttentionError in line 2: "),
        ("taken.py", EXAMPLE.read_text().replace('"random_keys"', '"kdeformer"'), "kdeformer: a method of this name"),
    ],
)
def test_files_that_are_refused(name, content, message, tmp_path, capsys):
    if content is not None:
        (tmp_path / name).write_text(content)
    before, path = set(hea.available_methods()), list(sys.path)
    found = refused(capsys, "methods", "--import", tmp_path / name)
    assert found.startswith(f"error: --import {tmp_path / name}: ") and message in found
    assert set(hea.available_methods()) == before
    assert path[: len(path)] == sys.path[: len(path)]


def test_help_and_completion_import_nothing(tmp_path, capsys):
    (tmp_path / "own.py").write_text("raise ValueError")
    assert "--import FILE" in shown(capsys, "info", "--import", tmp_path / "own.py", "--help").out
