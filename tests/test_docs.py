"""README and the documentation: length, links, commands and code, and that generated pages follow from the code.

Every block of code of the guides runs, and prints what the page says. Blocks of Python run one after the other in a
namespace of the page. If a block of text follows, it is the expected output, in which "..." stands for anything. Blocks
of commands run as well, except for those that install packages, use the network, or train or measure for minutes; of
the latter two the options are checked. The models that a page names are folders in the working directory: the
pretrained MiniLM, and tiny random models. Sphinx, which .ci/run calls, builds the pages and runs their code.
"""

import contextlib
import doctest
import functools
import importlib
import io
import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, ViTImageProcessorPil

import hf_efficient_attn as hea
import promises
from attack_cases import PROMISES, attack
from broken_methods import broken
from each import refuses
from hf_efficient_attn import cli
from hf_efficient_attn.integration.cache import cache_argument
from instances import Instance, unregister
from tiny_models import tiny_class, tiny_config, tiny_model

ROOT = Path(__file__).resolve().parents[1]
README, DOCS, GUIDES = ROOT / "README.md", ROOT / "docs", ROOT / "docs" / "guides"
# Written by people; docs/_ext/reference.py writes the pages about methods and commands, and some parts of these.
PAGES = [README, *(ROOT / name / "README.md" for name in ("recipes", "model_cards")), *sorted(DOCS.glob("*.md"))]
PAGES += sorted(GUIDES.glob("*.md"))
# How to add a method, a kernel and a model.
CONTRIBUTING = DOCS / "contributing"
TUTORIALS = sorted(CONTRIBUTING.glob("add_*.md"))
PAGES += TUTORIALS
PAGES += [path for path in sorted((DOCS / "reference").glob("*.md")) if path.name != "commands.md"]
each_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
# Commands that take minutes and have tests of their own; here their options are checked.
MEASURING = ("analyze", "benchmark", "demo")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture(scope="module")
def reference():
    """The extension of Sphinx, and script, that writes pages from the code."""
    sys.path.insert(0, str(DOCS / "_ext"))
    yield importlib.import_module("reference")
    sys.path.remove(str(DOCS / "_ext"))


class Block(NamedTuple):
    """A fenced block of a page: its language, its text, its first line, and the output that follows it."""

    language: str
    text: str
    line: int
    output: str | None


def blocks_of(text: str) -> list[Block]:
    found = re.finditer(r"^```([\w{}]*)[^\n]*\n(.*?)^```$\n?(?:\n```text\n(.*?)^```$)?", text, re.M | re.S)
    return [Block(match[1], match[2], text[: match.start()].count("\n") + 2, match[3]) for match in found]


