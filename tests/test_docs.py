"""README and the documentation: length, links, commands, code, and that the generated pages follow from the code.

test_guides.py runs the guides. Sphinx, which .ci/run calls, builds the pages and runs their code.
"""

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

import hf_efficient_attn as hea
from broken_methods import broken
from hf_efficient_attn import cli
from test_guides import blocks_of, check_options, commands_of, help_of_command
from tiny_models import tiny_class, tiny_config, tiny_model

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
# Written by people; the pages about methods and commands are written by docs/_ext/reference.py.
PAGES = [README, *(ROOT / name / "README.md" for name in ("recipes", "model_cards")), *sorted(DOCS.glob("*.md"))]
PAGES += sorted((DOCS / "guides").glob("*.md"))
PAGES += [path for path in sorted((DOCS / "reference").glob("*.md")) if path.name != "commands.md"]


@pytest.fixture(scope="module")
def reference():
    """The extension of Sphinx that writes pages from the code."""
    sys.path.insert(0, str(DOCS / "_ext"))
    yield importlib.import_module("reference")
    sys.path.remove(str(DOCS / "_ext"))


@pytest.fixture(scope="module")
def refusals(reference):
    return reference.refusals()


each_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())


def test_readme_is_short():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 170
    assert len(re.findall(r"[A-Za-z][\w'-]*", text)) <= 1500
    first_screen = text.splitlines()[:30]
    assert any(line.startswith("| you have | use | expect |") for line in first_screen)


def headings(path: Path) -> set[str]:
    """The anchors of a Markdown page."""
    titles = re.findall(r"^#+ +(.+)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


@each_page
def test_links_lead_somewhere(path):
    text = without_blocks(path.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        page = (path.parent / file).resolve() if file else path
        generated = page.parent.name == "methods" or page.name == "commands.md"
        assert page.exists() or generated, f"{path.name} links to {target}"
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


@pytest.mark.filterwarnings("ignore:at 300 tokens")
def test_code_of_readme_runs(tmp_path, monkeypatch):
    """With tiny models in folders that have the names of the models on the Hub."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    for folder, family, changes in (
        ("bert-base-uncased", "bert", {"num_hidden_layers": 6}),
        ("google/vit-base-patch16-224", "vit", {}),
        ("gpt2", "gpt2", {}),
    ):
        tiny_class(family, head=True)(tiny_config(family, **changes)).save_pretrained(folder)
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


def test_a_new_method_gets_its_page(reference, tmp_path):
    with broken("correct"):
        reference.write_pages(tmp_path)
        page = (tmp_path / "methods" / "correct.md").read_text(encoding="utf-8")
        index = (tmp_path / "methods" / "index.md").read_text(encoding="utf-8")
    assert page.startswith("# correct: `correct`")
    assert "| `columns` | `8` | integer, at least 1 | Budget. |" in page
    assert "autofunction:: hf_efficient_attn.functional.correct_attention" in page
    assert "| [`correct`](correct.md) |" in index
    reference.write_pages(tmp_path)
    assert {path.stem for path in (tmp_path / "methods").glob("*.md")} == {*hea.available_methods(), "index"}


def test_the_command_reference_is_complete(reference):
    page = reference.commands_page()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    listed = re.findall(r"^ {2}(\w+) {2,}", help_of_command(cli.app, []), re.M)
    assert {"convert", "benchmark", "push"} <= set(sections) == set(listed)
    for name, text in sections.items():
        options = set(re.findall(r"--[a-z][\w-]*", help_of_command(cli.app, [name]))) - {"--help"}
        assert options, name
        assert all(each in text for each in options), (name, options)


def test_messages_are_listed_as_they_are_raised(refusals):
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
    patterns = [re.compile(as_pattern(refusal.message), re.S) for refusal in refusals]
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
