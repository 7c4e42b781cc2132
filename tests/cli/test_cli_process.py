"""The process of the command: what it imports, how it ends on Ctrl-C, completion, and what a terminal shows."""

import io
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

import hf_efficient_attn as hea
from commands import shown
from hf_efficient_attn import cli

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAME = "hf-efficient-attn"
COMMANDS = sorted(command.callback.__name__.replace("_", "-") for command in cli.app.registered_commands)
SLOW = {"torch", "transformers", "matplotlib", "numpy", "huggingface_hub"}


def run(line, **environment):
    environment = {"PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(line, capture_output=True, text=True, env={**os.environ, **environment})


def command(*arguments, options=(), **environment):
    """Run the command in a new process."""
    return run([sys.executable, *options, "-m", "hf_efficient_attn", *arguments], **environment)


def imported(done):
    """The top-level modules that a process imported, which it reports on stderr by `-X importtime`."""
    return {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}


# Imports.


HELP = """
import sys
from hf_efficient_attn.cli import app, run
for name in sys.argv[1:]:
    assert run(app, [*name.split(), "--help"], "hf-efficient-attn") == 0
print(*sorted({name.split(".")[0] for name in sys.modules} & set("torch transformers matplotlib numpy".split())))
"""


def test_help_does_not_import_pytorch(tmp_path):
    (tmp_path / NAME).write_text(HELP)  # as the script that pip installs
    done = run([sys.executable, str(tmp_path / NAME), "", *COMMANDS], COLUMNS="200")
    *shown, imports = done.stdout.splitlines()
    assert done.returncode == 0 and imports == "" and "--install-completion" in done.stdout, done.stderr
    assert sum(f"Example: {NAME}" in line for line in shown) == 1 + len(COMMANDS)
    assert max(map(len, shown)) <= 80


def test_methods_do_not_need_transformers():
    done = command("info", "linear", options=("-X", "importtime"))
    assert done.returncode == 0 and "Hyperparameters" in done.stdout
    assert "torch" in imported(done) and "transformers" not in imported(done)
    assert "torch._dynamo" not in done.stderr


@pytest.mark.parametrize(
    ("argv", "started_as", "expected"),
    [
        (["-m", "info"], ["python", "-m", "hf_efficient_attn", "info"], True),
        (["-m"], ["python", "-m", "hf_efficient_attn"], True),
        (["/bin/hf-efficient-attn", "info"], ["/bin/python", "/bin/hf-efficient-attn", "info"], True),
        (["-m", "hf_efficient_attn"], ["python", "-m", "pytest", "hf_efficient_attn"], False),
        (["-m", "x"], ["python", "-m", "hf_efficient_attn.recipe", "x"], False),
        (["train.py", "hf-efficient-attn"], ["python", "train.py", "hf-efficient-attn"], False),
        (["/bin/hf-efficient-attn"], ["python", "-c", "from multiprocessing.spawn import spawn_main", "--x"], False),
        ([], [], False),
    ],
)
def test_only_the_command_waits_with_the_import(argv, started_as, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", started_as)
    assert hea._is_command() is expected


# Ctrl-C.


@pytest.mark.skipif(os.name == "nt", reason="signals and terminals of POSIX")
def test_a_terminal_shows_at_once_that_the_command_works():
    """The message appears before the imports; Ctrl-C then ends the command in one line."""
    ours, theirs = os.openpty()
    start = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    line = [sys.executable, "-c", start, sys.executable, "-m", "hf_efficient_attn", "methods"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=theirs, env=environment)
    os.close(theirs)
    told = b""
    while b"Loading PyTorch" not in told:
        told += os.read(ours, 1000)
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate()
    while b"interrupted" not in told:
        told += os.read(ours, 1000)
    os.close(ours)
    assert (running.returncode, out) == (130, b"")
    assert told.decode().split("\n")[-2].strip() == "error: interrupted"
    assert b"Traceback" not in told


# Help and completion.


@pytest.mark.parametrize("columns", ["40", "200"])
def test_summaries_are_complete(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    shown = CliRunner().invoke(cli.app, ["--help"]).stdout
    assert "..." not in shown.partition("Commands:")[2]
    for found in cli.app.registered_commands:
        summary = " ".join(found.callback.__doc__.split("\n\n")[0].split())
        assert f"{found.callback.__name__.replace('_', '-')} {summary}" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param(f"{NAME} ", COMMANDS, marks=pytest.mark.exhaustive),
        (f"{NAME} info ", list(hea.available_methods())),
        pytest.param(f"{NAME} convert x --meth", ["--method"], marks=pytest.mark.exhaustive),
        (f"{NAME} benchmark x --methods kdeformer,lon", ["kdeformer,longformer"]),
    ],
)
def test_completion(line, expected):
    words = len(shlex.split(line)) - (not line.endswith(" "))
    environment = {"_HF_EFFICIENT_ATTN_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(words)}
    done = command(options=("-X", "importtime"), **environment)
    assert sorted(done.stdout.split()) == sorted(expected)
    assert not imported(done) & SLOW


def test_completion_can_be_installed():
    script = command(_HF_EFFICIENT_ATTN_COMPLETE="source_bash").stdout
    assert "complete -o default -F" in script and NAME in script


# The terminal.


@pytest.mark.parametrize(
    ("settings", "is_bold"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_headers_are_bold_on_a_terminal_only(settings, is_bold, monkeypatch, capsys):
    for name, value in {"NO_COLOR": "", "TERM": "xterm", **settings}.items():
        monkeypatch.setenv(name, value)
    plain = shown(capsys, "info", "linear").out
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    assert cli.run(cli.app, ["info", "linear"], NAME) == 0
    assert "\x1b" not in plain and ("\x1b[1m" in terminal.getvalue()) is is_bold
    assert re.sub(r"\x1b\[\d+m", "", terminal.getvalue()) == plain


def test_tables(capsys):
    live = cli.LiveTable(("tokens", "attention", "seconds"), (4, 12, 8), left=("attention",))
    header = "| tokens | attention    |  seconds |\n|-------:|--------------|---------:|\n"
    assert capsys.readouterr().out == header
    live.add((512, "kdeformer", "0.120"))
    assert capsys.readouterr().out == "|    512 | kdeformer    |    0.120 |\n"
    live.add((8192, "a longer name", None))
    assert capsys.readouterr().out == "|   8192 | a longer name |          |\n"
    text = "| a   | bcd |\n|-----|-----|\n| xyz | 1   |\n|     | 22  |"
    assert cli.table(("a", "bcd"), [("xyz", 1), (None, 22)]) == text
    cli.print_table(("file", "size"), [("a", "1.2"), ("bc", None)])
    assert capsys.readouterr().out == "| file | size |\n|------|------|\n| a    | 1.2  |\n| bc   |      |\n"


def test_a_name_that_the_terminal_cannot_show(monkeypatch):
    application, shown = typer.Typer(), io.BytesIO()
    application.command()(lambda: typer.echo("a \u65e5 \udcff"))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    with pytest.raises(SystemExit) as end:
        cli.main_of(application, "x", [])
    assert end.value.code == 0 and shown.getvalue().startswith(b"a ")


@pytest.mark.exhaustive
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize(
    ("output", "status", "error"),
    [("> /dev/full", 1, "error: [Errno 28] No space left on device\n"), (">&-", 0, ""), ("| true", 0, "")],
)
def test_output_that_cannot_be_written(output, status, error):
    done = run(["sh", "-c", f"{sys.executable} -m hf_efficient_attn info linear {output}"])
    assert (done.returncode, done.stderr) == (status, error)