def commands_of(block: Block) -> list[str]:
    lines = block.text.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def help_of(run: Callable[[list[str]], int], words: list[str]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            status = run([*words, "--help"])
        except SystemExit as stopped:
            status = stopped.code
    assert status == 0, words
    return printed.getvalue()


def help_of_command(words: list[str], app=cli.app) -> str:
    return help_of(functools.partial(cli.run, app, name="command"), words)


def help_for(words: list[str]) -> str:
    """The help text of a command; fails if there is none."""
    if words[0] == "hf-efficient-attn":
        return help_of_command(words[1:2])
    if words[1] != "-m":
        return help_of(importlib.import_module(words[1].removesuffix(".py").replace("/", ".")).run, [])
    # A module of recipes: one on Trainer, or one with one or several commands.
    module = importlib.import_module(f"{words[2]}.__main__" if words[2] == "recipes.experiments" else words[2])
    command = [word for word in words[3:4] if not word.startswith("-") and word.islower()]
    return help_of_command(command, module.app) if hasattr(module, "app") else help_of(module.run, [])


def check_options(words: list[str], page: str) -> None:
    """Every option of a command is in its help text."""
    known = help_for(words)
    for word in words[2:]:
        if re.match(r"--?[a-z]", word):
            assert re.search(rf"(?<![\w-]){word}\b", known), f"{page}: no option {word} in: {shlex.join(words)}"


def test_readme_is_short():
    text = README.read_text(encoding="utf-8")
    methods = re.findall(r"^\| `\w+` \|.*$", text, re.M)  # a row of each method
    assert len(text.splitlines()) - len(methods) <= 152
    assert len(re.findall(r"[A-Za-z][\w'-]*", text)) <= 1500
    assert any(line.startswith("| you have | use | expect |") for line in text.splitlines()[:30])


def headings(path: Path) -> set[str]:
    """The anchors of a Markdown page."""
    titles = re.findall(r"^#+ +(.+)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


@each_page
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(path.read_text(encoding="utf-8"))):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        page = (path.parent / file).resolve() if file else path
        assert page.exists(), f"{path.name} links to {target}"
        assert not anchor or anchor in headings(page), f"{path.name} links to {target}"


def commands_in(path: Path) -> list[list[str]]:
    """The words of every command of this package that a page shows, in blocks and in running text."""
    text = path.read_text(encoding="utf-8")
    lines = [command for block in blocks_of(text) if block.language == "bash" for command in commands_of(block)]
    lines += re.findall(r"^ {4}((?:python|hf-).*)$", re.sub(r"\\\n\s+", " ", text), re.M)
    lines += re.findall(r"`((?:hf-efficient-attn|python) [^`\n]+)`", without_blocks(text))
    commands = [shlex.split(part, comments=True) for line in lines for part in line.split(" && ")]
    ours = re.compile(r"hf-efficient-attn \S|python (recipes/|-m recipes\.)")
    return [words for words in commands if ours.match(" ".join(words))]


@each_page
def test_commands_exist_with_their_options(path):
    for words in commands_in(path):
        check_options(words, path.name)
    if path == README:
        assert ["hf-efficient-attn", "push", "OUT", "ORG/NAME"] in commands_in(path), "commands are found"


def save_models(*models: tuple[str, str, dict]) -> None:
    """Save tiny models into folders that have the names of models on the Hub."""
    torch.manual_seed(0)
    for folder, family, changes in models:
        tiny_class(family, head=True)(tiny_config(family, **changes)).save_pretrained(folder)


@pytest.mark.filterwarnings("ignore:at 300 tokens")
def test_code_of_readme_runs(tmp_path, monkeypatch):
    """With tiny models in folders that have the names of the models on the Hub."""
    monkeypatch.chdir(tmp_path)
    vit = ("google/vit-base-patch16-224", "vit", {})
    save_models(("bert-base-uncased", "bert", {"num_hidden_layers": 6}), vit, ("gpt2", "gpt2", {}))
    batches = [torch.randint(5, 50, (1, 300))]
    query, key, value = torch.randn(3, 1, 2, 700, 16)
    names = {"batches": batches, "query": query, "key": key, "value": value}
    names["mask"] = torch.ones(1, 700, dtype=torch.bool)
    blocks = [block.text for block in blocks_of(README.read_text(encoding="utf-8")) if block.language == "python"]
    assert len(blocks) >= 3
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["model"].config._attn_implementation == "auto"
    assert names["out"].shape == query.shape
    restored, original = names["bert"].eval(), AutoModel.from_pretrained("bert-base-uncased").eval()
    torch.testing.assert_close(restored(batches[0][:, :50])[0], original(batches[0][:, :50])[0], rtol=0, atol=0)


def test_public_names_are_documented():
    text = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    generated = {hea.method_info(name).config_class.__name__ for name in hea.available_methods()}
    modules = {"analysis", "functional", "integration", "kernel", "methods", "models"}
    for name in set(hea.__all__) - generated - modules - {"__version__"}:
        assert re.search(rf":: hf_efficient_attn\.([\w.]+\.)?{name}$", text, re.M), name
    for module in ("analysis", "kernel"):
        page = (DOCS / "reference" / f"{module}.md").read_text(encoding="utf-8")
        assert f"automodule:: hf_efficient_attn.{module}" in page
    for name in hea.analysis.__all__:
        assert f":: {name}\n" in (DOCS / "reference" / "analysis.md").read_text(encoding="utf-8"), name


# The guides


def run(block: Block, page: str, namespace: dict) -> None:
    """Run a block, and compare what it prints with what the page says."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if block.language == "python":
            # Pages have the name that the newest Transformers takes.
            text = block.text.replace("cache=cache", f"{cache_argument()}=cache")
            # Compiled with its place in the page, so that a failure names the line.
            exec(compile("\n" * (block.line - 1) + text, f"{page}.md", "exec"), namespace)
        elif block.language == "bash":
            for command in commands_of(block):
                run_command(command, page)
    if block.output is not None:
        where = f"{page}.md, line {block.line}\nexpected:\n{block.output}\nprinted:\n{printed.getvalue()}"
        assert doctest.OutputChecker().check_output(block.output, printed.getvalue(), FLAGS), where


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


@pytest.fixture
def models(tmp_path, monkeypatch, minilm, example):
    """A working directory with the models that the pages name, and a text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copy(GUIDES / "random_keys.py", tmp_path)
    Path("sentence-transformers").mkdir()
    shutil.copytree(minilm, "sentence-transformers/all-MiniLM-L6-v2")
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    sizes = {"vocab_size": len(tokenizer)}
    save_models(
        ("gpt2", "gpt2", {"n_positions": 1024, **sizes, "n_layer": 4}),
        ("bert-base-uncased", "bert", sizes),
        ("google/vit-base-patch16-224", "vit", {"image_size": 224, "patch_size": 16}),
    )
    for folder in ("gpt2", "bert-base-uncased"):
        tokenizer.save_pretrained(folder)
    ViTImageProcessorPil().save_pretrained("google/vit-base-patch16-224")
    Path("book.txt").write_text(" ".join(f"Sentence {i} of a book about the number {i * i}." for i in range(3000)))
    Path("inside").mkdir()
    calibrated = hea.EfficientAttentionConfig("kdeformer", {"num_samples": 64}, [1, 2]).to_dict()
    Path("inside/analysis.json").write_text(json.dumps({"calibrated": calibrated}))


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", [*sorted(GUIDES.glob("*.md")), *TUTORIALS], ids=lambda path: path.stem)
def test_every_block_of_a_guide_runs(path, models):
    blocks, namespace = blocks_of(path.read_text(encoding="utf-8")), {"__name__": path.stem}
    assert blocks
    for block in blocks:
        if path not in TUTORIALS or block.language == "python":  # their commands are those of developers
            run(block, path.stem, namespace)


@pytest.mark.parametrize("path", sorted((DOCS / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(path):
    """The build of the documentation executes them, so that a page shows what today's code prints."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code and notebook["cells"][0]["source"][0].startswith("# ")
    for cell in code:
        assert not cell["outputs"] and cell["execution_count"] is None
        compile("".join(cell["source"]), path.name, "exec")


@pytest.fixture
def example(monkeypatch):
    """The example of a method in a file of its own, and the template of one in the package, which can be imported."""
    monkeypatch.syspath_prepend(str(GUIDES))
    monkeypatch.syspath_prepend(str(CONTRIBUTING))
    yield
    for name in ("random_keys", "new_method"):
        if sys.modules.pop(name, None) is not None:
            unregister(name)


@pytest.mark.parametrize("name", ["random_keys", "new_method"])
def test_the_examples_of_a_method_keep_the_promises(name, example):
    """The checks that the page names are a selection; here are all."""
    if name in hea.available_methods():
        pytest.skip(f"the package has a method named {name}")
    importlib.import_module(name)
    row = Instance(name, {"num_samples": 24}, limit="exact", random=name == "random_keys")
    assert row.config().exact_length == 24
    for promise in PROMISES:
        if row.info.causal or promise not in ("future", "length", "last_queries", "state"):
            attack(promise, row, 4)
    promises.check_converges(row, False)


# The words of a page about commands. Versions of typer write types, defaults and ranges differently.
WORDS = re.compile(r"\[[^][]*\](?!\()|--?[a-z][\w-]*|\b[a-z]+\b")


def words_of(text: str) -> list[str]:
    text = re.sub(r"^```text.*?^```", "", text, flags=re.M | re.S)
    return [word for word in WORDS.findall(text) if not word.startswith("[")]


def test_committed_pages_follow_from_the_code(reference):
    pages = reference.pages(DOCS)
    assert {"kdeformer.md", "index.md", "commands.md", "troubleshooting.md", "your_own_method.md"} <= {
        path.name for path in pages
    }
    for path, text in pages.items():
        committed = path.read_text(encoding="utf-8") if path.exists() else ""
        same = words_of(committed) == words_of(text) if path.name == "commands.md" else committed == text
        assert same, f"{path.relative_to(ROOT)} is out of date: run python docs/_ext/reference.py"
    assert set((DOCS / "reference" / "methods").glob("*.md")) <= set(pages)


def test_every_refusal_is_on_a_page(reference, tmp_path):
    page, found = tmp_path / "page.md", reference.refusals()
    page.write_text("<!-- refusals\nkernel/*\ncli/*\n-->\nold\n<!-- end -->\nmore\n", encoding="utf-8")
    text = reference.filled(page, found, seen := set())
    assert "old" not in text and text.endswith("<!-- end -->\nmore\n") and "- --device \\<name>: PyTorch cannot" in text
    assert {module.split("/")[0] for module in seen} == {"kernel", "cli"}
    refuses(r"on no page: .*integration/inputs", reference.pages, tmp_path, error=ValueError)
    page.write_text("<!-- refusals nothing -->\n<!-- end -->\n", encoding="utf-8")
    refuses("no module nothing", reference.pages, tmp_path, error=ValueError)


def test_a_new_method_gets_its_page(reference, tmp_path):
    methods = tmp_path / "reference" / "methods"
    with broken("correct"):
        reference.write_pages(tmp_path)
        page = (methods / "correct.md").read_text(encoding="utf-8")
        index = (methods / "index.md").read_text(encoding="utf-8")
    assert page.startswith("# correct: `correct`")
    assert "| `columns` | `8` | integer, at least 1 | Budget. |" in page
    assert "autofunction:: hf_efficient_attn.functional.correct_attention" in page
    assert "| [`correct`](correct.md) |" in index
    reference.write_pages(tmp_path)
    assert {path.stem for path in methods.glob("*.md")} == {*hea.available_methods(), "index"}


def test_the_command_reference_is_complete(reference):
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", reference.commands_page(), re.M | re.S))
    listed = re.findall(r"^ {2}(\w+) {2,}", help_of_command([]), re.M)
    assert {"convert", "benchmark", "push"} <= set(sections) == set(listed)
    for name, text in sections.items():
        options = set(re.findall(r"--[a-z][\w-]*", help_of_command([name]))) - {"--help"}
        assert options, name
        assert all(each in text for each in options), (name, options)


def test_messages_are_listed_as_they_are_raised(reference):
    query = torch.randn(1, 2, 5, 4)
    bert, switched = tiny_model("bert"), tiny_model("bert", "kdeformer")
    calls = [
        lambda: hea.convert(bert, "kdefromer"),
        lambda: hea.convert(bert, "kdeformer", layers=[99]),
        lambda: hea.convert(bert, "sdpa", layers=[0]),
        lambda: hea.extend_positions(bert, 1),
        lambda: hea.KDEformerConfig(num_samples=-1),
        lambda: hea.attention("reformer", query, query, query, is_causal=True),
        lambda: hea.attention("kdeformer", query, query, query, attention_mask=torch.ones(1, 1, 5, 5).bool()),
        lambda: hea.calibrate(bert, [], max_error=0.1),
        lambda: switched(torch.ones(1, 5, dtype=torch.long), output_attentions=True),
        lambda: hea.UptrainingSchedule([]),
    ]
    patterns = [re.compile(as_pattern(refusal.message), re.S) for refusal in reference.refusals()]
    for call in calls:
        with pytest.raises(hea.UnsupportedAttentionError) as raised:
            call()
        assert any(pattern.search(str(raised.value)) for pattern in patterns), raised.value
    assert not any(pattern.search("nothing of this kind is refused") for pattern in patterns)


def as_pattern(message: str) -> str:
    """A listed message as a regular expression, in which <name> stands for anything."""
    alternatives = [re.split(r"<[^<>]*>", part) for part in message.split(" / ")]
    return "|".join(".*".join(map(re.escape, parts)) for parts in alternatives)


def test_the_changelog_has_the_version():
    text = (DOCS / "changelog.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (\d+\.\d+\.\d+) \(\d{4}-\d{2}-\d{2}\)$", text, re.M)
    assert versions[0] == hea.__version__
    assert versions == sorted(versions, key=lambda v: tuple(map(int, v.split("."))), reverse=True)
